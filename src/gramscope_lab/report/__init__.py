"""The report: records and artefacts of runs in, figures and one self-contained page out. It never trains.

======================  =============================================================================================
``write``               :func:`~gramscope_lab.report.write.write_report`, the whole path from run directories to files
``live``                the server behind ``gramscope report --live``
``run_files``           the files of one run directory, without what is damaged or leads out of it
``loaded_runs``         run directories -> :class:`~gramscope_lab.report.loaded_runs.Runs`: settings, each with its seeds
``seed_statistics``     mean and spread over the seeds of a setting
``panel``               what a panel is: text, views, plots as plain numbers, a table
``training_panels``     accuracy and loss over training, and their last values
``layer_panels``        the measures of layers over training, and the layers compared at the end
``layer_views``         one measure of many layers: lines, a map over training, by block, over depth
``block_layout``        layers arranged by kind and block
``snapshot_panels``     spectra and diagonals with a slider over training
``collapse_panel``      neural collapse at the readout
``measure_texts``       names, sentences and formulas of the measures
``overview``            the summary: what was run, which claims hold, what could not be read
``headline``            its first sentences: who is ahead early, and where each setting ends
``tables``              sortable tables
``palette``             colours, dashes and markers of the settings
``plotly_figures``      a plot for the page
``matplotlib_figures``  a panel as PNG and PDF
``page``                the HTML page
======================  =============================================================================================
"""

from gramscope_lab.report.write import Report, write_report

__all__ = ["Report", "write_report"]
