"""`bench tabular`: real contenders on a small real table, and the arithmetic of its summary."""

from __future__ import annotations

import json

import numpy as np
import pytest

from onelaunch.bench.run import select
from onelaunch.bench.tables import TABLES, BenchTable, folds_of
from onelaunch.bench.tabular import BOOSTING, FOREST, MLP, OURS, SCALED_MLP, of_best_tree, summarise
from tests.cli.conftest import invoke

pytestmark = pytest.mark.usefixtures("one_thread")


def result(name: str, ours: float, mlp: float, trees: float) -> dict:
    errors = {OURS: ours, MLP: mlp, SCALED_MLP: mlp, FOREST: trees, BOOSTING: 2 * trees}
    return {
        "name": f"tabular/{name}", "errors": {who: [error, error] for who, error in errors.items()},
        "times": {who: {"median": error} for who, error in errors.items()},
    }  # fmt: skip


def test_ranks_times_and_the_distance_to_the_best_tree():
    cases = [result("iris", 1.0, 2.0, 1.0), result("ames", 3.0, 2.0, 2.5), result("wine", 0.0, 1.0, 0.0)]
    assert [of_best_tree(case) for case in cases] == [1.0, 1.2, 1.0]
    partial = result("digits", 9.0, 9.0, 9.0)
    del partial["errors"][FOREST]  # left out by --quick: it has no rank
    found = summarise([*cases, partial])
    assert (found["tables"], found["near_best_tree"], found["unseen"], found["unseen_near_best_tree"]) == (3, 2, 1, 0)
    assert found["mean_rank"][OURS] == pytest.approx((1.5 + 4 + 2) / 3)
    assert found["fit_seconds"][OURS] == 4.0


def test_folds_encode_text_and_missing_values_from_the_training_rows():
    import pandas

    size = np.arange(50.0)
    size[7] = np.nan
    frame = pandas.DataFrame({"size": size, "city": ["Rome", "Oslo", None, "Rome", "Oslo"] * 10})
    table = BenchTable("t", True, lambda: (frame.copy(), np.array(["a", "b"] * 25)))
    parts = folds_of(table, 2)
    assert len(parts) == 2
    x, y, _, test_y = parts[0]
    assert x.shape == (40, 3)
    assert np.isfinite(x).all()
    assert set(np.concatenate([y, test_y])) == {0, 1}
    assert (x[:, 1:].sum(axis=1) == 1).all()


def test_the_command_prints_and_saves(tmp_path, monkeypatch):
    monkeypatch.setattr("onelaunch.bench.time_limit.MIN_CASE_SECONDS", 60)
    monkeypatch.setattr("onelaunch.bench.measure.MIN_LONG_SAMPLES", 2)
    outcome = invoke("bench", "tabular", "--filter", "iris", "--quick", "--out", tmp_path / "out.json")
    assert outcome.code == 0, outcome.err
    assert "tabular/iris: classification with default parameters, five folds" in outcome.out
    assert "error: onelaunch 0." in outcome.out
    assert "near the best tree ensemble: " in outcome.out
    (case,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert {OURS, MLP, SCALED_MLP, FOREST, BOOSTING} <= set(case["errors"])
    assert case["errors"].keys() == case["times"].keys()
    assert {len(errors) for errors in case["errors"].values()} == {case["times"][OURS]["n"]}
    assert case["notes"] == {"rows": "150", "inputs": "4"}
    assert all(0 <= error < 0.3 for errors in case["errors"].values() for error in errors)


def test_each_table_is_a_case_of_the_group():
    assert [one.name for one in select("tabular")] == [f"tabular/{name}" for name in TABLES]
    assert len(TABLES) >= 12
