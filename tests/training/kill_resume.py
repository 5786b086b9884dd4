"""Kill a training run at random moments (SIGKILL), resume it each time, and compare with an undisturbed run.

    python tests/training/kill_resume.py --kills 20 --method adamw --seeds 1

Exits 0 if the final weights and the records are the same, bit by bit.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from gramscope.runs.directory import RunDirectory

GRAMSCOPE = [sys.executable, "-c", "from gramscope.cli.app import main; main()"]


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*GRAMSCOPE, "train", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def step_of(path: Path) -> int:
    steps = [max(run.checkpoint_steps(), default=0) for run in RunDirectory(path).runs()]
    return min(steps, default=0)


def wait_for_progress(process: subprocess.Popen[bytes], path: Path) -> None:
    """Until the run has written a checkpoint that was not there."""
    before = step_of(path) if RunDirectory(path).exists() else 0
    while process.poll() is None and not (RunDirectory(path).exists() and step_of(path) > before):
        time.sleep(0.01)


def kill_and_resume(folder: Path, arguments: list[str], kills: int, seed: int, longest: float) -> list[int]:
    """Run in ``folder/killed`` with kills in between; the checkpointed step found after each kill."""
    rng = random.Random(seed)
    path = folder / "killed"
    found: list[int] = []
    while len(found) < kills:
        process = start(["--resume", str(path)] if path.exists() else [*arguments, "--out", str(path)])
        if rng.random() < 0.75:  # once it trains; the others may hit the start
            wait_for_progress(process, path)
        time.sleep(rng.uniform(0.0, longest))
        if process.poll() is not None:
            if process.returncode != 0 and RunDirectory(path).exists() and step_of(path) == 0:
                raise SystemExit(f"training failed with exit code {process.returncode}")
            break  # it finished before it could be killed
        process.send_signal(signal.SIGKILL)
        process.wait()
        if RunDirectory(path).exists():
            found.append(step_of(path))
            print(f"kill {len(found)}: checkpoint at step {found[-1]}", flush=True)
    if start(["--resume", str(path)]).wait() != 0:
        raise SystemExit("resuming failed")
    return found


def same(one: Path, other: Path) -> bool:
    """Whether two runs (or groups) ended with the same bits and the same records, times aside."""
    equal = True
    for a, b in zip(RunDirectory(one).runs(), RunDirectory(other).runs(), strict=True):
        first, second = a.load_checkpoint(), b.load_checkpoint()
        equal &= first.step == second.step and first.model.keys() == second.model.keys()
        equal &= all(torch.equal(first.model[key], second.model[key]) for key in first.model)
        equal &= all(torch.equal(first.tensors[key], second.tensors[key]) for key in first.tensors)
        drop = {"seconds"}
        records = [[{k: v for k, v in r.items() if k not in drop} for r in run.records()] for run in (a, b)]
        equal &= records[0] == records[1]
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--method", default="adamw")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds until a kill, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    arguments = ["--data", "digits", "--hidden", "64", "--method", options.method, "--seeds", options.seeds]
    arguments += ["--epochs", str(options.epochs), "--checkpoint-every", "0.7", "--evaluate-every", "0.5"]
    arguments += ["--schedule", "cosine", "--device", "cpu"]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        if start([*arguments, "--out", f"{folder}/whole"]).wait() != 0:
            raise SystemExit("training failed")
        print(
            f"undisturbed: {step_of(Path(folder) / 'whole')} steps in {time.perf_counter() - began:.1f} s", flush=True
        )
        found = kill_and_resume(Path(folder), arguments, options.kills, options.seed, options.longest)
        equal = same(Path(folder) / "whole", Path(folder) / "killed")
    print(f"{len(found)} kills at {len(set(found))} different checkpoints; final state bit-identical: {equal}")
    sys.exit(0 if equal and len(found) == options.kills else 1)


if __name__ == "__main__":
    main()
