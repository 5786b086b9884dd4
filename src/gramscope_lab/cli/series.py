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
    folder: Annotated[
        Path, typer.Argument(help="A run, or a folder of checkpoints of transformers: step1000/, checkpoint-500/ …")
    ],
    text: Annotated[Path | None, typer.Option(help="Text, cut into sequences by the model's own tokenizer.")] = None,
    data: Annotated[Path | None, typer.Option(help="Tokens: .npz with input_ids.")] = None,
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
    trust: Annotated[
        bool, typer.Option("--trust", help="Let a run's configuration name a function of your own as the net.")
    ] = False,
) -> None:
    """Measure every checkpoint of a training run, store each table as it comes, and draw them over the steps.

    A series that was interrupted goes on where it stopped.

    [bold]Examples[/bold]

      gramscope series runs/pythia-70m --text book.txt

      gramscope series checkpoints --data tokens.npz --measures nfa,target_linearity --parallel 4

      gramscope series runs/x
    """
    from gramscope.instruments.checkpoints import find_checkpoints, open_model
    from gramscope.instruments.series import memory_of, series
    from gramscope_lab.data.sequences import check_tokenizers, read_sequences
    from gramscope_lab.training.config import MeasureTable
    from gramscope_lab.training.layer_measures import run_series

    if text is None:
        refuse_unused(context, ["length"], "without --text")
    store = folder / "series" if out is None else out
    names = [name.strip() for name in measures.split(",")] if measures else []
    if (folder / "config.toml").is_file():
        refuse_unused(
            context, ["text", "data", "batch", "parallel"], "of a run, which is measured on its own data, here"
        )
        table = MeasureTable(samples=samples, layers=layers or "", names=tuple(names))
        tables = run_series(folder, table, trust=trust, out=store)
    else:
        found = find_checkpoints(folder)
        paths = [item.path for item in found]
        check_tokenizers(text, paths[0], paths[1:])
        batches = read_sequences(text, data, paths[0], samples=samples, length=length, batch=batch)
        chosen = {name: value for name, value in (("measures", names), ("layers", layers)) if value}
        messages().print(
            f"{len(found)} checkpoints, {sum(len(b['input_ids']) for b in batches)} sequences, "
            f"{memory_of(open_model(paths[0], empty=True), measuring=chosen)}; tables go to {store}"
        )
        pairs = [(item.step, item.path) for item in found]
        with _executor(parallel, len(pairs)) as executor:
            tables = series(pairs, batches, out=store, measuring=chosen, executor=executor)
    tables.save(store / "series-all.json")
    tables.report(store / "series.html", f"{folder.resolve().name} over {len(tables)} checkpoints")
    typer.echo(str(tables))
    typer.echo(f"report: {store / 'series.html'}")


def _executor(parallel: str, count: int) -> AbstractContextManager[Executor | None]:
    """Where checkpoints are measured: here one after the other, in processes, or on a Ray cluster."""
    from gramscope_lab.training.train import Parallel

    return nullcontext() if parallel == "1" else Parallel(parallel).executor(count, "cpu")()
