# SPDX-License-Identifier: Apache-2.0
"""Ops x targets x axes -> the sorted list of variants."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch

from .axes import PACKAGE, DefinitionError, Op, Target, Variant


@dataclass(frozen=True)
class Matrix:
    """All definitions and the variants they span."""

    targets: dict[str, Target]
    ops: dict[str, Op]
    variants: tuple[Variant, ...]

    def matching(self, patterns: Iterable[str]) -> tuple[Variant, ...]:
        """The variants that any of ``patterns`` names; all without patterns.

        A whole name names itself only; any other pattern names what contains it or matches it as a glob.
        """
        wanted = list(patterns)
        if not wanted:
            return self.variants
        names = {variant.name for variant in self.variants}

        def named(name: str, pattern: str) -> bool:
            return name == pattern if pattern in names else pattern in name or fnmatch(name, pattern)

        found = tuple(v for v in self.variants if any(named(v.name, pattern) for pattern in wanted))
        if not found:
            raise DefinitionError(f"no variant matches {' '.join(wanted)}")
        return found


def load_matrix() -> Matrix:
    """Read every target and op file of the package and expand them."""
    targets = {t.name: t for t in (Target.load(p) for p in sorted((PACKAGE / "targets").glob("*.toml")))}
    ops = {op.name: op for op in (Op.load(p) for p in sorted((PACKAGE / "ops").glob("*.toml")))}
    variants: dict[str, Variant] = {}
    for op in ops.values():
        for target in op.targets:
            if target not in targets:
                raise DefinitionError(f"{op.path.name}: unknown target {target!r}")
            for chosen in op.combinations(target):
                variant = Variant.of(op, target, chosen)
                if variant.name in variants:
                    raise DefinitionError(f"two variants share the name {variant.name}")
                variants[variant.name] = variant
    return Matrix(targets, ops, tuple(sorted(variants.values(), key=lambda v: v.name)))
