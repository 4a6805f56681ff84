# SPDX-License-Identifier: Apache-2.0
"""Checks of tensors at the public surface: each raises before anything is launched and names the argument."""

from __future__ import annotations

import math
import numbers

import torch

from .device import on_device
from .errors import UnsupportedArchError


def check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, dims: int, device: torch.device, what: str
) -> None:
    """Raise unless ``tensor`` is a ``dims``-dimensional tensor of ``dtype`` on ``device``; ``what`` is its shape in
    words.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor {what}, is {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: dtype must be {dtype}, is {tensor.dtype}")
    if tensor.dim() != dims:
        raise ValueError(f"{name}: must be {what}, has shape {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name}: must be on {device}, is on {tensor.device}")


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """Raise unless the last dimension is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: the last stride must be 1, strides are {list(tensor.stride())}")


def check_aligned(name: str, tensor: torch.Tensor, alignment: int) -> None:
    """Raise unless the base address and every stride but the last are multiples of ``alignment`` bytes."""
    size = tensor.element_size()
    for dim in range(tensor.dim() - 1):
        if tensor.shape[dim] > 1 and tensor.stride(dim) * size % alignment:
            raise ValueError(
                f"{name}: stride {dim} must be a multiple of {alignment} bytes, is {tensor.stride(dim) * size}"
            )
    if tensor.data_ptr() % alignment:
        raise ValueError(
            f"{name}: must start at a multiple of {alignment} bytes, starts {tensor.data_ptr() % alignment} bytes "
            "behind one"
        )


def check_distinct_elements(name: str, tensor: torch.Tensor) -> None:
    """Raise where several elements share a place: a dimension is expanded (stride 0), or rows overlap."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride == 0:
            dim = list(zip(tensor.shape, tensor.stride(), strict=True)).index((size, 0))
            raise ValueError(f"{name}: dimension {dim} is expanded (stride 0); every element needs a place of its own")
        if size > 1 and stride <= reach and places_repeat(tensor):
            raise ValueError(
                f"{name}: elements overlap, shape {list(tensor.shape)} has strides {list(tensor.stride())}; every "
                "element needs a place of its own"
            )
        reach += (size - 1) * stride


def places_repeat(tensor: torch.Tensor) -> bool:
    """Whether two elements share a place, by listing all places: for the rare strides that interleave."""
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return bool(places.unique().numel() < places.numel())


def check_apart(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise where ``tensor`` and ``other``, whose first dimension is a row of each, share memory.

    Tensors whose bytes interleave count as apart when their rows have one stride and lie beside each other.
    """
    if not tensor.numel() or not other.numel():
        return
    (first, row, stride, end), (other_first, other_row, other_stride, other_end) = map(extent, (tensor, other))
    if end <= other_first or other_end <= first:
        return
    gap = (other_first - first) % stride if stride else 0
    if stride == other_stride and row <= gap and gap + other_row <= stride:
        return
    raise ValueError(f"{name}: shares memory with {other_name}; it needs memory of its own")


def extent(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """First byte, bytes from a row's first to its last, bytes from row to row, and the byte behind the last."""
    size = tensor.element_size()
    row = sum((n - 1) * stride for n, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)) * size + size
    stride = tensor.stride(0) * size
    return tensor.data_ptr(), row, stride, tensor.data_ptr() + (tensor.shape[0] - 1) * stride + row


def check_int(name: str, value: object, low: int, high: int, hint: str) -> None:
    """Raise unless ``value`` is an integer (no bool) in ``low..high``; ``hint`` says where the bounds come from."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: must be {low}..{high} ({hint}), is {value!r}")


def check_finite(name: str, value: object) -> None:
    """Raise unless ``value`` is a finite number (no bool) that is at least 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: must be a number, is {type(value).__name__}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: must be finite and at least 0, is {value!r}")


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is in a CUDA or HIP graph capture."""
    if device.type != "cuda":
        return False
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()


def check_not_capturing(device: torch.device, call: str) -> None:
    """Raise inside a CUDA or HIP graph capture."""
    if is_capturing(device):
        raise RuntimeError(f"{call}: not allowed inside a graph capture; call it before the capture and every replay")


def resolve_device(device: torch.device | str) -> torch.device:
    """``device`` with its index filled in.

    Raises
    ------
    UnsupportedArchError
        When a GPU is asked for and torch sees none.
    """
    resolved = torch.device(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedArchError(
            f"device {device}: torch {torch.__version__} sees no GPU. Install a torch build for this machine's GPU, "
            "or use device='cpu' (the reference, or backend='interpreter')."
        )
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
