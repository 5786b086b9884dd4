from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gramscope.errors import MissingExtraError
from gramscope_lab.data import load
from official_files import write_celeba
from refusals import assert_refused


def celeba_files(folder: Path) -> list[int]:
    """Pictures of one grey each, which says who it is: 30 of training, 6 of validation, 12 of test; a third has glasses."""
    greys = [5 * i for i in range(48)]
    pictures = [np.full((218, 178, 3), grey, np.uint8) for grey in greys]
    write_celeba(folder, pictures, [i % 3 == 0 for i in range(48)], [0] * 30 + [1] * 6 + [2] * 12)
    return greys


def test_celeba_balanced_glasses(tmp_path: Path) -> None:
    greys = celeba_files(tmp_path / "celeba")
    data = load("celeba", tmp_path, n_train=12, n_test=None, image_size=8, seed=1, download=False)
    assert data.x_train.shape == (12, 3, 8, 8)
    assert data.y_train.sum() == 6
    assert (len(data.y_test), int(data.y_test.sum())) == (8, 4)
    who = [min(range(48), key=lambda i: abs(greys[i] - 255 * float(v))) for v in data.x_train.mean((1, 2, 3))]
    assert len(set(who)) == 12
    assert max(who) < 30
    assert [int(i % 3 == 0) for i in who] == data.y_train.tolist()
    other = load("celeba", tmp_path, n_train=12, n_test=4, image_size=8, seed=2, grey=True, download=False)
    assert other.input_shape == (1, 8, 8)
    assert not torch.allclose(other.x_train.mean((1, 2, 3)), data.x_train.mean((1, 2, 3)))
    every = load("celeba", tmp_path, n_train=None, n_test=None, balanced=False, image_size=4, download=False)
    assert (len(every.x_train), len(every.x_test)) == (30, 12)


def test_celeba_from_the_zip_file(tmp_path: Path) -> None:
    celeba_files(tmp_path / "celeba")
    options = {"n_train": 6, "n_test": 4, "image_size": 4, "download": False}
    from_folder = load("celeba", tmp_path, **options)
    with zipfile.ZipFile(tmp_path / "celeba" / "img_align_celeba.zip", "w") as archive:
        for path in sorted((tmp_path / "celeba" / "img_align_celeba").iterdir()):
            archive.write(path, f"img_align_celeba/{path.name}")
    shutil.rmtree(tmp_path / "celeba" / "img_align_celeba")
    from_zip = load("celeba", tmp_path, **options)
    assert torch.equal(from_folder.x_train, from_zip.x_train)


def test_wrong_celeba_files_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    celeba_files(tmp_path)
    options = {"n_train": 6, "n_test": 4, "image_size": 4, "download": False}
    assert_refused("Bald, Eyeglasses", load, "celeba", tmp_path, attribute="Monocle", **options)
    assert_refused("50 balanced samples wanted, 20 are there", load, "celeba", tmp_path, **(options | {"n_train": 50}))
    first = tmp_path / "img_align_celeba" / "000001.jpg"
    content = first.read_bytes()
    every = options | {"n_train": None, "balanced": False}
    first.write_bytes(content[:100])
    assert_refused(r"000001.jpg is not a readable picture", load, "celeba", tmp_path, **every)
    first.unlink()
    assert_refused(r"has no 000001.jpg", load, "celeba", tmp_path, **every)
    os.mkfifo(first)  # not waited for
    assert_refused(r"has no 000001.jpg", load, "celeba", tmp_path, **every)
    first.unlink()
    first.write_bytes(content)
    attributes, partition = tmp_path / "list_attr_celeba.txt", tmp_path / "list_eval_partition.txt"
    (tmp_path / "elsewhere.jpg").write_bytes(content)
    for path in (attributes, partition):
        path.write_text(path.read_text().replace("000001.jpg", "../elsewhere.jpg"))
    assert_refused(r"has no ../elsewhere.jpg", load, "celeba", tmp_path, **every)
    for path in (attributes, partition):
        path.write_text(path.read_text().replace("../elsewhere.jpg", "000001.jpg"))
    lines = attributes.read_text().splitlines()
    for wrong in (lines[:-3], [*lines[:-1], "000048.jpg"], ["<html>"]):
        attributes.write_text("\n".join(wrong))
        assert_refused("not CelebA's list", load, "celeba", tmp_path, **every)
    attributes.write_text("\n".join(lines))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match="gramscope\\[celeba\\]"):
        load("celeba", tmp_path, **options)
