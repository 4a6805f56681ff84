# SPDX-License-Identifier: Apache-2.0
"""The configuration of an indexer, checked once at construction, and the memory that it stands for."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UnsupportedConfigError
from .layout import BLOCK_TOKENS, CacheLayout

ORDERS = ("score", "ascending", "local_last")  # index = the kernels' code
OUT_LAYOUTS = ("thk", "htk")
EMPTY_ROWS = ("minus_one", "block_zero")
ROUNDINGS = ("exact", "e4m3")
NUMERICS = ("strict", "fp8")
BACKENDS = ("auto", "aot", "jit", "interpreter", "reference")
NUM_HEADS = (1, 2, 4)
MAX_TOPK = 64
MAX_QUERY_LEN = 8
MAX_BLOCKS = 65534
MAX_PREFILL_TOKENS = 1 << 24
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class IndexerConfig:
    """What an indexer computes and the maxima it is sized for; see :class:`blockpick.Indexer` for the fields.

    Raises
    ------
    UnsupportedConfigError
        For anything outside what blockpick computes; the message names the field and what is supported.
    """

    layout: CacheLayout
    num_heads: int = 1
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    max_requests: int = 256
    max_query_len: int = 1
    max_seq_len: int = 1 << 20
    order: str = "score"
    out_layout: str = "thk"
    empty_row: str = "minus_one"
    nvfp4_rounding: str | None = None
    slots: int = 1
    max_prefill_tokens: int = 0
    workspace_bytes: int = 1 << 28
    prefill_numerics: str | None = None
    topk_every: int = 1
    topk_offset: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.layout, CacheLayout):
            raise TypeError(f"Indexer: layout must be a CacheLayout, is {type(self.layout).__name__}")

        def one_of(name: str, allowed: tuple[object, ...]) -> None:
            value = getattr(self, name)
            if value not in allowed or type(value) not in {type(choice) for choice in allowed}:
                raise UnsupportedConfigError(
                    f"Indexer: {name}={value!r} is not supported; supported: {', '.join(map(str, allowed))}"
                )

        def between(name: str, low: int, high: int, unit: str = "") -> None:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise UnsupportedConfigError(
                    f"Indexer: {name}={value!r} is not supported; supported: {low}..{high}{unit}"
                )

        one_of("num_heads", NUM_HEADS)
        one_of("order", ORDERS)
        one_of("out_layout", OUT_LAYOUTS)
        one_of("empty_row", EMPTY_ROWS)
        one_of("nvfp4_rounding", (None, *ROUNDINGS))
        one_of("prefill_numerics", (None, *NUMERICS))
        between("topk", 1, MAX_TOPK)
        between("init_blocks", 0, MAX_TOPK)
        between("local_blocks", 0, MAX_TOPK)
        between("max_requests", 1, 65536)
        between("max_query_len", 1, MAX_QUERY_LEN)
        between("max_seq_len", 1, MAX_BLOCKS * BLOCK_TOKENS, f" ({MAX_BLOCKS} blocks of {BLOCK_TOKENS} tokens)")
        between("slots", 1, 16)
        between("max_prefill_tokens", 0, MAX_PREFILL_TOKENS)
        between("workspace_bytes", 1, 1 << 40)
        between("topk_every", 1, 1 << 16)
        between("topk_offset", 0, 1 << 16)
        if self.init_blocks + self.local_blocks > self.topk:
            raise UnsupportedConfigError(
                f"Indexer: init_blocks={self.init_blocks} + local_blocks={self.local_blocks} > topk={self.topk}; "
                "forced blocks must fit into topk"
            )
        if self.order == "local_last" and (self.init_blocks, self.local_blocks) != (0, 1):
            raise UnsupportedConfigError(
                "Indexer: order='local_last' needs init_blocks=0 and local_blocks=1, is "
                f"{self.init_blocks} and {self.local_blocks}"
            )
        if self.nvfp4_rounding is not None and self.layout.dtype != "nvfp4":
            raise UnsupportedConfigError(
                f"Indexer: nvfp4_rounding={self.nvfp4_rounding!r} with a {self.layout.dtype} cache; it belongs to nvfp4"
            )
        if self.max_requests * self.max_blocks > INT32_MAX:
            raise UnsupportedConfigError(
                f"Indexer: max_requests={self.max_requests} * {self.max_blocks} blocks exceeds {INT32_MAX} list entries"
            )

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest request, rounded up to whole pages."""
        return -(-self.max_seq_len // self.layout.page_size) * self.layout.blocks_per_page

    @property
    def max_rows(self) -> int:
        """Rows (request, query, head) of the largest batch."""
        return self.max_requests * self.max_query_len * self.num_heads

    @property
    def score_stride(self) -> int:
        """Scores between two rows of the score scratch."""
        return -(-self.max_blocks // 32) * 32

    def rounding(self, default: str) -> str:
        """The NVFP4 rounding in force, given the architecture's default; ``none`` for other caches."""
        return self.nvfp4_rounding or default if self.layout.dtype == "nvfp4" else "none"

    def numerics(self, rounding: str, fp8_caches: tuple[str, ...]) -> str:
        """The arithmetic of prefill in force, given the rounding in force and the caches whose prefill takes the fp8
        MMA by default.

        Raises
        ------
        UnsupportedConfigError
            When ``fp8`` is asked for and keys are no e4m3 numbers.
        """
        operands_are_e4m3 = self.layout.dtype == "e4m3fn" or rounding == "e4m3"
        if self.prefill_numerics == "fp8" and not operands_are_e4m3:
            raise UnsupportedConfigError(
                f"Indexer: prefill_numerics='fp8' multiplies e4m3 numbers; {self.layout.dtype} keys"
                + (f" with nvfp4_rounding={rounding!r}" if self.layout.dtype == "nvfp4" else "")
                + " are none. Supported: 'strict'."
            )
        default = "fp8" if operands_are_e4m3 and self.layout.dtype in fp8_caches else "strict"
        return self.prefill_numerics or default

    def picks(self, layer: int) -> bool:
        """Whether sparse layer number ``layer`` picks; others reuse what the last picking layer wrote."""
        return max(layer - self.topk_offset, 0) % self.topk_every == 0

    @property
    def unscored_blocks(self) -> int:
        """A request with at most this many visible blocks needs no scores: all its blocks win and ids order them."""
        return 0 if self.order == "score" else self.topk


@dataclass(frozen=True)
class Memory:
    """Bytes that an indexer allocates, by purpose.

    Attributes
    ----------
    items : tuple of (str, int)
        Purpose and bytes.
    host : tuple of str
        The purposes whose bytes lie in the host's memory, pinned where the device is a GPU.
    """

    items: tuple[tuple[str, int], ...]
    host: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Sum of all items."""
        return sum(size for _, size in self.items)

    @property
    def host_bytes(self) -> int:
        """Sum of the items in the host's memory."""
        return sum(size for name, size in self.items if name in self.host)

    @property
    def device_bytes(self) -> int:
        """Sum of the items on the device: what an engine's memory profile has to leave."""
        return self.total_bytes - self.host_bytes

    def __add__(self, other: Memory) -> Memory:
        """Items of both."""
        return Memory(self.items + other.items, self.host + other.host)

    def __str__(self) -> str:
        items = [(f"{name} (host)" if name in self.host else name, size) for name, size in self.items]
        totals = [("on the device", self.device_bytes), ("on the host", self.host_bytes), ("total", self.total_bytes)]
        return "\n".join(f"{name:<24}{size:>16,} bytes" for name, size in items + totals)
