"""Run the tutorials: scripts whose cells begin with ``# %%`` become Markdown pages with their outputs and pictures."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from nbformat.v4 import new_code_cell

#: run first in every tutorial: warnings of its own code are errors, pictures fit the page
SETUP = """
import warnings
warnings.filterwarnings("error", module="__main__|gramscope")
import matplotlib.pyplot as plt
plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True})
"""


def run_tutorial(script: Path, execute: bool = True) -> dict[str, str | bytes]:
    """The files of a tutorial's page by name; an error or a warning in a cell ends the build with its traceback."""
    notebook = jupytext.read(script)
    if execute:
        notebook.cells.insert(0, new_code_cell(SETUP))
        with TemporaryDirectory() as folder:  # kernels that run at the same time need sockets of their own
            client = NotebookClient(notebook, timeout=300)
            kernel = client.create_kernel_manager()
            kernel.transport, kernel.ip = "ipc", f"{folder}/kernel"
            client.execute()
        del notebook.cells[0]
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":  # messages on stderr name places of the machine that builds the site
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    text, resources = MarkdownExporter().from_notebook_node(
        notebook, resources={"output_files_dir": script.stem, "unique_key": script.stem}
    )
    source = f"\nThis page is the output of `docs/tutorials/{script.name}`, run when the site was built.\n"
    return {f"{script.stem}.md": text + source, **resources.get("outputs", {})}
