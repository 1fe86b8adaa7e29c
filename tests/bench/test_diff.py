from __future__ import annotations

import pytest

from onelaunch.bench.diff import NOISY, compare_results, differences
from onelaunch.bench.results import load_results
from onelaunch.errors import OnelaunchError
from onelaunch.report.read import read_json


def results(
    ours: float | None, peer: float = 10.0, spread: float = 0.03, name: str = "ops/x", check: str = "passed"
) -> dict:
    times = {} if ours is None else {"onelaunch": ours, "torch": peer}
    timings = {who: {"median": value, "spread": spread} for who, value in times.items()}
    return {"cases": [{"name": name, "check": check, "times": timings}]}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (results(5.0), results(5.2), NOISY),  # 4 %, and the two spreads allow 6
        (results(5.0), results(5.5), "slower"),
        (results(5.0), results(4.0), "faster"),
        (results(5.0, spread=0.2), results(6.0, spread=0.2), NOISY),
        (results(5.0, spread=0.2), results(5.0, spread=0.2), NOISY),  # equal medians, by chance
        (results(5.0), results(5.05), "same"),
        (results(5.0, spread=0.0), results(5.05, spread=0.0), "same"),  # 1 % is too little to act on
        (results(5.0, peer=10.0), results(6.0, peer=12.0), "machine"),  # all became slower by the same factor
        (results(5.0, peer=10.0), results(6.0, peer=20.0), "machine"),  # we became slower by less than the peers
        (results(5.0, peer=10.0), results(6.0, peer=10.1), "slower"),
        (results(5.0, peer=10.0), results(6.0, peer=8.0), "slower"),
        (results(5.0, peer=10.0), results(9.0, peer=11.0), "slower"),  # by far more than the peers
        (results(5.0), results(None, check="failed: AssertionError"), "failed"),
        (results(None, check="failed: AssertionError"), results(5.0), "mended"),
        (results(None, check="skipped: no GPU"), results(None, check="skipped: no GPU"), "skipped"),
    ],
)
def test_verdict(before, after, verdict):
    (change,) = compare_results(before, after)
    assert change.verdict == verdict


@pytest.mark.parametrize(
    "damaged",
    [
        {"cases": [1]},
        {"cases": [{"name": "ops/x", "times": None}]},
        results("fast"),  # type: ignore[arg-type]
        results(0.0),
        results(float("nan")),
    ],
)
def test_damaged_results_are_refused(damaged):
    for pair in ((results(5.0), damaged), (damaged, results(5.0))):
        with pytest.raises(OnelaunchError, match=r"take it again|real times"):
            compare_results(*pair)


def test_results_without_a_machine_are_reported():
    assert "machine" in differences({**results(5.0), "machine": None}, results(5.0))[0]


@pytest.mark.parametrize(
    "machine", [None, 3, {"gpus": None}, {"gpus": [{}]}, {"gpus": [{"name": 3}]}, {"cpu": 3}, {"versions": 3}]
)
def test_malformed_machines_are_reported(machine):
    expected = ["a file does not say on what machine it was taken"]
    assert differences({"machine": machine}, {}) == expected
    assert differences({}, {"machine": machine}) == expected


def test_json_nested_too_deep_is_refused(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    for read in (load_results, read_json):
        with pytest.raises(OnelaunchError, match="is not JSON"):
            read(path)


def test_cases_of_one_file_only_are_listed():
    both = {"cases": results(5.0)["cases"] + results(5.0, name="ops/y")["cases"]}
    assert [(c.name, c.verdict) for c in compare_results(results(5.0), both)] == [
        ("ops/x", "same"),
        ("ops/y", "added"),
    ]
    assert [c.verdict for c in compare_results(both, results(5.0))] == ["same", "gone"]
    with pytest.raises(OnelaunchError, match="no case in common"):
        compare_results(results(5.0), results(5.0, name="ops/y"))


def test_unfinished_results_are_reported():
    old, new = {**results(5.0), "finished": False}, {**results(5.0), "finished": True}
    assert differences(old, new) == ["the old one is unfinished: interrupted, killed or still running"]
    assert differences(results(5.0), new) == []  # older files do not say


def test_other_chips_and_versions_are_reported():
    def on(gpu: str, torch: str) -> dict:
        return {
            "machine": {"cpu": {"name": "A"}, "gpus": [{"name": gpu}], "versions": {"torch": torch}},
            "quick": False,
        }

    assert differences(on("H100", "2.9"), on("H100", "2.9")) == []
    assert differences(on("H100", "2.9"), on("H200", "2.11")) == ["gpu: H100, then H200", "torch: 2.9, then 2.11"]


def test_cases_beyond_a_limit_are_left_out_not_gone():
    old = {
        "cases": [*results(5.0)["cases"], *results(5.0, name="ops/y")["cases"], *results(5.0, name="ops/z")["cases"]]
    }
    new = results(5.0) | {"left_out": ["ops/y"]}
    assert [change.verdict for change in compare_results(old, new)] == ["same", "left out", "gone"]


def test_files_without_a_common_case_are_not_damaged():
    with pytest.raises(OnelaunchError, match=r"^the two files have no case in common"):
        compare_results(results(5.0), results(5.0, name="ops/y"))
