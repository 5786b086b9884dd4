"""``gramscope train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gramscope.errors import InputError
from gramscope_lab.cli.console import TerminalReporter, messages, print_json, print_table, without_empty
from gramscope_lab.cli.flags import Gpus, ParallelOption, read_config, takes_flags
from gramscope_lab.runs.files import free_path


@takes_flags
def command(
    config: Annotated[Path | None, typer.Argument(help="TOML configuration, or with --resume a run directory.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory (default: runs/DATA-MODEL-METHOD, numbered).", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a stopped run where it was saved.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace the run in the directory, with its figures; with --resume, take its lock over."
        ),
    ] = False,
    seeds: Annotated[str | None, typer.Option(help="How many seeds (5), or which (0,3,7).")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed, or the first of --seeds.")] = None,
    sweep: Annotated[
        list[str], typer.Option(help="Try several values: lr=0.1,0.01. Can be repeated.", show_default=False)
    ] = [],  # noqa: B006 - typer copies it
    set_: Annotated[
        list[str], typer.Option("--set", help="Any other key: data.seed=3. Can be repeated.", show_default=False)
    ] = [],  # noqa: B006
    trust: Annotated[
        bool, typer.Option("--trust", help="Let the file or the run name a function of your own as the net.")
    ] = False,
    parallel: ParallelOption = "auto",
    gpus: Gpus = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration as TOML and stop.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    **flags: Any,
) -> None:
    """Train a net, with any number of seeds and step sizes together.

    Options without a flag are taken from the TOML file, if one is given, else from the defaults.

    [bold]Examples[/bold]

      gramscope train --data digits --hidden 128 --method sgd --lr 0.1 --epochs 5

      gramscope train --data cifar10 --hidden 256 --method vcl --gamma 1 --epochs 2 --seeds 5 --out runs/x

      gramscope train --data mnist --sweep lr=0.1,0.05,0.01 --seeds 5 --measure-every 1

      gramscope train --method muon --print-config > muon.toml && gramscope train muon.toml

      gramscope train --resume runs/x

      gramscope train --data mnist --sweep lr=0.1,0.01 --seeds 5 --parallel ray:auto --gpus 0.25
    """
    given = [name for name, value in flags.items() if value is not None]
    if resume:
        out = out or config
        if given or set_ or sweep or seeds is not None or seed is not None:
            raise InputError("--resume takes the configuration stored in the run directory and no other options")
        if out is None:
            raise InputError("--resume: name the run directory, such as: gramscope train --resume runs/x")
        from gramscope_lab.training.train import Parallel, resume_run

        way = Parallel(parallel, gpus)
        trained = resume_run(out, reporter=TerminalReporter(), trust=trust, parallel=way, force=force)
    else:
        chosen = read_config(config, flags, set_, sweep, seeds, seed, trust=trust or print_config)
        if print_config:
            typer.echo(chosen.to_toml(), nl=False)
            return
        from gramscope_lab.training.train import Parallel, train

        way = Parallel(parallel, gpus)
        name = f"{Path(chosen.data.name).stem}-{chosen.model.name.split(':')[-1]}-{chosen.method.name}"
        out = out or free_path(Path("runs") / name)
        trained = train(chosen, out, force=force, reporter=TerminalReporter(), parallel=way)
    show_result(trained, out, json)


def show_result(trained: Any, out: Path, json: bool) -> None:
    """The last evaluation of every member."""
    keys = ("epoch", "batch_loss", "validation_accuracy", "test_loss", "test_accuracy", "seconds")
    rows = []
    for name, member in trained.members.items():
        end: dict[str, Any] = next((record for record in member.records if record["kind"] == "end"), {})
        values = {key: member.last(key) for key in keys}
        rows.append({"run": name, **{k: v for k, v in values.items() if v is not None}, "note": end.get("reason", "")})
    shown = without_empty(rows, "note")
    if json:
        print_json({"path": out, "execution": trained.execution, "runs": shown})
        return
    print_table("", shown)
    messages().print(f"records, checkpoints and configuration: {out}")
