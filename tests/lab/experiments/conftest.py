"""Experiments at small settings, each run once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from gramscope_lab.experiments.experiment import Options, Reproduction, Results, reproduce, with_values
from gramscope_lab.runs.directory import RunDirectory
from small_experiments import SMALL


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reproduction]:
    """Reproduces an experiment at its small settings."""
    folder = tmp_path_factory.mktemp("runs")
    return cache(lambda name: reproduce(name, Options(device="cpu"), values=SMALL[name], out=folder / name))


@pytest.fixture
def results(done: Callable[[str], Reproduction]) -> Callable[[str], Results[Any]]:
    """The records of an experiment at its small settings."""

    def read(name: str) -> Results[Any]:
        made = done(name)
        settings = with_values(name, made.entry.load().quick, SMALL[name])
        return Results(name, settings, made.options, RunDirectory(made.path))

    return read
