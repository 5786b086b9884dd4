"""``gramscope series``."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from gramscope_lab.cli.console import messages
from gramscope_lab.cli.flags import refuse_unused


def command(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder of checkpoints of transformers: step1000/, checkpoint-500/ …")],
    text: Annotated[Path | None, typer.Option(help="Text, cut into sequences by the model's own tokenizer.")] = None,
    data: Annotated[Path | None, typer.Option(help=".npz file with input_ids (labels: the next tokens).")] = None,
    measures: Annotated[
        str | None, typer.Option(help="Measures or groups with commas between.", show_default=False)
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Glob of the layers.", show_default=False)] = None,
    samples: Annotated[int, typer.Option(help="Sequences to measure on.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens of a sequence of --text.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 4,
    parallel: Annotated[
        str, typer.Option(help="Checkpoints at the same time: a number of processes, or ray[:ADDRESS].")
    ] = "1",
    out: Annotated[Path | None, typer.Option(help="Where tables are stored (default: FOLDER/series).")] = None,
) -> None:
    """Measure every checkpoint of a training run, store each table as it comes, and draw them over the steps.

    A series that was interrupted goes on where it stopped.

    [bold]Examples[/bold]

      gramscope series runs/pythia-70m --text book.txt

      gramscope series checkpoints --data tokens.npz --measures nfa,target_linearity --parallel 4
    """
    from gramscope.instruments.checkpoints import find_checkpoints
    from gramscope.instruments.series import series
    from gramscope.measures.plots import write_report
    from gramscope_lab.data.sequences import read_sequences

    if text is None:
        refuse_unused(context, ["length"], "without --text")
    found = find_checkpoints(folder)
    batches = read_sequences(text, data, found[0].path, samples=samples, length=length, batch=batch)
    store = folder / "series" if out is None else out
    chosen: dict[str, str | list[str]] = (
        {} if measures is None else {"measures": [name.strip() for name in measures.split(",")]}
    )
    if layers is not None:
        chosen["layers"] = layers
    messages().print(
        f"{len(found)} checkpoints, {sum(len(b['input_ids']) for b in batches)} sequences; tables go to {store}"
    )
    pairs = [(item.step, item.path) for item in found]
    with _executor(parallel, len(pairs)) as executor:
        tables = series(pairs, batches, out=store, measuring=chosen, executor=executor)
    tables.save(store / "series-all.json")
    write_report(tables, store / "series.html", f"{folder.name} over {len(tables)} checkpoints")
    typer.echo(str(tables))
    typer.echo(f"report: {store / 'series.html'}")


def _executor(parallel: str, count: int) -> AbstractContextManager[Executor | None]:
    """Where checkpoints are measured: here one after the other, in processes, or on a Ray cluster."""
    from gramscope_lab.training.train import Parallel

    return nullcontext() if parallel == "1" else Parallel(parallel).executor(count, "cpu")()
