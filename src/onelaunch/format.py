"""Numbers as text: three significant digits and the unit that fits; a dash for None and for numbers that are not finite."""

from __future__ import annotations

import math

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
JOULES = ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"))
BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
NONE = "–"
CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n")}, "\N{REPLACEMENT CHARACTER}")


def format_number(value: float | None, figures: int = 3) -> str:
    """At least `figures` significant digits; an exponent only below 0.001 and from a million on."""
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
    """The text with U+FFFD for each control character except the newline: names come from files."""
    return words.translate(CONTROLS)


def format_count(value: float, figures: int = 3) -> str:
    """An integer with all its digits. `figures` is ignored: the signature is that of the other formats."""
    return f"{value:.0f}"


def _with_unit(value: float | None, units: tuple[tuple[float, str], ...], figures: int, suffix: str = "") -> str:
    if value is None or not math.isfinite(value):
        return NONE
    size, name = next((unit for unit in units if abs(value) >= 0.9995 * unit[0]), units[-1])
    return f"{format_number(value / size, figures)} {name}{suffix}".rstrip()


def format_seconds(value: float | None, figures: int = 3) -> str:
    return _with_unit(value, SECONDS, figures)


def format_joules(value: float | None) -> str:
    return _with_unit(value, JOULES, 3)


def format_bytes(value: float | None) -> str:
    return _with_unit(value, BYTES, 3)


def format_si(value: float | None, unit: str, figures: int = 3) -> str:
    """`4.26 TB/s` for the unit "B/s"; `4.26 T` for an empty unit."""
    return _with_unit(value, PREFIXES, figures, unit)


def format_percent(value: float | None, places: int = 1) -> str:
    """`98.5 %` for 0.985."""
    return NONE if value is None or not math.isfinite(value) else f"{100 * value:.{places}f} %"


def format_ratio(value: float | None, figures: int = 3) -> str:
    """`2.43×`"""
    return NONE if value is None or not math.isfinite(value) else f"{format_number(value, figures)}×"
