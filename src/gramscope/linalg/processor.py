"""What the processor that holds a tensor is good at."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def on_host(x: Tensor) -> bool:
    """Whether numbers can be looked at on the way, small decompositions are cheap, and float32 is faster than float64."""
    return x.device.type == "cpu"


def low(A: Tensor) -> Tensor:
    """``A`` to three digits where products of such matrices are faster, or in float32."""
    return A.to(torch.bfloat16 if not on_host(A) or has_bfloat16() else torch.float32)


def accumulated(A: Tensor, B: Tensor) -> Tensor:
    """``A B`` of bfloat16 matrices in float32, B also a stack of them."""
    if not A.is_cuda:
        return A.float() @ B.float()
    if B.ndim == 2:
        return torch.mm(A, B, out_dtype=torch.float32)
    return torch.bmm(A.expand(len(B), -1, -1), B, out_dtype=torch.float32)


def rounding(A: Tensor) -> float:
    """To what :func:`~gramscope.linalg.factors.product` rounds its factors."""
    return 2**-23 if on_host(A) else 2**-16


def norm(A: Tensor) -> Tensor:
    """``‖A‖_F`` in two steps: in one a device has to be told to start from zero first, which takes longer."""
    result: Tensor = torch.linalg.vector_norm(A if on_host(A) or A.ndim < 2 else torch.linalg.vector_norm(A, dim=-1))
    return result


@cache
def has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; torch tells by names that may change."""
    return any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("avx512_bf16", "amx_tile"))


@cache
def has_bfloat16_products(device: torch.device) -> bool:
    """Whether a CUDA device multiplies bfloat16 in hardware."""
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)
