"""Numbers as text."""

from __future__ import annotations

import math

import pytest

from onelaunch.format import (
    format_bytes,
    format_joules,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    format_si,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_number(2.3495, 5), "2.3495"), (format_number(250.25, 5), "250.25"), (format_number(1234.5, 5), "1,234.5"),
        (format_number(math.nan), "–"), (format_number(1e-7), "1.00e-07"),
        (format_seconds(5.709e-6), "5.71 µs"), (format_seconds(0.9999e-3), "1.00 ms"), (format_seconds(90), "90.0 s"),
        (format_seconds(None), "–"), (format_seconds(0), "0 ns"),
        (format_bytes(206 * 2**20), "206 MiB"), (format_bytes(12), "12.0 B"), (format_joules(0.0123), "12.3 mJ"),
        (format_si(4.26e12, "B/s"), "4.26 TB/s"), (format_si(1.5e9, ""), "1.50 G"), (format_si(0, ""), "0"),
        (format_percent(0.9852, 2), "98.52 %"), (format_percent(math.inf), "–"),
        (format_ratio(2.4312), "2.43×"), (format_ratio(1234.5), "1,234×"),
    ],
)  # fmt: skip
def test_format(text, expected):
    assert text == expected
