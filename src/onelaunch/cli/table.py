"""A table on the terminal in the widest form that fits: columns, names on lines of their own, or one block per row."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console

from onelaunch.format import replace_control_characters


def print_table(
    console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
) -> None:
    """Print a table whose first column holds names; the other columns are right-aligned. Cells may have several lines.

    `styles`: one rich style per row; empty for none.
    """
    lines = _columns(head, rows)
    if _width(lines) > console.width:
        lines = _below_names(head, rows)
    if _width(lines) > console.width:
        lines = _blocks(head, rows)
    print_line(console, title)
    for number, line in lines:
        print_line(console, line, "" if number is None or not styles else styles[number])
    print_line(console, "")


def print_line(console: Console, line: str, style: str = "") -> None:
    """Print text as it is: not wrapped, no markup, control characters replaced."""
    console.print(replace_control_characters(line), style=style, markup=False, highlight=False, soft_wrap=True)


Lines = list[tuple[int | None, str]]  # the index of the row that a line belongs to (None: the head), and the line


def _width(lines: Lines) -> int:
    return max(cell_len(line) for _, line in lines)


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    parts = [cell.split("\n") for cell in head]
    widths = [
        max(cell_len(part) for cell in column for part in cell.split("\n")) for column in zip(head, *rows, strict=True)
    ]
    height = max(map(len, parts))
    top = [[*[""] * (height - len(cell)), *cell] for cell in parts]  # heads are aligned to the bottom
    lines: Lines = [(None, _align([cell[i] for cell in top], widths)) for i in range(height)]
    lines.append((None, "─" * (sum(widths) + len(widths))))
    for number, row in enumerate(rows):
        cells = [cell.split("\n") for cell in row]
        for i in range(max(map(len, cells))):
            lines.append((number, _align([cell[i] if i < len(cell) else "" for cell in cells], widths)))
    return lines


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = set_cell_size(cells[0], widths[0])
    others = (" " * (width - cell_len(cell)) + cell for cell, width in zip(cells[1:], widths[1:], strict=True))
    return f" {' '.join([first, *others])}".rstrip()


def _below_names(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    """The table without its first column, each row below its name."""
    lines = _columns(["", *head[1:]], [["", *row[1:]] for row in rows])
    found: Lines = []
    named: set[int | None] = {None}
    for number, line in lines:
        if number not in named:
            assert number is not None
            found.append((number, f" {rows[number][0]}"))
            named.add(number)
        found.append((number, line))
    return found


def _blocks(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    """One line per cell, below the name of its row."""
    names = [name.replace("\n", " ") for name in head]
    width = max(map(cell_len, names[1:]))
    lines: Lines = []
    for number, row in enumerate(rows):
        lines.append((number, row[0]))
        for name, cell in zip(names[1:], row[1:], strict=True):
            if cell:
                lines.append((number, f"  {set_cell_size(name, width)}  {cell.replace(chr(10), ' ')}".rstrip()))
    return lines
