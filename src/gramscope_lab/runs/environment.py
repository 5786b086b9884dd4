"""What a run was made with: versions, machine, device and the state of the working copy."""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

import gramscope

PACKAGES = ("torch", "numpy", "safetensors")

#: facts that decide whether the same configuration gives the same bits
DECISIVE = ("torch", "device", "machine", "threads")


def describe_environment(device: str = "cpu") -> dict[str, Any]:
    """Facts about this process and ``device``, as plain values for JSON."""
    import torch

    kind = torch.device(device).type
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "started": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "gramscope": gramscope.__version__,
        **versions,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else kind,
        "machine": f"{platform.system()} {platform.machine()} {platform.processor()}".strip(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "git": git_state(),
        "command": sys.argv,
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Decisive facts that changed: with any, a resumed run need not have the bits of an undisturbed one."""
    return {key: (before.get(key), now.get(key)) for key in DECISIVE if before.get(key) != now.get(key)}


def git_state() -> dict[str, Any] | None:
    """Commit of the working directory and whether it has changes; ``None`` outside a repository or without git."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
