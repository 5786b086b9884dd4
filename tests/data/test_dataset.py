from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from gramscope.data import DataSet, from_dataset, from_tensors, load
from gramscope.errors import InputError, ResultWarning


def small(n: int = 20, test: int = 6) -> DataSet:
    """Inputs whose first entry tells which sample they are."""
    x = torch.arange(n + test, dtype=torch.float32)[:, None, None].expand(-1, 2, 3).clone()
    y = torch.arange(n + test) % 4
    return from_tensors("small", x[:n], y[:n], x[n:], y[n:])


def test_what_a_model_needs_to_know() -> None:
    data = small()
    assert (data.input_shape, data.outputs, data.classes, data.task) == ((2, 3), 4, 4, "classification")
    assert data.flat().input_shape == (6,)
    regression = from_tensors("r", torch.rand(4, 2), torch.rand(4), torch.rand(2, 2), torch.rand(2))
    assert (regression.outputs, regression.classes, regression.task) == (1, None, "regression")
    assert regression.y_train.shape == (4, 1)
    assert "20 train, 6 test" in repr(data)


@given(n=st.integers(2, 40), fraction=st.floats(0.03, 0.97), seed=st.integers(0, 5))
def test_validation_split_is_a_partition(n: int, fraction: float, seed: int) -> None:
    data = small(n)
    if not 0 < round(fraction * n) < n:
        with pytest.raises(InputError, match="fraction"):
            data.split_validation(fraction, seed)
        return
    split = data.split_validation(fraction, seed)
    assert split.x_val is not None
    assert split.y_val is not None
    assert len(split.x_val) == round(fraction * n)
    together = torch.cat([split.x_train, split.x_val])[:, 0, 0]
    assert torch.equal(together.sort().values, torch.arange(n, dtype=torch.float32))
    assert torch.equal(split.y_val, split.x_val[:, 0, 0].long() % 4)
    assert split.x_test is data.x_test
    with pytest.raises(InputError, match="already"):
        split.split_validation(fraction, seed)


def test_subset_draws_without_replacement_and_by_seed() -> None:
    data = small(30)
    cut = data.subset(10, 1, test=3)
    assert len(cut.x_train.unique(dim=0)) == 10
    assert len(cut.x_test) == 3
    assert torch.equal(cut.y_train, cut.x_train[:, 0, 0].long() % 4)
    assert torch.equal(cut.x_train, data.subset(10, 1).x_train)
    assert not torch.equal(cut.x_train, data.subset(10, 2).x_train)
    assert data.subset(10).classes == 4
    for wrong in (0, 31):
        with pytest.raises(InputError, match="30 training samples"):
            data.subset(wrong)


def test_label_noise_touches_train_only_by_default() -> None:
    data = small(400, 200)
    noisy = data.with_label_noise(0.5, seed=3)
    changed = (noisy.y_train != data.y_train).float().mean()
    assert 0.3 < float(changed) < 0.45  # half of them redrawn, of which three quarters differ
    assert torch.equal(noisy.y_test, data.y_test)
    assert not torch.equal(data.with_label_noise(0.5, test=True).y_test, data.y_test)
    regression = from_tensors("r", torch.rand(4, 2), torch.rand(4), torch.rand(2, 2), torch.rand(2))
    with pytest.raises(InputError, match="needs classes"):
        regression.with_label_noise(0.5)


def test_label_noise_spares_validation_and_is_drawn_by_itself() -> None:
    """The same seed and size split, cut and noise: the samples chosen must not be the same ones."""
    data = small(400)
    noisy = data.with_label_noise(0.2, seed=3)
    split = data.split_validation(0.2, seed=3)
    touched = (noisy.y_train != data.y_train).nonzero().flatten()
    assert split.x_val is not None
    held = split.x_val[:, 0, 0].long()
    assert torch.isin(touched, held).float().mean() < 0.5  # a fifth, not all
    after = split.with_label_noise(0.5, seed=3)
    assert torch.equal(after.y_val, split.y_val)  # type: ignore[arg-type]
    assert not torch.equal(after.y_train, split.y_train)
    both = data.with_label_noise(0.2, seed=3, test=True)
    assert torch.equal(both.y_train, noisy.y_train)


def test_to_changes_floats_and_leaves_labels_and_tokens() -> None:
    double = small().split_validation(0.25).to("cpu", torch.float64)
    assert double.x_train.dtype == double.x_test.dtype == torch.float64
    assert double.x_val is not None
    assert double.x_val.dtype == torch.float64
    assert double.y_train.dtype == torch.int64
    pair, label = torch.ones(3, 2, dtype=torch.int32), torch.zeros(3).long()
    tokens = from_tensors("tokens", pair, label, pair, label)
    assert tokens.to(dtype=torch.float64).x_train.dtype == torch.int64


def test_nothing_touches_the_global_generator() -> None:
    before = torch.get_rng_state()
    small().split_validation(0.5).subset(4).with_label_noise(0.5)
    assert torch.equal(before, torch.get_rng_state())


class Mapped(Dataset[Any]):
    """Map style without an end: __getitem__ never raises IndexError."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index % len(self.items)]


class Streamed(IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


@pytest.mark.parametrize("make", [Mapped, Streamed])
@pytest.mark.parametrize("label", [int, np.int64, torch.tensor])
def test_any_torch_dataset(make: Any, label: Any) -> None:
    items = [(torch.full((1, 2, 2), float(i)), label(i % 3)) for i in range(7)]
    data = from_dataset(make(items), make(items[:4]), name="mine")
    assert (len(data.x_train), len(data.x_test), data.classes, data.input_shape) == (7, 4, 3, (1, 2, 2))
    assert torch.equal(data.y_train, torch.arange(7) % 3)


def test_tensor_dataset_bytes_are_pixels_and_classes_can_be_given() -> None:
    x = torch.full((5, 3, 2, 2), 255, dtype=torch.uint8)
    data = from_dataset(TensorDataset(x, torch.zeros(5).long()), TensorDataset(x[:1], torch.ones(1).long()), classes=7)
    assert data.outputs == 7
    assert torch.equal(data.x_train, torch.ones(5, 3, 2, 2))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "empty"),
        ([torch.zeros(3)], "pairs"),
        ([("a", 1)], "ToTensor"),
        ([(torch.zeros(3), 0), (torch.zeros(4), 0)], "different shapes"),
    ],
)
def test_wrong_torch_datasets_are_explained(items: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_dataset(Mapped(items), Mapped(items))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_train": torch.zeros(3).long()}, "do not pair up"),
        ({"x_test": torch.zeros(6, 9)}, "one sample of test"),
        ({"x_train": torch.full((20, 2, 3), torch.nan)}, "x_train contains NaN"),
        ({"x_test": torch.full((6, 2, 3), torch.inf)}, "x_test contains NaN or inf"),
        ({"y_test": torch.full((6,), 4)}, "labels from 4 to 4"),
        ({"y_test": torch.full((6,), -1)}, "labels from -1"),
        ({"y_train": torch.zeros(20, dtype=torch.int32)}, "int64"),
        ({"classes": None}, "floats"),
        ({"x_test": torch.zeros(0, 2, 3), "y_test": torch.zeros(0).long()}, r"x_test \(0, 2, 3\) is empty"),
    ],
)
def test_wrong_tensors_are_explained(change: dict[str, Any], message: str) -> None:
    good = small()
    parts: dict[str, Any] = {k: getattr(good, k) for k in ("x_train", "y_train", "x_test", "y_test", "classes")}
    with pytest.raises(InputError, match=message):
        DataSet("bad", **(parts | change))


def save(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def test_npz_of_labels_targets_images_and_tokens(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(9, 4)), np.arange(9) % 3
    data = load(save(tmp_path / "a.npz", x_train=x[:6], y_train=y[:6], x_test=x[6:], y_test=y[6:]))
    assert (data.name, data.classes, data.x_train.dtype) == ("a", 3, torch.float32)
    np.testing.assert_allclose(data.x_train.numpy(), x[:6], rtol=1e-6)

    data = load(save(tmp_path / "b.npz", x_train=x[:6], y_train=x[:6, :2], x_test=x[6:], y_test=x[6:, :2]))
    assert (data.classes, data.outputs, data.y_train.dtype) == (None, 2, torch.float32)

    grey = (np.arange(9 * 16) % 256).astype(np.uint8).reshape(9, 4, 4)
    data = load(
        save(tmp_path / "c.npz", x_train=grey[:6], y_train=y[:6], x_test=grey[6:], y_test=y[6:]), scale="signed"
    )
    assert data.input_shape == (1, 4, 4)
    np.testing.assert_allclose(data.x_test.numpy()[:, 0], grey[6:] / 127.5 - 1, atol=1e-6)

    colour = np.random.default_rng(1).integers(0, 256, (9, 5, 6, 3), np.uint8)
    data = load(
        save(tmp_path / "d.npz", x_train=colour[:6], y_train=y[:6, None], x_test=colour[6:], y_test=y[6:, None])
    )
    assert data.input_shape == (3, 5, 6)
    assert float(data.x_train[2, 1, 3, 4]) == pytest.approx(colour[2, 3, 4, 1] / 255)

    tokens = np.arange(18).reshape(9, 2)
    data = load(save(tmp_path / "e.npz", x_train=tokens[:6], y_train=y[:6], x_test=tokens[6:], y_test=y[6:]))
    assert data.x_train.dtype == torch.int64


def test_wrong_npz_is_explained(tmp_path: Path) -> None:
    x, y = np.zeros((4, 2)), np.zeros(4, int)
    good: dict[str, Any] = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    with pytest.raises(InputError, match="no file"):
        load(str(tmp_path / "none.npz"))
    with pytest.raises(InputError, match=r"no y_train; it has x_train, x_test, y_test"):
        load(save(tmp_path / "a.npz", **{k: v for k, v in good.items() if k != "y_train"}))
    with pytest.raises(InputError, match="cannot be read as .npz"):
        load(save(tmp_path / "b.npz", **(good | {"x_train": np.array([{"a": 1}, None], object)})))
    with pytest.raises(InputError, match="y_test is <U1"):
        load(save(tmp_path / "c.npz", **(good | {"y_test": np.array(list("abcd"))})))
    with pytest.raises(InputError, match="scale='signed' is for images"):
        load(save(tmp_path / "d.npz", **good), scale="signed")
    with pytest.raises(InputError, match="has no option top"):
        load(str(tmp_path / "d.npz"), top=3)
    cut = tmp_path / "e.npz"
    cut.write_bytes(Path(save(tmp_path / "f.npz", **good)).read_bytes()[:-40])
    with pytest.raises(InputError, match="cannot be read"):
        load(str(cut))
    with pytest.raises(InputError, match="labels or floats for both"):
        load(save(tmp_path / "g.npz", **(good | {"y_test": np.zeros(4)})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((4, 2), np.uint8)}, "x_train is uint8 but x_test float64"),
        ({"x_test": np.zeros((4, 2), np.int32)}, "x_train is float64 but x_test int32"),
        (
            {"x_train": np.zeros((4, 5, 6, 3), np.uint8), "x_test": np.zeros((4, 3, 5, 6), np.uint8)},
            r"x_train is \(5, 6, 3\), one of x_test \(3, 5, 6\)",
        ),
        ({"x_test": np.zeros((0, 2)), "y_test": np.zeros(0, int)}, r"x_test \(0, 2\) is empty"),
        ({"x_train": np.zeros((0, 2)), "y_train": np.zeros(0, int)}, r"x_train \(0, 2\) is empty"),
        ({"y_train": np.array([0, 1, 2, 2_000_000_000])}, "4 different labels go up to 2000000000, .* give classes"),
    ],
)
def test_npz_that_would_mislead_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    x, y = np.zeros((4, 2)), np.arange(4) % 2
    with pytest.raises(InputError, match=message):
        load(save(tmp_path / "a.npz", **({"x_train": x, "y_train": y, "x_test": x, "y_test": y} | change)))


def test_labels_that_may_be_none_are_announced(tmp_path: Path) -> None:
    x = np.zeros((3000, 2))
    y = 1000 * (np.arange(3000) % 3)
    with pytest.warns(ResultWarning, match="3 different labels go up to 2000, which makes 2001 classes"):
        data = load(save(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y))
    assert data.classes == 2001
    data = load(save(tmp_path / "b.npz", x_train=x[:9], y_train=y[:9], x_test=x, y_test=y), classes=3000)
    assert data.classes == 3000
    y = np.arange(3000) % 3.0
    with pytest.warns(ResultWarning, match="3 different whole numbers; floats are a regression target"):
        data = load(save(tmp_path / "c.npz", x_train=x, y_train=y, x_test=x, y_test=y))
    assert data.task == "regression"


def test_what_is_no_npz_is_said_without_advice_to_unpickle(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros((4, 2)))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    (tmp_path / "garbage.npz").write_bytes(b"nothing of the kind")
    with zipfile.ZipFile(tmp_path / "texts.npz", "w") as file:
        for key in ("x_train", "y_train", "x_test", "y_test"):
            file.writestr(f"{key}.npy", "no array")
    save(tmp_path / "objects.npz", **dict.fromkeys(("x_train", "y_train", "x_test", "y_test"), np.array([None, "a"])))
    for name in ("array", "garbage", "texts", "objects"):
        with pytest.raises(InputError, match="cannot be read as .npz") as caught:
            load(str(tmp_path / f"{name}.npz"))
        assert "pickle" not in str(caught.value)
