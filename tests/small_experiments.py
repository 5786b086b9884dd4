"""Settings of experiments that run in seconds, and those of a made-up one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DIGITS = {"data": ("digits",), "seeds": (0, 1), "epochs": 1.0}
VAE = {"data": ("digits",), "epochs": (2.0,), "betas": (0.1, 5.0), "hidden": (16,), "latent": 4, "every": 1.0}
GROKKING = {"weight_decays": (0.0, 1.0), "p": 7, "width": 8, "batch_size": 16, "epochs": 4.0, "every": 2.0}
CURVES = {"seeds": (0, 1), "scales": (0.01, 1.0), "n": 32, "d": 8, "width": 12, "steps": 20, "every": 10}
#: nfa-fig7 and 8 are nfa-fig2 on other inputs
SMALL: dict[str, dict[str, Any]] = {
    "gram-fig1": {"seeds": (0, 1), "n": 60, "width": 8, "epochs": 20, "every": 5, "frames": 3},
    "gram-fig2": {**DIGITS, "hidden": (8, 8), "lrs": (0.1, 0.01), "momenta": (0.9,)},
    "gram-fig4": {**DIGITS, "hidden": (8, 8), "lrs": (0.1, 0.01), "momenta": (0.9,), "epochs": 3.0, "samples": 300},
    "gram-fig9": {**DIGITS, "hidden": (4, 4), "lrs": (0.01,), "samples": 300, "seeds": (0,)},
    "gram-fig5": {**VAE, "pairs": 50},
    "gram-fig6": {**DIGITS, "channels": (4, 4, 4), "seeds": (0,)},
    "gram-fig8": {"seeds": (0,), "widths": (4, 16), "n": 40, "d": 5, "epochs": 20, "every": 10},
    "gram-fig10": VAE,
    "gram-fig12": {**DIGITS, "fractions": (0.0, 1.0), "hidden": (8, 8), "every": 1.0, "samples": 300, "seeds": (0,)},
    "gram-fig13": GROKKING,
    "gram-fig14": GROKKING,
    "vcl-fig1": {**DIGITS, "hidden": 8, "samples": 100, "every": 1.0},
    "vcl-fig2": {**DIGITS, "width": 8, "gammas": (1.0, 0.1), "lrs": (0.1,), "readout_lrs": (0.1,)},
    "vcl-poster": {
        **DIGITS, "nets": ("cnn", "deep", "linear"), "width": 8, "gammas": (0.1,), "lrs": (0.1,), "readout_lrs": (0.1,)
    },
    "nfa-fig1": {"seeds": (0, 1), "n": 64, "d": 8, "width": 16, "steps": 100, "corruptions": 2},
    "nfa-fig2": CURVES,
    "nfa-fig3": {"seeds": (0, 1), "size": 32, "balances": (0.25, 1.0), "nets": 3},
    "nfa-fig4": CURVES,
    "nfa-fig5": CURVES,
    "nfa-fig6": {"seeds": (0,), "n": 16, "d": 16, "widths": (16, 64), "alphas": (0.0, 1.0, 4.0), "nets": 2},
    "nfa-fig9": {"seeds": (0,), "samples": 40, "image_size": 12, "width": 8, "epochs": 2, "corruptions": 2},
}  # fmt: skip


@dataclass(frozen=True)
class MadeUpSettings:
    seeds: tuple[int, ...] = (0, 1)
    steps: int = 3
    rate: float = 0.5
