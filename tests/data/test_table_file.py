"""Tables from files: numeric and text columns, missing values, compressed and parquet files, chunks."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelaunch.data import table_file
from onelaunch.data.table_file import Table, TableFile, decimal_comma, separator_of, with_point
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


DECIMALS = st.decimals(-99, 99, places=2).map(lambda number: str(number).replace(".", ","))
WORDS = st.sampled_from(["red", "y", "a b", '"x, y; z"', '"two\nlines, or; more"', '5" pipe', ""])
ROWS = st.integers(1, 30)
SEPARATORS = st.sampled_from(",;\t")


@given(st.data(), ROWS, st.integers(1, 3), SEPARATORS.filter(lambda text: text != ","), st.booleans())
def test_decimal_commas_do_not_separate(data, rows, numbers, separator, header):
    """Whether all fields have a decimal comma or some are whole, and whether a comma is also in the header."""
    fields = [st.one_of(DECIMALS, st.integers(0, 9).map(str))] * numbers + [WORDS]
    lines = [[DECIMALS, *fields] for _ in range(rows)]
    texts = [separator.join(data.draw(field) for field in line) for line in lines]
    names = separator.join(["length, m", *(f"n{number}" for number in range(numbers)), "kind"])
    assert separator_of("\n".join([names] * header + texts) + "\n") == separator


@given(st.data(), ROWS, st.integers(1, 4), SEPARATORS, st.booleans())
def test_tables_with_decimal_points_keep_their_separator(data, rows, numbers, separator, header):
    fields = [st.decimals(-99, 99, places=2).map(str)] * numbers + [WORDS]
    texts = [separator.join(data.draw(field) for field in fields) for _ in range(rows)]
    names = separator.join([*(f"n{number}" for number in range(numbers)), "kind"])
    assert separator_of("\n".join([names] * header + texts)) == separator


@pytest.mark.parametrize(
    ("head", "separator"),
    [
        ("", ","),
        ("word\nother\n", ","),
        ("1,2\n3,4\n", ","),
        ("0,5;y\n", ";"),
        ("0,5;1,5;2,5\n0,25;1,75;2,5\n", ";"),
        ("0,5;1,5\n0,25;1,75;2,5\n", ";"),  # the reader then names the line with too many fields
        ("0,5\t1,5\n0,25\t1,75\n", "\t"),
        ("1,2,a;b\n3,4,c;d\n", ","),
        ("a,b;c,d\n1,x;y,2\n", ","),
        ("a,b,c\n1,2\n", ","),
        ('a;"b, c, d, e"\n1;"unfinished, field', ";"),
        ('"a, b, c\nd";1\n"x";2\n', ";"),
    ],
)
def test_the_separator_of_the_first_lines(head, separator):
    assert separator_of(head) == separator


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("0,13;-0,13;y\n0,5;1,5;n\n0,1;2,5;y\n", ("0", "1", "2")),
        ("0.13,-0.13,y\n0.5,1.5,n\n0.1,2.5,y\n", ("0", "1", "2")),
        ("1100.5,1200.5,y\n0.5,1.5,u\n0.1,2.5,v\n", ("1100.5", "1200.5", "y")),
        ("0.13,?,u\n0.5,1.5,v\n", ("0", "1", "2")),
        ("length;1;kind\n0,5;1,5;n\n", ("length", "1", "kind")),
    ],
)
def test_a_header_is_told_from_rows(tmp_path, content, names):
    (tmp_path / "a.csv").write_text(content)
    file = TableFile(tmp_path / "a.csv")
    assert (file.names, file.header) == (names, names[0] != "0")
