"""Where runs may train, and what is refused."""

from __future__ import annotations

import pytest

from gramscope_lab.training.placement import Placement
from refusals import assert_refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("spark",), "--engine spark: use local or ray"),
        (("local", "auto"), "add --engine ray"),
        (("ray", "", 1.5), "--gpus 1.5: give a share between 0 and 1, or whole GPUs"),
        (("ray", "", 0.0), "--gpus 0"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str) -> None:
    assert_refused(message, Placement, *arguments)


def test_what_stays_in_this_process() -> None:
    assert Placement().execution("vectorised", 3, portable=True) == ("vectorised", "")
    ray = Placement("ray")
    assert ray.execution("auto", 3, portable=True) == ("processes", "")
    assert ray.execution("auto", 1, portable=True)[1].startswith("one run")
    assert "Python objects" in ray.execution("auto", 3, portable=False)[1]
    assert_refused("keeps all runs in one process", ray.execution, "one-by-one", 3, portable=True)
