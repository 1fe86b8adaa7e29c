"""`load`: the data that a user names, a known set or a file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from onelaunch.data import arrays, mnist, tables
from onelaunch.data.dataset import Dataset
from onelaunch.errors import ArgumentTypeError, DataError, suggest
from onelaunch.table_names import is_table_file

NAMES = ("mnist", "fashion-mnist", "digits")
READERS = {".npz": arrays.read_npz, ".npy": arrays.read_npy}


def load(
    data: str | os.PathLike[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    target: str | int | None = None,
    values: bool | None = None,
) -> Dataset:
    """The data set called `mnist`, `fashion-mnist` or `digits`, or the rows of a `.npz`, `.npy` or `.csv` file.

    data_dir: the folder with the files of MNIST or Fashion-MNIST; without it, they come from the cache or a download.
    target: what to learn from a file: an array of a `.npz`, a column of a `.npy` (index) or `.csv` (name or index).
    values: how to read numeric targets of a file: True as values to regress, False as classes, None by their type.
    """
    if not isinstance(data, str | os.PathLike):
        raise ArgumentTypeError(f"data={data!r} is not a string: pass one of {', '.join(NAMES)} or the path of a file")
    name = os.fspath(data)
    if name in NAMES:
        if target is not None:
            raise DataError(f"target={target!r}: data={name!r} has its labels already: leave target out")
        if name == "digits":
            return _digits()
        image_set = mnist.MNIST if name == "mnist" else mnist.FASHION_MNIST
        return mnist.load_images(image_set, None if data_dir is None else _path(data_dir))

    path = _path(name)
    reader = tables.read_table if is_table_file(path) else READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(repr(option) for option in NAMES)
        what = "is a folder" if name and os.path.isdir(path) else "is not known"
        what = "is a kind of file that cannot be read" if os.path.isfile(path) else what
        raise DataError(
            f"data={name!r} {what}: pass {known} or the path of a .npz, .npy or .csv file{suggest(name.lower(), NAMES)}"
        )
    if not os.path.isfile(path):
        what = "is not a file" if os.path.exists(path) else "no such file"
        raise DataError(f"{path}: {what}: check the path")
    return reader(path, None if target is None else str(target), values)


def _path(name: str | os.PathLike[str]) -> Path:
    return Path(os.path.expanduser(name))


def _digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(f"data='digits' needs scikit-learn ({error}): pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    x = np.ascontiguousarray(images / 16, np.float32)
    source = f"scikit-learn's digits, {len(x):,} of 8×8"
    return Dataset("digits", source, x, labels.astype(np.int64), classes=tuple("0123456789"), image_shape=(8, 8))
