"""Print every dependency of pyproject.toml at its lowest allowed version, as constraints for pip.

    python studies/lowest_versions.py > lowest.txt        # `make lowest` installs these and runs the tests

torch is left out: constraints.txt pins it, and the wheels of its lowest version need CUDA libraries.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?>=([0-9.]+)$")


def lowest(project: Path = PROJECT) -> dict[str, str]:
    """The lowest version of every direct dependency, extras included."""
    facts = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    lists = [facts["dependencies"], *facts["optional-dependencies"].values()]
    found = [REQUIREMENT.match(line) for lines in lists for line in lines]
    return {match.group(1): match.group(2) for match in found if match and match.group(1) != "torch"}


if __name__ == "__main__":
    for name, version in sorted(lowest().items()):
        print(f"{name}=={version}")
