"""A hook of mkdocs: README.md is the first page of the site, and files outside of docs/ that a page links to are pages.

The same links lead to the files themselves where the repository is read without the site.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
DOCS, INDEX, SOURCE = "docs/", "index.md", "source/"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
"""The target of a link to a file, without its anchor."""
MARK = re.compile(r"(?<![\w\\`\]])\[(\d+)\](?!\()")
"""The number of a note, which Markdown would take for a link."""
SHIM = "https://unpkg.com/iframe-worker/shim"
"""The script that the search needs on pages from disk, as the theme loads it."""
LOCAL_SHIM = "media/iframe_worker_shim.js"
BOOSTS = {"reference.md": 0.1, "lora.md": 2}
"""Pages that the search ranks lower or higher."""
LANGUAGES = {".py": "python", ".json": "json"}


def on_files(files: Any, config: Any) -> Any:
    """Add the first page, and one page per linked file or folder."""
    files.append(File.generated(config, INDEX, content=(ROOT / "README.md").read_text()))
    linked = {path for file in files.documentation_pages() for path in _linked(file.content_string, file.src_uri)}
    for path in sorted(linked):
        if not path.startswith(DOCS):
            files.append(File.generated(config, f"{SOURCE}{path}.md", content=_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page lead to pages of the site."""
    name = page.file.src_uri
    if name.startswith(SOURCE):
        return markdown

    def inside(match: re.Match[str]) -> str:
        path = _path(match[1], name)
        return path.removeprefix(DOCS) if path.startswith(DOCS) else f"{SOURCE}{path}.md"

    return MARK.sub(r"\\[\1\\]", LINK.sub(inside, markdown))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Let the search show guides before the reference, which names every choice."""
    if page.file.src_uri in BOOSTS:
        page.meta["search"] = {"boost": BOOSTS[page.file.src_uri]}
    return html


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Let pages load nothing from elsewhere."""
    return output.replace(SHIM, get_relative_url(LOCAL_SHIM, page.url))


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for the page of a missing one."""
    return output_content.replace(SHIM, LOCAL_SHIM)


def _linked(text: str, name: str) -> Iterator[str]:
    yield from (_path(target, name) for target in LINK.findall(text))


def _path(target: str, name: str) -> str:
    """Return the path in the repository of a link's target, on the page `name`."""
    return posixpath.normpath(posixpath.join("" if name == INDEX else DOCS, target))


def _page(path: str) -> str:
    """Return a page with the text of a file, or with the names in a folder."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(entry.name for entry in place.iterdir() if not entry.name.startswith("__"))
        text, language = "\n".join(names), "text"
    else:
        text, language = place.read_text(), LANGUAGES.get(place.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````{language}\n{text}\n````\n"
