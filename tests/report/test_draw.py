from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch import format as number
from onelaunch.report.draw import WIDTH, Bar, Line, _tick, bar_chart, line_chart
from onelaunch.report.palette import Palette
from onelaunch.report.scale import Scale, fitted, is_wide
from onelaunch.report.standalone import standalone

finite = st.floats(-1e6, 1e6, allow_subnormal=False)
positive = st.floats(1e-9, 1e9)


@settings(max_examples=60, deadline=None)
@given(st.lists(finite, min_size=1, max_size=20))
def test_a_linear_scale_holds_its_values_and_has_round_ticks(values):
    scale = fitted(values, 0, 100)
    assert all(-1e-6 <= scale(value) <= 100 + 1e-6 for value in values)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 12
    assert ticks == sorted(ticks)


@settings(max_examples=60, deadline=None)
@given(st.lists(positive, min_size=1, max_size=20))
def test_a_logarithmic_scale_holds_its_values(values):
    scale = fitted(values, 0, 100, log=True)
    assert all(-1e-6 <= scale(value) <= 100 + 1e-6 for value in values)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(scale.low <= tick <= scale.high for tick in ticks)


def test_places_on_paper():
    scale = Scale(1, 100, 0, 200, log=True)
    assert [round(scale(v)) for v in (1, 10, 100)] == [0, 100, 200]
    assert Scale(0, 10, 50, 0)(2.5) == 37.5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=30), st.booleans())
def test_any_lines_make_valid_svg_inside_its_frame(points, log):
    x, y = zip(*points, strict=True)
    svg = line_chart(
        "c", "a < b", [Line("one & two", x, y), Line("three", x, y)], x_label="x", y_label="y", log_x=log, log_y=log
    )
    root = ElementTree.fromstring(standalone(svg))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert width == WIDTH
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        if path.attrib["class"].startswith("l"):
            places = [float(n) for n in re.findall(r"-?[\d.]+", path.attrib["d"])]
            assert all(-1 <= place <= max(width, height) + 1 for place in places)


def test_values_that_are_not_numbers_are_left_out():
    svg = line_chart("c", "t", [Line("a", [1, 2, 3], [1.0, math.nan, 2.0])], x_label="x", y_label="y")
    assert "nan" not in svg


def test_bars_are_as_long_as_their_values():
    bars = [Bar("ours", 1.0, "1 s", 0.9, 1.1, "ours"), Bar("peer", 4.0, "4 s", 3.5, 5.0)]
    root = ElementTree.fromstring(bar_chart("c", "t", bars, what="Time"))
    space = "{http://www.w3.org/2000/svg}"
    first, second = (float(rect.attrib["width"]) for rect in root.iter(f"{space}rect"))
    assert second / first == pytest.approx(4, rel=0.01)
    assert [element.text for element in root.iter(f"{space}desc")] == ["Time: ours 1 s; peer 4 s"]
    for words in root.iter(f"{space}text"):
        assert float(words.attrib["x"]) + 7.8 * len(words.text or "") <= WIDTH + 1, words.text


def test_a_whisker_leaves_room_for_the_bars():
    bars = [Bar("ours", 1.0, "1 s", 0.9, 1.1, "ours"), Bar("peer", 2.0, "2 s", 1.9, 500.0)]
    root = ElementTree.fromstring(bar_chart("c", "t", bars, what="Time"))
    widths = [float(rect.attrib["width"]) for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[0] > 50


@pytest.mark.parametrize(
    ("values", "wide"), [([1.0, 2.0], False), ([0.1, 2.0], True), ([0.0, 2.0], False), ([math.nan], False)]
)
def test_a_logarithmic_axis_is_for_values_far_apart(values, wide):
    assert is_wide(values) == wide


def test_ticks_of_a_narrow_logarithmic_axis_are_round():
    assert fitted([1.9, 2.3], 0, 100, log=True).ticks() == pytest.approx([1.8, 2.0, 2.2, 2.4])


def marks(svg: str, axis: str) -> list[str]:
    """The words at the ticks of an axis; the last along x is its name."""
    return re.findall(rf'class="{"end" if axis == "y" else "mid"} soft">([^<]*)<', svg)


@pytest.mark.parametrize(
    "values", [(2.3504, 2.3511), (97.1, 97.9), (0.5, 0.5 + 1e-9), (123456.1, 123456.9), (3.0, 3.0)]
)
def test_ticks_of_values_close_together_have_words_of_their_own(values):
    svg = line_chart("c", "t", [Line("a", [1, 2], values)], x_label="step", y_label="loss")
    words = marks(svg, "y")
    assert len(words) == len(set(words)) > 2
    numbers = [float(word.replace(",", "")) for word in words]
    steps = [b - a for a, b in itertools.pairwise(numbers)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-6), "a tick is not where its words say"


@pytest.mark.parametrize(("steps", "shown"), [([1], ["1"]), ([1, 2], ["1", "2"]), ([1, 2, 3, 4], ["1", "2", "3", "4"])])
def test_there_is_nothing_between_two_steps(steps, shown):
    svg = line_chart("c", "t", [Line("a", steps, [2.0] * len(steps))], x_label="step", y_label="loss")
    assert marks(svg, "x") == [*shown, "step"]


def test_marks_in_any_order_are_all_there():
    line = Line("a", [1, 32, 64], [1.0, 2.0, 3.0])
    svg = line_chart("c", "t", [line], x_label="size", y_label="y", log_x=True, x_ticks=[64, 32, 32, 1])
    assert marks(svg, "x") == ["1", "32", "64", "size"]


def test_more_lines_than_colours_can_still_be_told_apart():
    palette = Palette()
    looks = [palette.look(f"name {number}") for number in range(40)]
    assert len(set(looks)) == 40
    assert palette.look("name 3") == looks[3]
    lines = [Line(f"name {number}", [1, 2], [1.0, 2.0]) for number in range(12)]
    svg = line_chart("c", "t", lines, x_label="x", y_label="y", palette=palette)
    drawn = re.findall(r'<path class="(l\d d\d)" [^>]*><title>', svg)
    assert drawn == [f"l{look.colour} d{look.form}" for look in looks[:12]]


def test_every_dot_has_its_number_apart_from_the_others():
    points = [(1.0, 1.0), (1.0, 1.0), (1.01, 1.0), (50.0, 3.0), (math.nan, 1.0), (100.0, 9.0)]
    x, y = zip(*points, strict=True)
    svg = line_chart("c", "t", [Line("a", x, y, dots=list("abcdef"))], x_label="x", y_label="y", log_x=True)
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="dot">([^<]*)<', svg)
    assert [number for _, _, number in found] == ["1–3", "4", "6"]  # as in the list below the picture
    assert len({place[:2] for place in found}) == 3


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (number.format_number(2.3495, 5), "2.3495"), (number.format_number(250.25, 5), "250.25"), (number.format_number(1234.5, 5), "1,234.5"),
        (number.format_seconds(5.709e-6), "5.71 µs"), (number.format_seconds(0.9999e-3), "1.00 ms"), (number.format_seconds(90), "90.0 s"),
        (number.format_seconds(None), "–"), (number.format_number(math.nan), "–"), (number.format_percent(math.inf), "–"),
        (number.format_seconds(0), "0 ns"), (number.format_bytes(206 * 2**20), "206 MiB"),
        (number.format_bytes(12), "12.0 B"), (number.format_joules(0.0123), "12.3 mJ"), (number.format_rate(4.26e12, "B/s"), "4.26 TB/s"),
        (number.format_percent(0.9852, 2), "98.52 %"), (number.format_ratio(2.4312), "2.43×"), (number.format_ratio(1234.5), "1,234×"),
        (number.format_number(1e-7), "1.00e-07"), (_tick("30.0 ms"), "30 ms"), (_tick("0.050"), "0.05"), (_tick("100"), "100"),
        (_tick("1.00×"), "1×"),
    ],
)  # fmt: skip
def test_numbers_as_people_read_them(made, words):
    assert made == words
