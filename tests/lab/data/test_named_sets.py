"""The catalogue tells the truth about every set that needs no download, and seeds do what they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gramscope.errors import InputError
from gramscope_lab.data import catalogue, load
from refusals import assert_refused

LOCAL = [entry for entry in catalogue() if entry.source is None]


@pytest.mark.parametrize("entry", LOCAL, ids=lambda entry: entry.name)
def test_the_catalogue_tells_the_truth(entry: Any, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    data = load(entry.name, tmp_path, download=False)
    assert torch.equal(before, torch.get_rng_state())
    assert (data.name, len(data.x_train), len(data.x_test)) == (entry.name, entry.train, entry.test)
    assert (data.input_shape, data.classes) == (entry.input_shape, entry.classes)
    assert data.x_train.dtype == torch.float32
    assert data.citation == entry.citation
    assert list(tmp_path.iterdir()) == []
    again, other = load(entry.name, seed=0), load(entry.name, seed=1)
    assert torch.equal(data.x_train, again.x_train)
    assert torch.equal(data.y_test, again.y_test)
    if entry.kind == "generated":
        assert not torch.equal(data.x_train, other.x_train)


def test_names_are_unique_and_every_download_has_a_digest() -> None:
    names = [entry.name for entry in catalogue()]
    assert len(set(names)) == len(names)
    for entry in catalogue():
        for file in entry.source.archives if entry.source else ():
            assert len(file.sha256) == 64
            assert int(file.sha256, 16)
            assert file.size > 0
            assert file.url.startswith(("http://", "https://"))


def test_unknown_names_and_options_are_explained() -> None:
    assert_refused("did you mean 'cifar10'", load, "cifra10")
    assert_refused("there are: digits", load, "zzz")
    with pytest.raises(InputError, match=r"chain-monomial has no option ranks; it has: n_train, n_test, d, rank"):
        load("chain-monomial", ranks=3)
