"""What the constants of the steps of FreeMuon do: validation scores of small nets with other values in their place.

    python studies/free_muon.py --data-dir DIR --steps 3000 --decay 0 0.1 0.2 0.3
    python studies/free_muon.py --data-dir DIR --steps 10 30 --first-step 0.12 0.15 0.18 0.25 --seeds 3
    python studies/free_muon.py --steps 10 30 100 300 --seeds 3 --net resnet [--left-alone]

Nets and data are those of ``python -m benchmarks optimizers --scale full``. Test scores are not used.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import replace

import torch

from benchmarks.optimizer_peers import OURS, competitors
from benchmarks.optimizer_tasks import TASKS, make_task
from benchmarks.optimizers import run_trial
from gramscope.optim import free_muon


def main() -> None:
    """Print one line for each net, budget and pair of constants: mean and standard deviation over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir")
    parser.add_argument("--steps", type=int, nargs="+", default=[300])
    parser.add_argument("--decay", type=float, nargs="+", default=[free_muon.DECAY], help="λ of late steps")
    parser.add_argument(
        "--first-step", type=float, nargs="+", default=[free_muon.STEP], help="ρ; later steps in proportion"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--net", help="this net alone, such as resnet")
    parser.add_argument("--left-alone", action="store_true", help="keep batch normalisation's statistics of training")
    given = parser.parse_args()
    torch.set_num_threads(1)
    free = next(method for method in competitors() if method.name == OURS)
    if given.left_alone:
        free = replace(free, averaged=None)
    print(f"{'net':11} {'data':11} {'ρ':>5} {'λ':>5} {'steps':>5} {'validation':>10}   deviation")
    for net, data in (task for task in TASKS["full"] if given.net in (None, task[0])):
        task = make_task(net, data, given.data_dir)
        for first, decay in itertools.product(given.first_step, given.decay):
            free_muon.STEP, free_muon.DECAY = first, decay
            runs = [run_trial(task, free, 1.0, given.steps, seed) for seed in range(given.seeds)]
            for trials in zip(*runs, strict=True):
                scores = [trial.validation for trial in trials]
                deviation = f"{statistics.stdev(scores):.3f}" if len(scores) > 1 else "–"
                mean = f"{statistics.fmean(scores):10.3f}"
                print(f"{net:11} {data:11} {first:5} {decay:5} {trials[0].steps:5} {mean}   {deviation}", flush=True)


if __name__ == "__main__":
    main()
