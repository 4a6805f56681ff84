# SPDX-License-Identifier: Apache-2.0
"""Build-time generator of the blockpick kernels: expand, render, compile, inspect, manifest."""

__version__ = "0.1.0"
