"""The report: records and artefacts of runs in, figures and one self-contained page out. It never trains.

=================  ==================================================================================================
``reading``        run directories -> :class:`~gramscope.report.reading.Runs`: settings, each with its runs (seeds)
``over_seeds``     mean and spread over the seeds of a setting
``panel``          what a panel is: words, views, plots as plain numbers, a table
``curves``         accuracy and loss over training, and where they ended
``layers``         layer × time maps of every measure, and the layers compared at the end
``snapshots``      spectra and diagonals with a slider over training
``collapse``       neural collapse at the readout
``summary``        what was run, what came out, which claims hold
``tables``         tables one can sort
``words``          names, sentences and formulas of the measures
``interactive``    a plot with plotly
``static``         a panel with matplotlib, as PNG and PDF
``page``           the HTML page
``build``          :func:`~gramscope.report.build.write_report`
``live``           :func:`~gramscope.report.live.serve`
=================  ==================================================================================================
"""
