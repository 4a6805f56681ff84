# SPDX-License-Identifier: Apache-2.0
"""Executors, requirements, and the account of exercised variants.

An executor is one way to run the generated kernels: the interpreter over one architecture's sources on a machine
without a GPU, ``aot`` and ``jit`` on a GPU. Tests take the fixture ``executor`` and don't know which one it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
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
    exercised: set[str] = field(default_factory=set, compare=False)

    def indexer(self, layout: blockpick.CacheLayout, **options: Any) -> blockpick.Indexer:
        """An indexer that runs on this executor."""
        indexer = blockpick.Indexer(layout, device=self.device, backend=self.backend, arch=self.arch, **options)
        EXERCISED.update(choice.variant.name for choice in indexer.choices)
        return indexer

    def insert(
        self, layout: blockpick.CacheLayout, cache: torch.Tensor, *tensors: torch.Tensor, **options: Any
    ) -> None:
        """Insert on this executor."""
        blockpick.insert(layout, cache, *tensors, backend=self.backend, arch=self.arch, **options)
        arch = self.arch or blockpick.device.describe(cache.device).arch
        EXERCISED.add(f"insert__{arch}__{layout.dtype}")


EXERCISED: set[str] = set()


def _executors(archs: tuple[str, ...]) -> list[Any]:
    if GPU:
        return [pytest.param(Executor(b, b, None, "cuda:0"), id=b, marks=pytest.mark.gpu) for b in ("aot", "jit")]
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
    config.addinivalue_line("markers", "requires(arch, ngpus): skipped, with the reason, where the machine lacks it")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("requires"):
        have = torch.cuda.device_count()
        need = mark.kwargs.get("ngpus", 1)
        if have < need:
            pytest.skip(f"requires {need} GPU(s), this machine has {have}")
        arch = mark.kwargs.get("arch")
        if arch is not None and blockpick.device.describe(torch.device("cuda:0")).arch != arch:
            pytest.skip(f"requires {arch}, this machine's GPU is another")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    EXERCISED.update(getattr(node, "workeroutput", {}).get("exercised", []))


def _executable() -> set[str]:
    """Variants that an executor of this machine can run."""
    if GPU:
        arch = blockpick.device.describe(torch.device("cuda:0")).arch
        return {v.name for v in installed_packages()[arch].variants}
    return {v.name for p in installed_packages().values() for v in p.variants if v.language == "triton"}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["exercised"] = sorted(EXERCISED)
    elif session.config.getoption("--strict-coverage") and exitstatus == 0 and _executable() - EXERCISED:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    executable = _executable()
    built = {v.name for p in installed_packages().values() for v in p.variants}
    how = "on the GPU" if GPU else "interpreted"
    terminalreporter.write_line(
        f"variants: {len(executable & EXERCISED)} {how} / {len(executable)} executable here / {len(built)} built"
    )
    for name in sorted(executable - EXERCISED):
        terminalreporter.write_line(f"  never ran: {name}")


@pytest.fixture
def generator() -> Iterator[torch.Generator]:
    yield torch.Generator().manual_seed(1234)
