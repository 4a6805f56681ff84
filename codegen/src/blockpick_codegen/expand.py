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
        """The variants whose name contains, or as a glob matches, any of ``patterns``; all without patterns."""
        wanted = list(patterns)
        if not wanted:
            return self.variants
        found = tuple(v for v in self.variants if any(p in v.name or fnmatch(v.name, p) for p in wanted))
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
