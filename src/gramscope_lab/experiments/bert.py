"""BERT-like encoders: pre-training by masked tokens, fine-tuning, and target linearity of every layer.

Any encoder that ``transformers.AutoModel`` builds will do. Sequence tasks are measured at the [CLS] state, token tasks at
the first sub-word of every word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from gramscope.errors import InputError
from gramscope.layers.model_call import evaluating
from gramscope.measures.linearity import target_linearity
from gramscope_lab.experiments.bert_tasks import IGNORED, Encoded, require_transformers
from gramscope_lab.training.config import ScheduleTable
from gramscope_lab.training.job import schedule_factor
from gramscope_lab.training.random_state import PrivateRandomState, epoch_order


@dataclass(frozen=True)
class Recipe:
    """How to train: AdamW, linear warm-up over a tenth of the steps, then linear decay; gradients clipped."""

    lr: float
    weight_decay: float
    warm_up: float
    clip: float
    batch_size: int
    epochs: int


class Classifier(nn.Module):
    """An encoder with a linear layer on its [CLS] state (pooled where the encoder pools) or on every token."""

    def __init__(self, encoder: nn.Module, kind: str, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(encoder.config.hidden_size, classes)  # type: ignore[union-attr, arg-type]
        self._kind = kind

    @override
    def forward(self, **inputs: Tensor) -> Tensor:
        found = self.encoder(**inputs)
        if self._kind == "token":
            return self.head(self.dropout(found.last_hidden_state))  # type: ignore[no-any-return]
        pooled = getattr(found, "pooler_output", None)
        return self.head(self.dropout(found.last_hidden_state[:, 0] if pooled is None else pooled))  # type: ignore[no-any-return]


# -- building -----------------------------------------------------------------------------------------------------
def load_encoder(model: str, *, trained: bool, seed: int) -> Any:
    """An encoder by its hub name or local folder, with its weights or (``trained=False``) with random ones."""
    transformers = require_transformers()
    with PrivateRandomState(seed, "factory").active(), _found(model):
        if trained:
            return transformers.AutoModel.from_pretrained(model)
        return transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(model))


def load_tokenizer(model: str) -> Any:
    """The tokenizer that belongs to an encoder; word alignment needs a fast one."""
    transformers = require_transformers()
    with _found(model):
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    if not tokenizer.is_fast:
        raise InputError(f"model = {model!r}: its tokenizer is not a fast one, which aligning words needs")
    return tokenizer


@contextlib.contextmanager
def _found(model: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"model = {model!r} could not be loaded ({reason}); give a local folder with --set model=PATH, or the name of "
            "a model on the hub that can be reached"
        ) from error


def small_encoder(vocabulary: int, *, hidden: int, layers: int, heads: int, length: int, seed: int) -> Any:
    """A BERT with random weights, built from a configuration."""
    transformers = require_transformers()
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with PrivateRandomState(seed, "factory").active():
        return transformers.BertModel(config)


# -- training -----------------------------------------------------------------------------------------------------
@dataclass
class Trainer:
    """Batches of an encoded task in a reproducible order, one optimizer, one random state; resumable by its state."""

    model: nn.Module
    data: Encoded
    loss: Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor]
    recipe: Recipe
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.recipe.lr, weight_decay=self.recipe.weight_decay
        )
        self.random = PrivateRandomState(self.seed, "training", self.device)
        self._per_epoch = -(-len(self.data.labels) // self.recipe.batch_size)

    @property
    def steps(self) -> int:
        """Steps of all epochs."""
        return self._per_epoch * self.recipe.epochs

    def epoch(self, number: int, advance: Callable[[int], None]) -> float:
        """Train epoch ``number`` (from 0) and return its mean loss."""
        table = ScheduleTable(name="linear", warm_up=self.recipe.warm_up * self.recipe.epochs)
        order = epoch_order(self.seed, number, len(self.data.labels))
        total = torch.zeros((), device=self.device)
        self.model.train()
        with self.random.active():
            for place, index in enumerate(torch.split(order, self.recipe.batch_size)):
                step = number * self._per_epoch + place
                factor = schedule_factor(table, step, self.steps, self._per_epoch)
                self.optimizer.param_groups[0]["lr"] = self.recipe.lr * factor
                self.optimizer.zero_grad(set_to_none=True)
                inputs, labels = self.data.batch(index, self.device)
                loss = self.loss(self.model, inputs, labels)
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
                self.optimizer.step()
                total += loss.detach()
                advance(step + 1)
            self._states = self.random.current()
        return float(total) / self._per_epoch

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs besides the model's weights."""
        return {"optimizer": self.optimizer.state_dict(), "random": self._states}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.load(state["random"])


def classification_loss(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Mean cross-entropy over texts, or over labelled words."""
    return F.cross_entropy(model(**inputs).flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def masked_token_loss(tokenizer: Any, share: float) -> Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor]:
    """Cross-entropy at ``share`` of the tokens: 80 % of them masked, 10 % replaced at random, 10 % left as they are."""
    special = torch.tensor(tokenizer.all_special_ids)

    def loss(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        tokens = inputs["input_ids"]
        chosen = (torch.rand(tokens.shape) < share).to(tokens.device) & ~torch.isin(tokens, special.to(tokens.device))
        chance = torch.rand(tokens.shape).to(tokens.device)
        drawn = torch.randint(len(tokenizer), tokens.shape).to(tokens.device)
        shown = torch.where(chosen & (chance < 0.8), tokenizer.mask_token_id, tokens)
        shown = torch.where(chosen & (chance >= 0.9), drawn, shown)
        logits = model(**{**inputs, "input_ids": shown}).logits
        return F.cross_entropy(
            logits.flatten(0, -2), torch.where(chosen, tokens, IGNORED).flatten(), ignore_index=IGNORED
        )

    return loss


# -- measuring ----------------------------------------------------------------------------------------------------
@torch.no_grad()
def accuracy(model: Classifier, data: Encoded, device: torch.device, batch_size: int = 100) -> float:
    """Share of texts, or words, labelled right."""
    right = total = 0
    with evaluating(model):
        for index in torch.split(torch.arange(len(data.labels)), batch_size):
            inputs, labels = data.batch(index, device)
            known = labels != IGNORED
            right += int((model(**inputs).argmax(-1) == labels)[known].sum())
            total += int(known.sum())
    return right / total


@torch.no_grad()
def layer_features(
    encoder: nn.Module, data: Encoded, device: torch.device, batch_size: int = 100
) -> tuple[list[Tensor], Tensor]:
    """Hidden states of the embedding and of every layer, ``[rows, d]`` each, and the labels of the rows."""
    layers: list[list[Tensor]] = []
    found: list[Tensor] = []
    with evaluating(encoder):
        for index in torch.split(torch.arange(len(data.labels)), batch_size):
            inputs, labels = data.batch(index, device)
            states = encoder(**inputs, output_hidden_states=True).hidden_states
            layers = layers or [[] for _ in states]
            known = labels != IGNORED
            for rows, state in zip(layers, states, strict=True):
                rows.append((state[:, 0] if labels.dim() == 1 else state[known]).float().cpu())
            found.append(labels[known].cpu())
    return [torch.cat(rows) for rows in layers], torch.cat(found)


def principal_components(features: Tensor, count: int) -> Tensor:
    """Rows centred and projected on their ``count`` leading principal directions; unchanged if they have no more columns.

    >>> principal_components(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), 1).abs().flatten()
    tensor([1., 1.], dtype=torch.float64)
    """
    if count == 0 or features.shape[1] <= count:
        return features
    centred = features.double() - features.double().mean(0)
    directions: Tensor = torch.linalg.eigh(centred.mT @ centred).eigenvectors
    return centred @ directions[:, -count:]


def linearity_by_layer(encoder: nn.Module, data: Encoded, device: torch.device, components: int = 256) -> list[float]:
    """Target linearity, with intercept, of the embedding and of every layer.

    If a layer has more than ``components`` features, they are reduced to that many principal components first, as in [Gram]
    B.7; that lowers the value.
    """
    layers, labels = layer_features(encoder, data, device)
    return [float(target_linearity(principal_components(h, components), labels, intercept=True)) for h in layers]
