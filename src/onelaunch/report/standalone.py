"""A figure as a file of its own, for pages that show images: it carries its colours, light and dark."""

from __future__ import annotations

from onelaunch.report.theme import figure_style

SHOWN_WIDTH = 460  # pixels; as wide as the page allows, a short chart would be a tall one


def standalone(svg: str) -> str:
    head, rest = svg.split(">", 1)
    return f'{head} width="{SHOWN_WIDTH}"><style>{figure_style()}</style>{rest}\n'
