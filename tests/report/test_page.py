"""The page is complete, self-contained and well-formed, and can be read by a screen reader and without a mouse."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from onelaunch.colours import DARK, LIGHT, SERIES
from onelaunch.report.comparison import agreement, noise
from onelaunch.report.write import write_report
from onelaunch.train.run_folder import METRICS
from tests.report.outline import Outline
from tests.report.results import bench_results, compare_results, many_contenders


@pytest.fixture(scope="module")
def html(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def outline(html: str) -> Outline:
    return Outline(html)


def test_tags_are_closed_and_ids_are_unique(outline):
    assert outline.open == []
    identities = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(identities) == len(set(identities))
    for attributes in outline.all("a"):
        assert attributes["href"][1:] in identities
    for svg in outline.all("svg"):
        assert set(svg["aria-labelledby"].split()) <= set(identities)
        assert svg["role"] == "img"


def test_nothing_is_fetched_and_nothing_runs(html, outline):
    assert not outline.all("script")
    assert not [name for _, attributes in outline.tags for name in attributes if name.startswith("on")]
    outside = re.findall(r'(?:src|href)="([^"#]*)', html) + re.findall(r"url\(([^)]*)\)|@import", html)
    assert [address for address in outside if address not in ("data:,", "")] == []
    assert "default-src 'none'" in html


def test_names_are_text_not_markup(html, outline):
    assert "<b>" not in html
    assert "run <1>" in "".join(outline.text)
    assert "what <is> done" in "".join(outline.text)


def test_every_figure_has_a_table_and_a_command(html, outline):
    figures = html.split("<figure>")[1:]
    assert len(figures) >= 9
    for figure in figures:
        assert "<table>" in figure
        assert "made by <code>onelaunch " in figure
    assert len(outline.all("caption")) == len(outline.all("table"))
    assert all(cell.get("scope") in ("col", "row") for cell in outline.all("th"))
    assert not re.search(r"<th[^>]*></th>", html), "a column without a name"
    assert all(group["aria-label"] for group in outline.all("div") if group.get("role") == "group")


@pytest.mark.parametrize(
    "words",
    [
        "Loss curves", "Time of a step", "Memory over a step", "Speed-up over hidden size", "Roofline", "Energy", "Accuracy",
        "580.1", "NVIDIA H200", "torch.compile does not agree with torch eager", "power cap", "placement: cluster of 8",
        "ops/broken failed its check and was not timed: AssertionError: output differs by 3.0", "Absent: peer (not installed)",
        "1 case was skipped", "used 0.1 of 2 cores before the start, 0.5 during the run",
        "Interrupted", "cpu, the fastest", "97.00 % ± 1.00 %",
    ],
)  # fmt: skip
def test_the_page_contains(outline, words):
    found = " ".join(outline.text)
    assert words in found


def test_a_failed_case_has_no_figure(html):
    assert "<h3>ops/broken</h3>" not in html
    assert "<h3>ops/relu</h3>" in html


def test_noisy_times_are_reported():
    results = compare_results()
    assert noise(results) == []
    results["contenders"]["torch.compile"]["step_seconds"]["maximum"] = 1e-3
    results["sizes"]["step_seconds"]["torch eager"]["128"]["maximum"] = 1e-3
    assert [words for _, words in noise(results)] == [
        "The machine was busy: torch.compile took 180 µs to 1.00 ms per step",
        "The machine was busy: torch eager at size 128 took 90.0 µs to 1.00 ms per step",
    ]


def test_a_ratio_within_the_spreads_is_marked(tmp_path):
    results = bench_results()
    results["cases"][0]["times"]["JAX & scan"]["spread"] = 0.5
    (tmp_path / "bench.json").write_text(json.dumps(results))
    html = write_report([tmp_path / "bench.json"], tmp_path / "page.html").read_text()
    assert "≈ 0.900×" in html
    assert "≈: too noisy to tell" in html


def test_losses_that_vary_too_much_are_inconclusive():
    found = compare_results()["contenders"]
    found["onelaunch resident"]["gap"].update(relative=1.0, bound=4.0)
    kinds = dict(agreement(found)[::-1])
    assert "onelaunch resident cannot be told from torch eager" in kinds["note"]


def test_a_name_looks_the_same_in_every_figure(tmp_path, inputs):
    (tmp_path / "compare.json").write_text(json.dumps(many_contenders()))
    html = write_report([*inputs, tmp_path / "compare.json"], tmp_path / "page.html").read_text()
    colours: dict[str, set[str]] = {}
    markers: dict[str, set[str]] = {}
    figures: dict[str, int] = {}
    for colour, shape, name in re.findall(
        r'<path class="m(\d+)" [^>]*d="([^"]*)"></path><text [^>]*>([^<]*)</text>', html
    ):
        colours.setdefault(name, set()).add(colour)
        markers.setdefault(name, set()).add(shape)
        figures[name] = figures.get(name, 0) + 1
    for kind, colour, name in re.findall(r'class="([lm])(\d+)(?: d\d)?" [^>]*><title>([^<:]*)[:<]', html):
        assert kind
        colours.setdefault(name, set()).add(colour)
    assert figures["torch eager"] >= 6
    assert figures["onelaunch resident"] >= 4
    assert all(len(found) == 1 for found in (*colours.values(), *markers.values()))
    assert colours["onelaunch"] == {"0"}


def test_contenders_of_a_whole_page_differ(tmp_path):
    one, other = compare_results(), compare_results()
    for number, name in enumerate(
        ["onelaunch eager", "onelaunch cpu", "onelaunch graph", "JAX scan", "peer 1", "peer 2"]
    ):
        (one if number % 2 else other)["contenders"][name] = one["contenders"]["torch.compile"]
    for number, results in enumerate((one, other)):
        (tmp_path / f"{number}.json").write_text(json.dumps(results))
    html = write_report([tmp_path], tmp_path / "page.html").read_text()
    names = {*one["contenders"], *other["contenders"]}
    found = set(re.findall(r'<path class="(l\d+(?: d\d)?)" [^>]*><title>([^<:]*)<', html))
    assert {name for _, name in found} >= names
    assert len({look for look, name in found if name in names}) == len(names)


def test_the_section_of_a_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / METRICS).write_text('{"epoch": 0, "step": 12, "loss": 1.0, "losses": [1.0]}\n')
    model = (
        "Linear(in_features=64, out_features=32, bias=True) ReLU() Linear(in_features=32, out_features=10, bias=True)"
    )
    about = {"model": model, "status": "finished", "commit": "abc123", "date": "2026-11-15T00:00:00+00:00"}
    (run / "run.json").write_text(json.dumps(about))
    (run / "config.toml").write_text(
        'epochs = 1\nactivation = "gelu"\ndropout = 0.25\nbatch_norm = true\nhidden = [32]\n'
    )
    html = write_report([run], tmp_path / "page.html").read_text()
    for words in (
        "64-32-10, gelu, dropout 0.25, batch norm",
        "1 epoch, 12 steps done",
        "abc123",
        "2026-11-15T00:00:00",
    ):
        assert f"{words}" in html
    assert "nfinished" not in html
    (run / "run.json").write_text(json.dumps({"status": "running"}))
    html = write_report([run], tmp_path / "page.html").read_text()
    assert "<dd>32, gelu, dropout 0.25, batch norm</dd>" in html
    assert "Training run: run (unfinished)" in html


def test_factors_are_relative_to_ours(tmp_path, html):
    assert "100 µs, 10.0×" in html  # torch eager against 10 µs
    assert "is its time divided by onelaunch's" in html
    assert "over the fastest" not in html
    results = compare_results()
    results["contenders"]["torch.compile"]["step_seconds"]["median"] = 5e-6
    (tmp_path / "compare.json").write_text(json.dumps(results))
    assert "5.00 µs, 0.500×" in write_report([tmp_path / "compare.json"], tmp_path / "page.html").read_text()


def test_the_dots_of_a_roofline_have_a_legend(html):
    roofline = html.split("<h3>Roofline</h3>")[1]
    assert '<ol class="keys"><li>ops/relu</li></ol>' in roofline
    assert 'class="dot">1</text>' in roofline


def test_heading_levels_are_not_skipped(outline):
    levels = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_the_same_inputs_make_the_same_bytes(inputs, page, tmp_path):
    assert write_report(inputs, tmp_path / "again.html").read_bytes() == page.read_bytes()


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_enough_contrast(colours):
    for ground in ("ground", "panel"):
        for words in ("text", "soft", "link", "good", "bad"):
            assert contrast(colours[words], colours[ground]) >= 4.5, (words, ground)
        for shape in ("other", *(f"s{i}" for i in range(SERIES))):
            assert contrast(colours[shape], colours[ground]) >= 3, (shape, ground)
