"""gram-fig11: target linearity of every layer of BERT, random, pre-trained and fine-tuned, for sequence and token tasks.

``model`` names a BERT on the hub or a local folder. Without one a small BERT is built from a configuration, pre-trained by
masked tokens on a generated language and fine-tuned on tasks of that language: the same code on the same four kinds of task.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from gramscope.errors import InputError
from gramscope_lab.data.dataset import DataSet, derive_seed
from gramscope_lab.data.downloads import data_root
from gramscope_lab.experiments import bert
from gramscope_lab.experiments.bert import TASKS, TOKEN_TASKS
from gramscope_lab.experiments.experiment import Claim, Experiment, Options, Results, Training, training_config
from gramscope_lab.experiments.generated_language import Language
from gramscope_lab.experiments.plots import Figure, band, curve, legend_below, listed, mean, panels
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.job import Job
from gramscope_lab.training.random_state import PrivateRandomState

NAMES = {"sst2": "SST-2", "mnli": "MNLI", "pos": "POS", "ner": "NER"}


@dataclass(frozen=True)
class Settings:
    """[Gram] B.7. The fields after ``epochs`` are for the small BERT, which is used when ``model`` is empty."""

    seeds: tuple[int, ...] = (0,)
    data: tuple[str, ...] = ("sst2", "mnli", "pos", "ner")
    model: str = "bert-base-uncased"
    samples: int = 2000
    components: int = 256
    length: int = 128
    lr: float = 2e-5
    weight_decay: float = 0.01
    warm_up: float = 0.1
    clip: float = 1.0
    batch_size: int = 32
    epochs: int = 3
    hidden: int = 64
    layers: int = 4
    heads: int = 4
    sentences: int = 3000
    pretrain_epochs: int = 9
    pretrain_lr: float = 2e-3
    mask_share: float = 0.25
    examples: int = 1000


def parts(settings: Settings, options: Options) -> list[Training]:
    """Pre-training of the small BERT if it is used, then every task."""
    unknown = [task for task in settings.data if task not in TASKS]
    if unknown:
        raise InputError(f"gram-fig11 has no task {', '.join(unknown)}; it has: {', '.join(TASKS)}")
    found = []
    for seed in settings.seeds:
        if not settings.model:
            found.append(
                Training(
                    f"pretraining-seed-{seed}",
                    _config(settings, options, seed, "masked-tokens", settings.pretrain_epochs, settings.pretrain_lr),
                    data=partial(_sentences, settings, seed),
                    model=lambda _config, _data, _root, seed=seed: _masked(settings, seed),  # type: ignore[misc]
                    loss=lambda losses, _: losses,
                )
            )
        for task in settings.data:
            config = _config(settings, options, seed, task, settings.epochs, settings.lr)
            found.append(
                Training(
                    f"{task}-seed-{seed}",
                    config,
                    data=partial(_task, settings, options, task, seed),
                    model=partial(_classifier, settings),
                    loss=bert.classification_loss,
                    measure=partial(_stages, settings, task),
                )
            )
    return found


def _config(settings: Settings, options: Options, seed: int, task: str, epochs: int, lr: float) -> TrainConfig:
    """AdamW, linear warm-up, then linear decay; gradients clipped; a checkpoint per epoch."""
    return training_config(
        settings,
        options,
        seeds=[seed],
        epochs=epochs,
        data={"name": task},
        model={"name": "bert"},
        method={"name": "adamw", "lr": lr, "weight_decay": settings.weight_decay},
        schedule={"name": "linear", "warm_up": settings.warm_up * epochs},
        clip=settings.clip,
        checkpoint_every=1,
        keep=1,
        measure={"every": 1} if task in TASKS else {"samples": 0},
    )


# -- data and nets ------------------------------------------------------------------------------------------------
def _tokenizer(settings: Settings) -> Any:
    """The tokenizer that belongs to the encoder; word alignment needs a fast one."""
    if not settings.model:
        return bert.generated_tokenizer(Language())
    tokenizer = bert.load_pretrained(settings.model, "AutoTokenizer")
    if not tokenizer.is_fast:
        raise InputError(f"model = {settings.model!r}: its tokenizer is not a fast one, which aligning words needs")
    return tokenizer


def _sentences(settings: Settings, seed: int) -> DataSet:
    """Single sentences and pairs, without labels."""
    spoken = Language()
    tokenizer = bert.generated_tokenizer(spoken)
    pairs = settings.sentences // 4
    counts = {"sst2": settings.sentences - pairs, "mnli": pairs}
    texts = [bert.generated(task, spoken, n, derive_seed(seed, "text", task)) for task, n in counts.items()]
    x = torch.cat([bert.encode(tokenizer, examples, settings.length)[0] for examples in texts])
    none = torch.zeros(len(x), 1)
    return DataSet("masked-tokens", x, none, x[: bert.CHUNK], none[: bert.CHUNK])


def _task(settings: Settings, options: Options, task: str, seed: int) -> DataSet:
    """A task's training and validation examples, encoded."""
    if settings.model:
        found = bert.published(task, data_root(options.data_dir or None))
    else:
        train, held = (
            bert.generated(task, Language(), n, derive_seed(seed, part, task))
            for part, n in (("train", settings.examples), ("validation", 500))
        )
        found = train, held
    tokenizer = _tokenizer(settings)
    (x, y), (x_test, y_test) = (bert.encode(tokenizer, examples, settings.length) for examples in found)
    return DataSet(task, x, y, x_test, y_test, len(found[0].classes))


def _random(settings: Settings, seed: int) -> Any:
    """The encoder with random weights."""
    if settings.model:
        return bert.random_encoder(bert.load_pretrained(settings.model, "AutoConfig"), seed)
    config = bert.require("transformers").BertConfig(
        vocab_size=len(_tokenizer(settings)),
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=4 * settings.hidden,
        max_position_embeddings=settings.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return bert.random_encoder(config, seed)


def _masked(settings: Settings, seed: int) -> nn.Module:
    """The small BERT with a head for masked tokens."""
    encoder = _random(settings, seed)
    with PrivateRandomState(seed, "factory").active():
        net = bert.require("transformers").BertForMaskedLM(encoder.config)
    net.bert.load_state_dict(encoder.state_dict(), strict=False)
    return bert.MaskedTokens(net, _tokenizer(settings), settings.mask_share)


def _classifier(settings: Settings, config: TrainConfig, data: DataSet, root: RunDirectory) -> nn.Module:
    """The pre-trained encoder with a new head."""
    if settings.model:
        encoder = bert.load_pretrained(settings.model, "AutoModel")
    else:
        encoder = _random(settings, config.seed)
        weights = root.member(f"pretraining-seed-{config.seed}").load_checkpoint().model
        kept = {name.removeprefix("net.bert."): weight for name, weight in weights.items()}
        encoder.load_state_dict(kept, strict=False)  # the pooler is not part of masked-token training
    with PrivateRandomState(config.seed, "head").active():
        return bert.Classifier(encoder, data.outputs, tokens=data.labels_tokens)


def _stages(settings: Settings, task: str, model: nn.Module, job: Job, step: int) -> Iterator[dict[str, Any]]:
    """Target linearity of every layer on training examples; at the start of the random encoder too."""
    data, seed = job.data, job.config.seed
    encoder: Any = model.encoder
    stages = {f"epoch {step // job.plan.steps_per_epoch}": encoder}
    if step == 0:
        stages = {"random": _random(settings, seed).to(job.device), "pre-trained": encoder}
    chosen = random.Random(seed).sample(range(len(data.x_train)), min(settings.samples, len(data.x_train)))
    used = settings.components if 0 < settings.components < encoder.config.hidden_size else None
    for stage, net in stages.items():
        values = bert.linearity_by_layer(net, data.x_train[chosen], data.y_train[chosen], settings.components)
        head = {"task": task, "stage": stage, "components": used}
        yield from ({**head, "layer": i, "target_linearity": value} for i, value in enumerate(values))


# -- claims -------------------------------------------------------------------------------------------------------
def _profile(results: Results[Settings], task: str, stage: str) -> list[float]:
    """Target linearity layer by layer, the mean over seeds; layer 0 is the embedding."""
    return curve(results.records("measurement", task=task, stage=stage), "layer", "target_linearity")[1]


def _note(results: Results[Settings]) -> str:
    used = {r["components"] for r in results.records("measurement")} - {None}
    return f"after a PCA to {used.pop()} dimensions" if used else "without PCA"


def _text(values: list[float]) -> str:
    return listed("{:.2f}", values)


def _gap(results: Results[Settings], task: str) -> float:
    """Pre-trained minus random, averaged over the layers above the embedding."""
    pre, random = (_profile(results, task, stage)[1:] for stage in ("pre-trained", "random"))
    return mean(a - b for a, b in zip(pre, random, strict=True))


def above_random(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] B.7: the pre-trained net is above the random one at every layer."""
    for task in results.settings.data:
        pre, random = (_profile(results, task, stage)[1:] for stage in ("pre-trained", "random"))
        holds = all(a > b for a, b in zip(pre, random, strict=True))
        text = f"{NAMES[task]}: pre-trained above random at every layer"
        yield Claim(text, "well above", f"{_text(pre)} against {_text(random)}", holds, _note(results))


def order(results: Results[Settings]) -> Claim:
    """[Gram] B.7: the gap is largest for POS and NER, then sentiment, smallest for NLI."""
    gaps = {task: _gap(results, task) for task in results.settings.data}
    measured = ", ".join(f"{NAMES[task]} {value:+.2f}" for task, value in gaps.items())
    text = "the gap of pre-trained over random is largest for POS and NER, then SST-2, smallest for MNLI"
    if set(gaps) != set(TASKS):
        return Claim(text, "in that order", measured, None, "needs all four tasks")
    syntactic, others = min(gaps["pos"], gaps["ner"]), (gaps["sst2"], gaps["mnli"])
    return Claim(text, "in that order", measured, syntactic > max(others) and gaps["sst2"] > gaps["mnli"])


def peaks_early(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] B.7: before fine-tuning, syntactic tasks peak in early-to-middle layers."""
    for task in results.settings.data:
        if task not in TOKEN_TASKS:
            continue
        values = _profile(results, task, "pre-trained")
        best = values.index(max(values))
        yield Claim(
            f"{NAMES[task]}: before fine-tuning TL is highest in the first two thirds of the layers",
            "layer 3 of 12 for POS",
            f"layer {best} of {len(values) - 1} ({_text(values)})",
            best <= 2 * (len(values) - 1) / 3,
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
        )


def figure(results: Results[Settings]) -> Figure:
    """A panel per task: target linearity by layer, a curve per stage."""
    settings = results.settings
    stages = ["random", "pre-trained", *(f"epoch {i + 1}" for i in range(settings.epochs))]
    page, axes = panels(1, len(settings.data), width=2.3, height=2.2, sharex=True)
    for place, task in zip(axes[0], settings.data, strict=True):
        for index, stage in enumerate(stages):
            records = results.records("measurement", task=task, stage=stage)
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
