# SPDX-License-Identifier: Apache-2.0
"""The reference (torch, written for reading), and comparison and timing for tests, bench and the command line."""
