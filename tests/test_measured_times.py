from __future__ import annotations

import json
from pathlib import Path

import pytest

from onelaunch import measured_times
from onelaunch.measured_times import MeasuredTimes, sources_digest


@pytest.mark.parametrize(
    "damaged",
    [None, 3, "ours", ["ours"], {}, *({"ours": time} for time in (None, "1", -1.0, float("nan"), float("inf")))],
)
def test_damaged_entries_have_no_times(tmp_path: Path, damaged: object) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"key": damaged, "other": {"ours": 1.0, "too large": float("inf")}}))
    assert MeasuredTimes(path).times("key") == {}
    assert MeasuredTimes(path).times("other") == {"ours": 1.0, "too large": float("inf")}
    assert MeasuredTimes(path).times("unknown") == {}
    path.write_text("[" * 100_000)
    assert MeasuredTimes(path).entries == {}


def test_file_survives_damage_and_other_writers(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text("{ not json")
    one, other = MeasuredTimes(path), MeasuredTimes(path)
    one.add("a", {"x": 1.0})
    other.add("b", {"y": 2.0})
    assert MeasuredTimes(path).entries == {"a": {"x": 1.0}, "b": {"y": 2.0}}


def test_digest_changes_with_the_sources_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_times, "PACKAGE", tmp_path)
    folder = tmp_path / "kernels" / "cuda"
    folder.mkdir(parents=True)
    (tmp_path / "choice.py").write_text("a = 1")
    (folder / "gemm.cuh").write_text("int a;")
    digests = [sources_digest("kernels", "choice.py")]
    (folder / "gemm.pyc").write_text("compiled")
    assert sources_digest("kernels", "choice.py") == digests[0]
    for path, text in ((folder / "gemm.cuh", "int b;"), (tmp_path / "choice.py", "a = 2"), (folder / "new.py", "")):
        path.write_text(text)
        digests.append(sources_digest("kernels", "choice.py"))
    assert len(set(digests)) == len(digests)


def test_the_timed_sources_exist() -> None:
    from onelaunch.ops import linear_choice

    for name in linear_choice.TIMED_SOURCES:
        assert sources_digest(name) != sources_digest()
