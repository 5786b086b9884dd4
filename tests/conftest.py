"""Shared test settings: a fixed hypothesis profile and where the real data sets may be."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "gramscope", deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gramscope")

# Before Triton is imported: where it cannot compile, its kernels are tested in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A job that a script starts in the background inherits an ignored interrupt; the tests send themselves one and want it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup() -> None:
    """Weights and samples that a test draws without a generator do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with MNIST and CIFAR-10 in official layouts; the test is skipped where it is absent."""
    candidates = [os.environ.get("GRAMSCOPE_DATA"), Path(__file__).parents[2] / "shared" / "data"]
    for candidate in candidates:
        if candidate and Path(candidate).is_dir():
            return Path(candidate)
    pytest.skip("no data folder: set GRAMSCOPE_DATA to a folder with mnist/ or cifar-10-batches-bin/")


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator, so that tests never touch the global random state."""
    return torch.Generator().manual_seed(0)
