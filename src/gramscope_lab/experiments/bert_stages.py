"""The parts of gram-fig11: a BERT's stages (random, pre-trained, every epoch of fine-tuning) on each task, measured.

``model`` names a BERT on the hub or a local folder. Without one a small BERT is built from a configuration, pre-trained by
masked tokens on a generated language and fine-tuned on tasks of that language: the same code on the same four kinds of task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gramscope.errors import InputError
from gramscope_lab.data.downloads import data_root
from gramscope_lab.data.seeds import derive_seed
from gramscope_lab.experiments.bert import (
    Classifier,
    Recipe,
    Trainer,
    accuracy,
    classification_loss,
    linearity_by_layer,
    load_encoder,
    load_tokenizer,
    masked_token_loss,
    small_encoder,
)
from gramscope_lab.experiments.bert_tasks import (
    TASKS,
    Encoded,
    Examples,
    encode,
    generated,
    generated_tokenizer,
    published,
    require_transformers,
)
from gramscope_lab.experiments.experiment import Computation, Options, Part, Recorder
from gramscope_lab.experiments.generated_language import Language
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.job import resolve_device
from gramscope_lab.training.random_state import PrivateRandomState
from gramscope_lab.training.reporter import Reporter
from gramscope_lab.training.train import Parallel


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

    @property
    def recipe(self) -> Recipe:
        """How tasks are fine-tuned."""
        return Recipe(self.lr, self.weight_decay, self.warm_up, self.clip, self.batch_size, self.epochs)


def parts(settings: Settings, options: Options) -> list[Part]:
    """Pre-training of the small BERT if it is used, then every task."""
    unknown = [task for task in settings.data if task not in TASKS]
    if unknown:
        raise InputError(f"gram-fig11 has no task {', '.join(unknown)}; it has: {', '.join(TASKS)}")
    found: list[Part] = []
    for seed in settings.seeds:
        if not settings.model:
            name = _pretraining(seed)
            found.append(Computation(name, lambda recorder, seed=seed: _pretrain(settings, options, seed, recorder)))  # type: ignore[misc]
        found += [FineTuning(f"{task}-seed-{seed}", task, settings, options, seed) for task in settings.data]
    return found


def _pretraining(seed: int) -> str:
    return f"pretraining-seed-{seed}"


# -- the small BERT -----------------------------------------------------------------------------------------------
def _small(settings: Settings, vocabulary: int, seed: int) -> Any:
    return small_encoder(
        vocabulary,
        hidden=settings.hidden,
        layers=settings.layers,
        heads=settings.heads,
        length=settings.length,
        seed=seed,
    )


def _pretrain(settings: Settings, options: Options, seed: int, recorder: Recorder) -> None:
    """Pre-train by masked tokens on single sentences and pairs, without labels."""
    device = resolve_device(options.device)
    spoken = Language()
    tokenizer = generated_tokenizer(spoken)
    encoder = _small(settings, len(tokenizer), seed)
    with PrivateRandomState(seed, "factory").active():
        model: nn.Module = require_transformers().BertForMaskedLM(encoder.config)
    model.bert.load_state_dict(encoder.state_dict(), strict=False)  # type: ignore[union-attr]
    model.to(device)
    pairs = settings.sentences // 4
    texts = [
        encode(tokenizer, generated(task, spoken, n, derive_seed(seed, "text", task)), settings.length)
        for task, n in (("sst2", settings.sentences - pairs), ("mnli", pairs))
    ]
    inputs = {name: torch.cat([text.inputs[name] for text in texts]) for name in texts[0].inputs}
    recipe = Recipe(settings.pretrain_lr, 0.01, 0.1, 1.0, settings.batch_size, settings.pretrain_epochs)
    loss = masked_token_loss(tokenizer, settings.mask_share)
    trainer = Trainer(model, Encoded(inputs, torch.zeros(settings.sentences)), loss, recipe, seed, device)
    recorder.reporter.start("pre-training", trainer.steps)
    for epoch in range(recipe.epochs):
        recorder.record("pretraining", seed=seed, epoch=epoch + 1, loss=trainer.epoch(epoch, recorder.reporter.advance))
    recorder.reporter.finish()
    weights = model.bert.state_dict()  # type: ignore[union-attr]
    recorder.save("encoder", **{name: tensor.detach().clone() for name, tensor in weights.items()})


# -- stages -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class FineTuning:
    """A part: target linearity of the random, the pre-trained and the fine-tuned net; resumed after the last complete epoch."""

    name: str
    task: str
    settings: Settings
    options: Options
    seed: int

    def complete(self, root: RunDirectory) -> bool:
        """Whether its last record is there."""
        return root.member(self.name).status() == "finished"

    def run(self, root: RunDirectory, reporter: Reporter, parallel: Parallel | str = "auto") -> None:
        """Fine-tune, measuring after every epoch; a checkpoint per epoch."""
        directory = root.member(self.name)
        if not directory.exists():
            RunDirectory.create(directory.path, {"part": self.name})
        with directory.lock:
            self._run(root, directory, reporter)

    def _run(self, root: RunDirectory, directory: RunDirectory, reporter: Reporter) -> None:
        settings, device = self.settings, resolve_device(self.options.device)
        tokenizer, train, validation = self._data()
        data, held = (encode(tokenizer, examples, settings.length) for examples in (train, validation))
        probe = encode(tokenizer, train.sample(settings.samples, self.seed), settings.length)
        encoder = self._encoder(root, len(tokenizer), trained=True).to(device)
        with PrivateRandomState(self.seed, "head").active():
            model = Classifier(encoder, train.kind, len(train.classes)).to(device)
        trainer = Trainer(model, data, classification_loss, settings.recipe, self.seed, device)
        done = self._resume(directory, model, trainer)
        if done == 0:
            untrained = self._encoder(root, len(tokenizer), trained=False).to(device)
            self._record(directory, "random", untrained, probe, device)
            del untrained
            self._record(directory, "pre-trained", encoder, probe, device)
        reporter.start(self.name, trainer.steps)
        for epoch in range(done, settings.epochs):
            loss = trainer.epoch(epoch, reporter.advance)
            stage = f"epoch {epoch + 1}"
            self._record(directory, stage, encoder, probe, device)
            score = accuracy(model, held, device)
            directory.append({**self._head(stage), "kind": "fine-tuning", "loss": loss, "validation_accuracy": score})
            self._save(directory, model, trainer, epoch + 1)
        reporter.finish()
        directory.append({"kind": "end", "finished": True})

    def _data(self) -> tuple[Any, Examples, Examples]:
        """Tokenizer, training and validation examples."""
        settings = self.settings
        if settings.model:
            train, validation = published(self.task, data_root(self.options.data_dir or None))
            return load_tokenizer(settings.model), train, validation
        spoken = Language()
        train, validation = (
            generated(self.task, spoken, n, derive_seed(self.seed, part, self.task))
            for part, n in (("train", settings.examples), ("validation", 500))
        )
        return generated_tokenizer(spoken), train, validation

    def _encoder(self, root: RunDirectory, vocabulary: int, *, trained: bool) -> Any:
        if self.settings.model:
            return load_encoder(self.settings.model, trained=trained, seed=self.seed)
        encoder = _small(self.settings, vocabulary, self.seed)
        if trained:
            weights = root.member(_pretraining(self.seed)).load_artefact("encoder")
            encoder.load_state_dict(weights, strict=False)  # the pooler is not part of masked-token training
        return encoder

    # -- records and checkpoints ----------------------------------------------------------------------------------
    def _head(self, stage: str) -> dict[str, Any]:
        return {"task": self.task, "seed": self.seed, "stage": stage}

    def _record(
        self, directory: RunDirectory, stage: str, encoder: nn.Module, probe: Encoded, device: torch.device
    ) -> None:
        values = linearity_by_layer(encoder, probe, device, self.settings.components)
        width = int(encoder.config.hidden_size)  # type: ignore[union-attr, arg-type]
        used = self.settings.components if 0 < self.settings.components < width else None
        head = {"kind": "stage", **self._head(stage), "components": used}
        directory.append(*({**head, "layer": i, "target_linearity": value} for i, value in enumerate(values)))

    def _save(self, directory: RunDirectory, model: nn.Module, trainer: Trainer, epoch: int) -> None:
        directory.save_checkpoint(epoch, model.state_dict(), trainer.state())
        directory.prune_checkpoints(1)

    def _resume(self, directory: RunDirectory, model: nn.Module, trainer: Trainer) -> int:
        """Epochs already done."""
        if not directory.checkpoint_steps():
            directory.rewind(None)
            return 0
        found = directory.load_checkpoint()
        directory.rewind(found)
        model.load_state_dict(dict(found.model))
        trainer.load_state(found.state)
        return found.step
