# SPDX-License-Identifier: Apache-2.0
"""A lane-vectorised interpreter of the LLVM IR that Triton emits for AMD GPUs; numpy only, for tests.

It executes what the compiler's middle end made of a kernel: layouts, LDS addresses, barriers, masks, matrix operands,
cross-lane moves, asynchronous copies. It does not see what comes after: instruction selection, registers, the waits that
the back end inserts. What it does not know raises :class:`Trap` with the instruction's text.
"""

from . import matrix  # noqa: F401 - registers the matrix instructions
from .machine import ORDERS, Kernel, launch
from .program import Program
from .types import Trap

__all__ = ["ORDERS", "Kernel", "Program", "Trap", "launch"]
