"""Products of stated precision, and differences with the transpose."""

from __future__ import annotations

import pytest
import torch

from gramscope.optim.products import antisymmetric_part, coarse, coarse_product, precise_product, rounding, transposed

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_products_are_as_precise_as_they_say(device: str, generator: torch.Generator) -> None:
    A, B = (torch.randn(2, 40, 40, generator=generator).to(device) for _ in range(2))
    exact = A.double() @ B.double()
    assert (precise_product(A, B) - exact).norm() < 5e-6 * exact.norm()
    found = coarse_product(coarse(A), coarse(B))
    assert found.dtype == torch.float32
    assert (found - exact).norm() < 2 * rounding(A) * exact.norm()
    assert torch.equal(coarse_product(coarse(A), coarse(B), out=torch.empty_like(A)), found)


@pytest.mark.parametrize("k", [1, 5, 128, 129, 300])
def test_the_antisymmetric_part(k: int, generator: torch.Generator) -> None:
    A = torch.randn(2, k, k, generator=generator)
    assert torch.equal(antisymmetric_part(A), A - A.mT)
    assert torch.equal(antisymmetric_part(A, out=torch.empty_like(A)), A - A.mT)


def test_transposes_have_any_shape(generator: torch.Generator) -> None:
    A = torch.randn(2, 70, 90, generator=generator)
    assert torch.equal(transposed(A), A.mT)
    assert transposed(A).is_contiguous()
