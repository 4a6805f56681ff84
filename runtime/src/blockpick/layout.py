# SPDX-License-Identifier: Apache-2.0
"""The paged index-K cache: bytes, shapes, strides, and the byte range of a page."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import UnsupportedConfigError

BLOCK_TOKENS = 128
HEAD_DIM = 128
CACHE_DTYPES = ("bf16", "e4m3fn", "nvfp4")
TOKEN_BYTES = {"bf16": 256, "e4m3fn": 128, "nvfp4": 72}
PAGE_SIZES = (128, 256)
SHARDS = (1, 2, 4, 8)
FORMAT_VERSION = 1  # of the stored bytes
QUANTISERS = {"bf16": "none", "e4m3fn": "cast-rne-sat448", "nvfp4": "amax6-e4m3-floor2^-9-e2m1-rne"}


@dataclass(frozen=True)
class CacheLayout:
    """Layout of one layer's index-K cache (one head of 128 dims).

    Parameters
    ----------
    dtype : {"bf16", "e4m3fn", "nvfp4"}
        ``bf16`` and ``e4m3fn`` store a token's 128 values in a row. ``nvfp4`` stores segments of up to 128 tokens: 64
        code bytes a token (low nibble = even dim), then 8 e4m3 scales a token, one per 16 dims; no global scale.
    page_size : {128, 256}
        Tokens of one page of the block table.
    shards : {1, 2, 4, 8}
        Ranks over which every page is spread; rank r stores rows ``[r * page_rows, (r + 1) * page_rows)``.

    Raises
    ------
    UnsupportedConfigError
        For any other value.

    Notes
    -----
    The NVFP4 page is the one of vLLM's MiniMax M3 index cache: 8192 code bytes and 1024 scale bytes for 128 tokens.
    """

    dtype: str
    page_size: int = 128
    shards: int = 1

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("dtype", self.dtype, CACHE_DTYPES), ("page_size", self.page_size, PAGE_SIZES),
            ("shards", self.shards, SHARDS),
        ):  # fmt: skip
            if value not in allowed or type(value) is not type(allowed[0]):
                raise UnsupportedConfigError(
                    f"CacheLayout: {name}={value!r} is not supported; supported: {', '.join(map(str, allowed))}"
                )

    @property
    def page_rows(self) -> int:
        """Tokens of a page that one rank stores."""
        return self.page_size // self.shards

    @property
    def segment_rows(self) -> int:
        """Tokens that are stored as one run of codes and scales."""
        return min(self.page_rows, BLOCK_TOKENS)

    @property
    def blocks_per_page(self) -> int:
        """128-token blocks of one page."""
        return self.page_size // BLOCK_TOKENS

    @property
    def page_bytes(self) -> int:
        """Payload bytes of one stored page."""
        return self.page_rows * TOKEN_BYTES[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of the cache tensor."""
        return {"bf16": torch.bfloat16, "e4m3fn": torch.float8_e4m3fn, "nvfp4": torch.uint8}[self.dtype]

    @property
    def query_dtype(self) -> torch.dtype:
        """Element type of the index queries that score this cache."""
        return torch.bfloat16 if self.dtype == "bf16" else torch.float8_e4m3fn

    @property
    def row_elements(self) -> int:
        """Size of the cache tensor's last dimension."""
        return 72 if self.dtype == "nvfp4" else HEAD_DIM

    def shape(self, num_pages: int) -> tuple[int, int, int]:
        """Shape of a cache of ``num_pages`` pages."""
        return num_pages, self.page_rows, self.row_elements

    def empty(self, num_pages: int, device: torch.device | str) -> torch.Tensor:
        """Allocate an uninitialised cache ``[num_pages, page_rows, 128 or 72]`` on ``device``."""
        return torch.empty(self.shape(num_pages), dtype=self.torch_dtype, device=device)

    def page_range(self, cache: torch.Tensor, page: int) -> tuple[int, int]:
        """Byte range ``(offset, size)`` of a stored page, relative to the cache's first byte: one run, to be moved
        whole.
        """
        self.check(cache)
        if isinstance(page, bool) or not isinstance(page, int):
            raise TypeError(f"page: must be an int, is {type(page).__name__}")
        if not 0 <= page < cache.shape[0]:
            raise ValueError(f"page: {page} is outside the cache of {cache.shape[0]} pages")
        return page * page_stride_bytes(cache), self.page_bytes

    def stored_tokens(self, shard: int) -> range:
        """Tokens of every page that rank ``shard`` stores, in stored order: ``page_rows`` of ``range(page_size)``.

        Raises
        ------
        TypeError, ValueError
            When ``shard`` is no int, or outside ``0..shards - 1``.
        """
        self.check_shard(shard)
        return range(shard * self.page_rows, (shard + 1) * self.page_rows)

    def shard_ranges(self, shard: int) -> list[tuple[int, int]]:
        """Byte ranges ``(offset, size)`` of the replicated page whose bytes, one after the other, are the page that
        rank ``shard`` stores.

        Parameters
        ----------
        shard : int
            The rank, ``0 <= shard < shards``.

        Returns
        -------
        list of (int, int)
            In stored order; offsets in bytes from the first byte of a page of the same layout with ``shards=1``. The
            sizes add up to ``page_bytes``, and the ranges of all ranks cover the replicated page once. ``bf16`` and
            ``e4m3fn`` have one range; ``nvfp4`` has codes and scales apart, or one range where they lie together.

        Raises
        ------
        TypeError, ValueError
            When ``shard`` is no int, or outside ``0..shards - 1``.
        """
        tokens = self.stored_tokens(shard)
        if self.dtype != "nvfp4":
            return [(tokens.start * TOKEN_BYTES[self.dtype], self.page_bytes)]
        ranges: list[tuple[int, int]] = []
        for first in tokens[:: self.segment_rows]:
            block, row = divmod(first, BLOCK_TOKENS)
            base = block * BLOCK_TOKENS * 72
            for offset, size in (
                (base + row * 64, self.segment_rows * 64), (base + BLOCK_TOKENS * 64 + row * 8, self.segment_rows * 8),
            ):  # fmt: skip
                if ranges and sum(ranges[-1]) == offset:
                    ranges[-1] = (ranges[-1][0], ranges[-1][1] + size)
                else:
                    ranges.append((offset, size))
        return ranges

    def check_shard(self, shard: int, name: str = "shard") -> None:
        """Raise ``TypeError`` or ``ValueError`` naming the argument ``name`` unless ``shard`` is a rank of this
        layout.
        """
        if isinstance(shard, bool) or not isinstance(shard, int):
            raise TypeError(f"{name}: must be an int, is {type(shard).__name__}")
        if not 0 <= shard < self.shards:
            raise ValueError(f"{name}: must be 0..{self.shards - 1} (shards={self.shards}), is {shard}")

    def fingerprint(self) -> str:
        """What two instances must agree on before one's pages are moved to the other, in one comparable line.

        Version of the format, dtype, tokens of a page, shards, rows of a stored page and of a segment, bytes of a page,
        and the quantiser's rule. Compare it before any transfer (:meth:`check_fingerprint`): pages of another
        layout would be read as noise.
        """
        return (
            f"blockpick-index-k/{FORMAT_VERSION} dtype={self.dtype} page_size={self.page_size} shards={self.shards} "
            f"page_rows={self.page_rows} segment_rows={self.segment_rows} page_bytes={self.page_bytes} "
            f"quantiser={QUANTISERS[self.dtype]}"
        )

    def check_fingerprint(self, other: str) -> None:
        """Raise unless ``other``, the fingerprint of another instance's layout, is this layout's.

        Raises
        ------
        TypeError
            When ``other`` is no str.
        UnsupportedConfigError
            Naming every field that differs, with both values.
        """
        if not isinstance(other, str):
            raise TypeError(f"other: must be a fingerprint (str), is {type(other).__name__}")
        mine = self.fingerprint()
        if other == mine:
            return
        theirs, own = fingerprint_fields(other), fingerprint_fields(mine)
        differing = [
            f"{name}={theirs.get(name, 'missing')} there, {own.get(name, 'missing')} here"
            for name in (*own, *(name for name in theirs if name not in own)) if theirs.get(name) != own.get(name)
        ]  # fmt: skip
        raise UnsupportedConfigError(
            f"CacheLayout: pages can't be moved between these layouts: {'; '.join(differing) or repr(other)}"
        )

    def check(self, cache: torch.Tensor, name: str = "cache") -> None:
        """Raise ``TypeError`` or ``ValueError`` naming the argument ``name`` unless the tensor has this layout.

        The page interior must be dense; the page stride may be padded to any multiple of 16 bytes.
        """
        if not isinstance(cache, torch.Tensor):
            raise TypeError(f"{name}: must be a torch.Tensor, is {type(cache).__name__}")
        if cache.dtype != self.torch_dtype:
            raise TypeError(f"{name}: dtype must be {self.torch_dtype} for {self.dtype}, is {cache.dtype}")
        if cache.dim() != 3 or cache.shape[1:] != self.shape(1)[1:]:
            raise ValueError(
                f"{name}: shape must be [pages, {self.page_rows}, {self.row_elements}] for page_size {self.page_size} "
                f"and shards {self.shards}, is {list(cache.shape)}"
            )
        if cache.shape[0] < 1:
            raise ValueError(f"{name}: must hold at least one page, has 0")
        if cache.stride(2) != 1 or cache.stride(1) != self.row_elements:
            raise ValueError(
                f"{name}: a page's interior must be dense, strides [*, {self.row_elements}, 1]; they are "
                f"{list(cache.stride())}"
            )
        stride = page_stride_bytes(cache)
        if cache.shape[0] > 1 and (stride < self.page_bytes or stride % 16):
            raise ValueError(
                f"{name}: page stride must be a multiple of 16 bytes and at least {self.page_bytes}, is {stride}"
            )
        if cache.data_ptr() % 16:
            raise ValueError(
                f"{name}: must start at a multiple of 16 bytes, starts {cache.data_ptr() % 16} bytes behind one"
            )


def page_stride_bytes(cache: torch.Tensor) -> int:
    """Distance of two pages in bytes."""
    return cache.stride(0) * cache.element_size()


def fingerprint_fields(fingerprint: str) -> dict[str, str]:
    """Fields of a fingerprint by name; its first word is the ``format``."""
    head, *fields = fingerprint.split(" ")
    pairs = (field.partition("=") for field in fields)
    return {"format": head} | {name: value for name, equals, value in pairs if equals}


def check_layout(layout: object, name: str = "layout") -> None:
    """Raise ``TypeError`` naming the argument ``name`` unless ``layout`` is a :class:`CacheLayout`."""
    if not isinstance(layout, CacheLayout):
        raise TypeError(f"{name}: must be a CacheLayout, is {type(layout).__name__}")
