"""The README's results come from the recordings and from nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onelaunch.bench import case, results
from onelaunch.errors import OnelaunchError
from onelaunch.report import benchmark, remarks
from onelaunch.report.readme import ALL, BEGIN, COLD_BEGIN, COLD_END, END, MEASURING, RESULTS, generate, main, stale
from onelaunch.report.recorded import GROUPS
from tests.conftest import ROOT
from tests.report.results import MACHINE, bench_results, compare_results, timing


def test_the_committed_results_are_what_the_recordings_say():
    assert stale(ROOT) == [], "run `make readme` and commit what it changes"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / RESULTS).mkdir(parents=True)
    (tmp_path / RESULTS / "bench.json").write_text(json.dumps(bench_results()))
    (tmp_path / RESULTS / "compare.json").write_text(json.dumps(compare_results()))
    (tmp_path / RESULTS / "notes.json").write_text('{"breakdown": {}}')  # of another shape: left alone
    (tmp_path / "README.md").write_text(f"# before\n{BEGIN}\nold\n{END}\nafter\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / MEASURING).write_text(f"story\n{COLD_BEGIN}\n{COLD_END}\nend\n")
    return tmp_path


def generated(project: Path, noisy: str) -> dict[Path, str]:
    """What is written when this peer's times of the first case spread so far that they say nothing."""
    results = bench_results()
    results["cases"][0]["times"][noisy]["spread"] = 3.0
    (project / RESULTS / "bench.json").write_text(json.dumps(results))
    return generate(project)


def test_results_go_between_the_markers(project, capsys):
    assert "README.md" in stale(project)
    main(project)
    assert stale(project) == []
    text = (project / "README.md").read_text()
    assert text.startswith("# before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| relu | 100 µs a call | 2.50× | 0.900× |" in text
    assert "onelaunch bench ops memory" in text
    assert "broken failed its check and has no time." in text
    everywhere = text + (project / ALL).read_text()
    for figure in (project / "docs" / "figures").glob("*.svg"):
        assert f"figures/{figure.name}" in everywhere
    capsys.readouterr()
    main(project)
    assert capsys.readouterr().out == "nothing changed\n"


def test_where_a_peer_is_faster_is_said_first(project):
    text = generate(project)[project / ALL]
    assert "| ops/relu | NVIDIA H200 | JAX &amp; scan | 1.11× its time |" in text
    assert "floor" not in text.split("## Fused ops")[0].split("## Where")[1]
    assert "In 2 of 2 recorded cases that have a peer, the peer is faster" in generate(project)[project / "README.md"]


def test_a_peer_that_is_faster_within_the_spread_is_named_too(project):
    files = generated(project, noisy="JAX & scan")
    assert "| ops/relu | NVIDIA H200 | JAX &amp; scan | ≈ 1.11× its time |" in files[project / ALL]
    said = "In 1 of 2 recorded cases that have a peer, the peer is faster, in 1 more perhaps (by less than the spread)"
    assert said in files[project / "README.md"]


def test_where_a_peer_takes_less_energy_is_said(project):
    results = bench_results()
    results["cases"][0]["joules"] = {"onelaunch": 0.02, "torch eager": 0.05, "JAX & scan": 0.01}
    (project / RESULTS / "bench.json").write_text(json.dumps(results))
    said = generate(project)[project / ALL].split("## Where a peer takes less energy")[1].split("##")[0]
    assert "| ops/relu | JAX &amp; scan | 10.0 mJ | 20.0 mJ |" in said
    assert "torch eager" not in said


def test_the_newest_recording_of_a_case_counts(project):
    newer = bench_results()
    newer["date"] = "2026-12-01T00:00:00+00:00"
    newer["cases"] = newer["cases"][:1]
    newer["cases"][0]["times"]["onelaunch"]["median"] = 2e-4
    (project / RESULTS / "a-newer.json").write_text(json.dumps(newer))
    text = generate(project)[project / "README.md"]
    assert "| relu | 200 µs a call |" in text
    assert "| step | 300 µs a call |" in text  # which the newer file does not hold


def test_a_selection_says_that_it_is_one(project, monkeypatch):
    more = bench_results()
    more["cases"] = [{**more["cases"][0], "name": "ops/another"}]
    (project / RESULTS / "more.json").write_text(json.dumps(more))
    said = re.compile(r"over ours[^|\n]*\. 1 of 2 cases\.")
    assert not said.search(generate(project)[project / "README.md"])
    monkeypatch.setattr("onelaunch.report.readme.FEW", 1)
    assert said.search(generate(project)[project / "README.md"])


def test_a_newer_failure_takes_an_older_figure_away_and_a_skipped_case_does_not(project):
    newer = bench_results()
    newer["date"] = "2026-12-01T00:00:00+00:00"
    newer["cases"] = [
        {**newer["cases"][0], "check": "failed: AssertionError: off by <3> | more", "times": {}, "gpu": None},
        {**newer["cases"][1], "check": "skipped: no GPU", "times": {}},
    ]
    (project / RESULTS / "a-newer.json").write_text(json.dumps(newer))
    files = generate(project)
    text, everything = files[project / "README.md"], files[project / ALL]
    assert "| relu |" not in text + everything
    assert "relu failed its check and has no time." in text
    assert "**relu failed its check** ([2026-12-01]" in everything
    assert "off by &lt;3&gt; \\| more" in everything
    assert "| step | 300 µs a call |" in text
    assert "Failed their check, and so have no time: 2." in text


def test_absent_peers_notes_and_doubtful_ratios_are_said(project):
    files = generated(project, noisy="torch eager")
    assert "- Absent: peer (not installed)" in files[project / ALL]
    assert "- relu: placement: cluster of 8" in files[project / ALL]
    assert "| relu | 100 µs a call | ≈ 2.50× | 0.900× |" in files[project / "README.md"]
    assert "≈: too noisy to tell" in files[project / "README.md"]


def test_figures_say_what_is_too_noisy_to_tell(project):
    files = generated(project, noisy="JAX & scan")  # the fastest
    drawn = [content for path, content in files.items() if path.suffix == ".svg" and "relu" in content]
    assert any("≈ 0.900×" in figure and "≈: too noisy to tell." in figure for figure in drawn)


def test_times_that_are_none_are_not_shown(project):
    results = bench_results()
    results["cases"][0]["times"]["onelaunch"]["median"] = float("nan")
    (project / RESULTS / "bench.json").write_text(json.dumps(results))
    assert "| relu |" not in generate(project)[project / "README.md"]


def test_the_newest_sizes_of_a_chip_are_drawn_and_where_a_peer_wins_is_said(project):
    newer = compare_results()
    newer["date"] = "2026-12-01T00:00:00+00:00"
    newer["sizes"]["step_seconds"]["torch eager"]["8192"] = timing(0.5e-3)
    (project / RESULTS / "a-sizes.json").write_text(json.dumps(newer))
    files = generate(project)
    drawn = [path.name for path in files if path.name.startswith("sizes-")]
    assert drawn == [
        "sizes-nvidia-h200-time-of-a-step-over-hidden-size.svg",
        "sizes-nvidia-h200-speed-up-over-hidden-size.svg",
    ]
    assert f"({RESULTS}/a-sizes.json)" in files[project / "README.md"]
    assert "compare.json" not in files[project / "README.md"]
    everything = files[project / ALL]
    assert "| 784-128-10, relu, hidden size 8,192 | NVIDIA H200 | torch eager | 2.00× its time |" in everything
    assert "| 8,192 | 1.00 ms | 500 µs | resident |" in everything


def test_the_newest_cold_launch_is_told(project):
    assert "not recorded yet" in generate(project)[project / MEASURING]
    for name, date, cold in (("b", "2026-11-20", 0.02), ("a", "2026-11-21", 0.0192)):
        measured = {
            "one launch each": {"two_kernels": cold, "one_kernel": 0.0002},
            "warm": {"two_kernels": 0.00036, "one_kernel": 0.0002},
        }
        content = {"machine": MACHINE, "date": f"{date}T00:00:00+00:00", "cold_launch": measured}
        (project / RESULTS / f"{name}.json").write_text(json.dumps(content))
    text = generate(project)[project / MEASURING]
    assert text.startswith("story\n")
    assert "| one launch each | 19.2 ms | 200 µs | 96.0× |" in text
    assert "| warm | 360 µs | 200 µs | 1.80× |" in text


def test_a_recording_of_another_shape_is_named(project):
    (project / RESULTS / "odd.json").write_text(json.dumps({"machine": MACHINE, "date": "2026", "cases": [{"x": 1}]}))
    with pytest.raises(OnelaunchError, match=r"odd.json' is not as onelaunch writes it"):
        generate(project)


def test_a_changed_recording_or_figure_is_noticed(project):
    main(project)
    figure = next((project / "docs" / "figures").glob("*.svg"))
    shutil.copy(figure, figure.with_name("left-over.svg"))
    figure.write_text("other")
    assert stale(project) == sorted([f"docs/figures/{figure.name}", "docs/figures/left-over.svg"])
    main(project)
    assert stale(project) == []


def test_a_readme_without_markers_is_refused(project):
    (project / "README.md").write_text("no markers")
    with pytest.raises(OnelaunchError, match="must hold the lines"):
        generate(project)


def test_measuring_and_drawing_call_things_alike():
    """`bench` and `report` do not know each other; what one writes the other reads."""
    assert (remarks.OURS, benchmark.FLOOR) == (results.OURS, case.FLOOR)
    assert set(benchmark.TITLES) == set(case.GROUPS) == set(GROUPS)


def test_names_cannot_break_a_table(project):
    results = bench_results()
    results["cases"][0]["name"] = "ops/a|b <script>\nc"
    (project / RESULTS / "bench.json").write_text(json.dumps(results))
    files = generate(project)
    for text in (files[project / "README.md"], files[project / ALL]):
        assert "| a\\|b &lt;script&gt; c |" in text
        assert "<script>" not in text


@pytest.mark.parametrize(
    "spoil", [{"times": 3}, {"times": {"onelaunch": {"median": 1}}}, {"unit": None}, {"group": ["ops"]}]
)
def test_a_recording_that_is_not_ours_is_told_in_a_line(project, spoil):
    results = bench_results()
    results["cases"][0] |= spoil
    (project / RESULTS / "bench.json").write_text(json.dumps(results))
    command = (sys.executable, "-m", "onelaunch.report.readme")
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_doubtful_recording_is_said_to_be_one(project):
    results = bench_results() | {"cores_taken": [0.1, 1.9], "interrupted": True}
    (project / RESULTS / "bench.json").write_text(json.dumps(results))
    said = generate(project)[project / ALL]
    assert "- **bench.json: The machine was busy: others took 1.9 of 2 cores." in said
    assert "- **bench.json: Interrupted: what was done is here.**" in said


def test_machines_that_differ_in_threads_have_pictures_of_their_own(project):
    cpu = bench_results()
    cpu["cases"] = [{**cpu["cases"][0], "name": "cpu/x", "group": "cpu", "gpu": None}]
    for threads in (2, 8):
        machine = {**MACHINE, "gpus": [], "cpu": {"name": "Chip", "cores": 8, "torch_threads": threads}}
        (project / RESULTS / f"cpu{threads}.json").write_text(json.dumps(cpu | {"machine": machine}))
    names = [path.name for path in generate(project) if path.name.startswith("cpu-")]
    assert sorted(names) == ["cpu-chip-2-threads.svg", "cpu-chip-8-threads.svg"]
