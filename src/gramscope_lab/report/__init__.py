"""The report: records and artefacts of runs in, one self-contained page out. It never trains.

====================  ===============================================================================================
``read``              run directories -> :class:`~gramscope_lab.report.read.Runs`: settings, each with its seeds
``figures``           what a panel is, a panel as one figure of plotly's, accuracy and loss over training
``layer_figures``     layers by kind and block; their measures over training, by block, over depth
``snapshot_figures``  spectra and diagonals with a slider over training
``summary``           the outcome in words, claims, what was run, and tables
``page``              the HTML page; :func:`~gramscope_lab.report.page.write_report`, the whole way
====================  ===============================================================================================
"""

from gramscope_lab.report.page import write_live_report, write_report

__all__ = ["write_live_report", "write_report"]
