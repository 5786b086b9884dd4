"""Data, losses and models that do not fit get an error that says what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gramscope as gs
from gramscope.errors import GramscopeError, InputError
from gramscope.instruments.agop import dual_tangent_kernel

CE = nn.CrossEntropyLoss()
X, Y = torch.arange(24.0).reshape(6, 4).double() / 24, torch.arange(6) % 3


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("samples", [list(zip(X, Y, strict=True)), list(zip(X, Y.tolist(), strict=True))])
@pytest.mark.parametrize("loss", [CE, None])
def test_single_samples_are_no_batches(samples: list[Any], loss: Any) -> None:
    with pytest.raises(
        InputError, match=r"batch 0 has one number as its target.*DataLoader\(samples, batch_size=256\)"
    ):
        gs.measure(network(), samples, loss)
    loader = torch.utils.data.DataLoader(samples, batch_size=256)
    assert gs.collect(network(), loader, loss).n == 6


@pytest.mark.parametrize(
    ("model", "x"),
    [(network(), X[:, :3]), (network(), X[0, :3]), (nn.Conv2d(3, 2, 3).double(), torch.ones(2, 1, 5, 5).double())],
)
def test_inputs_of_another_width(model: nn.Module, x: Tensor) -> None:
    shape = ", ".join(map(str, x.shape))
    with pytest.raises(
        InputError, match=rf"cannot run on these inputs: .*the inputs have shape \({shape},?\); its first"
    ):
        gs.collect(model, x)


@pytest.mark.parametrize("memory", ["1GB", 1e9, None, 0])
def test_memory_is_a_number_of_bytes(memory: Any) -> None:
    for kernel in (gs.agop, dual_tangent_kernel):
        with pytest.raises(InputError, match="memory=.* positive whole number"):
            kernel(network(), X, memory=memory)  # type: ignore[operator]


def test_models_are_modules() -> None:
    def forward(x: Tensor) -> Tensor:
        return x

    for use in (gs.collect, gs.measure, gs.agop, gs.tangent_kernel, dual_tangent_kernel, gs.Monitor):
        with pytest.raises(GramscopeError, match=r"model is a function; give a torch.nn.Module"):
            use(forward, X)  # type: ignore[operator]
    with pytest.raises(GramscopeError, match=r"model is a function; give a torch.nn.Module"), gs.capture(forward):  # type: ignore[arg-type]
        pass


def test_a_stated_mean_with_ignored_labels() -> None:
    net, y = network(), torch.where(Y == 2, -100, Y)
    with pytest.raises(
        InputError, match=r"divided by the 6 samples, but 2 of 6 labels are -100.*give the criterion itself"
    ):
        gs.collect(net, (X, y), lambda f, t: F.cross_entropy(f, t), reduction="mean")
    with pytest.raises(InputError, match=r"2 of 6 labels are 2"):
        gs.collect(net, (X, Y), lambda f, t: F.cross_entropy(f, t, ignore_index=2), reduction="mean", ignore_index=2)
    (gradient,) = torch.autograd.grad(F.cross_entropy(net(X), y, reduction="sum"), net[0].weight)
    for loss, reduction in ((CE, None), (lambda f, t: F.cross_entropy(f, t), 4.0)):
        torch.testing.assert_close(gs.collect(net, (X, y), loss, reduction=reduction)["0"].D, gradient)
    with gs.capture(net, reduction=4.0) as tape:  # what the loss divided by
        CE(net(X), y).backward()
    torch.testing.assert_close(tape["0"].D, gradient)


def test_wrappers_that_reduce_by_themselves_are_told() -> None:
    class Wrapped(nn.Module):
        reduction = "mean"

        def forward(self, f: Tensor, t: Tensor) -> Tensor:
            return F.cross_entropy(f, t).reshape(1)

    with pytest.raises(InputError, match="does not divide into 6 samples; .* reduction='mean', 'sum' or a factor"):
        gs.collect(network(), (X, Y), Wrapped())


def test_targets_with_the_batch_second() -> None:
    model, x, y = nn.Linear(4, 3).double(), X.repeat(2, 1).reshape(4, 3, 4), torch.arange(12).reshape(4, 3) % 3

    def loss(f: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(f.movedim(1, 0).flatten(0, 1), t.flatten(), reduction="none")

    with pytest.raises(
        InputError, match=r"3 inputs but 4 targets; .*unpack=lambda b: \(b\[0\], b\[1\].movedim\(1, 0\)\)"
    ):
        gs.collect(model, (x, y), loss, batch_dim=1)
    found = gs.collect(model, [(x, y)], loss, batch_dim=1, unpack=lambda b: (b[0], b[1].movedim(1, 0)))
    (gradient,) = torch.autograd.grad(
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"), model.weight
    )
    torch.testing.assert_close(found["(model)"].D, gradient)


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Conv1d(2, 3, 2, stride=2, dilation=2)], ids=["2d", "1d"]
)
def test_reading_a_gradient_does_not_change_the_model(layer: nn.Module) -> None:
    conv = parametrizations.spectral_norm(layer).double().train()
    x = torch.randn(3, 2, *[7] * (layer.weight.dim() - 2), generator=torch.Generator().manual_seed(0)).double()
    with gs.capture(conv) as tape:
        tape.backward(conv(x).square().sum())
    before = copy.deepcopy(conv.state_dict())
    record = tape["(model)"]
    D = torch.einsum("...bsk,...bsd->...kd", record.delta, record.h)
    torch.testing.assert_close(record.D, D)
    for name, value in conv.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
