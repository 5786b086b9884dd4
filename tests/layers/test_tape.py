from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, CASES, Case, sample_losses
from gramscope.errors import InputError, LayerError
from gramscope.layers.kinds import AttentionProjectionKind
from gramscope.layers.select import select_layers
from reference import preactivation_gradients

ids = [case.name for case in CASES]


def captured(model: nn.Module, x: Tensor, y: Tensor, layers: object = None) -> gs.Tape:
    with gs.capture(model, layers) as tape:  # type: ignore[arg-type]
        tape.backward(sample_losses(model(x), y))
    return tape


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_inputs_times_weight_is_the_output(case: Case) -> None:
    model, x, y = case.make()
    outputs: dict[str, list[Tensor]] = {}
    handles = [
        layer.module.register_forward_hook(
            lambda _m, _a, z, name=layer.name: outputs.setdefault(name, []).append(z.detach().clone())
        )
        for layer in select_layers(model)
        if not isinstance(layer.kind, AttentionProjectionKind)
    ]
    with gs.capture(model) as tape:
        model(x)
    for handle in handles:
        handle.remove()
    assert outputs or case.name == "single"
    for name, zs in outputs.items():
        layer = tape[name].layer
        bias = getattr(layer.module, "bias", None)
        z = torch.cat([layer.kind.outputs(layer.module, z) for z in zs], dim=-2)
        b = 0 if bias is None else bias.detach().reshape(layer.groups, 1, 1, -1) if layer.groups > 1 else bias.detach()
        h = tape[name].h
        close((h.flatten(-3, -2) @ tape[name].weight.mT).reshape(z.shape) + b, z)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_deltas_equal_the_gradient_of_an_added_zero(case: Case) -> None:
    model, x, y = case.make()
    tape = captured(model, x, y)
    for record in tape:
        layer = record.layer
        if isinstance(layer.kind, AttentionProjectionKind) or case.name == "checkpoint-reentrant":
            continue
        native = preactivation_gradients(model, layer.module, x, y, sample_losses)
        expected = torch.cat(
            [torch.cat([layer.kind.outputs(layer.module, z) for z in sample], dim=-2) for sample in native], dim=-3
        )
        close(record.delta, expected)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_weight_gradient_and_feature_learning_equation(case: Case) -> None:
    model, x, y = case.make()
    tape = captured(model, x, y)
    total = sample_losses(model(x), y).sum()
    for record in tape:
        D = torch.einsum("...bsk,...bsd->...kd", record.delta, record.h)
        close(record.D, D)
        close(record.Sigma, torch.einsum("...bsk,...bsl->...kl", record.delta, record.delta))
        close(record.weight.mT @ record.D, torch.einsum("...bsd,...bse->...de", record.g, record.h))
        parameter = record.layer.parameter
        if parameter is not None and case.name not in ("tied", "checkpoint-reentrant"):
            autograd = torch.autograd.grad(total, parameter, retain_graph=True)[0]
            close(record.layer.matrix(autograd), D)


def test_tied_weights_are_told_apart() -> None:
    model, x, y = BY_NAME["tied"].make()
    tape = captured(model, x, y)
    (gradient,) = torch.autograd.grad(sample_losses(model(x), y).sum(), model.a.weight)
    close(tape["a"].D + tape["b"].D, gradient)
    assert (tape["a"].D - tape["b"].D).norm() > 1e-3


def test_repeated_layer_has_one_site_per_application() -> None:
    model, x, y = BY_NAME["repeated"].make()
    assert captured(model, x, y)["inner"].h.shape == (6, 3, 5)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 3, "vdim": 4}, {"bias": False}, {"add_bias_kv": True}])
@pytest.mark.parametrize("training", [True, False])
def test_attention_projections(batch_first: bool, sizes: dict[str, object], training: bool, generator) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **sizes).double().train(training)  # type: ignore[arg-type]

    def make(length: int, width: object) -> Tensor:
        value = torch.randn(3, length, int(width), generator=generator, dtype=torch.float64)  # type: ignore[call-overload]
        return value if batch_first else value.transpose(0, 1)

    q, k, v = make(4, 8), make(5, sizes.get("kdim", 8)), make(5, sizes.get("vdim", 8))
    plain = attention(q, k, v)[0]
    with gs.capture(attention) as tape:
        seen = attention(q, k, v)[0]
        tape.backward(seen.square().sum())
    close(plain, seen)
    assert tape.order == ["q_proj", "k_proj", "v_proj", "out_proj"]
    for record in tape:
        parameter = record.layer.parameter
        assert parameter is not None
        (gradient,) = torch.autograd.grad(plain.square().sum(), parameter, retain_graph=True)
        close(record.D, record.layer.matrix(gradient))
        assert record.h.shape[0] == 3


def test_attention_sites_hold_the_bias_gradient_of_each_sample(generator) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64)
    with gs.capture(attention) as tape:
        tape.backward(attention(x, x, x)[0].square().sum())
    for i in range(3):
        xi = x[i : i + 1]
        (gradient,) = torch.autograd.grad(attention(xi, xi, xi)[0].square().sum(), attention.in_proj_bias)
        for part, block in zip(("q_proj", "k_proj", "v_proj"), gradient.chunk(3), strict=True):
            close(tape[part].delta[i].sum(0), block)


def test_encoder_fast_path_is_taken_apart_and_restored(generator) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).double().eval()
    x = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[False, False, False, True]] * 3)
    enabled = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), gs.capture(encoder, gradients=False) as tape:
        encoder(x, src_key_padding_mask=mask)
    assert len(tape) == 12
    assert torch.backends.mha.get_fastpath_enabled() is enabled


def test_sequence_first_models_take_batch_dim(generator) -> None:
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=False), nn.Linear(8, 3)
    ).double()
    x = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)  # [time, batch, features]
    with gs.capture(model, batch_dim=1) as tape:
        tape.backward(model(x).square().sum())
    assert {tuple(r.h.shape[:2]) for r in tape} == {(3, 4)}


def test_in_place_activation(generator) -> None:
    layers = [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)]
    plain = nn.Sequential(*layers).double()
    inplace = nn.Sequential(*[nn.ReLU(inplace=True) if isinstance(m, nn.ReLU) else m for m in layers])
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    y = torch.arange(5) % 3
    a, b = captured(plain, x, y), captured(inplace, x, y)
    for name in ("0", "2", "4"):
        close(a[name].D, b[name].D)
        close(a[name].delta, b[name].delta)
    with gs.capture(inplace) as tape:  # the user's own backward
        sample_losses(inplace(x), y).sum().backward()
    close(tape["0"].delta, a["0"].delta)


def test_overwritten_input_is_reported_and_can_be_copied(generator) -> None:
    layer = nn.Linear(4, 4).double().requires_grad_(False)

    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0
            z = self.layer(x)
            x.zero_()
            return z + x

    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    model = Overwrites()
    with gs.capture(model) as tape:
        model(x)
    with pytest.raises(LayerError, match="'layer' was modified in place.*copy_inputs=True"):
        _ = tape["layer"].h
    with gs.capture(model, copy_inputs=True) as tape:
        model(x)
    close(tape["layer"].h[:, 0], x)


@pytest.mark.parametrize("frozen", ["first", "all"])
def test_frozen_layers_still_get_deltas(frozen: str) -> None:
    model, x, y = BY_NAME["mlp"].make()
    expected = captured(copy.deepcopy(model), x, y)
    for p in model.parameters() if frozen == "all" else model[0].parameters():
        p.requires_grad_(False)
    tape = captured(model, x, y)
    for name in ("0", "2", "4"):
        close(tape[name].D, expected[name].D)


def test_autocast_to_bfloat16(generator) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(5, 4, generator=generator)
    y = torch.arange(5) % 3
    exact = captured(model, x, y)
    with torch.autocast("cpu", torch.bfloat16), gs.capture(model) as tape:
        loss = sample_losses(model(x), y)
        tape.backward(loss)
    assert tape["0"].delta.dtype == torch.bfloat16
    assert tape["0"].D.dtype == torch.float32
    torch.testing.assert_close(tape["0"].D, exact["0"].D, rtol=0.05, atol=0.05)


def test_reduction_mean_is_undone() -> None:
    model, x, y = BY_NAME["mlp"].make()
    expected = captured(model, x, y)
    with gs.capture(model, reduction="mean") as tape:
        F.cross_entropy(model(x), y).backward()
    close(tape["0"].delta, expected["0"].delta)
    with gs.capture(model, reduction=2.0) as tape:
        (F.cross_entropy(model(x), y, reduction="sum") / 2).backward()
    close(tape["0"].D, expected["0"].D)
    with pytest.raises(InputError, match="reduction='average'"), gs.capture(model, reduction="average"):
        pass


def test_two_forwards_join_along_the_batch() -> None:
    model, x, y = BY_NAME["mlp"].make()
    expected = captured(model, x, y)
    with gs.capture(model, reduction="mean") as tape:
        for rows in (slice(0, 2), slice(2, 6)):
            F.cross_entropy(model(x[rows]), y[rows]).backward()
    close(tape["0"].delta, expected["0"].delta)
    close(tape["0"].D, expected["0"].D)


def test_captured_weight_is_the_one_of_the_forward() -> None:
    model, x, y = BY_NAME["mlp"].make()
    before = model[0].weight.detach().clone()
    with gs.capture(model) as tape:
        tape.backward(sample_losses(model(x), y))
        with torch.no_grad():
            model[0].weight.zero_()
    close(tape["0"].weight, before)


def test_module_outputs_and_their_errors() -> None:
    model, x, _ = BY_NAME["encoder"].make()
    with gs.capture(model, outputs="0", gradients=False) as tape:
        model(x)
    close(tape.outputs["0"], model[0](x).detach())
    with pytest.raises(LayerError, match="outputs='nothing' matches no module"), gs.capture(model, outputs="nothing"):
        pass


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_models_run_eagerly_inside(in_place: bool) -> None:
    model, x, y = BY_NAME["repeated"].make()
    expected = captured(model, x, y)
    calls = []

    def backend(graph, inputs):  # type: ignore[no-untyped-def]
        calls.append(1)
        return graph.forward

    if in_place:
        model.compile(backend=backend)
        compiled = model
    else:
        compiled = torch.compile(model, backend=backend)  # type: ignore[assignment]
    compiled(x)  # hooks added after this call would never fire in the compiled code
    assert calls
    with gs.capture(compiled) as tape:
        tape.backward(sample_losses(compiled(x), y))
    close(tape["inner"].D, expected["inner"].D)
    torch.compiler.reset()


def test_data_parallel_wrapper_is_looked_through() -> None:
    model, x, y = BY_NAME["mlp"].make()
    wrapped = nn.DataParallel(model)
    with gs.capture(wrapped) as tape:
        tape.backward(sample_losses(wrapped(x), y))
    assert list(tape.records) == ["0", "2", "4"]


def snapshot(model: nn.Module) -> dict[str, object]:
    return {
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._backward_pre_hooks))
            for m in model.modules()
        ],
        "training": [m.training for m in model.modules()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "flags": [(p.requires_grad, p.dtype, p.device) for p in model.parameters()],
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "rng": torch.get_rng_state(),
        "forward": ["forward" in m.__dict__ for m in model.modules()],
    }


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.parametrize("fail", [False, True])
def test_the_model_leaves_as_it_came(case: Case, fail: bool) -> None:
    model, x, y = case.make()
    model.train() if case.name == "spectral-norm" else model[0].train() if isinstance(model, nn.Sequential) else None
    if case.name == "spectral-norm":
        model.eval()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = snapshot(model)
    try:
        with gs.capture(model), gs.capture(model) as tape:
            tape.backward(sample_losses(model(x), y))
            if fail:
                raise KeyError("the user's own error")
    except KeyError:
        assert fail
    assert same(snapshot(model), before)


def test_hooks_are_gone_when_the_forward_raises(generator) -> None:
    model, x, _ = BY_NAME["encoder"].make()
    before = snapshot(model)
    with pytest.raises((RuntimeError, AssertionError)), gs.capture(model):
        model(x[..., :-1])
    assert same(snapshot(model), before)
    model(x)


def test_nested_captures_see_the_same() -> None:
    model, x, y = BY_NAME["encoder"].make()
    with gs.capture(model) as outer, gs.capture(model, "*.q_proj") as inner:
        sample_losses(model(x), y).sum().backward()
    close(outer["0.self_attn.q_proj"].D, inner["0.self_attn.q_proj"].D)


def test_a_deep_copy_made_inside_is_not_watched() -> None:
    model, x, _ = BY_NAME["encoder"].make()
    with gs.capture(model) as tape:
        twin = copy.deepcopy(model)
        twin(x)
        assert len(tape) == 0
        model(x)


def test_spectral_norm_in_training_mode_keeps_its_own_iteration() -> None:
    model, x, y = BY_NAME["spectral-norm"].make()
    twin = copy.deepcopy(model)
    model.train(), twin.train()
    tape = captured(model, x, y)
    twin(x)
    assert same(dict(model.state_dict()), dict(twin.state_dict()))
    close(tape["0"].delta.flatten(0, 1).mT @ tape["0"].h.flatten(0, 1), tape["0"].D)


def test_errors_name_the_layer_and_the_remedy() -> None:
    model, x, y = BY_NAME["mlp"].make()
    with pytest.raises(LayerError, match=r"layers='fc\*' matches no linear-like layer; there are: 0, 2, 4"):
        select_layers(model, "fc*")
    with pytest.raises(LayerError, match="has no linear-like layer"):
        select_layers(nn.Sequential(nn.ReLU()))
    with pytest.raises(LayerError, match="lookup table"):
        select_layers(nn.Sequential(nn.Embedding(3, 4)))
    with gs.capture(model) as tape:
        model(x)
    with pytest.raises(LayerError, match="no gradient reached layer '0'"):
        _ = tape["0"].delta
    with pytest.raises(LayerError, match="no captured layer '7'; there are: 0, 2, 4"):
        _ = tape["7"]
    with gs.capture(model) as tape:
        head = model(x.detach())
        tape.backward(model[4](torch.ones(2, 4, dtype=torch.float64)).sum() + 0 * head.sum())
    with pytest.raises(LayerError, match="complex weights"):
        select_layers(nn.Sequential(nn.Linear(3, 3, dtype=torch.complex64)), "0")


def test_an_unused_layer_is_named() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model, x = Unused(), torch.ones(2, 3)
    with gs.capture(model) as tape:
        model(x)
    assert tape.unsupported == {"unused": ("not applied", "not reached by the forward")}
    with pytest.raises(LayerError, match="never applied: unused"), gs.capture(model, ["used", "unused"]):
        model(x)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("0", ["0"]),
        (["0", "4"], ["0", "4"]),
        ("[24]", ["2", "4"]),
        (nn.Linear, ["0", "2", "4"]),
        ([nn.Linear, "0"], ["0", "2", "4"]),
    ],
)
def test_selectors(selector: object, expected: list[str]) -> None:
    model, _, _ = BY_NAME["mlp"].make()
    assert list(select_layers(model, selector).names) == expected  # type: ignore[arg-type]


def test_layer_assign_writes_normal_form_back() -> None:
    for case in CASES:
        model, _, _ = case.make()
        for layer in select_layers(model):
            if layer.parameter is None:
                with pytest.raises(LayerError, match="computed weight"):
                    layer.assign(layer.weight())
                continue
            new = torch.randn_like(layer.weight())
            layer.assign(new)
            close(layer.weight(), new)


class SameConv(nn.Conv2d):
    """Pads by itself, as some image libraries do: the patches are not those of the module's own padding."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 1)))


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 0.5 * self.weight, self.bias)


class LoggedLinear(nn.Linear):
    """Overrides forward without changing the map."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_overridden_forwards_are_checked(generator) -> None:
    model = nn.Sequential(
        SameConv(2, 3, 3), nn.Tanh(), nn.Flatten(), LoggedLinear(48, 5), nn.Tanh(), ScaledLinear(5, 3)
    ).double()
    x = torch.randn(4, 2, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.arange(4) % 3
    tape = captured(model, x, y)
    assert tape.order == ["3"]
    assert set(tape.unsupported) == {"0", "5"}
    assert "SameConv overrides its forward" in tape.unsupported["0"].text
    (gradient,) = torch.autograd.grad(sample_losses(model(x), y).sum(), model[3].weight)
    close(tape["3"].D, gradient)
    with pytest.raises(LayerError, match="layer '5' cannot be captured: ScaledLinear overrides"):
        captured(model, x, y, ["5", "3"])
    assert "SameConv" in gs.measure(model, (x, y)).notes["0"].text


def test_distributed_data_parallel(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, x, y = BY_NAME["mlp"].make()
        expected = captured(model, x, y)
        wrapped = nn.parallel.DistributedDataParallel(model)
        with gs.capture(wrapped) as tape:
            sample_losses(wrapped(x), y).sum().backward()
        close(tape["0"].D, expected["0"].D)
        # Before its group: a wrapper that dies after it joins the group's threads while holding the interpreter's lock, for
        # which one of them may be waiting (a deadlock in about one of a thousand, of torch alone).
        del wrapped
    finally:
        torch.distributed.destroy_process_group()


def test_encoder_decoder_transformer(generator) -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True).double()
    source = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)
    target = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    with gs.capture(model) as tape:
        tape.backward(model(source, target, tgt_mask=mask).square().sum())
    plain = model(source, target, tgt_mask=mask).square().sum()
    assert len(tape) == 4 * 3 + 4
    for record in tape:
        parameter = record.layer.parameter
        (gradient,) = torch.autograd.grad(plain, parameter, retain_graph=True)
        close(record.D, record.layer.matrix(gradient))


def test_half_precision_weights(generator) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(20, 6, generator=generator), torch.arange(20) % 3
    exact = gs.collect(model, (x, y), nn.CrossEntropyLoss(), jacobians=True)
    half = gs.collect(copy.deepcopy(model).bfloat16(), (x.bfloat16(), y), nn.CrossEntropyLoss(), jacobians=True)
    assert half["0"].D.dtype == torch.float64
    torch.testing.assert_close(half["0"].D, exact["0"].D, rtol=0.1, atol=0.1)
    torch.testing.assert_close(half["0"].K, exact["0"].K, rtol=0.1, atol=0.05)


class Gated(nn.Module):
    """Reads a layer's output, then overwrites it: on sequences that output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        gate = z.mean(-1, keepdim=True)
        z.mul_(0.5)
        return self.head(z) * gate


@pytest.mark.parametrize("shape", [(5, 3), (5, 4, 3), (5, 2, 2, 3)])
def test_in_place_operations_on_views(shape: tuple[int, ...], generator) -> None:
    model = Gated().double()
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    with gs.capture(model, outputs="inner") as tape:
        tape.backward(model(x).square().sum())
    for layer in ("inner", "head"):
        (gradient,) = torch.autograd.grad(model(x).square().sum(), model.get_submodule(layer).weight)
        close(tape[layer].D, gradient)
    close(tape.outputs["inner"], model.inner(x).detach())
    relu = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    with gs.capture(relu) as tape:
        relu(x).square().sum().backward()
    (gradient,) = torch.autograd.grad(relu(x).square().sum(), relu[0].weight)
    close(tape["0"].D, gradient)


def test_applications_of_different_lengths_add_up(generator) -> None:
    layer = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    with gs.capture(layer) as tape:
        (layer(x).square().sum() + layer(torch.cat([x, 2 * x])).square().sum()).backward()
    delta = torch.cat([2 * layer(x), 2 * layer(torch.cat([x, 2 * x]))]).detach()
    close(tape["(model)"].Sigma, delta.T @ delta)


def test_sums_are_full_precision_inside_autocast(generator) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(50, 6, generator=generator)
    with torch.autocast("cpu", torch.bfloat16), gs.capture(model) as tape:
        tape.backward(model(x).square().sum())
        delta, Sigma, D = tape["0"].delta.double(), tape["0"].Sigma, tape["0"].D
    assert Sigma.dtype == torch.float32
    torch.testing.assert_close(Sigma.double(), delta[:, 0].T @ delta[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(D.double(), delta[:, 0].T @ x.double(), rtol=1e-5, atol=1e-6)


def test_attention_modules_are_forgotten_after_the_capture() -> None:
    from gramscope.layers import hooks

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    with gs.capture(attention):
        attention(torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.ones(1, 2, 4))
        assert attention in hooks._ATTENTION_TAPS
    assert attention not in hooks._ATTENTION_TAPS


def test_an_empty_capture_is_announced() -> None:
    from gramscope.errors import ResultWarning

    with pytest.warns(ResultWarning, match="nothing was captured"), gs.capture(nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("use", ["capture", "capture that fails", "collect", "measure", "monitor"])
def test_models_are_not_kept_alive(use: str) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(8, 2))
    alive = [weakref.ref(module) for module in model.modules()]
    x, y = torch.ones(4, 2, 4), torch.arange(4) % 2
    if use == "capture":
        with gs.capture(model):
            model(x).sum().backward()
    elif use == "capture that fails":
        with pytest.raises(RuntimeError, match="shape"), gs.capture(model):
            model(torch.ones(4, 3, 4))
    elif use == "collect":
        gs.collect(model, (x, y), nn.CrossEntropyLoss(), jacobians=True)
    elif use == "measure":
        gs.measure(model, (x, y), nn.CrossEntropyLoss(), reference=copy.deepcopy(model))
    else:
        monitor = gs.Monitor(model, (x, y), nn.CrossEntropyLoss(), measures="nfa_double", every=1)
        monitor.step()
        del monitor
    del model
    gc.collect()
    assert not [ref() for ref in alive if ref() is not None]


def test_only_the_last_output_of_a_module_is_kept() -> None:
    layer = nn.Linear(2, 2)
    with gs.capture(layer, outputs="(model)") as tape:
        layer(torch.zeros(1, 2))
        last = layer(torch.ones(3, 2))
    assert torch.equal(tape.outputs["(model)"], last)
    assert tape.output_counts == {"(model)": 2}
