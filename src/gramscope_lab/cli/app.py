"""The ``gramscope`` command: mounts the commands and turns errors into messages and exit codes."""

from __future__ import annotations

import errno
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, TextIO

import typer

import gramscope
from gramscope.errors import GramscopeError, GramscopeWarning, InputError, LayerError, MissingExtraError
from gramscope.names import printable

INTERRUPTED = 130
#: error numbers of a path that the user has to change
_WRONG_PATH = (
    errno.EACCES, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT,
    errno.ENOTDIR, errno.EPERM, errno.EROFS,
)  # fmt: skip

#: commands in the order of the help; a module has ``command`` (a function) or ``app`` (a group)
COMMANDS = ("demo", "train", "measure", "series", "compare", "reproduce", "report", "runs", "data", "theory")

app = typer.Typer(
    name="gramscope",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with [bold]gramscope demo[/bold]. Exit codes: 0 good, 1 failed, 2 wrong use, 130 interrupted.",
)
_debug = False


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"gramscope {gramscope.__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """See, train with and predict feature learning in neural networks."""
    global _debug
    _debug = debug


def _mount() -> None:
    for name in COMMANDS:
        if find_spec(f"gramscope_lab.cli.{name}") is None:
            continue
        module = import_module(f"gramscope_lab.cli.{name}")
        if hasattr(module, "command"):
            app.command(name)(module.command)
        else:
            app.add_typer(module.app, name=name)


_mount()


def main() -> None:
    """Entry point of the console script."""
    warnings.showwarning = _show_warning
    try:
        app()
    except GramscopeError as error:
        if _debug:
            raise
        _tell(f"gramscope: {error}")
        sys.exit(_exit_code(error))
    except KeyboardInterrupt:
        _tell("gramscope: interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader (head, less) has closed the pipe
        sys.exit(1)
    except OSError as error:  # a path that cannot be written, a full disk
        if _debug:
            raise
        place = f"{error.filename}: " if error.filename is not None else ""
        _tell(f"gramscope: {place}{error.strerror or error}")
        sys.exit(2 if error.errno in _WRONG_PATH else 1)


def _exit_code(error: GramscopeError) -> int:
    if type(error).__name__ == "Interrupted":
        return INTERRUPTED
    return 2 if isinstance(error, InputError | LayerError | MissingExtraError) else 1


def _tell(text: str) -> None:
    sys.stderr.write(printable(text) + "\n")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, GramscopeWarning):
        _tell(f"warning: {message}")
    else:
        _tell(warnings.formatwarning(message, category, filename, lineno).rstrip())
