"""gram-fig11: the generated language, reading and aligning tasks, and the experiment at both scales."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import gramscope as gs
from gramscope.errors import InputError, MissingExtraError
from gramscope_lab.experiments import bert_stages
from gramscope_lab.experiments.bert import (
    layer_features,
    linearity_by_layer,
    load_encoder,
    principal_components,
    small_encoder,
)
from gramscope_lab.experiments.bert_tasks import (
    IGNORED,
    TASKS,
    Examples,
    encode,
    generated,
    generated_tokenizer,
    published,
)
from gramscope_lab.experiments.experiment import Options
from gramscope_lab.experiments.generated_language import ENTITIES, POS, Language
from gramscope_lab.experiments.running import reproduce
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.reporter import Reporter
from lab.training.helpers import StopAfter
from refusals import assert_refused

TINY: dict[str, Any] = {
    "hidden": 8, "layers": 2, "heads": 2, "length": 40, "sentences": 40, "pretrain_epochs": 1, "examples": 40,
    "samples": 30, "epochs": 2,
}  # fmt: skip


# -- the language -------------------------------------------------------------------------------------------------
def test_sentences_are_tagged_word_by_word_and_reproducible() -> None:
    spoken = Language(3)
    sentences = [spoken.sentence(random.Random(i)) for i in range(50)]
    assert sentences == [Language(3).sentence(random.Random(i)) for i in range(50)]
    for sentence in sentences:
        assert len(sentence.words) == len(sentence.pos) == len(sentence.entities)
        assert set(sentence.pos) <= set(POS)
        assert set(sentence.entities) <= set(ENTITIES)
        for before, tag in zip(("O", *sentence.entities), sentence.entities, strict=False):
            assert not tag.startswith("I-") or before[2:] == tag[2:]
    tagged = {pair for s in sentences for pair in zip(s.words, s.entities, strict=True)}
    assert len(tagged) > len({word for word, _ in tagged})  # of some words only the context tells the tag


def test_pairs_deny_or_change_what_the_premise_says() -> None:
    spoken, draw = Language(), random.Random(0)
    for _ in range(50):
        premise, hypothesis, relation = spoken.pair(draw)
        assert ("not" in hypothesis.words) == (relation == "contradiction")
        nouns = [{w for w, tag in zip(s.words, s.pos, strict=True) if tag == "NOUN"} for s in (premise, hypothesis)]
        assert (nouns[0] == nouns[1]) == (relation != "neutral")


# -- encoding -----------------------------------------------------------------------------------------------------
def test_labels_sit_on_first_pieces() -> None:
    spoken = Language()
    tokenizer = generated_tokenizer(spoken)
    noun = spoken.nouns[0]
    examples = Examples("pos", [["the", noun + "s", "."]], [[0, 2, 9]], POS)
    found = encode(tokenizer, examples, 8)
    pieces = tokenizer.convert_ids_to_tokens(found.inputs["input_ids"][0])
    assert pieces == ["[CLS]", "the", noun, "##s", ".", "[SEP]", "[PAD]", "[PAD]"]
    assert found.labels[0].tolist() == [IGNORED, 0, 2, IGNORED, 9, IGNORED, IGNORED, IGNORED]
    for task in TASKS:
        coded = encode(tokenizer, generated(task, spoken, 20, 0), 40)
        assert not (coded.inputs["input_ids"] == tokenizer.unk_token_id).any()
    pair = encode(tokenizer, generated("mnli", spoken, 3, 0), 40)
    assert set(pair.inputs["token_type_ids"].flatten().tolist()) == {0, 1}


def test_features_are_the_cls_state_or_first_pieces() -> None:
    spoken = Language()
    tokenizer = generated_tokenizer(spoken)
    encoder = small_encoder(len(tokenizer), hidden=8, layers=2, heads=2, length=40, seed=0)
    device = torch.device("cpu")
    for task in ("sst2", "ner"):
        data = encode(tokenizer, generated(task, spoken, 9, 1), 40)
        layers, labels = layer_features(encoder, data, device, batch_size=4)
        encoder.eval()
        with torch.no_grad():
            states = encoder(**data.inputs, output_hidden_states=True).hidden_states
        for rows, state in zip(layers, states, strict=True):
            expected = state[:, 0] if task == "sst2" else state[data.labels != IGNORED]
            torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)
        assert labels.tolist() == data.labels[data.labels != IGNORED].tolist()
        values = linearity_by_layer(encoder, data, device, 4)
        reduced = principal_components(layers[1], 4)
        assert values[1] == pytest.approx(float(gs.target_linearity(reduced, labels, intercept=True)), abs=1e-6)


def test_principal_components_keep_the_most_variance() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    singular = torch.linalg.svdvals(x - x.mean(0))
    assert float(principal_components(x, 2).square().sum()) == pytest.approx(float(singular[:2].square().sum()))
    assert principal_components(x, 6) is x


# -- published tasks from files -----------------------------------------------------------------------------------
def write_tasks(folder: Path) -> None:
    spoken = Language()
    draw = random.Random(0)
    for name in ("SST-2", "MNLI", "conll2003"):
        (folder / name).mkdir(parents=True)
    for train, part in ((True, "train.tsv"), (False, "dev.tsv")):
        sentences = [spoken.sentence(draw) for _ in range(30)]
        rows = [f"{s.text}\t{int(s.polarity == 'positive')}" for s in sentences]
        (folder / "SST-2" / part).write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
        pairs = [spoken.pair(draw) for _ in range(30)]
        rows = ['0\t"quoted\tx\t-', *(f"{i}\t{a.text}\t{b.text}\t{r}" for i, (a, b, r) in enumerate(pairs))]
        name = part if train else "dev_matched.tsv"
        (folder / "MNLI" / name).write_text("\n".join(["index\tsentence1\tsentence2\tgold_label", *rows]) + "\n")
        lines = ["-DOCSTART- -X- -X- O", ""]
        for s in sentences:
            lines += [f"{w} {p} X {e}" for w, p, e in zip(s.words, s.pos, s.entities, strict=True)] + [""]
        (folder / "conll2003" / ("train.txt" if train else "valid.txt")).write_text("\n".join(lines))


def test_official_files_are_read(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    for task in TASKS:
        train, validation = published(task, tmp_path)
        assert len(train.texts) == len(train.labels) == 30  # the pair without an agreed relation is left out
        assert train.classes == validation.classes
    words, _ = published("ner", tmp_path)
    assert words.classes == tuple(sorted(words.classes))
    assert all(len(text) == len(tags) for text, tags in zip(words.texts, words.labels, strict=True))


class Split(list[dict[str, Any]]):
    """What ``datasets`` gives for a split: rows, and features that name the class numbers."""

    def __init__(self, rows: list[dict[str, Any]], **names: Any) -> None:
        super().__init__(rows)
        self.features = names


def test_folders_of_datasets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label = SimpleNamespace(names=["negative", "positive"])
    tags = SimpleNamespace(feature=SimpleNamespace(names=["DET", "NOUN"]))
    relation = SimpleNamespace(names=["entailment", "neutral", "contradiction"])
    reviews = Split([{"sentence": "good", "label": 1}, {"sentence": "bad", "label": 0}], sentence="text", label=label)
    texts = SimpleNamespace(feature="text")
    words = Split([{"tokens": ["the", "town"], "pos_tags": [0, 1]}], tokens=texts, pos_tags=tags)
    agreed = {"premise": "a", "hypothesis": "b", "label": 2}
    pairs = Split([agreed, {"premise": "c", "hypothesis": "d", "label": -1}], label=relation)
    stored = {
        str(tmp_path / "sst2"): {"train": reviews, "validation": reviews},
        str(tmp_path / "conll2003"): {"train": words, "validation": words},
        str(tmp_path / "mnli"): {"train": pairs, "validation_matched": pairs},
    }
    for path in stored:
        Path(path).mkdir()
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=stored.__getitem__))
    train, _ = published("sst2", tmp_path)
    assert (train.texts, train.labels, train.classes) == (["good", "bad"], [1, 0], ("negative", "positive"))
    train, _ = published("pos", tmp_path)
    assert (train.texts, train.labels, train.classes) == ([["the", "town"]], [[0, 1]], ("DET", "NOUN"))
    train, _ = published("mnli", tmp_path)
    assert (train.texts, train.labels) == ([("a", "b")], [2])


def test_missing_tasks_and_models_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises((MissingExtraError, InputError), match="SST-2"):
        published("sst2", tmp_path)
    unknown = bert_stages.Settings(data=("nothing",))
    assert_refused("no task nothing; it has: sst2", bert_stages.parts, unknown, Options())
    absent = str(tmp_path / "nowhere")
    assert_refused(r"could not be loaded .* --set model=PATH", load_encoder, absent, trained=True, seed=0)


# -- the experiment -----------------------------------------------------------------------------------------------
def test_the_generated_language_end_to_end(tmp_path: Path) -> None:
    values = {**TINY, "data": ("sst2", "ner")}
    made = reproduce("gram-fig11", Options(device="cpu"), values=values, out=tmp_path / "run")
    records = RunDirectory(made.path).records("stage")
    assert {r["stage"] for r in records} == {"random", "pre-trained", "epoch 1", "epoch 2"}
    assert len(records) == 2 * 4 * 3
    assert all(r["components"] is None for r in records)
    assert made.claims


def test_a_local_bert_on_official_files_and_resuming_it(tmp_path: Path) -> None:
    write_tasks(tmp_path / "data")
    tokenizer = generated_tokenizer(Language())
    encoder = small_encoder(len(tokenizer), hidden=8, layers=2, heads=2, length=40, seed=0)
    for saved in (tokenizer, encoder):
        saved.save_pretrained(tmp_path / "bert")
    values = {"samples": 20, "length": 40, "epochs": 2, "lr": 0.01, "components": 4, "batch_size": 8}
    settings = bert_stages.Settings(data=("mnli",), model=str(tmp_path / "bert"), **values)  # type: ignore[arg-type]
    (part,) = bert_stages.parts(settings, Options(data_dir=str(tmp_path / "data"), device="cpu"))
    found = []
    for name, steps in (("whole", ()), ("resumed", (3, 7))):
        root = RunDirectory.create(tmp_path / name, {"x": 1})
        for step in steps:
            with pytest.raises(KeyboardInterrupt):
                part.run(root, StopAfter(step))
            assert not part.complete(root)
        part.run(root, Reporter())
        assert part.complete(root)
        found.append(root.records("stage") + root.records("fine-tuning"))
    assert found[0] == found[1]
    assert {r["components"] for r in found[0] if "components" in r} == {4}
