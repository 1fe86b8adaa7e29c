"""Spellings of one value: files, DataFrames and dicts with the same rows give the same inputs and targets."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from onelaunch.data import load
from onelaunch.data.encoder import TableEncoder
from onelaunch.data.table_encoding import as_table
from onelaunch.data.table_target import TableTarget
from onelaunch.data.table_values import Positions, days_of, number_of, plain, text_of
from onelaunch.errors import DataError

FLAGS = [True, False, True, None, False, True]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("3.00", "3"), ("+3", "3"), ("-3.", "-3"), ("-0", "0"), ("0.0", "0"), ("03", "03"), ("00", "00")),
        *(("TRUE", "True"), ("false", "False"), ("truth", "truth"), ("3.50", "3.50"), ("", ""), ("9" * 30, "9" * 30)),
        *(("2024-05-31T00:00:00.000", "2024-05-31"), ("2024-05-31 12:30", "2024-05-31 12:30:00")),
        *(("2024-05-31T12:30:00.2500", "2024-05-31 12:30:00.25"), ("2024-05-31T12:30Z", "2024-05-31T12:30Z")),
    ],
)
def test_plain(text, expected):
    assert plain(text) == expected


def test_numbers_and_texts():
    assert [number_of(text) for text in ("2.5", "True", "false", "word")] == [2.5, 1.0, 0.0, None]
    assert np.isnan([number_of(""), number_of("None")]).all()
    numbers = (3.0, 0.1 + 0.2, float("nan"), 1234567890123456.0, 1e300, float("inf"))
    assert [text_of(number) for number in numbers] == ["3", "0.3", "", "1234567890123456", "1e+300", "inf"]


@pytest.mark.parametrize(
    ("text", "days"),
    [
        *(("1970-01-02", 1.0), ("1969-12-31 12:00", -0.5), ("2024-02-29T06:00:00", 19782.25)),
        *(("1970-01-01T01:00:00Z", 1 / 24), ("1970-01-01 00:00:00+01:00", -1 / 24)),
        *(("1970-01-01 12:00:00.000000000", 0.5), ("2023-02-29", None), ("2024-5-3", None), ("2024-W01-1", None)),
        *(("20240101", None), ("1970-01-01 later", None), ("x", None)),
    ],
)
def test_days(text, days):
    assert days_of(text) == days


@pytest.mark.parametrize(
    ("known", "texts", "expected"),
    [
        (("", "1", "2"), ("1", "1.0", "01", "+2", "", "3", "True"), (1, 1, 1, 2, 0, -1, -1)),
        (("01", "1"), ("1", "01", "1.0", "001"), (1, 0, 1, -1)),  # 001 may be either
        (("02134", "10001"), ("2134", "2134.0", "10001"), (0, 0, 1)),
        (("False", "True"), ("true", "FALSE", "1", "0.0", "2", ""), (1, 0, 1, 0, -1, -1)),
        (("false", "true"), ("True", "False", "1"), (1, 0, 1)),
        (("TRUE", "true"), ("true", "True"), (1, -1)),  # as an older version may have saved it
        (("0", "1"), ("True", "False"), (1, 0)),
        (("0.1", "0.30000000000000004"), ("0.10", "0.3"), (0, 1)),
        (("1.10", "1.1.3"), ("1.1",), (-1,)),  # versions
    ],
)
def test_positions(known, texts, expected):
    positions = Positions(known)
    assert tuple(positions[text] for text in texts) == expected


def flag_file(path: Path, true: str, false: str, rows: list[Any] = FLAGS) -> Path:
    names = {True: true, False: false, None: ""}
    path.write_text("flag,x\n" + "".join(f"{names[flag]},{x}\n" for x, flag in enumerate(rows)))
    return path


def flag_tables(folder: Path, rows: list[Any]) -> list[Any]:
    """The same rows in every container."""
    x = list(range(len(rows)))
    found: list[Any] = [{"flag": rows, "x": x}, pd.DataFrame({"flag": pd.array(rows, "boolean"), "x": x})]
    found += [pd.DataFrame({"flag": pd.Series(rows, dtype=object), "x": x})]
    for true, false in (("True", "False"), ("true", "false"), ("TRUE", "FALSE")):
        path = flag_file(folder / f"{true}.csv", true, false, rows)
        found += [path, pd.read_csv(path)]
    if None not in rows:
        found += [pd.DataFrame({"flag": rows, "x": x}), {"flag": np.array(rows), "x": np.array(x)}]
    pytest.importorskip("pyarrow")
    found[1].to_parquet(folder / "flag.parquet")
    return [*found, folder / "flag.parquet", pd.read_parquet(folder / "flag.parquet")]


@pytest.mark.parametrize("rows", [FLAGS, [flag for flag in FLAGS if flag is not None]], ids=["gaps", "no gaps"])
def test_booleans_are_the_same_in_every_container(tmp_path, rows):
    tables = flag_tables(tmp_path, rows)
    encoders = [TableEncoder.fit(table, table.names) for table in (as_table(data, ()) for data in tables)]
    expected = encoders[0].transform(as_table(tables[0], ("flag",)))
    assert encoders[0].categories["flag"][-2:] == ("False", "True")
    for encoder in encoders:
        assert encoder.to_json() == encoders[0].to_json()
        for data in [*tables, flag_file(tmp_path / "digits.csv", "1", "0", rows)]:
            np.testing.assert_array_equal(encoder.transform(as_table(data, ("flag",))), expected)


def test_booleans_are_numbers_where_training_had_numbers(tmp_path):
    rows = [flag for flag in FLAGS if flag is not None]
    trained = as_table(flag_file(tmp_path / "digits.csv", "1", "0", rows), ())
    encoder = TableEncoder.fit(trained, trained.names)
    assert encoder.numbers == ("flag", "x")
    for data in flag_tables(tmp_path, rows):
        np.testing.assert_array_equal(encoder.transform(as_table(data, ())), encoder.transform(trained))


@pytest.mark.parametrize(("true", "false"), [("True", "False"), ("true", "false"), ("1", "0")])
def test_a_target_of_booleans(tmp_path, true, false):
    rows = [flag for flag in FLAGS if flag is not None]
    target = TableTarget.fit(as_table(flag_file(tmp_path / "t.csv", true, false, rows), ("flag",)), "flag")
    assert target.classes == (false, true)  # as they are written
    for data in flag_tables(tmp_path, rows):
        assert target.values(as_table(data, ("flag",))).tolist() == rows
    numbers = TableTarget.fit(as_table(flag_file(tmp_path / "n.csv", "1", "0"), ("x",)), "x", "regression")
    assert numbers.values(as_table({"x": [True, False]}, ("x",))).tolist() == [1, 0]


def test_booleans_in_several_spellings_are_two_classes():
    labels = as_table({"y": ["true", "TRUE", "False"]}, ("y",))
    assert TableTarget.fit(labels, "y").classes == ("False", "True")


@pytest.mark.parametrize("gap", [False, True])
def test_numbers_of_categories_are_the_same_in_every_container(tmp_path, gap):
    codes = ["1", "22", "1", "03", "", "1234567890123456"] if gap else ["1", "22", "1", "03", "1234567890123456789"]
    path = tmp_path / "codes.csv"
    path.write_text("code,x\n" + "".join(f"{code},{x}\n" for x, code in enumerate(codes)))
    frame = pd.read_csv(path)
    assert frame["code"].dtype == (np.float64 if gap else np.int64)
    frame.to_csv(tmp_path / "again.csv", index=False)  # 1.0 for 1 if there are gaps
    tables = [path, frame, tmp_path / "again.csv", {name: list(frame[name]) for name in frame}]
    tables += [frame.convert_dtypes(), frame.astype(object)]
    for trained in tables:
        table = as_table(trained, ("code",))
        encoder = TableEncoder.fit(table, table.names, ("code",))
        expected = encoder.transform(table)
        for data in tables:
            np.testing.assert_array_equal(encoder.transform(as_table(data, ("code",))), expected)


def test_booleans_among_the_numbers_of_an_array_file(tmp_path):
    dataset = load(flag_file(tmp_path / "t.csv", "True", "False", [True, False, True]), target="x")
    assert dataset.x.tolist() == [[1], [0], [1]]


def test_numbers_too_long_to_be_rounded_are_not_mixed_up():
    long = ["12345678901234567890", "22345678901234567890", "1e400"]
    assert [Positions(long)[text] for text in ("12345678901234567899", "1e500", *long)] == [-1, -1, 0, 1, 2]


def test_one_is_not_true_among_other_categories():
    assert [Positions(["no", "True", "yes"])[text] for text in ("1", "true")] == [-1, 1]
    assert [Positions(["0", "1", "2"])[text] for text in ("True", "2.0")] == [-1, 2]


def test_numbers_of_numpy_in_a_column_of_objects_are_not_missing():
    objects = [np.float64(1), None, np.float64(2), pd.NA, np.True_, np.nan]
    table = as_table({"n": objects[:4], "b": [objects[4], None, np.False_, pd.NA]}, ())
    np.testing.assert_array_equal(table.column("n"), [1, np.nan, 2, np.nan])
    assert table.column("b").tolist() == ["True", "", "False", ""]


def test_dates_as_categories_are_the_same_in_every_container(tmp_path):
    moments = pd.to_datetime(["2024-01-01 00:00", "2024-01-01 12:00"] * 3)
    frame = pd.DataFrame({"d": moments, "z": range(6)})
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    containers = (frame, dict(frame), {"d": list(moments), "z": range(6)}, tmp_path / "t.csv", tmp_path / "t.parquet")
    encoder = TableEncoder.fit(as_table(frame, ["d"]), ["d", "z"], ["d"])
    expected = encoder.transform(as_table(frame, ["d"]))
    for container in containers:
        table = as_table(container, ["d"])
        assert encoder.categories == TableEncoder.fit(table, ["d", "z"], ["d"]).categories
        np.testing.assert_array_equal(encoder.transform(table), expected)
    np.testing.assert_array_equal(encoder.transform(as_table(frame[:1], ["d"])), expected[:1])


def test_decimals_and_texts_of_numbers_in_parquet_are_numbers(tmp_path):
    pd.DataFrame({"a": [Decimal("1.25"), None, Decimal("3")], "t": ["0", "6", None]}).to_parquet(tmp_path / "t.parquet")
    table = as_table(tmp_path / "t.parquet", ())
    np.testing.assert_array_equal(table.column("a"), [1.25, np.nan, 3])
    np.testing.assert_array_equal(table.column("t"), [0, 6, np.nan])
    assert as_table(tmp_path / "t.parquet", ["t"]).column("t").tolist() == ["0", "6", ""]


def test_dates_past_9999_durations_and_short_floats(tmp_path):
    pd.DataFrame({"d": np.array(["9999-12-31", "12000-01-01"], "M8[s]")}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"column 'd' cannot be read .*: correct it"):
        as_table(tmp_path / "t.parquet", ())
    durations = np.array([36, 12], "m8[h]")
    for unit in ("ns", "us", "s"):
        assert as_table({"m": durations.astype(f"m8[{unit}]")}, ()).column("m").tolist() == [1.5, 0.5]
    assert as_table({"p": np.array(["1970-02-01"], "M8[ps]")}, ()).column("p").tolist() == ["1970-02-01"]
    column = as_table({"f": np.array([0.1, 2], np.float32)}, ["f"]).column("f")
    assert column.tolist() == [0.1, 2.0]
