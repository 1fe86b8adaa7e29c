"""The parts of the page: tables, sections, and figures with their values as a table and the command that makes them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """Cells as text. The first cell of a row is its heading; `ours` are the rows to set in bold."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    ours: frozenset[int] = frozenset()

    def html(self) -> str:
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        body = []
        for number, row in enumerate(self.rows):
            cells = [f'<th scope="row">{escape(row[0])}</th>', *(f"<td>{escape(cell)}</td>" for cell in row[1:])]
            mark = ' class="ours"' if number in self.ours else ""
            body.append(f"<tr{mark}>{''.join(cells)}</tr>")
        # A wide table scrolls on its own, and the keyboard can reach it.
        return (
            f'<div class="scroll" role="group" tabindex="0" aria-label="{escape(self.caption, quote=True)}"><table>'
            f"<caption>{escape(self.caption)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table></div>"
        )


@dataclass(frozen=True)
class Figure:
    title: str
    svg: str
    table: Table
    command: str
    note: str = ""
    keys: Sequence[str] = ()  # the meanings of the numbers 1, 2, … in the picture

    def html(self) -> str:
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        if self.keys:
            note = f'<ol class="keys">{"".join(f"<li>{escape(key)}</li>" for key in self.keys)}</ol>{note}'
        return (
            f"<figure><h3>{escape(self.title)}</h3>{self.svg}<figcaption>{note}{made_by(self.command)}</figcaption>"
            f"<details><summary>The same as a table</summary>{self.table.html()}</details></figure>"
        )


@dataclass(frozen=True)
class Section:
    """A part of the page: what ran and where, then tables and figures."""

    identity: str
    title: str
    facts: Sequence[tuple[str, str]]
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    statements: Sequence[tuple[str, str]] = ()  # (good, bad or note, words)

    def html(self) -> str:
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in self.facts if value)
        said = "".join(f'<p class="{kind}">{escape(words)}</p>' for kind, words in self.statements)
        tables = "".join(table.html() for table in self.tables)
        figures = "".join(figure.html() for figure in self.figures)
        grid = f'<div class="figures">{figures}</div>' if figures else ""
        return (
            f'<section aria-labelledby="{self.identity}"><h2 id="{self.identity}">{escape(self.title)}</h2><dl>{facts}</dl>'
            f"{said}{tables}{grid}</section>"
        )


def made_by(command: str) -> str:
    return f"<p>made by <code>{escape(command)}</code></p>" if command else ""
