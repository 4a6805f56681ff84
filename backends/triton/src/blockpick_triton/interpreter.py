# SPDX-License-Identifier: Apache-2.0
"""Kernels in the Triton interpreter."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blockpick.backend_api import KernelSource, Launch, Value, ordered_arguments


class InterpretedKernel:
    """One source in the interpreter. Its programs run one after another, so launch-order intrinsics are off (PDL), and
    ``INTERPRETED`` asks the source for the twin of what the interpreter can't do (bf16 products, NaN of e4m3fn).
    """

    def __init__(self, source: KernelSource, function: Any) -> None:
        self._source = source
        self._function = function
        twin = {"PDL": False, "INTERPRETED": True}
        self._constexprs = {name: twin.get(name, value) for name, value in source.constexprs.items()}

    def bind(self, fixed: Mapping[str, Value], dynamic: Sequence[str]) -> Launch:
        """Fix some arguments; see :class:`blockpick.backend_api.Kernel`."""
        values, positions = ordered_arguments(self._source.arguments, fixed, dynamic)

        def launch(grid: int, stream: int, *given: Value) -> None:
            for position, value in zip(positions, given, strict=True):
                values[position] = value
            arguments = [as_bytes(v, a.type) for v, a in zip(values, self._source.arguments, strict=True)]
            with warnings.catch_warnings():  # numpy reports the NaN and infinities that the contract allows
                warnings.simplefilter("ignore", RuntimeWarning)
                self._function[(grid,)](*arguments, **self._constexprs)

        return launch


def as_bytes(value: Value, kind: str) -> Value:
    """What the interpreter takes for a ``*u8`` argument: a view of the tensor's bytes."""
    if kind != "*u8":
        return value
    import torch

    return value.view(torch.uint8)


def sort_with_numpy() -> None:
    """Let numpy do what ``tl.sort`` and ``tl.topk`` do, in place of the library's bitonic network.

    The network takes seconds a row in the interpreter. Values are the same: both sort by value along the last
    dimension.
    """
    from triton.language import core, standard
    from triton.runtime.interpreter import TensorHandle

    def sort_impl(x: Any, k: Any = None, dim: Any = None, descending: Any = False) -> Any:
        k, descending = core._unwrap_if_constexpr(k), core._unwrap_if_constexpr(descending)
        data = np.sort(x.handle.data, axis=-1)
        if descending:
            data = data[..., ::-1]
        data = np.ascontiguousarray(data[..., :k])
        return core.tensor(TensorHandle(data, x.dtype.scalar), core.block_type(x.dtype.scalar, list(data.shape)))

    standard.sort_impl = sort_impl


@functools.cache
def leave_out_idle_work() -> None:
    """Spare the interpreter what changes nothing, half of its time here.

    It computes an overflow condition beside every 32-bit sum and product, for an assertion that exists in debug mode
    only; and each call of a device function replaces the language's functions, which the launch has replaced already.
    What a version of Triton does otherwise is left as it is.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_LangPatchScope"):
        replace = interpreter._patch_lang
        replaced: set[Any] = set()  # the modules whose functions a running launch replaced

        def replace_once(function: Any) -> Any:
            """Triton's ``_patch_lang``, that does nothing where the modules of ``function`` are replaced already."""
            modules = {m for m in function.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)}
            if modules <= replaced:
                return interpreter._LangPatchScope()
            scope = replace(function)
            restore = scope.restore
            replaced.update(modules)

            def restore_all() -> None:
                replaced.clear()
                restore()

            scope.restore = restore_all
            return scope

        interpreter._patch_lang = replace_once
