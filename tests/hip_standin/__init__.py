# SPDX-License-Identifier: Apache-2.0
"""A stand-in for libamdhip64 on machines without ROCm, for tests: memory and streams on the host, kernels interpreted."""
