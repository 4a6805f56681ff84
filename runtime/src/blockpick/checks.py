# SPDX-License-Identifier: Apache-2.0
"""Checks of tensors at the public surface: each raises before anything is launched and names the argument."""

from __future__ import annotations

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
    """Raise where a dimension is expanded (stride 0): several elements would share one place."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            raise ValueError(f"{name}: dimension {dim} is expanded (stride 0); every element needs a place of its own")


def check_int(name: str, value: object, low: int, high: int, hint: str) -> None:
    """Raise unless ``value`` is an integer (no bool) in ``low..high``; ``hint`` says where the bounds come from."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: must be {low}..{high} ({hint}), is {value!r}")


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
