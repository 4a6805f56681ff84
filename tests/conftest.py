# SPDX-License-Identifier: Apache-2.0
"""Executors, requirements, and the account of exercised variants.

An executor is one way to run the generated kernels: the interpreter over one architecture's sources on a machine
without a GPU, ``aot`` and ``jit`` on a GPU. Tests take the fixture ``executor`` and don't know which one it is.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support import ARCHS, ROOT

GENERATED = [ROOT / "backends" / vendor / "generated" for vendor in ("cuda", "rocm")]
if "BLOCKPICK_KERNEL_PATH" not in os.environ and GENERATED[0].exists():
    os.environ["BLOCKPICK_KERNEL_PATH"] = os.pathsep.join(map(str, GENERATED))

import pytest  # noqa: E402
import torch  # noqa: E402

import blockpick  # noqa: E402
from blockpick.manifest import installed_packages  # noqa: E402

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"


@dataclass(frozen=True)
class Executor:
    """One way to run the generated kernels."""

    name: str
    backend: str
    arch: str | None
    device: str
    languages: tuple[str, ...] = ()  # only kernels in these; all when empty

    def indexer(self, layout: blockpick.CacheLayout, **options: Any) -> blockpick.Indexer:
        """An indexer that runs on this executor."""
        with pytest.MonkeyPatch.context() as patch:
            if self.languages:
                patch.setattr("blockpick.dispatch.installed_packages", lambda: filtered(self.languages))
            indexer = blockpick.Indexer(layout, device=self.device, backend=self.backend, arch=self.arch, **options)
        engine = indexer._engine
        names = [
            (engine.kernels.plan, score, engine.kernels.select, engine.kernels.merge) for score in engine.kernels.score
        ]
        engine._launches = [
            [tuple(map(recorded, launches, choices)) for launches, choices in zip(slot, names, strict=True)]
            for slot in engine._launches
        ]
        return indexer

    def insert(
        self, layout: blockpick.CacheLayout, cache: torch.Tensor, *tensors: torch.Tensor, **options: Any
    ) -> None:
        """Insert on this executor."""
        blockpick.insert(layout, cache, *tensors, backend=self.backend, arch=self.arch, **options)
        arch = self.arch or blockpick.device.describe(cache.device).arch
        EXERCISED.add((self.backend, f"insert__{arch}__{layout.dtype}"))


EXERCISED: set[tuple[str, str]] = set()  # (route, variant) that were launched, not only chosen


def filtered(languages: tuple[str, ...]) -> dict[str, Any]:
    """The installed packages with the variants in ``languages`` only."""
    return {
        arch: dataclasses.replace(package, variants=tuple(v for v in package.variants if v.language in languages))
        for arch, package in installed_packages().items()
    }


def recorded(launch: Any, choice: Any) -> Any:
    """``launch`` that notes its variant when it is called."""

    def call(*arguments: Any) -> None:
        EXERCISED.add((choice.route, choice.variant.name))
        launch(*arguments)

    return call


def _executors(archs: tuple[str, ...]) -> list[Any]:
    if GPU:
        routes = [Executor(route, route, None, "cuda:0") for route in ("aot", "jit")]
        if archs == ARCHS:  # the release binaries that dispatch would pass over for a preferred one
            routes.append(Executor("aot-triton", "aot", None, "cuda:0", languages=("triton",)))
        return [pytest.param(route, id=route.name, marks=pytest.mark.gpu) for route in routes]
    return [pytest.param(Executor(arch, "interpreter", arch, "cpu"), id=arch) for arch in archs]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``executor``: one architecture per vendor; ``any_executor``: all of them; ``one_executor``: the first."""
    for name, archs in (("executor", ("sm90", "gfx942")), ("any_executor", ARCHS), ("one_executor", ("sm90",))):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, _executors(archs))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strict-coverage", action="store_true", help="fail when an executable variant never ran")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU")
    config.addinivalue_line("markers", "multigpu: needs several GPUs")
    config.addinivalue_line("markers", "slow: over 30 s on two cores")
    config.addinivalue_line(
        "markers", "requires(arch, ngpus, tool): skipped, with the reason, where the machine lacks it"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("requires"):
        have = torch.cuda.device_count()
        need = mark.kwargs.get("ngpus", 0)
        if have < need:
            pytest.skip(f"requires {need} GPU(s), this machine has {have}")
        tool = mark.kwargs.get("tool")
        if tool is not None and shutil.which(tool) is None:
            pytest.skip(f"requires {tool}, which is not on this machine's PATH")
        arch = mark.kwargs.get("arch")
        if arch is not None and blockpick.device.describe(torch.device("cuda:0")).arch != arch:
            pytest.skip(f"requires {arch}, this machine's GPU is another")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    EXERCISED.update(map(tuple, getattr(node, "workeroutput", {}).get("exercised", [])))


def _executable() -> set[tuple[str, str]]:
    """(route, variant) pairs that the executors of this machine can run."""
    if GPU:
        arch = blockpick.device.describe(torch.device("cuda:0")).arch
        variants = installed_packages()[arch].variants
        jit = {("jit", v.name) for v in variants if v.language == "triton"}
        return jit | {("aot", v.name) for v in variants}
    variants = [v for p in installed_packages().values() for v in p.variants]
    return {("interpreter", v.name) for v in variants if v.language == "triton"}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["exercised"] = sorted(EXERCISED)
    elif session.config.getoption("--strict-coverage") and exitstatus == 0 and _executable() - EXERCISED:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    executable = _executable()
    built = sum(len(package.variants) for package in installed_packages().values())
    how = "run on the GPU (aot and jit counted apart)" if GPU else "interpreted"
    terminalreporter.write_line(
        f"variants: {len(executable & EXERCISED)} {how} / {len(executable)} executable here / {built} built"
    )
    for route, name in sorted(executable - EXERCISED):
        terminalreporter.write_line(f"  never ran: {name} [{route}]")


@pytest.fixture
def generator() -> Iterator[torch.Generator]:
    yield torch.Generator().manual_seed(1234)
