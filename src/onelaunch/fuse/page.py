"""Writes an explanation as one HTML page that needs no network and no other file."""

from __future__ import annotations

import html
import importlib.resources
import json
from pathlib import Path
from typing import Any

from onelaunch.colours import colour_rules
from onelaunch.errors import OnelaunchError, reason_of
from onelaunch.files import write_atomic


def write_page(explanation: dict[str, Any], path: Path) -> Path:
    if not path.name:
        raise OnelaunchError(f"path={str(path)!r} has no file name: pass one such as page.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name may hold what UTF-8 has no bytes for, a path what the system has none for.
        write_atomic(path, page(explanation).encode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        raise OnelaunchError(
            f"path={str(path)!r} cannot be written: {reason_of(error)}; pass a writable path"
        ) from error
    return path


def page(explanation: dict[str, Any]) -> str:
    template = importlib.resources.files("onelaunch.fuse").joinpath("page.html").read_text(encoding="utf-8")
    # A label may hold anything, "</script>" too.
    data = json.dumps(explanation).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    template = template.replace("{{colours}}", colour_rules(":root"))
    return template.replace("{{title}}", html.escape(explanation["model"])).replace("{{data}}", data)
