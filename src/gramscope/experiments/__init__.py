"""Published results, each reproduced by one command: ``gramscope reproduce NAME``.

An experiment is declared, not programmed. One file a family holds

* a frozen dataclass of *settings*, with a value for ``quick`` and one for ``paper`` scale. A field ``seeds`` (tuple of
  ints) is what ``--seeds`` sets, a field ``data`` (tuple of names) what ``--data`` sets; any field can be set by
  ``--set``;
* a function from settings and :class:`~gramscope.experiments.core.Options` to its *parts*, the units that are skipped
  when a run is resumed: a :class:`~gramscope.experiments.core.Training` (a ``TrainConfig``, with all its seeds and sweep
  values) or a :class:`~gramscope.experiments.core.Computation` (a function that writes records and matrices);
* *claims*: small functions from :class:`~gramscope.experiments.core.Results` to one or several
  :class:`~gramscope.experiments.core.Claim` rows;
* one *figure*: a function from results to a matplotlib figure, with the helpers of ``plots``;

and one line in ``catalogue`` gives it its name, source and title, so that listing needs no torch:

    @dataclass(frozen=True)
    class Settings:
        seeds: tuple[int, ...] = (0, 1, 2)
        epochs: float = 2.0

    def parts(settings: Settings, options: Options) -> list[Part]:
        config = TrainConfig.from_dict({..., "seeds": settings.seeds, "device": options.device})
        return [Training("sgd", config), Computation("theory", partial(predict, settings))]

    def predict(settings: Settings, recorder: Recorder) -> None:
        for seed in recorder.track(settings.seeds, len(settings.seeds)):
            recorder.record("theory", seed=seed, value=1.0)

    def learns(results: Results[Settings]) -> Claim:
        last = mean(r["test_accuracy"] for r in results.records("evaluation", part="sgd", epoch=results.settings.epochs))
        return Claim("test accuracy", published="46 %", measured=f"{last:.0%}", holds=last > 0.45)

    def figure(results: Results[Settings]) -> Figure:
        page, axes = panels(1, 1)
        band(axes[0, 0], results.records("evaluation"), "epoch", "test_accuracy", label="SGD")
        return page

    EXPERIMENT = Experiment(Settings(), Settings(seeds=(0, 1, 2, 3, 4), epochs=20.0), parts, (learns,), figure)

On disk an experiment is a group of run directories, one a part (a training with several members is a group itself) and
one, ``claims``, for the claims; the figures are the group's. ``records`` of the group gives all of them, each with its
``run``. Everything below ``parts`` works from these records alone, so ``--plot-only`` needs no training.

Experiments that choose hyper-parameters say so by ``chooses=True`` and follow ``options.select``: with ``"validation"``
they hold out part of the training set and choose on it, with ``"test"`` they choose on test data as the papers did.
Those whose data sets must have classes say ``classes=True``, and others are refused before anything is run.

=============  =====================================================================================================
``catalogue``  names, sources and titles
``core``       Experiment, Training, Computation, Claim, Results
``running``    :func:`~gramscope.experiments.running.reproduce`: run, resume, draw, judge
``plots``      figures: palette, panels, bands, matrices
``comparing``  methods compared on data sets: sweeps, the chosen setting, accuracy curves
``vcl…``       "Feature Learning as a Virtual Covariance Learning", vcl-fig1, vcl-fig2, vcl-poster
``gram…``      "The Weight Gram Matrix Captures Sequential Feature Linearization", gram-fig1 … gram-fig14
``bert…``      for gram-fig11: BERT, its tasks and stages; ``language`` generates its small language
``nfa…``       "Gradient descent induces alignment between weights and the pre-activation tangents", nfa-fig1 … nfa-fig9
=============  =====================================================================================================
"""
