# SPDX-License-Identifier: Apache-2.0
"""Compile or interpret rendered Triton sources. Triton itself is imported at first use."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from blockpick.backend_api import Kernel, KernelBinary, KernelSource
from blockpick.errors import BlockpickError

from .interpreter import InterpretedKernel, leave_out_idle_work, sort_with_numpy


class TritonBackend:
    """Takes the same sources that the release binaries were compiled from."""

    def compile(self, source: KernelSource, arch: str, pdl: bool) -> KernelBinary:
        """Compile ``source`` for ``arch`` with the installed Triton.

        Raises
        ------
        BlockpickError
            When Triton is missing, or was imported as an interpreter.
        """
        triton = _import_triton(interpret=False)
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        function = load_function(source)
        kind, number = ("hip", arch) if arch.startswith("gfx") else ("cuda", int(arch.removeprefix("sm")))
        signature = {a.name: a.type for a in source.arguments} | dict.fromkeys(source.constexprs, "constexpr")
        attrs = {(function.arg_names.index(name),): [["tt.divisibility", n]] for name, n in source.divisible.items()}
        compiled = triton.compile(
            ASTSource(function, signature, constexprs=dict(source.constexprs), attrs=attrs),
            target=GPUTarget(kind, number, source.warp_size), options=dict(source.options),
        )  # fmt: skip
        metadata = compiled.metadata
        if metadata.global_scratch_size:
            raise BlockpickError(f"{source.name}: needs {metadata.global_scratch_size} bytes of global scratch")
        image = compiled.asm["hsaco" if kind == "hip" else "cubin"]
        return KernelBinary(
            f"{source.name} (jit)", metadata.name, image, source.arguments, metadata.num_warps * source.warp_size,
            metadata.shared, 2, pdl,
        )  # fmt: skip

    def interpret(self, source: KernelSource) -> Kernel:
        """A kernel that runs ``source`` in the Triton interpreter.

        Raises
        ------
        BlockpickError
            When Triton is missing, or was imported without TRITON_INTERPRET=1.
        """
        _import_triton(interpret=True)
        sort_with_numpy()
        leave_out_idle_work()
        return InterpretedKernel(source, load_function(source))


def _import_triton(interpret: bool) -> Any:
    """Import Triton in the wanted mode; the mode is fixed when Triton is first imported."""
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    try:
        import triton
    except ImportError as error:
        raise BlockpickError(f"Triton is not installed: {error}. Install triton >= 3.6.") from error
    is_interpreter = type(triton.language.sort).__name__ == "InterpretedFunction"
    if is_interpreter != interpret:
        have, need = ("interpreter", "compiler") if is_interpreter else ("compiler", "interpreter")
        raise BlockpickError(
            f"Triton was imported as {have}, the {need} is needed; one process has one of them. Set TRITON_INTERPRET="
            f"{int(interpret)} before anything imports Triton."
        )
    return triton


@functools.cache
def _source_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="blockpick-sources-"))


def load_function(source: KernelSource) -> Any:
    """The kernel function of a rendered source, imported from a file because Triton reads its text back."""
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:16]
    path = _source_folder() / f"{source.symbol}_{digest}.py"
    name = f"blockpick_source_{path.stem}"
    if name not in sys.modules:
        path.write_text(source.text)
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise BlockpickError(f"{source.name}: cannot import {path.name}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return getattr(sys.modules[name], source.symbol)
