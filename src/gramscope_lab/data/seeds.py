"""Generators by purpose: draws for different purposes are independent, also with the same seed and size."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose: ``derive_seed(0, "order", 7)``."""
    text = "\0".join(map(str, ("gramscope", seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def generator(seed: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for one purpose."""
    return torch.Generator(device).manual_seed(derive_seed(seed, *purpose))
