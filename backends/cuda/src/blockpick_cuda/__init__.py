# SPDX-License-Identifier: Apache-2.0
"""CUDA backend of blockpick: devices, binaries and launches through cuda-python."""

from .backend import CudaBackend

__version__ = "0.1.0"
__all__ = ["CudaBackend"]
