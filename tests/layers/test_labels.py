"""Labels in the convention of a model that computes its own loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from gramscope.errors import InputError
from gramscope.layers.labels import LabelReader


class Speaker(nn.Module):
    """Scores of words from the words so far; its loss shifts its labels by ``shift``."""

    def __init__(self, shift: int, zero: bool = False) -> None:
        super().__init__()
        self.shift = shift
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        if zero:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.embed(input_ids).cumsum(1))
        if labels is None:
            return {"logits": logits}
        scores = logits[:, : logits.shape[1] - self.shift]
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels[:, self.shift :].flatten()), "logits": logits}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_model_is_asked_whether_it_shifts(shift: int, zero: bool) -> None:
    model = Speaker(shift, zero).double()
    ids = torch.arange(30).reshape(6, 5) % 7
    labels = ids.clone()
    labels[:, 0] = -100
    read = LabelReader(model).read({"input_ids": ids, "labels": labels}, labels)
    expected = F.pad(labels[:, 1:], (0, 1), value=-100) if shift else labels
    assert torch.equal(read.target, expected)
    assert ("(targets)" in read.notes) == bool(shift)
    table = gs.measure(model, {"input_ids": ids, "labels": labels}, measures=["gradient_norm", "surrogate"])
    assert table.network["loss"] == pytest.approx(float(model(ids, labels)["loss"].detach()))
    assert table.network["positions"] == 24


def test_without_labels_there_is_no_loss() -> None:
    model, ids = Speaker(1), torch.arange(30).reshape(6, 5) % 7
    table = gs.measure(model, {"input_ids": ids})
    assert "gradient_norm" not in table.columns
    with pytest.raises(InputError, match="measure 'gradient_norm' needs loss="):
        gs.measure(model, {"input_ids": ids}, measures="gradient_norm")


def test_a_batch_without_a_label_that_counts() -> None:
    model, ids = Speaker(1).double(), torch.arange(30).reshape(6, 5) % 7
    data = [{"input_ids": ids[:3], "labels": ids[:3]}, {"input_ids": ids[3:], "labels": torch.full((3, 5), -100)}]
    table = gs.measure(model, data, measures="gradient_norm")
    assert table.network["loss"] == pytest.approx(float(model(ids[:3], ids[:3])["loss"].detach()))
    assert table.network["positions"] == 12


def test_as_many_words_as_positions() -> None:
    """Scores [batch, 7, 7] of sequences have their classes last."""
    model, ids = Speaker(1).double(), torch.arange(42).reshape(6, 7) % 7
    data = {"input_ids": ids, "labels": ids}
    own, stated = (gs.measure(model, data, loss, measures="gradient_norm") for loss in (None, nn.CrossEntropyLoss()))
    assert stated.network == pytest.approx(own.network)
    assert stated["head"] == pytest.approx(own["head"])


def test_labels_of_another_length_than_the_outputs_are_not_shifted() -> None:
    """A loss over alignments (CTC) has labels for a whole recording, none for single outputs."""

    class Alignment(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 5)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            scores = self.head(x)
            return {"loss": scores.square().mean(), "logits": scores}

    data = {"x": torch.randn(6, 7, 3), "labels": torch.randint(5, (6, 4))}
    assert "(targets)" not in gs.measure(Alignment(), data, measures="nfa").notes
