"""Published results, each reproduced by one command: ``gramscope reproduce NAME``.

One file per family of figures declares

* *settings*: a frozen dataclass, with one value for the ``quick`` and one for the ``paper`` scale. ``--seeds`` sets the
  field ``seeds`` (tuple of ints), ``--data`` the field ``data`` (tuple of names), and ``--set`` any field;
* *parts*: what to run. A part is a :class:`~gramscope_lab.experiments.experiment.Training` (a ``TrainConfig``, with all its
  seeds and sweep values) or a :class:`~gramscope_lab.experiments.experiment.Computation` (a function that writes records
  and matrices). A resumed run skips complete parts;
* *claims*: functions from :class:`~gramscope_lab.experiments.experiment.Results` to rows of the claims table;
* one *figure*: a function from results to a matplotlib figure.

``docs/howto/extend.md`` has a complete example. One line in ``catalogue`` gives the experiment its name, source and title, so
that listing needs no torch. On disk an experiment is a group of run directories: one per part (a training with several
members is a group itself) and one, ``claims``, for the claims. Claims and figure read these records only, so the same command
draws and judges a complete directory again without training.

Hyper-parameters are chosen on a held-out part of the training set, never on the test set. ``classes=True`` makes
:func:`~gramscope_lab.experiments.experiment.reproduce` refuse data sets without classes before anything runs.
"""
