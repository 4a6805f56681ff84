# SPDX-License-Identifier: Apache-2.0
"""The indexer wrappers of MiniMax's MSA, on blockpick: the same calls, on every architecture that blockpick has.

Ids come as there: token-major [T, H, 16], 15 history pages by descending score and the query's own page in the last
valid place; rows of at most 16 pages are 0..n-1; rows without a visible page are [0, -1, ...]. Pages are selected by
their full fp32 scores, lower id first among equals, where MSA compares 16-bit ranks of them.

Both generations of the decode wrappers' buffers are taken: ``workspace_buffer`` with ``workspace_size`` and
``score_buffer`` with ``score_buffer_size``. Besides MSA's arguments every constructor takes ``backend`` and ``arch``,
which :class:`blockpick.Indexer` is built with. CPU tensors are refused unless the backend is ``interpreter`` or
``reference``.
"""

from __future__ import annotations

from .msa_decode import BatchDecodeIndexerQ8KV4Wrapper, BatchDecodeIndexerQ8KV8Wrapper
from .msa_gather import minimax_m3_gather_nvfp4_index_k_fp8
from .msa_prefill import BatchPrefillIndexerQ8KV8Wrapper

__all__ = [
    "BatchDecodeIndexerQ8KV4Wrapper",
    "BatchDecodeIndexerQ8KV8Wrapper",
    "BatchPrefillIndexerQ8KV8Wrapper",
    "minimax_m3_gather_nvfp4_index_k_fp8",
]
