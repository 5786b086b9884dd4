"""Muon with built-in lengths: its steps in float64, what it trains, what it needs from gradients, its state."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.errors import InputError, LayerError, NumericalError
from gramscope.optim import directions, free_muon, orthogonalise
from gramscope.optim.orthogonalise import COEFFICIENTS
from live_bytes import LiveBytes
from optim.nets import KINDS, data, mlp, net, same, train


def orthogonalised(D: torch.Tensor) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    U, s, Vh = torch.linalg.svd(D, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return U @ torch.diag(s) @ Vh


class Formulas:
    """The steps of one weight, written down as in the head of the module."""

    def __init__(self, W: torch.Tensor, scale: float) -> None:
        self.z, self.x, self.scale = W.detach().clone(), W.detach().clone(), scale
        self.mean, self.n, self.c, self.last, self.shortened = torch.zeros_like(self.z), 0, 1.0, None, 0
        self.before, self.u, self.v = 0.0, 0.0, 0.0

    def step(self, D: torch.Tensor, lr: float = 1.0, blocks: int = 1) -> None:
        self.n += 1
        n, f = self.n, min(1, (8 / self.n) ** 0.7)
        beta = min(0.95, n / (n + 20))
        self.mean = beta * self.mean + (1 - beta) * D
        O = torch.cat([orthogonalised(part) for part in (beta * self.mean + (1 - beta) * D).chunk(blocks)])
        if self.last is not None:
            self.u = beta * self.u + (1 - beta) * float((D * self.last).sum())
            self.v = beta * self.v + (1 - beta) * self.before
        if self.u < -self.v / 2:
            self.c, self.shortened = 0.7 * self.c, self.shortened + 1
        else:
            self.c = min(1, 1.1 * self.c)
        self.last, self.before = O, float((D * O).sum())
        self.z = self.z - self.c * lr * 0.18 * f * (self.scale * O + 0.15 * (1 - f) * self.z)
        self.x = self.x + 9 / (n + 8) * (self.z - self.x)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("sizes", [(12, 6, 3), (30, 6, 3), (5, 9, 3)])
def test_steps_are_those_of_the_formulas_under_a_schedule(sizes: tuple[int, ...], blocks: int):
    model, mirror = mlp(*sizes), mlp(*sizes)  # the mirror has the weights z
    x, y = data(sizes[0])
    optimizer = gs.FreeMuon(model, split={"0": blocks})
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 40)
    rest = [mirror[0].bias, *mirror[2].parameters()]
    averages = [p.detach().clone() for p in rest]
    adam = torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.99), weight_decay=0.0, eps=1e-100)
    own = Formulas(mirror[0].weight, math.sqrt(max(1, sizes[1] / blocks / sizes[0])))
    for n in range(1, 40):
        lr, share = 1 - (n - 1) / 40, min(1, (8 / n) ** 0.7)
        adam.param_groups[0]["lr"] = lr * 0.02 * share
        y = y.roll(n // 6)  # so that some steps overshoot
        train(mirror, adam, x, y)
        own.step(mirror[0].weight.grad, lr, blocks)
        mirror[0].weight.data, mirror[0].weight.grad = own.z.clone(), None
        averages = [a.lerp(p.detach(), 9 / (n + 8)) for a, p in zip(averages, rest, strict=True)]
        train(model, optimizer, x, y)
        schedule.step()
        for p, q in zip(model.parameters(), [own.x, *averages], strict=True):
            torch.testing.assert_close(p.detach(), q, atol=1e-10, rtol=0)
    assert own.shortened or blocks > 1
    model(x)
    same(model, mirror, atol=1e-10, rtol=0)


class Words(nn.Module):
    """Entries of an embedding plus positions, whose embedding is not called, and a head; in float64."""

    def __init__(self, width: int = 4, entries: int = 7, **options: Any) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(entries, width, **options), nn.Embedding(3, width)
        self.body, self.head = nn.Linear(width, 5), nn.Linear(5, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (self.words(x) + self.positions.weight).mean(1)
        return self.head(F.gelu(self.body(h)))


@pytest.mark.parametrize(("width", "entries"), [(4, 15), (9, 7)])
def test_steps_of_embeddings_are_those_of_the_formulas(width: int, entries: int):
    torch.manual_seed(0)
    model = Words(width, entries, padding_idx=0)
    optimizer = gs.FreeMuon(model)
    own = Formulas(model.words.weight, math.sqrt(width) / 2)
    for _ in range(12):
        train(model, optimizer, torch.randint(0, entries - 1, (20, 3)), torch.arange(20) % 2)
        own.step(model.words.weight.grad)
        torch.testing.assert_close(model.words.weight.detach(), own.x, atol=1e-10, rtol=0)
    assert not model.words.weight[0].any()  # the padding


def chosen(optimizer: gs.FreeMuon) -> list[str]:
    found: list[str] = optimizer.param_groups[0]["matrices"]
    return found


@pytest.mark.parametrize("case", ["own", "tied", "frozen", "named layers"])
def test_which_embeddings_are_matrices(case: str):
    model = Words(5)
    if case == "tied":
        model.head = nn.Linear(5, 7, dtype=torch.float64)
        model.head.weight = model.words.weight
    model.words.weight.requires_grad_(case != "frozen")
    optimizer = gs.FreeMuon(model, "body" if case == "named layers" else None)
    train(model, optimizer, torch.arange(6).view(2, 3), torch.arange(2))
    assert ("words.weight" in chosen(optimizer)) == (case == "own")
    assert "body.weight" in chosen(optimizer)


def test_sparse_gradients_are_refused():
    model = Words(5, sparse=True)
    with pytest.raises(InputError, match=r"words\.weight is sparse: make the embedding with sparse=False"):
        train(model, gs.FreeMuon(model), torch.arange(6).view(2, 3), torch.arange(2))


class HeadFirst(nn.Module):
    """A Hugging Face model names its head."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.last = nn.Linear(5, 3), nn.Linear(7, 5), nn.Linear(5, 5)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_the_head_and_layers_that_cannot_be_trained():
    assert chosen(gs.FreeMuon(HeadFirst())) == ["body.weight", "last.weight"]
    assert chosen(gs.FreeMuon(mlp(7, 5, 3))) == ["0.weight"]
    assert chosen(gs.FreeMuon(mlp(7, 3))) == ["0.weight"]  # the only one
    assert chosen(gs.FreeMuon(mlp(7, 5, 3), ["2"])) == ["2.weight"]
    model = mlp(7, 5, 5, 3)
    model[2].requires_grad_(False)
    assert chosen(gs.FreeMuon(model)) == ["0.weight"]
    with pytest.raises(LayerError, match="'2' is frozen.*leave it out of layers="):
        gs.FreeMuon(model, ["2"])
    optimizer = gs.FreeMuon(model)
    model[2].requires_grad_(True)
    with pytest.raises(LayerError, match=r"2\.weight has a gradient and was frozen"):
        train(model, optimizer, *data())
    model[2].requires_grad_(False)
    attention, _ = net("tokens")
    with pytest.raises(LayerError, match="all three"):
        gs.FreeMuon(attention, ["attention.q_proj"])
    torch.nn.utils.parametrizations.weight_norm(model[4])
    assert chosen(gs.FreeMuon(model)) == ["0.weight"]
    with pytest.raises(LayerError, match="'4'.*parametrisation"):
        gs.FreeMuon(model, ["4"])
    with pytest.raises(LayerError, match="lazy"):
        gs.FreeMuon(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3)))


def test_recurrent_and_transposed_layers_and_embeddings_count_in_the_choice():
    recurrent = ["1.weight_ih_l0", "1.weight_hh_l0"]
    table, gru, linear = nn.Embedding(9, 4), nn.GRU(4, 5), nn.Linear(5, 3)
    assert chosen(gs.FreeMuon(nn.Sequential(table, gru, linear))) == [*recurrent, "0.weight"]
    assert chosen(gs.FreeMuon(nn.Sequential(table, nn.Linear(4, 3)))) == ["0.weight"]
    assert chosen(gs.FreeMuon(nn.Sequential(nn.Linear(3, 4), gru))) == ["0.weight", *recurrent]  # without a head
    decoder = nn.Sequential(nn.Conv1d(2, 4, 2), nn.ConvTranspose1d(4, 3, 2), nn.ConvTranspose1d(3, 2, 2))
    assert chosen(gs.FreeMuon(decoder)) == ["0.weight", "1.weight"]
    assert gs.VCL(nn.Sequential(table, gru, linear)).matrices[0].name == "2.weight"  # it sees no others' inputs


def test_fused_projections_and_experts_are_matrices_of_their_own():
    """The first step of each query, key and value, of each head, and of each expert that has tokens."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    transformers = pytest.importorskip("transformers")
    mixtral = transformers.MixtralConfig(**sizes, vocab_size=11, num_local_experts=6)
    gpt = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, n_positions=9, vocab_size=11)
    heads = 3 * gpt.num_attention_heads
    for model, split, name, blocks in (
        (transformers.MixtralForCausalLM(mixtral), {}, "model.layers.0.mlp.experts.gate_up_proj", 6),
        (transformers.GPT2LMHeadModel(gpt), {"*.c_attn": 3}, "transformer.h.0.attn.c_attn.weight", 3),
        (transformers.GPT2LMHeadModel(gpt), {"*.c_attn": heads}, "transformer.h.0.attn.c_attn.weight", heads),
    ):
        model.double()
        optimizer = gs.FreeMuon(model, split=split)
        weight = model.get_parameter(name)
        before = weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype)
        if weight.dim() == 3:
            weight.grad[:1] = 0  # no tokens
        gradient = weight.grad
        optimizer.step()
        steps = weight.detach() - before
        if weight.dim() == 2:
            steps, gradient = (x.T.unflatten(0, (blocks, -1)) for x in (steps, gradient))
        assert len(steps) == blocks
        scale = 0.18 * math.sqrt(max(1, steps.shape[1] / steps.shape[2]))
        for step, D in zip(steps, gradient, strict=True):
            expected = -scale * orthogonalised(D) if D.any() else 0 * D
            torch.testing.assert_close(step, expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize(
    ("split", "error", "words"),
    [({"0": 4}, InputError, r"0\.weight of shape \(6, 7\) has no 4 equal blocks"), ({"0": 0}, InputError, "no 0 equal blocks"),
     ({"qkv": 3}, LayerError, "'qkv'")],
)  # fmt: skip
def test_splits_that_do_not_fit_are_refused(split: dict[str, int], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        gs.FreeMuon(mlp(7, 6, 3), split=split)


def test_equal_shapes_are_orthogonalised_in_one_product(monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(*(nn.Conv1d(4, 6, 3, groups=2) if i % 2 else nn.Conv1d(6, 4, 3, groups=2) for i in range(6)))
    shapes: list[torch.Size] = []
    whole = directions.orthogonalise_
    monkeypatch.setattr(directions, "orthogonalise_", lambda X: (shapes.append(X.shape), whole(X))[1])
    optimizer = gs.FreeMuon(model)
    model(torch.randn(2, 6, 20)).square().sum().backward()
    optimizer.step()
    assert shapes == [(6, 2, 9), (4, 3, 6)]  # of three and two layers with two groups each


def test_matrices_of_a_stack_without_a_gradient_take_no_step():
    model = net("conv")[0]
    optimizer = gs.FreeMuon(model)
    x, y = data(72)
    train(model, optimizer, x, y, 2)
    before = model[3].weight.detach() + optimizer.state[model[3].weight]["lead"]
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model[3].weight.grad[:3] = 0  # one of two groups
    optimizer.step()
    moved = model[3].weight.detach() + optimizer.state[model[3].weight]["lead"] - before
    torch.testing.assert_close(moved[:3], torch.zeros_like(moved[:3]), atol=1e-14, rtol=0)
    assert float(moved[3:].norm()) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_learns(kind: str):
    model, d = net(kind)
    optimizer = gs.FreeMuon(model)
    x, y = data(d, 30)
    before = float(F.cross_entropy(model(x), y).detach())
    train(model, optimizer, x, y, 30)
    assert float(F.cross_entropy(model(x), y).detach()) < 0.8 * before


@pytest.mark.parametrize("scale", [1e-12, 1e6])
def test_the_scale_of_the_loss_does_not_matter(scale: float):
    models = [mlp(9, 6, 6, 3) for _ in range(2)]
    optimizers = [gs.FreeMuon(m) for m in models]
    x, y = data(9)
    for _ in range(4):
        for model, optimizer, factor in zip(models, optimizers, (1.0, scale), strict=True):
            optimizer.zero_grad()
            (factor * F.cross_entropy(model(x), y)).backward()
            model[4].bias.grad.zero_()  # 0/0
            optimizer.step()
    same(*models, atol=1e-9, rtol=0)
    assert torch.equal(models[0][4].bias, mlp(9, 6, 6, 3)[4].bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_continuation_and_copies_are_bit_identical(dtype: torch.dtype):
    model = net("tokens")[0].to(dtype)
    optimizer = gs.FreeMuon(model)
    x, y = data(24, dtype=dtype)
    train(model, optimizer, x, y, 5)
    again, copied = copy.deepcopy((model, optimizer))
    other = net("tokens")[0].to(dtype)
    other.load_state_dict(model.state_dict())
    resumed = gs.FreeMuon(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (again, copied), (other, resumed)):
        train(m, o, x, y, 12)
    same(model, again, atol=0, rtol=0)
    same(model, other, atol=0, rtol=0)
    assert optimizer.state[model.inner.weight]["mean"].dtype == torch.promote_types(dtype, torch.float32)


def test_states_of_other_optimizers_and_models_are_refused():
    model = mlp(9, 6, 3)
    optimizer = gs.FreeMuon(model)
    train(model, optimizer, *data(9))
    state = optimizer.state_dict()
    with pytest.raises(InputError, match=r"0\.weight is one of shape \(6, 9\), not \(5, 9\)"):
        gs.FreeMuon(mlp(9, 5, 3)).load_state_dict(state)
    with pytest.raises(InputError, match="has the matrices"):
        gs.FreeMuon(mlp(9, 6, 3), ["2"]).load_state_dict(state)
    with pytest.raises(InputError, match="not one of FreeMuon"):
        gs.FreeMuon(model).load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def test_matrices_without_a_gradient_keep_their_weights_and_no_gradient_at_all_is_an_error():
    model = mlp(9, 6, 6, 3)
    optimizer = gs.FreeMuon(model)
    x, y = data(9)
    train(model, optimizer, x, y, 2)
    kept = model[2].weight.detach().clone()
    for gradient in (None, torch.zeros_like(kept)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model[2].weight.grad = gradient
        optimizer.step()
        torch.testing.assert_close(model[2].weight.detach(), kept, atol=1e-15, rtol=0)  # to z and back to x
    optimizer.zero_grad()
    with pytest.raises(LayerError, match="no gradient"):
        optimizer.step()


@pytest.mark.parametrize("where", [0, 2])
def test_non_finite_gradients_change_nothing(where: int):
    model = mlp(30, 4, 3)
    x, y = data(30)
    optimizer = gs.FreeMuon(model)
    train(model, optimizer, x, y, 2)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    F.cross_entropy(model(x), y).backward()
    model[where].weight.grad[0, 0] = float("nan")
    with pytest.raises(NumericalError, match=rf"{where}\.weight has NaN"):
        optimizer.step()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, weights[name], atol=1e-15, rtol=0)
    assert str(optimizer.state_dict()) == str(state)
    train(model, optimizer, x, y)


def test_closures_hooks_and_cycles():
    model = mlp(7, 5, 3)
    x, y = data()
    optimizer = gs.FreeMuon(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=9)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    losses = []
    for _ in range(8):
        losses.append(float(optimizer.step(closure)))
        scheduler.step()
    assert calls == ["before", "after"] * 8
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [({"lr": 0.1}, "lr.*param_groups"), ({"weight_decay": 0.0}, "built-in share"), ({"alpha": 0.1}, r"gs\.VCL"),
     ({"reduction": "sum"}, "do not depend on the scale of the loss"),
     ({"layer": ["0"]}, "did you mean 'layers'")],
)  # fmt: skip
def test_arguments_of_other_optimizers_say_what_to_use(given: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        gs.FreeMuon(mlp(7, 5, 3), **given)


def test_autocast_does_not_reach_the_steps():
    models = [mlp(9, 6, 3, dtype=torch.float32) for _ in range(2)]
    x, y = data(9, dtype=torch.float32)
    for model, enabled in zip(models, (False, True), strict=True):
        optimizer = gs.FreeMuon(model)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                optimizer.step()
    same(*models, atol=0, rtol=0)


def test_parameters_without_an_owner_that_have_a_gradient_are_named():
    model = nn.Sequential(*mlp(7, 5, 5, 3))
    optimizer = gs.FreeMuon(model)
    x, y = data()
    train(model, optimizer, x, y)
    model[4] = nn.Linear(5, 3).double()
    with pytest.raises(LayerError, match=r"4\.weight has a gradient and was frozen, or not in the model"):
        train(model, optimizer, x, y)


def test_weights_on_the_meta_device_are_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    with pytest.raises(LayerError, match=r"meta device: load its weights first"):
        gs.FreeMuon(model)


def test_matrices_are_orthogonalised_in_chunks_and_large_ones_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """The steps are those of one chunk and of whole matrices."""
    models = [mlp(*[16] * 12, 70, 3) for _ in range(2)]
    sizes: list[int] = []
    whole = directions.orthogonalise_

    def seen(X: torch.Tensor) -> torch.Tensor:
        sizes.append(X.numel())
        return whole(X)

    x, y = data(16)
    monkeypatch.setattr(directions, "orthogonalise_", seen)
    train(models[0], gs.FreeMuon(models[0]), x, y, 3)
    assert max(sizes) == 11 * 16 * 16
    sizes.clear()
    monkeypatch.setattr(free_muon, "_ENTRIES", 1)
    monkeypatch.setattr(orthogonalise, "_LARGE", 100)
    train(models[1], gs.FreeMuon(models[1]), x, y, 3)
    assert max(sizes) == 16 * 70  # a single one
    same(*models, atol=1e-12, rtol=0)


@pytest.mark.parametrize("sizes", [(600, 200, 3), (200, 600, 3), (256, 256, 3), [160] * 14])
def test_a_step_needs_no_more_memory_than_half_the_weights_or_the_largest_matrix(
    sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(free_muon, "_ENTRIES", 1)
    monkeypatch.setattr(orthogonalise, "_LARGE", 10_000)
    monkeypatch.setattr(orthogonalise, "has_bfloat16", lambda device: True)
    model = mlp(*sizes, dtype=torch.float32)
    optimizer = gs.FreeMuon(model)
    x, y = data(sizes[0], dtype=torch.float32)
    train(model, optimizer, x, y, 2)
    F.cross_entropy(model(x), y).backward()
    weights = [4 * p.numel() for p in model.parameters()]
    with LiveBytes() as live:
        optimizer.step()
    assert live.peak < 1.2 * max(0.5 * sum(weights), max(weights))


def test_a_gradient_that_is_rounding_alone_moves_its_parameter_little() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = gs.FreeMuon(net)
    hidden, last = net[0].bias.detach().clone(), net[2].bias.detach().clone()
    for _ in range(5):
        net(torch.randn(2, 6).double())
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        net[0].bias.grad *= 1e-17  # as that of a bias of attention's keys
        optimizer.step()
    moved = [float((p.detach() - start).abs().max()) for p, start in ((net[0].bias, hidden), (net[2].bias, last))]
    assert moved[0] < 0.1 * moved[1]
