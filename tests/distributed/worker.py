"""One process of a torchrun launch: runs all cases in order and prints names and times; a failure ends the launch."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gramscope.distributed.exchange import leave_together

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    folder = Path(sys.argv[1])
    wanted = sys.argv[2:]
    for name in wanted or sorted(path.stem for path in Path(__file__).parent.glob("*_cases.py")):
        for label, case in list(vars(importlib.import_module(name)).items()):
            if not label.startswith("case_"):
                continue
            start = time.perf_counter()
            try:
                torch.manual_seed(0)
                faulthandler.dump_traceback_later(55)  # before the group's timeout ends a process
                case(folder)
                dist.barrier()
            except BaseException:
                print(f"[rank {dist.get_rank()}] {name}.{label} failed\n{traceback.format_exc()}", flush=True)
                os._exit(1)  # the others may wait for this process
            if dist.get_rank() == 0:
                print(f"passed {name}.{label} in {time.perf_counter() - start:.1f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    leave_together()


if __name__ == "__main__":
    main()
