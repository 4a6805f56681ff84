# SPDX-License-Identifier: Apache-2.0
"""Kernel sources -> cubin or hsaco, with no GPU: Triton and Gluon cross-compile, NVRTC compiles CUDA C++."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .axes import Op, Target, Variant
from .expand import Matrix
from .render import render

BINARY_SUFFIX = {"cuda": "cubin", "rocm": "hsaco"}
TRITON_BACKEND = {"cuda": "cuda", "rocm": "hip"}
COMPILER_OPTIONS = ("num_warps", "num_stages", "matrix_instr_nonkdim", "kpack", "waves_per_eu", "maxnreg")


@dataclass(frozen=True)
class Job:
    """Everything that decides the bytes of one binary."""

    name: str
    symbol: str
    language: str
    vendor: str
    source: str
    arch: int | str
    warp_size: int
    signature: dict[str, str]
    divisible: dict[str, int]
    constexprs: dict[str, Any]
    options: dict[str, Any]
    toolchain: dict[str, str]

    def key(self) -> str:
        """Content address: equal jobs have equal bytes."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def toolchain(language: str) -> dict[str, str]:
    """Versions that the bytes of a ``language`` kernel depend on; empty where only rendering is possible."""
    package = {"triton": "triton", "gluon": "triton", "cuda": "nvidia-cuda-nvrtc"}[language]
    try:
        return {package: importlib.metadata.version(package)}
    except importlib.metadata.PackageNotFoundError:
        return {}


def make_job(matrix: Matrix, variant: Variant) -> Job:
    """The compile job of one variant."""
    op, target = matrix.ops[variant.op], matrix.targets[variant.target]
    numbers = op.tuned(target.name, dict(variant.axes))
    values = {name: resolve(source, variant, op, target, numbers) for name, source in op.constexprs.items()}
    return Job(
        name=variant.name,
        symbol=op.template.split(".")[0],
        language=op.language,
        vendor=target.vendor,
        source=render(matrix, variant).body,  # without the header: a tuned number elsewhere changes no bytes here
        arch=target.compiler["nvrtc_arch" if op.language == "cuda" else "triton_arch"],
        warp_size=target.warp_size,
        signature={arg["name"]: arg["type"] for arg in op.args},
        divisible={arg["name"]: arg["divisible"] for arg in op.args if "divisible" in arg},
        constexprs=values,
        options={name: numbers[name] for name in COMPILER_OPTIONS if name in numbers} | {"enable_fp_fusion": False},
        toolchain=toolchain(op.language),
    )


def resolve(source: str, variant: Variant, op: Op, target: Target, numbers: dict[str, Any]) -> Any:
    """The value that ``axis:name``, ``tune:name``, ``fact:name`` or ``const:json`` stands for."""
    kind, _, name = source.partition(":")
    if kind == "const":
        return json.loads(name)
    return {"axis": dict(variant.axes), "tune": numbers, "fact": target.facts}[kind][name]


def load_source(name: str, path: Path) -> Any:
    """Import a rendered Python source from its file."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_triton(job: Job, folder: Path) -> dict[str, Any]:
    """Compile a Triton or Gluon kernel into ``folder``; returns launch facts."""
    os.environ["TRITON_INTERPRET"] = "0"  # a caller may be testing with the interpreter
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # line info would put this machine's paths into the bytes
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    source_path = folder / f"{job.symbol}.py"
    source_path.write_text(job.source)
    function = getattr(load_source(job.symbol, source_path), job.symbol)
    signature = dict(job.signature) | dict.fromkeys(job.constexprs, "constexpr")
    attrs = {(function.arg_names.index(name),): [["tt.divisibility", number]] for name, number in job.divisible.items()}
    make = GluonASTSource if job.language == "gluon" else ASTSource
    source = make(function, signature, constexprs=job.constexprs, attrs=attrs)
    target = GPUTarget(TRITON_BACKEND[job.vendor], job.arch, job.warp_size)
    compiled = triton.compile(source, target=target, options=job.options)
    kind = BINARY_SUFFIX[job.vendor]
    (folder / f"kernel.{kind}").write_bytes(compiled.asm[kind])
    (folder / "kernel.asm").write_text(compiled.asm["ptx" if job.vendor == "cuda" else "amdgcn"])
    if job.vendor == "rocm":
        (folder / "kernel.llir").write_text(compiled.asm["llir"])
    shutil.rmtree(folder / "triton")
    source_path.unlink()
    return {
        "symbol": compiled.metadata.name,
        "num_warps": compiled.metadata.num_warps,
        "shared_bytes": compiled.metadata.shared,
        "global_scratch_bytes": compiled.metadata.global_scratch_size,
        "trailing_pointers": 2,  # Triton's entry takes a global and a profile scratch pointer after the arguments
    }


def compile_cuda(job: Job, folder: Path) -> dict[str, Any]:
    """Compile a CUDA C++ kernel with NVRTC into ``folder``; returns launch facts."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=job.arch, std="c++17", define_macro=[f"{name}={int(value)}" for name, value in job.constexprs.items()],
        use_fast_math=False,
    )  # fmt: skip
    code = Program(job.source, "c++", options).compile("cubin")
    (folder / "kernel.cubin").write_bytes(bytes(code.code))
    return {
        "symbol": job.symbol,
        "num_warps": job.options["num_warps"],
        "shared_bytes": job.constexprs.get("SHARED_BYTES", 0),  # what the kernel declares without a size
        "global_scratch_bytes": 0,
        "trailing_pointers": 0,
    }


def compile_job(job: Job, cache: Path) -> Path:
    """Folder of the compiled job in the content-addressed cache, compiled now if it is not there yet."""
    from .inspect import inspect_binary

    folder = cache / job.key()
    if (folder / "facts.json").exists():
        return folder
    work = cache / f"{job.key()}.{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    facts = (compile_cuda if job.language == "cuda" else compile_triton)(job, work)
    binary = work / f"kernel.{BINARY_SUFFIX[job.vendor]}"
    facts["resources"] = inspect_binary(binary, work / "kernel.asm", facts["symbol"])
    (work / "facts.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    work.rename(folder)
    return folder


def compile_all(
    jobs: list[Job], cache: Path, workers: int, report: Callable[[Job], None]
) -> Iterator[tuple[Job, Path]]:
    """Compile ``jobs`` on ``workers`` processes; yields every job with its cache folder, in job order."""
    folders: dict[str, Path] = {}
    with ProcessPoolExecutor(workers) as pool:
        running = {pool.submit(compile_job, job, cache): job for job in jobs}
        for done in as_completed(running):
            job = running[done]
            try:
                folders[job.name] = done.result()
            except Exception as error:
                pool.shutdown(cancel_futures=True)
                raise RuntimeError(f"{job.name}: {error}") from error
            report(job)
    for job in jobs:
        yield job, folders[job.name]
