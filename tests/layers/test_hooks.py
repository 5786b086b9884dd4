"""Hooks see a layer's own inputs and outputs, through wrappers too, and leave no trace."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, CASES, Case, captured, close, normal, sample_losses
from gramscope.layers import intercepted_functions

ids = [case.name for case in CASES]


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
    if isinstance(model, nn.Sequential) and case.name != "spectral-norm":
        model[0].train()
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


def test_hooks_are_gone_when_the_forward_raises() -> None:
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


def test_encoder_fast_path_is_taken_apart_and_restored() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).double().eval()
    x = normal(3, 4, 8)
    mask = torch.tensor([[False, False, False, True]] * 3)
    enabled = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), gs.capture(encoder, gradients=False) as tape:
        encoder(x, src_key_padding_mask=mask)
    assert len(tape) == 12
    assert torch.backends.mha.get_fastpath_enabled() is enabled


def test_spectral_norm_in_training_mode_keeps_its_own_iteration() -> None:
    model, x, y = BY_NAME["spectral-norm"].make()
    twin = copy.deepcopy(model)
    model.train(), twin.train()
    tape = captured(model, x, y)
    twin(x)
    assert same(dict(model.state_dict()), dict(twin.state_dict()))
    close(tape["0"].delta.flatten(0, 1).mT @ tape["0"].h.flatten(0, 1), tape["0"].D)


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_models_run_eagerly_inside(in_place: bool) -> None:
    model, x, y = BY_NAME["repeated"].make()
    expected = captured(model, x, y)
    calls = []

    def backend(graph, inputs):
        calls.append(1)
        return graph.forward

    if in_place:
        model.compile(backend=backend)
        compiled = model
    else:
        compiled = torch.compile(model, backend=backend)
    compiled(x)  # hooks added after this call would never fire in the compiled code
    assert calls
    with gs.capture(compiled) as tape:
        tape.backward(sample_losses(compiled(x), y))
    close(tape["inner"].D, expected["inner"].D)
    torch.compiler.reset()


def test_data_parallel_wrapper_is_looked_through() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"  # it would move the batch there
    model, x, y = (part.to(device) for part in BY_NAME["mlp"].make())
    wrapped = nn.DataParallel(model)
    with gs.capture(wrapped) as tape:
        tape.backward(sample_losses(wrapped(x), y))
    assert list(tape.records) == ["0", "2", "4"]


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


def test_attention_modules_are_forgotten_after_the_capture() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    with gs.capture(attention):
        attention(torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.ones(1, 2, 4))
        assert attention in intercepted_functions._TAPS
    assert attention not in intercepted_functions._TAPS


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
