from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from cases import normal, refused

X = normal(64, 10).float()
Y = torch.sin(X[:, :1] * 2) + X[:, 1:2]
WIDTHS = [64, 128, 256, 512]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1, bias=False)
    )


def mup(width: int) -> nn.Module:
    """Readout of size 1/width, hidden weights of size 1/√width."""
    model = mlp(width)
    nn.init.normal_(model[4].weight, std=4 / width)
    return model


def adam(model: nn.Module, width: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def mup_adam(model: nn.Module, width: int) -> torch.optim.Optimizer:
    """One rate for vectors and inputs, a rate ∝ 1/width for matrices that read the width."""
    wide = [model[2].weight, model[4].weight]
    rest = [model[0].weight, model[0].bias, model[2].bias]
    return torch.optim.Adam([{"params": wide, "lr": 0.01 * 64 / width}, {"params": rest, "lr": 0.01}])


def test_standard_parametrisation_grows_and_maximal_update_does_not() -> None:
    standard = gs.coordinate_check(mlp, WIDTHS, (X, Y), nn.MSELoss(), adam, steps=3)
    maximal = gs.coordinate_check(mup, WIDTHS, (X, Y), nn.MSELoss(), mup_adam, steps=3)
    assert standard.layers == ("0", "2", "4")
    for layer in ("0", "2"):  # at initialisation both keep hidden sizes
        assert abs(standard.slopes(0)[layer]) < 0.1
        assert abs(maximal.slopes(0)[layer]) < 0.1
    assert standard.slopes()["2"] > 0.4
    assert standard.slopes(2)["4"] > 0.7
    assert abs(maximal.slopes()["2"]) < 0.15
    assert abs(maximal.slopes()["4"]) < 0.3


def test_sizes_are_those_of_a_plain_loop() -> None:
    check = gs.coordinate_check(mlp, [8, 4], (X, Y), nn.MSELoss(), adam, steps=2, seeds=2)
    assert check.widths == (4, 8)
    expected = np.zeros((3, 3, 2))
    with torch.random.fork_rng():
        for column, width in enumerate((4, 8)):
            for seed in range(2):
                torch.random.manual_seed(seed)
                model = mlp(width)
                optimizer = adam(model, width)
                for step in range(3):
                    a = model[0](X)
                    b = model[2](a.relu())
                    c = model[4](b.relu())
                    expected[step, :, column] += [float(z.detach().double().abs().mean()) / 2 for z in (a, b, c)]
                    optimizer.zero_grad()
                    nn.functional.mse_loss(c, Y).backward()
                    optimizer.step()
    found = np.array([[sizes[name] for name in check.layers] for sizes in check.sizes])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    slope = np.polyfit(np.log([4, 8]), np.log(expected[2, 1]), 1)[0]
    assert check.slopes()["2"] == pytest.approx(slope, rel=1e-4)


def test_random_state_and_data_of_the_caller_stay() -> None:
    before = torch.random.get_rng_state()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=16)
    whole = gs.coordinate_check(mlp, [4, 8], loader, nn.MSELoss(), adam, steps=1, seeds=1)
    first = gs.coordinate_check(mlp, [4, 8], (X[:16], Y[:16]), nn.MSELoss(), adam, steps=1, seeds=1)
    assert whole == first
    assert torch.equal(before, torch.random.get_rng_state())


def test_table() -> None:
    check = gs.coordinate_check(mlp, [4, 8], (X, Y), nn.MSELoss(), adam, steps=1, seeds=1, layers=["0", "4"])
    lines = str(check).splitlines()
    assert lines[0].split() == ["step", "layer", "4", "8", "slope"]
    assert len(lines) == 1 + 2 * 2


def test_what_cannot_be_checked() -> None:
    arguments = ((X, Y), nn.MSELoss(), adam)
    refused(gs.coordinate_check, mlp, [4], *arguments, match="at least two different")
    refused(gs.coordinate_check, mlp, [4, 8], *arguments, steps=0, match="steps=0")
    refused(
        gs.coordinate_check, lambda width: mlp(4) if width == 4 else nn.Sequential(nn.Linear(10, 1)), [4, 8], *arguments,
        match="same names for every width",
    )  # fmt: skip
    each = nn.MSELoss(reduction="none")
    refused(gs.coordinate_check, mlp, [4, 8], (X, Y), each, adam, match=r"the loss has shape \(64, 1\)")

    def dead(width: int) -> nn.Module:
        model = mlp(width)
        nn.init.zeros_(model[4].weight)
        return model

    check = gs.coordinate_check(dead, [4, 8], *arguments, steps=1)
    assert math.isnan(check.slopes(0)["4"])


def test_models_with_other_inputs_and_outputs() -> None:
    class Both(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.body = mlp(width)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.body(x), "other": x}

    check = gs.coordinate_check(Both, [4, 8], {"x": X, "y": Y}, nn.functional.l1_loss, adam, steps=1)
    assert check.layers == ("body.0", "body.2", "body.4")


def test_the_loss_of_a_language_model_itself() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def make(width: int) -> nn.Module:
        sizes = {"n_embd": width, "n_layer": 1, "n_head": 2, "vocab_size": 13, "n_positions": 8}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

    ids = torch.arange(32).reshape(4, 8) * 5 % 13
    batch = {"input_ids": ids, "labels": ids}
    own = gs.coordinate_check(make, [4, 8], batch, None, adam, steps=2, seeds=1)

    def tokens(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    given = gs.coordinate_check(make, [4, 8], batch, tokens, adam, steps=2, seeds=1)
    for step in range(3):
        for layer in own.layers:
            assert own.sizes[step][layer] == pytest.approx(given.sizes[step][layer], rel=1e-4)
    refused(gs.coordinate_check, mlp, [4, 8], (X, Y), None, adam, match="the model returns no loss")
