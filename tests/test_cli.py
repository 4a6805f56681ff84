# SPDX-License-Identifier: Apache-2.0
"""The command line: hashing is fixed, ``demo`` finds a planted passage, and every command speaks JSON."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from blockpick import Indexer
from blockpick.backend_api import DeviceInfo
from blockpick.cli import demo, doctor, main
from blockpick.cli.words import Embedding, default_source, hash_ngram, split_words, word_ngrams, word_vector

NUM_FILLER, PLANTED_BLOCK = 640, 3
PLANTED = "The lighthouse keeper repaired the shattered telescope before midnight."
QUESTION = "Who repaired the telescope of the lighthouse?"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m blockpick.cli`` in a process of its own, where no GPU is visible."""
    return subprocess.run(
        [sys.executable, "-m", "blockpick.cli", *arguments], capture_output=True, text=True, timeout=120,
        check=False, env=ENVIRONMENT,
    )  # fmt: skip


def read_json(*arguments: str) -> dict[str, Any]:
    result = run_cli(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of filler words with one passage planted in block ``PLANTED_BLOCK``."""
    words = [f"filler{i % 97} grain{i % 31}".split()[i % 2] for i in range(NUM_FILLER)]
    at = PLANTED_BLOCK * 128 + 40
    words[at : at + 9] = PLANTED.split()
    path = tmp_path_factory.mktemp("demo") / "story.txt"
    path.write_text(" ".join(words), encoding="utf-8")
    return path


# ---- words ----


def test_hashing_is_fixed() -> None:
    signs = [sign for ngram in word_ngrams("blockpick") for sign in hash_ngram(ngram)]
    text = ",".join(map(str, signs)).encode()
    assert hashlib.sha256(text).hexdigest()[:16] == "93ce0222e79c8652"


def test_inflected_words_are_close_and_others_are_not() -> None:
    assert float(word_vector("customise") @ word_vector("customize")) > 0.5
    assert abs(float(word_vector("finally") @ word_vector("module"))) < 0.4


def test_queries_leave_asking_words_out() -> None:
    embedding = Embedding(split_words("a b c d").forms)
    names, queries = embedding.queries(split_words("How is the telescope?").forms, 8)
    assert names == ["telescope"] and tuple(queries.shape) == (1, 128)
    assert embedding.queries(("how", "is"), 8)[0] == ["how", "is"]
    assert embedding.queries(("telescope", "c"), 8)[0] == ["c"], "a word that the text lacks is no query"


@pytest.mark.parametrize("has_topics", [True, False])
def test_default_text_is_found(has_topics: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_topics:
        monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    source = default_source()
    assert ("topics" in source.name) == has_topics
    forms = set(split_words(source.text).forms)
    asked = Embedding(split_words(source.text).forms).queries(split_words(source.question).forms, 8)[0]
    assert len(split_words(source.text)) > 10_000 and set(asked) <= forms


# ---- demo ----


@pytest.mark.parametrize(("arch", "cache_dtype", "page_size"), [("sm90", "nvfp4", "128"), ("gfx942", "bf16", "256")])
def test_demo_picks_the_planted_passage(story: Path, arch: str, cache_dtype: str, page_size: str) -> None:
    found = read_json(
        "demo",
        str(story),
        QUESTION,
        "--arch",
        arch,
        "--cache-dtype",
        cache_dtype,
        "--page-size",
        page_size,
        "--topk",
        "3",
    )
    assert found["run"]["route"] == "interpreter" and found["run"]["arch"] == arch
    assert found["run"]["variants"]["insert"] == [f"insert__{arch}__{cache_dtype}"]
    assert set(found["run"]["variants"]) >= {"insert", "decode_plan", "decode_score", "select_blocks"}
    assert found["oracle"] == {"verdict": "identical", "differences": []}
    best, own = found["picks"][0], found["picks"][-1]
    assert best["block"] == PLANTED_BLOCK and set(best["votes"]) == set(found["queries"])
    assert [best["excerpt"][a:b] for a, b in best["matched"]] == ["lighthouse", "repaired", "telescope"]
    assert own["own"] and own["block"] == NUM_FILLER // 128
    assert found["cache"]["bytes"] == found["cache"]["pages"] * found["cache"]["page_bytes"]


def test_demo_for_people_marks_matches_and_names_the_route(story: Path) -> None:
    result = run_cli("demo", str(story), QUESTION, "--max-words", "512")
    assert result.returncode == 0, result.stderr
    assert "*lighthouse*" in result.stdout and "oracle: identical" in result.stdout
    assert "interpreted, no performance figure" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_demo_without_kernels_says_that_the_reference_ran(
    story: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "installed_packages", dict)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["demo", str(story), QUESTION, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["route"] == "reference" and "torch reference only" in found["run"]["why"]
    assert found["oracle"]["verdict"] == "not compared" and found["picks"][0]["block"] == PLANTED_BLOCK


def test_differing_picks_are_a_tie_only_when_their_scores_are() -> None:
    def outcome(ids: list[int], scores: list[float]) -> demo.Outcome:
        return demo.Outcome(torch.tensor([ids]), torch.tensor([scores]), cast(Indexer, None))

    oracle = outcome([2, 0], [5.0, 5.0, 9.0, 1.0])
    assert demo.compare(oracle, oracle) == ("identical", [])
    assert demo.compare(outcome([2, 1], []), oracle)[0] == "ties"
    verdict, rows = demo.compare(outcome([2, 3], []), oracle)
    assert verdict == "differs" and rows == [{"query": 0, "picked": [2, 3], "oracle": [2, 0], "tie": False}]
    assert demo.compare(outcome([2, -1], []), oracle)[0] == "differs"


# ---- doctor, variants ----


def test_doctor_without_a_gpu() -> None:
    found = read_json("doctor")
    archs = {package["arch"] for package in found["packages"]}
    assert found["gpu_present"] is False and found["problems"] == [] and "No GPU" in found["verdict"]
    assert {"blockpick", "python", "torch", "devices", "backends"} <= set(found)
    assert len(found["m3"]) == len(archs) * 18 and {row["arch"] for row in found["m3"]} == archs
    for row in found["m3"]:
        assert row["served"] and row["order"] == "local_last"
        roles = [kernel["role"] for kernel in row["kernels"]]
        assert roles == ["insert", "decode_plan", "decode_score", "select_blocks", "merge_splits"]
        score = row["kernels"][2]
        assert score["route"] == "aot" and all(other["reason"] for other in score["rejected"])


def test_doctor_shows_what_ranks_store_of_the_index_cache() -> None:
    """Without a request nothing is shared; with one, the bytes of a token on each rank and the reason."""
    found = {(row["asked"], row["tp_size"], row["page_size"]): row for row in read_json("doctor")["shared_cache"]}
    assert len(found) == 2 * 3 * 2
    for page_size in (128, 256):
        whole = found["indexer_decode_cp", 4, page_size]
        assert whole["parallel"] == "context" and whole["bytes_per_token"] == {"bf16": 256, "e4m3fn": 128, "nvfp4": 72}
        for tp_size in (2, 4, 8):
            row = found["indexer_cache_sharding", tp_size, page_size]
            assert row["parallel"] == "sharded" and row["reason"] == "asked for"
            assert row["rows_of_a_page"] == page_size // tp_size
            assert row["bytes_per_token"]["nvfp4"] == {2: 36, 4: 18, 8: 9}[tp_size]


@pytest.mark.parametrize(
    ("arch", "torch_works", "reason"),
    [
        ("sm90", True, None),
        ("sm90", False, "can't use it. Install a torch build for cuda"),
        ("sm42", True, "no kernel package"),
    ],
)
def test_doctor_says_why_a_present_gpu_is_not_served(
    arch: str,
    torch_works: bool,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    device = DeviceInfo("cuda", 0, arch, "Pretended GPU", 132, 1 << 37, "none")
    monkeypatch.setattr(doctor, "find_devices", lambda: ([device], []))
    monkeypatch.setattr("torch.cuda.is_available", lambda: torch_works)
    monkeypatch.setattr(doctor, "torch_vendor", lambda: "cuda")
    assert main(["doctor", "--json"]) == (1 if reason else 0)
    found = json.loads(capsys.readouterr().out)
    assert found["gpu_present"] and {row["arch"] for row in found["m3"]} == ({arch} - {"sm42"})
    assert found["problems"] == [] if reason is None else reason in found["problems"][0]


def test_variants_filter_and_describe() -> None:
    everything = read_json("variants")
    scores = read_json("variants", "decode_score__*", "sm90")
    assert everything["installed"] == everything["shown"] == len(everything["variants"])
    assert 0 < scores["shown"] < everything["shown"] and scores["installed"] == everything["installed"]
    for variant in scores["variants"]:
        assert variant["arch"] == "sm90" and variant["role"] == "decode_score"
        assert variant["registers"] > 0 and variant["binary_bytes"] > 0 and variant["matrix_instructions"]


def test_variants_without_a_match_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["variants", "no-such-kernel"]) == 1
    assert "0 of" in capsys.readouterr().out


# ---- refusals ----


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["demo", "/no/such/file", "what"], "argument FILE: cannot read /no/such/file"),
        (["demo", __file__], "argument QUESTION: needed with FILE"),
        (["demo", __file__, "?!"], "argument QUESTION: must have 1..128 words, has 0"),
        (["demo", "--topk", "1"], "argument --topk: must be 2..64, is '1'"),
        (["demo", "--max-words", "many"], "argument --max-words: must be 1.."),
        (["demo", "--cache-dtype", "fp8"], "argument --cache-dtype: invalid choice"),
        (["doctor", "--query-len", "9"], "argument --query-len: invalid choice"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_arguments_exit_2_with_a_reason(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert reason in capsys.readouterr().err


def test_file_that_is_not_utf8_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(SystemExit) as error:
        main(["demo", str(path), "what"])
    assert error.value.code == 2 and "is not UTF-8 text" in capsys.readouterr().err


def test_unknown_arch_is_refused(story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", str(story), QUESTION, "--arch", "sm42"]) == 2
    assert "no kernels for architecture sm42. Installed:" in capsys.readouterr().err


def test_importing_blockpick_imports_neither_rich_nor_triton_nor_the_cli() -> None:
    code = "import sys, blockpick; print([m for m in ('rich', 'triton', 'blockpick.cli') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=ENVIRONMENT
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize("has_binaries,route", [(True, "aot"), (False, "jit")])
def test_demo_takes_the_gpu_whether_its_package_was_compiled_or_only_rendered(monkeypatch, has_binaries, route):
    """On a GPU the demo runs release binaries, or compiles the rendered sources of a fresh checkout."""
    import dataclasses

    import torch

    from blockpick.backend_api import DeviceInfo
    from blockpick.cli import demo
    from blockpick.manifest import installed_packages

    package = installed_packages()["sm90"]
    if not has_binaries:
        rendered = tuple(dataclasses.replace(v, record={**v.record, "file": None}) for v in package.variants)
        package = dataclasses.replace(package, variants=rendered)
    monkeypatch.setattr("blockpick.dispatch.installed_packages", lambda: {"sm90": package})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(demo, "describe", lambda device: DeviceInfo("cuda", 0, "sm90", "a GPU", 1, 1, "none"))
    runner = demo.choose_runner("auto", None)
    assert (runner.backend, runner.device) == (route, "cuda")
