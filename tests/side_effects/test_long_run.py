"""The long run of ``studies/long_run.py`` at a hundredth of its length: memory is flat and the bases stay orthonormal."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS = 1000
#: by how much process and Python's objects may grow after the first quarter, and the largest entry of |UUᵀ − I|
RESIDENT, OBJECTS, DEVIATION = 16 << 20, 100, 1e-4
STUDY = Path(__file__).parents[2] / "studies" / "long_run.py"


@pytest.mark.filterwarnings("ignore::gramscope.errors.RescueWarning")
def test_memory_and_bases_over_many_steps(record_property: Any) -> None:
    if not STUDY.exists():
        pytest.skip("the studies are not part of a source distribution")
    spec = importlib.util.spec_from_file_location("long_run", STUDY)
    assert spec is not None
    assert spec.loader is not None
    study = sys.modules["long_run"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    looks = list(study.long_run(STEPS, looks=4))
    worst = max(value for look in looks for value in look.deviation.values())
    growth = looks[-1].resident - looks[0].resident
    record_property(
        "side effect",
        f"steps of VCL with every form of the basis|{STEPS}|{growth} bytes of the process, |UUᵀ − I| ≤ {worst:.1e}",
    )
    assert [look.step for look in looks] == [250, 500, 750, 1000]
    assert all(len(look.deviation) == 3 for look in looks)
    assert worst < DEVIATION
    assert growth < RESIDENT
    assert looks[-1].objects - looks[0].objects < OBJECTS
