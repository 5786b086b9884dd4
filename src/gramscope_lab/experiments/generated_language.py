"""A small generated language: sentences whose parts of speech, entities, polarity and entailments are known.

Content words are made of syllables; plural, tense and adverb endings are pieces of their own, so that words have several
sub-words. Some stems are noun and verb, and some names are of people and of towns: only the context tells. The words of a
sentence share a polarity, as those of a review do. Everything is drawn from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

POS = ("DET", "ADJ", "NOUN", "VERB", "ADV", "ADP", "CONJ", "PROPN", "PART", "PUNCT")
ENTITIES = ("O", "B-PER", "I-PER", "B-LOC", "B-ORG", "I-ORG")
POLARITIES = ("negative", "positive")
RELATIONS = ("entailment", "neutral", "contradiction")
ENDINGS = ("s", "ed", "ly")
_FUNCTION = ("the", "a", "some", "in", "near", "with", "for", "and", "but", "not", "very", "inc", ".")


@dataclass(frozen=True)
class Sentence:
    """Words with their part of speech and entity tag, and the polarity of the whole."""

    words: tuple[str, ...]
    pos: tuple[str, ...]
    entities: tuple[str, ...]
    polarity: str

    @property
    def text(self) -> str:
        """The words with spaces between."""
        return " ".join(self.words)


_Tagged = tuple[str, str, str]  #: word, part of speech, entity


@dataclass
class Language:
    """Words and a grammar; :meth:`sentence` and :meth:`pair` draw from it.

    >>> Language(0).sentence(random.Random(1)).pos[-1]
    'PUNCT'
    """

    seed: int = 0
    _made: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        new = self._maker(draw)
        both = [new() for _ in range(20)]
        self.nouns = [new() for _ in range(60)] + both
        self.adjectives = {p: [new() for _ in range(20)] for p in POLARITIES}
        self.neutral_adjectives = [new() for _ in range(10)]
        self.verbs = {p: [new() for _ in range(12)] for p in POLARITIES}
        self.neutral_verbs = [new() for _ in range(4)] + both
        shared = [new() for _ in range(20)]
        self.first_names = [new() for _ in range(30)]
        self.surnames = [new() for _ in range(30)] + shared
        self.towns = [new() for _ in range(30)] + shared

    def _maker(self, draw: random.Random) -> Callable[[], str]:
        def new() -> str:
            while True:
                word = "".join(draw.choice("bdfgklmnprtvz") + draw.choice("aeiou") for _ in range(draw.choice((2, 3))))
                if word not in self._made and word not in _FUNCTION:
                    self._made.add(word)
                    return word

        return new

    @property
    def pieces(self) -> list[str]:
        """The vocabulary of a word-piece tokenizer: all stems, function words, and the endings as continuations."""
        return [*sorted(self._made), *_FUNCTION, *(f"##{ending}" for ending in ENDINGS)]

    # -- drawing --------------------------------------------------------------------------------------------------
    def sentence(self, draw: random.Random) -> Sentence:
        """A sentence of one or two clauses."""
        polarity = draw.choice(POLARITIES)
        tagged = self._clause(draw, polarity)
        if draw.random() < 0.25:
            tagged += [(draw.choice(("and", "but")), "CONJ", "O"), *self._clause(draw, polarity)]
        return _sentence(tagged, polarity)

    def pair(self, draw: random.Random) -> tuple[Sentence, Sentence, str]:
        """Premise, hypothesis and their relation: part of the premise, its denial, or a statement about something else."""
        polarity, relation = draw.choice(POLARITIES), draw.choice(RELATIONS)
        subject, verb, thing = self._person(draw), self._verb(draw, polarity), draw.choice(self.nouns)
        premise = [*subject, verb, ("the", "DET", "O"), *self._adjective(draw, polarity), (thing, "NOUN", "O")]
        if draw.random() < 0.7:
            premise += self._place(draw)
        denied: list[_Tagged] = [("not", "PART", "O")] if relation == "contradiction" else []
        if relation == "neutral":
            thing = draw.choice([noun for noun in self.nouns if noun != thing])
        hypothesis = [*subject, *denied, verb, ("the", "DET", "O"), (thing, "NOUN", "O")]
        return _sentence(premise, polarity), _sentence(hypothesis, polarity), relation

    def _clause(self, draw: random.Random, polarity: str) -> list[_Tagged]:
        tagged = [*self._noun_phrase(draw, polarity), self._verb(draw, polarity), *self._noun_phrase(draw, polarity)]
        if draw.random() < 0.5:
            tagged += self._place(draw)
        elif draw.random() < 0.4:
            tagged += [(draw.choice(("with", "for")), "ADP", "O"), *self._noun_phrase(draw, polarity)]
        if draw.random() < 0.4:
            tagged.append((draw.choice(self.adjectives[polarity]) + "ly", "ADV", "O"))
        return tagged

    def _noun_phrase(self, draw: random.Random, polarity: str) -> list[_Tagged]:
        kind = draw.random()
        if kind < 0.3:
            return self._person(draw)
        if kind < 0.4:
            return [(draw.choice(self.surnames + self.towns), "PROPN", "B-ORG"), ("inc", "PROPN", "I-ORG")]
        noun = draw.choice(self.nouns)
        if draw.random() < 0.5:
            return [(draw.choice(("the", "a")), "DET", "O"), *self._adjective(draw, polarity), (noun, "NOUN", "O")]
        head = [(draw.choice(("the", "some")), "DET", "O")] if draw.random() < 0.6 else []
        return [*head, *self._adjective(draw, polarity), (noun + "s", "NOUN", "O")]

    def _person(self, draw: random.Random) -> list[_Tagged]:
        if draw.random() < 0.5:
            return [(draw.choice(self.surnames), "PROPN", "B-PER")]
        return [(draw.choice(self.first_names), "PROPN", "B-PER"), (draw.choice(self.surnames), "PROPN", "I-PER")]

    def _place(self, draw: random.Random) -> list[_Tagged]:
        return [(draw.choice(("in", "near")), "ADP", "O"), (draw.choice(self.towns), "PROPN", "B-LOC")]

    def _adjective(self, draw: random.Random, polarity: str) -> list[_Tagged]:
        if draw.random() < 0.3:
            return []
        coloured = draw.random() < 0.7
        word = draw.choice(self.adjectives[polarity] if coloured else self.neutral_adjectives)
        very: list[_Tagged] = [("very", "ADV", "O")] if draw.random() < 0.2 else []
        return [*very, (word, "ADJ", "O")]

    def _verb(self, draw: random.Random, polarity: str) -> _Tagged:
        word = draw.choice(self.verbs[polarity] if draw.random() < 0.6 else self.neutral_verbs)
        return word + draw.choice(("s", "ed")), "VERB", "O"


def _sentence(tagged: list[_Tagged], polarity: str) -> Sentence:
    words, pos, entities = zip(*tagged, (".", "PUNCT", "O"), strict=True)
    return Sentence(words, pos, entities, polarity)
