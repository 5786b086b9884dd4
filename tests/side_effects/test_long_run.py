"""The long run of ``studies/long_run.py`` at a fiftieth of its length: memory is flat and the bases stay orthonormal."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS = 2000
#: bytes that the process may grow by after its first quarter, and the largest entry of |UUᵀ − I|
RESIDENT, DEVIATION = 16 << 20, 1e-4
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
        "side effect", f"steps of VCL with every form of the basis|{STEPS}|{growth} bytes, |UUᵀ − I| ≤ {worst:.1e}"
    )
    assert [look.step for look in looks] == [500, 1000, 1500, 2000]
    assert all(len(look.deviation) == 3 for look in looks)
    assert worst < DEVIATION
    assert growth < RESIDENT
