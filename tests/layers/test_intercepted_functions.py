"""Weights that functions use, against networks that call the layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, Around, captured, close, close_to_autograd, close_to_twin, normal, sample_losses
from gramscope.layers.intercepted_functions import _TAPS


def test_weights_of_parts_that_are_not_called() -> None:
    model, x, y = BY_NAME["functions-of-weights"].make()

    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = m.enter(x).mT
        x = F.silu(m.conv(x)[..., : x.shape[-1]])
        x = torch.tanh(m.mix(x.mT))
        return m.head(torch.tanh(m.step(x)).mean(1))

    twin = Around(run, **dict(model.named_children()))
    twin.mix, twin.step = nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 6, bias=False).double()
    twin.mix.weight, twin.step.weight = model.mix.weight, model.step.weight
    close_to_twin(model, twin, {name: name for name in ("enter", "conv", "mix", "step", "head")}, x, y)


def test_subclasses_with_a_forward_of_their_own() -> None:
    model, x, y = BY_NAME["own-forward"].make()
    twin = Around(
        lambda m, x: torch.sigmoid(m.b(torch.sigmoid(m.a(x)) + model[0].bias)) + model[1].bias,
        a=nn.Linear(5, 4, bias=False),
        b=nn.Linear(4, 3, bias=False),
    )
    twin.a.weight, twin.b.weight = model[0].weight, model[1].weight
    close_to_twin(model, twin, {"0": "a", "1": "b"}, x, y)


class Routed(nn.Module):
    """Ends in a product with a float64 copy of a float32 weight, as routers of bfloat16 models compute in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gate = nn.Linear(5, 4).double(), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.enter(x)), self.gate.weight.double())


def test_a_copy_of_the_weight_in_another_dtype() -> None:
    model, x, y = Routed(), normal(7, 5), torch.arange(7) % 3
    twin = nn.Sequential(model.enter, nn.Tanh(), nn.Linear(4, 3, bias=False).double())
    with torch.no_grad():
        twin[2].weight.copy_(model.gate.weight)
    names = ["gradient_norm", "nfa", "target_linearity"]
    found = gs.measure(model, (x, y), nn.CrossEntropyLoss(), measures=names)
    expected = gs.measure(twin, (x, y), nn.CrossEntropyLoss(), measures=names)
    assert found["gate"] == pytest.approx(expected["2"], rel=1e-6)
    assert found["enter"] == pytest.approx(expected["0"], rel=1e-6)


def test_mamba() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=30, hidden_size=8, num_hidden_layers=2, state_size=4, use_cache=False)
    model = transformers.MambaForCausalLM(config).double().eval()
    ids = torch.arange(18).reshape(3, 6)
    with gs.capture(model) as tape:
        tape.backward(model(ids).logits.square().sum((1, 2)))
    assert not tape.unsupported.keys() - {"backbone.layers.0.mixer", "backbone.layers.1.mixer"}  # A_log
    total = model(ids).logits.square().sum()
    names = {record.name.rpartition(".")[2] for record in tape}
    assert names == {"embeddings", "conv1d", "in_proj", "x_proj", "dt_proj", "out_proj", "lm_head"}
    tied = {"backbone.embeddings", "lm_head"} if config.tie_word_embeddings else set()
    for record in tape:
        if record.name not in tied:
            (gradient,) = torch.autograd.grad(total, record.layer.parameter, retain_graph=True)
            close(record.D, record.layer.to_matrix(gradient))


def test_a_convolution_with_other_options_is_not_taken_for_the_layer() -> None:
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv1d(2, 3, 3, padding=1), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.conv1d(x, self.conv.weight, padding=2).mean(-1))

    tape = captured(Moved().double(), normal(4, 2, 5), torch.arange(4) % 3)
    assert tape.order == ["head"]
    assert "did not call it" in tape.unsupported["conv"].text


@pytest.mark.parametrize("name", ["functions-of-weights", "own-forward", "lstm", "experts"])
def test_nothing_is_left_behind_by_an_error(name: str) -> None:
    model, x, y = BY_NAME[name].make()
    with pytest.raises(RuntimeError), gs.capture(model):
        model(x[..., :-1])
    assert not [
        module for module in model.modules() if module in _TAPS or module._forward_hooks or module._forward_pre_hooks
    ]
    tape = captured(model, x, y)
    if name != "own-forward":
        close_to_autograd(tape, sample_losses(model(x), y).sum())
