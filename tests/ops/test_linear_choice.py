"""The choice of an implementation of linear: what is timed, how, and which result is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onelaunch.kernels.dropout_key import NO_KEY
from onelaunch.measured_times import MeasuredTimes
from onelaunch.ops import linear, linear_choice
from onelaunch.ops.linear_choice import (
    EPILOGUE,
    LIBRARY,
    Call,
    calls_over_copies,
    fastest,
    shape_class,
)


def inputs(m: int = 24, n: int = 40, k: int = 32) -> list[torch.Tensor]:
    """x, weight and bias in bf16 on a GPU."""
    numbers = torch.randn(m, k), torch.randn(n, k) / k**0.5, torch.randn(n)
    return [one.to("cuda", torch.bfloat16) for one in numbers]


@pytest.fixture
def no_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is measured yet; times go to the returned folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(linear_choice, "_times_by_device", {})
    monkeypatch.setattr(linear_choice, "_chosen", {})
    return tmp_path / "onelaunch" / "linear"


@pytest.mark.gpu
@pytest.mark.usefixtures("no_times")
@pytest.mark.parametrize("unaligned", ["x", "weight", "bias"])
def test_a_choice_for_aligned_tensors_is_not_taken_for_others(monkeypatch: pytest.MonkeyPatch, unaligned: str) -> None:
    """The copy engine requires multiples of 16 bytes: an implementation chosen for such tensors cannot run on others."""

    def measured(options: list[linear_choice.Implementation], call: linear_choice.Call) -> dict[str, float]:
        return {option.name: float("tma" not in option.name and "cuda" not in option.name) for option in options}

    monkeypatch.setattr(linear_choice, "time_implementations", measured)
    tensors = dict(zip(("x", "weight", "bias"), inputs(8192, 512, 64), strict=True))
    original = tensors[unaligned]
    moved = {**tensors, unaligned: original.new_empty(original.numel() + 1)[1:].view_as(original).copy_(original)}
    with torch.no_grad():
        first, second = (linear(**given, activation="silu") for given in (tensors, moved))
    torch.testing.assert_close(first, second, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.gpu
def test_measured_choice_is_kept_on_disk(no_times: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs()
    first = linear(*tensors, activation="relu")
    (file,) = no_times.iterdir()
    (times,) = MeasuredTimes(file).entries.values()
    assert len(times) > 2
    monkeypatch.setattr(linear_choice, "_times_by_device", {})
    monkeypatch.setattr(linear_choice, "_chosen", {})
    monkeypatch.setattr(linear_choice, "time_implementations", None)  # measuring again would fail
    torch.testing.assert_close(linear(*tensors, activation="relu"), first)


def a_call(x: torch.Tensor, weight: torch.Tensor) -> Call:
    return Call(x, weight, None, x.new_empty(len(x), len(weight)), None, None, None, 0.0, NO_KEY)


def test_candidates_are_timed_on_operands_outside_the_cache() -> None:
    """Enough copies to leave the cache, with the operands' strides; one call if that is enough or for unaligned operands."""
    x, weight = torch.randn(6, 16)[:, :8], torch.randn(5, 8)
    calls = calls_over_copies(a_call(x, weight), cache_bytes=4 * (6 * 8 + 5 * 8) * 4)
    assert len(calls) == 7
    assert len({call.x.data_ptr() for call in calls} | {call.weight.data_ptr() for call in calls}) == 14
    for call in calls:
        assert call.x.equal(x)
        assert call.weight.equal(weight)
        assert (call.x.stride(), call.weight.stride()) == (x.stride(), weight.stride())
    assert len(calls_over_copies(a_call(x, weight), cache_bytes=100)) == 1
    wide = torch.randn(6, 1000)[:, :8]  # copies have the same strides, and so take as much memory
    assert len(calls_over_copies(a_call(wide, weight), cache_bytes=4 * (6 * 8 + 5 * 8) * 4)) == 1
    assert len(calls_over_copies(a_call(x, torch.randn(41)[1:].view(5, 8)), cache_bytes=10**6)) == 1


def test_a_library_is_taken_where_it_is_clearly_faster() -> None:
    times = {LIBRARY.name: 1.3, EPILOGUE.name: 1.0, "ours": 1.01, "slow": 2.0}
    assert fastest(times) == "ours"
    assert fastest({**times, "ours": 1.05}) == EPILOGUE.name
    assert fastest({LIBRARY.name: 1.0, "does not fit": float("inf")}) == LIBRARY.name


def test_candidates_depend_on_the_shape_class_only() -> None:
    """Otherwise two batches of one class would find each other's times incomplete, and measure again for ever."""
    pytest.importorskip("triton")
    for n in (8, 64, 784):
        w = torch.randn(n, 64)
        names = [[one.name for one in linear_choice.candidates(a_call(torch.randn(m, 64), w))] for m in (300, 512)]
        assert names[0] == names[1]


def test_batch_sizes_share_a_choice_up_to_the_next_power_of_two() -> None:
    assert [shape_class(m) for m in (1, 16, 17, 100)] == [16, 16, 32, 128]
