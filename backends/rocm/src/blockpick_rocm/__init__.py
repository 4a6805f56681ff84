# SPDX-License-Identifier: Apache-2.0
"""ROCm backend of blockpick: devices, binaries and launches through hip-python."""

from .backend import RocmBackend

__version__ = "0.1.0"
__all__ = ["RocmBackend"]
