# SPDX-License-Identifier: Apache-2.0
"""Fixtures of executors (see ``executors.py``), requirements, and the report of what was executed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

from support import ROOT

GENERATED = [ROOT / "backends" / vendor / "generated" for vendor in ("cuda", "rocm")]
if "BLOCKPICK_KERNEL_PATH" not in os.environ and GENERATED[0].exists():
    os.environ["BLOCKPICK_KERNEL_PATH"] = os.pathsep.join(map(str, GENERATED))

import pytest  # noqa: E402
import torch  # noqa: E402
from executors import EXERCISED, GPU, IR_ARCHS, IR_ORDERS, executable, executed_with, executors  # noqa: E402

import blockpick  # noqa: E402
from blockpick.manifest import installed_packages  # noqa: E402

if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # a queue per stream: ranks on streams wait for each other


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``executor``: one of each kind (interpreted sources; compiled AMD code at LLVM-IR level, one architecture in each
    wave order; on a GPU every route); ``any_executor``: every interpreted program, by as few architectures as hold them
    all; ``arch_executor``: all interpreted architectures; ``one_executor``: the first.
    """
    for name in ("executor", "any_executor", "arch_executor", "one_executor"):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, executors(name))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strict-coverage", action="store_true", help="fail when an executable variant never ran")
    parser.addoption(
        "--thorough",
        action="store_true",
        help="more of the same: planted faults at more places, every variant compiled cold",
    )


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


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["exercised"] = sorted(EXERCISED)
    elif session.config.getoption("--strict-coverage") and exitstatus == 0 and executable() - executed_with(EXERCISED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    here, ran = executable(), executed_with(EXERCISED)
    packages = installed_packages()
    built = sum(len(package.variants) for package in packages.values())
    how, routes = (
        ("run on the GPU (aot and jit counted apart)", ("aot", "jit")) if GPU else ("interpreted", ("interpreter",))
    )
    plain = {pair for pair in here if pair[0] in routes}
    terminalreporter.write_line(f"variants: {len(plain & ran)} {how} / {len(plain)} executable here / {built} built")
    if not GPU:
        for arch in (arch for arch in IR_ARCHS if arch in packages):
            names = {variant.name for variant in packages[arch].variants}
            counts = [f"{sum((f'ir-{order}', n) in ran for n in names)} / {len(names)} {order}" for order in IR_ORDERS]
            terminalreporter.write_line(f"{arch} executed at LLVM-IR level / built: {', '.join(counts)}")
    for route, name in sorted(here - ran):
        terminalreporter.write_line(f"  never ran: {name} [{route}]")


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether hours are to be had."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture
def generator() -> Iterator[torch.Generator]:
    yield torch.Generator().manual_seed(1234)
