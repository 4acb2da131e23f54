"""Links of README.md and of the docs lead to pages of the site, also those that leave docs/."""

import importlib.util
import posixpath
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load the hook beside a stand-in for mkdocs, which only `make docs` installs."""

    def generated(_config: Any, name: str, *, content: str) -> SimpleNamespace:
        return SimpleNamespace(src_uri=name, content_string=content)

    files = ModuleType("mkdocs.structure.files")
    files.File = SimpleNamespace(generated=generated)  # type: ignore[attr-defined]
    utils = ModuleType("mkdocs.utils")
    utils.get_relative_url = lambda url, other: posixpath.relpath(url, posixpath.dirname(other) or ".")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mkdocs.utils", utils)
    for name in ("mkdocs", "mkdocs.structure"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, files.__name__, files)
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Files(list[Any]):
    """The files of a site, as mkdocs holds them."""

    def documentation_pages(self) -> "Files":
        return self


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("index.md", "[a](docs/training.md#memory-and-speed)", "[a](training.md#memory-and-speed)"),
        ("index.md", "![a](docs/media/live.png)", "![a](media/live.png)"),
        ("index.md", "[a](bridge/errors.py), [b](patches)", "[a](source/bridge/errors.py.md), [b](source/patches.md)"),
        ("training.md", "[a](../bridge/run/trainer.py)", "[a](source/bridge/run/trainer.py.md)"),
        ("training.md", "[a](media/live.png)", "[a](media/live.png)"),
        ("training.md", "[a](#top) [b](https://bokeh.org)", "[a](#top) [b](https://bokeh.org)"),
        ("training.md", "ends. [1] [12] `x[0]`", r"ends. \[1\] \[12\] `x[0]`"),
        ("source/a.py.md", "[a](b.md) [1]", "[a](b.md) [1]"),
    ],
)
def test_link_leads_into_the_site(hook: Any, name: str, text: str, expected: str) -> None:
    shown = SimpleNamespace(file=SimpleNamespace(src_uri=name))
    assert hook.on_page_markdown(text, page=shown, config=None, files=None) == expected


def test_readme_comes_first_and_linked_files_become_pages(hook: Any) -> None:
    text = "[a](../bridge/errors.py) [b](../LICENSE) [c](../benchmarks) [d](looking.md)"
    files = hook.on_files(Files([SimpleNamespace(src_uri="training.md", content_string=text)]), config=None)
    pages = {file.src_uri: file.content_string for file in files}
    assert pages["index.md"] == (ROOT / "README.md").read_text()
    assert "class BridgeError" in pages["source/bridge/errors.py.md"]
    assert "Apache License" in pages["source/LICENSE.md"]
    assert "\nresults\n" in pages["source/benchmarks.md"]
    assert {name for name in pages if not name.startswith("source/")} == {"training.md", "index.md"}


def test_search_ranks_the_reference_below_the_guides(hook: Any) -> None:
    ranks = {}
    for name in ("reference.md", "training.md"):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name), meta={})
        assert hook.on_page_content("<p>text</p>", page=page) == "<p>text</p>"
        ranks[name] = page.meta.get("search", {}).get("boost", 1)
        assert (ROOT / "docs" / name).is_file()
    assert ranks["reference.md"] < ranks["training.md"]


@pytest.mark.parametrize(("url", "local"), [("index.html", ""), ("source/benchmarks/a.py.html", "../../")])
def test_search_script_is_loaded_from_the_site(hook: Any, url: str, local: str) -> None:
    html = f'<script src="{hook.SHIM}"></script>'
    shown = hook.on_post_page(html, SimpleNamespace(url=url))
    assert shown == f'<script src="{local}media/iframe_worker_shim.js"></script>'
    assert (ROOT / "docs" / hook.LOCAL_SHIM).is_file()
