# SPDX-License-Identifier: Apache-2.0
"""Words of a text as index keys and queries: hashed character n-grams, no model, the same on every machine."""

from __future__ import annotations

import builtins
import functools
import hashlib
import re
from collections import Counter
from dataclasses import dataclass

import torch

from ..layout import HEAD_DIM

WORD = re.compile(r"\w+(?:['’.-]\w+)*")
NGRAM_SIZES = (3, 4, 5)
CONTEXT_WORDS = 16  # a key holds its word and, fading, the words before it
FADE = 0.9
COMMON_SHARE, COMMON_COUNT = 5e-4, 2  # a word with this share of the text, or this often, counts half
QUESTION_SHARE = 0.4  # weight of the question's other words in the query of one word
SIGNIFICANT = 0.1  # a question word becomes a query from this part of the heaviest one's weight
ASKING_WORDS = frozenset(
    WORD.findall(
        "a an and are as at be by can could did do does for from has have how i if in is it me my of on or should that "
        "the their them there they this to was we were what when where which who whose why will with would you your"
    )
)
SIMILAR = 0.5  # cosine of two forms of a word
SCORE_UNIT = float(HEAD_DIM)  # score of two equal directions: both vectors have length sqrt(128), where e4m3 is precise


@dataclass(frozen=True)
class Source:
    """A text, what it is, and a question that fits (empty for a user's file)."""

    name: str
    text: str
    question: str


@dataclass(frozen=True)
class Words:
    """The words of a text: where each begins and ends, and its lower-case form."""

    text: str
    spans: tuple[tuple[int, int], ...]
    forms: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.forms)


def default_source() -> Source:
    """A text that every CPython carries: the language reference of ``pydoc``, else the docstrings of the builtins."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a distribution that splits pydoc off
        texts = [f"{name}\n{text}" for name, text in sorted(_builtin_docstrings().items())]
        question = "Which method returns a string with leading and trailing whitespace removed?"
        return Source("docstrings of Python's builtins", "\n\n".join(texts), question)
    paragraphs = dict.fromkeys(part for name in sorted(topics) for part in topics[name].split("\n\n"))  # topics overlap
    text = "\n\n".join(paragraphs)
    return Source(
        "Python's language reference (pydoc topics)",
        text,
        "What does the finally clause do when a return statement is executed?",
    )


def _builtin_docstrings() -> dict[str, str]:
    found: dict[str, str] = {}  # docstring -> the first name that has it
    for name, value in vars(builtins).items():
        members = vars(value).items() if isinstance(value, type) else ()
        for path, item in [(name, value), *((f"{name}.{key}", member) for key, member in members)]:
            doc = getattr(item, "__doc__", None)
            if isinstance(doc, str) and not path.endswith("__doc__"):
                found.setdefault(doc, path)
    return {path: doc for doc, path in found.items()}


def split_words(text: str) -> Words:
    """All words of ``text``; one word is one token."""
    matches = list(WORD.finditer(text))
    return Words(text, tuple(m.span() for m in matches), tuple(m[0].lower() for m in matches))


@functools.lru_cache(maxsize=1 << 18)
def hash_ngram(ngram: str) -> tuple[int, ...]:
    """The 128 bits of a BLAKE2b digest as signs, +1 for a set bit, lowest bit of the first byte first."""
    digest = int.from_bytes(hashlib.blake2b(ngram.encode(), digest_size=HEAD_DIM // 8).digest(), "little")
    return tuple(1 if digest >> bit & 1 else -1 for bit in range(HEAD_DIM))


def word_ngrams(form: str) -> list[str]:
    """The character n-grams of ``<form>``, and ``<form>`` itself."""
    marked = f"<{form}>"
    return [marked] + [marked[i : i + size] for size in NGRAM_SIZES for i in range(len(marked) - size + 1)]


@functools.lru_cache(maxsize=1 << 16)
def word_vector(form: str) -> torch.Tensor:
    """Sum of the signs of a word's n-grams, scaled to length 1: float32 [128], CPU."""
    total = torch.tensor([hash_ngram(ngram) for ngram in word_ngrams(form)], dtype=torch.float32).sum(0)
    length: torch.Tensor = total.norm().clamp(min=1.0)
    return total / length


class Embedding:
    """Vectors of words, weighted by rarity in one text.

    ``weight(w) = a / (a + share of w in the text)``, where ``a`` is the share that makes a word common.

    Parameters
    ----------
    forms : sequence of str
        The text's words.

    Notes
    -----
    The weight is that of Arora, Liang, Ma: A simple but tough-to-beat baseline for sentence embeddings (ICLR 2017); the
    n-grams follow fastText (Bojanowski et al., 2017).
    """

    def __init__(self, forms: tuple[str, ...]) -> None:
        self._shares = {form: count / len(forms) for form, count in Counter(forms).items()}
        self._common = max(COMMON_SHARE, COMMON_COUNT / len(forms))

    def weight(self, form: str) -> float:
        """How much a word counts, 0..1: the rarer, the more."""
        return self._common / (self._common + self._shares.get(form, 0.0))

    def knows(self, form: str) -> bool:
        """Whether the text holds the word, or a form of it."""
        return form in self._shares or similar(form, list(self._shares))

    def keys(self, forms: tuple[str, ...]) -> torch.Tensor:
        """One key a word: itself and, fading, the words before it. float32 [T, 128] of length sqrt(128), CPU."""
        vocabulary = {form: index for index, form in enumerate(dict.fromkeys(forms))}
        table = torch.stack([self.weight(form) * word_vector(form) for form in vocabulary])
        own = table[torch.tensor([vocabulary[form] for form in forms])]
        keys = own.clone()
        for distance in range(1, min(CONTEXT_WORDS, len(forms))):
            keys[distance:] += FADE**distance * own[:-distance]
        return _scaled(keys)

    def queries(self, forms: tuple[str, ...], most: int) -> tuple[list[str], torch.Tensor]:
        """One query for each of the question's ``most`` heaviest words, in its order: words, float32 [L, 128] on CPU.

        A query is its word plus, weaker, the other words of the question. Left out, unless nothing else is left, are
        English words that only ask, and words that the text doesn't know.
        """
        everything = list(dict.fromkeys(forms))
        meant = [form for form in everything if form not in ASKING_WORDS] or everything
        unique = [form for form in meant if self.knows(form)] or meant
        weights = {form: self.weight(form) for form in unique}
        heaviest = max(weights.values())
        ranked = sorted(unique, key=lambda form: (-weights[form], unique.index(form)))
        chosen = [form for form in ranked[:most] if weights[form] >= SIGNIFICANT * heaviest]
        chosen.sort(key=unique.index)
        vectors = {form: weights[form] * word_vector(form) for form in unique}
        whole = torch.stack(list(vectors.values())).sum(0)
        rows = [QUESTION_SHARE * whole + (1 - QUESTION_SHARE) * vectors[form] for form in chosen]
        return chosen, _scaled(torch.stack(rows))


def _scaled(vectors: torch.Tensor) -> torch.Tensor:
    lengths: torch.Tensor = vectors.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    scale: torch.Tensor = HEAD_DIM**0.5 / lengths
    return vectors * scale


def similar(form: str, others: list[str]) -> bool:
    """Whether a word's vector is close to one of the ``others``': the same word, or a form of it."""
    return bool((torch.stack([word_vector(other) for other in others]) @ word_vector(form) >= SIMILAR).any())
