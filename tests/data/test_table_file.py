"""Tables from files: numeric and text columns, missing values, compressed and parquet files, chunks."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from onelaunch.data import table_file
from onelaunch.data.table_file import Table, TableFile, decimal_comma, with_point
from onelaunch.errors import DataError

CONTENT = "size;kind;code;y\n1.5;red;1;a\n;blue ;x;b\nNA; ;2;a\n-3;None;?;b\n"


def read(path: Path, content: str | bytes, as_text: tuple[str, ...] = ()) -> Table:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return TableFile(path).read(as_text)


@pytest.mark.parametrize("chunk", [1, 1 << 18])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt", "a.csv.gz", "A.TSV.GZ"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_columns_of_numbers_and_of_text(tmp_path, monkeypatch, name, mark, chunk):
    monkeypatch.setattr(table_file, "CHUNK_CELLS", chunk)
    content = (mark + CONTENT.replace(";", "\t" if "tsv" in name.lower() else ";")).encode()
    table = read(tmp_path / name, gzip.compress(content) if name.lower().endswith("gz") else content)
    assert table.names == ("size", "kind", "code", "y")
    np.testing.assert_array_equal(table.column("size"), [1.5, np.nan, np.nan, -3])
    assert table.column("kind").tolist() == ["red", "blue", "", "None"], "None may be a name"
    assert table.column("code").tolist() == ["1", "x", "2", ""]
    assert table.lines.tolist() == [2, 3, 4, 5]
    assert table.place(1, "code") == f"{tmp_path / name}: line 3, column 'code'"
    part = table.take(np.array([3, 0]))
    assert part.column("y").tolist() == ["b", "a"]
    assert part.lines.tolist() == [5, 2]


def test_numbers_can_be_read_as_text(tmp_path):
    table = read(tmp_path / "a.csv", "zip,y\n01234,1\n99,2\n", ("zip",))
    assert table.column("zip").tolist() == ["01234", "99"]
    assert table.column("y").tolist() == [1, 2]


def test_a_long_field_is_read_and_the_limit_of_the_process_stays(tmp_path):
    limit = csv.field_size_limit()
    table = read(tmp_path / "a.csv", f"text,y\n{'long ' * 40_000}end,1\nshort,2\n")
    assert (len(table.column("text")[0]), table.column("text")[1]) == (200_003, "short")
    assert csv.field_size_limit() == limit < 200_000


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["3,14", "", "2", "-0,5"], "3,14"),
        (["1.234,5"], "1.234,5"),
        (["1.5", "2"], ""),
        (["3,14", "red"], ""),
        (["1,2,3"], ""),
        ([",", "a,b"], ""),
        ([], ""),
    ],
)
def test_columns_of_decimal_commas_are_recognised(texts, found):
    assert decimal_comma(texts) == found


def test_a_decimal_comma_as_a_point():
    assert [with_point(text) for text in ("3,14", "-1.234,5")] == ["3.14", "-1234.5"]


@pytest.mark.parametrize("cut", [5, 40])
def test_a_damaged_gz_file_is_one_line(tmp_path, cut):
    with pytest.raises(DataError, match=r"a\.csv\.gz: cannot be read"):
        read(tmp_path / "a.csv.gz", gzip.compress(CONTENT.encode())[:cut])


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"n": [1, None, 3], "f": [0.5, 1.5, None], "b": [True, False, None], "s": ["u", None, "w"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    table = TableFile(tmp_path / "a.parquet").read(as_text=("b",))
    np.testing.assert_array_equal(table.column("n"), [1, np.nan, 3])
    np.testing.assert_array_equal(table.column("f"), [0.5, 1.5, np.nan])
    assert table.column("b").tolist() == ["True", "False", ""]
    assert table.column("s").tolist() == ["u", "", "w"]
    assert table.place(2, "s").endswith("a.parquet: row 2, column 's'")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 is not all")
    with pytest.raises(DataError, match="is not a parquet file"):
        TableFile(tmp_path / "b.parquet")
