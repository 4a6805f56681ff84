# SPDX-License-Identifier: Apache-2.0
"""Executors: the ways to run the generated kernels, and the account of what each ran.

On a GPU ``aot`` and ``jit``; elsewhere the Triton interpreter over one architecture's sources, and the compiled AMD
binaries executed at LLVM-IR level behind the real ROCm loader. Tests don't know which one they got.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import ARCHS, ROOT

import blockpick
from blockpick import dispatch
from blockpick.manifest import installed_packages
from blockpick.ops.context_engine import ContextEngine

GPU = torch.cuda.is_available()
IR_ARCHS = ("gfx942", "gfx950")
IR_ORDERS = ("lockstep", "random")
EXERCISED: set[tuple[str, str]] = set()  # (route, variant) that were launched, not only chosen


@dataclass(frozen=True)
class Executor:
    """One way to run the generated kernels."""

    name: str
    backend: str
    arch: str | None
    device: str
    languages: tuple[str, ...] = ()  # only kernels in these; all when empty

    @contextmanager
    def active(self) -> Iterator[None]:
        """What the library must find while it chooses and loads kernels for this executor."""
        with pytest.MonkeyPatch.context() as patch:
            if self.languages:
                patch.setattr("blockpick.dispatch.installed_packages", lambda: filtered(self.languages))
            for module in ("blockpick.ops.engine", "blockpick.ops.insert"):
                patch.setattr(f"{module}.load", self.load)
            patch.setattr("blockpick.ops.insert._per_thread", self.bound_inserts())
            yield

    @contextmanager
    def sharing(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let kernels reach tensors by addresses in memory: the exchange buffers of simulated ranks."""
        yield

    def bound_inserts(self) -> threading.local:
        """The insert launches of this executor, apart from those of others with the same arguments."""
        return BOUND_INSERTS.setdefault(self, threading.local())

    def load(self, variant: Any, route: str, device: Any) -> RecordedKernel:
        """The library's kernel, with its launches noted."""
        return RecordedKernel(dispatch.load(variant, route, device), self.account, variant.name)

    @property
    def account(self) -> str:
        """Under which route launches are counted."""
        return self.backend

    def indexer(self, layout: blockpick.CacheLayout, **options: Any) -> blockpick.Indexer:
        """An indexer that runs on this executor."""
        with self.active():
            return blockpick.Indexer(layout, device=self.device, backend=self.backend, arch=self.arch, **options)

    def insert(
        self, layout: blockpick.CacheLayout, cache: torch.Tensor, *tensors: torch.Tensor, **options: Any
    ) -> None:
        """Insert on this executor."""
        with self.active():
            blockpick.insert(layout, cache, *tensors, backend=self.backend, arch=self.arch, **options)

    def fused_insert(
        self, layout: blockpick.CacheLayout, cache: torch.Tensor, *tensors: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Fused insert on this executor."""
        with self.active():
            return blockpick.qk_norm_rope_insert(
                layout, cache, *tensors, backend=self.backend, arch=self.arch, **options
            )


BOUND_INSERTS: dict[Executor, threading.local] = {}


class RecordedKernel:
    """A kernel whose launches note the variant under an account."""

    def __init__(self, kernel: Any, account: str, variant: str) -> None:
        self._kernel, self._entry = kernel, (account, variant)

    def bind(self, fixed: Any, dynamic: Any) -> Any:
        """Like the kernel's."""
        launch = self._kernel.bind(fixed, dynamic)

        def run(*arguments: Any) -> None:
            launch(*arguments)
            EXERCISED.add(self._entry)

        return run


@functools.cache
def standin() -> Any:
    """The stand-in for libamdhip64, loaded into this process with the LLVM-IR interpreter behind it."""
    from hip_standin.device import Standin

    return Standin(ROOT / "build" / "ir", ROOT / "build" / "hip-standin")


@dataclass(frozen=True)
class IrExecutor(Executor):
    """Compiled AMD binaries through the ROCm loader; launches are executed at LLVM-IR level in one wave order.

    ``counted`` executors' launches make a variant count as executed: only the conformance cases may use one.
    """

    order: str = "lockstep"
    counted: bool = False
    compute_units: int = 2
    seed: int = 1  # of random orders

    @property
    def devices(self) -> str:
        """The machine that the stand-in shows."""
        return f"{self.arch}:{self.compute_units}"

    @property
    def account(self) -> str:
        return f"ir-{self.order}" if self.counted else "ir"

    @contextmanager
    def active(self) -> Iterator[None]:
        from hip_standin.device import DEVICES, environment

        loader = blockpick.device.binary_loader("rocm")
        standin().seed = self.seed
        with environment(**{DEVICES: self.devices}), pytest.MonkeyPatch.context() as patch, super().active():
            (device,) = loader.devices()
            for module in ("blockpick.engines", "blockpick.ops.insert"):
                patch.setattr(f"{module}.describe", lambda *_: device)
            yield

    @contextmanager
    def sharing(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        from hip_standin.device import visible

        with visible(standin(), self.devices, tensors):
            yield

    def indexer(self, layout: blockpick.CacheLayout, **options: Any) -> blockpick.Indexer:
        """Scratch that no plan fills holds garbage, as fresh device memory does; random orders start from one seed."""
        indexer = super().indexer(layout, **options)
        for slot in indexer._engine.buffers:
            slot["scores"].fill_(3e38)
            slot["partial"].fill_(-1)
        if isinstance(indexer._engine, ContextEngine):
            indexer._engine.context_buffers["scores"].fill_(3e38)
            indexer._engine.context_buffers["queries"].fill_(-1)
        return indexer

    def bound_inserts(self) -> threading.local:
        return super().bound_inserts() if standin().rewrite is None else threading.local()

    def load(self, variant: Any, route: str, device: Any) -> RecordedKernel:
        from hip_standin.device import VisibleKernel

        find = dispatch.load if standin().rewrite is None else dispatch.load.__wrapped__
        kernel = VisibleKernel(standin(), find(variant, route, device), self.order, self.devices)
        return RecordedKernel(kernel, self.account, variant.name)


def filtered(languages: tuple[str, ...]) -> dict[str, Any]:
    """The installed packages with the variants in ``languages`` only."""
    return {
        arch: dataclasses.replace(package, variants=tuple(v for v in package.variants if v.language in languages))
        for arch, package in installed_packages().items()
    }


def ir_executor(arch: str, order: str, counted: bool = False, seed: int = 1) -> IrExecutor:
    """The executor of one AMD architecture's binaries in one wave order."""
    return IrExecutor(f"{arch}-ir-{order}", "aot", arch, "cpu", order=order, counted=counted, seed=seed)


def interpreted(arch: str) -> Executor:
    """The executor of one architecture's sources in the Triton interpreter."""
    return Executor(arch, "interpreter", arch, "cpu")


@functools.cache
def interpreted_programs() -> dict[str, str]:
    """What the interpreter executes of each Triton variant: its text below the header, constants and launch facts.

    Variants of several architectures whose programs are equal are one program; executing it once shows all of them.
    """
    programs = {}
    for package in installed_packages().values():
        for variant in package.variants:
            if variant.language == "triton":
                lines = (variant.folder / variant.record["source"]).read_text().splitlines()
                facts = [variant.op, dict(variant.axes), variant.record["constexprs"], variant.record["launch"]]
                body = [line for line in lines if not line.startswith("#")]
                programs[variant.name] = json.dumps([facts, body], sort_keys=True)
    return programs


@functools.cache
def distinct_archs() -> tuple[str, ...]:
    """Architectures that together hold every interpreted program: AMD's latest first, whose programs include
    the others'.
    """
    held: set[str] = set()
    chosen = []
    packages = installed_packages()
    for arch in sorted(packages, key=lambda arch: (arch != "sm90", arch.startswith("gfx"), arch == "gfx942")):
        names = {v.name for v in packages[arch].variants}
        mine = {program for name, program in interpreted_programs().items() if name in names}
        if mine - held:
            chosen.append(arch)
            held |= mine
    return tuple(chosen) or ARCHS  # without packages every test says what is missing


def executed_with(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """``pairs`` of (route, variant), and the interpreted variants whose program is one of theirs."""
    programs = interpreted_programs()
    ran = {programs[name] for route, name in pairs if route == "interpreter" and name in programs}
    return pairs | {("interpreter", name) for name, program in programs.items() if program in ran}


def executors(fixture: str) -> list[Any]:
    """The executors behind a fixture, as pytest parameters."""
    if GPU:
        routes = [Executor(route, route, None, "cuda:0") for route in ("aot", "jit")]
        if fixture in (
            "any_executor",
            "arch_executor",
        ):  # release binaries that dispatch passes over for a preferred one
            routes.append(Executor("aot-triton", "aot", None, "cuda:0", languages=("triton",)))
        return [pytest.param(route, id=route.name, marks=pytest.mark.gpu) for route in routes]
    found = {
        "executor": [interpreted("sm90"), *(ir_executor(arch, "lockstep") for arch in IR_ARCHS)],
        "any_executor": [interpreted(arch) for arch in distinct_archs()],
        "arch_executor": [interpreted(arch) for arch in ARCHS],
        "one_executor": [interpreted("sm90")],
    }[fixture]
    return [pytest.param(executor, id=executor.name) for executor in found]


def executable() -> set[tuple[str, str]]:
    """(route, variant) pairs that the executors of this machine can run."""
    if GPU:
        arch = blockpick.device.describe(torch.device("cuda:0")).arch
        variants = installed_packages()[arch].variants
        jit = {("jit", v.name) for v in variants if v.language == "triton"}
        return jit | {("aot", v.name) for v in variants}
    variants = [v for package in installed_packages().values() for v in package.variants]
    ir = {(f"ir-{order}", v.name) for v in variants for order in IR_ORDERS if v.vendor == "rocm"}
    return ir | {("interpreter", v.name) for v in variants if v.language == "triton"}
