"""A figure as a file of its own, for pages that show images. It carries its colours, light and dark."""

from __future__ import annotations

from onelaunch.report.theme import figure_style

SHOWN_WIDTH = 460  # pixels: without a width, pages would blow a chart up to their own width


def standalone(svg: str) -> str:
    head, rest = svg.split(">", 1)
    return f'{head} width="{SHOWN_WIDTH}"><style>{figure_style()}</style>{rest}\n'
