# SPDX-License-Identifier: Apache-2.0
"""decode_pick against the oracle: every executor, every option."""

from __future__ import annotations

import pytest
from blockpick.testing.cases import DecodeCase, run_case

CONFORMANCE = [
    DecodeCase("bf16, all orders tie across programs", "bf16", (2500, 2304, 700), num_heads=2, query_len=2, data="integer"),
    DecodeCase("nvfp4", "nvfp4", (2500, 2304, 700), num_heads=2, query_len=2, data="integer"),
]


@pytest.mark.parametrize("case", CONFORMANCE, ids=lambda c: c.name)
def test_conformance(any_executor, case):
    run_case(case, any_executor.indexer, any_executor.device)
