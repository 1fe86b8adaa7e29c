"""Charts of predictions as SVG text: a confusion matrix, the accuracy of each class, and predicted against true values."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from onelaunch.format import format_number, format_percent
from onelaunch.report.draw import CHARACTER, WIDTH, chart, coordinate, labels, text, x_axis
from onelaunch.report.scale import fitted

MAX_CLASSES = 20  # of a confusion matrix
MAX_COUNTED = 12  # classes of a matrix whose cells have room for their counts
MAX_STRENGTH = 0.5  # opacity of a full cell: words on top of it stay readable
LEFT, MAX_LEFT, TOP = 62.0, 120.0, 34.0
CELL = 40.0  # height of a cell of a matrix, and its width unless names of classes need more
ROW = 24.0  # height of a bar with its space
SQUARE = 250.0  # height of the plot of values


def shortened(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def confusion_chart(identity: str, title: str, classes: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """One row per true class and one column per prediction. A cell is as strong as its share of the row; right predictions
    and mistakes have different colours. Names of classes get the room that there is."""
    longest = max(map(len, classes)) * CHARACTER + 8
    left = min(max(LEFT, longest), MAX_LEFT)
    room = (WIDTH - left - 4) / len(classes)
    width, height = min(room, max(CELL, longest)), min(room, CELL)
    parts = [text(left, 12, "predicted", "soft"), text(0, TOP - 4, "true", "soft")]
    for column, name in enumerate(classes):
        words = shortened(name, max(2, int(width / CHARACTER)))
        parts.append(text(left + (column + 0.5) * width, TOP - 4, words, "mid soft"))
    for row, name in enumerate(classes):
        y = TOP + row * height
        parts.append(text(left - 6, y + height / 2 + 4, shortened(name, int((left - 6) / CHARACTER)), "end soft"))
        total = sum(counts[row])
        for column, count in enumerate(counts[row]):
            if not count:
                continue
            strength = MAX_STRENGTH * (0.15 + 0.85 * count / total)
            x, colour = left + column * width, 0 if row == column else 1
            box = f'x="{coordinate(x)}" y="{coordinate(y)}" width="{coordinate(width - 1)}" height="{coordinate(height - 1)}"'
            words = f"<title>{escape(f'{name} predicted as {classes[column]}: {count:,}')}</title>"
            parts.append(f'<rect class="m{colour}" {box} rx="2" opacity="{strength:.2f}">{words}</rect>')
            if len(classes) <= MAX_COUNTED and len(str(count)) * CHARACTER <= width:
                parts.append(text(x + (width - 1) / 2, y + height / 2 + 4, str(count), "mid"))
    right, rows = sum(counts[i][i] for i in range(len(classes))), sum(map(sum, counts))
    across, down = coordinate(width * len(classes)), coordinate(height * len(classes))
    parts.append(f'<path class="frame" d="M{coordinate(left)} {TOP}h{across}v{down}H{coordinate(left)}z"/>')
    return chart(
        identity, title, f"{right:,} of {rows:,} rows on the diagonal", TOP + height * len(classes) + 4, "".join(parts)
    )


def share_chart(identity: str, title: str, shares: Sequence[tuple[str, float, str]]) -> str:
    """Bars from 0 to 100 %, one line each: (name, share, words beside it)."""
    side = max(len(words) for *_, words in shares) * CHARACTER + 14
    left = min(110.0, max(len(name) for name, *_ in shares) * CHARACTER + 10)
    full, parts = WIDTH - left - side, []
    for number, (name, share, words) in enumerate(shares):
        y = number * ROW
        parts.append(text(left - 8, y + 16, shortened(name, int((left - 8) / CHARACTER)), "end"))
        for part, kind in ((1.0, "rest"), (share, "m0")):
            box = f'x="{coordinate(left)}" y="{coordinate(y + 4)}" width="{coordinate(full * part)}" height="15" rx="2"'
            parts.append(f'<rect class="{kind}" {box}><title>{escape(f"{name}: {words}")}</title></rect>')
        parts.append(text(left + full + 8, y + 16, words, "soft"))
    spoken = "; ".join(f"{name} {format_percent(share)}" for name, share, _ in shares)
    return chart(identity, title, spoken, len(shares) * ROW + 2, "".join(parts))


def values_chart(identity: str, title: str, pairs: Sequence[Sequence[float]]) -> str:
    """Predicted over true values; a perfect prediction lies on the diagonal."""
    everything = [value for pair in pairs for value in pair]
    bottom = SQUARE + 22
    x, y = fitted(everything, LEFT, WIDTH - 14), fitted(everything, bottom, 22)
    parts = [text(0, 12, "predicted", "soft")]
    for tick, words in labels(y.ticks(), format_number):
        parts.append(f'<path class="grid" d="M{LEFT} {coordinate(y(tick))}H{WIDTH - 14}"/>')
        parts.append(text(LEFT - 6, y(tick) + 4, words, "end soft"))
    parts.append(x_axis(x, bottom, "true", labels(x.ticks(), format_number)))
    ends = f"M{coordinate(x(x.low))} {coordinate(y(x.low))}L{coordinate(x(x.high))} {coordinate(y(x.high))}"
    parts.append(f'<path class="frame" d="{ends}"/>')
    for true, predicted in pairs:
        words = f"<title>{escape(f'{format_number(true)} predicted as {format_number(predicted)}')}</title>"
        place = f'cx="{coordinate(x(true))}" cy="{coordinate(y(predicted))}"'
        parts.append(f'<circle class="m0" {place} r="3" opacity=".55">{words}</circle>')
    return chart(identity, title, f"predicted over true values of {len(pairs):,} rows", bottom + 44, "".join(parts))
