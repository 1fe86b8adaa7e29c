"""A figure as a file of its own, for pages that show images: it carries its colours, light and dark."""

from __future__ import annotations

from onelaunch.report.theme import figure_style


def standalone(svg: str) -> str:
    head, rest = svg.split(">", 1)
    return f"{head}><style>{figure_style()}</style>{rest}\n"
