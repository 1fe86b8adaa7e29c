from __future__ import annotations

import json
from pathlib import Path

import pytest

from onelaunch.report.write import write_report
from tests.report.results import bench_results, compare_results

EPOCHS = [
    {"epoch": e, "step": 10 * (e + 1), "loss": 1 / (e + 1), "accuracy": 0.5 + 0.1 * e, "lr": 0.1, "seconds": 0.2,
     "validation": {"loss": 1.1 / (e + 1), "accuracy": 0.45 + 0.1 * e}, "losses": [1 / (e + 1 + i / 10) for i in range(10)]}
    for e in range(3)
]  # fmt: skip


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run folder, benchmark results and a comparison."""
    folder = tmp_path_factory.mktemp("inputs")
    run = folder / "run <1>"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in EPOCHS) + '{"epoch": 3, "lo')
    (run / "run.json").write_text(json.dumps({"data": "digits", "status": "running", "reason": "cpu, the fastest"}))
    (run / "config.toml").write_text('optimizer = "adam"\nseed = 3\n')
    (folder / "bench.json").write_text(json.dumps(bench_results()))
    (folder / "compare.json").write_text(json.dumps(compare_results()))
    return [run, folder / "bench.json", folder / "compare.json"]


@pytest.fixture(scope="session")
def page(inputs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(inputs, tmp_path_factory.mktemp("page") / "report.html")
