# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for the public implementations of the same indexer."""
