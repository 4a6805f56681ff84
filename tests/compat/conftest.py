# SPDX-License-Identifier: Apache-2.0
"""The routes on which the drop-ins are tested."""

from __future__ import annotations

import pytest
from executors import GPU, Executor, executors, interpreted

from blockpick.compat import vllm_ops

REFERENCE = Executor("reference", "reference", None, "cpu")
ROUTES = executors("executor") if GPU else [REFERENCE, interpreted("sm90"), interpreted("gfx950")]


@pytest.fixture(params=ROUTES, ids=None if GPU else lambda route: route.name)
def device(request):
    """The device of one route, which runs the ops during the test."""
    with request.param.active(), vllm_ops.use_backend(request.param.backend, request.param.arch):
        vllm_ops.release()
        yield request.param.device
        vllm_ops.release()
