"""A user's `.npz` and `.npy` files. Pickled objects are never read: a file from a stranger must not run code.

The type of y decides what it means: whole numbers and strings are classes, floating-point numbers are values to regress.
The argument `values` overrides this: True for values, False for classes, None to decide by the type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from onelaunch.data.dataset import Dataset
from onelaunch.errors import DataError, suggest

KEYS = (("x", "y", "test_x", "test_y"), ("x_train", "y_train", "x_test", "y_test"))
MAX_CLASSES = 1 << 16


def read_npz(path: Path, target: str | None, values: bool | None) -> Dataset:
    """The arrays x and y, and test_x and test_y if the file has them; or x_train, y_train, x_test, y_test as in Keras."""
    with _open(path) as file:
        if isinstance(file, np.ndarray):
            raise DataError(f"{path}: holds a single array, not named ones: rename it to .npy, or use numpy.savez")
        found = _list_names(file.files)
        names = next((names for names in KEYS if names[0] in file), None)
        if names is None:
            raise DataError(f"{path}: has no array x or x_train: save one; found: {found}")
        x_key, y_key, test_x_key, test_y_key = names
        if target is not None:
            y_key = target
            test_y_key = target.replace("train", "test") if "train" in target else f"test_{target}"
        if y_key not in file:
            hint = suggest(y_key, file.files) if target is not None else ""
            raise DataError(f"{path}: has no array {y_key}: save it, or pass target; found: {found}{hint}")
        held = [key for key in (test_x_key, test_y_key) if key in file]
        if len(held) == 1:
            lacking = test_y_key if held[0] == test_x_key else test_x_key
            raise DataError(f"{path}: has {held[0]} but no {lacking}: save both or neither; found: {found}")
        keys = [x_key, y_key, *held]
        parts = [_member(path, file, key) for key in keys]

    features = [_features(f"{path}: {key}", part) for key, part in zip(keys[::2], parts[::2], strict=True)]
    targets = [_targets(f"{path}: {key}", part, values) for key, part in zip(keys[1::2], parts[1::2], strict=True)]
    for number, (x, y) in enumerate(zip(features, targets, strict=True)):
        x_name, y_name = keys[2 * number : 2 * number + 2]
        if len(x) != len(y):
            raise DataError(f"{path}: {x_name} has {len(x):,} rows and {y_name} {len(y):,}: save one target per row")
        if x.shape[1:] != features[0].shape[1:] or x.dtype != features[0].dtype:
            raise DataError(f"{path}: {x_name} holds {_describe(x)}, {x_key} {_describe(features[0])}: save both alike")
        if y.shape[1:] != targets[0].shape[1:] or y.dtype.kind != targets[0].dtype.kind:
            raise DataError(f"{path}: {y_name} holds {_describe(y)}, {y_key} {_describe(targets[0])}: save both alike")
    classes, targets = _name_classes(targets)
    return _dataset(path, y_key, features, targets, classes)


def read_npy(path: Path, target: str | None, values: bool | None) -> Dataset:
    """A 2-D array: the column with the index `target` (default: the last) is y, the other columns are x."""
    with _open(path) as table:
        pass  # np.load has read all of an array
    if not isinstance(table, np.ndarray):
        raise DataError(f"{path}: holds several named arrays, not one: rename it to .npz")
    if table.ndim != 2 or table.dtype.kind not in "fiub":
        what = f"is an array of {table.dtype} with shape {table.shape}"
        raise DataError(f"{path}: {what}: save a 2-D array of numbers, or x and y with numpy.savez")
    columns = table.shape[1]
    if columns < 2:
        raise DataError(f"{path}: has {columns} column(s): save the features and the target side by side")
    if target is not None and (not re.fullmatch(r"-?\d+", target) or not -columns <= int(target) < columns):
        raise DataError(f"target={target!r}: {path} has columns 0 to {columns - 1}: pass one of them")
    column = int(target or -1) % columns
    x = _features(f"{path}", np.delete(table, column, axis=1))
    y = _targets(f"{path}: column {column}", table[:, column], values)
    classes, targets = _name_classes([y])
    return _dataset(path, f"column {column}", [x], targets, classes)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    with ExitStack() as stack:
        try:
            file = stack.enter_context(
                path.open("rb")
            )  # np.load leaves a damaged .npz open if it opens the file itself
            loaded = np.load(file, allow_pickle=False)
        except Exception as error:  # a damaged file may raise ValueError, zlib.error, TokenError, SyntaxError, …
            raise _unreadable(f"{path}", error) from None
        yield loaded if isinstance(loaded, np.ndarray) else stack.enter_context(loaded)


def _member(path: Path, file: Any, key: str) -> np.ndarray:
    try:
        array = file[key]
    except Exception as error:
        raise _unreadable(f"{path}: {key}", error) from None
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: {key} is not an array: save it with numpy.savez")
    return array


def _unreadable(where: str, error: Exception) -> DataError:
    if "pickle" in str(error) or "Python objects" in str(error):
        return DataError(
            f"{where}: holds no plain numbers but Python objects, which are never read (they can run code):"
            " save arrays of numbers with numpy.save or numpy.savez"
        )
    reason = " ".join(str(error).split()) or type(error).__name__
    return DataError(f"{where}: cannot be read ({reason}): save it again with numpy.save or numpy.savez")


def _features(where: str, array: np.ndarray) -> np.ndarray:
    if array.ndim < 2:
        raise DataError(f"{where} has shape {array.shape}: save one row for each sample (x.reshape(-1, 1)?)")
    if array.size == 0:
        raise DataError(f"{where} is empty (shape {array.shape}): save one row at least")
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "fiub":
        raise DataError(f"{where} is of type {array.dtype}: save numbers")
    return _finite(where, array)


def _targets(where: str, array: np.ndarray, values: bool | None) -> np.ndarray:
    """y as float32 values, or as int64 or string classes."""
    if array.size == 0:
        raise DataError(f"{where} is empty (shape {array.shape}): save one target at least")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    whole = array.dtype.kind == "f" and array.ndim == 1 and bool((np.abs(array) < 2**53).all())  # False for NaN and Inf
    if values is False and whole and (array == np.rint(array)).all():
        array = array.astype(np.int64)  # class numbers that were stored in a table of floats
    if array.dtype.kind in ("fiub" if values else "f") and array.ndim in (1, 2):
        return _finite(where, array)
    if array.ndim != 1:
        raise DataError(f"{where} has shape {array.shape}: save one class for each row (y.argmax(1)?)")
    if array.dtype.kind == "U":
        return array
    if array.dtype.kind not in "iub":
        raise DataError(f"{where} is of type {array.dtype}: save whole numbers or strings (classes) or floats (values)")
    remedy = f"number the classes from 0 to {MAX_CLASSES - 1:,} at most, or save floats if these are values"
    for wrong in (array < 0, array >= MAX_CLASSES):
        if wrong.any():
            row = int(np.argmax(wrong))
            raise DataError(f"{where}: row {row} has label {array[row]}: {remedy}")
    return np.ascontiguousarray(array, np.int64)


def _finite(where: str, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(values).all():
        row, *column = np.argwhere(~np.isfinite(values))[0].tolist()
        position = f"row {row}" + (f", column {', '.join(map(str, column))}" if column else "")
        wrong = array[(row, *column)]
        what = "is too large for float32" if np.isfinite(wrong) else "is not a finite number"
        raise DataError(f"{where}: {position} (counted from 0) holds {wrong}, which {what}: remove or replace it")
    return values


def _name_classes(targets: list[np.ndarray]) -> tuple[tuple[str, ...] | None, list[np.ndarray]]:
    """The class names (None for values), and the targets with strings replaced by the index of their class."""
    kind = targets[0].dtype.kind
    if kind == "f":
        return None, targets
    if kind == "i":
        return tuple(str(label) for label in range(max(int(y.max()) for y in targets) + 1)), targets
    names = np.unique(np.concatenate(targets))
    return tuple(names.tolist()), [np.searchsorted(names, y).astype(np.int64) for y in targets]


def _dataset(
    path: Path, key: str, features: list[np.ndarray], targets: list[np.ndarray], classes: tuple[str, ...] | None
) -> Dataset:
    rows = " + ".join(f"{len(x):,}" for x in features)
    what = f"{len(classes):,} classes" if classes else "values"
    source = f"{path}, {rows} rows of {'×'.join(map(str, features[0].shape[1:]))}, {what} in {key}"
    test_x, test_y = (features[1], targets[1]) if len(features) == 2 else (None, None)
    return Dataset(path.name, source, features[0], targets[0], test_x, test_y, classes)


def _describe(array: np.ndarray) -> str:
    return f"rows of shape {array.shape[1:]} and type {array.dtype}"


def _list_names(keys: list[str]) -> str:
    more = f" and {len(keys) - 12} more" if len(keys) > 12 else ""
    return ", ".join(map(repr, keys[:12])) + more if keys else "nothing"
