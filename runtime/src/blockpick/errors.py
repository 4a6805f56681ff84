# SPDX-License-Identifier: Apache-2.0
"""Errors of blockpick. Bad tensors raise plain ``ValueError`` or ``TypeError``; everything else derives from here."""

from __future__ import annotations


class BlockpickError(Exception):
    """Base of all errors that blockpick defines."""


class UnsupportedArchError(BlockpickError):
    """The device's architecture has no kernels in any installed wheel."""


class UnsupportedConfigError(BlockpickError, ValueError):
    """The configuration is outside what blockpick computes; the message says what is supported."""


class KernelNotInstalledError(BlockpickError):
    """No installed variant serves the configuration; the message lists every candidate with its reason."""


class ManifestError(BlockpickError):
    """A kernel package is malformed, of another schema, or its binary differs from its digest."""


class StalePlanError(BlockpickError):
    """A plan is used after its slot was planned again."""


class PeerError(BlockpickError):
    """A rank of a group failed, is late, or shows something that can't be shared; the message names it.

    Parameters
    ----------
    message : str
        What happened.
    peer : int, optional
        The rank that it is about, where one is known.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class DriverError(BlockpickError):
    """A driver call failed.

    Parameters
    ----------
    code : int
        The driver's error code.
    name : str
        The driver's name of the code, e.g. ``CUDA_ERROR_INVALID_VALUE``.
    call : str
        The driver function and what it was asked.
    """

    def __init__(self, code: int, name: str, call: str) -> None:
        super().__init__(f"{call} failed: {name} ({code})")
        self.code = code
        self.name = name
        self.call = call
