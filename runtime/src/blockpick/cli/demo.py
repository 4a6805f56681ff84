# SPDX-License-Identifier: Apache-2.0
"""Pick the blocks of a real text that answer a question, compare with the oracle, and show the passages.

Every word is a token of a paged index cache; its key is made of hashed character n-grams, without a model. The
question's heaviest words are the queries of one decode step. Runs on the GPU, else the generated kernels in the Triton
interpreter.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..backend_api import SourceInterpreter
from ..config import BACKENDS, MAX_BLOCKS, MAX_QUERY_LEN, MAX_TOPK
from ..device import describe, installed_backends
from ..dispatch import find_package, pick_route
from ..errors import UnsupportedArchError
from ..indexer import Indexer
from ..layout import BLOCK_TOKENS, CACHE_DTYPES, HEAD_DIM, PAGE_SIZES, CacheLayout
from ..manifest import installed_packages
from ..ops.insert import insert, select_insert
from .demo_report import report
from .output import NO_KERNELS, open_console, write_json
from .words import SCORE_UNIT, Embedding, Source, Words, default_source, similar, split_words

INTERPRETED_WORDS = 12288  # 96 blocks: about ten seconds on one core
PREFERRED_ARCH = "sm90"  # whose sources to interpret when several are installed
EXCERPT_WORDS, EXCERPT_AFTER = 30, 10  # words in all, and after the best token: its key holds the words before it
RULER, SPACES = re.compile(r"([^\w\s])\1{3,}"), re.compile(r"\s+")
TIE = 1e-5  # relative difference of two scores that fp32 accumulation may order either way


@dataclass(frozen=True)
class Runner:
    """What runs the kernels here, and why."""

    backend: str
    device: str
    arch: str | None
    why: str


@dataclass(frozen=True)
class Request:
    """The one request of the demo: the text in whole blocks, then the question in a block of its own."""

    words: Words
    num_tokens: int
    keys: torch.Tensor
    query_words: list[str]
    queries: torch.Tensor


@dataclass(frozen=True)
class Outcome:
    """Ids [L, topk] and scores [L, blocks] of one decode on the CPU, and what computed them."""

    ids: torch.Tensor
    scores: torch.Tensor
    indexer: Indexer


@dataclass(frozen=True)
class Passage:
    """One picked block: who picked it, its best score, and the words around its best token."""

    block: int
    own: bool
    score: float
    votes: tuple[str, ...]
    excerpt: str
    matched: tuple[tuple[int, int], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``blockpick demo``."""
    parser.add_argument(
        "file", nargs="?", type=read_source, metavar="FILE", help="a UTF-8 text (default: one of Python's)"
    )
    parser.add_argument("question", nargs="?", metavar="QUESTION", help="a question to the text; needed with FILE")
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, default="nvfp4", help="default nvfp4")
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=128, help="tokens of a page, default 128")
    parser.add_argument(
        "--topk", type=between(2, MAX_TOPK), default=5, help="blocks a query picks, its own block included; default 5"
    )
    parser.add_argument(
        "--max-words", type=between(1, (MAX_BLOCKS - 1) * BLOCK_TOKENS), metavar="N",
        help=f"words of the text to take (default: all on a GPU, else {INTERPRETED_WORDS})",
    )  # fmt: skip
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="default: the best of this machine")
    parser.add_argument("--arch", help=f"whose sources to interpret (default {PREFERRED_ARCH} where installed)")


def between(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: an integer from ``low`` to ``high``."""

    def parse(text: str) -> int:
        if not text.lstrip("-").isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be {low}..{high}, is {text!r}")
        return int(text)

    return parse


def read_source(path: str) -> Source:
    """An argparse type: a UTF-8 file with at least one word."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not split_words(text).forms:
        raise argparse.ArgumentTypeError(f"{path} holds no words")
    return Source(path, text, "")


def run(args: argparse.Namespace) -> int:
    """Pick, compare, show; 1 when the picks differ from the oracle's."""
    source = args.file or default_source()
    question = source.question if args.question is None else args.question
    if args.file is not None and args.question is None:
        raise argparse.ArgumentError(None, "argument QUESTION: needed with FILE")
    asked = split_words(question).forms
    if not 1 <= len(asked) <= BLOCK_TOKENS:
        raise argparse.ArgumentError(None, f"argument QUESTION: must have 1..{BLOCK_TOKENS} words, has {len(asked)}")
    runner = choose_runner(args.backend, args.arch)
    words = split_words(source.text)
    default_words = (MAX_BLOCKS - 1) * BLOCK_TOKENS if runner.device == "cuda" else INTERPRETED_WORDS
    request = make_request(words, asked, min(len(words), args.max_words or default_words))
    layout = CacheLayout(args.cache_dtype, args.page_size)
    with Console(stderr=True).status(f"{request.num_tokens} tokens, {runner.why}", spinner="dots"):
        indexer = make_indexer(request, layout, args.topk, runner.device, runner.backend, runner.arch)
        began = time.perf_counter()
        cache, table = fill_cache(request, layout, runner)
        filled = time.perf_counter()
        outcome = decode(request, indexer, cache, table)
        seconds = {"insert": round(filled - began, 3), "decode": round(time.perf_counter() - filled, 3)}
        verdict, differences = check(request, layout, cache, table, outcome)
    passages = collect_passages(request, outcome, args.topk)
    facts = {
        "text": {"name": source.name, "words": len(request.words), "words_in_file": len(words)},
        "question": question,
        "queries": request.query_words,
        "cache": describe_cache(layout, cache, request.num_tokens),
        "run": describe_run(layout, runner, outcome.indexer, seconds),
        "picks": [vars(passage) for passage in passages],
        "oracle": {"verdict": verdict, "differences": differences},
    }
    if args.json:
        write_json(facts)
    else:
        report(open_console(), facts)
    return 1 if verdict == "differs" else 0


# ---- what runs ----


def choose_runner(backend: str, arch: str | None) -> Runner:
    """The asked backend, or the best of this machine: its GPU, else interpreted sources, else the reference."""
    packages = installed_packages()
    if arch is not None:
        find_package(arch)
    interpreted = arch or (PREFERRED_ARCH if PREFERRED_ARCH in packages else next(iter(sorted(packages)), None))
    has_gpu = torch.cuda.is_available()
    if backend in ("aot", "jit"):
        return Runner(backend, "cuda" if has_gpu else "cpu", None, "asked for")
    if backend == "interpreter":
        if interpreted is None:
            raise UnsupportedArchError(f"demo: nothing to interpret. {NO_KERNELS}")
        return Runner(backend, "cpu", interpreted, "asked for")
    if backend == "reference":
        return Runner(backend, "cpu", None, "asked for")
    reason = "no GPU here"
    if has_gpu and arch is None:
        try:
            info = describe(torch.device("cuda", torch.cuda.current_device()))
            route, why = pick_route(info, allow_jit=True)  # a rendered checkout has no binaries yet
            return Runner(route, "cuda", None, f"GPU {info.name}: {why}")
        except UnsupportedArchError as error:
            reason = f"the GPU is not served ({error})"
    elif has_gpu:
        reason = "--arch asks for its sources"
    if interpreted is None:
        return Runner(
            "reference", "cpu", None, f"{reason}, and no kernels to interpret: torch reference only. {NO_KERNELS}"
        )
    has_interpreter = any(isinstance(loaded, SourceInterpreter) for loaded in installed_backends().values())
    if not has_interpreter or importlib.util.find_spec("triton") is None:
        missing = "triton" if has_interpreter else "blockpick-triton"
        return Runner(
            "reference", "cpu", None, f"{reason}, and {missing} is not installed: torch reference only, no kernel"
        )
    return Runner(
        "interpreter", "cpu", interpreted, f"{reason}, so the sources of {interpreted} run in the Triton interpreter"
    )


def make_request(words: Words, asked: tuple[str, ...], count: int) -> Request:
    """``count`` words of the text, zero keys up to a whole block, then the question; and its queries."""
    taken = Words(words.text, words.spans[:count], words.forms[:count])
    embedding = Embedding(taken.forms)
    padding = torch.zeros(-count % BLOCK_TOKENS, HEAD_DIM)
    keys = torch.cat([embedding.keys(taken.forms), padding, embedding.keys(asked)])
    query_words, queries = embedding.queries(asked, min(MAX_QUERY_LEN, len(asked)))
    return Request(taken, len(keys), keys, query_words, queries)


def fill_cache(request: Request, layout: CacheLayout, runner: Runner) -> tuple[torch.Tensor, torch.Tensor]:
    """The filled cache and its block table; pages lie backwards, so that the table is really used."""
    num_pages = -(-request.num_tokens // layout.page_size)
    table = torch.arange(num_pages - 1, -1, -1, dtype=torch.int32, device=runner.device)
    tokens = torch.arange(request.num_tokens, device=runner.device)
    slots = table.long()[tokens // layout.page_size] * layout.page_size + tokens % layout.page_size
    cache = layout.empty(num_pages, device=runner.device)
    keys = request.keys.to(runner.device, torch.bfloat16)
    insert(layout, cache, keys, slots, backend=runner.backend, arch=runner.arch)
    return cache, table[None]


def make_indexer(
    request: Request, layout: CacheLayout, topk: int, device: torch.device | str, backend: str, arch: str | None = None,
    rounding: str | None = None,
) -> Indexer:  # fmt: skip
    """An indexer for one request and its queries."""
    return Indexer(
        layout, topk=topk, local_blocks=1, max_requests=1, max_query_len=len(request.queries),
        max_seq_len=request.num_tokens, nvfp4_rounding=rounding, device=device, backend=backend, arch=arch,
    )  # fmt: skip


def decode(request: Request, indexer: Indexer, cache: torch.Tensor, table: torch.Tensor) -> Outcome:
    """One decode step: the queries are the last tokens of the request and see the whole text."""
    length, topk, layout = len(request.queries), indexer.config.topk, indexer.config.layout
    lens = torch.tensor([request.num_tokens], dtype=torch.int32, device=cache.device)
    plan = indexer.plan_decode(table, lens, query_len=length)
    q = request.queries.to(cache.device, layout.query_dtype)[:, None]
    out = torch.full((length, 1, topk), -1, dtype=torch.int32, device=cache.device)
    indexer.decode(plan, q, cache, out)
    return Outcome(out[:, 0].cpu(), indexer.scores(plan)[0, :, 0].cpu(), indexer)


# ---- what came out ----


def check(
    request: Request, layout: CacheLayout, cache: torch.Tensor, table: torch.Tensor, outcome: Outcome
) -> tuple[str, list[dict[str, Any]]]:
    """The verdict of the oracle on the same cache, and the rows that differ."""
    if outcome.indexer.route == "reference":
        return "not compared", []
    topk = outcome.indexer.config.topk
    rounding = outcome.indexer.nvfp4_rounding if layout.dtype == "nvfp4" else None  # the oracle must share it
    oracle = make_indexer(request, layout, topk, cache.device, "reference", rounding=rounding)
    return compare(outcome, decode(request, oracle, cache, table))


def compare(outcome: Outcome, oracle: Outcome) -> tuple[str, list[dict[str, Any]]]:
    """``identical``, ``ties`` (scores equal in fp32) or ``differs``, and the rows whose ids differ."""
    differences, worst = [], "identical"
    for row, (got, wanted) in enumerate(zip(outcome.ids, oracle.ids, strict=True)):
        if got.equal(wanted):
            continue
        at = [oracle.scores[row][ids.long().clamp(min=0)] for ids in (got, wanted)]
        tie = bool(((got < 0) == (wanted < 0)).all()) and torch.allclose(at[0], at[1], rtol=TIE, atol=TIE * SCORE_UNIT)
        worst = "ties" if tie and worst != "differs" else "differs"
        differences.append({"query": row, "picked": got.tolist(), "oracle": wanted.tolist(), "tie": tie})
    return worst, differences


def collect_passages(request: Request, outcome: Outcome, topk: int) -> list[Passage]:
    """The ``topk`` most picked blocks: the own block last, the others by votes, then by best score."""
    own = (request.num_tokens - 1) // BLOCK_TOKENS
    voters: dict[int, list[int]] = {}
    for row, ids in enumerate(outcome.ids.tolist()):
        for block in ids:
            if block >= 0:
                voters.setdefault(block, []).append(row)
    best = {block: float(outcome.scores[rows, block].max()) for block, rows in voters.items()}
    ranked = sorted(voters, key=lambda block: (block == own, -len(voters[block]), -best[block], block))
    shown = [block for block in ranked if block != own][: topk - 1] + [block for block in ranked if block == own]
    return [_passage(request, block, voters[block], best[block] / SCORE_UNIT, block == own) for block in shown]


def _passage(request: Request, block: int, rows: list[int], score: float, own: bool) -> Passage:
    votes = tuple(request.query_words[row] for row in rows)
    if own:
        return Passage(block, True, score, votes, "the question's own block", ())
    first = block * BLOCK_TOKENS
    end = min(first + BLOCK_TOKENS, len(request.words))
    dots = request.queries[rows] @ request.keys[first:end].T
    best = first + int(dots.amax(0).argmax())
    stop = min(max(best + EXCERPT_AFTER + 1, first + EXCERPT_WORDS), end)
    excerpt, matched = cut_excerpt(request, range(max(first, stop - EXCERPT_WORDS), stop))
    return Passage(block, False, score, votes, excerpt, matched)


def cut_excerpt(request: Request, chosen: range) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text of some words on one line, without rulers, and where the words that match the queries lie in it."""
    words, excerpt, matched = request.words, "", []
    for index in chosen:
        start, stop = words.spans[index]
        if excerpt:
            excerpt += SPACES.sub(" ", RULER.sub("", words.text[words.spans[index - 1][1] : start]))
        if similar(words.forms[index], request.query_words):
            matched.append((len(excerpt), len(excerpt) + stop - start))
        excerpt += words.text[start:stop]
    return excerpt, tuple(matched)


def describe_cache(layout: CacheLayout, cache: torch.Tensor, num_tokens: int) -> dict[str, Any]:
    """Sizes of the cache."""
    return {
        "dtype": layout.dtype, "page_size": layout.page_size, "pages": len(cache), "page_bytes": layout.page_bytes,
        "bytes": len(cache) * layout.page_bytes, "bf16_bytes": len(cache) * layout.page_size * 256,
        "tokens": num_tokens, "blocks": -(-num_tokens // BLOCK_TOKENS),
    }  # fmt: skip


def describe_run(layout: CacheLayout, runner: Runner, indexer: Indexer, seconds: dict[str, float]) -> dict[str, Any]:
    """What ran: route, reason, the variant of every role."""
    variants: dict[str, list[str]] = {}
    arch = indexer.choices[0].variant.arch if indexer.choices else None
    for choice in indexer.choices:
        variants.setdefault(choice.role, []).append(choice.variant.name)
    if arch is not None:
        chosen = select_insert(find_package(arch), layout, indexer.route)
        variants = {"insert": [chosen.variant.name], **variants}
    return {
        "route": indexer.route, "device": runner.device, "arch": arch, "why": runner.why,
        "explain": indexer.explain().partition("\n")[0], "variants": variants, "seconds": seconds,
    }  # fmt: skip
