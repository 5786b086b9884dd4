"""Matrix products in the precision that a computation needs, on the device that holds the matrices."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware."""
    if device.type == "cuda":
        return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    return any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("avx512_bf16", "amx_tile"))


def coarse(A: Tensor) -> Tensor:
    """``A`` as :func:`coarse_product` takes it: bfloat16 where the device multiplies that faster, else float32."""
    return A.to(torch.bfloat16 if has_bfloat16(A.device) else torch.float32)


def coarse_product(A: Tensor, B: Tensor, out: Tensor | None = None) -> Tensor:
    """``A B`` in float32 of stacks ``[batch, …]`` from :func:`coarse`, to about three digits or better.

    On the CPU the result is written to ``out`` where that is given: new memory for a large matrix costs more than reading it.
    """
    if A.dtype == torch.bfloat16 and A.is_cuda:
        return torch.bmm(A, B, out_dtype=torch.float32)
    if A.dtype == torch.float32:
        return torch.bmm(A, B, out=out)
    product = torch.bmm(A, B)
    return product.float() if out is None else out.copy_(product)


def rounding(A: Tensor) -> float:
    """The part of an entry by which :func:`coarse` may round it."""
    return 2**-8 if has_bfloat16(A.device) else 2**-23


def precise_product(A: Tensor, B: Tensor) -> Tensor:
    """``A B`` of float32 stacks ``[batch, …]``, to 5e-6 of ``‖A‖‖B‖`` or better, whatever the user allows torch to round.

    On CUDA a float32 matrix is the sum of two bfloat16 matrices to 16 binary digits, ``A ≈ A₁ + A₂``, and
    ``A₁B₁ + A₁B₂ + A₂B₁`` is one bfloat16 product of three times the inner dimension, summed in float32. On the CPU it is a
    float32 product, or a float64 one where ``torch.backends.mkldnn`` lets float32 products round further.
    """
    if A.is_cuda and has_bfloat16(A.device):
        (A1, A2), (B1, B2) = _split(A), _split(B)
        return torch.bmm(torch.cat([A1, A1, A2], -1), torch.cat([B1, B2, B1], -2), out_dtype=torch.float32)
    if A.device.type == "cpu" and not single_products_are_exact(A.device):
        return torch.bmm(A.double(), B.double()).float()
    return torch.bmm(A, B)


def single_products_are_exact(device: torch.device) -> bool:
    """Whether float32 matrices are multiplied without rounding their entries first; on the CPU, unless the user allows it."""
    return device.type == "cpu" and not _rounds_float32()


def antisymmetric_part(A: Tensor, out: Tensor | None = None) -> Tensor:
    """``A − Aᵀ`` of a stack ``[batch, k, k]``; ``out`` as for :func:`coarse_product`."""
    return torch.sub(A, transposed(A, out), out=out)


def transposed(A: Tensor, out: Tensor | None = None) -> Tensor:
    """``Aᵀ`` of a stack, ready for arithmetic with A; ``out`` as for :func:`coarse_product`.

    The CPU copies matrix by matrix, which torch does block by block; arithmetic with ``A.mT`` would read column by column.
    """
    if A.device.type != "cpu":
        return A.mT
    result = A.new_empty(A.mT.shape) if out is None else out
    for one, matrix in zip(result, A, strict=True):
        one.copy_(matrix.mT)
    return result


def _split(A: Tensor) -> tuple[Tensor, Tensor]:
    high = A.bfloat16()
    return high, (A - high).bfloat16()


def _rounds_float32() -> bool:
    """Whether the user allows the CPU to round the factors of float32 products."""
    return getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", "none") not in ("none", "ieee")
