"""The parts of the page: tables, sections, and figures with their values as a table and the command that makes them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol


class Part(Protocol):
    """Anything that a section shows."""

    def html(self) -> str: ...


@dataclass(frozen=True)
class Table:
    """Cells as text. The first cell of a row is its heading; `ours` are the rows to set in bold.

    `keys`: for a table that the reader can sort, what each cell is sorted by: a number, or None to come last. The rows are
    given in the order of the first sort.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    ours: frozenset[int] = frozenset()
    keys: Sequence[Sequence[float | None]] = ()
    links: Sequence[str] = ()  # one per row: the identity of a section, for its heading

    def html(self) -> str:
        heads = [f'<button type="button">{escape(cell)}</button>' if self.keys else escape(cell) for cell in self.head]
        head = "".join(f'<th scope="col">{cell}</th>' for cell in heads)
        body = []
        for number, row in enumerate(self.rows):
            texts = [escape(cell) for cell in row]
            if self.links:
                texts[0] = f'<a href="#{self.links[number]}">{texts[0]}</a>'
            keys = (
                [f' data-key="{"" if key is None else key}"' for key in self.keys[number]]
                if self.keys
                else [""] * len(row)
            )
            cells = [f'<th scope="row"{keys[0]}>{texts[0]}</th>']
            cells += [f"<td{key}>{cell}</td>" for key, cell in zip(keys[1:], texts[1:], strict=True)]
            mark = ' class="ours"' if number in self.ours else ""
            body.append(f"<tr{mark}>{''.join(cells)}</tr>")
        # A wide table scrolls on its own, and the keyboard can reach it.
        return (
            f'<div class="scroll" role="group" tabindex="0" aria-label="{escape(self.caption, quote=True)}">'
            f"<table{' data-sortable' * bool(self.keys)}>"
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
class Picture:
    png: str  # in base64
    title: str
    note: str


@dataclass(frozen=True)
class Gallery:
    """Small images with a title each."""

    title: str
    note: str
    pictures: Sequence[Picture]

    def html(self) -> str:
        items = "".join(
            f'<li><img src="data:image/png;base64,{picture.png}" alt=""><strong>{escape(picture.title)}</strong> '
            f"<span>{escape(picture.note)}</span></li>"
            for picture in self.pictures
        )
        return f'<h3>{escape(self.title)}</h3><p class="note">{escape(self.note)}</p><ul class="gallery">{items}</ul>'


@dataclass(frozen=True)
class Code:
    """Programs and commands to copy, each with a line on what it is for."""

    title: str
    blocks: Sequence[tuple[str, str]]

    def html(self) -> str:
        blocks = "".join(
            f'<div><p class="note">{escape(what)}</p><pre tabindex="0"><code>{escape(code)}</code></pre></div>'
            for what, code in self.blocks
        )
        return f'<h3>{escape(self.title)}</h3><div class="code">{blocks}</div>'


@dataclass(frozen=True)
class Headline:
    """The result of a run in large type, and further figures beside it as (name, value)."""

    figure: str
    words: str
    more: Sequence[tuple[str, str]] = ()

    def html(self) -> str:
        more = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in self.more if value
        )
        return (
            f'<p class="result"><strong>{escape(self.figure)}</strong> <span>{escape(self.words)}</span></p>'
            f'<dl class="beside">{more}</dl>'
        )


@dataclass(frozen=True)
class Section:
    """A part of the page: the result, what to say about it, tables and figures; what ran and where comes last, folded."""

    identity: str
    title: str
    facts: Sequence[tuple[str, str]]
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    statements: Sequence[tuple[str, str]] = ()  # (good, bad or note, words)
    headline: Headline | None = None
    parts: Sequence[Part] = ()  # below the figures

    def html(self) -> str:
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in self.facts if value)
        about = (
            f'<details class="about"><summary>About these results</summary><dl>{facts}</dl></details>' if facts else ""
        )
        result = self.headline.html() if self.headline else ""
        said = "".join(f'<p class="{kind}">{escape(words)}</p>' for kind, words in self.statements)
        tables = "".join(table.html() for table in self.tables)
        figures = "".join(figure.html() for figure in self.figures)
        grid = f'<div class="figures">{figures}</div>' if figures else ""
        parts = "".join(part.html() for part in self.parts)
        return (
            f'<section aria-labelledby="{self.identity}"><h2 id="{self.identity}">{escape(self.title)}</h2>'
            f"{result}{said}{tables}{grid}{parts}{about}</section>"
        )


def made_by(command: str) -> str:
    return f"<p>made by <code>{escape(command)}</code></p>" if command else ""
