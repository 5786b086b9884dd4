"""Parts merge to what one pass gives: any split and order, parts that lack something, and over processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, normal, pooled, refused, split
from comparing import assert_same, collected
from gramscope.errors import joined
from gramscope.statistics.matrix_sums import Kernel
from gramscope.statistics.result import Statistics
from gramscope.statistics.sums import Plan
from routed_experts import OPTIONS, routed


@given(st.permutations(range(12)), st.lists(st.integers(1, 11), min_size=0, max_size=3), st.booleans())
def test_merge_is_one_pass_under_any_split_and_order(order: list[int], cuts: list[int], labels: bool) -> None:
    model, _, _ = BY_NAME["mlp"].make()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64) + 10
    y = torch.arange(12) % 3 if labels else torch.randn(12, 3, generator=generator, dtype=torch.float64)
    loss: Callable[..., Tensor] = F.cross_entropy if labels else F.mse_loss
    whole = gs.collect(model, (x, y), loss, jacobians=True, residuals=True)
    edges = [0, *sorted(set(cuts)), 12]
    parts = [
        gs.collect(model, (x[order[a:b]], y[order[a:b]]), loss, jacobians=True, residuals=True)
        for a, b in pairwise(edges)
    ]
    assert_same(whole, reduce(Statistics.merge, parts))


def test_merge_refuses_other_layers_options_and_weights() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = gs.collect(model, (x, y), F.cross_entropy)
    refused(stats.merge, gs.collect(model, (x, y), F.cross_entropy, layers="0"), match="different layers")
    refused(stats.merge, gs.collect(model, (x, y)), match="collected with different options")
    with torch.no_grad():
        model[0].weight.add_(1)
    refused(stats.merge, gs.collect(model, (x, y), F.cross_entropy), match="different weights")


def test_merge_keeps_the_number_of_processes() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = replace(gs.collect(model, (x, y), F.cross_entropy), processes=2)
    assert stats.merge(stats).processes == 2
    refused(stats.merge, replace(stats, processes=1), match="of 2 and of 1 processes")


def test_all_reduce_without_a_group_changes_nothing() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = gs.collect(model, (x, y))
    assert stats.all_reduce() is stats


def test_an_expert_with_all_rows_of_one_batch_has_no_features() -> None:
    model, x, y = routed()
    for size in (12, 5, 4):  # the first 5 and the first 4 samples are all of expert 0
        stats = gs.collect(model, split(x, y, size), F.cross_entropy)
        assert stats["experts.0"].features is None
        assert "cannot be paired" in joined(stats.notes["experts.0"]).text
        assert next(iter(stats.layers)) == "embed"
        assert list(stats.layers)[-1] == "r"
    table = gs.measure(model, split(x, y, 5), F.cross_entropy, measures=["nc3", "target_linearity"])
    assert table["r"]["nc3"] is not None  # the readout is last, whenever the experts were seen first
    assert table["experts.0"]["target_linearity"] is None


@pytest.mark.parametrize("cut", [3, 5, 9])
def test_parts_that_have_not_seen_every_layer_merge_as_one_pass(cut: int) -> None:
    model, x, y = routed()
    whole = gs.collect(model, (x, y), F.cross_entropy, **OPTIONS)
    first, second = (
        gs.collect(model, (x[part], y[part]), F.cross_entropy, **OPTIONS) for part in (slice(cut), slice(cut, None))
    )
    for merged in (first.merge(second), second.merge(first)):
        assert_same(whole, merged)
        assert merged.notes.keys() == whole.notes.keys()
        assert not any(note.kind == "not applied" for found in merged.notes.values() for note in found)
        D = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), model.experts[2].weight)[0]
        torch.testing.assert_close(merged["experts.2"].D, D)
        assert merged["experts.2"].n == 12


def test_parts_collected_with_other_options_are_refused() -> None:
    model, x, y = routed()
    full = gs.collect(model, (x, y), F.cross_entropy)
    for options in ({"features": False}, {"covariance": False}, {"gram": True}, {"jacobians": True}, {"outputs": "r"}):
        (name,) = options if options.keys() & {"gram", "outputs"} else ("sums",)
        other = gs.collect(model, (x, y), F.cross_entropy, **options)
        refused(full.merge, other, match=f"different options: {name}=")
        refused(other.merge, full, match=f"different options: {name}=")


def test_jacobians_that_some_batches_are_too_wide_for() -> None:
    """Those of many outputs are sketched, those of few are not, and the two add up."""
    model = nn.Linear(3, 50).double()
    short, long = (normal(4, 2, 3), None), (normal(4, 9, 3), None)  # 100 and 450 outputs
    parts = [gs.collect(model, [part], jacobians="auto") for part in (short, long)]
    assert parts[0]["(model)"].JtJ is not None
    for stats in (gs.collect(model, [short, long], jacobians="auto"), parts[0].merge(parts[1])):
        assert torch.equal(stats["(model)"].JtJ.diagonal(), torch.full((50,), 44.0).double())  # 4 samples, 11 sites
        assert "450 outputs" in joined(stats.notes["(output)"]).text
    narrow, plan = nn.Linear(50, 50).double(), Plan((Kernel,), at_inputs=frozenset({Kernel}))
    exact, both = (normal(4, 2, 50), None), (normal(4, 9, 50), None)
    apart = [collected(narrow, [part], None, plan)["(model)"][Kernel] for part in (exact, both)]
    assert [part.parts.shape[0] for part in apart] == [1, 4]
    for order in ([exact, both], [both, exact]):
        stats = collected(narrow, order, None, plan)["(model)"]
        assert stats[Kernel].parts.shape[0] == 4
        assert torch.allclose(stats.K, sum(part.parts.sum(0) for part in apart) / 8)


def test_residuals_that_some_batches_do_not_have() -> None:
    model, y = pooled(3, 4, 3), torch.arange(4) % 3
    data = [(normal(4, 1, 3), y), (normal(4, 5, 3), y)]
    for order in (data, data[::-1]):
        stats = gs.collect(model, order, F.cross_entropy, residuals=True)
        assert stats["e"].features.HtE is None
        assert stats["r"].features.HtE is not None
