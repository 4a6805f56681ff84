# SPDX-License-Identifier: Apache-2.0
"""``python -m blockpick.cli``."""

import sys

from . import main

sys.exit(main())
