"""``gs.estimate`` against the measurement that follows: seconds and peak memory of four kinds of models, all default measures.

OMP_NUM_THREADS=2 python studies/estimates.py [mlp cnn transformer llama]

Time is that of the second measurement, peak memory that of the first: bytes of the tensors that are alive.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gramscope as gs
from gramscope.instruments.live_bytes import LiveBytes
from gramscope_lab.nets import build

Case = tuple[nn.Module, Any, nn.Module | None]


def main() -> None:
    """Print a line for every model that is named, or for all."""
    for name in sys.argv[1:] or CASES:
        torch.manual_seed(0)
        model, loader, loss = CASES[name]()
        start = time.perf_counter()
        costs = gs.estimate(model, loader, loss)
        own = time.perf_counter() - start
        with LiveBytes() as live:
            gs.measure(model, loader, loss, progress=False)
        start = time.perf_counter()
        gs.measure(model, loader, loss, progress=False)
        seconds = time.perf_counter() - start
        print(
            f"{name:12} {sum(p.numel() for p in model.parameters()) / 1e6:5.1f}M parameters: estimated "
            f"{costs.total.seconds:6.2f} s and {costs.total.bytes / 1e6:6.0f} MB in "
            f"{own:4.1f} s; measured {seconds:6.2f} s and {live.peak / 1e6:6.0f} MB; ratios "
            f"{costs.total.seconds / seconds:.2f} and {costs.total.bytes / live.peak:.2f}",
            flush=True,
        )


def loader_of(x: Any, y: Any, batch: int) -> Any:
    """Batches of samples."""
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=batch)


def mlp() -> Case:
    """Wide layers, many samples."""
    x, y = torch.randn(4096, 3072), torch.randint(10, (4096,))
    return build("mlp", (3072,), 10, hidden=(1024, 1024, 512)), loader_of(x, y, 128), nn.CrossEntropyLoss()


def cnn() -> Case:
    """Few parameters, many sites."""
    x, y = torch.randn(512, 3, 32, 32), torch.randint(10, (512,))
    return build("cnn", (3, 32, 32), 10), loader_of(x, y, 64), nn.CrossEntropyLoss()


def transformer() -> Case:
    """An encoder that classifies sequences."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(500, 192)
            layer = nn.TransformerEncoderLayer(192, 6, 768, dropout=0.0, batch_first=True)
            self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.head = nn.Linear(192, 20)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.blocks(self.embed(tokens)).mean(1))
            return scores

    return Classifier(), loader_of(torch.randint(500, (128, 48)), torch.randint(20, (128,)), 16), nn.CrossEntropyLoss()


def llama() -> Case:
    """A language model of the Llama kind, with labels for every token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, max_position_embeddings=64))
    tokens = torch.randint(2000, (64, 64))
    return model, [{"input_ids": part, "labels": part} for part in tokens.split(8)], None


CASES: dict[str, Callable[[], Case]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "llama": llama}

if __name__ == "__main__":
    main()
