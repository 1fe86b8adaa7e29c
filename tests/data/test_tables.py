"""`.csv` files: delimiters, headers, classes and values, and one line for every refusal."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onelaunch.data import Dataset, load
from onelaunch.errors import DataError


def read(tmp_path: Path, content: str | bytes, target: str | int | None = None) -> Dataset:
    path = tmp_path / "data.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load(path, target=target)


def refused(tmp_path: Path, content: str | bytes, match: str, target: str | int | None = None) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read(tmp_path, content, target)
    assert "\n" not in str(caught.value)
    assert "data.csv" in str(caught.value)


def test_classes_by_whole_number(tmp_path: Path) -> None:
    data = read(tmp_path, "a,label,b\n1,10,2\n3,-2,4\n5e-1,10,.25\n7,3,-8\n")
    assert data.x.tolist() == [[1, 2], [3, 4], [0.5, 0.25], [7, -8]]
    assert data.x.dtype == np.float32
    assert data.x.flags.writeable
    assert data.y.tolist() == [2, 0, 2, 1]
    assert data.y.dtype == np.int64
    assert data.classes == ("-2", "3", "10"), "sorted as numbers"
    assert data.test_x is None
    assert data.name == "data.csv"
    assert data.source == f"{tmp_path / 'data.csv'}, 4 rows of 2, 3 classes in column 'label'"


def test_classes_by_name(tmp_path: Path) -> None:
    data = read(tmp_path, 'width,Class\n1,setosa\n2,"virginica, the ""blue"""\n3, setosa \n')
    assert data.classes == ("setosa", 'virginica, the "blue"')
    assert data.y.tolist() == [0, 1, 0]
    assert read(tmp_path, "a,y\n1,1\n2,b\n").classes == ("1", "b"), "digits and letters"


def test_values(tmp_path: Path) -> None:
    data = read(tmp_path, "a,price\n1,2\n2,2.5\n3,-1e3\n", "price")
    assert data.y.tolist() == [2, 2.5, -1000]
    assert data.y.dtype == np.float32
    assert data.classes is None
    assert "values in column 'price'" in data.source


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_delimiters_line_ends_byte_order_mark_and_blank_lines(
    tmp_path: Path, delimiter: str, newline: str, mark: str
) -> None:
    lines = ["", "target;a;b", "", '"1"; 2 ;3', "   ", "4;5;6", "", ""]
    data = read(tmp_path, mark + newline.join(lines).replace(";", delimiter))
    assert data.x.tolist() == [[2, 3], [5, 6]]
    assert data.classes == ("1", "4")


@pytest.mark.parametrize(("target", "column"), [("b", 1), (1, 1), ("-2", 1), ("c", 2), ("0", 0)])
def test_target_by_name_or_index(tmp_path: Path, target: str | int, column: int) -> None:
    data = read(tmp_path, "a,b,c\n1,2,3\n", target)
    assert data.classes == (str(column + 1),)


@pytest.mark.parametrize(
    ("content", "target", "rows"),
    [
        ("1,2,3\n4,5,6\n", 2, 2),
        ("5.1,3.5,setosa\n4.9,3.0,setosa\n", 2, 2),
        ("0,1,cat\n1,0,dog\n", 2, 2),
        ("0,1\n1,0\n", 1, 2),
        ("0,1,2,3\n9,9,9,9\n", 3, 1),
        ("0,1,2,label\n9,9,9,1\n", None, 1),
        ("0,1,2,kind\n9,9,9,a\n", 3, 1),
        ("2019,2020,price\n9,9,1\n", 2, 1),
        ("2019,2020,kind\n9,9,a\n", "kind", 1),
    ],
)
def test_a_header_line_is_distinguished_from_numbers(
    tmp_path: Path, content: str, target: str | int | None, rows: int
) -> None:
    data = read(tmp_path, content, target)
    assert len(data.x) == rows
    assert ("no header line" in data.source) == (rows == 2)


@pytest.mark.parametrize(
    ("content", "target", "match"),
    [
        ("", None, "is empty"),
        ("\n \n", None, "is empty"),
        ("a,y\n", None, "a header line and no rows"),
        ("1,2\n3,4\n", None, "has no header line: pass target as an index from 0 to 1"),
        ("a,b\n1,2\n", None, "no column is called target, label, y, class: pass target as one of 'a', 'b'"),
        ("y,label,b\n1,2,3\n", None, "2 columns are called target, label, y, class: pass target"),
        ("height,price\n1,2\n", "prise", "target='prise': .* no such column.*; did you mean 'price'"),
        ("a,b\n1,2\n", 2, "target='2': .* no such column: pass one of 'a', 'b'"),
        ("a,a,b\n1,2,3\n", "a", "has 2 columns of that name: pass its index"),
        ("y\n1\n", None, "has a single column"),
        (",a,y\n0,1,2\n", None, "column 0 of the header has no name.*index=False"),
        ("a,y\n1,2\n\n3\n", None, "line 4 has 1 fields, the first line 2"),
        ("a,y\n1,2,3\n", None, "line 2 has 3 fields"),
        ("a,b,y\n1,2,3\n1,red,3\n", None, "line 3, column 'b': 'red' is not a number"),
        ("a,b,y\n1,2,3\n\n1,,3\n", None, "line 4, column 'b': the value is missing: fill it in"),
        ("a,b,y\n1,2,\n", None, "line 2, column 'y': the value is missing"),
        ("a;b;y\n1,5;2;3\n", None, "line 2, column 'a': '1,5' has a decimal comma, which makes it text: write 1.5$"),
        ("a,b,y\n1,2,3\n\n1,nan,3\n", None, "line 4, column 'b': the value is missing"),
        ("a,b,y\n1,2,3\n-inf,4,3\n", None, "line 3, column 'a': -inf is not a finite"),
        ("a,b,y\n1,1e39,3\n", None, "line 2, column 'b': inf is not a finite float32"),
        ("a,y\n1,0.5\n2,nan\n", None, "line 3, column 'y': the value is missing"),
        ("a,y\n1,0.5\n2,1e39\n", None, "line 3, column 'y': 1e39 is not a finite"),
        ("a,y\n1,0.5\n2,hello\n", None, "number '0.5' in line 2 and the word 'hello' in line 3"),
        ("a,y\n1,cat\n2,nan\n", None, "line 3, column 'y': the value is missing"),
        ('a,y\n1,"cat\n2,dog\n', None, "is not a csv file .*quotes"),
        ('a,y\n1,"cat"x\n', None, "is not a csv file .*quotes"),
        ("a,y\n1,2\n".encode("utf-16"), None, "is not UTF-8 text"),
        ("a,y\n1,caf\xe9\n".encode("latin-1"), None, "is not UTF-8 text"),
        (b"a,y\n\0,1\n", None, "is not a number"),
    ],
)
def test_refused(tmp_path: Path, content: str | bytes, target: str | int | None, match: str) -> None:
    refused(tmp_path, content, match, target)


def test_a_list_of_many_columns_is_abbreviated(tmp_path: Path) -> None:
    names = ",".join(f"p{index}" for index in range(785))
    refused(tmp_path, f"{names}\n", r"one of 'p0', .*'p7' … \(785 in all\)$")


def test_a_number_of_any_length_is_read_or_refused(tmp_path: Path) -> None:
    refused(tmp_path, f"a,y\n1,{'9' * 5000}\n", "is not a finite float32")
    assert read(tmp_path, f"a,y\n1,{'9' * 18}\n").classes == ("9" * 18,)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), st.text(min_size=1, max_size=8)),
        min_size=1,
        max_size=4,
    ),
    delimiter=st.sampled_from(",;\t"),
)
def test_what_the_csv_module_writes_is_read_back(tmp_path: Path, rows: list[tuple[float, str]], delimiter: str) -> None:
    path = tmp_path / "data.csv"
    with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["a", "y"])
        writer.writerows((number, f"<{name}>") for number, name in rows)
    data = load(path)
    assert data.x[:, 0].tolist() == [number for number, _ in rows]
    assert data.classes is not None
    named = [data.classes[label] for label in data.y]
    assert named == [f"<{name}>".encode(errors="replace").decode() for _, name in rows]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(st.binary(max_size=60), st.text('0123456789.,;"\n\ray ', max_size=60).map(str.encode)))
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    message = ""
    try:
        read(tmp_path, b"a,y\n" + content)
    except DataError as error:
        message = str(error)
    assert "\n" not in message


def test_a_wide_file(tmp_path: Path) -> None:
    row = ",".join(["17"] * 784)
    path = tmp_path / "wide.csv"
    path.write_text("label," + ",".join(f"p{i}" for i in range(784)) + "\n" + f"3,{row}\n" * 300)
    data = load(path)
    assert data.x.shape == (300, 784)
    assert (data.x == 17).all()


def test_values_overrides_the_form_of_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("rooms,price\n1,208500\n2,181500\n3,208500\n")
    assert load(path, target="price", values=True).y.tolist() == [208500.0, 181500.0, 208500.0]
    assert load(path, target="price", values=True).classes is None
    assert load(path, target="price", values=False).classes == ("181500", "208500")
    path.write_text("a,y\n1,0.0\n2,1.00\n3,0\n")
    assert load(path, values=False).y.tolist() == [0, 1, 0]
    assert load(path, values=True).classes is None
    path.write_text("a,y\n1,no\n2,yes\n")
    assert load(path, values=True).classes == ("no", "yes")


def test_an_underscore_makes_a_word(tmp_path):
    """Python's `float` reads 1_1 as 11."""
    path = tmp_path / "levels.csv"
    path.write_text("a,b,y\n1,2,1_1\n3,4,1_2\n5,6,2_1\n")
    for values in (None, False):
        data = load(path, values=values)
        assert data.classes == ("1_1", "1_2", "2_1")
        assert data.y.tolist() == [0, 1, 2]
    path.write_text("a,b,y\n1,7_5,1\n3,4,2\n")
    with pytest.raises(ValueError, match=r"line 2, column 'b': '7_5' is not a number"):
        load(path)
