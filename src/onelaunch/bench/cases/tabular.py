"""Our estimators and scikit-learn's on real tables, one case per table: seconds per fit, and errors on held-out rows."""

from __future__ import annotations

import functools

from onelaunch.bench.case import case
from onelaunch.bench.tables import TABLES
from onelaunch.bench.tabular import PREFIX, trial_of

for _table in TABLES.values():
    _kind = "classification" if _table.classifies else "regression"
    case(f"{PREFIX}{_table.name}", "tabular", f"{_kind} with default parameters, five folds", unit="fit")(
        functools.partial(trial_of, _table)
    )
