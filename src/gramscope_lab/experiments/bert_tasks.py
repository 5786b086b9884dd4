"""Examples of sequence and token tasks, generated or read from the official files or by ``datasets``, and their encoding.

Files are looked for in the data folder as they are distributed: ``SST-2/train.tsv``, ``MNLI/train.tsv`` (GLUE),
``conll2003/train.txt`` (or ``eng.train``), with ``dev.tsv``, ``dev_matched.tsv``, ``valid.txt`` (``eng.testa``) beside
them, or a folder ``sst2``, ``mnli``, ``conll2003`` written by ``datasets``' ``save_to_disk``. Otherwise they come
from the hub.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gramscope.errors import InputError, MissingExtraError
from gramscope_lab.experiments import generated_language
from gramscope_lab.experiments.generated_language import Language

#: task -> ``sequence`` (one label per text, read off the [CLS] state) or ``token`` (one per word, read off its first sub-word)
TASKS: dict[str, Literal["sequence", "token"]] = {
    "sst2": "sequence",
    "mnli": "sequence",
    "pos": "token",
    "ner": "token",
}
#: position without a label
IGNORED = -100


@dataclass(frozen=True)
class Examples:
    """Texts (pairs of texts, or lists of words) and labels (one, or one per word), numbered by ``classes``."""

    task: str
    texts: Sequence[Any]
    labels: Sequence[Any]
    classes: tuple[str, ...]

    @property
    def kind(self) -> Literal["sequence", "token"]:
        """Whether a text or a word has a label."""
        return TASKS[self.task]

    def sample(self, n: int, seed: int) -> Examples:
        """At most ``n`` examples, drawn at random."""
        chosen = random.Random(seed).sample(range(len(self.texts)), min(n, len(self.texts)))
        return Examples(self.task, [self.texts[i] for i in chosen], [self.labels[i] for i in chosen], self.classes)


@dataclass(frozen=True)
class Encoded:
    """Token numbers ``[n, length]`` with mask and segment, and labels ``[n]`` or ``[n, length]`` (first sub-words)."""

    inputs: dict[str, Tensor]
    labels: Tensor

    def batch(self, index: Tensor, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
        """Some samples on a device, padded only to the longest text among them."""
        length = int(self.inputs["attention_mask"][index].sum(1).max())
        inputs = {name: tensor[index, :length].to(device) for name, tensor in self.inputs.items()}
        labels = self.labels[index] if self.labels.dim() == 1 else self.labels[index, :length]
        return inputs, labels.to(device)


def encode(tokenizer: Any, examples: Examples, length: int) -> Encoded:
    """Tokenise; a word's label goes to its first sub-word, all other positions are ignored."""
    words = examples.kind == "token"
    pairs = bool(examples.texts) and isinstance(examples.texts[0], tuple)
    columns = list(zip(*examples.texts, strict=True)) if pairs else [examples.texts]
    coded = tokenizer(
        *(list(column) for column in columns),
        is_split_into_words=words,
        truncation=True,
        max_length=length,
        padding="max_length",
        return_token_type_ids=True,
    )
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = {name: torch.tensor(coded[name]) for name in names}
    if not words:
        return Encoded(inputs, torch.tensor(examples.labels))
    labels = [_first_pieces(coded.word_ids(i), of_words) for i, of_words in enumerate(examples.labels)]
    return Encoded(inputs, torch.tensor(labels))


def _first_pieces(word_of: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """The word's label at its first sub-word; :data:`IGNORED` at others and at special tokens.

    >>> _first_pieces([None, 0, 0, 1, None], [7, 8])
    [-100, 7, -100, 8, -100]
    """
    return [
        labels[word] if word is not None and (place == 0 or word_of[place - 1] != word) else IGNORED
        for place, word in enumerate(word_of)
    ]


# -- generated ----------------------------------------------------------------------------------------------------
def generated(task: str, spoken: Language, n: int, seed: int) -> Examples:
    """Examples of the generated language."""
    draw = random.Random(seed)
    if task == "mnli":
        pairs = [spoken.pair(draw) for _ in range(n)]
        texts = [(premise.text, hypothesis.text) for premise, hypothesis, _ in pairs]
        return Examples(
            task, texts, [generated_language.RELATIONS.index(r) for *_, r in pairs], generated_language.RELATIONS
        )
    sentences = [spoken.sentence(draw) for _ in range(n)]
    if task == "sst2":
        labels = [generated_language.POLARITIES.index(s.polarity) for s in sentences]
        return Examples(task, [s.text for s in sentences], labels, generated_language.POLARITIES)
    classes, tags = (generated_language.POS, "pos") if task == "pos" else (generated_language.ENTITIES, "entities")
    tagged = [[classes.index(tag) for tag in getattr(s, tags)] for s in sentences]
    return Examples(task, [list(s.words) for s in sentences], tagged, classes)


def generated_tokenizer(spoken: Language) -> Any:
    """A word-piece tokenizer for the generated language, of the same kind as BERT's."""
    transformers = require_transformers()
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


# -- published sets -----------------------------------------------------------------------------------------------
_SST2 = ("negative", "positive")
_MNLI = ("entailment", "neutral", "contradiction")
#: task -> folder of official files, their names for training and validation, folder of datasets, hub name and options
_PLACES: dict[str, tuple[str, tuple[tuple[str, ...], tuple[str, ...]], str, tuple[Any, ...], dict[str, str]]] = {
    "sst2": ("SST-2", (("train.tsv",), ("dev.tsv",)), "sst2", ("nyu-mll/glue", "sst2"), {}),
    "mnli": ("MNLI", (("train.tsv",), ("dev_matched.tsv",)), "mnli", ("nyu-mll/glue", "mnli"), {}),
    "conll2003": (
        "conll2003",
        (("train.txt", "eng.train"), ("valid.txt", "eng.testa")),
        "conll2003",
        ("eriktks/conll2003",),
        {"revision": "refs/convert/parquet"},
    ),
}


def published(task: str, folder: Path) -> tuple[Examples, Examples]:
    """Training and validation examples of a published task, from files in ``folder`` or from the hub."""
    name = task if TASKS[task] == "sequence" else "conll2003"
    place, names, saved, hub, options = _PLACES[name]
    found = [next((folder / place / n for n in some if (folder / place / n).is_file()), None) for some in names]
    if found[0] is not None and found[1] is not None:
        read: Callable[[Path], Any] = _read_words if name == "conll2003" else _read_table
        return _examples(task, [list(read(path)) for path in found if path is not None])
    where = f"neither in {folder / place} ({', '.join(some[0] for some in names)}) nor in {folder / saved}"
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            f'task {task} is {where}; put it there, or: pip install "gramscope[transformers]" to get it from the hub'
        ) from error
    try:
        loaded = (
            datasets.load_from_disk(str(folder / saved))
            if (folder / saved).is_dir()
            else datasets.load_dataset(*hub, **options)
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"task {task} is {where}, and the hub gave: {error}") from error
    validation = "validation_matched" if task == "mnli" else "validation"
    return _examples(task, [_rows(loaded["train"]), _rows(loaded[validation])])


def _read_table(path: Path) -> Iterable[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def _read_words(path: Path) -> Iterable[dict[str, Any]]:
    """Sentences of a CoNLL file: ``word POS chunk entity`` on a line, an empty line between sentences."""
    lines: list[list[str]] = []
    for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
        parts = line.split()
        if parts and parts[0] != "-DOCSTART-":
            if len(parts) < 4:
                raise InputError(f"{path}: {line!r} has {len(parts)} columns; CoNLL-2003 has word, POS, chunk, entity")
            lines.append(parts)
        elif lines:
            words, pos, _, entities = (list(column) for column in zip(*(parts[:4] for parts in lines), strict=True))
            yield {"tokens": words, "pos_tags": pos, "ner_tags": entities}
            lines = []


def _rows(part: Any) -> list[dict[str, Any]]:
    """A split of ``datasets`` with class numbers turned into names."""
    rows = [dict(row) for row in part]
    for column, feature in part.features.items():
        names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
        if names is None:
            continue
        for row in rows:
            value = row[column]
            row[column] = [names[i] for i in value] if isinstance(value, list) else names[value] if value >= 0 else "-"
    return rows


def _examples(task: str, parts: Sequence[list[dict[str, Any]]]) -> tuple[Examples, Examples]:
    """Rows of the training and validation part as examples with the same classes."""
    try:
        if task == "mnli":
            train, validation = (_relations(rows) for rows in parts)
        elif task == "sst2":
            numbers = {"0": 0, "1": 1, **{name: i for i, name in enumerate(_SST2)}}
            train, validation = (
                Examples(task, [r["sentence"] for r in rows], [numbers[r["label"]] for r in rows], _SST2)
                for rows in parts
            )
        else:
            column = "pos_tags" if task == "pos" else "ner_tags"
            classes = tuple(sorted({tag for rows in parts for r in rows for tag in r[column]}))
            number = {tag: i for i, tag in enumerate(classes)}
            train, validation = (
                Examples(task, [r["tokens"] for r in rows], [[number[t] for t in r[column]] for r in rows], classes)
                for rows in parts
            )
    except KeyError as error:
        raise InputError(f"task {task}: the data lack {error}; a row has {', '.join(map(str, parts[0][0]))}") from error
    return train, validation


def _relations(rows: list[dict[str, Any]]) -> Examples:
    """Pairs with an agreed relation; ``-`` marks those without."""
    pairs = [
        ((r["sentence1"], r["sentence2"]) if "sentence1" in r else (r["premise"], r["hypothesis"]), relation)
        for r in rows
        if (relation := r["gold_label"] if "gold_label" in r else r["label"]) in _MNLI
    ]
    return Examples("mnli", [text for text, _ in pairs], [_MNLI.index(r) for _, r in pairs], _MNLI)


def require_transformers() -> Any:
    """The ``transformers`` module; an error that says how to install it if it is missing."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            'gram-fig11 needs Hugging Face transformers; install it with: pip install "gramscope[transformers]"'
        ) from error
    return transformers
