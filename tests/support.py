# SPDX-License-Identifier: Apache-2.0
"""Names that several test files share."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
ARCHS = ("sm90", "sm100", "sm103", "sm107", "gfx942", "gfx950")
