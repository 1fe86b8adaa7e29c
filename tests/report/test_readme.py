"""The README's results come from the recordings and from nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from onelaunch.bench import case, results
from onelaunch.errors import OnelaunchError
from onelaunch.report import benchmark
from onelaunch.report.readme import ALL, BEGIN, END, RESULTS, generate, main, stale
from onelaunch.report.recorded import GROUPS
from tests.conftest import ROOT
from tests.report.results import bench_results, compare_results


def test_the_committed_results_are_what_the_recordings_say():
    assert stale(ROOT) == [], "run `make readme` and commit what it changes"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / RESULTS).mkdir(parents=True)
    (tmp_path / RESULTS / "bench.json").write_text(json.dumps(bench_results()))
    (tmp_path / RESULTS / "compare.json").write_text(json.dumps(compare_results()))
    (tmp_path / RESULTS / "notes.json").write_text('{"breakdown": {}}')  # of another shape: left alone
    (tmp_path / "README.md").write_text(f"# before\n{BEGIN}\nold\n{END}\nafter\n")
    return tmp_path


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
    assert "ops/broken" not in text  # it failed: no figure
    for figure in (project / "docs" / "figures").glob("*.svg"):
        assert f"docs/figures/{figure.name}" in text
    capsys.readouterr()
    main(project)
    assert capsys.readouterr().out == "nothing changed\n"


def test_where_a_peer_is_faster_is_said_first(project):
    text = generate(project)[project / ALL]
    assert "| ops/relu | NVIDIA H200 | JAX & scan | 1.11× its time |" in text
    assert "floor" not in text.split("## Fused ops")[0].split("## Where")[1]
    assert "In 2 of 2 recorded cases a peer is faster" in generate(project)[project / "README.md"]


def test_the_newest_recording_of_a_case_counts(project):
    newer = bench_results()
    newer["date"] = "2026-12-01T00:00:00+00:00"
    newer["cases"] = newer["cases"][:1]
    newer["cases"][0]["times"]["onelaunch"]["median"] = 2e-4
    (project / RESULTS / "a-newer.json").write_text(json.dumps(newer))
    text = generate(project)[project / "README.md"]
    assert "| relu | 200 µs a call |" in text
    assert "| step | 300 µs a call |" in text  # which the newer file does not hold


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
    assert (benchmark.OURS, benchmark.FLOOR) == (results.OURS, case.FLOOR)
    assert set(benchmark.TITLES) == set(case.GROUPS) == set(GROUPS)
