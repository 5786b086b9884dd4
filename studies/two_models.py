"""What separates a base model from its fine-tunings, and two uses of it: ranks for LoRA, and blocks that a linear map replaces.

    python studies/over_training.py train FOLDER
    python studies/two_models.py FOLDER/step1500

The character model of ``over_training.py`` is fine-tuned to English prose, fully and by LoRA. LoRA is trained with the same
rank everywhere, and with ranks that keep an equal share of the full change of each layer, or of the gradient's spectrum after a
few batches; the share is the one that gives as many weights. Then each block is replaced by the best affine map from its input
to its output: the predicted order, by the share of its update that the map misses, beside the loss that results.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fine_tuning_alarm import texts
from grokking_alarm import spearman
from over_training import draw, encode, fit, held_out_loss
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2LMHeadModel

import gramscope as gs

RANK, STEPS, BATCH, RATE, LORA_RATE, SEEDS = 4, 300, 8, 1e-3, 1e-2, 3
TRAINED = ["c_attn", "c_proj", "c_fc"]


def main(base: Path) -> None:
    """Print everything."""
    warnings.simplefilter("ignore")
    tokens = encode(texts()["prose"])
    cut = len(tokens) * 9 // 10
    train, held_out = tokens[:cut], tokens[cut:]
    start = GPT2LMHeadModel.from_pretrained(base).eval()
    batches = [draw(train, torch.Generator().manual_seed(s)) for s in range(4)]
    full = copy.deepcopy(start)
    fit(full, train, STEPS, RATE, 0, batch=BATCH)
    full.eval()
    found = gs.compare(start, full, batches)
    print(
        f"held-out loss: base {held_out_loss(start, held_out):.3f}, fine-tuned fully {held_out_loss(full, held_out):.3f}"
    )
    print(found.by_block("change", "rank_90", "agop_cosine", "virtual_share"))

    gradients = gs.collect(start, batches, features=False, covariance=False, progress=False)
    inside = [name for name in found.spectra if name.startswith("transformer.h.")]
    spectra = {
        "the full change": {name: found.spectra[name] for name in inside},
        "the gradient": {name: torch.linalg.svdvals(gradients[name].gradient) for name in inside},
    }
    sizes = {name: sum(start.get_submodule(name).weight.shape) for name in inside}
    patterns = {"uniform": dict.fromkeys(inside, RANK)}
    patterns |= {name: pattern_of_size(values, sizes, RANK * sum(sizes.values())) for name, values in spectra.items()}
    for name, pattern in patterns.items():
        losses = []
        for seed in range(SEEDS):
            model = lora(start, pattern, seed)
            fit(model, train, STEPS, LORA_RATE, seed, 0.0, BATCH)
            losses.append(held_out_loss(model, held_out))
        weights = sum(rank * sizes[layer] for layer, rank in pattern.items())
        values = torch.tensor(losses, dtype=torch.float64)
        print(f"LoRA, ranks by {name} ({min(pattern.values())} to {max(pattern.values())}), {weights:,} weights: "
              f"held-out loss {values.mean():.4f} ± {values.std() / SEEDS**0.5:.4f}")  # fmt: skip
        if name == "uniform":
            change = gs.compare(start, model.eval())
            ranks = [int(change[layer]["rank_90"] or 0) for layer in inside]
            print(f"  its own change: directions with 90 % of it {min(ranks)} to {max(ranks)}, of at most {RANK}")
    for title, model in (("base", start), ("fine-tuned fully", full)):
        replace_each(title, model, batches, held_out)


def pattern_of_size(spectra: Mapping[str, Tensor], sizes: Mapping[str, int], size: int) -> dict[str, int]:
    """The ranks of equal share whose adapters have at most ``size`` weights together, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        share = (low + high) / 2
        ranks = gs.rank_pattern(spectra, share)
        low, high = (share, high) if sum(r * sizes[name] for name, r in ranks.items()) <= size else (low, share)
    return gs.rank_pattern(spectra, low)


def lora(start: GPT2LMHeadModel, ranks: Mapping[str, int], seed: int) -> Any:
    """The model with adapters of these ranks, all scaled alike."""
    torch.manual_seed(seed)
    alphas = {name: 2 * rank for name, rank in ranks.items()}
    config = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=TRAINED,
        rank_pattern=dict(ranks),
        alpha_pattern=alphas,
        fan_in_fan_out=True,
    )
    return get_peft_model(copy.deepcopy(start), config)


def replace_each(title: str, model: GPT2LMHeadModel, batches: Any, held_out: Tensor) -> None:
    """Predicted and real effect of replacing each block by an affine map."""
    fits = gs.linear_blocks(model, batches)
    losses = {}
    for name, linear in fits.items():
        with gs.replaced(model, {name: linear}):
            losses[name] = held_out_loss(model, held_out)
    print(f"{title}: held-out loss {held_out_loss(model, held_out):.3f}; each block replaced by an affine map:")
    for name, linear in sorted(fits.items(), key=lambda item: -item[1].r2_update):
        print(f"  {name:16} R² {linear.r2:.3f}, of the update {linear.r2_update:.3f}, loss {losses[name]:.3f}")
    for label, values in (
        ("R² of the update", [f.r2_update for f in fits.values()]),
        ("R²", [f.r2 for f in fits.values()]),
    ):
        rank = spearman([(-value, losses[name]) for value, name in zip(values, fits, strict=True)])
        print(f"  Spearman's ρ of 1 − {label} and the loss: {rank:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    main(parser.parse_args().base)
