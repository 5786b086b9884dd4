"""Put finished experiments into the gallery: claims into docs/gallery/claims.json, figures and verdicts into the page.

python studies/gallery.py runs/nfa-fig1-paper runs/nfa-fig2-paper

Without arguments the page is written anew from claims.json. Claims marked ``"main": true`` there stand in the page's tables.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from gramscope_lab.experiments.catalogue import find
from gramscope_lab.experiments.experiment import settings_table
from gramscope_lab.runs.directory import RunDirectory

DOCS = Path(__file__).parents[1] / "docs"
CLAIMS = DOCS / "gallery" / "claims.json"
HOLDS = {True: "yes", False: "no", None: "open"}
#: a mark in the page: the tables of one paper stand between it and the next heading
MARK = re.compile(r"(<!-- verdicts (\w+) -->\n).*?(?=^## )", flags=re.MULTILINE | re.DOTALL)


def entry(run: RunDirectory, before: dict[str, Any]) -> dict[str, Any]:
    """One experiment as claims.json has it; main claims stay those that were main before."""
    config, facts = run.config, run.environment
    found = find(config["experiment"])
    default = settings_table(getattr(found.load(), config["scale"]))
    changed = {key: value for key, value in config["settings"].items() if default.get(key) != value}
    command = f"gramscope reproduce {found.name} --scale {config['scale']}"
    command += "".join(f" {flag(key, value)}" for key, value in changed.items())
    seeds = ", ".join(map(str, config["settings"].get("seeds", [])))
    main = {claim["claim"] for claim in before.get("claims", []) if claim.get("main")}
    claims = [
        {key: record[key] for key in ("claim", "published", "measured", "holds", "reason")}
        | ({"main": True} if record["claim"] in main else {})
        for record in run.records("claim")
    ]
    return {
        "title": f"{found.title} ({found.source})",
        "command": command,
        "facts": f"Seeds {seeds}; {seconds(run):.0f} s of computing in all on {facts['device']}, torch {facts['torch']}.",
        "claims": claims,
    }


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


def verdicts(found: dict[str, Any], paper: str) -> str:
    """The table of one paper's main claims, and its figures as small pictures that lead to the large ones."""
    own = {name: value for name, value in found.items() if name.startswith(paper)}
    lines = ["| figure | claim | published | measured | holds? |", "|---|---|---|---|---|"]
    for name, value in own.items():
        for claim in value["claims"]:
            if claim.get("main"):
                verdict = f"**{HOLDS[claim['holds']]}**" + (f": {claim['reason']}" if claim["reason"] else "")
                lines.append(f"| {name} | {claim['claim']} | {claim['published']} | {claim['measured']} | {verdict} |")
    lines += ["", "| figure | all its claims | command |", "|---|---|---|"]
    for name, value in own.items():
        counts = [sum(claim["holds"] is held for claim in value["claims"]) for held in (True, False, None)]
        count = ", ".join(f"{n} {word}" for n, word in zip(counts, HOLDS.values(), strict=True) if n)
        seeds = value["facts"].split(";")[0].count(",") + 1
        count += f"; {seeds} seed{'s' if seeds > 1 else ''}"
        picture = f'<a href="gallery/{name}.png"><img src="gallery/{name}.png" width="170" alt="{name}"></a>'
        lines.append(f"| {picture} | **{name}**: {value['title']}. {count} | `{value['command']}` |")
    return "\n".join(lines)


def save_small(source: Path, target: Path) -> None:
    """A copy of a PNG with at most 256 colours."""
    with Image.open(source) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)


def main() -> None:
    """Take in the runs named on the command line, and write the page's tables."""
    found = json.loads(CLAIMS.read_text(encoding="utf-8"))
    for path in sys.argv[1:]:
        run = RunDirectory.open(path)
        name = run.config["experiment"]
        found[name] = entry(run, found.get(name, {}))
        save_small(run.figure_path(f"{name}.png"), DOCS / "gallery" / f"{name}.png")
    CLAIMS.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    page = DOCS / "gallery.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(MARK.sub(lambda mark: f"{mark[1]}\n{verdicts(found, mark[2])}\n\n", text), encoding="utf-8")


if __name__ == "__main__":
    main()
