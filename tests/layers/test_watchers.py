"""Our own passes are invisible to captures and optimizers that the user has open."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, Around, normal
from gramscope.instruments.agop import dual_tangent_kernel
from gramscope.theory.network import early_alignment

CE = nn.CrossEntropyLoss()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


X, Y = normal(30, 4), torch.arange(30) % 3
XS, YS = normal(7, 4, seed=7), torch.arange(7) % 3
PASSES: dict[str, Callable[[nn.Module], object]] = {
    "measure": lambda net: gs.measure(net, (XS, YS), CE, measures=["gradient_norm", "nfa", "nc4"]),
    "reference": lambda net: gs.measure(
        net, (XS, YS), CE, measures=["nfa", "nfa_double"], reference=copy.deepcopy(net)
    ),
    "collect": lambda net: gs.collect(net, (XS, YS), CE, outputs="1"),
    "agop": lambda net: gs.agop(net, XS),
    "kernel": lambda net: gs.tangent_kernel(net, XS),
    "dual": lambda net: dual_tangent_kernel(net, XS),
    "monitor": lambda net: gs.Monitor(net, (XS, YS), CE, measures="all").record(),
    "theory": lambda net: early_alignment(net, XS, YS, CE),
    "part": lambda net: gs.collect(net[2], torch.ones(3, 5, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", PASSES)
def test_measuring_inside_a_capture_leaves_it_alone(name: str) -> None:
    net = network()
    with gs.capture(net, reduction="mean", outputs=["1", "2"]) as tape:
        PASSES[name](net)
        assert len(tape) == 0
        CE(net(X), Y).backward()
        PASSES[name](net)
    assert [call.samples for call in tape.calls] == [30]
    assert tape.output_counts == {"1": 1, "2": 1}
    assert tape["0"].h.shape == (30, 1, 4)
    torch.testing.assert_close(tape["0"].D, 30 * net[0].weight.grad)


def test_the_users_own_forwards_are_seen_by_every_capture() -> None:
    net = network()
    with gs.capture(net) as outer:
        gs.agop(net, XS)
        with gs.capture(net, "0") as inner:
            CE(net(X), Y).backward()
            gs.agop(net, XS)
        net(X)
    torch.testing.assert_close(inner["0"].D, net[0].weight.grad)
    assert (len(outer.calls), len(inner.calls)) == (2, 1)


def test_measuring_what_shares_modules_with_the_reference() -> None:
    frozen = nn.Linear(4, 5).double().requires_grad_(False)
    net, reference = (
        Around(lambda m, x: m.head(torch.tanh(m.frozen(x))), frozen=frozen, head=nn.Linear(5, 3)) for _ in range(2)
    )
    expected = gs.tangent_kernel(net, XS, reference=reference)["frozen"]
    with gs.capture(net) as tape, gs.capture(reference) as other:
        net(X), reference(X[:5])
        found = gs.tangent_kernel(net, XS, reference=reference)["frozen"]
    torch.testing.assert_close(found.K, expected.K)
    torch.testing.assert_close(found.K_centered, expected.K_centered)
    assert [tape["head"].h.shape[0], other["head"].h.shape[0]] == [30, 5]
    # K = (1/n) Σ JᵀJ with J = V diag(1 − tanh²), and J − J⁰ with V − V⁰.
    slope = 1 - torch.tanh(frozen(XS)).square()
    for weight, K in ((net.head.weight, found.K), (net.head.weight - reference.head.weight, found.K_centered)):
        J = weight * slope.unsqueeze(1)
        torch.testing.assert_close(K, torch.einsum("nck,ncl->kl", J, J).detach() / 7)


def test_a_loss_that_measures_the_same_network() -> None:
    net = network()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        gs.agop(net, XS)
        return nn.functional.cross_entropy(output, target, reduction="none")

    statistics = gs.collect(net, (X, Y), loss)
    assert statistics.n == 30
    torch.testing.assert_close(statistics["0"].D, gs.collect(net, (X, Y), CE)["0"].D)


@pytest.mark.parametrize("build", [network, lambda: BY_NAME["checkpoint"].make()[0]], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("where", ["before", "between"])
def test_virtual_covariance_learning_is_not_disturbed(build: Callable[[], nn.Module], where: str) -> None:
    """The same steps with and without measurements in between, also before the first one."""
    net = build()
    twin = copy.deepcopy(net)
    for model, measures in ((net, True), (twin, False)):
        optimizer = gs.VCL(model, gamma=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            value = CE(model(X), Y)
            if measures and where == "before":
                gs.measure(model, (XS, YS), CE, measures=["gradient_norm"])
            value.backward()
            if measures and where == "between":
                gs.measure(model, (XS, YS), CE, measures=["gradient_norm"])
            optimizer.step()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_warm_up_is_not_recorded_but_still_learns() -> None:
    net = network()
    twin = copy.deepcopy(net)
    for model in (net, twin):
        optimizer = gs.VCL(model, gamma=0.01)
        with gs.capture(model) as tape:
            if model is net:
                optimizer.warm_up([(XS, YS)], CE, epochs=2)
                assert len(tape) == 0
            model(X)
        if model is twin:
            optimizer.warm_up([(XS, YS)], CE, epochs=2)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
