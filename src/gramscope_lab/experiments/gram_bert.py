"""gram-fig11: target linearity of every layer of BERT, random, pre-trained and fine-tuned, for sequence and token tasks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from gramscope_lab.experiments.bert_stages import Settings, parts
from gramscope_lab.experiments.bert_tasks import TASKS
from gramscope_lab.experiments.experiment import Claim, Experiment, Results
from gramscope_lab.experiments.plots import Figure, band, curve, legend_below, mean, panels

NAMES = {"sst2": "SST-2", "mnli": "MNLI", "pos": "POS", "ner": "NER"}


# -- claims -------------------------------------------------------------------------------------------------------
def _profile(results: Results[Settings], task: str, stage: str) -> list[float]:
    """Target linearity layer by layer, the mean over seeds; layer 0 is the embedding."""
    return curve(results.records("stage", task=task, stage=stage), "layer", "target_linearity")[1]


def _note(results: Results[Settings]) -> str:
    used = {r["components"] for r in results.records("stage")} - {None}
    return f"after a PCA to {used.pop()} dimensions" if used else "without PCA"


def _text(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _gaps(results: Results[Settings]) -> dict[str, float]:
    """Pre-trained minus random, averaged over the layers above the embedding."""
    return {
        task: mean(
            a - b
            for a, b in zip(
                _profile(results, task, "pre-trained")[1:], _profile(results, task, "random")[1:], strict=True
            )
        )
        for task in results.settings.data
    }


def above_random(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] B.7: the pre-trained net is above the random one at every layer."""
    for task in results.settings.data:
        pre, random = (_profile(results, task, stage)[1:] for stage in ("pre-trained", "random"))
        holds = all(a > b for a, b in zip(pre, random, strict=True))
        reason = _note(results)
        if not holds and not results.settings.model and TASKS[task] == "sequence":
            reason = (
                "pre-trained by masked tokens alone, which no loss at [CLS] is part of; in a random net attention is nearly "
                "uniform, so [CLS] averages all words"
            )
        text = f"{NAMES[task]}: pre-trained above random at every layer"
        yield Claim(text, "well above", f"{_text(pre)} against {_text(random)}", holds, reason)


def order(results: Results[Settings]) -> Claim:
    """[Gram] B.7: the gap is largest for POS and NER, then sentiment, smallest for NLI."""
    gaps = _gaps(results)
    measured = ", ".join(f"{NAMES[task]} {value:+.2f}" for task, value in gaps.items())
    text = "the gap of pre-trained over random is largest for POS and NER, then SST-2, smallest for MNLI"
    if set(gaps) != set(TASKS):
        return Claim(text, "in that order", measured, None, "needs all four tasks")
    syntactic, others = min(gaps["pos"], gaps["ner"]), (gaps["sst2"], gaps["mnli"])
    holds = syntactic > max(others) and gaps["sst2"] > gaps["mnli"]
    reason = ""
    if not holds and syntactic > max(others):
        reason = "POS and NER lead; the two sequence tasks are in the other order"
    return Claim(text, "in that order", measured, holds, reason)


def peaks_early(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] B.7: before fine-tuning, syntactic tasks peak in early-to-middle layers."""
    for task in results.settings.data:
        if TASKS[task] != "token":
            continue
        values = _profile(results, task, "pre-trained")
        best = values.index(max(values))
        holds = best <= 2 * (len(values) - 1) / 3
        small = f"nearly flat in this small BERT: TL varies by {max(values) - min(values):.2f} over its layers"
        yield Claim(
            f"{NAMES[task]}: before fine-tuning TL is highest in the first two thirds of the layers",
            "layer 3 of 12 for POS",
            f"layer {best} of {len(values) - 1} ({_text(values)})",
            holds,
            small if not holds and not results.settings.model else "",
        )


def monotone(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] B.7: after one epoch of fine-tuning TL increases nearly monotonically with depth; later epochs add little."""
    last = results.settings.epochs
    for task in results.settings.data:
        first, final, pre = (_profile(results, task, stage) for stage in ("epoch 1", f"epoch {last}", "pre-trained"))
        drop = max(a - b for a, b in pairwise(first[1:]))
        holds = drop <= 0.02 and first[-1] >= max(first) - 0.02
        yield Claim(
            f"{NAMES[task]}: after one epoch TL nowhere falls by more than 0.02 with depth and is highest at the end",
            "near-monotone after one epoch",
            _text(first),
            holds,
            "" if holds else f"after epoch {last}: {_text(final)}",
        )
        early, late = first[-1] - pre[-1], final[-1] - first[-1]
        yield Claim(
            f"{NAMES[task]}: the first epoch raises the last layer's TL more than the later ones",
            "saturates within one epoch",
            f"{early:+.2f}, then {late:+.2f}",
            early > late,
            "" if early > late else _still_learning(results, task),
        )


def _still_learning(results: Results[Settings], task: str) -> str:
    """Validation accuracy after the first and the last epoch."""
    stages = ("epoch 1", f"epoch {results.settings.epochs}")
    scores = [
        mean(r["validation_accuracy"] for r in results.records("fine-tuning", task=task, stage=s)) for s in stages
    ]
    return f"validation accuracy {scores[0]:.1%} after one epoch, {scores[1]:.1%} at the end"


def figure(results: Results[Settings]) -> Figure:
    """A panel per task: target linearity by layer, a curve per stage."""
    settings = results.settings
    stages = ["random", "pre-trained", *(f"epoch {i + 1}" for i in range(settings.epochs))]
    page, axes = panels(1, len(settings.data), width=2.3, height=2.2, sharex=True)
    for place, task in zip(axes[0], settings.data, strict=True):
        for index, stage in enumerate(stages):
            records = results.records("stage", task=task, stage=stage)
            label = stage if index < 2 else f"fine-tuned, {stage}"
            band(place, records, "layer", "target_linearity", index=index, label=label, marker="o", markersize=2.5)
        place.set_title(NAMES[task] if settings.model else f"{NAMES[task]}-like")
        place.set_xlabel("layer (0: embedding)")
    axes[0, 0].set_ylabel(f"target linearity\n({_note(results)})")
    legend_below(page, axes[0, 0])
    return page


FIG11 = Experiment(
    Settings(model="", lr=5e-4, length=48, samples=1000),
    Settings(),
    parts,
    (above_random, order, peaks_early, monotone),
    figure,
)
