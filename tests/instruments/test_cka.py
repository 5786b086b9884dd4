from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, normal, randoms, refused, split, twin_of


def features(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Means over sites of the layers' inputs."""
    with gs.capture(model, gradients=False) as tape:
        model(x)
    means = {record.name: record.h.mean(-2) for record in tape}
    return {name: h.movedim(0, 1).flatten(1) if h.dim() == 3 else h for name, h in means.items()}


@pytest.mark.parametrize("name", ["mlp", "encoder", "conv2d-grouped"])
def test_one_batch_equals_the_cka_of_arrays(name: str) -> None:
    model, x, _ = BY_NAME[name].make()
    x, twin = normal(30, *x.shape[1:], seed=5), twin_of(model)
    for other in (None, twin):
        found = gs.cka(model, x, other)
        left, right = features(model, x), features(other or model, x)
        assert found.rows == tuple(left)
        assert found.columns == tuple(right)
        for a, X in left.items():
            for b, Y in right.items():
                assert found[a, b] == pytest.approx(float(gs.linear_cka(X, Y, debiased=True)), rel=1e-8), (a, b)
    assert found.diagonal() == {a: found[a, a] for a in left}


def test_batches_average_unbiased_estimates() -> None:
    model, _, _ = BY_NAME["mlp"].make()
    x = normal(3000, 5)
    whole = features(model, x)
    found = gs.cka(model, split(x, torch.zeros(3000), 60))
    for a, X in whole.items():
        for b, Y in whole.items():
            assert found[a, b] == pytest.approx(float(gs.linear_cka(X, Y)), abs=0.02)
    at_once = gs.cka(model, x)  # in parts of 500
    parts = gs.cka(model, list(x.split(500)))
    torch.testing.assert_close(at_once.values, parts.values)
    assert at_once.samples == found.samples == 3000


def test_padding_does_not_count() -> None:
    """The mean over sites leaves padding out, so that longer padding changes nothing."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(**sizes)).double().eval()
    ids = torch.arange(48).reshape(8, 6) * 7 % 19 + 1
    mask = torch.ones_like(ids)
    mask[::2, 4:] = 0
    longer, wide = (nn.functional.pad(t, (0, 3)) for t in (ids, mask))
    a = gs.cka(model, {"input_ids": ids, "attention_mask": mask})
    b = gs.cka(model, {"input_ids": longer, "attention_mask": wide})
    torch.testing.assert_close(a.values, b.values, equal_nan=True)  # embeddings of token types are constant
    assert a.values.isnan().sum() == 2 * len(a.values) - 1


def test_shown_as_table_and_map() -> None:
    model, other = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    found = gs.cka(model, torch.rand(20, 4), other)
    assert str(found).splitlines()[0].split() == ["CKA", "0", "2"]
    assert found["(model)", "0"] == pytest.approx(1.0)
    axes = found.plot().axes[0]
    assert axes.get_images()[0].get_array().tolist() == found.values.tolist()
    refused(lambda: found["(model)", "9"], match="no layer '9'; there are: 0, 2")


def test_what_cannot_be_compared() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    refused(gs.cka, model, x[:3], match="at least 4 samples, and every batch had fewer")
    refused(gs.cka, model, x, tokens="each", match="one row per sample")
    whole, tail = randoms((8, 5), (2, 5))
    assert gs.cka(model, [(whole, None), (tail, None)]).samples == 8


def test_models_that_share_layers() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    x, deeper = normal(20, 5), nn.Sequential(nn.Linear(5, 5).double(), nn.Tanh(), model[0])
    left, right = features(model, x), features(deeper, x)
    found = gs.cka(model, x, deeper)
    for a, X in left.items():
        for b, Y in right.items():
            assert found[a, b] == pytest.approx(float(gs.linear_cka(X, Y, debiased=True)), rel=1e-8)
    torch.testing.assert_close(gs.cka(model, x, model).values, gs.cka(model, x).values)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)).train()
    before = torch.random.get_rng_state()
    gs.cka(model, torch.ones(8, 4) * torch.arange(8)[:, None], copy.deepcopy(model))
    assert model.training
    assert model[1].training
    assert torch.equal(before, torch.random.get_rng_state())
