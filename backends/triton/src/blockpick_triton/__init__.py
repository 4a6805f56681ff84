# SPDX-License-Identifier: Apache-2.0
"""Triton backend of blockpick: compile the generated sources for a present device, or interpret them on the CPU."""

from .backend import TritonBackend

__version__ = "0.1.0"
__all__ = ["TritonBackend"]
