"""A page that needs no network and no other file: a template of the package, filled with data and colours, written whole."""

from __future__ import annotations

import html
import importlib.resources
import json
from pathlib import Path
from typing import Any

from onelaunch.colours import colour_rules
from onelaunch.errors import OnelaunchError, unwritable_reason
from onelaunch.files import write_atomic


def fill_page(package: str, data: dict[str, Any], title: str = "") -> str:
    """The template `page.html` of a package with its data. The data may hold anything, "</script>" too."""
    template = importlib.resources.files(package).joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    template = template.replace("{{colours}}", colour_rules(":root")).replace("{{title}}", html.escape(title))
    return template.replace("{{data}}", text)


def write_page(text: str, path: Path) -> Path:
    """Write a page; raises OnelaunchError where that is not possible."""
    if not path.name:
        raise OnelaunchError(f"path={str(path)!r} has no file name: pass one such as page.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name may hold what UTF-8 has no bytes for, a path what the system has none for.
        write_atomic(path, text.encode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        raise OnelaunchError(f"path={str(path)!r} {unwritable_reason(error)}") from error
    return path
