"""The formulas of the authors' code, written down anew as oracles.

docs/tools.md names the commits and compares with the code itself. Where a convention differs, the test shows how.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import gramscope as gs

G = torch.Generator().manual_seed(0)
X = torch.randn(60, 7, generator=G, dtype=torch.float64)
labels = torch.randint(3, (60,), generator=G)
onehot = nn.functional.one_hot(labels).double()
centred = onehot - onehot.mean(0)


def inverse_linearity(H: Tensor, Y: Tensor) -> Tensor:
    """cth127/GramLin: the spread of several targets is taken around each sample's mean over the targets."""
    residual = Y - H @ torch.linalg.inv(H.mT @ H) @ H.mT @ Y
    return 1 - residual.square().sum() / (Y - Y.mean(1, keepdim=True)).square().sum()


def test_target_linearity_and_surrogate() -> None:
    W = torch.randn(5, 7, generator=G, dtype=torch.float64)
    torch.testing.assert_close(gs.target_linearity(X, labels), inverse_linearity(X, centred))
    pixels = torch.randn(60, 4, generator=G, dtype=torch.float64) + X[:, :1]
    pixels = pixels - pixels.mean(0)
    assert abs(gs.target_linearity(X, pixels) - inverse_linearity(X, pixels)) > 0.01  # no labels: not the same number
    theirs = (centred.mT @ (X @ W.mT) @ (X @ W.mT).mT @ centred).diag().mean()
    torch.testing.assert_close(gs.surrogate(X, labels, W) / 3, theirs)


def test_ansatz() -> None:
    """dmbeaglehole/centered_NFA: K is a sum and ρ is Pearson's. aradha/agop_feature_learning: it is that of the AGOP's root."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)).double()
    before = copy.deepcopy(net)
    nn.functional.cross_entropy(net(X), labels).backward()
    torch.optim.SGD(net.parameters(), lr=2.0).step()
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    J = vmap(jacrev(lambda x: functional_call(net, parameters, x)))(X)
    agop = torch.einsum("ncd,nce->de", J, J)
    W, W0 = net[0].weight.detach(), before[0].weight.detach()
    K = gs.tangent_kernel(net, X)["0"]
    torch.testing.assert_close(60 * W.mT @ K @ W, agop)
    pairs = [((W, K), W, agop), ((W, K, W0, None, "centered"), W - W0, (W - W0).mT @ (60 * K) @ (W - W0))]
    for given, V, other in pairs:
        pearson = torch.corrcoef(torch.stack([(V.mT @ V).flatten(), other.flatten()]))[0, 1]
        torch.testing.assert_close(torch.tensor(gs.nfa(*given, center=True)).double(), pearson)
    values, vectors = torch.linalg.eigh(agop)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
    pearson = torch.corrcoef(torch.stack([(W.mT @ W).flatten(), root.flatten()]))[0, 1]
    torch.testing.assert_close(torch.tensor(gs.nfa(W, K, power=0.5, center=True)).double(), pearson, rtol=1e-6, atol=0)
