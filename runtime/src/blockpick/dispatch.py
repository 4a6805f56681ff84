# SPDX-License-Identifier: Apache-2.0
"""Choose the variant that serves a need: every answer carries its reason and every rejected alternative its own.

Routes, in order: ``aot`` (the release binary of exactly this architecture), ``jit`` (the same generated source through
an installed Triton, when the caller allows it), else a refusal. ``interpreter`` and ``reference`` run only when asked
for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .backend_api import DeviceInfo, Kernel, SourceCompiler, SourceInterpreter
from .device import binary_loader, installed_backends
from .errors import KernelNotInstalledError, UnsupportedArchError
from .manifest import InstalledVariant, KernelPackage, installed_packages


@dataclass(frozen=True)
class Need:
    """What a variant's axis must be: exactly ``value``, or at least that much (the smallest such wins)."""

    axis: str
    value: str | int
    at_least: bool = False

    def rejects(self, variant: InstalledVariant) -> str | None:
        """Why ``variant`` does not meet the need; None when it does."""
        has = variant.axes[self.axis]
        if self.at_least:
            return None if has >= self.value else f"{self.axis} {has} < {self.value} needed"
        return None if has == self.value else f"{self.axis} {has}, {self.value} needed"


@dataclass(frozen=True)
class Choice:
    """The chosen variant of one role, why it was chosen, and why each other one was not."""

    role: str
    variant: InstalledVariant
    route: str
    reason: str
    rejected: tuple[tuple[str, str], ...]


def find_package(arch: str) -> KernelPackage:
    """The installed kernel package for ``arch``.

    Raises
    ------
    UnsupportedArchError
        When there is none; the message lists the installed architectures.
    """
    packages = installed_packages()
    if arch not in packages:
        raise UnsupportedArchError(
            f"no kernels for architecture {arch}. Installed: {', '.join(sorted(packages)) or 'none'}. "
            f"Install blockpick-kernels-{arch} if that architecture is supported."
        )
    return packages[arch]


def runnable(route: str) -> Callable[[InstalledVariant], str | None]:
    """For a route, a predicate that says why a variant can't take it (None when it can)."""
    # Gluon's language still changes with every Triton release: only binaries of the build's own Triton are trusted
    languages = {"aot": ("triton", "gluon", "cuda"), "jit": ("triton",), "interpreter": ("triton",)}[route]

    def reason(variant: InstalledVariant) -> str | None:
        if variant.language not in languages:
            return f"{variant.language} source, route {route} takes {', '.join(languages)}"
        return "no binary in the package" if route == "aot" and variant.record["file"] is None else None

    return reason


def select(
    package: KernelPackage, role: str | tuple[str, ...], needs: Sequence[Need], route: str, op: str | None = None
) -> Choice:
    """The best variant for ``role``: highest preference, then the least that meets every need.

    Parameters
    ----------
    package : KernelPackage
        The kernels to choose from.
    role : str or tuple of str
        What the kernel does, e.g. ``decode_score``; of several roles the first names the choice.
    needs : sequence of Need
        Requirements on the variant's axes.
    route : {"aot", "jit", "interpreter"}
        How the kernel will run.
    op : str, optional
        Only variants of this op: callers that need one numeric family for several sizes pass the op of the largest.

    Raises
    ------
    KernelNotInstalledError
        When no variant is left; the message lists every candidate with its reason.
    """
    roles = (role,) if isinstance(role, str) else role
    cannot_run = runnable(route)
    accepted: list[InstalledVariant] = []
    rejected: list[tuple[str, str]] = []
    for variant in (v for v in package.variants if v.role in roles):
        reasons = [reason for need in needs if (reason := need.rejects(variant))]
        if reason := cannot_run(variant):
            reasons.append(reason)
        if op is not None and variant.op != op:
            reasons.append(f"op {variant.op}, {op} keeps one numeric family")
        if reasons:
            rejected.append((variant.name, "; ".join(reasons)))
        else:
            accepted.append(variant)
    if not accepted:
        wanted = ", ".join(f"{n.axis} {'>= ' if n.at_least else ''}{n.value}" for n in needs)
        listed = "".join(f"\n  {name}: {reason}" for name, reason in rejected) or "\n  (none installed)"
        raise KernelNotInstalledError(
            f"{roles[0]}: no variant for {package.arch} with {wanted or 'no needs'} on route {route}. "
            f"Candidates:{listed}"
        )
    sizes = [need.axis for need in needs if need.at_least]
    accepted.sort(key=lambda v: (-v.preference, *(v.axes[axis] for axis in sizes), v.name))
    best = accepted[0]
    for other in accepted[1:]:
        why = "lower preference" if other.preference < best.preference else "larger than needed"
        rejected.append((other.name, f"{why}: {best.name} serves"))
    reason = (
        f"{route}: "
        + {
            "aot": f"release binary for {package.arch}",
            "jit": f"generated source for {package.arch}, compiled here",
            "interpreter": f"generated source for {package.arch}, interpreted on the CPU",
        }[route]
    )
    return Choice(roles[0], best, route, reason, tuple(rejected))


def pick_route(device: DeviceInfo, allow_jit: bool) -> tuple[str, str]:
    """The route on a present device and why: ``aot`` where its package holds binaries, else ``jit`` where allowed.

    Raises
    ------
    UnsupportedArchError
        When no package is installed for the device.
    KernelNotInstalledError
        When the package holds sources only and ``allow_jit`` is False.
    """
    packages = installed_packages()
    if device.arch not in packages:
        raise UnsupportedArchError(
            f"{device.name} is {device.arch}: no kernel package for it. "
            f"Installed: {', '.join(sorted(packages)) or 'none'}. Install blockpick-kernels-{device.arch} if it exists."
        )
    package = packages[device.arch]
    if package.has_binaries:
        return "aot", f"binaries for {device.arch} are installed"
    if allow_jit:
        return "jit", f"the package for {device.arch} holds sources only, and allow_jit is set"
    raise KernelNotInstalledError(
        f"{device.name}: the package for {device.arch} in {package.folder} holds sources only. "
        "Install its release wheel, or pass allow_jit=True to compile them here."
    )


def interpreted_arch(arch: str | None) -> str:
    """Whose sources to interpret: ``arch``, or the first installed."""
    return arch or next(iter(sorted(installed_packages())), "none")


@functools.cache
def load(variant: InstalledVariant, route: str, device: DeviceInfo | None) -> Kernel:
    """The loaded kernel of ``variant``, one per process and device.

    Raises
    ------
    KernelNotInstalledError
        When the backend that the route needs is not installed.
    """
    if route == "interpreter":
        for backend in installed_backends().values():
            if isinstance(backend, SourceInterpreter):
                return backend.interpret(variant.source())
        raise KernelNotInstalledError(f"{variant.name}: route interpreter needs blockpick-triton")
    if device is None:
        raise KernelNotInstalledError(f"{variant.name}: route {route} needs a device")
    loader = binary_loader(variant.vendor)
    if loader is None:
        raise KernelNotInstalledError(f"{variant.name}: route {route} needs blockpick-{variant.vendor}")
    if route == "aot":
        return loader.load(variant.binary(), device.index)
    for backend in installed_backends().values():
        if isinstance(backend, SourceCompiler):
            pdl = bool(variant.record["pdl"])
            return loader.load(backend.compile(variant.source(), device.arch, pdl), device.index)
    raise KernelNotInstalledError(f"{variant.name}: route jit needs blockpick-triton")
