"""A small generated language: sentences whose parts of speech, entities, polarity and entailments are known.

Content words are made of two syllables; plural, tense and adverb endings are pieces of their own, so that words have several
sub-words. Some stems are noun and verb, and some names are of people and of towns: only the context tells. The words of a
sentence share a polarity, as those of a review do. Everything is drawn from seeds.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any, TypeAlias

from gramscope_lab.experiments.bert import Examples, require

#: symbol -> its forms, drawn with equal chances: symbols, and classes of words with the entity they are part of
RULES: dict[str, tuple[str, ...]] = {
    "sentence": ("clause stop", "clause stop", "clause stop", "clause conjunction clause stop"),
    "clause": ("phrase verb phrase rest manner",),
    "phrase": (*["person"] * 3, "firm", *["article description noun", "some description plural"] * 3),
    "person": ("surname:B-PER", "first-name:B-PER surname:I-PER"),
    "firm": ("surname:B-ORG inc:I-ORG", "town:B-ORG inc:I-ORG"),
    "place": ("preposition town:B-LOC",),
    "where": ("", "place", "place"),
    "rest": (*[""] * 3, *["place"] * 5, *["with phrase"] * 2),
    "manner": ("", "", "", "adverb", "adverb"),
    "description": ("", "adjective", "adjective", "degree adjective"),
}  # fmt: skip
#: class of words -> part of speech
CLASSES = {
    "article": "DET", "some": "DET", "adjective": "ADJ", "noun": "NOUN", "plural": "NOUN", "verb": "VERB", "adverb": "ADV",
    "degree": "ADV", "preposition": "ADP", "with": "ADP", "conjunction": "CONJ", "first-name": "PROPN", "surname": "PROPN",
    "town": "PROPN", "inc": "PROPN", "stop": "PUNCT",
}  # fmt: skip
#: words that are not made of syllables
FUNCTION_WORDS = {
    "article": ["the", "a"], "some": ["the", "some"], "degree": ["very"], "preposition": ["in", "near"],
    "with": ["with", "for"], "conjunction": ["and", "but"], "inc": ["inc"], "stop": ["."],
}  # fmt: skip
POS = tuple(dict.fromkeys(CLASSES.values()))
ENTITIES = ("O", "B-PER", "I-PER", "B-LOC", "B-ORG", "I-ORG")
POLARITIES = ("negative", "positive")
RELATIONS = ("entailment", "neutral", "contradiction")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

Word: TypeAlias = tuple[str, str, str]  #: the word, its part of speech, its entity


class Language:
    """Words and rules; :meth:`examples` draws from them.

    >>> Language(0).examples("pos", 1, seed=1).texts[0][-1]
    '.'
    """

    def __init__(self, seed: int = 0) -> None:
        made = ["".join(letters) for letters in product("bdfgklmnprtvz", "aeiou", repeat=2)]
        random.Random(seed).shuffle(made)
        stems = iter(made)

        def take(count: int) -> list[str]:
            return [next(stems) for _ in range(count)]

        actions, names, plain = take(8), take(20), take(9)
        nouns = take(60) + actions
        self.words = {**FUNCTION_WORDS, "noun": nouns, "plural": [noun + "s" for noun in nouns]}
        self.words |= {"first-name": take(30), "surname": take(30) + names, "town": take(30) + names}
        for polarity in POLARITIES:
            verbs, adjectives = take(12) + actions, take(20)
            self.words[f"{polarity} verb"] = [verb + ending for verb in verbs for ending in ("s", "ed")]
            self.words[f"{polarity} adjective"] = adjectives + plain
            self.words[f"{polarity} adverb"] = [adjective + "ly" for adjective in adjectives]
        function = sorted({word for words in FUNCTION_WORDS.values() for word in words} | {"not"})
        self.pieces = [*SPECIAL, *made[: len(made) - len(list(stems))], *function, "##s", "##ed", "##ly"]

    def tokenizer(self) -> Any:
        """A word-piece tokenizer of the same kind as BERT's."""
        transformers = require("transformers")
        from tokenizers import Tokenizer, models, pre_tokenizers, processors

        vocabulary = {piece: number for number, piece in enumerate(self.pieces)}
        tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
        )
        names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
        return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)

    def examples(self, task: str, n: int, seed: int) -> Examples:
        """Examples of a task of gram-fig11."""
        draw = random.Random(seed)
        if task == "mnli":
            pairs = [self._pair(draw) for _ in range(n)]
            return Examples([texts for texts, _ in pairs], [relation for _, relation in pairs], RELATIONS)
        polarities = [draw.randrange(len(POLARITIES)) for _ in range(n)]
        sentences = [self._expand("sentence", draw, POLARITIES[polarity]) for polarity in polarities]
        if task == "sst2":
            return Examples([_text(words) for words in sentences], polarities, POLARITIES)
        classes, tag = (POS, 1) if task == "pos" else (ENTITIES, 2)
        labels = [[classes.index(word[tag]) for word in words] for words in sentences]
        return Examples([[word for word, *_ in words] for words in sentences], labels, classes)

    def _expand(self, symbol: str, draw: random.Random, polarity: str) -> list[Word]:
        """A symbol, or a class of words with an entity, as words."""
        if symbol in RULES:
            return [w for part in draw.choice(RULES[symbol]).split() for w in self._expand(part, draw, polarity)]
        name, _, entity = symbol.partition(":")
        words = self.words.get(name) or self.words[f"{polarity} {name}"]
        return [(draw.choice(words), CLASSES[name], entity or "O")]

    def _pair(self, draw: random.Random) -> tuple[tuple[str, str], int]:
        """Premise and hypothesis, and their relation: part of the premise, its denial, or a statement about something else."""
        polarity, relation = draw.choice(POLARITIES), draw.choice(RELATIONS)
        named = ("person", "verb", "description", "noun", "where")
        subject, verb, description, noun, where = (_text(self._expand(name, draw, polarity)) for name in named)
        other = draw.choice([word for word in self.words["noun"] if word != noun])
        denied = "not " if relation == "contradiction" else ""
        premise = f"{subject} {verb} the {description} {noun} {where} ."
        hypothesis = f"{subject} {denied}{verb} the {other if relation == 'neutral' else noun} ."
        return (premise, hypothesis), RELATIONS.index(relation)


def _text(words: list[Word]) -> str:
    return " ".join(word for word, *_ in words)
