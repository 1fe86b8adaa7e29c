"""The target of a table: which task it means, its classes and numbers, and one line for every bad target."""

from __future__ import annotations

import json

import numpy as np
import pytest

from onelaunch.data.table_file import Table
from onelaunch.data.table_target import TableTarget
from onelaunch.errors import DataError


def table_of(labels: list[str]) -> Table:
    column = np.array([*labels, None], object)[:-1]
    return Table("t.csv", ("y",), (column,), np.arange(2, 2 + len(labels)), unit="line")


@pytest.mark.parametrize(
    ("labels", "task", "expected"),
    [
        (["b", "a", "b"], None, ("a", "b")),
        (["10", "9", "9"], None, ("9", "10")),
        (["1.0", "0.0", "1"], None, ("0", "1")),
        (["1", "b", "1"], None, ("1", "b")),
        (["0.5", "1.5", "2"], None, None),
        ([str(i) for i in range(21)], None, None),
        (["0", "1", "1"], "regression", None),
        (["0.5", "1.5", "0.5"], "classification", ("0.5", "1.5")),
        ([str(i % 50) for i in range(200)], "classification", tuple(map(str, range(50)))),
    ],
)
def test_the_task_is_inferred_or_given(labels, task, expected):
    target = TableTarget.fit(table_of(labels), "y", task)
    assert target.classes == expected
    assert target.task == ("classification" if expected else "regression")
    again = TableTarget.from_json(json.loads(json.dumps(target.to_json())))
    values = again.values(table_of(labels))
    if expected:
        assert [expected[value] for value in values] == [label.removesuffix(".0") for label in labels]
        assert target.outputs == len(expected)
    else:
        np.testing.assert_array_equal(values, [float(label) for label in labels])
        encoded = again.encode(values)
        assert encoded.shape == (len(labels), 1)
        assert encoded.std() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    ("labels", "task", "message"),
    [
        (["1", "", "2"], None, "line 3, column 'y': the target is missing"),
        (["a", "a"], None, "has a single class, 'a'"),
        (["1", "x", "2"], "regression", "line 3, column 'y': 'x' is not a number: correct it, or pass task='class"),
        (["0.5", "inf"], None, "line 3, column 'y': 'inf' is not a finite number"),
        ([f"{i}.5" for i in range(4992)], "classification", "4,992 classes in 4,992 rows.*pass task='regression'"),
        ([f"name{i}" for i in range(100)], None, "100 classes in 100 rows.*pass another target"),
    ],
)
def test_a_bad_target_is_one_line(labels, task, message):
    with pytest.raises(DataError, match=message):
        TableTarget.fit(table_of(labels), "y", task)


def test_a_class_that_training_did_not_have_is_refused():
    target = TableTarget.fit(table_of(["a", "b"]), "y")
    with pytest.raises(DataError, match=r"line 3, column 'y': 'c' is a class that is not known: training had 'a', 'b'"):
        target.values(table_of(["a", "c"]))
