"""Part of `make docs`: brings files from outside docs/ into the site, and points the links of every page at them.

Pages link to files relative to their own place in the repository, as a reader of the repository needs it. In the site
these files are elsewhere: docs/x.md is x.md, benchmarks/results/x.json is recordings/x.json, CONTRIBUTING.md is
contributing.md.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # repository → site
FOLDERS = {"benchmarks/results": "recordings", "examples": "examples", "docs": ""}
LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")
HEADLINES = "<!-- headlines of the README -->"  # replaced by the README's table of results
README_RESULTS = re.compile(r"<!-- results:.*?-->\n(.*?)<!-- end of results -->", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs: add the repository's files that pages link to."""
    added = {ROOT / source: place for source, place in PAGES.items()}
    added |= {path: f"recordings/{path.name}" for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))}
    added |= {path: f"examples/{path.name}" for path in sorted((ROOT / "examples").glob("*.py"))}
    for path, place in added.items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Called by mkdocs: the page's text with the links of the site."""
    place = page.file.src_uri
    origins = {site: source for source, site in PAGES.items()}
    markdown = with_site_links(markdown, origins.get(place, f"docs/{place}"), place)
    if HEADLINES in markdown:
        found = README_RESULTS.search((ROOT / "README.md").read_text(encoding="utf-8"))
        assert found, "README.md has no table of results"
        markdown = markdown.replace(HEADLINES, with_site_links(found[1], "README.md", place))
    return markdown


def with_site_links(markdown: str, origin: str, place: str) -> str:
    """The text of the repository's file `origin` with its links changed to those of the site's page `place`.

    A link whose text is the name of a page's file gets the page's title as text.
    """

    def moved(link: re.Match[str]) -> str:
        target = site_place(posixpath.normpath(posixpath.join(posixpath.dirname(origin), link["path"])))
        path = posixpath.relpath(target, posixpath.dirname(place) or ".") if target else link["path"]
        text = title_of(target) if target and link["text"] == posixpath.basename(link["path"]) else link["text"]
        return f"[{text}]({path}{link['anchor'] or ''})"

    return LINK.sub(moved, markdown)


def title_of(place: str) -> str:
    """The name of a page in a sentence: its heading up to the first colon or comma; of another file, the file's name."""
    page = ROOT / "docs" / place
    if page.suffix != ".md" or not page.is_file():
        return posixpath.basename(place)
    return re.split("[:,]", page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "))[0]


def site_place(path: str) -> str | None:
    """Where the site has this file of the repository; None if it has not."""
    if path in PAGES:
        return PAGES[path]
    for folder, place in FOLDERS.items():
        if path.startswith(f"{folder}/"):
            return posixpath.join(place, path.removeprefix(f"{folder}/"))
    return None
