# SPDX-License-Identifier: Apache-2.0
"""reshard: copy an index cache between replicated and sharded layouts, and between numbers of shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from .checks import check_apart, check_not_capturing
from .errors import UnsupportedConfigError
from .layout import CacheLayout, check_layout

CHUNK_BYTES = 32 << 20  # of one copy: bounds what gathered pages and copies between devices hold meanwhile


def reshard(
    source: CacheLayout, caches: Mapping[int, torch.Tensor], target: CacheLayout, outs: Mapping[int, torch.Tensor],
    pages: Sequence[int] | torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Copy the rows that ``caches`` hold and ``outs`` store from one layout to another, bit for bit.

    Nothing else is written: neither other pages, nor the padding between pages, nor rows that no given source holds.
    So the parts of a page may come one after the other, as they arrive. Pages keep their numbers.

    Parameters
    ----------
    source, target : CacheLayout
        Layouts of the same dtype and page size, with any shards; ``shards=1`` is the replicated cache.
    caches : mapping of int to torch.Tensor
        By shard of ``source``, its cache ``[N, source.page_rows, 128 or 72]``; the shards that are here, at least one.
    outs : mapping of int to torch.Tensor
        By shard of ``target``, the cache to write, ``[N, target.page_rows, 128 or 72]``; the shards that are wanted, at
        least one. Each needs memory of its own. Caches and outs may be on different devices.
    pages : sequence of int, or torch.Tensor, optional
        Page numbers to convert: ints, or int32 or int64 [M] on any device. Without it all pages, and then every cache
        and out must have the same number of them.

    Raises
    ------
    UnsupportedConfigError
        When the layouts differ in more than their shards.
    TypeError, ValueError
        Naming the argument. Like all refusals, before anything is written.
    RuntimeError
        Inside a graph capture.

    Notes
    -----
    Runs on the current streams and reads ``pages`` on the host: for transfers, not for serving's hot path. Gathered
    pages and copies between devices take up to 32 MiB at a time.
    """
    numbers = check_arguments(source, caches, target, outs, pages)
    for (shard, cache), (out_shard, out) in itertools.product(caches.items(), outs.items()):
        for first, out_first, size in common_bytes(source.shard_ranges(shard), target.shard_ranges(out_shard)):
            run, out_run = page_bytes(cache)[:, first : first + size], page_bytes(out)[:, out_first : out_first + size]
            copy_run(run, out_run, numbers)


def common_bytes(ranges: list[tuple[int, int]], other: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Runs of bytes of the replicated page that two stored pages both have: offset in the one page, in the other, and
    size; each page is given by its ``shard_ranges``.
    """
    place = 0
    for offset, size in ranges:
        other_place = 0
        for other_offset, other_size in other:
            low, high = max(offset, other_offset), min(offset + size, other_offset + other_size)
            if low < high:
                yield place + low - offset, other_place + low - other_offset, high - low
            other_place += other_size
        place += size


def page_bytes(cache: torch.Tensor) -> torch.Tensor:
    """The payload of every page as uint8 [N, page_bytes], a view; padding between pages is not in it."""
    return cache.view(torch.uint8).view(cache.shape[0], -1)


def copy_run(run: torch.Tensor, out: torch.Tensor, numbers: list[int] | None) -> None:
    """Copy ``run`` [N, bytes] to ``out`` [N, bytes], all pages or those of ``numbers``, a chunk of pages at a time."""
    step = max(1, CHUNK_BYTES // run.shape[1])
    for first in range(0, run.shape[0] if numbers is None else len(numbers), step):
        if numbers is None:
            out[first : first + step].copy_(run[first : first + step])
        else:
            chunk = torch.tensor(numbers[first : first + step])
            gathered = run.index_select(0, chunk.to(run.device)).to(out.device)
            out.index_copy_(0, chunk.to(out.device), gathered)


def check_arguments(
    source: CacheLayout, caches: Mapping[int, torch.Tensor], target: CacheLayout, outs: Mapping[int, torch.Tensor],
    pages: Sequence[int] | torch.Tensor | None,
) -> list[int] | None:  # fmt: skip
    """Arguments that can be converted; the page numbers, None for all."""
    check_layout(source, "source")
    check_layout(target, "target")
    if (source.dtype, source.page_size) != (target.dtype, target.page_size):
        raise UnsupportedConfigError(
            f"reshard: source and target must have the same dtype and page_size; source has dtype={source.dtype} "
            f"page_size={source.page_size}, target has dtype={target.dtype} page_size={target.page_size}"
        )
    named = named_shards("caches", source, caches)
    written = named_shards("outs", target, outs)
    for place, (name, out) in enumerate(written):
        for other_name, other in named + written[:place]:
            if out.device == other.device:
                check_apart(name, out, other_name, other)
    for device in {tensor.device for _, tensor in named + written}:
        check_not_capturing(device, "reshard")
    return check_pages(pages, named + written)


def named_shards(
    argument: str, layout: CacheLayout, shards: Mapping[int, torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """The caches of a mapping by shard, each of the layout and with the name that messages give it."""
    if not isinstance(shards, Mapping):
        raise TypeError(f"{argument}: must be a mapping from shard to cache, is {type(shards).__name__}")
    if not shards:
        raise ValueError(f"{argument}: must hold the cache of at least one shard, is empty")
    for shard, cache in shards.items():
        layout.check_shard(shard, f"{argument}: key")
        layout.check(cache, f"{argument}[{shard}]")
    return [(f"{argument}[{shard}]", cache) for shard, cache in shards.items()]


def check_pages(pages: Sequence[int] | torch.Tensor | None, caches: list[tuple[str, torch.Tensor]]) -> list[int] | None:
    """Page numbers that every cache has, on the host; None for all, when the caches have equally many."""
    first_name, first = caches[0]
    if pages is None:
        for name, cache in caches:
            if cache.shape[0] != first.shape[0]:
                raise ValueError(
                    f"{name}: must have {first.shape[0]} pages like {first_name}, has {cache.shape[0]}; or name the "
                    "pages to convert in pages="
                )
        return None
    numbers = page_numbers(pages)
    for name, cache in caches:
        for page in (min(numbers), max(numbers)) if numbers else ():
            if not 0 <= page < cache.shape[0]:
                raise ValueError(f"pages: {page} is outside {name} of {cache.shape[0]} pages")
    return numbers


def page_numbers(pages: Sequence[int] | torch.Tensor) -> list[int]:
    """Page numbers of a tensor or sequence, as ints on the host."""
    wanted = "must be a sequence of ints or an int32 or int64 tensor [M]"
    if isinstance(pages, torch.Tensor):
        if pages.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"pages: {wanted}, has dtype {pages.dtype}")
        if pages.dim() != 1:
            raise ValueError(f"pages: {wanted}, has shape {list(pages.shape)}")
        numbers: list[int] = pages.tolist()
        return numbers
    if not isinstance(pages, Sequence):
        raise TypeError(f"pages: {wanted}, is {type(pages).__name__}")
    for page in pages:
        if isinstance(page, bool) or not isinstance(page, int):
            raise TypeError(f"pages: {wanted}, holds {page!r}")
    return list(pages)
