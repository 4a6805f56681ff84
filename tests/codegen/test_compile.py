# SPDX-License-Identifier: Apache-2.0
"""Compilation: the same bytes everywhere, the cache, the gates, the written packages."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys

import jsonschema
import pytest
from support import ARCHS, ROOT

from blockpick_codegen.compile import Job, make_job
from blockpick_codegen.expand import load_matrix
from blockpick_codegen.inspect import failed_gates
from blockpick_codegen.manifest import SCHEMA_FILE, package_folder, write_packages
from blockpick_codegen.render import sha256

MATRIX = load_matrix()


def manifest(arch):
    """The built manifest of one architecture."""
    return json.loads((package_folder(ROOT, MATRIX.targets[arch].vendor, arch) / "manifest.json").read_text())


def compile_in(folder, *patterns):
    """Compile through the command line with a fresh cache, in ``folder``."""
    command = [sys.executable, "-m", "blockpick_codegen", "compile", *patterns, "--root", str(folder), "--jobs", "2"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def one_of_each_op():
    """A variant of every op and vendor, of changing architectures."""
    groups = {}
    for variant in MATRIX.variants:
        groups.setdefault((variant.op, MATRIX.targets[variant.target].vendor), []).append(str(variant))
    return [names[17 * index % len(names)] for index, (_, names) in enumerate(sorted(groups.items()))]


@pytest.mark.slow
def test_same_bytes_in_another_folder_without_a_cache(tmp_path, thorough):
    """Compiled cold in a second folder, binaries, sources and records have the bytes of the build: a variant of every op
    and vendor; with --thorough, all.
    """
    folder = tmp_path / "some" / "deeper" / "folder"
    folder.mkdir(parents=True)
    chosen = [str(variant) for variant in MATRIX.variants] if thorough else one_of_each_op()
    assert len({name.split("__")[0] for name in chosen}) == len(MATRIX.ops)
    result = compile_in(folder, *([] if thorough else chosen))
    assert result.returncode == 0, result.stderr
    for arch in ARCHS:
        here, there = (package_folder(root, MATRIX.targets[arch].vendor, arch) for root in (ROOT, folder))
        for path in (path for path in here.rglob("*") if path.is_file() and path.stem in chosen):
            assert sha256((there / path.relative_to(here)).read_bytes()) == sha256(path.read_bytes()), path.name
    for name in chosen:
        arch = MATRIX.matching([name])[0].target
        mine = json.loads((package_folder(folder, MATRIX.targets[arch].vendor, arch) / "manifest.json").read_text())
        assert mine["variants"][name] == manifest(arch)["variants"][name]
        assert mine["variants"][name]["file"]


def test_unchanged_variants_are_not_compiled_again(tmp_path):
    """A second compilation comes from the cache; a changed source, option or toolchain has another address."""
    job = make_job(MATRIX, MATRIX.matching(["insert__gfx950__bf16"])[0])
    assert compile_in(tmp_path, job.name).returncode == 0
    facts = tmp_path / "build" / "cache" / job.key() / "facts.json"
    before = facts.stat().st_mtime_ns
    assert compile_in(tmp_path, job.name).returncode == 0
    assert facts.stat().st_mtime_ns == before
    assert [p.name for p in (tmp_path / "build" / "cache").iterdir()] == [job.key()]
    for change in ({"source": job.source + "\n"}, {"options": {**job.options, "num_warps": 8}}, {"toolchain": {}}):
        assert dataclasses.replace(job, **change).key() != job.key()


def test_compiling_one_variant_keeps_the_others(tmp_path):
    """A filter compiles what it names; binaries that the cache holds stay in the packages, the rest have sources only."""
    first, second = "insert__sm90__bf16", "merge_splits__sm90__k16"
    for name in (first, second):
        assert compile_in(tmp_path, name).returncode == 0
    data = json.loads((package_folder(tmp_path, "cuda", "sm90") / "manifest.json").read_text())["variants"]
    assert sorted(name for name, record in data.items() if record["file"]) == sorted((first, second))
    command = [sys.executable, "-m", "blockpick_codegen", "render", "--root", str(tmp_path)]
    assert subprocess.run(command, check=True, capture_output=True).returncode == 0
    again = json.loads((package_folder(tmp_path, "cuda", "sm90") / "manifest.json").read_text())["variants"]
    assert again == data


def test_a_tuned_number_of_one_variant_changes_no_other_key():
    op = MATRIX.ops["decode_score"]
    rule = (dataclasses.replace(op.exclusions[0], when={"target": ("sm103",)}), {"num_warps": 8})
    tuned = dataclasses.replace(
        MATRIX, ops={**MATRIX.ops, op.name: dataclasses.replace(op, tune_rules=(*op.tune_rules, rule))}
    )
    changed = {v.target for v in MATRIX.variants if make_job(tuned, v).key() != make_job(MATRIX, v).key()}
    assert changed == {"sm103"}


@pytest.mark.parametrize("arch", ARCHS)
def test_every_binary_passes_the_gates(arch):
    """No spill, shared memory within the limit, the promised matrix instruction in every scorer."""
    data = manifest(arch)
    assert data["variants"]
    for name, record in data["variants"].items():
        facts = {**record, "global_scratch_bytes": 0}
        assert (
            failed_gates(
                MATRIX.ops[record["op"]], MATRIX.targets[arch], record["axes"].get("numerics", "strict"), facts
            )
            == []
        ), name
        assert record["resources"]["registers"] > 0
        if record["role"] == "decode_score":
            assert record["resources"]["mma"], name


GATES = [
    ({"spills": 3}, {}, "3 spills"),
    ({"stack_bytes": 16}, {}, "16 bytes of stack"),
    ({}, {"shared_bytes": 98304}, "98304 bytes of shared memory, gfx942 has 65536"),
    ({"registers": 600}, {}, "600 registers"),
    ({"mma_shapes": ["v_mfma_f32_32x32x8_f16"]}, {}, "v_mfma_f32_32x32x8_f16, not v_mfma_f32_16x16x16_f16"),
    (
        {"mma_shapes": ["v_mfma_f32_16x16x16_f16", "v_mfma_f32_16x16x32_fp8_fp8"]},
        {},
        "v_mfma_f32_16x16x32_fp8_fp8, not",
    ),
    ({"mma_shapes": []}, {}, "no MMA"),
    ({}, {"global_scratch_bytes": 4}, "global scratch"),
]


@pytest.mark.parametrize("resources,facts,reason", GATES, ids=[gate[2] for gate in GATES])
def test_gates_can_fail(resources, facts, reason):
    record = manifest("gfx942")["variants"]["decode_score__gfx942__bf16_r128_c16"]
    broken = {**record, "global_scratch_bytes": 0, **facts, "resources": {**record["resources"], **resources}}
    assert reason in "; ".join(failed_gates(MATRIX.ops["decode_score"], MATRIX.targets["gfx942"], "strict", broken))


def test_a_failed_gate_fails_the_command(tmp_path, monkeypatch, capsys):
    from blockpick_codegen import __main__ as cli

    target = dataclasses.replace(MATRIX.targets["gfx942"], limits={"shared_bytes": 8, "registers_per_thread": 512})
    matrix = dataclasses.replace(MATRIX, targets={**MATRIX.targets, "gfx942": target})
    chosen = matrix.matching(["merge_splits__gfx942__k16"])
    assert cli.compile_packages(matrix, chosen, tmp_path, ROOT / "build" / "cache", 1) == 1
    assert not (tmp_path / "backends").exists()


@pytest.mark.parametrize("arch", ARCHS)
def test_manifests_follow_the_schema(arch):
    jsonschema.validate(manifest(arch), json.loads(SCHEMA_FILE.read_text()))


def test_numeric_family_shares_instruction_and_depth():
    """All scorers of one (arch, op, cache, rounding) use one matrix instruction kind of one K depth; those of parts of
    blocks use that of whole ones.
    """
    families = {}
    for arch in ARCHS:
        for name, record in manifest(arch)["variants"].items():
            if record["role"] in ("decode_score", "decode_score_shards"):
                key = (arch, record["op"].removesuffix("_shards"), record["axes"]["cache"], record["axes"]["rounding"])
                kinds = {mma_kind(shape) for shape in record["resources"]["mma_shapes"]}
                families.setdefault(key, {})[name] = kinds
    for key, members in families.items():
        assert len(set(map(frozenset, members.values()))) == 1, f"{key}: {members}"


def mma_kind(shape):
    """Unit and depth K of a matrix instruction as the disassembly names it; columns don't matter.

    HGMMA and HMMA are two kinds: on an H200 e4m3fn scores of one and the other differed in the last bits.
    UTCHMMA carries no shape.
    """
    if shape.startswith("v_mfma"):
        return "mfma", shape.split("x")[2].split("_")[0]
    if shape.startswith("HGMMA."):
        return "HGMMA", shape.split(".")[1].split("x")[2]
    return shape.split(".")[0], shape.split(".")[1] if "." in shape else ""


OTHERS = ["HMMA.16816.F32", "HMMA.1688.F32", "QGMMA.64x16x32.F32.E4M3.E4M3", "UTCQMMA", "HGMMA.64x16x8.F32.TF32"]


@pytest.mark.parametrize("other", OTHERS)
def test_another_instruction_is_another_family(other):
    assert mma_kind(other) != mma_kind("HGMMA.64x16x16.F32")
    assert mma_kind("HGMMA.64x32x16.F32") == mma_kind("HGMMA.64x16x16.F32")


def test_check_finds_what_is_broken(tmp_path):
    """check: fine as written; a changed binary, a hand-edited source, a missing variant are each found."""
    render_only = write_packages(MATRIX, tmp_path, {})
    assert len(render_only) == len(ARCHS)

    def check():
        command = [sys.executable, "-m", "blockpick_codegen", "check", "sm90", "--root", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert check().returncode == 0
    folder = package_folder(tmp_path, "cuda", "sm90")
    source = folder / "sources" / "insert__sm90__bf16.py"
    source.write_text(source.read_text().replace("tl.load", "tl.load ", 1))
    result = check()
    assert result.returncode == 1
    said = " ".join(result.stderr.split())
    assert "differs from its digest" in said
    assert "edited by hand" in said
    shutil.rmtree(folder)
    assert "no manifest" in check().stderr


def test_job_covers_everything_that_decides_bytes():
    assert {field.name for field in dataclasses.fields(Job)} >= {
        "source", "signature", "divisible", "constexprs", "options", "toolchain", "arch", "warp_size",
    }  # fmt: skip


def test_sizes_of_the_packages():
    """Binaries, sources and manifest of one architecture stay far below the 20 MB of a kernel wheel."""
    for arch in ARCHS:
        folder = package_folder(ROOT, MATRIX.targets[arch].vendor, arch)
        assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < 5_000_000


def test_a_block_never_asks_for_more_registers_than_it_starts_with():
    """setmaxnreg waits for ever when the warpgroups together ask for more than the launch gave the block."""
    for name, record in manifest("sm90")["variants"].items():
        if record["op"] == "prefill_score_wgmma":
            numbers = record["constexprs"]
            asked = 256 * numbers["MULTIPLIER_REGISTERS"] + 128 * numbers["LOADER_REGISTERS"]
            assert asked <= 384 * record["resources"]["registers"], name
