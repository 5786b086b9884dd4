"""Nets whose tables are stored: each a model, its data, a loss and the options of :func:`gramscope.measure`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 13
ATTENTION = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
TOKENS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True)
class Net:
    """What is measured: ``build`` makes the model, ``data`` its batches from a generator."""

    build: Callable[[], nn.Module]
    data: Callable[[torch.Generator, torch.dtype], list[Any]]
    loss: Any = None
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)


def vectors(d: int, c: int = 3, n: int = 24) -> Callable[..., list[Any]]:
    """Three batches of standard normal vectors with labels."""

    def data(generator: torch.Generator, dtype: torch.dtype) -> list[Any]:
        x = torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)
        y = torch.randint(c, (n,), generator=generator)
        return list(zip(x.tensor_split(3), y.tensor_split(3), strict=True))

    return data


def images(n: int = 18, size: int = 6) -> Callable[..., list[Any]]:
    """Batches of images with three classes."""

    def data(generator: torch.Generator, dtype: torch.dtype) -> list[Any]:
        x = torch.randn(n, 3, size, size, generator=generator, dtype=torch.float64).to(dtype)
        return list(zip(x.split(7), torch.randint(3, (n,), generator=generator).split(7), strict=True))

    return data


def regression(generator: torch.Generator, dtype: torch.dtype) -> list[Any]:
    """Vectors with two real targets."""
    x = torch.randn(40, 6, generator=generator, dtype=torch.float64).to(dtype)
    return list(zip(x.split(15), torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1).split(15), strict=True))


def sequences(n: int = 12, length: int = 5) -> Callable[..., list[Any]]:
    """Batches of vectors at the positions of a sequence, with one label for each sequence."""

    def data(generator: torch.Generator, dtype: torch.dtype) -> list[Any]:
        x = torch.randn(n, length, 4, generator=generator, dtype=torch.float64).to(dtype)
        return list(zip(x.split(5), torch.randint(3, (n,), generator=generator).split(5), strict=True))

    return data


def tokens(kind: str, padded: bool) -> Callable[..., list[Any]]:
    """Batches of dictionaries as tokenizers give them; ``kind``: next words, one label, or a translation."""

    def data(generator: torch.Generator, dtype: torch.dtype) -> list[Any]:
        batches = []
        for _ in range(3):
            words = torch.randint(3, WORDS, (4, 6), generator=generator)
            mask = torch.ones_like(words)
            if padded:
                for row, length in enumerate((6, 4, 3, 5)):
                    words[row, length:], mask[row, length:] = 0, 0
            batch = {"input_ids": words, "attention_mask": mask}
            if kind == "next":
                batch["labels"] = words.masked_fill(mask == 0, -100)
            elif kind == "label":
                batch["labels"] = torch.randint(3, (4,), generator=generator)
            else:
                batch["labels"] = torch.randint(3, WORDS, (4, 3), generator=generator)
            batches.append(batch)
        return batches

    return data


def mlp(d: int = 6, width: int = 7, c: int = 3) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(nn.Linear(d, width), nn.GELU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, c))


def cnn() -> nn.Module:
    """Convolutions, one of them in groups, and a readout."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2), nn.BatchNorm2d(4), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


class Residual(nn.Module):
    """A small residual net."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = (nn.Conv2d(c, 5, 3, padding=1) for c in (3, 5, 5))
        self.norm, self.head = nn.BatchNorm2d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head((x + self.two(F.relu(self.norm(self.one(x))))).mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM and a readout of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def hugging_face(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers made from a configuration."""

    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, name)(getattr(transformers, config)(**options))

    return build


def gpt2() -> nn.Module:
    """A GPT-2 of two blocks."""
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, **TOKENS}
    return hugging_face("GPT2LMHeadModel", "GPT2Config", **sizes)()


def lora() -> nn.Module:
    """The same with LoRA on its attention."""
    peft = pytest.importorskip("peft")
    found = peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return found


LLAMA = {**ATTENTION, **TOKENS, "intermediate_size": 12, "num_key_value_heads": 1, "max_position_embeddings": 16}
BERT = {**ATTENTION, "vocab_size": WORDS, "intermediate_size": 12, "max_position_embeddings": 12, "num_labels": 3}
T5 = {
    "vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0,
}  # fmt: skip
MAMBA = {"vocab_size": WORDS, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 1, "time_step_rank": 2}
VIT = {**ATTENTION, "intermediate_size": 12, "image_size": 6, "patch_size": 3, "num_labels": 3}

CROSS = nn.CrossEntropyLoss()
IMAGES = hugging_face("ViTForImageClassification", "ViTConfig", **VIT)
EXPERTS = {**LLAMA, "num_local_experts": 3, "experts_implementation": "eager"}
NETS: dict[str, Net] = {
    "mlp": Net(mlp, vectors(6), CROSS),
    "mlp float32": Net(mlp, vectors(6), CROSS, torch.float32),
    "mlp few samples": Net(lambda: mlp(600, 40), vectors(600), CROSS),
    "mlp estimated": Net(lambda: mlp(160, 96), vectors(160, n=60), CROSS, options={"memory": 2**17}),
    "regression": Net(lambda: mlp(6, 7, 2), regression, nn.MSELoss(), options={"intercept": True, "ridge": 0.1}),
    "cnn": Net(cnn, images(), CROSS),
    "residual net": Net(Residual, images(), CROSS, torch.float32),
    "lstm": Net(Recurrent, sequences(), CROSS),
    "vit": Net(IMAGES, images(), lambda out, y: CROSS(out, y), options={"reduction": "mean"}),
    "gpt2": Net(gpt2, tokens("next", padded=False)),
    "gpt2 padded": Net(gpt2, tokens("next", padded=True)),
    "llama": Net(hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA), tokens("next", padded=True)),
    "mixtral": Net(hugging_face("MixtralForCausalLM", "MixtralConfig", **EXPERTS), tokens("next", padded=False)),
    "bert": Net(hugging_face("BertForSequenceClassification", "BertConfig", **BERT), tokens("label", padded=True)),
    "t5": Net(hugging_face("T5ForConditionalGeneration", "T5Config", **T5), tokens("translation", padded=True)),
    "mamba": Net(hugging_face("MambaForCausalLM", "MambaConfig", **MAMBA), tokens("next", padded=False)),
    "lora": Net(lora, tokens("next", padded=False)),
}


def made(net: Net) -> tuple[nn.Module, nn.Module, list[Any], list[Any]]:
    """A model, the network it is compared with, its data and held-out data, the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = net.build().to(net.dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # away from the initialisation, where many numbers are tiny
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.2 * noise.to(parameter.dtype))
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.sub_(0.1 * noise.to(parameter.dtype))
    return model, reference, net.data(generator, net.dtype), net.data(generator, net.dtype)
