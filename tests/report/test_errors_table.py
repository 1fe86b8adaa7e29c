"""The table of errors in `docs/results.md`."""

from __future__ import annotations

from onelaunch.bench.tabular import BOOSTING, FOREST, MLP, OURS
from onelaunch.report.errors_table import error_rows, error_summary


def case(name: str, *errors: float) -> dict:
    names = (OURS, MLP, FOREST, BOOSTING)
    return {
        "name": f"tabular/{name}", "errors": {who: [error, error] for who, error in zip(names, errors, strict=True)},
        "times": {who: {"median": 1.0 + number} for number, who in enumerate(names)},
        "notes": {"rows": "1,000", "inputs": "4"},
    }  # fmt: skip


CASES = [case("iris", 0.1, 0.2, 0.05, 0.3), case("ames", 24_500.4, 3e4, 2.5e4, 2.6e4), case("boston", 3.25, 4, 5, 6)]


def test_every_table_has_a_row_with_the_lowest_error_in_bold() -> None:
    head, rows = error_rows(CASES)
    assert head == ["table", "rows", "inputs", "error", OURS, MLP, FOREST, BOOSTING, "ours / best tree"]
    assert rows == [
        ["iris", "1,000", "4", "wrong classes", "10.0 %", "20.0 %", "**5.0 %**", "30.0 %", "2.000"],
        ["ames *", "1,000", "4", "RMSE", "**24,500**", "30,000", "25,000", "26,000", "0.980"],
        ["boston", "1,000", "4", "RMSE", "**3.25**", "4", "5", "6", "0.650"],
    ]


def test_the_summary_counts_tables_ranks_and_seconds() -> None:
    ranks, near, seconds = error_summary(CASES)
    assert f"{OURS} 1.33, {MLP} 3.00" in ranks
    assert "on 2 of 3 tables, and on 1 of the 1 marked *" in near
    assert f"{OURS} 3.00 s, {MLP} 6.00 s" in seconds
    assert error_summary([case("iris", 0.1, 0.2, 0.05, 0.3) | {"errors": {OURS: [0.1]}}]) == []
