"""Rules that no linter checks, such as: no file contains a path outside the checkout."""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("bridge", "cli", "environments", "patches", "tests")
SHARED_BY_ALL = {"/", "/home", "/mnt", "/opt", "/root", "/srv", "/tmp", "/var/tmp"}
"""Folders that a file may name even if a checkout lies in them."""
OPENS_CUDA_IPC = "_new_shared_cuda"
OPENS_HTTP = {
    f"httpx.{name}" for name in ("Client", "AsyncClient", "get", "post", "put", "delete", "request", "stream")
}


def _python_files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (ROOT / package).rglob("*.py")


def _tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git, or no repository")
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def _foreign_paths(text: str, root: Path) -> list[str]:
    """Return the absolute paths in `text` that lie in the checkout `root` or beside it."""
    folder = root if str(root.parent) in SHARED_BY_ALL else root.parent
    return re.findall(rf"(?<![\w./-]){re.escape(str(folder))}/[\w.-]+", text)


def test_one_file_opens_cuda_ipc_handles() -> None:
    openers = {
        str(file.relative_to(ROOT))
        for file in _python_files()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == OPENS_CUDA_IPC
    }
    assert openers == {"bridge/weights/cuda_ipc.py"}


def test_one_module_opens_connections_to_a_vllm_server() -> None:
    openers = {
        str(file.relative_to(ROOT))
        for package in ("bridge", "cli", "environments", "patches", "benchmarks")
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in OPENS_HTTP
    }
    atropos_api = "bridge/atropos/api.py"
    to_itself = "patches/bridge_patches/exporter.py"
    assert openers == {"bridge/server/client.py", atropos_api, to_itself}


def test_no_file_names_a_path_outside_the_checkout() -> None:
    foreign = {}
    for file in _tracked_files():
        paths = _foreign_paths(file.read_text(errors="ignore"), ROOT)
        if paths:
            foreign[str(file.relative_to(ROOT))] = paths
    assert not foreign


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see /place/notes/a.md", ["/place/notes"]),
        ("cd /place/checkout/bridge", ["/place/checkout"]),
        ("https://example.org/place/notes", []),
        ("a homeplace/notes", []),
    ],
)
def test_paths_outside_the_checkout_are_detected(text: str, expected: list[str]) -> None:
    assert _foreign_paths(text, Path("/place/checkout")) == expected


def test_paths_of_a_shared_parent_folder_are_not_reported() -> None:
    assert _foreign_paths("/tmp/other and /tmp/checkout/bridge", Path("/tmp/checkout")) == ["/tmp/checkout/bridge"]


def test_every_async_generator_is_closed_by_its_consumer() -> None:
    """An async generator that asyncio closes at exit prints a traceback."""
    loops, left_open = set(), set()
    for file in _python_files():
        tree = ast.parse(file.read_text())
        closed = {
            loop
            for block in ast.walk(tree)
            if isinstance(block, ast.AsyncWith)
            for item in block.items
            if isinstance(call := item.context_expr, ast.Call) and ast.unparse(call.func) == "aclosing"
            for loop in ast.walk(block)
            if isinstance(loop, ast.AsyncFor) and ast.unparse(loop.iter) == ast.unparse(call.args[0])
        }
        of_file = {loop for loop in ast.walk(tree) if isinstance(loop, ast.AsyncFor)}
        loops |= of_file
        left_open |= {f"{file}:{loop.lineno}" for loop in of_file - closed}
    assert loops
    assert left_open == set()


def test_child_pythons_ignore_the_current_folder() -> None:
    """Otherwise a user's module named `bridge`, or like a library, would shadow the real one."""
    starts = {
        f"{file}:{node.lineno}": {element.value for element in node.elts if isinstance(element, ast.Constant)}
        for file in _python_files()
        if "tests" not in file.relative_to(ROOT).parts
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable"
        if not isinstance(node.elts[1], ast.Starred)  # this process's own flags, once more
    }
    assert len(starts) >= 5
    assert [start for start, flags in starts.items() if not flags & {"-P", "-I"}] == []
