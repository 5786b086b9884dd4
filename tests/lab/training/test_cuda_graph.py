"""Replaying a function as a CUDA graph gives what calling it gives."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor

from gramscope.errors import RescueWarning
from gramscope_lab.training.cuda_graph import Replay, Tensors, _first

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def products(given: Tensors) -> dict[str, Tensor]:
    x, y = given["x"], given["y"]
    return {
        "product": x @ y,
        "same": x,
        "inverse": torch.linalg.cholesky_ex(x @ x.mT + torch.eye(len(x), device=x.device))[0],
    }


def inputs(n: int, device: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(n, n, generator=generator).to(device) for name in "xy"}


def test_elsewhere_the_function_is_called() -> None:
    given = inputs(3, "cpu", 0)
    found = Replay(products)(given)
    assert found["same"] is given["x"]
    assert torch.equal(found["product"], given["x"] @ given["y"])


@needs_cuda
def test_replays_equal_calls_bit_by_bit_and_results_are_kept() -> None:
    replay = Replay(products)
    for n in (5, 7):
        kept = []
        for seed in range(3):
            given = inputs(n, "cuda", seed)
            kept.append((given, replay(given)))
        for given, found in kept:  # an earlier result is not overwritten by a later call
            for name, value in products(given).items():
                assert torch.equal(found[name], value), name


@needs_cuda
def test_a_function_that_waits_for_the_device_is_called_with_a_warning() -> None:
    replay = Replay(lambda given: {"x": given["x"] * float(given["x"].sum())})
    given = inputs(4, "cuda", 0)
    with pytest.warns(RescueWarning, match="no CUDA graph"):
        found = replay(given)
    assert torch.allclose(found["x"], given["x"] * given["x"].sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay(given)  # once is enough


@needs_cuda
def test_many_forms_and_copies() -> None:
    replay = Replay(products)
    for n in range(2, 40):
        given = inputs(n, "cuda", n)
        assert torch.equal(replay(given)["product"], products(given)["product"])
    assert torch.equal(copy.deepcopy(replay)(given)["product"], products(given)["product"])


def test_the_error_behind_others_is_told() -> None:
    """The end of a recording that has failed fails too, with less to say."""
    error = RuntimeError("the recording has not ended well")
    error.__context__ = RuntimeError("not allowed while recording")
    assert str(_first(error)) == "not allowed while recording"


@needs_cuda
@pytest.mark.parametrize("waits", [False, True])
def test_a_step_that_changes_state_is_taken_once_a_call(waits: bool) -> None:
    """Warm-up calls are undone, also where recording fails."""
    total = torch.zeros(4, device="cuda")

    def step(given: Tensors) -> dict[str, Tensor]:
        total.add_(given["x"])
        return {"x": given["x"] * float(total.sum())} if waits else {}

    replay = Replay(step, state=lambda: [total])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RescueWarning)
        for count in range(1, 4):
            replay({"x": torch.arange(4.0, device="cuda")})
            assert torch.equal(total, count * torch.arange(4.0, device="cuda"))
