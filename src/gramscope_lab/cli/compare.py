"""``gramscope compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gramscope_lab.cli.console import messages
from gramscope_lab.cli.flags import refuse_unused


def command(
    context: typer.Context,
    base: Annotated[Path, typer.Argument(help="Folder of a model of transformers.")],
    tuned: Annotated[Path, typer.Argument(help="Folder of the other one, or of a LoRA adapter.")],
    text: Annotated[Path | None, typer.Option(help="Text, cut into sequences by the base's own tokenizer.")] = None,
    data: Annotated[Path | None, typer.Option(help="Tokens: .npz with input_ids.")] = None,
    layers: Annotated[str | None, typer.Option(help="Glob of the layers.", show_default=False)] = None,
    samples: Annotated[int, typer.Option(help="Sequences to measure on.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens of a sequence of --text.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Store the table here (.json or .parquet).")] = None,
) -> None:
    """Compare two models layer by layer: weights alone, or with a text or arrays also what they compute.

    [bold]Examples[/bold]

      gramscope compare gpt2 gpt2-tuned

      gramscope compare gpt2 my-lora-adapter --text book.txt --out change.json
    """
    from gramscope.instruments.checkpoints import open_model
    from gramscope.instruments.compare import compare
    from gramscope_lab.data.sequences import check_tokenizers, read_sequences

    if text is None:
        refuse_unused(context, ["length"] if data else ["length", "samples", "batch"], "without --text")
    one, other = open_model(base), open_model(tuned, base)
    batches = None
    if text is not None or data is not None:
        check_tokenizers(text, base, [tuned])
        batches = read_sequences(text, data, base, samples=samples, length=length, batch=batch)
    table = compare(one, other, batches, layers=layers)
    typer.echo(str(table))
    if out is not None:
        table.save(out)
        messages().print(f"table: {out}")
