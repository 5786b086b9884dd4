"""gram-fig11's tasks, generated or by ``datasets``, and BERT-like encoders: masked tokens, classification, features by layer.

Any encoder that ``transformers.AutoModel`` builds will do. Sequence tasks are measured at the [CLS] state, token tasks at
the first sub-word of every word. A batch is one tensor ``[n, length, 3]``: token numbers, mask and segments.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from gramscope.errors import InputError, MissingExtraError
from gramscope.layers.model_call import evaluating
from gramscope.measures.linearity import target_linearity
from gramscope_lab.data.dataset import IGNORED
from gramscope_lab.experiments.generated_language import ENTITIES, POLARITIES, POS, RELATIONS, Language
from gramscope_lab.training.random_state import PrivateRandomState

#: task -> its columns in the published set: those of the text, and that of the labels (one a text, or one a word)
TASKS: dict[str, tuple[tuple[str, ...], str]] = {
    "sst2": (("sentence",), "label"),
    "mnli": (("premise", "hypothesis"), "label"),
    "pos": (("tokens",), "pos_tags"),
    "ner": (("tokens",), "ner_tags"),
}
#: tasks with a label for every word
TOKEN_TASKS = ("pos", "ner")
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
#: texts evaluated at a time
CHUNK = 100


@dataclass(frozen=True)
class Examples:
    """Texts (pairs of texts, or lists of words), and numbers of ``classes``, one a text or one a word."""

    texts: Sequence[Any]
    labels: Sequence[Any]
    classes: tuple[str, ...]


def require(package: str) -> Any:
    """``transformers`` or ``datasets``; an error that says how to install it if it is missing."""
    try:
        return __import__(package)
    except ImportError as error:
        raise MissingExtraError(
            f'gram-fig11 needs Hugging Face {package}; install it with: pip install "gramscope[transformers]"'
        ) from error


# -- tasks --------------------------------------------------------------------------------------------------------
def generated(task: str, spoken: Language, n: int, seed: int) -> Examples:
    """Examples of the generated language."""
    draw = random.Random(seed)
    if task == "mnli":
        pairs = [spoken.pair(draw) for _ in range(n)]
        labels = [RELATIONS.index(relation) for *_, relation in pairs]
        return Examples([(premise.text, hypothesis.text) for premise, hypothesis, _ in pairs], labels, RELATIONS)
    sentences = [spoken.sentence(draw) for _ in range(n)]
    if task == "sst2":
        return Examples([s.text for s in sentences], [POLARITIES.index(s.polarity) for s in sentences], POLARITIES)
    classes, tags = (POS, "pos") if task == "pos" else (ENTITIES, "entities")
    tagged = [[classes.index(tag) for tag in getattr(s, tags)] for s in sentences]
    return Examples([list(s.words) for s in sentences], tagged, classes)


def generated_tokenizer(spoken: Language) -> Any:
    """A word-piece tokenizer for the generated language, of the same kind as BERT's."""
    transformers = require("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {piece: number for number, piece in enumerate([*special, *spoken.pieces])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    names = {f"{name.strip('[]').lower()}_token": name for name in special}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def published(task: str, folder: Path) -> tuple[Examples, Examples]:
    """Training and validation examples of a published task: from ``folder``, as ``save_to_disk`` wrote them, or the hub."""
    datasets = require("datasets")
    name = "conll2003" if task in TOKEN_TASKS else task
    try:
        if (folder / name).is_dir():
            loaded = datasets.load_from_disk(str(folder / name))
        elif name == "conll2003":
            loaded = datasets.load_dataset("eriktks/conll2003", revision="refs/convert/parquet")
        else:
            loaded = datasets.load_dataset("nyu-mll/glue", name)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"task {task} is not in {folder / name}, as datasets' save_to_disk writes it, and the hub gave: {error}"
        ) from error
    validation = "validation_matched" if task == "mnli" else "validation"
    return _examples(task, loaded["train"]), _examples(task, loaded[validation])


def _examples(task: str, split: Any) -> Examples:
    """A split of ``datasets``; −1 marks pairs without an agreed relation."""
    columns, label = TASKS[task]
    try:
        rows = [row for row in split if row[label] != -1]
        texts = [row[columns[0]] if len(columns) == 1 else tuple(row[column] for column in columns) for row in rows]
        feature = split.features[label]
        classes = tuple(getattr(feature, "names", None) or feature.feature.names)
    except (KeyError, AttributeError) as error:
        needed = ", ".join((*columns, label))
        raise InputError(f"task {task}: its set needs columns {needed} and names of the classes: {error}") from error
    return Examples(texts, [row[label] for row in rows], classes)


def encode(tokenizer: Any, examples: Examples, length: int) -> tuple[Tensor, Tensor]:
    """Tokenise: ``[n, length, 3]``, and labels ``[n]``, or ``[n, length]`` with a word's label at its first sub-word."""
    words, pairs = (bool(examples.texts) and isinstance(examples.texts[0], kind) for kind in (list, tuple))
    columns = list(zip(*examples.texts, strict=True)) if pairs else [examples.texts]
    coded = tokenizer(
        *(list(column) for column in columns),
        is_split_into_words=words,
        truncation=True,
        max_length=length,
        padding="max_length",
        return_token_type_ids=True,
    )
    x = torch.stack([torch.tensor(coded[name]) for name in INPUTS], -1)
    if not words:
        return x, torch.tensor(examples.labels)
    return x, torch.tensor([_first_pieces(coded.word_ids(i), labels) for i, labels in enumerate(examples.labels)])


def _first_pieces(word_of: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """The word's label at its first sub-word; no label at others and at special tokens.

    >>> _first_pieces([None, 0, 0, 1, None], [7, 8])
    [-100, 7, -100, 8, -100]
    """
    return [
        labels[word] if word is not None and (place == 0 or word_of[place - 1] != word) else IGNORED
        for place, word in enumerate(word_of)
    ]


# -- nets ---------------------------------------------------------------------------------------------------------
def load_pretrained(model: str, kind: str, **options: Any) -> Any:
    """What ``transformers.KIND.from_pretrained`` gives for a hub name or a local folder."""
    try:
        return getattr(require("transformers"), kind).from_pretrained(model, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"model = {model!r} could not be loaded ({reason}); give a local folder with --set model=PATH, or the name of "
            "a model on the hub that can be reached"
        ) from error


def random_encoder(config: Any, seed: int) -> Any:
    """An encoder with random weights."""
    with PrivateRandomState(seed, "factory").active():
        return require("transformers").AutoModel.from_config(config)


def unpacked(x: Tensor) -> dict[str, Tensor]:
    """The arguments of an encoder, padded only to the longest text among these."""
    longest = int(x[..., 1].sum(1).max())
    return dict(zip(INPUTS, x[:, :longest].unbind(-1), strict=True))


class Classifier(nn.Module):
    """An encoder with a linear layer on its [CLS] state (pooled where the encoder pools) or on every token."""

    def __init__(self, encoder: nn.Module, classes: int, *, tokens: bool, dropout: float = 0.1) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(encoder.config.hidden_size, classes)  # type: ignore[union-attr, arg-type]
        self._tokens = tokens

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not self.training and len(x) > CHUNK:
            return torch.cat([self(part) for part in torch.split(x, CHUNK)])
        found = self.encoder(**unpacked(x))
        states = found.last_hidden_state
        if self._tokens:
            return F.pad(self.head(self.dropout(states)), (0, 0, 0, x.shape[1] - states.shape[1]))
        pooled = getattr(found, "pooler_output", None)
        return self.head(self.dropout(states[:, 0] if pooled is None else pooled))  # type: ignore[no-any-return]


def classification_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every text; of words its sum, scaled so that the mean over texts is that over the batch's words."""
    losses = F.cross_entropy(output.movedim(-1, 1), labels, ignore_index=IGNORED, reduction="none")
    return losses if labels.dim() == 1 else losses.sum(1) * (len(labels) / (labels != IGNORED).sum())


class MaskedTokens(nn.Module):
    """A net for masked tokens that masks its input and returns the loss of every text.

    Of ``share`` of the tokens 80 % are masked, 10 % replaced at random and 10 % left as they are.
    """

    def __init__(self, net: nn.Module, tokenizer: Any, share: float) -> None:
        super().__init__()
        self.net = net
        self._vocabulary, self._mask, self._share = len(tokenizer), tokenizer.mask_token_id, share
        self.register_buffer("special", torch.tensor(tokenizer.all_special_ids), persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        inputs = unpacked(x)
        tokens = inputs["input_ids"]
        chosen = (torch.rand(tokens.shape) < self._share).to(tokens.device) & ~torch.isin(tokens, self.special)  # type: ignore[arg-type]
        chance = torch.rand(tokens.shape).to(tokens.device)
        drawn = torch.randint(self._vocabulary, tokens.shape).to(tokens.device)
        shown = torch.where(chosen & (chance < 0.8), self._mask, tokens)
        shown = torch.where(chosen & (chance >= 0.9), drawn, shown)
        logits = self.net(**{**inputs, "input_ids": shown}).logits
        return classification_loss(logits, torch.where(chosen, tokens, IGNORED))


# -- measuring ----------------------------------------------------------------------------------------------------
@torch.no_grad()
def layer_features(encoder: nn.Module, x: Tensor, labels: Tensor) -> tuple[list[Tensor], Tensor]:
    """Hidden states of the embedding and of every layer, ``[rows, d]`` each, and the labels of the rows."""
    layers: list[list[Tensor]] = []
    known = labels != IGNORED
    with evaluating(encoder):
        for part, chosen in zip(torch.split(x, CHUNK), torch.split(known, CHUNK), strict=True):
            states = encoder(**unpacked(part), output_hidden_states=True).hidden_states
            layers = layers or [[] for _ in states]
            for rows, state in zip(layers, states, strict=True):
                rows.append((state[:, 0] if labels.dim() == 1 else state[chosen[:, : state.shape[1]]]).float().cpu())
    return [torch.cat(rows) for rows in layers], labels[known].cpu()


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


def linearity_by_layer(encoder: nn.Module, x: Tensor, labels: Tensor, components: int = 256) -> Iterator[float]:
    """Target linearity, with intercept, of the embedding and of every layer.

    If a layer has more than ``components`` features, they are reduced to that many principal components first, as in [Gram]
    B.7; that lowers the value.
    """
    layers, rows = layer_features(encoder, x, labels)
    for features in layers:
        yield float(target_linearity(principal_components(features, components), rows, intercept=True))
