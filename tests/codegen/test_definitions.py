# SPDX-License-Identifier: Apache-2.0
"""Targets, ops and variants: names, exclusions, filters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from blockpick_codegen.axes import DefinitionError, Op, Target, Variant
from blockpick_codegen.expand import load_matrix

MATRIX = load_matrix()
TARGETS = ("gfx942", "gfx950", "sm100", "sm103", "sm107", "sm90")


def test_every_target_of_the_project_is_there():
    assert tuple(MATRIX.targets) == TARGETS


@pytest.mark.parametrize("variant", MATRIX.variants, ids=str)
def test_parse_is_the_inverse_of_format(variant):
    assert Variant.parse(str(variant), MATRIX.ops) == variant


def test_names_are_unique_and_sorted():
    names = [str(variant) for variant in MATRIX.variants]
    assert names == sorted(set(names))


@pytest.mark.parametrize(
    "text", ["decode_score__sm90__bf16_exact_r128_c16", "decode_score__sm80__bf16_r128_c16", "nothing__sm90", ""]
)
def test_parse_refuses_what_is_not_built(text):
    with pytest.raises(DefinitionError, match=r"no op|no target|no such combination"):
        Variant.parse(text, MATRIX.ops)


def test_every_exclusion_excludes_something_and_says_why():
    for op in MATRIX.ops.values():
        for exclusion in op.exclusions:
            assert exclusion.reason
            for target in op.targets:
                kept = op.combinations(target)
                assert not any(exclusion.matches({"target": target, **chosen}) for chosen in kept)


@pytest.mark.parametrize("role", ["decode_plan", "decode_score", "select_blocks", "merge_splits", "insert"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_an_interpretable_variant_of_every_role(role, target):
    assert any(op.role == role and op.language == "triton" and target in op.targets for op in MATRIX.ops.values())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "cache,rounding", [("bf16", "none"), ("e4m3fn", "none"), ("nvfp4", "exact"), ("nvfp4", "e4m3")]
)
def test_every_cache_has_a_scorer_for_32_columns(target, cache, rounding):
    """4 heads x 8 queries: heads 1, 2, 4 and query lengths 1..8 are all served."""
    chosen = [dict(v.axes) for v in MATRIX.variants if MATRIX.ops[v.op].role == "decode_score" and v.target == target]
    assert any(a["cache"] == cache and a["rounding"] == rounding and a["columns"] >= 32 for a in chosen)


def test_argument_limit_and_role_interface():
    """Kernels stay below 25 arguments, and ops of one role take the same arguments: dispatch may exchange them."""
    interfaces = {}
    for op in MATRIX.ops.values():
        assert len(op.args) <= 25, op.name
        names = [(arg["name"], arg["type"]) for arg in op.args]
        assert interfaces.setdefault(op.role, names) == names, op.name


def test_a_file_whose_name_differs_from_its_content_is_refused(tmp_path):
    for kind, loader in (("targets", Target), ("ops", Op)):
        source = next(p for p in (Path(MATRIX.ops["insert"].path).parent.parent / kind).glob("*.toml"))
        copy = tmp_path / f"other_{source.name}"
        copy.write_text(source.read_text())
        with pytest.raises(DefinitionError, match="the file says"):
            loader.load(copy)


def test_filters():
    assert {v.target for v in MATRIX.matching(["sm103"])} == {"sm103"}
    assert [str(v) for v in MATRIX.matching(["insert__sm90__nvfp*"])] == ["insert__sm90__nvfp4"]
    with pytest.raises(DefinitionError, match="no variant matches nonsense"):
        MATRIX.matching(["nonsense"])


def test_command_line_list():
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "blockpick_codegen", *arguments], capture_output=True, text=True, check=False
        )

    assert run("list").stdout.split() == [str(variant) for variant in MATRIX.variants]
    assert run("list", "gfx942").stdout.count("gfx942") == len(MATRIX.matching(["gfx942"]))
    assert run("list", "nonsense").returncode == 2
    assert (
        f"| total | {' | '.join(str(len(MATRIX.matching([f'__{t}']))) for t in TARGETS)} |"
        in run("list", "--table").stdout
    )


def test_the_readme_states_the_variant_counts():
    from blockpick_codegen.__main__ import count_table

    assert count_table(MATRIX) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("target", TARGETS)
def test_every_selection_cuts_rows_alike(target):
    """Decode and prefill share the keys that splits leave, and one merge: all selections of a target have its splits."""
    ops = [op for op in MATRIX.ops.values() if op.role in ("select_blocks", "select_rows") and target in op.targets]
    assert len({op.tuned(target, chosen)["chunk"] for op in ops for chosen in op.combinations(target)}) == 1
