"""``gramscope theory``: predictions of early feature learning beside what sampled nets do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gramscope.errors import InputError
from gramscope_lab.cli.console import show
from gramscope_lab.cli.flags import numbers, refuse_unused

if TYPE_CHECKING:
    from torch import Tensor


def command(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Option(help="isotropic, decay, alignment-reversing, or an .npz file with x (n × d) and y (n)."),
    ] = "isotropic",
    widths: Annotated[str, typer.Option(help="Hidden widths, comma separated.")] = "32,128,512",
    activation: Annotated[str, typer.Option(help="quadratic, relu, erf or linear.")] = "quadratic",
    depth: Annotated[int, typer.Option(help="Number of hidden layers.", min=1)] = 1,
    target: Annotated[str, typer.Option(help="low-rank (chain monomial, rank 5) or high-rank.")] = "low-rank",
    alpha: Annotated[float, typer.Option(help="Decay of the spectrum 1/(1+k^alpha), for --data decay.")] = 1.0,
    balance: Annotated[float, typer.Option(help="Balance in (0, 1], for --data alignment-reversing.")] = 0.9,
    inverse: Annotated[str, typer.Option(help="pseudo or literal, for --data alignment-reversing.")] = "pseudo",
    scale: Annotated[float, typer.Option(help="Unit of its first part, for --data alignment-reversing.")] = 1.0,
    n: Annotated[int, typer.Option(help="Samples.", min=1)] = 128,
    d: Annotated[int, typer.Option(help="Input dimension.", min=1)] = 128,
    nets: Annotated[int, typer.Option(help="Sampled nets per width.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Seed of data and nets.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """Predict where the centred NFA of the first layer starts, and compare with sampled nets.

    [bold]Examples[/bold]

      gramscope theory --data decay --alpha 0.5 --widths 128,1024

      gramscope theory --data mine.npz --activation relu --depth 2 --json
    """
    import torch

    from gramscope_lab.data.synthetic import alignment_reversing
    from gramscope_lab.experiments.nfa_theory import compare_cnfa, polynomial_task

    generator = torch.Generator().manual_seed(seed)
    from_file = data.endswith(".npz")
    reversing = [] if data == "alignment-reversing" else ["balance", "inverse", "scale"]
    polynomial = [] if data == "decay" else ["alpha"] if data == "isotropic" else ["alpha", "target"]
    refuse_unused(context, [*reversing, *polynomial, *(["n", "d"] if from_file else [])], f"with --data {data}")
    if from_file:
        x, y = _load(Path(data))
    elif data == "alignment-reversing":
        x, y = alignment_reversing(n, d, balance, generator, inverse=inverse, scale=scale)  # type: ignore[arg-type]
    elif data in ("isotropic", "decay"):
        x, y = polynomial_task(n, d, alpha if data == "decay" else None, target, generator)
    else:
        raise InputError(f"--data {data}: give isotropic, decay, alignment-reversing, or an .npz file")
    records = compare_cnfa(
        x, y, numbers("--widths", widths, int, 1), activation=activation, depth=depth, nets=nets, generator=generator
    )
    title = f"ρ(ẆᵀẆ, ẆᵀKẆ), {data}, {activation}, {depth} hidden, n={x.shape[0]}, d={x.shape[1]}"
    show(title, records, as_json)


def _load(path: Path) -> tuple[Tensor, Tensor]:
    import numpy as np
    import torch

    if not path.is_file():
        raise InputError(f"--data {path}: no such file")
    with np.load(path, allow_pickle=False) as archive:
        arrays = {key: torch.from_numpy(archive[key]) for key in archive.files}
    if not {"x", "y"} <= set(arrays):
        raise InputError(f"--data {path} holds {sorted(arrays)}; x [n, d] and y [n] are needed")
    return arrays["x"].double(), arrays["y"].double().squeeze()
