# SPDX-License-Identifier: Apache-2.0
"""blockpick: the block indexer of MiniMax M3's sparse attention as a kernel library for serving engines."""

from .cache_check import CacheFault
from .config import IndexerConfig, Memory
from .errors import (
    BlockpickError,
    DriverError,
    KernelNotInstalledError,
    ManifestError,
    PeerError,
    StalePlanError,
    UnsupportedArchError,
    UnsupportedConfigError,
)
from .indexer import Indexer
from .layout import CacheLayout
from .ops import torch_ops as _torch_ops  # noqa: F401  registers torch.ops.blockpick
from .ops.fused_insert import qk_norm_rope_insert
from .ops.insert import insert
from .ops.sparse_table import SparseTable
from .parallel import RankGroup
from .plan import DecodePlan, PrefillPlan
from .reshard import reshard
from .step import StepPlan

__version__ = "0.1.0"

__all__ = [
    "BlockpickError",
    "CacheFault",
    "CacheLayout",
    "DecodePlan",
    "DriverError",
    "Indexer",
    "IndexerConfig",
    "KernelNotInstalledError",
    "ManifestError",
    "Memory",
    "PeerError",
    "PrefillPlan",
    "RankGroup",
    "SparseTable",
    "StalePlanError",
    "StepPlan",
    "UnsupportedArchError",
    "UnsupportedConfigError",
    "insert",
    "qk_norm_rope_insert",
    "reshard",
]
