# SPDX-License-Identifier: Apache-2.0
"""Faults planted into the IR of shipped AMD variants must fail the checks that execute it; survivors are listed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance import (
    CONFORMANCE,
    MANY_REQUESTS,
    SELECTIONS,
    check_other_shape,
    check_plan,
    check_prefill_plan,
    check_selection,
)
from executors import GPU, IR_ARCHS, ir_executor, standin
from fused_cases import check_fused_insert
from llir import Program, Trap
from llir.mutations import Mutant, mutants
from llir_tests.context_checks import check_context_plan, check_exchange, merge_checks, part_score_checks, push_checks
from llir_tests.test_variants import check_insert
from sparse_cases import CASES, PREFILL, check_decode_emission, check_prefill_emission, check_rows_of_several_splits
from support import ROOT

from blockpick import CacheLayout
from blockpick.manifest import installed_packages
from blockpick.testing.cases import build, check_batch
from blockpick.testing.prefill_cases import PrefillCase, run_prefill_case

pytestmark = pytest.mark.skipif(GPU, reason="executed on machines without a GPU")

Check = Callable[[Any], None]
DECODE = {case.name: case for case in CONFORMANCE}


def decodes(name: str) -> Check:
    """A conformance case, the same launches over a plan of another shape, and eight queries of short requests."""

    def check(machine: Any) -> None:
        case = DECODE[name]
        short = DECODE[f"{case.dtype}-{case.rounding}-q8"]
        check_batch(short, machine.indexer(short.layout(), **short.options()), build(short))
        indexer, batch = machine.indexer(case.layout(), **case.options()), build(case)
        check_batch(case, indexer, batch)
        check_other_shape(indexer, batch, case.query_len)

    return check


def selects(machine: Any) -> None:
    """Selection of all orders of ids on one capacity, full and not; tables of decode and prefill, of rows with and
    without their own block.
    """
    check_rows_of_several_splits(machine, 16)
    for case in SELECTIONS[:4]:
        check_selection(case, machine.indexer(case.layout(), **case.options()))
    for case in CASES[:2]:
        check_decode_emission(machine, case, 8)
    check_prefill_emission(machine, PREFILL, 16)


def plans(machine: Any) -> None:
    """Small and large machines: with many units a thread writes many times between two barriers; ranks' shares."""
    for page_size, compute_units in ((128, 2), (256, 304)):
        sized = replace(machine, compute_units=compute_units)
        check_plan(sized.indexer(CacheLayout("bf16", page_size), max_requests=7, max_seq_len=640 * page_size))
    check_context_plan(machine)


def prefills(dtype: str, rounding: str | None = None, numerics: str | None = None) -> Check:
    """Four requests of few blocks, more than topk: a whole tile and partial ones, two pieces of keys, padding; with as
    many programs as items, which disturb one another, and with fewer.
    """
    requests = ((37, 1140), (2, 130), (0, 3), (3, 126))
    cases = [
        PrefillCase(f"{dtype}-{order}", dtype, requests, num_heads=2, topk=3, order=order, page_size=page, rounding=rounding,
                    numerics=numerics, padding=2, data="integer", local_blocks=local)
        for order, page, local in (("score", 256, 0), ("local_last", 128, 1))
    ]  # fmt: skip

    def check(machine: Any) -> None:
        run_prefill_case(cases[0], in_one_piece(replace(machine, compute_units=8)), "cpu")
        run_prefill_case(cases[1], replace(machine, compute_units=2).indexer, "cpu")

    return check


def in_one_piece(machine: Any) -> Callable[..., Any]:
    """Makes indexers whose prefill plans leave a request's keys in one piece, however few they are: a program then
    stores scores of several groups of blocks while others, of other requests, are done.
    """

    def make(*arguments: Any, **options: Any) -> Any:
        indexer = machine.indexer(*arguments, **options)
        pick, spans = indexer._engine.prefills[0], indexer._engine.buffers[0]["spans"].view(-1, 4)
        launch = pick.plan

        def plan(step: Any, *tensors: Any) -> None:
            launch(step, *tensors)
            assert step.num_passes == 1
            tiles = spans[: step.num_requests, 1].cumsum(0).int()
            spans[: step.num_requests + 1, 0] = torch.cat([torch.zeros(1, dtype=torch.int32), tiles])
            spans[step.num_requests, 1] = 1 << 16

        pick.plan = plan
        return indexer

    return make


def prefill_plans(machine: Any) -> None:
    """Batches of several positions programs, several passes, requests that need no scores; random ones, for which pieces
    of many lengths end first.
    """
    for options in ({"order": "local_last"}, {"order": "score", "workspace_bytes": 64 * 32 * 4}):
        case = PrefillCase("plan", "e4m3fn", MANY_REQUESTS, topk=3, padding=5)
        case = replace(case, **options)
        for compute_units in (2, 304):
            check_prefill_plan(replace(machine, compute_units=compute_units), case)
    random = np.random.default_rng(3)
    for _ in range(8):
        requests = tuple(
            (int(random.integers(1, 60)), int(random.integers(0, 9000))) for _ in range(random.integers(9, 40))
        )
        sized = replace(machine, compute_units=int(random.integers(1, 40)))
        check_prefill_plan(sized, PrefillCase("random", "e4m3fn", requests, num_heads=4))


SCORER = {
    "barriers removed", "moved from another lane", "swizzle altered", "LDS address moved", "matrix sum dropped",
    "matrix operand twice", "output short", "store unguarded", "token mask dropped", "zero mask dropped",
}  # fmt: skip
STORES = {"output short", "store unguarded"}
PUSHED = {"pushed word short", "pushed word altered", "push mask dropped"}
POLLED = {"barriers removed", "poll mask dropped", "poll left at once", "epoch compared by parity", "limit dropped"}
FUSED = STORES | {"moved from another lane", "swizzle altered"}
STAGED = {"barriers removed"}
SORT = {"moved from another lane", "output short", "zero mask dropped"}
PERMUTED = {"permuted by a fixed lane", "swizzle altered"}
# variant: its check, and the kinds of faults that its code has a place for
CHECKS: dict[str, tuple[Check, set[str]]] = {
    "decode_plan__{arch}": (plans, STORES | {"moved from another lane", "barriers removed"}),
    "decode_score__{arch}__bf16_r128_c16": (decodes("bf16-None-c16-score"), SCORER),
    "decode_score__{arch}__e4m3fn_r128_c16": (decodes("e4m3fn-None-c16-score"), SCORER),
    "decode_score__{arch}__nvfp4_exact_r128_c16": (decodes("nvfp4-exact-c16-score"), SCORER),
    "decode_score__{arch}__nvfp4_e4m3_r128_c32": (decodes("nvfp4-e4m3-c32-score"), SCORER),
    "prefill_plan__{arch}": (
        prefill_plans,
        SORT | {"permuted by a fixed lane", "barriers removed", "LDS address moved"},
    ),
    "prefill_score__{arch}__bf16_r128": (prefills("bf16"), SCORER - {"zero mask dropped"}),
    "prefill_score__{arch}__e4m3fn_r128_fp8": (
        prefills("e4m3fn", None, "fp8"),
        SCORER - {"zero mask dropped", "matrix sum dropped"},  # all dims in one step
    ),
    "prefill_score__{arch}__e4m3fn_r128": (prefills("e4m3fn", None, "strict"), SCORER - {"zero mask dropped"}),
    "prefill_score__{arch}__nvfp4_exact_r128": (prefills("nvfp4", "exact"), SCORER - {"zero mask dropped"}),
    "decode_score_shards__{arch}__bf16_c16": (part_score_checks("bf16"), SCORER),
    "decode_score_shards__{arch}__nvfp4_exact_c16": (part_score_checks("nvfp4", "exact"), SCORER),
    "select_blocks__{arch}__k16": (selects, SORT | {"barriers removed", "LDS address moved"}),
    "merge_splits__{arch}__k16": (selects, SORT | PERMUTED | {"LDS address moved"}),
    "exchange_queries__{arch}": (
        check_exchange,
        STORES | PUSHED | POLLED | {"moved from another lane", "zero mask dropped"},
    ),
    "push_candidates__{arch}__k16": (
        push_checks(12),
        PUSHED | PERMUTED | {"moved from another lane", "barriers removed", "LDS address moved", "zero mask dropped"},
    ),
    "merge_ranks__{arch}__k16": (merge_checks(12), SORT | PERMUTED | POLLED),
    "qk_norm_rope_insert__{arch}__bf16": (lambda machine: check_fused_insert(machine, "bf16"), FUSED),
    "qk_norm_rope_insert__{arch}__e4m3fn": (lambda machine: check_fused_insert(machine, "e4m3fn"), FUSED),
    "qk_norm_rope_insert__{arch}__nvfp4": (
        lambda machine: check_fused_insert(machine, "nvfp4"),
        FUSED | STAGED,
    ),
    "insert__{arch}__bf16": (lambda machine: check_insert(machine, "bf16"), STORES),
    "insert__{arch}__e4m3fn": (lambda machine: check_insert(machine, "e4m3fn"), STORES),
    "insert__{arch}__nvfp4": (lambda machine: check_insert(machine, "nvfp4"), FUSED | STAGED | {"LDS address moved"}),
}
# what one architecture's code has besides: CDNA3 sorts through ds_bpermute, CDNA4's scorers copy to LDS in the background
BESIDES = {("gfx942", "select_blocks"): PERMUTED, ("gfx942", "prefill_plan"): {"swizzle altered"},
           ("gfx950", "decode_score"): {"wait removed"}, ("gfx950", "decode_score_shards"): {"wait removed"}, ("gfx950", "prefill_score"): {"wait removed"}}  # fmt: skip
# faults that change nothing: op, kind -> why
EQUIVALENT = {
    (op, "zero mask dropped"): "page 0 stands in for slots whose stores are masked anyway"
    for op in ("insert", "qk_norm_rope_insert")
} | {("merge_splits", "barriers removed"): "its workgroup is one wave"}
# places of a kind with --thorough; two of other ops: these write tables besides ids. Without, the first place of each kind
SITES = {"select_blocks": 4, "merge_splits": 4}


def ir_of(name: str) -> str:
    """The IR of a shipped variant."""
    variants = {v.name: v for package in installed_packages().values() for v in package.variants}
    return Path(ROOT / "build" / "ir" / f"{variants[name].record['sha256']}.ll").read_text()


def survives(mutant: Mutant, original: str, arch: str, check: Check) -> bool:
    """Whether the check passes in lockstep and in three random orders with the mutant in place of the variant."""
    device = standin()
    device.rewrite = lambda text: mutant.text if text == original else text
    device.turn_limit = 20_000
    try:
        for order, seed in (("lockstep", 1), ("random", 1), ("random", 2), ("random", 3)):
            try:
                check(ir_executor(arch, order, seed=seed))
            except (Trap, AssertionError):
                return False
        return True
    finally:
        device.rewrite, device.turn_limit = None, 1_000_000


BUILT = [
    (arch, name) for arch, name in itertools.product(IR_ARCHS, CHECKS) if arch != "gfx942" or not name.endswith("fp8")
]
# without --thorough one place of each kind per op and architecture: of variants with the same kinds each on one of them
EVERYWHERE = ("insert__{arch}__nvfp4", "qk_norm_rope_insert__{arch}__nvfp4")  # kinds that the others of the op lack
ALONE = [name for name in CHECKS if sum(other.split("__")[0] == name.split("__")[0] for other in CHECKS) == 1]
IN_TURN = [
    (arch, name)
    for arch, name in BUILT
    if name in (*ALONE, *EVERYWHERE) or name.endswith("fp8") or IR_ARCHS[list(CHECKS).index(name) % 2] == arch
]


def kinds_of(pairs: list[tuple[str, str]]) -> dict[tuple[str, str], set[str]]:
    """The kinds of faults that are planted by architecture and op."""
    found: dict[tuple[str, str], set[str]] = {}
    for arch, name in pairs:
        op = name.split("__")[0]
        found.setdefault((arch, op), set()).update(CHECKS[name][1] | BESIDES.get((arch, op), set()))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "arch" in metafunc.fixturenames:
        metafunc.parametrize("arch,name", BUILT if metafunc.config.getoption("--thorough") else IN_TURN)


def test_every_op_has_faults_planted_on_both_architectures() -> None:
    built = {(v.arch, v.op) for p in installed_packages().values() for v in p.variants if v.vendor == "rocm"}
    assert set(kinds_of(BUILT)) == built
    assert kinds_of(IN_TURN) == kinds_of(BUILT)


def test_planted_faults_are_found(arch: str, name: str, thorough: bool) -> None:
    check, kinds = CHECKS[name]
    original = ir_of(name.format(arch=arch))
    op = name.split("__")[0]
    planted = [m for m in mutants(original, SITES.get(op, 2) if thorough else 1) if (op, m.kind) not in EQUIVALENT]
    for mutant in planted:  # what can't be parsed is found by nobody's merit
        Program(mutant.text, name.split("__")[0], arch)
    wanted = kinds | BESIDES.get((arch, name.split("__")[0]), set())
    assert {mutant.kind for mutant in planted} == wanted
    check(ir_executor(arch, "lockstep"))  # what fails without a fault finds none
    survivors = [f"{m.kind}, {m.place}" for m in planted if survives(m, original, arch, check)]
    assert not survivors, f"{name.format(arch=arch)}: of {len(planted)} planted faults the checks miss {survivors}"


@pytest.mark.parametrize("name", ["insert__{arch}__bf16", "decode_plan__{arch}"])
def test_a_change_that_is_none_survives(name: str) -> None:
    """Also after a planted fault in the same process: nothing outlives its test."""
    check, _ = CHECKS[name]
    original = ir_of(name.format(arch="gfx942"))
    assert not survives(next(mutants(original)), original, "gfx942", check)
    assert survives(Mutant("none", "", original + "\n; nothing"), original, "gfx942", check)
    check(ir_executor("gfx942", "random"))
