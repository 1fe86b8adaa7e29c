"""Results that are unfinished or malformed: they are reported and left out, and the rest is drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from onelaunch.errors import OnelaunchError
from onelaunch.report.write import write_report
from onelaunch.train.run_folder import METRICS
from tests.report.conftest import EPOCHS
from tests.report.outline import Outline
from tests.report.results import bench_results, compare_results, many_contenders

WHOLE, TORN = json.dumps(EPOCHS[0]), '{"epoch": 1, "lo'


def drawn(folder: Path, results: dict) -> str:
    """The HTML of the page of one results file."""
    (folder / "results.json").write_text(json.dumps(results))
    return write_report([folder / "results.json"], folder / "page.html").read_text()


def test_an_impossible_energy_is_left_out(tmp_path):
    results = bench_results()
    results["cases"][0]["joules"] = {"onelaunch": 0.5, "torch eager": 0.06}  # 5 kW
    html = drawn(tmp_path, results)
    assert "Energy left out, because it includes the host&#x27;s time: ops/relu" in html
    assert "500 mJ" not in html


def test_binary_metrics_are_refused(tmp_path):
    (tmp_path / METRICS).write_bytes(b"\xff\x00")
    with pytest.raises(OnelaunchError, match=r"metrics.jsonl' cannot be read"):
        write_report([tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("status", "lines", "reported"),
    [
        ("running", [WHOLE, TORN], False),
        ("finished", [WHOLE, TORN], True),
        ("running", [WHOLE, TORN, WHOLE], True),
    ],
)
def test_metrics_that_are_cut_off_are_reported(tmp_path, status, lines, reported):
    """Except for the last line of a run that was killed or still runs."""
    (tmp_path / METRICS).write_text("\n".join(lines))
    (tmp_path / "run.json").write_text(json.dumps({"status": status}))
    complaints: list[str] = []
    write_report([tmp_path], tmp_path / "page.html", complain=complaints.append)
    assert any("is not JSON: nothing after it is shown" in line for line in complaints) == reported


def test_invalid_times_are_left_out(tmp_path):
    results = bench_results()
    results["cases"][0]["times"]["torch eager"]["median"] = float("nan")
    html = drawn(tmp_path, results)
    assert "ops/relu is left out: some of its times are not valid" in html
    assert "<h3>ops/relu</h3>" not in html


def test_results_without_a_case_or_contender_make_a_page(tmp_path):
    (tmp_path / "bench.json").write_text('{"cases": []}')
    (tmp_path / "compare.json").write_text(
        json.dumps({**compare_results(), "contenders": {}, "sizes": {}, "memory": {}})
    )
    inputs = [tmp_path / "bench.json", tmp_path / "compare.json", tmp_path / "bench.json"]
    html = write_report(inputs, tmp_path / "page.html").read_text()
    assert html.count("No case is finished.") == 1  # given twice, shown once
    assert "No contender is finished yet." in html


@pytest.mark.parametrize(
    "content", ["[]", "3", "{}", '{"contenders": []}', '{"cases": []}', '{"contenders": {"a": 1}}']
)
def test_a_malformed_comparison_is_left_out(tmp_path, content):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "compare.json").write_text(content)
    (tmp_path / "bench.json").write_text(json.dumps(bench_results()))
    complaints: list[str] = []
    html = write_report([tmp_path], tmp_path / "page.html", complaints.append).read_text()
    assert len(complaints) == 1
    assert "odd" in complaints[0]
    assert "take it again" in complaints[0]
    assert "Left out: " in html
    assert "<h3>ops/relu</h3>" in html


def test_a_malformed_file_leaves_out_only_itself(tmp_path):
    odd = bench_results()
    odd["command"] = 3
    (tmp_path / "a.json").write_text(json.dumps(odd))
    (tmp_path / "b.json").write_text(json.dumps(bench_results()))
    complaints: list[str] = []
    html = write_report([tmp_path], tmp_path / "page.html", complaints.append).read_text()
    assert [words.split("'")[1][-6:] for words in complaints] == ["a.json"]
    assert "<h3>ops/relu</h3>" in html


def test_any_number_of_contenders_is_drawn(tmp_path):
    html = drawn(tmp_path, many_contenders())
    assert "<h3>Loss curves</h3>" in html
    assert ">peer 8</text>" in html


def test_a_group_name_is_escaped_in_ids_too(tmp_path):
    results = bench_results()
    for case in results["cases"]:
        case["group"] = 'x"><h1>taken in</h1>'
    html = drawn(tmp_path, results)
    assert "<h1>taken" not in html
    outline = Outline(html)
    assert outline.open == []
    assert not [tag for tag, attributes in outline.tags if " " in (attributes.get("id") or "")]


@pytest.mark.parametrize("results", [bench_results(), compare_results()], ids=["bench", "compare"])
def test_results_of_a_killed_process_are_unfinished(tmp_path, results):
    results = {**results, "interrupted": False}
    for finished, reported in ((None, False), (True, False), (False, True)):
        content = results if finished is None else {**results, "finished": finished}
        html = drawn(tmp_path, content)
        assert ("Unfinished: it is still running or was killed." in html) == reported
        assert ("unfinished)</h2>" in html) == reported


def test_characters_that_utf8_cannot_encode_are_replaced(tmp_path):
    results = compare_results()
    results["data"] = "lone \ud800"
    path = tmp_path / "results\udcff.json"
    path.write_text(json.dumps(results))
    html = write_report([path], tmp_path / "page.html").read_bytes().decode()
    assert "lone ?" in html
    assert "Comparison results?" in html


def test_sizes_are_sorted(tmp_path):
    results = compare_results()
    results["sizes"]["hidden"] = [8192, 128, 128]
    html = drawn(tmp_path, results)
    table = html.split("<caption>Time of a step by hidden size</caption>")[1].split("</table>")[0]
    assert re.findall(r'<th scope="row">([^<]*)<', table) == ["128", "8,192"]
    figure = html.split("<h3>Time of a step over hidden size</h3>")[1].split("</svg>")[0]
    assert re.findall(r'class="mid soft">([^<]*)<', figure) == ["128", "8192", "hidden size"]


def test_failures_and_divergence_are_marked_as_bad(tmp_path):
    results = compare_results()
    results["failed"] = {"onelaunch cpu": "diverged at step 3", "onelaunch eager": "RuntimeError: no"}
    results["sizes"]["left_out"] = {"200000": "not enough memory"}
    for name in ("torch.compile", "onelaunch resident"):  # they have no curve to compare with the reference's
        results["contenders"][name] |= {"diverged_step": 4, "gap": None}
    results["contenders"]["peer"] = {
        **results["contenders"]["torch eager"],
        "gap": many_contenders()["contenders"]["peer 0"]["gap"],
    }
    html = drawn(tmp_path, results)
    for words in (
        "onelaunch cpu failed: diverged at step 3",
        "onelaunch eager failed: RuntimeError: no",
        "torch.compile and onelaunch resident both diverged (at step 4): the loss is no longer finite",
        "Hidden size 200000 was not timed: not enough memory",
        "peer does not agree with torch eager: ",
    ):
        assert f'<p class="bad">{words}' in html


def test_a_busy_machine_is_reported_for_a_benchmark(tmp_path):
    results = bench_results()
    results["machine"]["cpu"] = {"name": "a CPU", "cores": 2, "torch_threads": 2}
    for taken, reported in (([0.1, 0.2], False), ([0.0, 1.1], True), (None, False)):
        results["cores_taken"] = taken
        html = drawn(tmp_path, results)
        assert ("The machine was busy: other processes used 1.1 of 2 cores" in html) == reported


def test_other_files_in_a_folder_are_mentioned(tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(bench_results()))
    for name in ("dram", "phases"):
        (tmp_path / f"{name}.json").write_text('{"breakdown": {}}')
    (tmp_path / "notes.txt").write_text("mine")
    reported: list[str] = []
    write_report([tmp_path], tmp_path / "page.html", reported.append)
    assert reported == [
        f"not a result of `onelaunch bench` or `onelaunch compare` in '{tmp_path}': 'dram.json', 'phases.json'"
    ]
    assert "dram.json" not in (tmp_path / "page.html").read_text()  # the page has no fault


@pytest.mark.parametrize(
    ("spoil", "shown"),
    [
        ({"ratio": {"torch eager": 77_474.0, "JAX & scan": -1.0}}, "2.50×"),  # the times do not agree with it
        ({"check": "failed: wrong"}, None),
        ({"check": "banana"}, None),
    ],
)
def test_figures_come_from_the_times_of_cases_that_passed(tmp_path, spoil, shown):
    results = bench_results()
    results["cases"] = [results["cases"][0] | spoil]
    html = drawn(tmp_path, results)
    assert "77,474" not in html
    assert (shown or "2.50×") in html if shown else "2.50×" not in html


def test_an_invalid_spread_leaves_the_case_out(tmp_path):
    results = bench_results()
    results["cases"][0]["times"]["onelaunch"]["spread"] = float("nan")
    html = drawn(tmp_path, results)
    assert "ops/relu is left out: some of its times are not valid" in html


def test_cases_beyond_a_limit_are_reported(tmp_path):
    html = drawn(tmp_path, bench_results() | {"left_out": ["ops/late", "cpu/other"]})
    assert "Left out, because the time was over: ops/late<" in html


def test_a_busy_machine_is_reported_for_a_comparison(tmp_path):
    html = drawn(tmp_path, compare_results() | {"cores_taken": [0.1, 1.9]})
    assert "The machine was busy: other processes used 1.9 of 2 cores." in html


def test_control_characters_are_replaced_and_links_followed(tmp_path):
    results = bench_results()
    results["cases"][0]["name"] = "ops/\x1b[2J\x00relu"
    (tmp_path / "bench.json").write_text(json.dumps(results))
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    write_report([tmp_path / "bench.json"], tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert not set(map(chr, range(32))) - {"\n"} & set((tmp_path / "page.html").read_text())
    with pytest.raises(OnelaunchError, match=r"cannot be written: it is not a file"):
        write_report([tmp_path / "bench.json"], tmp_path)
