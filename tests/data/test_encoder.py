"""The encoder of tables: against a hand-made encoding, the round trip through JSON, and one line for every bad table."""

from __future__ import annotations

import json

import numpy as np
import pytest

from onelaunch.data.encoder import MAX_CATEGORIES, TableEncoder
from onelaunch.data.table_file import Table
from onelaunch.errors import DataError


def make_table(columns: dict[str, list], path: str = "t.csv") -> Table:
    arrays = [np.array([*values, None], object)[:-1] if any(isinstance(v, str) for v in values) else
              np.array(values, np.float64) for values in columns.values()]  # fmt: skip
    return Table(path, tuple(columns), tuple(arrays), np.arange(2, 2 + len(arrays[0])), unit="line")


NAN = float("nan")
TABLE = make_table({
    "size": [1, 2, 3, 4, 100], "rooms": [1, NAN, 3, 3, 2], "kind": ["b", "a", "c", "a", ""], "sex": list("mffmm"),
    "same": [7] * 5, "none": [NAN] * 5, "word": ["x"] * 5,
})  # fmt: skip


def test_against_a_hand_made_encoding():
    encoder = TableEncoder.fit(TABLE, TABLE.names)
    assert encoder.numbers == ("size", "rooms")
    assert encoder.categories == {"kind": ("", "a", "b", "c"), "sex": ("f", "m")}
    assert encoder.left_out == {"same": "is constant", "none": "has no value", "word": "is constant"}
    assert encoder.inputs == 2 + 1 + 4 + 1
    x = encoder.transform(TABLE)
    assert x.dtype == np.float32
    z = (np.array([1, 2, 3, 4, 100]) - 3) / 2  # median 3, quartiles 2 and 4
    np.testing.assert_allclose(x[:, 0], z / np.sqrt(1 + (z / 3) ** 2), rtol=1e-6)
    assert x[1, 1] == 0
    assert x[:, 2].tolist() == [0, 1, 0, 0, 0]
    assert x[:, 3:7].argmax(axis=1).tolist() == [2, 1, 3, 1, 0]
    assert x[:, 3:7].sum(axis=1).tolist() == [1] * 5
    assert x[:, 7].tolist() == [1, -1, -1, 1, 1]


def test_columns_are_found_by_name_and_unseen_categories_are_zeros():
    encoder = TableEncoder.fit(TABLE, ("size", "kind", "sex"))
    new = make_table({"extra": [1, 1], "sex": ["x", "m"], "kind": ["z", "c"], "size": [NAN, 3]})
    x = encoder.transform(new)
    assert x[0].tolist() == [0] * 6
    assert x[1].tolist() == [0, 0, 0, 0, 1, 1]
    assert encoder.unseen(new) == {"kind": 1, "sex": 1}


def test_json_keeps_every_bit():
    encoder = TableEncoder.fit(TABLE, TABLE.names)
    again = TableEncoder.from_json(json.loads(json.dumps(encoder.to_json())))
    np.testing.assert_array_equal(again.transform(TABLE), encoder.transform(TABLE))
    assert again.left_out == encoder.left_out


def test_dates_are_kept_by_json_and_may_lack():
    table = make_table({"day": ["2024-01-01", "", "2024-01-09", "2024-01-05"], "same": ["2024-01-01"] * 4})
    encoder = TableEncoder.fit(table, table.names)
    assert (encoder.numbers, encoder.dates, encoder.left_out) == (("day",), ("day",), {"same": "is constant"})
    assert encoder.parts(table)[0][[0, 2, 3], 0].tolist() == [19723, 19731, 19727]
    content = json.loads(json.dumps(encoder.to_json()))
    again = TableEncoder.from_json(content)
    np.testing.assert_array_equal(again.transform(table), encoder.transform(table))
    with pytest.raises(ValueError, match="do not match"):
        TableEncoder.from_json(content | {"dates": ["other"]})
    with pytest.raises(DataError, match=r"line 2, column 'day': 'soon' is not a date such as 2024-05-31, as in train"):
        encoder.transform(make_table({"day": ["soon"]}))


def test_an_encoder_that_was_saved_with_dates_as_text_is_read():
    table = make_table({"day": ["2024-01-01", "2024-01-02", "2024-01-01"], "x": [1, 2, 3]})
    content = TableEncoder.fit(table, table.names, categorical=("day",)).to_json()
    del content["dates"]
    again = TableEncoder.from_json(content)
    assert again.categories == {"day": ("2024-01-01", "2024-01-02")}
    assert again.transform(table)[:, -1].tolist() == [-1, 1, -1]


def test_an_identifier_is_left_out_and_rare_categories_share_a_code():
    names = [f"id{i}" for i in range(900)]
    common = [f"c{i % 300}" for i in range(900)]
    table = make_table({"id": names, "common": common, "x": list(range(900))})
    encoder = TableEncoder.fit(table, table.names)
    assert "900 different texts in 900 rows" in encoder.left_out["id"]
    assert len(encoder.categories["common"]) == MAX_CATEGORIES


def test_numbers_as_categories():
    table = make_table({"zip": ["01", "02", "01"]})
    assert TableEncoder.fit(table, ("zip",), categorical=("zip",)).categories == {"zip": ("01", "02")}


NUMBERS = [*map(str, range(30))]
MISTAKES = {
    "text among numbers": (
        {"a": [*NUMBERS, "3O"]},
        r"line 32, column 'a': '3O' is not a number, but 30 of 31 values are",
    ),
    "infinite": ({"a": [1, float("inf")]}, "line 3, column 'a': inf is not a finite number"),
    "nothing to learn from": ({"a": [1, 1], "b": [NAN, NAN]}, "no column that says anything"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_bad_table_is_one_line(mistake):
    columns, message = MISTAKES[mistake]
    table = make_table(columns)
    with pytest.raises(DataError, match=message) as caught:
        TableEncoder.fit(table, table.names)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rows", [2, 60])
def test_too_many_inputs_are_refused(monkeypatch, rows):
    monkeypatch.setattr("onelaunch.data.encoder.MAX_INPUTS", 3)
    x = np.random.default_rng(0).normal(size=(4 if rows == 2 else 1, rows))
    table = Table("t.csv", tuple(f"c{i}" for i in range(len(x))), tuple(x), np.arange(rows))
    with pytest.raises(DataError, match=r"(4|9) inputs after encoding, more than 3: leave out columns"):
        TableEncoder.fit(table, table.names)


def test_a_repeated_name_is_refused():
    table = Table("t.csv", ("a", "a"), (np.zeros(2), np.ones(2)), np.array([2, 3]))
    with pytest.raises(DataError, match="2 columns called 'a': rename all but one"):
        TableEncoder.fit(table, ("a", "a"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sise": [1.0], "kind": ["a"]}, r"lacks the column\(s\) 'size': add them; did you mean 'sise'"),
        ({"kind": ["a"]}, r"lacks the column\(s\) 'size'"),
        ({"size": ["big"], "kind": ["a"]}, "line 2, column 'size': 'big' is not a number, as in training"),
        ({"size": [-float("inf")], "kind": ["a"]}, "-inf is not a finite number"),
    ],
)
def test_new_rows_that_do_not_fit_are_one_line(columns, message):
    encoder = TableEncoder.fit(TABLE, ("size", "kind"))
    with pytest.raises(DataError, match=message):
        encoder.transform(make_table(columns))
