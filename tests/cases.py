"""Networks of many shapes with inputs and per-sample losses, in float64: what every measure is checked on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import gramscope as gs
from gramscope.errors import InputError
from gramscope.linalg.moments import Moments
from gramscope.linalg.psd import EPS
from gramscope.linalg.ridge import fit_moments
from gramscope.measures.linearity import checked


@dataclass(frozen=True)
class Case:
    """A model, its inputs (float64), targets, and the loss of every sample, ``[n]``."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Tensor]
    outputs: int = 3

    def make(self, seed: int = 0, n: int = 6) -> tuple[nn.Module, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(seed)
            model = self.build()
            x = self.inputs(generator)
            if any(nn.parameter.is_lazy(p) for p in model.parameters()):
                model(x.float())
        model = model.double()
        # Floor of randomness: biases and norms away from their symmetric defaults.
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        y = torch.arange(x.shape[0]) % self.outputs
        return model.eval(), x, y


def sample_losses(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of every sample; sequence outputs ``[n, t, c]`` are averaged over ``t`` first."""
    return F.cross_entropy(output.mean(1) if output.dim() == 3 else output, y, reduction="none")


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randoms(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Standard normal tensors of these shapes in float64, drawn one after the other."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes]


def split(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Batches ``(x, y)`` of ``size`` samples."""
    return list(zip(x.split(size), y.split(size), strict=True))


class Around(nn.Module):
    """Modules by name, in float64, and a forward given as a function ``(self, *inputs)``."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part.double())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def pooled(d: int, k: int, c: int) -> Around:
    """A classifier of sequences: ``e`` sees tokens, the readout ``r`` their mean."""
    return Around(lambda m, x: m.r(torch.tanh(m.e(x)).mean(1)), e=nn.Linear(d, k), r=nn.Linear(k, c))


def twin_of(model: nn.Module) -> nn.Module:
    """A copy of the model with other weights."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for index, p in enumerate(twin.parameters()):
            p.add_(0.3 * torch.sin(torch.arange(p.numel(), dtype=p.dtype) + index).reshape(p.shape))
    return twin


def captured(model: nn.Module, x: Tensor, y: Tensor, layers: Any = None) -> gs.Tape:
    """A capture of one forward and the backward of every sample's loss."""
    with gs.capture(model, layers) as tape:
        tape.backward(sample_losses(model(x), y))
    return tape


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, monitor: gs.Monitor | None = None) -> None:
    """Gradient descent on the mean cross-entropy, watched by a monitor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if monitor is not None:
            monitor.step()


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def refused(
    call: Callable[..., Any], *args: Any, match: str, error: type[Exception] = InputError, **kwargs: Any
) -> None:
    """Assert that ``call(*args, **kwargs)`` raises ``error`` with a message that ``match`` describes."""
    with pytest.raises(error, match=match):
        call(*args, **kwargs)


def target_linearity_from_moments(m: Moments, ridge: float = 0.0, intercept: bool = False, eps: float = EPS) -> Tensor:
    """Target linearity from collected moments, as tables have it."""
    return checked(fit_moments(m, ridge, intercept, eps)).explained()


def close_to_autograd(tape: gs.Tape, total: Tensor) -> None:
    """Compare ``D`` of every layer with the gradient that autograd gives for its parameter."""
    assert len(tape) > 0
    for record in tape:
        (gradient,) = torch.autograd.grad(total, record.layer.parameter, retain_graph=True)
        close(record.D, record.layer.to_matrix(gradient))


class Repeated(nn.Module):
    """One layer used three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(x))
        return self.head(x)


class Tied(nn.Module):
    """Two layers that share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class LowRank(nn.Module):
    """A LoRA-like parametrisation ``W + A B``."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(out, 2))
        self.b = nn.Parameter(torch.randn(2, into))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU())
        self.head = nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x)


class TinyGPT(nn.Module):
    """A GPT-2-like net: transformers' Conv1D projections, causal attention, tied nothing, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.ln_1, self.ln_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.c_attn, self.c_proj = Conv1D(24, 8), Conv1D(8, 8)
        self.c_fc, self.c_out = Conv1D(16, 8), Conv1D(8, 16)
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).split(8, dim=2)
        heads = [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.c_proj(attended)
        x = x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))
        return self.head(x)


class Residual(nn.Module):
    """A ResNet-like block with strided, grouped and dilated convolutions and group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.conv1 = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=2, dilation=2)
        self.skip = nn.Conv2d(4, 4, 1, stride=2)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = self.conv2(F.relu(self.norm(self.conv1(x)))) + self.skip(x)
        return self.head(F.relu(y).mean((2, 3)))


class OwnForward(nn.Linear):
    """A Linear with a forward of its own around ``F.linear``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(F.linear(x, self.weight)) + self.bias


class FunctionsOfWeights(nn.Module):
    """Uses the weights of its parts without calling them, as Mamba does."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=2, groups=4)
        self.mix, self.step, self.head = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).mT
        weight = self.conv.weight.squeeze(1)
        x = F.silu(F.conv1d(x, weight.unsqueeze(1), self.conv.bias, padding=2, groups=4)[..., : x.shape[-1]])
        x = torch.tanh(x.mT @ self.mix.weight.T)
        return self.head(torch.tanh((self.step.weight @ x.mT).mT).mean(1))


class Recurrent(nn.Module):
    """A recurrent module over a sequence, and a readout of its last output."""

    def __init__(self, inner: nn.RNNBase) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(
            self.inner(x if self.inner.batch_first else x.transpose(0, 1))[0].mean(int(self.inner.batch_first))
        )


class Cells(nn.Module):
    """Cells of all kinds, called step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(3, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, a, b = None, None, None
        for t in range(x.shape[1]):
            state = self.lstm(x[:, t], state)
            a = self.gru(state[0], a)
            b = self.rnn(a, b)
        return self.head(b)


class Words(nn.Module):
    """Embeds indices, which are the sign patterns of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 5)
        self.up, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        index = ((x > 0) * torch.tensor([1, 2, 4])).sum(-1)
        return self.head(torch.tanh(self.up(self.embed(index))).mean(1))


def mixture() -> nn.Module:
    """Two of the six experts of a fused layer for each token, chosen by a router."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(hidden_size=5, intermediate_size=4, num_local_experts=6, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    return Around(
        lambda m, x: m.head(m.block(m.enter(x)).mean(1)), enter=nn.Linear(5, 5), block=block, head=nn.Linear(5, 3)
    )


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    inner = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    adapted = get_peft_model(inner, LoraConfig(r=2, target_modules=["0"]))  # type: ignore[arg-type]
    return adapted.base_model.model.requires_grad_()  # type: ignore[no-any-return]


def _vectors(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(6, *shape, generator=generator, dtype=torch.float64)


def _convolution(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


def _parametrised(kind: str) -> nn.Module:
    inner = nn.Linear(5, 4)
    if kind == "weight_norm":
        parametrizations.weight_norm(inner)
    elif kind == "spectral_norm":
        parametrizations.spectral_norm(inner)
    else:
        parametrize.register_parametrization(inner, "weight", LowRank(4, 5))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(4, 3))


def _encoder(batch_first: bool = True, **options: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first, **options)  # type: ignore[arg-type]
    return nn.Sequential(layer, nn.Linear(8, 3))


CASES = [
    Case(
        "mlp",
        lambda: nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)),
        _vectors(5),
    ),
    Case("tokens", lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), _vectors(4, 5)),
    Case("single", lambda: nn.Linear(5, 3), _vectors(5)),
    Case("conv1d", lambda: _convolution(nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2)), _vectors(3, 9)),
    Case("conv2d", lambda: _convolution(nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0))), _vectors(2, 6, 5)),
    Case("conv2d-same", lambda: _convolution(nn.Conv2d(2, 3, (4, 3), padding="same")), _vectors(2, 5, 6)),
    Case(
        "conv2d-circular",
        lambda: _convolution(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")),
        _vectors(2, 5, 5),
    ),
    Case(
        "conv2d-reflect-same",
        lambda: _convolution(nn.Conv2d(2, 3, 4, padding="same", padding_mode="reflect")),
        _vectors(2, 6, 6),
    ),
    Case("conv2d-grouped", lambda: _convolution(nn.Conv2d(4, 6, 3, groups=2, padding=1)), _vectors(4, 4, 4)),
    Case("conv2d-depthwise", lambda: _convolution(nn.Conv2d(3, 6, 3, groups=3)), _vectors(3, 5, 5)),
    Case("conv3d", lambda: _convolution(nn.Conv3d(2, 3, (2, 3, 2), padding=(0, 1, 0))), _vectors(2, 3, 4, 3)),
    Case("residual", Residual, _vectors(2, 6, 6)),
    Case("encoder", _encoder, _vectors(4, 8)),
    Case("encoder-norm-first", lambda: _encoder(norm_first=True, bias=False), _vectors(4, 8)),
    Case("gpt", TinyGPT, _vectors(4, 8)),
    Case("repeated", Repeated, _vectors(5)),
    Case("tied", Tied, _vectors(5)),
    Case("weight-norm", lambda: _parametrised("weight_norm"), _vectors(5)),
    Case("spectral-norm", lambda: _parametrised("spectral_norm"), _vectors(5)),
    Case("low-rank", lambda: _parametrised("low_rank"), _vectors(5)),
    Case("own-forward", lambda: nn.Sequential(OwnForward(5, 4), OwnForward(4, 3)), _vectors(5)),
    Case("functions-of-weights", FunctionsOfWeights, _vectors(4, 5)),
    Case("lstm", lambda: Recurrent(nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)), _vectors(4, 3)),
    Case("gru", lambda: Recurrent(nn.GRU(3, 4, bias=False)), _vectors(4, 3)),
    Case("rnn", lambda: Recurrent(nn.RNN(3, 4, 2, nonlinearity="relu")), _vectors(4, 3)),
    Case("cells", Cells, _vectors(3, 3)),
    Case("embedding", Words, _vectors(4, 3)),
    Case("experts", mixture, _vectors(4, 5)),
    Case("lora", _lora, _vectors(5)),
    Case(
        "conv-transpose",
        lambda: _convolution(nn.ConvTranspose2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), output_padding=(1, 0))),
        _vectors(2, 3, 4),
    ),
    Case(
        "conv-transpose-grouped",
        lambda: _convolution(nn.ConvTranspose1d(4, 6, 3, 2, groups=2, dilation=2)),
        _vectors(4, 5),
    ),
    Case("checkpoint", lambda: Checkpointed(False), _vectors(4)),
]
BY_NAME = {case.name: case for case in CASES}
#: cases with layers that no module hook sees; their own tests compare them with networks of ``nn.Linear``
HIDDEN = ("own-forward", "functions-of-weights", "lstm", "gru", "rnn", "cells", "experts")
SEEN = [case for case in CASES if case.name not in HIDDEN]


def close_to_twin(model: nn.Module, twin: nn.Module, names: dict[str, str | list[str]], x: Tensor, y: Tensor) -> None:
    """Compare D, Σ and ``ΣJᵀJ`` of layers with those of a network of ``nn.Linear`` that computes the same.

    ``names`` gives for each layer its twin, or one twin for each matrix of a stack.
    """
    close(model(x), twin(x))
    mine, theirs = (gs.collect(m, [(x, y)], sample_losses, jacobians=True) for m in (model, twin))
    for name, other in names.items():
        for field in ("weight", "D", "Sigma", "JtJ"):
            found = getattr(mine[name], field)
            many = [other] if isinstance(other, str) else other
            expected = torch.stack([getattr(theirs[o], field) for o in many])
            assert found.norm() > 0
            close(found, expected[0] if isinstance(other, str) else expected)
