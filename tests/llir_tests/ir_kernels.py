# SPDX-License-Identifier: Apache-2.0
"""Small kernels around one snippet of LLVM IR: one element of every input and output for each work-item."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from llir import Kernel

GLOBAL, LDS = "ptr addrspace(1)", "ptr addrspace(3)"
NUMPY = {
    "i8": np.uint8, "i16": np.uint16, "i32": np.uint32, "i64": np.uint64,
    "half": np.float16, "bfloat": np.uint16, "float": np.float32, "double": np.float64,
}  # fmt: skip
SENTINEL = 0xA5  # every byte of an output that the kernel does not write
INPUT_NAMES, OUTPUT_NAMES, INTEGER_NAMES = "abcdefg", "rstuvw", "nm"
BARRIER = """
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
"""


def _split(text: str) -> list[str]:
    """An argument list's elements: commas inside brackets do not divide."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "<({[") - (char in ">)}]")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def _type(argument: str) -> str:
    """The type at the start of an argument."""
    if argument[0] in "<{[":
        depth = 0
        for place, char in enumerate(argument):
            depth += (char in "<{[") - (char in ">}]")
            if not depth:
                return argument[: place + 1]
    found = re.match(r"ptr addrspace\(\d+\)|\w+", argument)
    assert found, argument
    return found.group()


def declarations(text: str) -> str:
    """One declaration for each intrinsic that the text calls."""
    declared: dict[str, str] = {}
    for found in re.finditer(r"call (?:reassoc |fast )?(.+?) @(llvm\.[\w.]+)\(", text):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        types = ", ".join(_type(argument) for argument in _split(text[found.end() : end - 1]))
        declared[found[2]] = f"declare {found[1]} @{found[2]}({types})\n"
    return "".join(declared.values())


def module(parameters: str, body: str, name: str = "k") -> str:
    """A module with one kernel; the body's entry block is called entry."""
    text = (
        "@global_smem = external addrspace(3) global [0 x i8], align 16\n\n"
        f"define amdgpu_kernel void @{name}({parameters}) {{\nentry:\n{body}\n}}\n\n"
    )
    return text + declarations(text)


def lane_module(body: str, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """Loads %a, %b, ... of this work-item, runs the body, stores %r, %s, ... in the body's last block."""
    head = "  %tid = tail call i32 @llvm.amdgcn.workitem.id.x()\n  %index = zext i32 %tid to i64\n"
    tail = ""
    parameters = []
    for name, kind in zip(INPUT_NAMES, inputs, strict=False):
        parameters.append(f"{GLOBAL} %in_{name}")
        head += f"  %at_{name} = getelementptr {kind}, {GLOBAL} %in_{name}, i64 %index\n"
        head += f"  %{name} = load {kind}, {GLOBAL} %at_{name}, align {alignment(kind)}\n"
    for name, kind in zip(OUTPUT_NAMES, outputs, strict=False):
        parameters.append(f"{GLOBAL} %out_{name}")
        tail += f"  %at_{name} = getelementptr {kind}, {GLOBAL} %out_{name}, i64 %index\n"
        tail += f"  store {kind} %{name}, {GLOBAL} %at_{name}, align {alignment(kind)}\n"
    parameters += [f"i32 %{name}" for name in INTEGER_NAMES]
    return module(", ".join(parameters), f"{head}{body}\n{tail}  ret void")


def shape(kind: str) -> tuple[Any, int]:
    """The numpy type of one element and the number of elements."""
    vector = re.fullmatch(r"<(\d+) x (\w+)>", kind)
    return (NUMPY[vector[2]], int(vector[1])) if vector else (NUMPY[kind], 1)


def width(kind: str) -> int:
    """Bytes of a value."""
    element, count = shape(kind)
    return np.dtype(element).itemsize * count


def alignment(kind: str) -> int:
    """What the helpers promise for a value: numpy aligns an array to 16 bytes and no more."""
    return min(width(kind), 16)


def lanes(
    body: str,
    inputs: Sequence[tuple[str, Any]] = (),
    outputs: Sequence[str] = ("i32",),
    *,
    ints: Sequence[int] = (0, 0),
    arch: str = "gfx942",
    threads: int = 64,
    **run: Any,
) -> Any:
    """Runs the body on every work-item of one workgroup; the outputs, as one array or a list of arrays."""
    arrays = []
    for kind, values in inputs:
        element, count = shape(kind)
        array = np.ascontiguousarray(values)
        if array.dtype.itemsize != np.dtype(element).itemsize or array.dtype.kind == "O":
            array = array.astype(np.int64).astype(element)
        assert array.size == threads * count, (kind, array.shape)
        arrays.append(array.reshape(-1))
    results = []
    for kind in outputs:
        element, count = shape(kind)
        filled = np.full(threads * count * np.dtype(element).itemsize, SENTINEL, np.uint8).view(element)
        results.append(filled)
    text = lane_module(body, [kind for kind, _ in inputs], outputs)
    Kernel(text, "k", arch=arch).run([*arrays, *results, *ints], threads=threads, **run)
    shaped = [
        array.reshape(threads, count) if (count := shape(kind)[1]) > 1 else array
        for kind, array in zip(outputs, results, strict=True)
    ]
    return shaped[0] if len(shaped) == 1 else shaped


def cycle(values: Sequence[Any], dtype: Any, threads: int = 64) -> np.ndarray:
    """The values, repeated until each work-item has one."""
    return np.resize(np.array(values, dtype), threads)


def under(condition: str, snippet: str, value: str, kind: str = "i32", other: str = "-1") -> str:
    """Runs the snippet where %cond is true; %r is its value there, and `other` in the remaining lanes."""
    return f"""
  {condition}
  br i1 %cond, label %inside, label %end
inside:
{snippet}
  br label %end
end:
  %r = phi {kind} [ {value}, %inside ], [ {other}, %entry ]
"""


def bits32(values: Any) -> np.ndarray:
    """float32 values as their bit patterns."""
    return np.asarray(values, np.float32).view(np.uint32)


def same_floats(got: np.ndarray, expected: Any) -> bool:
    """Equal bits, or NaN in both: a NaN's payload is open."""
    expected = np.asarray(expected, got.dtype)
    plain = {2: np.uint16, 4: np.uint32, 8: np.uint64}[got.dtype.itemsize]
    return bool(np.all((got.view(plain) == expected.view(plain)) | (np.isnan(got) & np.isnan(expected))))


def float8(code: int, kind: str) -> float:
    """What an 8-bit float means.

    OCP "8-bit Floating Point Specification" 1.0, tables 1 and 2, for e4m3fn and e5m2; CDNA3 ISA guide, section on
    the FP8 and BF8 formats, for the *fnuz ones: bias 8 and 16, no negative zero, no infinity, NaN is 0x80.
    """
    mantissa_bits, bias = {"e4m3fn": (3, 7), "e4m3fnuz": (3, 8), "e5m2": (2, 15), "e5m2fnuz": (2, 16)}[kind]
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    if kind.endswith("fnuz") and code == 0x80:
        return float("nan")
    if kind == "e4m3fn" and code & 0x7F == 0x7F:
        return float("nan")
    if kind == "e5m2" and exponent == 31:
        return sign * float("inf") if not mantissa else float("nan")
    if not exponent:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


FLOAT8 = {"gfx942": ("e4m3fnuz", "e5m2fnuz"), "gfx950": ("e4m3fn", "e5m2")}  # what fp8 and bf8 mean
