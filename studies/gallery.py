"""Put finished experiments into docs/gallery.md: figure, command, seeds, time and claims, all read from the run directory.

python studies/gallery.py runs/nfa-fig1-paper runs/nfa-fig2-paper
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from gramscope_lab.experiments.catalogue import catalogue, find
from gramscope_lab.experiments.running import settings_table
from gramscope_lab.runs.directory import RunDirectory

DOCS = Path(__file__).parents[1] / "docs"
HOLDS = {True: "yes", False: "no", None: "open"}
HEAD = """# Gallery

Figures drawn by `gramscope reproduce`, each with its claims: what the paper reports, what this run measured, and whether the
claim holds. All numbers come from the run's records. *open* means that this run cannot decide the claim. The names in
brackets are explained in the [references](references.md). For claims that do not hold, [readings tried](#readings-tried)
says under which other reading they would. gram-fig7 is vcl-fig1 again; gram-fig6, gram-fig11 and gram-fig12 have not been run
at paper scale.
"""


def section(run: RunDirectory) -> str:
    """One experiment as Markdown."""
    config = run.config
    entry = find(config["experiment"])
    default = settings_table(getattr(entry.load(), config["scale"]))
    changed = {key: value for key, value in config["settings"].items() if default.get(key) != value}
    command = f"gramscope reproduce {entry.name} --scale {config['scale']}"
    command += f" --select {config['select']}" if config["select"] != "validation" else ""
    command += "".join(f" {flag(key, value)}" for key, value in changed.items())
    facts = run.environment
    seeds = ", ".join(map(str, config["settings"].get("seeds", [])))
    rows = [
        "| " + " | ".join([r["claim"], r["published"], r["measured"], HOLDS[r["holds"]], r["reason"]]) + " |"
        for r in run.records("claim")
    ]
    return "\n".join(
        [
            f"## {entry.name}",
            "",
            f"{entry.title} ({entry.source}).",
            "",
            f"    {command}",
            "",
            f"{'Seeds' if ',' in seeds else 'Seed'} {seeds}; {seconds(run):.0f} s of computing in all on {facts['device']}, "
            f"{facts['threads']} thread{'' if facts['threads'] == 1 else 's'}, "
            f"torch {facts['torch']}.",
            "",
            f"![{entry.name}](gallery/{entry.name}.png)",
            "",
            "| claim | published | measured | holds? | reason |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def seconds(run: RunDirectory) -> float:
    """Time spent in all parts; runs of one vectorised step share theirs, which is then the same for all of them."""
    spent: dict[str, float] = {}
    for record in run.records():
        spent[record["run"]] = max(spent.get(record["run"], 0.0), record.get("seconds") or 0.0)
    return sum(value for _, value in {(name.split("/")[0], value) for name, value in spent.items()})


def flag(key: str, value: Any) -> str:
    """A changed setting as the command line takes it."""
    if key == "seeds":
        return f"--seeds {len(value)}" if value == list(range(len(value))) else f"--seeds {','.join(map(str, value))}"
    return f"--data {','.join(value)}" if key == "data" else f"--set {key}={str(value).replace(' ', '')}"


def save_small(source: Path, target: Path) -> None:
    """A copy of a PNG with at most 256 colours."""
    with Image.open(source) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)


def main() -> None:
    """Replace or add the sections of the runs named on the command line, in the order of the catalogue."""
    page = DOCS / "gallery.md"
    text = page.read_text(encoding="utf-8") if page.exists() else HEAD
    sections = {part.split("\n", 1)[0]: f"## {part}" for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}
    for path in sys.argv[1:]:
        run = RunDirectory.open(path)
        name = run.config["experiment"]
        sections[name] = section(run) + "\n"
        save_small(run.figure_path(f"{name}.png"), DOCS / "gallery" / f"{name}.png")
    known = [entry.name for entry in catalogue() if entry.name in sections]
    by_hand = [name for name in sections if name not in known]  # kept as they are, after the figures
    page.write_text("\n".join([HEAD, *(sections[name].rstrip() + "\n" for name in known + by_hand)]), encoding="utf-8")


if __name__ == "__main__":
    main()
