"""Run the tests of reliability and write ``docs/reliability.md`` from what they counted.

    python studies/reliability.py                    # runs the tests, then writes the page
    python studies/reliability.py --print            # prints the tests, to run in parts (-o junit_family=xunit1 --junitxml=…)
    python studies/reliability.py --results FILE …   # writes the page from the JUnit files of an earlier run

Tests hand over their counts with pytest's ``record_property``. Figures of searches that take longer than a test may are
read from ``studies/reliability``; the commands that made them are named on the page.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
STORED = Path(__file__).parent / "reliability"
FOLDERS = ("tests/faults", "tests/fuzz", "tests/side_effects", "tests/torture")


@dataclass(frozen=True)
class Promise:
    """What must hold, and the tests that fail where it does not (``file::name``, parameters left out)."""

    text: str
    tests: tuple[str, ...]


PROMISES = (
    Promise(
        "A file runs no code: functions named in a configuration are called only with `--trust` or `--model`.",
        (
            "tests/lab/training/test_model_factory.py::test_nothing_named_in_a_file_is_imported",
            "tests/lab/cli/test_app.py::test_files_that_would_run_code_are_refused",
        ),
    ),
    Promise(
        "Nothing outside a run directory is read, written or deleted through it: no link and no `..` leads out of it.",
        (
            "tests/lab/runs/test_directory.py::test_nothing_is_followed_out_of_the_directory",
            "tests/lab/runs/test_directory.py::test_a_linked_figure_is_neither_shown_nor_written",
        ),
    ),
    Promise(
        "A whitened step that overshoots works; one that fails changes no parameter and names the one at fault; a member that "
        "diverges stops no other.",
        (
            "tests/optim/test_whitening.py::test_steps_that_overshoot",
            "tests/optim/test_whitening.py::test_a_step_that_fails_names_the_parameter_and_changes_nothing",
            "tests/lab/training/test_stacking.py::test_a_stack_that_diverges_in_one_member_goes_on",
        ),
    ),
    Promise(
        "A damaged or mixed-up checkpoint is recognised and announced, and the one before it is used.",
        (
            "tests/lab/runs/test_checkpoints.py::test_a_damaged_checkpoint_is_passed_over_and_written_again",
            "tests/faults/test_run_faults.py::test_a_damaged_checkpoint_is_announced_and_made_again",
            "tests/faults/test_run_faults.py::test_the_last_weights_of_a_finished_run_are_made_again",
        ),
    ),
    Promise(
        "A start that was killed can be started again, `--force` checks all members before it erases one, and nothing "
        "unfinished stays.",
        (
            "tests/lab/runs/test_directory.py::test_a_start_that_was_killed_can_be_started_again",
            "tests/lab/runs/test_directory.py::test_force_checks_every_member_before_it_erases_one",
            "tests/lab/runs/test_directory.py::test_stale_files_of_killed_writers_are_removed_from_a_group",
            "tests/faults/test_signals.py::test_signals_at_random_lines",
        ),
    ),
    Promise(
        "Target linearity of nearly collinear or badly scaled features is right, or a warning says how uncertain it is; "
        "float64 directions no longer than rounding count as absent.",
        (
            "tests/measures/test_linearity.py::test_collinear_features_are_right_or_announced",
            "tests/measures/test_linearity.py::test_collinear_features_far_from_zero_are_right_or_announced",
            "tests/measures/test_linearity.py::test_scales_of_columns_do_not_matter",
            "tests/measures/test_uncertain_fits.py::test_hard_features_are_right_or_announced",
            "tests/measures/test_uncertain_fits.py::test_ordinary_float64_features_are_not_doubted",
            "tests/linalg/test_ridge.py::test_moments_count_directions_they_cannot_see_as_uncertain",
        ),
    ),
    Promise(
        "Resuming goes back to the records of its checkpoint; records that are missing are noticed.",
        (
            "tests/lab/runs/test_records.py::test_truncating_goes_back_to_an_end",
            "tests/faults/test_run_faults.py::test_records_that_are_missing_are_noticed",
        ),
    ),
    Promise(
        "A full or broken disk gives an error that says what could not be done; after it, as after a power cut, the run "
        "resumes with the same bits.",
        (
            "tests/faults/test_run_faults.py::test_every_file_operation_may_fail",
            "tests/faults/test_other_faults.py::test_every_file_operation_may_fail",
            "tests/faults/test_other_faults.py::test_a_table_is_flushed_before_it_has_its_name",
        ),
    ),
    Promise(
        "Processes with unequal or empty parts of the data, one that raises, or one that measures alone, do not wait for ever.",
        ("tests/side_effects/test_processes.py::test_unequal_parts_and_one_process_alone",),
    ),
    Promise(
        "Every reader answers damaged input with a documented error.",
        (
            "tests/fuzz/test_readers.py::test_reader",
            "tests/fuzz/test_readers.py::test_configurations_of_any_values",
            "tests/fuzz/test_readers.py::test_records_of_any_values",
            "tests/faults/test_run_faults.py::test_a_checkpoint_of_somebody_else_is_refused",
            "tests/lab/report/test_read.py::test_mutated_records_never_raise",
            "tests/lab/report/test_figures.py::test_artefacts_of_any_type_and_size",
            "tests/lab/runs/test_directory.py::test_members_may_have_any_name",
        ),
    ),
    Promise(
        "Values nested too deep are refused; pipes are not waited for.",
        (
            "tests/lab/runs/test_files.py::test_bad_toml_is_explained",
            "tests/lab/runs/test_records.py::test_pipes_and_deep_values_are_refused_at_once",
            "tests/lab/report/test_read.py::test_a_pipe_in_place_of_the_records_is_not_waited_for",
            "tests/lab/report/test_figures.py::test_large_images_and_many_layers_stay_small",
        ),
    ),
    Promise(
        "Numbers at the ends of the range are right or refused, VCL's basis stays orthonormal, and names move no terminal.",
        (
            "tests/torture/test_scales.py::test_measures_without_units_do_not_depend_on_scales",
            "tests/torture/test_scales.py::test_correlations_of_one_number_are_undefined",
            "tests/torture/test_scales.py::test_numbers_of_eight_bits",
            "tests/torture/test_scales.py::test_a_basis_without_truncation_is_made_orthonormal_again",
            "tests/side_effects/test_long_run.py::test_memory_and_bases_over_many_steps",
            "tests/lab/cli/test_console.py::test_control_characters_in_names_do_not_reach_the_terminal",
            "tests/lab/report/test_read.py::test_names_are_spelled_out_in_the_page",
        ),
    ),
)


@dataclass
class Found:
    """What a run of the tests showed: results by test (without parameters) and the counts they handed over."""

    passed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    counts: dict[str, list[list[str]]] = field(default_factory=lambda: defaultdict(list))


def all_tests() -> list[str]:
    """The four folders, and the tests of the promises that are elsewhere."""
    named = {test for promise in PROMISES for test in promise.tests if not test.startswith(FOLDERS)}
    return [*FOLDERS, *sorted(named)]


def run_tests(results: Path) -> None:
    """Run all tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "-o", "junit_family=xunit1", f"--junitxml={results}"]
    subprocess.run([*command, *all_tests()], cwd=ROOT, check=False)


def read_results(paths: Iterable[Path]) -> Found:
    """Results and counts from JUnit files (family xunit1, which names files)."""
    found = Found()
    for case in (case for path in paths for case in ET.parse(path).getroot().iter("testcase")):
        name = f"{case.get('file', '')}::{case.get('name', '').partition('[')[0]}"
        bad = any(case.find(kind) is not None for kind in ("failure", "error"))
        (found.failed if bad else found.passed)[name] += 1
        for item in case.iter("property"):
            kind = str(item.get("name"))
            found.counts[kind].append(str(item.get("value")).split("|", 3 if kind == "fault" else 2))
    return found


def table(headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """A table in Markdown."""
    headings = list(headings)
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield "| " + " | ".join(str(item).replace("|", "\\|") for item in row) + " |"
    yield ""


def page(found: Found) -> str:
    """The page."""
    lines = [
        "# Reliability",
        "",
        "Written by `python studies/reliability.py` from the tests' own counts; do not edit it. `SECURITY.md` says what files",
        f"of others can and cannot do. This run: Python {platform.python_version()}, {sum(found.passed.values())} tests "
        f"passed, {sum(found.failed.values())} failed.",
        "",
        *faults(found),
        *fuzzing(found),
        *side_effects(found),
        *torture(found),
        *promises(found),
    ]
    return "\n".join(lines).rstrip() + "\n"


def faults(found: Found) -> Iterator[str]:
    """Faults, how often each was tried, and what was lost."""
    yield from (
        "## Faults",
        "",
        "Whatever opens, writes, flushes, closes, renames, removes or makes a file or a folder in a small run, a sweep, a "
        "report, a download or the saving of a table fails once in each of the ways counted below, in a sweep in one of them "
        "in turn. The operations are counted in an undisturbed call, not listed. A *crash* ends the process there; a "
        "*power cut* also takes from the disk what was not flushed, names in folders too: all of it, or a random part. Signals "
        "come at random lines of a run and of a group. The workers of the sweep run in the process of the test; that processes "
        "and nodes of Ray die is tried elsewhere, without faults of the disk.",
        "",
        "*Lost*: a reported record or a written checkpoint is missing or damaged, the resumed run differs in a bit, an earlier "
        "report, data file or table is damaged, something unfinished stays, or the error does not say what could not be done.",
        "",
    )
    rows: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for fault, kind, tried, lost in found.counts["fault"]:
        for row in (rows[fault], rows["all"]):
            row[kind] += int(tried)
            row["tried"] += int(tried)
            row["lost"] += int(lost)
    rows["all"] = rows.pop("all", defaultdict(int))
    kinds = sorted(rows["all"].keys() - {"tried", "lost"})
    columns = [*kinds, "tried", "lost"]
    yield from table(("fault", *columns), ((name, *(row[kind] for kind in columns)) for name, row in rows.items()))


def fuzzing(found: Found) -> Iterator[str]:
    """Inputs of the fuzzers."""
    yield from (
        "## Fuzzing",
        "",
        "Each reader gets changed valid files, and the inputs in `tests/fuzz/corpus` that longer searches found worth "
        "keeping; only documented errors may come, and an input may take 500 MB of memory and 5 s of the processor's "
        "time. `GRAMSCOPE_FUZZ=100` tries a hundred times as many.",
        "",
    )
    tests = {name: int(count) for name, count in found.counts["fuzz"]}
    kinds = "data files, weights, configurations, flags, run directories and reports"
    yield from (f"{sum(tests.values())} inputs for {len(tests)} readers of {kinds}.", "")


def side_effects(found: Found) -> Iterator[str]:
    """What a user's model and the process were like afterwards."""
    yield from (
        "## Side effects and leaks",
        "",
        "The user's model is as it was after an exception at each of these lines; many calls leave no memory behind.",
        "",
    )
    rows: dict[str, list[Any]] = {}
    for what, count, result in found.counts["side effect"]:
        known = rows.setdefault(what, [0, result])
        known[0] += int(count)
    yield from table(("what", "times", "afterwards"), [(what, *row) for what, row in rows.items()])
    stored = _stored("long_run.json")
    if stored:
        looks = stored["looks"]
        sizes = [look["resident"] / 2**20 for look in looks]
        worst = {name: max(look["deviation"][name] for look in looks) for name in looks[0]["deviation"]}
        yield from (
            f"{looks[-1]['step']:,} steps of VCL on one net, once (`python studies/long_run.py --steps {looks[-1]['step']} "
            f"--out studies/reliability/long_run.json`, torch {stored['torch']}, {stored['seconds']} s on a busy machine): "
            f"the process had {sizes[0]:.0f} MiB after the first hundredth, at most {max(sizes):.0f} MiB and "
            f"{sizes[-1]:.0f} MiB at the end; the largest entry of |UUᵀ − I| of a basis was {max(worst.values()):.1e} "
            "(goal: below 1e-4): " + ", ".join(f"`{name}` {value:.1e}" for name, value in worst.items()) + ".",
            "",
        )


def torture(found: Found) -> Iterator[str]:
    """Matrices that every routine was given."""
    tried, wrong = (sum(int(row[i]) for row in found.counts["torture"]) for i in range(2))
    steps = found.passed["tests/torture/test_vcl.py::test_step"]
    yield from (
        "## Extreme matrices",
        "",
        "Zero, rank one, repeated singular values, 1e±30, denormal numbers, "
        "numbers beyond 1e±70 (an error), NaN and infinity, no rows, no columns, "
        "1×1, strided memory, float16 to float64: each routine gives the value that exact arithmetic (mpmath) gives, within "
        "a stated bound, or an error that names the argument.",
        "",
        f"{tried} calls of routines, {wrong} wrong; {steps} steps of VCL against Algorithm 1 in exact numbers.",
        "",
    )


def promises(found: Found) -> Iterator[str]:
    """Each promise with the tests that keep it."""
    yield from ("## What is promised, and the test that keeps it", "")
    rows = []
    for number, promise in enumerate(PROMISES, 1):
        tests = ", ".join(f"`{test}`" for test in promise.tests)
        missing = [test for test in promise.tests if not found.passed[test] and not found.failed[test]]
        failed = sum(found.failed[test] for test in promise.tests)
        passed = sum(found.passed[test] for test in promise.tests)
        result = f"{passed} passed" + (f", {failed} failed" if failed else "") + (", not run: some" if missing else "")
        rows.append((number, promise.text, tests, result))
    yield from table(("", "promise", "tests", "result"), rows)


def _stored(name: str) -> dict[str, Any]:
    path = STORED / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def main() -> None:
    """Run the tests unless their results are given, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="+", help="JUnit files of an earlier run")
    parser.add_argument("--print", action="store_true", help="print the tests and do nothing else")
    parser.add_argument("--keep", type=Path, help="where to keep the JUnit file")
    arguments = parser.parse_args()
    if arguments.print:
        print("\n".join(all_tests()))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = arguments.results or [arguments.keep or Path(folder) / "results.xml"]
        if arguments.results is None:
            run_tests(results[0])
        found = read_results(results)
    PAGE.write_text(page(found), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {sum(found.passed.values())} passed, {sum(found.failed.values())} failed")
    sys.exit(1 if sum(found.failed.values()) else 0)


if __name__ == "__main__":
    main()
