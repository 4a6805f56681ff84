# SPDX-License-Identifier: Apache-2.0
"""Functions and classes with the names, arguments and layouts of public implementations, computed by blockpick."""
