"""Measures of one large layer within a fixed memory budget, with time, peak memory and standard errors.

python studies/large_layers.py --outputs 4096 --inputs 11008 --memory 256 --samples 512
python studies/large_layers.py --outputs 1024 --inputs 1024 --memory 4 --dense

The layer has random weights with a few learned directions; ReLU and a readout of 10 classes follow. Where --samples times
--inputs exceeds a sixteenth of the budget the features fit neither as rows nor as a d×d matrix, and target linearity reads the
data repeatedly. Peak memory is what the process holds at most beyond the model, the reference and the data. ``--dense``
measures with a budget of 8 GiB too, and prints by how many standard errors the two differ.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

import gramscope as gs
from benchmarks.timing import peak_extra_bytes

MEASURES = [
    "weight_norm", "effective_rank", "stable_rank", "gradient_norm", "vcs_cosine", "vcs_null", "vcs_residual",
    "vcs_gram_cosine", "nfa", "nfa_null", "agop_trace", "kernel_spread", "fact", "crh_inputs_gw", "spectral_weight",
    "target_linearity", "nc1", "surrogate", "surrogate_linearized",
]  # fmt: skip
MOVED = ["weight_change", "nfa_centered", "nfa_double", "nfa_ptk", "double_ratio"]


def main() -> None:
    """Measure, and print a line for each measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("outputs", 4096), ("inputs", 11008), ("samples", 512), ("batch", 64), ("memory", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--reference", action="store_true", help="centred forms too, against the weights before learning"
    )
    parser.add_argument("--dense", action="store_true", help="the exact values beside the estimates")
    given = parser.parse_args()
    model, reference, x, y = problem(given.outputs, given.inputs, given.samples)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=given.batch)
    options: dict[str, Any] = {"measures": [*MEASURES, *(MOVED if given.reference else [])], "layers": ["0"]}
    options |= {"progress": False, "reference": reference if given.reference else None}

    def run(memory: int) -> Any:
        return gs.measure(model, loader, nn.CrossEntropyLoss(), memory=memory, **options)

    found: list[Any] = []
    start = time.perf_counter()
    peak = peak_extra_bytes(lambda: found.append(run(given.memory * 2**20)))
    seconds = time.perf_counter() - start
    weight = model[0].weight
    print(
        f"{given.outputs}×{given.inputs}, {given.samples} samples, memory={given.memory} MiB: {seconds:.1f} s, peak "
        f"+{peak / 1e6:,.0f} MB; the weight has {weight.numel() * weight.element_size() / 1e6:,.0f} MB",
        flush=True,
    )
    dense = run(2**33)["0"] if given.dense else {}
    for name, value in found[0]["0"].items():
        error = found[0].errors.get("0", {}).get(name)
        text = f"{name:22} {value if value is None else format(value, '.6g'):>12}"
        text += "" if error is None else f" ± {error:.2g}"
        if name in dense and dense[name] is not None and value is not None:
            text += f"   dense {dense[name]:.6g}"
            text += f", off by {abs(value - dense[name]) / error:.1f} standard errors" if error else ""
        note = found[0].notes.get(f"0.{name}")
        print(text + (f"   ({note.text})" if note and value is None else ""), flush=True)
    spectrum = gs.large_weight_spectrum(weight, top=4)
    pairs = zip(spectrum.values.tolist(), spectrum.errors.tolist(), strict=True)
    print("largest singular values", ", ".join(f"{value:.4f} ± {error:.1g}" for value, error in pairs))


def problem(k: int, d: int, samples: int) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A network, the same before four directions were added to its first weight, samples and labels."""
    torch.manual_seed(0)
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(d, k, bias=False), nn.ReLU(), nn.Linear(k, 10)))
    with torch.no_grad():
        left, right = torch.randn(k, 4), torch.randn(4, d)
        models[0][0].weight.addmm_(left, right, alpha=3 / (k * d) ** 0.5)
        models[0][2].weight.add_(0.1 * torch.randn(10, k) / k**0.5)
    x = torch.randn(samples, d)
    return models[0], models[1], x, (x[:, :10] + 0.5 * torch.randn(samples, 10)).argmax(1)


if __name__ == "__main__":
    main()
