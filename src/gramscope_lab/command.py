"""The entry point of ``gramscope``: starts the command line, or says which packages it needs."""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> None:
    """Run the command line; without the packages of the extra ``lab``, say how to install them."""
    try:
        app = import_module("gramscope_lab.cli.app")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("gramscope", "gramscope_lab"):
            raise
        sys.stderr.write(
            f"gramscope: the command needs {error.name}, which is not installed: pip install 'gramscope[lab]'\n"
        )
        sys.exit(2)
    app.main()
