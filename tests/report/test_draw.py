from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch.colours import DARK, LIGHT, OWN_COLOUR, SERIES
from onelaunch.report.draw import WIDTH, Bar, Line, _tick, bar_chart, line_chart
from onelaunch.report.palette import Palette
from onelaunch.report.standalone import standalone

positive = st.floats(1e-9, 1e9)


@settings(max_examples=60)
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
            numbers = [float(n) for n in re.findall(r"-?[\d.]+", path.attrib["d"])]
            assert all(-1 <= number <= max(width, height) + 1 for number in numbers)


def test_nan_is_left_out():
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


def marks(svg: str, axis: str) -> list[str]:
    """The texts at the ticks of an axis; the last one of the x axis is its name."""
    return re.findall(rf'class="{"end" if axis == "y" else "mid"} soft">([^<]*)<', svg)


@pytest.mark.parametrize(
    "values", [(2.3504, 2.3511), (97.1, 97.9), (0.5, 0.5 + 1e-9), (123456.1, 123456.9), (3.0, 3.0)]
)
def test_ticks_of_values_close_together_have_different_texts(values):
    svg = line_chart("c", "t", [Line("a", [1, 2], values)], x_label="step", y_label="loss")
    words = marks(svg, "y")
    assert len(words) == len(set(words)) > 2
    numbers = [float(word.replace(",", "")) for word in words]
    steps = [b - a for a, b in itertools.pairwise(numbers)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-6), "a tick is not where its text says"


@pytest.mark.parametrize(("steps", "shown"), [([1], ["1"]), ([1, 2], ["1", "2"]), ([1, 2, 3, 4], ["1", "2", "3", "4"])])
def test_there_are_no_ticks_between_two_steps(steps, shown):
    svg = line_chart("c", "t", [Line("a", steps, [2.0] * len(steps))], x_label="step", y_label="loss")
    assert marks(svg, "x") == [*shown, "step"]


def test_x_ticks_are_sorted_and_unique():
    line = Line("a", [1, 32, 64], [1.0, 2.0, 3.0])
    svg = line_chart("c", "t", [line], x_label="size", y_label="y", log_x=True, x_ticks=[64, 32, 32, 1])
    assert marks(svg, "x") == ["1", "32", "64", "size"]


def test_more_lines_than_colours_look_different():
    names = [f"name {number}" for number in range(30)]
    palette = Palette(names)
    looks = [palette.look(name) for name in names]
    assert len(set(looks)) == 30
    svg = line_chart("c", "t", [Line(n, [1, 2], [1.0, 2.0]) for n in names], x_label="x", y_label="y", palette=palette)
    drawn = re.findall(r'<path class="(l\d+(?: d\d)?)" [^>]*><title>', svg)
    assert len(set(drawn)) == 30
    assert drawn[:SERIES] == [f"l{number}" for number in range(SERIES)], "dashes only where the colours are used up"


def test_a_name_has_its_own_colour_whoever_is_drawn_before():
    contenders = [name for name in OWN_COLOUR if name not in ("training", "validation")]
    palette = Palette([f"run {number}" for number in range(5)], ["validation", "training"], ["x", *contenders])
    assert [palette.look(name).colour for name in ("training", "validation")] == [0, 1]
    assert {name: palette.look(name).colour for name in contenders} == {name: OWN_COLOUR[name] for name in contenders}
    assert palette.look("x").colour not in OWN_COLOUR.values()


def lab(colour: str) -> tuple[float, ...]:
    """CIELAB, in which a distance of 2 is just visible."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    xyz = (
        0.4339 * r + 0.3762 * g + 0.1899 * b,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        0.0177 * r + 0.1095 * g + 0.8729 * b,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_no_two_series_have_similar_colours(colours):
    series = [lab(colours[f"s{number}"]) for number in range(SERIES)]
    assert min(math.dist(one, other) for one, other in itertools.combinations(series, 2)) > 29


def test_a_long_line_has_a_few_markers():
    svg = line_chart("c", "t", [Line("a", range(300), range(300))], x_label="x", y_label="y")
    assert 4 <= svg.count('<path class="m0"') - 1 <= 6  # without that of the legend


def test_every_dot_has_its_number():
    points = [(1.0, 1.0), (1.0, 1.0), (1.01, 1.0), (50.0, 3.0), (math.nan, 1.0), (100.0, 9.0)]
    x, y = zip(*points, strict=True)
    svg = line_chart("c", "t", [Line("a", x, y, dots=list("abcdef"))], x_label="x", y_label="y", log_x=True)
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="dot">([^<]*)<', svg)
    assert [number for _, _, number in found] == ["1–3", "4", "6"]  # as in the list below the chart
    assert len({label[:2] for label in found}) == 3


@pytest.mark.parametrize(
    ("text", "expected"), [("30.0 ms", "30 ms"), ("0.050", "0.05"), ("100", "100"), ("1.00×", "1×")]
)
def test_trailing_zeros_are_removed_from_ticks(text, expected):
    assert _tick(text) == expected
