"""`split` and `held_out_rows`: which rows are held out, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelaunch.data import Dataset, split
from onelaunch.data.dataset import held_out_rows
from onelaunch.errors import ArgumentTypeError, DataError, OnelaunchError
from onelaunch.rng import permutation


def rows(n: int) -> Dataset:
    x = np.arange(n * 2, dtype=np.float32).reshape(n, 2)
    return Dataset("toy", "toy rows", x, np.arange(n), classes=tuple(map(str, range(n))))


@pytest.mark.parametrize(("n", "fraction", "held_out"), [(100, 0.2, 20), (7, 0.5, 4), (2, 0.01, 1), (3, 0.99, 2)])
def test_split(n: int, fraction: float, held_out: int) -> None:
    whole = rows(n)
    data = split(whole, fraction, seed=5)
    assert data.test_x is not None
    assert data.test_y is not None
    assert len(data.test_x) == held_out
    assert len(data.x) == n - held_out
    order = permutation(n, 5, 2**61).numpy()
    np.testing.assert_array_equal(data.test_y, whole.y[order[:held_out]])
    np.testing.assert_array_equal(data.y, whole.y[order[held_out:]])
    np.testing.assert_array_equal(data.test_x, whole.x[order[:held_out]])
    np.testing.assert_array_equal(data.x, whole.x[order[held_out:]])
    assert data.source == f"toy rows, split {n - held_out}/{held_out}"
    assert data.classes == whole.classes
    assert split(whole, fraction, seed=5).y.tolist() == data.y.tolist()


def test_split_depends_on_the_seed() -> None:
    assert split(rows(100), 0.2, 0).y.tolist() != split(rows(100), 0.2, 1).y.tolist()


def test_split_refuses() -> None:
    with pytest.raises(DataError, match="toy: 1 row cannot be split"):
        split(rows(1), 0.5, 0)
    with pytest.raises(DataError, match="already has a test part"):
        split(split(rows(10), 0.5, 0), 0.5, 0)
    for fraction in (0, 1, -0.1, 1.5, float("nan")):
        with pytest.raises(DataError, match="pass a number between 0 and 1"):
            split(rows(10), fraction, 0)
    with pytest.raises(ArgumentTypeError, match="fraction='a' is not a number"):
        split(rows(10), "a", 0)  # type: ignore[arg-type]
    with pytest.raises(OnelaunchError, match="seed=-1"):
        split(rows(10), 0.5, -1)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=200), st.floats(0.01, 0.99), st.integers(0, 9))
def test_each_class_gives_its_share_and_keeps_a_row(labels: list[int], fraction: float, seed: int) -> None:
    classes = np.array(labels)
    rest, test = held_out_rows(len(labels), fraction, seed, classes)
    assert sorted([*rest.tolist(), *test.tolist()]) == list(range(len(labels)))
    assert len(test) == min(max(round(len(labels) * fraction), 1), len(labels) - 1)
    sizes, held = np.bincount(classes, minlength=6), np.bincount(classes[test], minlength=6)
    if len(rest) >= (sizes > 0).sum():
        assert (held <= np.maximum(sizes - 1, 0)).all()
    single = int((sizes == 1).sum())  # their shares are the others' to give
    share = sizes * len(test) / len(labels)
    assert (held > share - 1).all()
    if fraction <= 0.5:
        assert (held < share + 1 + single).all()
    place = {row: position for position, row in enumerate(permutation(len(labels), seed, 2**61).tolist())}
    for part in (rest, test):
        assert [place[row] for row in part.tolist()] == sorted(place[row] for row in part.tolist())


def test_without_classes_the_rows_are_those_of_split() -> None:
    rest, test = held_out_rows(50, 0.3, 4)
    data = split(rows(50), 0.3, 4)
    np.testing.assert_array_equal(data.y, rest)
    assert data.test_y is not None
    np.testing.assert_array_equal(data.test_y, test)
