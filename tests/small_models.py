"""Small models as people have them, their batches, padded and not, and what an oracle finds from single samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from single_samples import WHOLE, Oracle, Zeros, of_single_samples, zeros_added

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

WORDS, SAMPLES = 9, 12
LLAMA = {
    "vocab_size": WORDS, "hidden_size": 6, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 2, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BERT = {
    "vocab_size": WORDS, "hidden_size": 6, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 10,
    "max_position_embeddings": 16, "num_labels": 3,
}  # fmt: skip
ROTARY = ("Llama", "Mixtral", "LoRA")
CAUSAL = ("GPT-2", "Llama", "Mixtral", "Mamba", "LoRA")
#: left out: rows that serve all samples, and a weight that Mamba multiplies inside a larger function
LEFT_OUT = ("wpe", "position_embeddings", "relative_attention_bias", "dt_proj")
Batch = dict[str, Tensor]


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a skip; a class for each of 4 × 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 5, 3, padding=1, stride=2)
        self.up, self.out = nn.ConvTranspose2d(5, 3, 2, stride=2), nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.gelu(self.enter(x))
        second = F.gelu(self.up(F.gelu(self.down(first))))
        return self.out(torch.cat([first, second], 1))


class Tagger(nn.Module):
    """A recurrent net that knows no attention mask; it reads from left to right, so that pads on the right do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(WORDS, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.lstm(self.words(input_ids))[0])


def _causal(cls: str, **config: Any) -> nn.Module:
    return getattr(transformers, f"{cls}ForCausalLM")(getattr(transformers, f"{cls}Config")(**config))


def _adapted() -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(_causal("Llama", **LLAMA), config)


t = transformers
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=6, n_layer=2, n_head=3, bos_token_id=1, eos_token_id=2)
    ),
    "Llama": lambda: _causal("Llama", **LLAMA),
    "Mixtral": lambda: _causal("Mixtral", **LLAMA, num_local_experts=3),
    "Mamba": lambda: _causal("Mamba", vocab_size=WORDS, hidden_size=4, num_hidden_layers=2, state_size=3, conv_kernel=3),
    "LoRA": _adapted,
    "BERT, sequences": lambda: t.BertForSequenceClassification(t.BertConfig(**BERT)),
    "BERT, tokens": lambda: t.BertForTokenClassification(t.BertConfig(**BERT)),
    "BERT, masked": lambda: t.BertForMaskedLM(t.BertConfig(**BERT)),
    "T5": lambda: t.T5ForConditionalGeneration(
        t.T5Config(
            vocab_size=WORDS, d_model=6, d_kv=2, d_ff=10, num_layers=2, num_heads=3, decoder_start_token_id=0, bos_token_id=1
        )
    ),
    "LSTM": Tagger,
    "ViT": lambda: t.ViTForImageClassification(
        t.ViTConfig(
            hidden_size=6, num_hidden_layers=2, num_attention_heads=3, intermediate_size=10, image_size=4, patch_size=2,
            num_channels=2, num_labels=3,
        )
    ),
    "ResNet": lambda: t.ResNetForImageClassification(
        t.ResNetConfig(
            num_channels=2, embedding_size=4, hidden_sizes=[6, 8], depths=[1, 1], layer_type="basic", num_labels=3
        )
    ),
    "U-Net": UNet,
}  # fmt: skip
PADDINGS = {
    "GPT-2": "none right left", "Llama": "none right left", "Mixtral": "none right left", "Mamba": "none right left",
    "LoRA": "none right left", "BERT, sequences": "none right", "BERT, tokens": "none right left",
    "BERT, masked": "none right left", "T5": "none right", "LSTM": "none right",
}  # fmt: skip
CASES = [(name, padding) for name in MODELS for padding in PADDINGS.get(name, "none").split()]


@dataclass
class Subject:
    """A model with its samples, their labels ``(position, label)`` and what an oracle finds."""

    model: nn.Module
    samples: list[Batch]
    labels: list[list[tuple[int, int]]]
    oracle: Oracle


@cache
def subject(name: str) -> Subject:
    torch.manual_seed(5)
    model = MODELS[name]().double().eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
            tensor.add_(0.3 * torch.rand_like(tensor))  # away from the initialisation; batch norms get statistics
    samples, labels = _data(name)
    modules = {
        layer: module
        for layer, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d | nn.Embedding | t.pytorch_utils.Conv1D)
        or hasattr(module, "lora_A")
        if not layer.endswith(LEFT_OUT) and not any(part in layer for part in ("lora_", "base_layer"))
    }
    weights = {layer: _matrix(module) for layer, module in modules.items()}
    weights |= _other_weights(model)
    weights.pop("shared", None)  # T5 calls the embeddings of its encoder and decoder, which hold this weight

    def run(sample: Batch) -> tuple[Tensor, Zeros]:
        with zeros_added(modules) as zeros, _written_out(model, zeros):
            returned = model(**sample)
        scores = returned if isinstance(returned, Tensor) else returned.logits
        return (scores[0].flatten(1).T if name == "U-Net" else scores[0]), zeros

    return Subject(model, samples, labels, of_single_samples(run, samples, labels, weights, name == "U-Net"))


def _data(name: str) -> tuple[list[Batch], list[list[tuple[int, int]]]]:
    generator = torch.Generator().manual_seed(3)
    if name in ("ViT", "ResNet", "U-Net"):
        size = 8 if name == "ResNet" else 4
        images = torch.randn(SAMPLES, 2, size, size, generator=generator, dtype=torch.float64)
        key = "x" if name == "U-Net" else "pixel_values"
        places = range(16) if name == "U-Net" else [WHOLE]
        return [{key: image[None]} for image in images], [
            [(p, int(torch.randint(3, (), generator=generator))) for p in places] for _ in images
        ]
    texts = [torch.randint(3, WORDS, (3 + i % 3,), generator=generator) for i in range(SAMPLES)]
    samples = [{"input_ids": text[None]} for text in texts]
    if name == "BERT, sequences":
        return samples, [[(WHOLE, i % 3)] for i in range(SAMPLES)]
    if name == "T5":
        answers = [text.flip(0)[: 2 + i % 2] for i, text in enumerate(texts)]
        samples = [sample | {"labels": answer[None]} for sample, answer in zip(samples, answers, strict=True)]
        return samples, [list(enumerate(answer.tolist())) for answer in answers]
    if name.startswith("BERT") or name == "LSTM":
        count = WORDS if name == "BERT, masked" else 3
        found = [[(p, int(torch.randint(count, (), generator=generator))) for p in range(len(text))] for text in texts]
        return samples, [[pair for pair in part if pair[0] != i % 3] for i, part in enumerate(found)]  # one has none
    return samples, [list(enumerate(text[1:].tolist())) for text in texts]


def _matrix(module: Any) -> Tensor:
    """The weight of a module as ``[k, d]``."""
    if hasattr(module, "lora_A"):
        return module.base_layer.weight + module.get_delta_weight("default")
    if isinstance(module, nn.Embedding | t.pytorch_utils.Conv1D):
        return module.weight.T
    return module.weight.flatten(1).T if isinstance(module, nn.ConvTranspose2d) else module.weight.flatten(1)


def _other_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights that no module of their own applies."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.LSTM):
            found |= {f"{name}.{part}": getattr(module, part) for part in ("weight_ih_l0", "weight_hh_l0")}
        elif type(module).__name__ == "MixtralTopKRouter":
            found[name] = module.weight
        elif type(module).__name__ == "MixtralExperts":
            found |= {f"{name}.{part}": getattr(module, part) for part in ("gate_up_proj", "down_proj")}
        elif isinstance(module, nn.Conv1d):  # of each channel by itself
            found[name] = module.weight
    return found


def _written_out(model: nn.Module, zeros: Zeros) -> ExitStack:
    """The forward passes of such modules, with zeros added."""
    stack = ExitStack()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "LSTM":
            stack.enter_context(mock.patch.object(module, "forward", _lstm(module, name, zeros)))
        elif kind == "MixtralSparseMoeBlock":
            stack.enter_context(mock.patch.object(module, "forward", _experts(module, name, zeros)))
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv1d)}
    if layers:
        file = t.models.mamba.modeling_mamba
        stack.enter_context(mock.patch.object(file, "causal_conv1d_fn", _convolution(layers, zeros)))
    return stack


def _lstm(module: Any, name: str, zeros: Zeros) -> Callable[[Tensor], tuple[Tensor, None]]:
    def forward(x: Tensor) -> tuple[Tensor, None]:
        h = c = x.new_zeros(1, module.hidden_size)
        outputs = []
        for step in x.unbind(1):
            a = zeros.add(f"{name}.weight_ih_l0", step, step @ module.weight_ih_l0.T, lambda g: g)
            b = zeros.add(f"{name}.weight_hh_l0", h, h @ module.weight_hh_l0.T, lambda g: g)
            i, f, g, o = (a + b + module.bias_ih_l0 + module.bias_hh_l0).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1), None

    return forward


def _experts(block: Any, name: str, zeros: Zeros) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        scores = zeros.add(f"{name}.gate", x, x @ block.gate.weight.T, lambda g: g)
        shares, chosen = scores.float().softmax(-1).topk(block.gate.top_k, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for e in range(block.experts.num_experts):
            share = (shares * (chosen == e)).sum(-1, keepdim=True).to(x.dtype)
            inside = x * (share > 0)
            both = inside @ block.experts.gate_up_proj[e].T
            gate, up = zeros.add(f"{name}.experts.gate_up_proj", inside, both, lambda g: g, e).chunk(2, -1)
            h = F.silu(gate) * up * (share > 0)
            total = total + share * zeros.add(
                f"{name}.experts.down_proj", h, h @ block.experts.down_proj[e].T, lambda g: g, e
            )
        return total[None]

    return forward


def _convolution(layers: dict[str, nn.Conv1d], zeros: Zeros) -> Callable[..., Tensor]:
    """Mamba's convolution of each channel by itself, which sees the tokens before."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor, activation: str, **_: Any) -> Tensor:
        (name,) = (name for name, layer in layers.items() if layer.weight.data_ptr() == weight.data_ptr())
        size = weight.shape[-1]
        patches = F.pad(x, (size - 1, 0)).unfold(2, size, 1)[0]  # [channels, tokens, size]
        z = [
            zeros.add(name, h, (h * w).sum(-1), lambda g: g[:, None], channel)
            for channel, (h, w) in enumerate(zip(patches, weight, strict=True))
        ]
        return F.silu(torch.stack(z) + bias[:, None])[None]

    return forward


def batches(name: str, padding: str) -> list[Batch]:
    """The samples in two batches as a loader would give them, or one by one."""
    own = subject(name)
    parts = [range(i, i + 1) for i in range(SAMPLES)] if padding == "none" else [range(7), range(7, SAMPLES)]
    return [_batch(name, own, part, padding, more=2 * (i == 1)) for i, part in enumerate(parts)]


def _batch(name: str, own: Subject, part: range, padding: str, more: int) -> Batch:
    if "input_ids" not in own.samples[0]:
        key = next(iter(own.samples[0]))
        y = torch.tensor([[label for _, label in own.labels[i]] for i in part])
        return {
            key: torch.cat([own.samples[i][key] for i in part]),
            "labels": y.reshape(-1, 4, 4) if key == "x" else y[:, 0],
        }
    more = 0 if padding == "none" else more
    texts = [own.samples[i]["input_ids"][0] for i in part]
    batch = {"input_ids": _padded(texts, padding, more, 0)}
    batch["attention_mask"] = _padded([torch.ones_like(text) for text in texts], padding, more, 0)
    if padding == "left" and name not in CAUSAL[1:]:
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    if own.labels[0][0][0] == WHOLE:
        return batch | {"labels": torch.tensor([own.labels[i][0][1] for i in part])}
    if "labels" in own.samples[0]:
        return batch | {"labels": _padded([own.samples[i]["labels"][0] for i in part], padding, more, -100)}
    rows = []
    for text, pairs in zip(texts, (own.labels[i] for i in part), strict=True):
        causal = name in CAUSAL
        row = text.clone() if causal else torch.full_like(text, -100)
        for position, label in pairs:
            row[position + causal] = label
        rows.append(row)
    return batch | {"labels": _padded(rows, padding, more, -100)}


def _padded(rows: list[Tensor], side: str, more: int, fill: int) -> Tensor:
    length = max(map(len, rows)) + more
    sides = [((length - len(r), 0) if side == "left" else (0, length - len(r))) for r in rows]
    return torch.stack([F.pad(r, pads, value=fill) for r, pads in zip(rows, sides, strict=True)])
