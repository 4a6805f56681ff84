# SPDX-License-Identifier: Apache-2.0
"""Sessions: ``codegen`` renders, ``build`` compiles and inspects, ``test``, ``lint``, ``demo``, ``bench``; ``gpu``
uses the environment as it is.

Environment: BLOCKPICK_TORCH is the torch requirement that sessions install (default: the pinned version, whose build
the package index decides; name a CPU, CUDA or ROCm build here). With ``--no-venv`` sessions use the active environment,
which then must hold everything.
"""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.options.sessions = ["codegen", "build", "test"]
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
TORCH = os.environ.get("BLOCKPICK_TORCH", "torch==2.13.0")
KERNEL_PATH = os.pathsep.join(str(ROOT / "backends" / vendor / "generated") for vendor in ("cuda", "rocm"))
CODEGEN = "./codegen"
RUNTIME = ("./runtime", "./backends/cuda", "./backends/rocm", "./backends/triton")


def install(session: nox.Session, *requirements: str, torch: bool = False) -> None:
    """Install pinned requirements and our packages (editable), torch first so that nothing else chooses it."""
    if torch:
        session.install(TORCH)
    ours = [argument for path in requirements if path.startswith("./") for argument in ("-e", path)]
    others = [requirement for requirement in requirements if not requirement.startswith("./")]
    session.install("-c", "constraints.txt", *others, *ours)


def generated() -> bool:
    """Whether every kernel package was at least rendered."""
    return all(any((ROOT / "backends" / vendor / "generated").glob("*/manifest.json")) for vendor in ("cuda", "rocm"))


@nox.session
def codegen(session: nox.Session) -> None:
    """Render all kernel sources and manifests; arguments are passed on."""
    install(session, CODEGEN)
    session.run("python", "-m", "blockpick_codegen", "render", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Compile every variant for all architectures, inspect, gate, and write the kernel packages."""
    install(session, CODEGEN)
    session.run("python", "-m", "blockpick_codegen", "compile", *session.posargs)
    session.run("python", "-m", "blockpick_codegen", "check")


@nox.session
def test(session: nox.Session) -> None:
    """All tests that need no GPU; arguments replace the default selection."""
    install(session, CODEGEN, *RUNTIME, "pytest", "pytest-xdist", "hypothesis", "hatchling", torch=True)
    arguments = session.posargs or ["-n", "auto", "--dist", "worksteal", "--strict-coverage"]
    session.run("python", "-m", "pytest", *arguments, env={"BLOCKPICK_KERNEL_PATH": KERNEL_PATH})


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff over code, templates and generated sources; mypy strict; import contracts; seals."""
    install(session, CODEGEN, *RUNTIME, "ruff", "mypy", "import-linter", "nox", torch=True)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    rendered = session.create_tmp()
    session.run("python", "-m", "blockpick_codegen", "render", "--root", rendered)
    session.run("python", "-m", "blockpick_codegen", "check", "--root", rendered)
    # generated text: names, unused code, line length; its imports stand where the fragments put them
    session.run("ruff", "check", "--no-cache", "--isolated", "--line-length", "120", "--select", "F,E5,W", rendered)
    for package in ("runtime/src", "codegen/src", "backends/cuda/src", "backends/rocm/src", "backends/triton/src"):
        session.run("mypy", package)
    session.run("lint-imports")


@nox.session
def demo(session: nox.Session) -> None:
    """Pick blocks in a real text through the generated kernels; arguments go to ``blockpick demo``."""
    install(session, CODEGEN, *RUNTIME, torch=True)
    if not generated():
        session.run("python", "-m", "blockpick_codegen", "render")
    session.run("blockpick", "demo", *session.posargs, env={"BLOCKPICK_KERNEL_PATH": KERNEL_PATH})


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure on this machine's GPU with the environment's own torch."""
    session.run("python", "bench", *session.posargs, env={"BLOCKPICK_KERNEL_PATH": KERNEL_PATH})


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Tests on this machine's GPU, in the active environment, over whatever blockpick is installed there."""
    arguments = session.posargs or ["-m", "gpu"]
    session.run("python", "-m", "pytest", *arguments)
