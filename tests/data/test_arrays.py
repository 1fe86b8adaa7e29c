"""`.npz` and `.npy` files: what is read, and one line for every refusal."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onelaunch.data import Dataset, load
from onelaunch.errors import DataError

RNG = np.random.default_rng(3)
X = RNG.standard_normal((6, 3))
LABELS = np.array([0, 2, 1, 0, 2, 2])
VALUES = RNG.standard_normal(6)


def npz(tmp_path: Path, **arrays: Any) -> Path:
    np.savez(tmp_path / "data.npz", **arrays)
    return tmp_path / "data.npz"


def npy(tmp_path: Path, table: np.ndarray) -> Path:
    np.save(tmp_path / "data.npy", table)
    return tmp_path / "data.npy"


def refused(path: Path, match: str, target: str | None = None) -> None:
    with pytest.raises(DataError, match=match) as caught:
        load(path, target=target)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def check_arrays(data: Dataset) -> None:
    for array in (data.x, data.y, data.test_x, data.test_y):
        if array is not None:
            assert array.flags.writeable
            assert array.flags.c_contiguous
            assert array.dtype.isnative


def test_npz_of_classes_and_of_values(tmp_path: Path) -> None:
    data = load(npz(tmp_path, x=X, y=LABELS))
    check_arrays(data)
    np.testing.assert_array_equal(data.x, X.astype(np.float32))
    assert data.x.dtype == np.float32
    assert data.y.tolist() == LABELS.tolist()
    assert data.y.dtype == np.int64
    assert data.classes == ("0", "1", "2")
    assert data.test_x is None
    assert not data.fallback
    assert data.name == "data.npz"
    assert data.source == f"{tmp_path / 'data.npz'}, 6 rows of 3, 3 classes in y"

    data = load(str(npz(tmp_path, x=X, y=VALUES)))
    np.testing.assert_array_equal(data.y, VALUES.astype(np.float32))
    assert data.y.dtype == np.float32
    assert data.classes is None
    assert "values in y" in data.source


@pytest.mark.parametrize(
    "names", [("x", "y", "test_x", "test_y"), ("x_train", "y_train", "x_test", "y_test")], ids=["ours", "keras"]
)
def test_npz_with_a_test_part(tmp_path: Path, names: tuple[str, ...]) -> None:
    images = RNG.integers(0, 256, (6, 5, 5), np.uint8)
    path = npz(tmp_path, **dict(zip(names, (images, LABELS, images[:2], np.array([4, 1])), strict=True)))
    data = load(path)
    check_arrays(data)
    assert data.test_x is not None
    assert data.test_y is not None
    assert data.x.dtype == np.uint8, "images stay uint8"
    np.testing.assert_array_equal(data.x, images)
    np.testing.assert_array_equal(data.test_x, images[:2])
    assert data.test_y.tolist() == [4, 1]
    assert data.classes == ("0", "1", "2", "3", "4"), "the test part counts too"
    assert "6 + 2 rows of 5×5" in data.source


@pytest.mark.parametrize("dtype", [">f8", "<f4", "f2", "i4", ">u2", "?"])
def test_npz_takes_every_numeric_type(tmp_path: Path, dtype: str) -> None:
    x = np.asfortranarray(RNG.integers(0, 2, (6, 3)).astype(dtype))
    data = load(npz(tmp_path, x=x, y=LABELS.astype(">i2")))
    check_arrays(data)
    np.testing.assert_array_equal(data.x, x.astype(np.float32))
    assert data.y.tolist() == LABELS.tolist()


def test_npz_targets_of_other_shapes_and_types(tmp_path: Path) -> None:
    assert load(npz(tmp_path, x=X, y=LABELS[:, None])).y.shape == (6,)
    assert load(npz(tmp_path, x=X, y=X)).y.shape == (6, 3)
    assert load(npz(tmp_path, x=X, y=LABELS > 0)).classes == ("0", "1")
    names = np.array(["cat", "ant", "bee", "cat", "bee", "bee"])
    data = load(npz(tmp_path, x=X, y=names, test_x=X[:2], test_y=np.array(["dog", "ant"])))
    assert data.classes == ("ant", "bee", "cat", "dog")
    assert data.y.tolist() == [2, 0, 1, 2, 1, 1]
    assert data.test_y is not None
    assert data.test_y.tolist() == [3, 0]


def test_npz_target_names_the_key(tmp_path: Path) -> None:
    path = npz(tmp_path, x=X, y=LABELS, weight=VALUES)
    np.testing.assert_array_equal(load(path, target="weight").y, VALUES.astype(np.float32))
    refused(path, "has no array wieght.*found: 'x', 'y', 'weight'; did you mean 'weight'", "wieght")
    path = npz(tmp_path, x_train=X, age_train=VALUES, x_test=X[:1], age_test=VALUES[:1])
    data = load(path, target="age_train")
    assert data.test_y is not None
    assert data.test_y.shape == (1,)
    refused(npz(tmp_path, x=X, z=VALUES, test_x=X), "has test_x but no test_z", "z")


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"a": X, "b": LABELS}, "no array x or x_train: save one; found: 'a', 'b'"),
        ({"x": X, "labels": LABELS}, "no array y: save it, or pass target; found: 'x', 'labels'"),
        ({"x": X, "y": LABELS, "test_x": X}, "has test_x but no test_y: save both or neither"),
        ({"x": X, "y": LABELS, "test_y": LABELS}, "has test_y but no test_x"),
        ({"x": X, "y": LABELS[:5]}, "x has 6 rows and y 5"),
        ({"x": X, "y": LABELS, "test_x": X, "test_y": LABELS[:2]}, "test_x has 6 rows and test_y 2"),
        (
            {"x": X, "y": LABELS, "test_x": X[:, :2], "test_y": LABELS},
            "test_x holds rows of shape .2,.*save both alike",
        ),
        ({"x": X, "y": LABELS, "test_x": X, "test_y": VALUES}, "test_y holds .* float32, y .* int64: save both alike"),
        ({"x": X[:0], "y": LABELS[:0]}, "x is empty"),
        ({"x": X, "y": LABELS[:0]}, "y is empty"),
        ({"x": VALUES, "y": LABELS}, r"x has shape \(6,\): save one row for each sample"),
        ({"x": X, "y": np.array(3)}, r"y has shape \(\)"),
        ({"x": X, "y": np.eye(6, dtype=int)}, r"y has shape \(6, 6\): save one class for each row \(y.argmax\(1\)\?\)"),
        ({"x": X.astype(complex), "y": LABELS}, "x is of type complex128: save numbers"),
        ({"x": X.astype(str), "y": LABELS}, "x is of type <U32: save numbers"),
        ({"x": X, "y": np.array([b"a"] * 6)}, "y is of type |S1"),
        ({"x": X, "y": LABELS - 1}, "y: row 0 has label -1: number the classes from 0"),
        ({"x": X, "y": LABELS * 10**9}, "y: row 1 has label 2000000000: number the classes"),
        ({"x": np.where(np.arange(18).reshape(6, 3) == 7, np.nan, X), "y": LABELS}, "x: row 2, column 1 .* holds nan"),
        ({"x": X, "y": np.where(np.arange(6) == 4, np.inf, VALUES)}, "y: row 4 .* holds inf, which is not a finite"),
        ({"x": X * 1e200, "y": LABELS}, "x: row 0, column 0 .* which is too large for float32"),
        ({"x": X.astype(object), "y": LABELS}, "x: holds no plain numbers but Python objects"),
        ({"x": X, "y": LABELS.astype(object)}, "y: holds no plain numbers but Python objects"),
    ],
)
def test_npz_refused(tmp_path: Path, arrays: dict[str, np.ndarray], match: str) -> None:
    refused(npz(tmp_path, **arrays), match)


def test_npy_takes_the_last_column_or_the_one_named(tmp_path: Path) -> None:
    table = RNG.integers(0, 5, (8, 4))
    data = load(npy(tmp_path, table))
    check_arrays(data)
    np.testing.assert_array_equal(data.x, table[:, :3])
    np.testing.assert_array_equal(data.y, table[:, 3])
    assert data.x.dtype == np.float32
    assert data.classes is not None
    assert "in column 3" in data.source
    for target in ("1", 1, "-3"):
        data = load(npy(tmp_path, table), target=target)
        np.testing.assert_array_equal(data.x, table[:, [0, 2, 3]])
        np.testing.assert_array_equal(data.y, table[:, 1])
    data = load(npy(tmp_path, table.astype(float)), target=0)
    assert data.classes is None, "floating-point numbers are values"
    assert data.y.dtype == np.float32


@pytest.mark.parametrize(
    ("table", "match"),
    [
        (VALUES, "is an array of float64 with shape .6,.: save a 2-D array"),
        (X.astype(str), "is an array of <U32"),
        (np.zeros(3, [("a", int)]), "save a 2-D array of numbers"),
        (VALUES[:, None], "has 1 column"),
        (X[:0], "is empty"),
        (X.astype(object), "holds no plain numbers but Python objects"),
        (np.where(np.arange(18).reshape(6, 3) == 3, np.nan, X), "row 1, column 0 .* holds nan"),
        (np.where(np.arange(18).reshape(6, 3) == 5, -np.inf, X), "column 2: row 1 .* holds -inf"),
        (LABELS.reshape(2, 3) - 3, "column 2: row 0 has label -2"),
    ],
)
def test_npy_refused(tmp_path: Path, table: np.ndarray, match: str) -> None:
    refused(npy(tmp_path, table), match)


@pytest.mark.parametrize("target", ["3", "-4", "label", ""])
def test_npy_target_that_does_not_exist(tmp_path: Path, target: str) -> None:
    refused(npy(tmp_path, X), "has columns 0 to 2: pass one of them", target)


def test_files_that_are_not_what_their_name_says(tmp_path: Path) -> None:
    path = npz(tmp_path, x=X, y=LABELS)
    path.rename(tmp_path / "other.npy")
    refused(tmp_path / "other.npy", "several named arrays, not one: rename it to .npz")
    npy(tmp_path, X).rename(tmp_path / "other.npz")
    refused(tmp_path / "other.npz", "a single array, not named ones: rename it to .npy")
    (tmp_path / "empty.npz").touch()
    refused(tmp_path / "empty.npz", "cannot be read")
    (tmp_path / "text.npy").write_text("1,2,3")
    refused(tmp_path / "text.npy", "never read|cannot be read")
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as file:
        file.writestr("x", "not an array")
        file.writestr("y", "not an array")
    refused(tmp_path / "zip.npz", "x is not an array")


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Malice:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (ran,)

    (tmp_path / "evil.npy").write_bytes(pickle.dumps(Malice()))
    refused(tmp_path / "evil.npy", "Python objects, which are never read")
    np.save(tmp_path / "evil2.npy", np.array([[Malice()]], dtype=object))
    refused(tmp_path / "evil2.npy", "Python objects, which are never read")
    refused(npz(tmp_path, x=np.array([[Malice()]], dtype=object), y=LABELS[:1]), "Python objects, which are never read")
    assert not ran.exists()


def test_a_header_that_promises_more_than_the_file_holds(tmp_path: Path) -> None:
    path = npy(tmp_path, X)
    path.write_bytes(path.read_bytes().replace(b"(6, 3), }         ", b"(6, 30000000000), }", 1)[: path.stat().st_size])
    refused(path, "cannot be read")


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["npz", "npy"]), data=st.data())
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    path = npz(tmp_path, x=X, y=LABELS) if kind == "npz" else npy(tmp_path, X)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content))
    message = ""
    try:
        load(path)
    except DataError as error:
        message = str(error)
    assert "\n" not in message


def test_a_header_that_does_not_parse(tmp_path: Path) -> None:
    path = npy(tmp_path, X)
    path.write_bytes(path.read_bytes().replace(b"}", b"("))
    refused(path, "cannot be read")


def test_values_overrides_the_type_of_the_numbers(tmp_path: Path) -> None:
    table = tmp_path / "table.npy"
    np.save(table, np.array([[0.5, 2.0], [1.5, 0.0]]))
    assert load(table, values=False).y.tolist() == [2, 0]
    assert load(table).y.dtype == np.float32
    np.save(table, np.array([[5, -2], [1, 900_000]]))
    assert load(table, values=True).y.tolist() == [-2.0, 900_000.0]
