# SPDX-License-Identifier: Apache-2.0
"""Kernels in the Triton interpreter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from blockpick.backend_api import KernelSource, Launch, Value, ordered_arguments


class InterpretedKernel:
    """One source in the interpreter. Its programs run one after another, so launch-order intrinsics are off (PDL), and
    ``INTERPRETED`` asks the source for the twin of what the interpreter can't do (bf16 products).
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


def reduce_xor_with_numpy() -> None:
    """Make the interpreter reduce by XOR with numpy instead of element by element.

    ``tl.sort`` and ``tl.topk`` reduce by XOR in every step, which takes seconds a row otherwise. The result is the
    same.
    """
    from triton.language import standard
    from triton.runtime.interpreter import ReduceOps

    if getattr(ReduceOps.apply_impl, "reduces_xor", False):
        return
    slow: Callable[[Any, Any], Any] = ReduceOps.apply_impl

    def apply_impl(self: Any, input: Any) -> Any:
        if self.combine_fn is standard._xor_combine and self.axis is not None and len(input) == 1:
            data = np.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(data, input[0].dtype)
        return slow(self, input)

    apply_impl.reduces_xor = True  # type: ignore[attr-defined]
    ReduceOps.apply_impl = apply_impl
