# SPDX-License-Identifier: Apache-2.0
"""The text of LLVM IR changes with every compiler: the interpreter is trusted with exactly the build's."""

from __future__ import annotations

import importlib.metadata
import json
import re

import pytest
from executors import IR_ARCHS
from llir import Program
from support import ROOT

from blockpick.manifest import installed_packages

TRITON = "3.9.0"


def test_interpreter_is_pinned_to_the_compiler_of_the_build():
    """A new Triton: run tests/llir_tests, read what changed in the IR and its intrinsics, then move this pin."""
    pinned = re.search(r"^triton==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    message = f"the LLVM-IR interpreter was checked against the IR of Triton {TRITON}"
    assert pinned is not None and pinned[1] == TRITON, f"{message}, constraints.txt says {pinned and pinned[1]}"
    for arch in IR_ARCHS:
        for variant in installed_packages()[arch].variants:
            built = variant.record["toolchain"].get("triton")
            assert built == TRITON, f"{message}, {variant.name} was built with {built}"
    assert importlib.metadata.version("triton") == TRITON, message


def noted_threads(image):
    """``.max_flat_workgroup_size`` of the code object's metadata (MessagePack), which AMD's library reads at a launch."""
    key = b".max_flat_workgroup_size"
    found = image[image.index(key) + len(key) :][:3]
    return int.from_bytes(found[1:]) if found[0] == 0xCD else found[0]  # 16 bits, else a number below 128


def test_a_kernel_without_a_bound_of_its_own_may_fill_a_workgroup():
    body = "define amdgpu_kernel void @k() {0}{{\n  ret void\n}}\n"
    assert Program(body.format(""), "k", "gfx942").function.max_threads == 1024
    bound = '"amdgpu-flat-work-group-size"="1,64"'
    assert Program(body.format(f"{bound} "), "k", "gfx942").function.max_threads == 64
    groups = f"attributes #1 = {{ {bound} }}\nattributes #12 = {{ nounwind }}\n"
    assert Program(body.format("#1 ") + groups, "k", "gfx942").function.max_threads == 64
    assert Program(body.format("#12 ") + groups, "k", "gfx942").function.max_threads == 1024


@pytest.mark.parametrize("arch", IR_ARCHS)
def test_the_build_keeps_the_ir_of_every_binary(arch):
    """By the binary's digest, outside the package; every instruction of it is known, and blocks have the binary's bound."""
    package = installed_packages()[arch]
    for variant in package.variants:
        path = ROOT / "build" / "ir" / f"{variant.record['sha256']}.ll"
        assert path.exists(), f"{variant.name}: no IR in build/ir; run `python -m blockpick_codegen compile`"
        function = Program(path.read_text(), variant.record["symbol"], arch).function
        assert function.max_threads == noted_threads(variant.binary().image) == variant.binary().threads, variant.name
    names = [path.name for path in package.folder.rglob("*")]
    assert not [name for name in names if name.endswith(".ll")]
    assert json.loads((package.folder / "manifest.json").read_text())["arch"] == arch
