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
from gramscope_lab.data.dataset import IGNORED
from gramscope_lab.experiments import bert, gram_bert
from gramscope_lab.experiments.bert import Examples, encode, generated, generated_tokenizer, published
from gramscope_lab.experiments.experiment import Options, reproduce
from gramscope_lab.experiments.generated_language import ENTITIES, POS, Language
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.reporter import Interrupted, Reporter
from lab.training.helpers import StopAfter
from refusals import assert_refused

TINY: dict[str, Any] = {
    "hidden": 8, "layers": 2, "heads": 2, "length": 40, "sentences": 40, "pretrain_epochs": 1, "examples": 40,
    "samples": 30, "epochs": 2,
}  # fmt: skip
SMALL = gram_bert.Settings(model="", length=40, hidden=8, layers=2, heads=2)


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
    x, labels = encode(tokenizer, Examples([["the", noun + "s", "."]], [[0, 2, 9]], POS), 8)
    pieces = tokenizer.convert_ids_to_tokens(x[0, :, 0])
    assert pieces == ["[CLS]", "the", noun, "##s", ".", "[SEP]", "[PAD]", "[PAD]"]
    assert labels[0].tolist() == [IGNORED, 0, 2, IGNORED, 9, IGNORED, IGNORED, IGNORED]
    assert bert.unpacked(x)["attention_mask"].tolist() == [[1] * 6]
    for task in bert.TASKS:
        coded, _ = encode(tokenizer, generated(task, spoken, 20, 0), 40)
        assert not (coded[..., 0] == tokenizer.unk_token_id).any()
    pair, _ = encode(tokenizer, generated("mnli", spoken, 3, 0), 40)
    assert set(pair[..., 2].flatten().tolist()) == {0, 1}


def test_features_are_the_cls_state_or_first_pieces() -> None:
    spoken = Language()
    encoder = gram_bert._random(SMALL, 0)
    for task in ("sst2", "ner"):
        x, labels = encode(generated_tokenizer(spoken), generated(task, spoken, bert.CHUNK + 9, 1), 40)
        layers, rows = bert.layer_features(encoder, x, labels)
        encoder.eval()
        with torch.no_grad():
            states = encoder(
                **dict(zip(bert.INPUTS, x.unbind(-1), strict=True)), output_hidden_states=True
            ).hidden_states
        for found, state in zip(layers, states, strict=True):
            expected = state[:, 0] if task == "sst2" else state[labels != IGNORED]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert rows.tolist() == labels[labels != IGNORED].tolist()
        values = list(bert.linearity_by_layer(encoder, x, labels, 4))
        reduced = bert.principal_components(layers[1], 4)
        assert values[1] == pytest.approx(float(gs.target_linearity(reduced, rows, intercept=True)), abs=1e-6)


def test_the_mean_over_texts_is_that_over_words() -> None:
    spoken = Language()
    x, labels = encode(generated_tokenizer(spoken), generated("pos", spoken, bert.CHUNK + 5, 1), 40)
    net = bert.Classifier(gram_bert._random(SMALL, 0), len(POS), tokens=True).eval()
    with torch.no_grad():
        logits = net(x)
        torch.testing.assert_close(logits[:5, :20], net(x[:5])[:, :20], rtol=1e-4, atol=1e-5)
    known = labels != IGNORED
    expected = torch.nn.functional.cross_entropy(logits[known], labels[known])
    torch.testing.assert_close(bert.classification_loss(logits, labels).mean(), expected)


def test_a_share_of_the_tokens_is_predicted() -> None:
    net = gram_bert._masked(SMALL, 0)
    x, _ = encode(generated_tokenizer(Language()), generated("sst2", Language(), 50, 1), 40)
    torch.manual_seed(0)
    torch.testing.assert_close(
        net(x).mean(), torch.tensor(float(len(generated_tokenizer(Language())))).log(), rtol=0.1, atol=0
    )


def test_principal_components_keep_the_most_variance() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    singular = torch.linalg.svdvals(x - x.mean(0))
    assert float(bert.principal_components(x, 2).square().sum()) == pytest.approx(float(singular[:2].square().sum()))
    assert bert.principal_components(x, 6) is x


# -- published tasks ----------------------------------------------------------------------------------------------
class Split(list[dict[str, Any]]):
    """What ``datasets`` gives for a split: rows, and features that name the class numbers."""

    def __init__(self, rows: list[dict[str, Any]], **features: Any) -> None:
        super().__init__(rows)
        self.features = features


def named(*names: str) -> Any:
    return SimpleNamespace(names=list(names))


def test_folders_of_datasets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reviews = Split(
        [{"sentence": "good", "label": 1}, {"sentence": "bad", "label": 0}], label=named("negative", "positive")
    )
    words = Split(
        [{"tokens": ["the", "town"], "pos_tags": [0, 1]}], pos_tags=SimpleNamespace(feature=named("DET", "NOUN"))
    )
    agreed = {"premise": "a", "hypothesis": "b", "label": 2}
    relation = named("entailment", "neutral", "contradiction")
    pairs = Split([agreed, {"premise": "c", "hypothesis": "d", "label": -1}], label=relation)
    stored = {
        str(tmp_path / "sst2"): {"train": reviews, "validation": reviews},
        str(tmp_path / "conll2003"): {"train": words, "validation": words},
        str(tmp_path / "mnli"): {"train": pairs, "validation_matched": pairs},
    }
    for path in stored:
        Path(path).mkdir()
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=stored.__getitem__))
    assert published("sst2", tmp_path)[0] == Examples(["good", "bad"], [1, 0], ("negative", "positive"))
    assert published("pos", tmp_path)[0] == Examples([["the", "town"]], [[0, 1]], ("DET", "NOUN"))
    assert published("mnli", tmp_path)[1] == Examples([("a", "b")], [2], tuple(relation.names))
    assert_refused("needs columns tokens, ner_tags", published, "ner", tmp_path)


def test_missing_tasks_and_models_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*names: str) -> None:
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    assert_refused("task sst2 is not in .*sst2.*no network", published, "sst2", tmp_path)
    unknown = gram_bert.Settings(data=("nothing",))
    assert_refused("no task nothing; it has: sst2", gram_bert.parts, unknown, Options())
    assert_refused(r"could not be loaded .* --set model=PATH", bert.load_pretrained, str(tmp_path / "x"), "AutoModel")


# -- the experiment -----------------------------------------------------------------------------------------------
def test_the_generated_language_end_to_end(tmp_path: Path) -> None:
    values = {**TINY, "data": ("sst2", "ner")}
    made = reproduce("gram-fig11", Options(device="cpu"), values=values, out=tmp_path / "run")
    records = RunDirectory(made.path).records("measurement")
    assert {r["stage"] for r in records} == {"random", "pre-trained", "epoch 1", "epoch 2"}
    assert len(records) == 2 * 4 * 3
    assert all(r["components"] is None for r in records)
    assert all(
        0 <= r["test_accuracy"] <= 1 for r in RunDirectory(made.path).records("evaluation") if "test_accuracy" in r
    )
    assert made.claims


def test_a_local_bert_on_published_sets_and_resuming_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for saved in (generated_tokenizer(Language()), gram_bert._random(SMALL, 0)):
        saved.save_pretrained(tmp_path / "bert")
    monkeypatch.setattr(bert, "published", lambda task, _: [generated(task, Language(), 30, seed) for seed in (0, 1)])
    values = {"samples": 20, "length": 40, "epochs": 2, "lr": 0.01, "components": 4, "batch_size": 8}
    settings = gram_bert.Settings(data=("mnli",), model=str(tmp_path / "bert"), **values)  # type: ignore[arg-type]
    (part,) = gram_bert.parts(settings, Options(device="cpu"))
    found = []
    for name, steps in (("whole", ()), ("resumed", (3, 7))):
        root = RunDirectory.create(tmp_path / name, {"x": 1})
        for step in steps:
            with pytest.raises((KeyboardInterrupt, Interrupted)):
                part.run(root, StopAfter(step))
            assert not part.complete(root)
        part.run(root, Reporter())
        assert part.complete(root)
        found.append([{k: v for k, v in r.items() if k != "seconds"} for r in root.records()])
    assert found[0] == found[1]
    assert {r["components"] for r in found[0] if "components" in r} == {4}
