"""Part of `make docs`: shows what docstrings and comments say about parameters and fields as lists.

Docstrings here describe a parameter by a line that begins with its name and a colon, or by two aligned columns. Markdown
would join these lines to one paragraph. Fields of classes are described by the comment behind them.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

DESCRIBED = re.compile(r"^(?P<names>\*{0,2}\w+(?:(?:, | or )\*{0,2}\w+)*): (?=\S)")
ALIGNED = re.compile(r"^(?P<names> {0,4}\w+) {2,}(?=\S)")
COMMENT = re.compile(r"\s#\s+(?P<text>[^#]+)$")


class ParameterLists(griffe.Extension):
    """Rewrites docstrings after griffe has read them."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring:
            func.docstring.value = with_lists(func.docstring.value, {one.name for one in func.parameters})

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.docstring:
            names = {one.name for one in cls.parameters} | set(cls.members)
            cls.docstring.value = with_lists(cls.docstring.value, names)

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        comment = COMMENT.search(attr.lines[0]) if attr.lines else None
        if comment and attr.docstring is None and attr.parent and attr.parent.is_class:
            text = comment["text"].strip()
            attr.docstring = griffe.Docstring(f"{text[0].upper()}{text[1:]}.", parent=attr)


def with_lists(text: str, parameters: set[str]) -> str:
    """The docstring with a list item for every line that describes one or more of `parameters`, and for aligned lines."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        described, aligned = DESCRIBED.match(line), ALIGNED.match(line)
        names = re.split(r", | or ", described["names"]) if described else []
        if described and parameters.issuperset(name.lstrip("*") for name in names):
            item = f"- {', '.join(f'`{name}`' for name in names)}: {line[described.end() :]}"
        elif aligned:
            item = f"- `{aligned['names'].strip()}`: {line[aligned.end() :]}"
        else:
            in_list = in_list and bool(line.strip())
            lines.append(f"    {line}" if in_list else line)
            continue
        if not in_list and lines and lines[-1]:
            lines.append("")
        in_list = True
        lines.append(item)
    return "\n".join(lines)
