"""Numbers as people read them: three digits and the unit that fits; a dash for what is none."""

from __future__ import annotations

import math

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
JOULES = ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"))
BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
NONE = "–"
CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n")}, "\N{REPLACEMENT CHARACTER}")
RATES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def format_number(value: float | None, figures: int = 3) -> str:
    """Three significant digits or more, without an exponent where people would not write one."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1000:
        return f"{value:#.{figures}g}".rstrip(".") if abs(value) < 100 else f"{value:.{figures - 3}f}"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.{max(0, figures - 1 - math.floor(math.log10(abs(value))))}f}"
    return f"{value:.{figures - 1}e}"


def replace_control_characters(words: str) -> str:
    """With a mark in the place of each control character but the newline: names come out of files."""
    return words.translate(CONTROLS)


def format_count(value: float, figures: int = 3) -> str:
    """A count, with all its digits."""
    return f"{value:.0f}"


def _with_unit(value: float | None, units: tuple[tuple[float, str], ...], figures: int, suffix: str = "") -> str:
    if value is None or not math.isfinite(value):
        return NONE
    for size, name in units:
        if abs(value) >= 0.9995 * size:
            return f"{format_number(value / size, figures)} {name}{suffix}"
    return f"{format_number(value / units[-1][0], figures)} {units[-1][1]}{suffix}"


def format_seconds(value: float | None, figures: int = 3) -> str:
    return _with_unit(value, SECONDS, figures)


def format_joules(value: float | None) -> str:
    return _with_unit(value, JOULES, 3)


def format_bytes(value: float | None) -> str:
    return _with_unit(value, BYTES, 3)


def format_rate(value: float | None, unit: str, figures: int = 3) -> str:
    """`4.26 TB/s`, for unit "B/s"."""
    return _with_unit(value, RATES, figures, unit)


def format_percent(value: float | None, places: int = 1) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{100 * value:.{places}f} %"


def format_ratio(value: float | None, figures: int = 3) -> str:
    """A ratio: `2.43×`."""
    return NONE if value is None or not math.isfinite(value) else f"{format_number(value, figures)}×"


def with_article(noun: str) -> str:
    """`a step`, `an epoch`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
