"""Names resolve, settings can be stored, parts have names of their own, at both scales."""

from __future__ import annotations

import tomllib

import pytest
import tomli_w

from gramscope_lab.experiments.catalogue import PAPERS, Entry, catalogue, find
from gramscope_lab.experiments.experiment import Options, settings_table, with_values
from refusals import assert_refused


def test_names_are_unique_and_cited() -> None:
    names = [entry.name for entry in catalogue()]
    assert len(set(names)) == len(names)
    assert {f"nfa-fig{number}" for number in range(1, 10)} <= set(names)
    assert {entry.source.split()[0] for entry in catalogue()} <= set(PAPERS)


def test_find_forgives_case_and_names_the_closest() -> None:
    assert find("NFA_fig1").name == "nfa-fig1"
    assert_refused("did you mean 'nfa-fig1'", find, "nfa-fig11x")


@pytest.mark.parametrize("entry", catalogue(), ids=lambda entry: entry.name)
@pytest.mark.parametrize("scale", ["quick", "paper"])
def test_settings_and_parts(entry: Entry, scale: str) -> None:
    experiment = entry.load()
    settings = getattr(experiment, scale)
    stored = tomllib.loads(tomli_w.dumps(settings_table(settings)))
    assert with_values(entry.name, settings, stored) == settings
    names = [part.name for part in experiment.parts(settings, Options(scale, device="cpu"))]  # type: ignore[arg-type]
    assert names
    assert len(set(names)) == len(names)
    assert "claims" not in names
