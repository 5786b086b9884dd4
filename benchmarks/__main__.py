"""``python -m benchmarks NAME --device cuda --json``: the benchmarks without the command line's dependencies."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.benchmarks import BENCHMARKS, run_benchmark


def main() -> None:
    """Parse the arguments, run, print one line a row or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed as ratios, in one run.")
    parser.add_argument("names", nargs="+", choices=[*BENCHMARKS])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=None, help="time for each comparison")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.names:
        for row in run_benchmark(name, device=arguments.device, seconds=arguments.seconds):
            text = json.dumps({"benchmark": name, **row.to_dict()}) if arguments.json else row.line()
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
