# SPDX-License-Identifier: Apache-2.0
"""Templates and rendered sources."""

from __future__ import annotations

import ast
import re

import pytest
from support import ROOT

from blockpick_codegen.axes import DefinitionError
from blockpick_codegen.expand import load_matrix
from blockpick_codegen.render import TEMPLATES, check_seal, render, render_all

MATRIX = load_matrix()
GOLDEN = ROOT / "tests" / "golden"
PYTHON = sorted(p for p in TEMPLATES.glob("*.jinja") if ".cu." not in p.name)


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: p.name)
def test_templates_are_python_before_rendering(path):
    """Valid Python, no expression outside the right of ``=``, no control line but includes."""
    text = path.read_text()
    ast.parse(text)
    assert "{%" not in text
    for line in text.splitlines():
        assert not line.startswith("#%") or re.fullmatch(r'#% include "[\w".~ ]+', line), line
        assert "{{" not in line or re.match(r"[A-Z_]+(: [\w.]+)? = .*\{\{", line), line


@pytest.fixture(scope="module")
def used():
    """Names of the templates that some variant is made of."""
    sources = render_all(MATRIX, MATRIX.variants).values()
    return {name for source in sources for name in re.findall(r"templates/(\S+) sha256", source.header)}


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda p: p.name)
def test_templates_are_short_and_used(path, used):
    lines = path.read_text().splitlines()
    assert len(lines) <= 250
    assert ".cu" in path.name or max(map(len, lines)) <= 120  # ruff checks what is rendered of Python
    assert path.name in used


def test_kernels_are_short():
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 120, f"{path.name}: {node.name}"
                assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


def test_rendering_repeats_and_states_its_inputs():
    for variant in MATRIX.matching(["decode_score"]):
        source = render(MATRIX, variant)
        assert source == render(MATRIX, variant)
        for part in ("Do not edit", f"targets/{variant.target}.toml sha256:", "ops/decode_score", "seal sha256:"):
            assert part in source.header, part
        assert "/work" not in source.text
        assert not re.search(r"20\d\d-\d\d-\d\d", source.header)


def test_the_seal_finds_an_edit():
    text = render(MATRIX, MATRIX.variants[0]).text
    check_seal(text)
    with pytest.raises(DefinitionError, match="edited by hand"):
        check_seal(text.replace("tl.load", "tl.load ", 1))
    with pytest.raises(DefinitionError, match="no seal"):
        check_seal("x = 1\n")


def test_an_undefined_name_in_a_template_is_an_error(tmp_path, monkeypatch):
    import jinja2

    import blockpick_codegen.render as module

    for path in TEMPLATES.glob("*.jinja"):
        (tmp_path / path.name).write_text(path.read_text())
    target = tmp_path / MATRIX.ops["insert"].template
    target.write_text(target.read_text() + "\nX = {{ nothing_defines_this }}\n")
    monkeypatch.setattr(module, "TEMPLATES", tmp_path)
    with pytest.raises(jinja2.UndefinedError, match="nothing_defines_this"):
        render(MATRIX, MATRIX.matching(["insert__sm90__bf16"])[0])


@pytest.mark.parametrize("name", ["decode_score__sm90__nvfp4_exact", "decode_score__gfx942__e4m3fn"])
def test_golden_render(name):
    """One NVIDIA and one AMD render are kept, so that a review shows what a template edit does.

    After a wanted change: ``python -m blockpick_codegen render`` and copy the bodies to tests/golden.
    """
    source = render(MATRIX, next(v for v in MATRIX.variants if str(v).startswith(f"{name}_r")))
    assert source.body == (GOLDEN / f"{name}.py").read_text()
