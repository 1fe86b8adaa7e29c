"""Tables with text in a scikit-learn pipeline."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline

import onelaunch as ol
from onelaunch.sklearn import MLPClassifier, SweepCV, TableEncoder

pytestmark = pytest.mark.usefixtures("one_thread")


def frame(rows: int = 240, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    random = np.random.default_rng(seed)
    size, city = random.normal(100, 30, rows), random.choice(["Rome", "Oslo", "Lima"], rows)
    size[random.random(rows) < 0.1] = np.nan
    floor = random.integers(0, 3, rows)
    y = np.where(np.nan_to_num(size, nan=100) + 40 * (city == "Oslo") + 30 * (floor == 1) > 120, "dear", "cheap")
    return pd.DataFrame({"size": size, "city": city, "floor": floor}), y


def test_a_pipeline_learns_from_text_and_missing_values() -> None:
    x, y = frame()
    pipeline = make_pipeline(TableEncoder(categorical=["floor"]), MLPClassifier(scale=None, random_state=0))
    pipeline.fit(x, y)
    new, expected = frame(seed=1)
    assert (pipeline.predict(new) == expected).mean() > 0.85
    shuffled = new[["floor", "city", "size"]].assign(more=1.0)  # columns are found by name
    assert np.array_equal(pipeline.predict(shuffled), pipeline.predict(new))
    again = pickle.loads(pickle.dumps(pipeline))
    assert np.array_equal(again.predict_proba(new), pipeline.predict_proba(new))


def test_the_inputs_are_those_of_the_documentation() -> None:
    x, _ = frame(rows=40)  # too few rows for ramps
    encoder = TableEncoder(categorical=["floor"]).fit(x)
    inputs = encoder.transform(x)
    assert inputs.dtype == np.float32
    assert inputs.shape == (40, 1 + 1 + 3 + 3)  # size, its flag, three cities, three floors
    assert np.array_equal(inputs[:, 1], x["size"].isna().to_numpy(np.float32))
    unknown = encoder.transform(x.assign(city="Bonn"))
    assert not unknown[:, 2:5].any()
    assert list(encoder.feature_names_in_) == ["size", "city", "floor"]


def test_columns_may_have_numbers_as_names() -> None:
    x, _ = frame(rows=40)
    x.columns = range(3)
    assert set(TableEncoder(categorical=[2]).fit(x).encoder_.categories) == {"1", "2"}


def test_the_inputs_have_names() -> None:
    x, _ = frame(rows=40)
    x["lift"] = np.where(x["floor"] > 1, "yes", "no")
    x.loc[::7, "city"] = None
    encoder = TableEncoder(categorical=["floor"]).fit(x)
    names = [
        "size",
        "size missing",
        "city missing",
        "city=Lima",
        "city=Oslo",
        "city=Rome",
        "floor=0",
        "floor=1",
        "floor=2",
    ]
    assert encoder.get_feature_names_out().tolist() == [*names, "lift=yes"]
    inputs = dict(zip(encoder.get_feature_names_out(list(x)), encoder.transform(x).T, strict=True))
    assert np.array_equal(inputs["city=Oslo"], (x["city"] == "Oslo").to_numpy(np.float32))
    assert np.array_equal(inputs["city missing"], x["city"].isna().to_numpy(np.float32))
    assert np.array_equal(inputs["lift=yes"] > 0, x["lift"] == "yes")
    with pytest.raises(ValueError, match="input_features is not equal to feature_names_in_"):
        encoder.get_feature_names_out(["a", "b", "c", "d"])
    with pytest.raises(NotFittedError):
        TableEncoder().get_feature_names_out()


@pytest.mark.parametrize("rows", [40, 400])  # without and with ramps
def test_the_inputs_as_a_data_frame(rows: int, tmp_path: Path) -> None:
    x, _ = frame(rows)
    x.index = range(7, 7 + rows)
    encoder = TableEncoder().set_output(transform="pandas")
    found = encoder.fit_transform(x)
    assert list(found.columns) == encoder.get_feature_names_out().tolist()
    assert found.columns.is_unique
    assert ("size ramp 8" in found) == (rows == 400)
    assert list(found.index) == list(x.index)
    assert np.array_equal(found, TableEncoder().fit_transform(x))
    x.to_csv(tmp_path / "x.csv", index=False)
    assert np.array_equal(encoder.transform(tmp_path / "x.csv"), found)


def test_a_search_over_a_pipeline() -> None:
    x, y = frame(rows=120)
    rows = TableEncoder().fit_transform(x)
    found = SweepCV(MLPClassifier(scale=None, max_iter=3), {"dropout": [0.0, 0.2]}, cv=2).fit(rows, y)
    assert found.best_params_["dropout"] in (0.0, 0.2)
    assert clone(TableEncoder(categorical=("floor",))).categorical == ("floor",)


def test_mistakes_are_one_line() -> None:
    x, _ = frame(rows=30)
    with pytest.raises(NotFittedError):
        TableEncoder().transform(x)
    with pytest.raises(TypeError, match=r"^categorical='floor' is a str: pass a list, such as \['floor'\]$"):
        TableEncoder(categorical="floor").fit(x)
    with pytest.raises(ol.OnelaunchError, match=r"^categorical='Flor': x has no such column; did you mean 'floor'\?$"):
        TableEncoder(categorical=["city", "Flor"]).fit(x)
    with pytest.raises(ol.OnelaunchError, match="lacks the column"):
        TableEncoder().fit(x).transform(x[["size"]])
    with pytest.raises(TypeError, match="pass the path of a file, a DataFrame, or a dict of columns"):
        TableEncoder().fit(x.to_numpy())


def test_columns_that_are_not_used_are_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    x, _ = frame(rows=60)
    x["day"] = [f"{1 + row % 30}/{1 + row // 30}/2024" for row in range(60)]
    x["month"] = [f"1/{1 + row // 30}/2024" for row in range(60)]
    x["id"], x["same"] = [f"n{row}" for row in range(60)], 1
    encoder = TableEncoder().fit(x)
    assert encoder.left_out_ == {
        "day": "has dates, such as '1/1/2024', which are text: write dates as 2024-05-31",
        "id": "has 60 different texts in 60 rows, as an identifier has",
        "same": "is constant",
    }
    assert caplog.messages == [
        *(f"column {name!r} is not used: it {reason}" for name, reason in encoder.left_out_.items()),
        "column 'month' is text, as '1/1/2024' is a date: write dates as 2024-05-31, or leave it out",
    ]
    with pytest.raises(NotFittedError):
        _ = TableEncoder().left_out_


DAYS = np.datetime64("2024-01-01") + np.arange(60)
DATES = {
    "text": DAYS.astype(str),
    "seconds": DAYS.astype("M8[s]"),
    "nanoseconds": DAYS.astype("M8[ns]"),
    "pandas": pd.Series(DAYS.astype("M8[s]")).astype("datetime64[ns]"),
    "with a zone": pd.Series(DAYS.astype("M8[s]")).dt.tz_localize("UTC"),
    "objects": pd.Series(DAYS.tolist(), dtype=object),
    "with a time": pd.Series([f"{day}T00:00:00Z" for day in DAYS]),
}


@pytest.mark.parametrize("gaps", [False, True])
def test_dates_are_numbers_in_every_container(gaps: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers = pd.DataFrame({"day": np.arange(60.0), "x": np.arange(60) % 7})
    frames = [numbers.assign(day=dates) for dates in DATES.values()]
    for one in [numbers, *frames] if gaps else []:
        one.loc[::9, "day"] = None
    expected = TableEncoder().fit_transform(numbers)
    for number, one in enumerate(frames):
        encoder = TableEncoder().fit(one)
        assert encoder.encoder_.dates == ("day",)
        np.testing.assert_allclose(encoder.transform(one), expected, atol=1e-6)
        one.to_csv(tmp_path / f"{number}.csv", index=False)
        one.to_parquet(tmp_path / f"{number}.parquet")
    for data in [*frames, *tmp_path.iterdir(), frames[0].to_dict("list")]:
        assert np.array_equal(encoder.transform(data), encoder.transform(frames[0]))
    assert not caplog.messages
    as_text = TableEncoder(categorical=["day"]).fit(frames[0])
    assert as_text.left_out_["day"].startswith(f"has {53 if gaps else 60} different texts")
    with pytest.raises(ol.OnelaunchError, match=r"column 'day': '7' is not a date such as 2024-05-31, as in training"):
        encoder.transform({"day": [7], "x": [1]})
