# SPDX-License-Identifier: Apache-2.0
"""insert: quantise index keys and store them into the paged cache by slot."""

from __future__ import annotations

import functools
import threading

import torch

from ..backend_api import Launch
from ..checks import check_aligned, check_int, check_last_stride, check_not_capturing, check_tensor
from ..config import BACKENDS
from ..device import current_stream, describe, on_device
from ..dispatch import Choice, Need, find_package, interpreted_arch, load, pick_route, select
from ..errors import UnsupportedConfigError
from ..layout import HEAD_DIM, CacheLayout, check_layout, page_stride_bytes
from ..manifest import KernelPackage

ARGS = {  # what comes with every launch, by role
    "insert": ("key_ptr", "slot_mapping_ptr", "cache_ptr", "stride_key", "stride_page", "num_tokens", "num_slots"),
    "qk_norm_rope_insert": (
        "qkv_ptr", "q_weight_ptr", "k_weight_ptr", "cos_sin_ptr", "positions_ptr", "slot_mapping_ptr", "cache_ptr",
        "q_out_ptr", "stride_qkv", "stride_cos", "stride_q_t", "stride_q_h", "stride_page", "q_column", "k_column",
        "num_tokens", "num_positions", "num_slots",
    ),
}  # fmt: skip
_per_thread = threading.local()  # a launch owns its packed arguments, so every thread has its own


def insert(
    layout: CacheLayout, cache: torch.Tensor, index_k: torch.Tensor, slot_mapping: torch.Tensor, *, shard: int = 0,
    backend: str = "auto", allow_jit: bool = False, arch: str | None = None,
) -> None:  # fmt: skip
    """Quantise index keys to the cache's dtype and store them by slot.

    Slot s is token ``s % page_size`` of page ``s // page_size``. Negative slots are skipped, as are slots beyond the
    cache and, in a sharded layout, the tokens of other ranks.

    Parameters
    ----------
    layout : CacheLayout
        The cache's layout.
    cache : torch.Tensor
        The cache; written in place.
    index_k : torch.Tensor
        bf16 [T, 128], last stride 1, row stride a multiple of 16 bytes: already normalised and rotated.
    slot_mapping : torch.Tensor
        int64 [T], contiguous. Two tokens with one slot: either may win.
    shard : int
        This rank's shard, ``0 <= shard < layout.shards``.
    backend, allow_jit, arch
        As for :class:`blockpick.Indexer`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, before anything is launched or written.
    RuntimeError
        When a thread's first insert of a configuration, which loads the kernel, falls into a graph capture.

    Notes
    -----
    e4m3fn: nearest even, saturating at 448, NaN as 0x7F. NVFP4, per 16 dims: scale = e4m3(clamp(amax / 6, 2^-9, 448)),
    codes = e2m1(x / scale), nearest even, zero as +0; infinities count as the largest finite bf16; a group with a NaN
    stores scale 0x7F and codes 0. The rule is that of vLLM's NVFP4 cache writer.
    """
    check_backend("insert", backend)
    _check(layout, cache, index_k, slot_mapping, shard)
    if index_k.shape[0] == 0:
        return
    if runs_reference(backend, cache.device):
        from ..testing.reference import insert_reference

        insert_reference(layout, cache, index_k, slot_mapping, shard)
        return
    launch, tokens = find_launch("insert", layout, shard, cache.device, backend, allow_jit, arch)
    count = index_k.shape[0]
    with on_device(cache.device):
        launch(
            -(-count // tokens), current_stream(cache.device), index_k, slot_mapping, cache, index_k.stride(0),
            page_stride_bytes(cache), count, cache.shape[0] * layout.page_size,
        )  # fmt: skip


def _check(
    layout: CacheLayout, cache: torch.Tensor, index_k: torch.Tensor, slot_mapping: torch.Tensor, shard: int
) -> None:
    check_layout(layout)
    layout.check(cache)
    check_tensor("index_k", index_k, torch.bfloat16, 2, cache.device, f"[T, {HEAD_DIM}]")
    check_tensor("slot_mapping", slot_mapping, torch.int64, 1, cache.device, "[T]")
    if index_k.shape[1] != HEAD_DIM:
        raise ValueError(f"index_k: must be [T, {HEAD_DIM}], has shape {list(index_k.shape)}")
    if slot_mapping.shape[0] != index_k.shape[0]:
        raise ValueError(
            f"slot_mapping: must have {index_k.shape[0]} entries like index_k, has {slot_mapping.shape[0]}"
        )
    check_last_stride("index_k", index_k)
    check_last_stride("slot_mapping", slot_mapping)
    check_aligned("index_k", index_k, 16)
    check_int("shard", shard, 0, layout.shards - 1, f"layout.shards={layout.shards}")


def check_backend(call: str, backend: str) -> None:
    """A backend there is."""
    if backend not in BACKENDS:
        raise UnsupportedConfigError(f"{call}: backend={backend!r} is not supported; supported: {', '.join(BACKENDS)}")


def runs_reference(backend: str, device: torch.device) -> bool:
    """Whether ``backend`` means the reference for tensors on ``device``."""
    return backend == "reference" or (backend == "auto" and device.type == "cpu")


def find_launch(
    role: str, layout: CacheLayout, shard: int, device: torch.device, backend: str, allow_jit: bool, arch: str | None,
    **fixed: float,
) -> tuple[Launch, int]:  # fmt: skip
    """This thread's launch of ``role`` for the configuration, and the tokens a program takes."""
    if not hasattr(_per_thread, "launch"):
        _per_thread.launch = functools.cache(_bind)
    return _per_thread.launch(role, layout, shard, device, backend, allow_jit, arch, **fixed)  # type: ignore[no-any-return]


def _bind(
    role: str, layout: CacheLayout, shard: int, device: torch.device, backend: str, allow_jit: bool, arch: str | None,
    **fixed: float,
) -> tuple[Launch, int]:  # fmt: skip
    check_not_capturing(device, f"the first {role} of a configuration, which loads its kernel,")
    info = None
    if backend == "interpreter":
        route, arch = "interpreter", interpreted_arch(arch)
    else:
        info = describe(device, f"{role}: backend={backend!r}: ")
        route, arch = backend if backend in ("aot", "jit") else pick_route(info, allow_jit)[0], info.arch
    choice = select_insert(find_package(arch), layout, route, role)
    fixed |= {
        "page_size": layout.page_size, "page_rows": layout.page_rows, "segment_rows": layout.segment_rows,
        "shard": shard,
    }  # fmt: skip
    return load(choice.variant, route, info).bind(fixed, ARGS[role]), int(choice.variant.launch["tokens"])


def select_insert(package: KernelPackage, layout: CacheLayout, route: str, role: str = "insert") -> Choice:
    """Choose the kernel of ``role`` that stores into ``layout`` from one package; needs no device.

    Raises
    ------
    KernelNotInstalledError
        When there is none; the message lists every candidate with its reason.
    """
    return select(package, role, [Need("cache", layout.dtype)], route)
