"""The generated parts of README and docs come from the recordings only, and are up to date."""

from __future__ import annotations

import json
import re
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from onelaunch.bench.run import select
from onelaunch.errors import OnelaunchError
from onelaunch.report.machine import busy
from onelaunch.report.read import unfinished
from onelaunch.report.readme import (
    ALL,
    BEGIN,
    COLD_BEGIN,
    COLD_END,
    END,
    HEADLINES,
    MEASURING,
    RESULTS,
    command,
    generate,
    main,
    stale,
)
from tests.conftest import ROOT
from tests.report.results import MACHINE, bench_results, compare_results, timing


def test_committed_files_match_the_recordings():
    assert stale(ROOT) == [], "run `make readme` and commit what it changes"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("onelaunch.report.readme.HEADLINES", {"ops/relu": "ReLU & more", "memory/step": "a step"})
    (tmp_path / RESULTS).mkdir(parents=True)
    (tmp_path / RESULTS / "bench.json").write_text(json.dumps(bench_results()))
    (tmp_path / RESULTS / "compare.json").write_text(json.dumps(compare_results()))
    (tmp_path / RESULTS / "notes.json").write_text('{"breakdown": {}}')  # of another kind: ignored
    (tmp_path / "README.md").write_text(f"# before\n{BEGIN}\nold\n{END}\nafter\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / MEASURING).write_text(f"story\n{COLD_BEGIN}\n{COLD_END}\nend\n")
    return tmp_path


def readme(project: Path) -> str:
    return generate(project)[project / "README.md"]


def generated(project: Path, noisy: str) -> dict[Path, str]:
    """The generated files when the spread of this peer's times in the first case is too large to tell anything."""
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
    assert "| ReLU &amp; more, H200 | 100 µs per call | 90.0 µs (JAX &amp; scan) | 0.900× |" in text
    everything = (project / ALL).read_text()
    assert "| relu | 100 µs per call | 20 | 2.0 % | 2.50× | 0.900× |" in everything
    assert "\n`onelaunch bench ops memory`\n" in everything
    figures = [figure.name for figure in (project / "docs" / "figures").glob("*.svg")]
    assert len(figures) == 4  # two groups, two of the sizes
    assert all(f"figures/{name}" in everything for name in figures)
    capsys.readouterr()
    main(project)
    assert capsys.readouterr().out == "nothing changed\n"


def test_the_page_begins_with_the_cases_in_which_a_peer_is_faster(project):
    text = generate(project)[project / ALL]
    assert "| ops/relu | NVIDIA H200 | JAX &amp; scan | 1.11× its time |" in text
    assert "floor" not in text.split("## Fused ops")[0].split("## Where")[1]
    assert f"In 2 of 2 recorded cases [a peer is faster]({ALL}#where-a-peer-is-faster).\n" in readme(project)


def test_a_peer_that_is_faster_within_the_spread_is_named(project):
    files = generated(project, noisy="JAX & scan")
    assert "| ops/relu | NVIDIA H200 | JAX &amp; scan | ≈ 1.11× its time |" in files[project / ALL]
    text = files[project / "README.md"]
    assert "In 1 of 2 recorded cases [a peer is faster]" in text
    assert "\nIn 1 more a peer's median is lower, by less than the spread.\n" in text


def test_peers_that_take_less_energy_are_listed(project):
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
    assert "| ReLU &amp; more, H200 | 200 µs per call |" in readme(project)
    assert "| a step, H200 | 300 µs per call |" in readme(project)  # only the older file holds it


def test_a_headline_without_a_peer_has_no_factor(project):
    results = bench_results()
    results["cases"][0] |= {"times": {"onelaunch": timing(1e-4)}, "joules": None}
    (project / RESULTS / "bench.json").write_text(json.dumps(results))
    assert "| ReLU &amp; more, H200 | 100 µs per call | – | – |" in readme(project)


def test_every_headline_is_a_case():
    assert {one.name for one in select("all")} >= set(HEADLINES)


def test_a_headline_without_a_recording_has_no_row(project):
    results = bench_results()
    results["cases"] = results["cases"][1:]
    (project / RESULTS / "bench.json").write_text(json.dumps(results))
    assert "ReLU" not in readme(project)
    assert "| a step, H200 | 300 µs per call |" in readme(project)


def test_a_newer_failure_replaces_an_older_figure_and_a_skipped_case_does_not(project):
    newer = bench_results()
    newer["date"] = "2026-12-01T00:00:00+00:00"
    newer["cases"] = [
        {**newer["cases"][0], "check": "failed: AssertionError: off by <3> | more", "times": {}, "gpu": None},
        {**newer["cases"][1], "check": "skipped: no GPU", "times": {}},
    ]
    (project / RESULTS / "a-newer.json").write_text(json.dumps(newer))
    files = generate(project)
    text, everything = files[project / "README.md"], files[project / ALL]
    assert "ReLU" not in text
    assert "| relu |" not in everything
    assert "**relu failed its check** ([2026-12-01]" in everything
    assert "off by &lt;3&gt; \\| more" in everything
    assert "| a step, H200 | 300 µs per call |" in text
    assert "\n2 failed their check and have no time.\n" in text


def test_absent_peers_notes_and_noisy_ratios_are_shown(project):
    files = generated(project, noisy="torch eager")
    assert "- Absent: peer (not installed)" in files[project / ALL]
    assert "- relu: placement: cluster of 8" in files[project / ALL]
    assert "| relu | 100 µs per call | 20 | 2.0 % | ≈ 2.50× | 0.900× |" in files[project / ALL]


def test_figures_mark_what_is_too_noisy_to_tell(project):
    files = generated(project, noisy="JAX & scan")  # the fastest
    drawn = [content for path, content in files.items() if path.suffix == ".svg" and "relu" in content]
    assert any("≈ 0.900×" in figure and "≈: too" in figure for figure in drawn)


def test_a_case_without_a_valid_time_is_not_shown(project):
    results = bench_results()
    results["cases"][0]["times"]["onelaunch"]["median"] = float("nan")
    (project / RESULTS / "bench.json").write_text(json.dumps(results))
    assert "ReLU" not in readme(project)


def test_the_newest_sizes_of_a_chip_are_drawn_and_losses_listed(project):
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
    everything = files[project / ALL]
    assert f"({'../' + RESULTS}/a-sizes.json)" in everything
    assert "compare.json" not in everything
    assert "| 784-128-10, relu, hidden size 8,192 | NVIDIA H200 | torch eager | 2.00× its time |" in everything
    assert "| 8,192 | 1.00 ms | 500 µs | resident |" in everything


def test_the_newest_cold_launch_is_shown(project):
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


def test_an_error_names_the_file_of_another_shape(project):
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


def test_names_cannot_break_a_table(project):
    results = bench_results()
    results["cases"][0]["name"] = "ops/a|b <script>\nc"
    (project / RESULTS / "bench.json").write_text(json.dumps(results))
    text = generate(project)[project / ALL]
    assert "| a\\|b &lt;script&gt; c |" in text
    assert "<script>" not in text


@pytest.mark.parametrize(
    "spoil", [{"times": 3}, {"times": {"onelaunch": {"median": 1}}}, {"unit": None}, {"group": ["ops"]}]
)
def test_the_error_for_a_foreign_recording_is_one_line(project, spoil, monkeypatch):
    results = bench_results()
    results["cases"][0] |= spoil
    (project / RESULTS / "bench.json").write_text(json.dumps(results))
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit, match=r"\Aerror: .*\Z"):  # a dot matches no line break
        command()


def test_a_doubtful_recording_is_marked(project):
    results = bench_results() | {"cores_taken": [0.1, 1.9], "interrupted": True}
    (project / RESULTS / "bench.json").write_text(json.dumps(results))
    said = generate(project)[project / ALL]
    doubts = [words for _, words in (*busy(results), *unfinished(results))]
    assert len(doubts) == 2
    assert all(f"- **bench.json: {words}**" in " ".join(said.split()) for words in doubts)


def test_machines_that_differ_in_threads_have_separate_figures(project):
    cpu = bench_results()
    cpu["cases"] = [{**cpu["cases"][0], "name": "cpu/x", "group": "cpu", "gpu": None}]
    for threads in (2, 8):
        machine = {**MACHINE, "gpus": [], "cpu": {"name": "Chip", "cores": 8, "torch_threads": threads}}
        (project / RESULTS / f"cpu{threads}.json").write_text(json.dumps(cpu | {"machine": machine}))
    names = [path.name for path in generate(project) if path.name.startswith("cpu-")]
    assert sorted(names) == ["cpu-chip-2-threads.svg", "cpu-chip-8-threads.svg"]


def test_the_readme_is_one_page_and_its_code_runs(tmp_path, monkeypatch, capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 6
    backend = import_module("onelaunch.fuse.backend")  # `onelaunch.fuse` is also the function
    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "the test compiles nothing")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    shown = re.search(r"^```\n(<History: .*>)\n```", text, re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()[0]
    assert shown
    assert [re.sub(r"[\d.e-]+", "0", line) for line in (shown[1], printed)] == [re.sub(r"[\d.e-]+", "0", shown[1])] * 2
    assert {path.name for path in tmp_path.iterdir()} >= {"model.html", "run.safetensors", "curves.png"}


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_on_a_page_exist_and_its_lines_are_wrapped(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    for name in re.findall(r"`([\w.-]+/[\w./-]*)`", text):
        root = next((root for root in (ROOT, ROOT / "src" / "onelaunch") if (root / name.split("/")[0]).is_dir()), None)
        is_path = name.endswith("/") or re.search(r"\.(py|cuh|md|json|toml|svg)$", name)
        if root and is_path and "DATE" not in name and not (root / name).exists():
            missing.append(name)
    assert missing == []
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > 110 and not line.startswith(("|", "!["))] == []
