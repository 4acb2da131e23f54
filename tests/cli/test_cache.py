"""What Bridge keeps in its cache, and where that is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_cli import cache

PROGRAM = """
import json, os, subprocess, sys
from bridge_cli import cache
{change}
cache.keep_bytecode()
import torch
child = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
print(json.dumps([torch.__cached__, subprocess.check_output([sys.executable, "-c", child], text=True).strip()]))
"""


@pytest.fixture
def torch_source(tmp_path: Path) -> Path:
    """Return the source of a small package of that name."""
    source = tmp_path / "site" / "torch" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("version = '2.0'\n")
    return source


def bytecode_of(source: Path, change: str = "", **variables: str) -> tuple[Path, str]:
    """Return where a process looks for the bytecode of `source`, and what a child of it does."""
    fixed = {"XDG_CACHE_HOME": str(source.parents[2] / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    path = os.pathsep.join([str(source.parents[1]), *sys.path])
    environment = {**os.environ, **fixed, "PYTHONPATH": path, **variables}
    command = [sys.executable, "-c", PROGRAM.format(change=change)]
    cached, of_child = json.loads(subprocess.check_output(command, env=environment, text=True))
    return Path(cached), of_child


def test_bytecode_is_kept_where_nothing_else_keeps_it(torch_source: Path) -> None:
    cached, of_child = bytecode_of(torch_source)
    kept = torch_source.parents[2] / "cache" / "bridge" / "bytecode"
    assert cached.is_relative_to(kept)
    assert cached.is_file()
    assert of_child == f"False {kept}"
    assert [*torch_source.parent.iterdir()] == [torch_source]
    written = cached.stat().st_mtime_ns
    assert bytecode_of(torch_source) == (cached, of_child)
    assert cached.stat().st_mtime_ns == written, "the second process read it"


def test_bytecode_is_kept_for_a_folder_that_cannot_be_written(torch_source: Path) -> None:
    is_other = f"str(path) != {str(torch_source.parent)!r}"
    change = f"real = os.access; os.access = lambda path, how: {is_other} and real(path, how)"
    cached, _ = bytecode_of(torch_source, change, PYTHONDONTWRITEBYTECODE="")
    assert cached.is_relative_to(torch_source.parents[2] / "cache")


@pytest.mark.parametrize("variables", [{"PYTHONDONTWRITEBYTECODE": ""}, {"PYTHONPYCACHEPREFIX": "/nowhere"}])
def test_python_and_the_user_decide_where_they_can(torch_source: Path, variables: dict[str, str]) -> None:
    cached, of_child = bytecode_of(torch_source, **variables)
    assert not (torch_source.parents[2] / "cache").exists()
    prefix = variables.get("PYTHONPYCACHEPREFIX")
    assert of_child == f"{prefix is not None} {prefix}"
    assert cached.exists() == (prefix is None)


def test_bytecode_that_is_there_is_used(torch_source: Path) -> None:
    bytecode_of(torch_source, PYTHONDONTWRITEBYTECODE="")
    cached, of_child = bytecode_of(torch_source)
    assert (cached.parent.parent, of_child) == (torch_source.parent, "True None")


def test_a_cache_that_cannot_be_made_is_no_error(torch_source: Path) -> None:
    (torch_source.parents[2] / "cache").write_text("in the way")
    assert bytecode_of(torch_source)[1] == "True None"


def test_the_cache_is_where_the_desktop_standard_puts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "bridge"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache.folder() == tmp_path / ".cache" / "bridge"
