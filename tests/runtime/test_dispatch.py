# SPDX-License-Identifier: Apache-2.0
"""Dispatch and kernel packages: choices with reasons, refusals that list what is there, broken packages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading

import pytest
from support import ARCHS, ROOT

import blockpick
from blockpick import CacheLayout, KernelNotInstalledError, ManifestError, UnsupportedArchError
from blockpick.backend_api import DeviceInfo
from blockpick.config import IndexerConfig
from blockpick.dispatch import Need, find_package, load, pick_route, select
from blockpick.manifest import installed_packages, read_package
from blockpick.ops.decode_pick import select_decode
from blockpick.ops.insert import select_insert

CACHES = ("bf16", "e4m3fn", "nvfp4")


def device(arch):
    """A device that this machine lacks."""
    return DeviceInfo("rocm" if arch.startswith("gfx") else "cuda", 0, arch, f"test {arch}", 100, 1 << 30, "none")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_every_m3_configuration_is_served_by_binaries(arch, dtype, page_size, num_heads):
    package = find_package(arch)
    config = IndexerConfig(CacheLayout(dtype, page_size), num_heads=num_heads, max_query_len=8)
    kernels = select_decode(package, config, "aot")
    assert len(kernels.score) == 8
    assert len({choice.variant.op for choice in kernels.score}) == 1, "one numeric family"
    for length, choice in enumerate(kernels.score, 1):
        assert choice.variant.axes["columns"] >= num_heads * length
    for choice in (*kernels.choices, select_insert(package, config.layout, "aot")):
        assert choice.variant.arch == arch
        assert choice.route == "aot"
        assert arch in choice.reason
        assert all(reason for _, reason in choice.rejected)


def test_smallest_sufficient_variant_wins_and_the_others_say_why():
    needs = [Need("cache", "bf16"), Need("rounding", "none"), Need("columns", 9, at_least=True)]
    choice = select(find_package("gfx942"), "decode_score", needs, "aot")
    assert choice.variant.name == "decode_score__gfx942__bf16_r128_c16"
    reasons = dict(choice.rejected)
    assert "larger than needed" in reasons["decode_score__gfx942__bf16_r128_c32"]
    assert "cache e4m3fn, bf16 needed" in reasons["decode_score__gfx942__e4m3fn_r128_c16"]
    assert len(reasons) + 1 == sum(v.role == "decode_score" for v in find_package("gfx942").variants)


def test_too_large_a_need_lists_every_candidate():
    with pytest.raises(KernelNotInstalledError) as error:
        select(find_package("sm90"), "select_blocks", [Need("topk", 65, at_least=True)], "aot")
    for name in ("select_blocks__sm90__k16", "select_blocks__sm90__k64", "select_blocks_cuda__sm90__k64"):
        assert name in str(error.value)
    assert "topk 64 < 65 needed" in str(error.value)


def test_preference_and_route():
    """NVIDIA binaries prefer the Gluon scorer and the CUDA selection; the interpreter takes Triton only and says
    why.
    """
    config = IndexerConfig(CacheLayout("nvfp4"))
    aot = select_decode(find_package("sm100"), config, "aot")
    assert (aot.score[0].variant.language, aot.selection.pick.variant.language) == ("gluon", "cuda")
    assert config.rounding(find_package("sm100").nvfp4_rounding) == "e4m3"
    assert aot.score[0].variant.axes["rounding"] == "e4m3"
    interpreted = select_decode(find_package("sm100"), config, "interpreter")
    assert {choice.variant.language for choice in interpreted.choices} == {"triton"}
    assert any("gluon source, route interpreter takes triton" in why for _, why in interpreted.score[0].rejected)


@pytest.mark.parametrize("arch", ["sm120", "sm89", "gfx90a", "sm101"])
def test_other_architectures_are_refused_by_name(arch):
    """No family is assumed: an sm100 binary is not offered to sm101 or sm120."""
    for call in (lambda: find_package(arch), lambda: pick_route(device(arch), allow_jit=True)):
        with pytest.raises(UnsupportedArchError) as error:
            call()
        assert arch in str(error.value)
        assert all(built in str(error.value) for built in ARCHS)


def rendered_only(tmp_path):
    """A package without binaries."""
    target = tmp_path / "sm90"
    shutil.copytree(ROOT / "backends" / "cuda" / "generated" / "sm90", target)
    data = json.loads((target / "manifest.json").read_text())
    for record in data["variants"].values():
        record["file"] = None
    (target / "manifest.json").write_text(json.dumps(data))
    return target


def test_sources_only_need_allow_jit(tmp_path, monkeypatch):
    package = read_package(rendered_only(tmp_path))
    monkeypatch.setattr("blockpick.dispatch.installed_packages", lambda: {"sm90": package})
    with pytest.raises(KernelNotInstalledError, match="allow_jit=True"):
        pick_route(device("sm90"), allow_jit=False)
    assert pick_route(device("sm90"), allow_jit=True)[0] == "jit"
    with pytest.raises(KernelNotInstalledError, match="no binary in the package"):
        select(package, "decode_plan", [], "aot")
    assert select(package, "decode_plan", [], "jit").variant.op == "decode_plan"


def test_binaries_are_preferred_over_jit():
    assert pick_route(device("gfx950"), allow_jit=True)[0] == "aot"


def break_manifest(folder, change):
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda d: d.update(schema=99), "schema 99, this blockpick reads schema 1"),
        (lambda d: d.pop("arch"), "'arch'"),
        (lambda d: next(iter(d["variants"].values())).pop("role"), "'role'"),
    ],
)
def test_malformed_manifests_are_refused(tmp_path, change, message):
    folder = rendered_only(tmp_path)
    break_manifest(folder, change)
    with pytest.raises(ManifestError, match=message):
        read_package(folder)


def test_missing_and_unreadable_manifests(tmp_path):
    with pytest.raises(ManifestError, match="cannot read"):
        read_package(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ManifestError, match="cannot read"):
        read_package(tmp_path)


def test_a_tampered_binary_is_refused_before_it_is_loaded(tmp_path):
    folder = tmp_path / "sm90"
    shutil.copytree(ROOT / "backends" / "cuda" / "generated" / "sm90", folder)
    path = next((folder / "binaries").glob("insert__*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\0\0")
    package = read_package(folder)
    variant = next(v for v in package.variants if v.name == path.stem)
    with pytest.raises(ManifestError, match=r"has sha256 .*its manifest says"):
        variant.binary()
    path.unlink()
    with pytest.raises(ManifestError, match="cannot read"):
        variant.binary()


def test_loading_without_the_backend_says_what_to_install(monkeypatch):
    variant = find_package("gfx942").variants[0]
    monkeypatch.setattr("blockpick.dispatch.installed_backends", dict)
    monkeypatch.setattr("blockpick.dispatch.binary_loader", lambda vendor: None)
    load.cache_clear()
    with pytest.raises(KernelNotInstalledError, match="needs blockpick-rocm"):
        load(variant, "aot", device("gfx942"))
    with pytest.raises(KernelNotInstalledError, match="needs blockpick-triton"):
        load(variant, "interpreter", None)
    load.cache_clear()


def test_explain_names_choices_and_rejections(one_executor):
    indexer = one_executor.indexer(CacheLayout("nvfp4"), max_requests=1, max_seq_len=1024)
    text = indexer.explain()
    assert f"route {indexer.route}" in text
    assert "nvfp4_rounding exact: the architecture's default" in text
    for choice in indexer.choices:
        assert choice.variant.name in text
        assert all(f"not {name}: {reason}" in text for name, reason in choice.rejected)


def test_importing_needs_no_gpu_library_and_no_triton():
    """A fresh interpreter: beyond what torch itself imports, blockpick brings no vendor binding, no Triton, no rich."""
    code = (
        "import sys, torch; before = set(sys.modules); import blockpick; "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} & "
        "{'triton', 'rich', 'cuda', 'hip', 'rocm', 'blockpick_cuda', 'blockpick_rocm', 'blockpick_triton'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert blockpick.__version__


def test_packages_are_found_by_path(tmp_path, monkeypatch):
    installed_packages.cache_clear()
    monkeypatch.setenv("BLOCKPICK_KERNEL_PATH", str(ROOT / "backends" / "rocm" / "generated" / "gfx950"))
    try:
        assert list(installed_packages()) == ["gfx950"]
    finally:
        installed_packages.cache_clear()


def test_launches_make_their_device_current(monkeypatch):
    """A second GPU's default stream is only reached while that GPU is current; the CPU and the current GPU cost nothing."""
    import torch

    import blockpick.device as module

    entered, bound = [], []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *error):
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "set_device", bound.append)
    monkeypatch.setattr(module, "_thread", threading.local())
    for device in ("cpu", "cuda:0"):
        with module.on_device(torch.device(device)):
            pass
    assert entered == []
    assert bound == [0], "a new thread binds its context once"
    with module.on_device(torch.device("cuda:1")):
        assert entered == [torch.device("cuda:1")]
    assert entered[-1] is None
    assert bound == [0]
