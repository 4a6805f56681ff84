# SPDX-License-Identifier: Apache-2.0
"""Checks and launch of one op each."""
