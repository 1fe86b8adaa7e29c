"""Charts as SVG text: lines over steps or sizes, and bars against peers. The same values always make the same bytes.

A chart is 330 units wide with 12.5-unit type, and the page shows it 320 to 384 pixels wide, so that its type has the size of
the page's, on a phone too. Each chart has a title and a description for screen readers; the values are in a table beside it
(`figure.py`).
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Protocol

from onelaunch.colours import SERIES
from onelaunch.format import format_number, replace_control_characters
from onelaunch.report.palette import Look, Palette
from onelaunch.report.scale import Scale, fitted
from onelaunch.report.theme import DASHES

WIDTH, HEIGHT = 330, 250
LEFT, RIGHT, BOTTOM = 62, 14, 44
CHARACTER, BOLD_CHARACTER = 6.9, 7.8  # width in units of a character of 12.5-unit type, an upper estimate
MAX_WHISKER = 2.0  # times the bar's length
CLUSTER = 7.0  # dots closer than this share a label
MIN_BAR = 50  # units that the words beside the longest bar leave for it
MAX_MARKERS, MARKERS_ALONG = 14, 5  # a line with more points than the first has markers at a few of them
MARKERS = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", "M-3.5-3.5h7v7h-7z", "M0-4.6L4.4 3.4H-4.4z", "M0-5L5 0L0 5L-5 0z",
           "M0 4.6L4.4-3.4H-4.4z", "M-1.5-4.5h3v9h-3z", "M-4.5-1.5h9v3h-9z")  # fmt: skip


class Write(Protocol):
    """How an axis writes its values, with more significant figures where three cannot tell two ticks apart."""

    def __call__(self, value: float, figures: int = 3, /) -> str: ...


@dataclass(frozen=True)
class Line:
    """`low` and `high` make a band. `steps` draws a staircase: each value holds until the next."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    steps: bool = False
    dots: Sequence[str] = ()  # names of the points, which are drawn without a line and numbered from 1


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    shown: str  # the text beside the bar: the formatted value, and more if needed
    low: float | None = None
    high: float | None = None
    kind: str = "bar"  # or "ours", or "floor"
    colour: int | None = None  # the palette's, where other figures draw this name too


def nan_for_null(values: Iterable[float | None]) -> list[float]:
    """The values with NaN for None: JSON writes a number that is not finite as null."""
    return [math.nan if value is None else value for value in values]


def coordinate(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def chart(identity: str, title: str, description: str, height: float, body: str) -> str:
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {coordinate(height)}" role="img" '
        f'aria-labelledby="{identity}-t {identity}-d"><title id="{identity}-t">{escape(title)}</title>'
        f'<desc id="{identity}-d">{escape(description)}</desc>{body}</svg>'
    )


def text(x: float, y: float, words: str, classes: str = "") -> str:
    marked = f' class="{classes}"' if classes else ""
    return f'<text x="{coordinate(x)}" y="{coordinate(y)}"{marked}>{escape(replace_control_characters(words))}</text>'


def line_chart(
    identity: str,
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
    write_x: Write = format_number,
    write_y: Write = format_number,
    x_ticks: Sequence[float] = (),
    palette: Palette | None = None,
) -> str:
    """Lines, with a legend. `x_ticks` marks the x axis at values that suit it better than round numbers. `palette` is the
    page's, so that a name looks the same in all figures."""
    palette = palette or Palette()
    palette.add(line.name for line in lines)
    looks = [palette.look(line.name) for line in lines]
    legend, top = _legend(lines, looks)
    top += 22  # for the name of the y axis
    x = fitted((v for line in lines for v in line.x), LEFT, WIDTH - RIGHT, log=log_x)
    everything = (v for line in lines for part in (line.y, line.low, line.high) for v in part)
    y = fitted(everything, HEIGHT + top - BOTTOM, top, log=log_y, from_zero=from_zero)
    parts = [legend, text(0, top - 10, y_label, "soft")]
    for tick, words in labels(y.ticks(), write_y):
        at = coordinate(y(tick))
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 6, y(tick) + 4, words, "end soft"))
    ticks = sorted(set(x_ticks)) or x.ticks()
    if all(value == round(value) for line in lines for value in line.x if math.isfinite(value)):
        ticks = [tick for tick in ticks if tick == round(tick)]  # there is nothing between two steps
    parts.append(x_axis(x, y.start, x_label, labels(ticks, write_x)))
    for line, look in sorted(zip(lines, looks, strict=True), key=lambda entry: bool(entry[0].dots)):  # dots on top
        parts.append(_line(line, look, x, y, write_x, write_y))
    ends = ", ".join(f"{line.name} ends at {write_y(line.y[-1])}" for line in lines if len(line.y) and not line.dots)
    return chart(identity, title, f"{y_label} over {x_label}. {ends}", HEIGHT + top, "".join(parts))


def _tick(words: str) -> str:
    """`30 ms` for `30.0 ms`: trailing zeros mean nothing on an axis."""
    return re.sub(r"(\.\d*?)0+(?!\d)", lambda found: "" if found[1] == "." else found[1], words)


def labels(ticks: Sequence[float], write: Write) -> list[tuple[float, str]]:
    """Each tick with its text, in as many significant figures as its position needs."""
    nearest = min((after - before for before, after in pairwise(ticks)), default=math.inf)
    exact = (n for n in range(3, 12) if all(abs(float(f"{tick:.{n}g}") - tick) <= nearest / 100 for tick in ticks))
    figures = next(exact, 12)
    return [(tick, _tick(write(tick, figures))) for tick in ticks]


def x_axis(x: Scale, bottom: float, label: str, ticks: Sequence[tuple[float, str]]) -> str:
    parts = [f'<path class="axis" d="M{LEFT} {coordinate(bottom)}H{WIDTH - RIGHT}"/>']
    taken = -math.inf
    for tick, words in ticks:
        half = len(words) * CHARACTER / 2
        if x(tick) - half > taken + 4:  # otherwise it would overlap its neighbour
            middle = min(x(tick), WIDTH - half)
            parts.append(f'<path class="axis" d="M{coordinate(x(tick))} {coordinate(bottom)}v4"/>')
            parts.append(text(middle, bottom + 18, words, "mid soft"))
            taken = middle + half
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, bottom + 37, label, "mid soft"))
    return "".join(parts)


def _legend(lines: Sequence[Line], looks: Sequence[Look]) -> tuple[str, float]:
    parts, x, y = [], 0.0, 12.0
    for line, look in zip(lines, looks, strict=True):
        width = 34 + len(line.name) * CHARACTER
        if x and x + width > WIDTH:
            x, y = 0.0, y + 19
        if not line.dots:
            parts.append(f'<path class="{_stroke(look)}" d="M{coordinate(x)} {coordinate(y - 4)}h24"/>')
        parts.append(_marker(look, x + 12, y - 4))
        parts.append(text(x + 30, y, line.name))
        x += width + 8
    return "".join(parts), y + 10


def _stroke(look: Look) -> str:
    return f"l{look.colour}" + (f" d{1 + (look.turn - 1) % (len(DASHES) - 1)}" if look.turn else "")


def _marker(look: Look, x: float, y: float, words: str = "") -> str:
    title = f"<title>{escape(words)}</title>" if words else ""
    shape = MARKERS[look.form % len(MARKERS)]
    return f'<path class="m{look.colour}" transform="translate({coordinate(x)} {coordinate(y)})" d="{shape}">{title}</path>'


def _line(line: Line, look: Look, x: Scale, y: Scale, write_x: Write, write_y: Write) -> str:
    names = line.dots or [line.name] * len(line.x)
    points = [
        (x(a), y(b), f"{name}: {write_y(b)} at {write_x(a)}", number)
        for number, (a, b, name) in enumerate(zip(line.x, line.y, names, strict=True), 1)
        if math.isfinite(a) and math.isfinite(b) and (b > 0 or not y.log)
    ]
    if not points:
        return ""
    parts = []
    if len(line.low):
        over, under = (
            [f"{coordinate(x(a))} {coordinate(y(b))}" for a, b in zip(line.x, edge, strict=True) if math.isfinite(b)]
            for edge in (line.high, line.low)
        )
        parts.append(f'<path class="b{look.colour}" d="M{"L".join(over + under[::-1])}z"/>')
    if not line.dots:
        first, *rest = points
        if line.steps:
            course = "".join(f"H{coordinate(px)}V{coordinate(py)}" for px, py, *_ in rest)
        else:
            course = "".join(f"L{coordinate(px)} {coordinate(py)}" for px, py, *_ in rest)
        words = f"<title>{escape(line.name)}</title>"
        parts.append(
            f'<path class="{_stroke(look)}" d="M{coordinate(first[0])} {coordinate(first[1])}{course}">{words}</path>'
        )
    marked = points
    if (
        not line.dots and len(points) > MAX_MARKERS
    ):  # each line at other places, so that lines on top of each other show
        offset = (look.form + 1) * len(points) // (MARKERS_ALONG * (SERIES + 1)) % len(points)
        marked = points[offset :: max(1, len(points) // MARKERS_ALONG)]
    parts += [_marker(look, px, py, words) for px, py, words, _ in marked]
    if line.dots:
        parts.append(_numbers([(px, py, number) for px, py, _, number in points]))
    return "".join(parts)


def _numbers(dots: Sequence[tuple[float, float, int]]) -> str:
    """Labels with the numbers of the dots. Dots on top of each other share a label; a label avoids dots and other labels as far
    as there is room."""
    clusters: dict[tuple[float, float], list[int]] = {}
    for px, py, number in dots:
        near = (center for center in clusters if math.dist(center, (px, py)) < CLUSTER)
        clusters.setdefault(next(near, (px, py)), []).append(number)
    taken = [(px - 5, py - 5, px + 5, py + 5) for px, py, _ in dots]
    parts = []
    for (px, py), numbers in clusters.items():
        words = _ranges(numbers)
        wide = len(words) * CHARACTER
        corners = ((px + 6, py - 6), (px - 6 - wide, py - 6), (px - wide / 2, py - 18), (px - wide / 2, py + 6),
                   (px + 5, py - 16), (px + 5, py + 5), (px - 5 - wide, py - 16), (px - 5 - wide, py + 5))  # fmt: skip
        boxes = [(left, top, left + wide, top + 12) for left, top in corners]
        inside = [box for box in boxes if box[0] >= LEFT and box[2] <= WIDTH]
        box = min(inside or boxes, key=lambda box: sum(_overlap(box, other) for other in taken))
        taken.append(box)
        parts.append(text(box[0], box[1] + 10, words, "dot"))
    return "".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """`7–11, 16` for 7, 8, 9, 10, 11, 16."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> float:
    """The area that two boxes share."""
    across, down = (min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in (0, 1))
    return max(0.0, across) * max(0.0, down)


def bar_chart(
    identity: str, title: str, bars: Sequence[Bar], *, what: str, heading: str = "", mark: float | None = None
) -> str:
    """Horizontal bars from zero, each with its name above it and its value beside it. Whiskers run from low to high, or to an
    open end where they would leave no room for the bars.

    `heading` is for a picture on its own; `mark` draws a line across all bars.
    """
    lengths = [max(bar.value, min(bar.high or 0.0, MAX_WHISKER * bar.value)) for bar in bars]
    widest = max(lengths, default=1.0) or 1.0
    room = max((len(bar.shown) for bar in bars), default=0) * BOLD_CHARACTER + 12
    scale = Scale(0, widest, 0, max(MIN_BAR, WIDTH - room))
    head = textwrap.wrap(heading, int(WIDTH / CHARACTER))
    parts = [text(0, 14 + 16 * row, words, "soft") for row, words in enumerate(head)]
    y = 10.0 + 16 * len(head) if head else 0.0
    if mark is not None and mark <= widest:
        parts.append(f'<path class="grid" d="M{coordinate(scale(mark))} {coordinate(y)}v{45 * len(bars)}"/>')
    for bar in bars:
        parts.append(text(0, y + 13, bar.label, "strong" if bar.kind == "ours" else ""))
        length, middle = max(1.0, scale(bar.value)), y + 28
        words = f"<title>{escape(f'{bar.label}: {bar.shown}')}</title>"
        filled = bar.kind if bar.colour is None else f"m{bar.colour}"
        box = f'x="0.5" y="{coordinate(y + 20)}" width="{coordinate(length)}" height="16" rx="2"'
        parts.append(f'<rect class="{filled}" {box}>{words}</rect>')
        if bar.low is not None and bar.high is not None and bar.high > bar.low:
            low, high = coordinate(scale(bar.low)), coordinate(scale(min(bar.high, widest)))
            ends = f"M{low} {coordinate(middle - 4)}v8" + (
                f"M{high} {coordinate(middle - 4)}v8" if bar.high <= widest else ""
            )
            parts.append(f'<path class="whisker" d="M{low} {coordinate(middle)}H{high}{ends}"/>')
        end = max(length, scale(min(bar.high, widest)) if bar.high is not None else 0)
        parts.append(text(end + 7, y + 32, bar.shown, "strong" if bar.kind == "ours" else ""))
        y += 45
    spoken = "; ".join(f"{bar.label} {bar.shown}" for bar in bars)
    return chart(identity, title, f"{what}: {spoken}", y + 2, "".join(parts))
