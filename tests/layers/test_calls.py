"""How many samples a forward had: what ``reduction="mean"`` is undone with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import Around, close_to_autograd, normal, refused
from gramscope.errors import LayerError, joined


def masked(m: Any, mask: Tensor, x: Tensor) -> Tensor:
    return m.l(x * mask.diagonal().sum())


def timed(m: Any, t: Tensor, x: Tensor) -> Tensor:
    return m.l(torch.tanh(m.t(t.reshape(-1, 1)) + x))


def timed_vector(m: Any, x: Tensor, t: Tensor) -> Tensor:
    return m.l(torch.tanh(m.t(t.reshape(1)) + x))


def flattened(m: Any, x: Tensor) -> Tensor:
    return m.l(x.flatten(0, 1)).reshape(x.shape[0], x.shape[1], -1).mean(1)


def listed(m: Any, images: list[Tensor]) -> Tensor:
    return m.l(torch.stack([image.mean((1, 2)) for image in images]))


def routed(m: Any, x: Tensor) -> Tensor:
    return x[:, :2].index_add(0, torch.tensor([0, 2, 4]), m.l(x[[0, 2, 4]]))


@pytest.mark.parametrize(
    ("forward", "layers", "args"),
    [
        (masked, {"l": nn.Linear(3, 2)}, (torch.eye(3, dtype=torch.float64), normal(7, 3))),
        (timed, {"l": nn.Linear(3, 2), "t": nn.Linear(1, 3)}, (torch.tensor(0.3, dtype=torch.float64), normal(7, 3))),
        (timed, {"l": nn.Linear(3, 2), "t": nn.Linear(1, 3)}, (torch.ones(1, dtype=torch.float64), normal(7, 3))),
        (timed_vector, {"l": nn.Linear(3, 2), "t": nn.Linear(1, 3)}, (normal(7, 3), torch.tensor(0.3).double())),
        (flattened, {"l": nn.Linear(3, 2)}, (normal(7, 4, 3),)),
        (routed, {"l": nn.Linear(3, 2)}, (normal(7, 3),)),
        (listed, {"l": nn.Linear(3, 2)}, ([normal(3, 4, 5 + i) for i in range(7)],)),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_the_mean_over_the_samples_is_undone(
    forward: Callable[..., Tensor], layers: dict[str, nn.Module], args: tuple[Tensor, ...], by_name: bool
) -> None:
    model = Around(forward, **layers)
    y = torch.arange(7) % 2
    names = forward.__code__.co_varnames[1 : 1 + len(args)]
    arguments = ((), dict(zip(names, args, strict=True))) if by_name else (args, {})
    with gs.capture(model, reduction="mean") as tape:
        F.cross_entropy(model(*arguments[0], **arguments[1]), y).backward()
    expected = torch.autograd.grad(F.cross_entropy(model(*args), y, reduction="sum"), model.l.weight)[0]
    assert [call.samples for call in tape.calls] == [7]
    torch.testing.assert_close(tape["l"].D, expected)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Linear(3, 2), (3,)),
        (nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(0), nn.Linear(8, 2)), (1, 3, 3)),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (5, 4)),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (5, 4)),
    ],
    ids=["linear", "convolution", "encoder", "sequence-first encoder"],
)
def test_single_samples_count_one_in_every_forward(model: nn.Module, shape: tuple[int, ...]) -> None:
    model = model.double()
    with gs.capture(model, reduction="mean") as tape:
        for seed in range(2):
            model(normal(*shape, seed=seed)).square().sum().backward()
    assert [call.samples for call in tape.calls] == [1, 1]
    total = sum(model(normal(*shape, seed=seed)).square().sum() for seed in range(2))
    close_to_autograd(tape, total)


def test_samples_that_cannot_be_told_are_an_error() -> None:
    model = Around(lambda m, mask: m.l(normal(7, 3) * mask.sum()), l=nn.Linear(3, 2))
    with gs.capture(model, reduction="mean") as tape:
        model(torch.eye(3, dtype=torch.float64)).mean().backward()
    with pytest.raises(LayerError, match=r"the model's inputs have 3 rows and its layers saw 7.*reduction=<number>"):
        _ = tape["l"].D
    nothing = Around(lambda m, settings: m.l(normal(7, 3)), l=nn.Linear(3, 2))
    with gs.capture(nothing, reduction="mean") as tape:
        nothing("settings").mean().backward()
    with pytest.raises(LayerError, match=r"no tensor .*reduction=<number>"):
        _ = tape["l"].delta
    with gs.capture(nothing, reduction=7.0) as tape:
        nothing("settings").mean(1).mean().backward()
    (gradient,) = torch.autograd.grad(nothing("settings").mean(1).sum(), nothing.l.weight)
    torch.testing.assert_close(tape["l"].D, gradient)


def test_virtual_covariance_learning_counts_the_same() -> None:
    x, y, mask = normal(7, 3), torch.arange(7) % 2, torch.eye(3, dtype=torch.float64)
    networks = []
    for reduction in ("mean", 7.0, lambda n: float(n)):
        model = Around(masked, l=nn.Linear(3, 2, bias=False))
        with torch.no_grad():
            model.l.weight.copy_(normal(2, 3))
        optimizer = gs.VCL(model, gamma=0.01, reduction=reduction)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(mask, x), y).backward()
            optimizer.step()
        networks.append(model.l.weight.detach())
    assert (networks[0] - normal(2, 3)).norm() > 1e-3
    for other in networks[1:]:
        torch.testing.assert_close(networks[0], other, rtol=1e-12, atol=1e-14)


def test_virtual_covariance_learning_refuses_samples_that_cannot_be_told() -> None:
    model = Around(lambda m, mask: m.l(normal(7, 3) * mask.sum()), l=nn.Linear(3, 2))
    optimizer = gs.VCL(model, gamma=0.01)
    with pytest.raises(LayerError, match=r"inputs have 3 rows and its layers saw 7.*reduction="):
        model(torch.eye(3, dtype=torch.float64)).mean().backward()
    optimizer.close()


@pytest.mark.parametrize("batch", [5, 14])
def test_sequence_first_models_without_batch_dim_are_told(batch: int) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8), 2, enable_nested_tensor=False)
    model = nn.Sequential(OrderedDict(e=encoder, r=nn.Linear(6, 2))).double().eval()  # [time, batch, 6]
    x = normal(7, batch, 6)
    for kernel in (gs.tangent_kernel, gs.agop):
        refused(kernel, model, x, match=r"'e.layers.0.self_attn.*batch_dim=1")
    with gs.capture(model, reduction="mean") as tape:
        model(x).mean().backward()
    with pytest.raises(LayerError, match=r"self_attn.*batch_dim=1"):
        _ = tape["r"].D
    statistics = gs.collect(model, [(x, normal(7, batch, 2))], nn.MSELoss(), features=False)
    assert "batch_dim=1" in joined(statistics.notes["e.layers.0.self_attn.q_proj"]).text


def test_windows_of_attention_are_no_sequences_of_samples() -> None:
    def windows(m: Any, x: Tensor) -> Tensor:  # [n, 12, 6] in windows of four
        rows = x.reshape(-1, 4, 6)
        return m.r(m.a(rows, rows, rows)[0].reshape(x.shape).mean(1))

    model = Around(windows, a=nn.MultiheadAttention(6, 2, batch_first=True), r=nn.Linear(6, 2)).eval()
    x = normal(4, 12, 6)
    parts = [gs.tangent_kernel(model, x[i : i + 1])["r"] for i in range(4)]
    torch.testing.assert_close(gs.tangent_kernel(model, x)["r"], torch.stack(parts).mean(0))
