"""Part of `make docs`: shows the parameters that a docstring describes as a list.

Docstrings here describe a parameter by a line that begins with its name and a colon. Markdown would join these lines to one
paragraph.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

DESCRIBED = re.compile(r"^(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*): (?=\S)")


class ParameterLists(griffe.Extension):
    """Rewrites the docstrings of functions and classes after griffe has read them."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring:
            func.docstring.value = with_lists(func.docstring.value, {one.name for one in func.parameters})

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.docstring:
            names = {one.name for one in cls.parameters} | set(cls.members)
            cls.docstring.value = with_lists(cls.docstring.value, names)


def with_lists(text: str, parameters: set[str]) -> str:
    """The docstring with a list item for every line that describes one or more of `parameters`."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        found = DESCRIBED.match(line)
        names = [name.lstrip("*") for name in found["names"].split(", ")] if found else []
        if found and parameters.issuperset(names):
            if not in_list and lines and lines[-1]:
                lines.append("")
            in_list = True
            shown = ", ".join(f"`{name}`" for name in found["names"].split(", "))
            lines.append(f"- {shown}: {line[found.end() :]}")
        else:
            in_list = in_list and bool(line.strip())
            lines.append(f"    {line}" if in_list else line)
    return "\n".join(lines)
