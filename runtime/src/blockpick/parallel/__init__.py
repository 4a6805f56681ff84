# SPDX-License-Identifier: Apache-2.0
"""Rank groups: memory that ranks of one node share, and decode that is spread over them."""

from .group import RankGroup

__all__ = ["RankGroup"]
