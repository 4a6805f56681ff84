# SPDX-License-Identifier: Apache-2.0
"""Values that name things: a target (one architecture), an op (one kernel), a variant (one binary)."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
AxisValue = str | int


class DefinitionError(ValueError):
    """A target or op file says something that can't be built."""


@dataclass(frozen=True)
class Target:
    """Facts of one architecture, read from ``targets/<name>.toml``."""

    name: str
    vendor: str
    warp_size: int
    compiler: Mapping[str, Any]
    limits: Mapping[str, int]
    facts: Mapping[str, Any]
    defaults: Mapping[str, Any]
    mma_instructions: tuple[str, ...]
    fp8_instructions: tuple[str, ...]
    path: Path

    @classmethod
    def load(cls, path: Path) -> Target:
        """Read one target file."""
        data = tomllib.loads(path.read_text())
        if data["name"] != path.stem:
            raise DefinitionError(f"{path.name}: name is {data['name']!r}, the file says {path.stem!r}")
        return cls(
            data["name"], data["vendor"], data["warp_size"], data["compiler"], data["limits"], data["facts"],
            data["defaults"], tuple(data["mma"]["instructions"]), tuple(data["mma"]["fp8_instructions"]), path,
        )  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """One compile-time choice of an op: its legal values and how a value is written in a variant's name."""

    name: str
    values: tuple[AxisValue, ...]
    prefix: str = ""
    omit: AxisValue | None = None
    text: bool = False

    def format(self, value: AxisValue) -> str:
        """The value as a piece of a name; empty where it is omitted."""
        return "" if value == self.omit else f"{self.prefix}{value}"


@dataclass(frozen=True)
class Exclusion:
    """A combination of axis values that is not built, and why."""

    when: Mapping[str, tuple[AxisValue, ...]]
    reason: str

    def matches(self, axes: Mapping[str, AxisValue]) -> bool:
        """Whether every named axis has one of the named values."""
        return all(axes.get(name) in values for name, values in self.when.items())


@dataclass(frozen=True)
class Op:
    """One kernel with its axes, arguments and tuned numbers, read from ``ops/<name>.toml``."""

    name: str
    role: str
    preference: int
    template: str
    language: str
    matrix: bool
    targets: tuple[str, ...]
    args: tuple[Mapping[str, Any], ...]
    axes: tuple[Axis, ...]
    exclusions: tuple[Exclusion, ...]
    constexprs: Mapping[str, str]
    launch: Mapping[str, str]
    tune_default: Mapping[str, Any]
    tune_rules: tuple[tuple[Exclusion, Mapping[str, Any]], ...]
    path: Path

    @classmethod
    def load(cls, path: Path) -> Op:
        """Read one op file."""
        data = tomllib.loads(path.read_text())
        if data["name"] != path.stem:
            raise DefinitionError(f"{path.name}: name is {data['name']!r}, the file says {path.stem!r}")
        axes = tuple(
            Axis(name, tuple(spec["values"]), spec.get("prefix", ""), spec.get("omit"), spec.get("text", False))
            for name, spec in data["axes"].items()
        )
        exclusions = tuple(
            Exclusion({k: tuple(v) for k, v in entry["when"].items()}, entry["reason"])
            for entry in data.get("exclude", [])
        )
        rules = tuple(
            (Exclusion({k: tuple(v) for k, v in rule["when"].items()}, "tuned"), rule["set"])
            for rule in data["tune"].get("rules", [])
        )
        return cls(
            data["name"], data["role"], data.get("preference", 0), data["template"], data["language"], data["matrix"],
            tuple(data["targets"]), tuple(data["args"]), axes, exclusions, data["constexprs"], data["launch"],
            data["tune"]["default"], rules, path,
        )  # fmt: skip

    def combinations(self, target: str) -> Iterator[dict[str, AxisValue]]:
        """Every legal choice of axis values on one target."""
        names = [axis.name for axis in self.axes]
        for values in itertools.product(*(axis.values for axis in self.axes)):
            chosen = dict(zip(names, values, strict=True))
            if not any(exclusion.matches({"target": target, **chosen}) for exclusion in self.exclusions):
                yield chosen

    def tuned(self, target: str, axes: Mapping[str, AxisValue]) -> dict[str, Any]:
        """The tuned numbers of one variant: the default, then every matching rule in file order."""
        numbers = dict(self.tune_default)
        for rule, changes in self.tune_rules:
            if rule.matches({"target": target, **axes}):
                numbers.update(changes)
        return numbers


@dataclass(frozen=True, order=True)
class Variant:
    """One binary: an op for one target with one value per axis. ``str`` is its name everywhere."""

    op: str
    target: str
    axes: tuple[tuple[str, AxisValue], ...]
    name: str

    @classmethod
    def of(cls, op: Op, target: str, chosen: Mapping[str, AxisValue]) -> Variant:
        """Name the variant of ``op`` for ``target`` with the axis values ``chosen``."""
        pieces = [piece for axis in op.axes if (piece := axis.format(chosen[axis.name]))]
        name = "__".join([op.name, target, *(["_".join(pieces)] if pieces else [])])
        return cls(op.name, target, tuple((axis.name, chosen[axis.name]) for axis in op.axes), name)

    @classmethod
    def parse(cls, text: str, ops: Mapping[str, Op]) -> Variant:
        """The variant that ``text`` names: ``Variant.parse(str(v), ops) == v``."""
        op_name, _, rest = text.partition("__")
        target = rest.partition("__")[0]
        if op_name not in ops:
            raise DefinitionError(f"{text!r}: no op {op_name!r}; there are {', '.join(sorted(ops))}")
        op = ops[op_name]
        if target not in op.targets:
            raise DefinitionError(f"{text!r}: {op_name} has no target {target!r}; it has {', '.join(op.targets)}")
        for chosen in op.combinations(target):
            variant = cls.of(op, target, chosen)
            if variant.name == text:
                return variant
        raise DefinitionError(f"{text!r}: {op_name} for {target} has no such combination of axis values")

    def __str__(self) -> str:
        return self.name
