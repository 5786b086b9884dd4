"""The library works where torch, numpy and typing-extensions are installed and nothing else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

#: what pyproject.toml requires
NEEDED = ("torch", "numpy", "typing-extensions")


@cache
def forbidden() -> tuple[str, ...]:
    """Names of installed packages that neither :data:`NEEDED` nor anything they require brings along."""
    waiting, known = [Requirement(name) for name in NEEDED], set[str]()
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name in known:
            continue
        known.add(name)
        try:
            more = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:  # of another platform
            continue
        waiting += [r for r in more if r.marker is None or r.marker.evaluate({"extra": ""})]
    ours = {"gramscope", "gramscope_lab"}
    return tuple(
        module
        for module, owners in packages_distributions().items()
        if module not in ours and not known & {canonicalize_name(owner) for owner in owners}
    )


def run_without_extras(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that cannot import any package of an extra."""
    block = f"""
        from importlib.machinery import PathFinder
        forbidden, find = frozenset({forbidden()!r}), PathFinder.find_spec
        PathFinder.find_spec = lambda name, *args: None if name.partition(".")[0] in forbidden else find(name, *args)
    """
    command = [sys.executable, "-c", textwrap.dedent(block) + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_forbidden() -> None:
    assert {"scipy", "matplotlib", "typer", "transformers", "sklearn"} <= set(forbidden())
    assert not {"torch", "numpy", "typing_extensions", "sympy"} & set(forbidden())
    assert "No module named 'scipy'" in run_without_extras("import scipy").stderr


def test_every_public_name_and_module_loads() -> None:
    """Only the files of ``integrations`` may ask for another package, by an error that names the extra."""
    found = run_without_extras("""
        from importlib import import_module
        from pkgutil import walk_packages
        import gramscope
        for name in gramscope.__all__:
            getattr(gramscope, name)
        for module in walk_packages(gramscope.__path__, "gramscope."):
            try:
                import_module(module.name)
            except gramscope.errors.MissingExtraError as error:
                assert module.name.startswith("gramscope.integrations."), module.name
                assert "pip install --upgrade 'gramscope[" in str(error)
    """)
    assert found.returncode == 0, found.stderr


def test_measuring_and_training_work() -> None:
    found = run_without_extras("""
        import torch, gramscope as gs
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        x, y, loss = torch.randn(40, 6), torch.arange(40) % 3, torch.nn.CrossEntropyLoss()
        monitor = gs.Monitor(model, (x, y), loss, every=1)
        optimizer = gs.VCL(model, gamma=0.1)
        loss(model(x), y).backward()
        optimizer.step()
        monitor.step()
        print(gs.measure(model, (x, y), loss))
        print(gs.agop(model, x)["0"].shape, gs.cka(model, x))
    """)
    assert found.returncode == 0, found.stderr


def test_the_command_says_what_to_install() -> None:
    found = run_without_extras("from gramscope_lab.command import main; main()")
    assert found.returncode == 2
    assert "pip install 'gramscope[lab]'" in found.stderr
    assert "Traceback" not in found.stderr
