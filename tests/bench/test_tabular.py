"""`bench tabular`: real contenders on a small real table, and the arithmetic of its summary."""

from __future__ import annotations

import json

import numpy as np
import pytest

from onelaunch.bench.tables import TABLES, BenchTable, folds_of
from onelaunch.bench.tabular import BOOSTING, FOREST, MLP, OURS, SCALED_MLP, of_best_tree, select_tables, summarise
from onelaunch.errors import OnelaunchError
from tests.cli.conftest import invoke

pytestmark = pytest.mark.usefixtures("one_thread")


def result(ours: float, mlp: float, trees: float) -> dict:
    errors = {OURS: ours, MLP: mlp, SCALED_MLP: mlp, FOREST: trees, BOOSTING: 2 * trees}
    return {
        "unseen": ours > 2,
        "scores": {name: {"errors": [error], "seconds": [error]} for name, error in errors.items()},
    }


def test_ranks_times_and_the_distance_to_the_best_tree():
    tables = {"a": result(1.0, 2.0, 1.0), "b": result(3.0, 2.0, 2.5), "c": result(0.0, 1.0, 0.0)}
    assert [of_best_tree(tables[name]) for name in "abc"] == [1.0, 1.2, 1.0]
    found = summarise(tables)
    assert (found["near_best_tree"], found["unseen"], found["unseen_near_best_tree"]) == (2, 1, 0)
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


def test_the_command_prints_and_saves(tmp_path):
    outcome = invoke("bench", "tabular", "--filter", "iris", "--quick", "--out", tmp_path / "out.json")
    assert outcome.code == 0, outcome.err
    assert "iris: 150 rows, 4 inputs" in outcome.out
    assert "near the best tree ensemble" in outcome.out
    saved = json.loads((tmp_path / "out.json").read_text())
    assert {OURS, MLP, SCALED_MLP, FOREST, BOOSTING} <= set(saved["tables"]["iris"]["scores"])
    assert all(len(scores["errors"]) == 2 for scores in saved["tables"]["iris"]["scores"].values())


def test_an_unknown_table_is_one_line():
    with pytest.raises(OnelaunchError, match="is in the name of no table: pass part of one of iris"):
        select_tables("nosuch")
    assert len(TABLES) >= 12
    outcome = invoke("bench", "tabular", "cpu")
    assert (outcome.code, "is run by itself" in outcome.err) == (2, True)
