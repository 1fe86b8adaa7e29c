"""Running cases: a failed check has no times, a peer that fails stops nothing, and interruptions lose no results."""

from __future__ import annotations

import itertools
import json
import math
import signal
import time
from contextlib import suppress

import numpy as np
import pytest
import torch

from onelaunch.bench.case import REGISTRY, Case, Trial, case
from onelaunch.bench.ceilings import Ceilings
from onelaunch.bench.measure import measure
from onelaunch.bench.run import failures, run_case, run_cases, select
from onelaunch.errors import OnelaunchError, UnsupportedError
from onelaunch.report.remarks import not_run


def nothing() -> None:
    pass


def run_one(trial: Trial, name: str = "train/test", **options) -> dict:
    case(name, "train", "a test")(lambda: trial)
    return run_case(REGISTRY[name], quick=True, ceilings=Ceilings(), **options)


@pytest.mark.usefixtures("temporary_cases")
def test_a_peer_that_raises_late_is_absent():
    calls = itertools.count()

    def tires() -> None:
        if next(calls) == 3:
            raise MemoryError("no more\nroom")

    result = run_one(Trial(ours=nothing, check=nothing, peers={"tires": tires, "steady": nothing}))
    assert set(result["times"]) == {"onelaunch", "steady"}
    assert result["absent"] == {"tires": "MemoryError: no more"}
    assert set(result["ratio"]) == {"steady"}


@pytest.mark.parametrize("quick", [False, True])
def test_every_fold_is_taken_however_long_it_lasts(quick, monkeypatch):
    given: dict[str, float] = {}

    def noted(contenders, **options):
        given.update(options)
        return measure(contenders, **options)

    monkeypatch.setattr("onelaunch.bench.run.measure", noted)
    trial = Trial(lambda: 1e-3, nothing, self_timed=True, repeats=2, errors={"onelaunch": []})
    run_case(Case("tabular/x", "tabular", "about", lambda: trial), quick=quick, ceilings=Ceilings())
    assert (given["seconds"] == math.inf) is not quick


@pytest.mark.usefixtures("temporary_cases")
def test_slow_peers_run_without_quick_and_peaks_that_are_known_are_kept(monkeypatch):
    monkeypatch.setattr(
        "onelaunch.bench.run.measure", lambda contenders, **options: measure(contenders, **options | {"repeats": 2})
    )
    works = {"peer": lambda: 1e-3, "slow": lambda: 2e-3}
    trial = Trial(
        lambda: 1e-3, nothing, {"peer": works["peer"]}, slow_peers={"slow": works["slow"]}, self_timed=True,
        peak_bytes={"onelaunch": 5},
    )  # fmt: skip
    quick = run_one(trial)
    assert set(quick["times"]) == {"onelaunch", "peer"}
    assert quick["absent"] == {"slow": "left out by --quick: long to compile"}
    assert quick["peak_bytes"] == {"onelaunch": 5}
    whole = run_case(REGISTRY["train/test"], quick=False, ceilings=Ceilings())
    assert set(whole["times"]) == {"onelaunch", "peer", "slow"}
    assert whole["absent"] == {}


@pytest.mark.usefixtures("temporary_cases")
def test_system_exit_of_a_peer_makes_it_absent():
    def leaves() -> None:
        raise SystemExit("bye")

    result = run_one(Trial(ours=nothing, check=nothing, peers={"leaves": leaves, "steady": nothing}))
    assert set(result["times"]) == {"onelaunch", "steady"}
    assert result["absent"] == {"leaves": "SystemExit: bye"}
    red = run_one(Trial(ours=nothing, check=leaves), "train/red")
    assert red["check"] == "failed: SystemExit: bye"


@pytest.mark.usefixtures("temporary_cases")
def test_our_failure_while_timed_fails_the_case():
    calls = itertools.count()

    def breaks() -> None:
        if next(calls) == 4:
            raise RuntimeError("illegal address")

    result = run_one(Trial(ours=breaks, check=nothing, peers={"steady": nothing}))
    assert result["check"] == "failed: RuntimeError: illegal address"
    assert result["times"] == {}


@pytest.mark.usefixtures("temporary_cases")
def test_ctrl_c_keeps_finished_cases():
    def interrupted() -> Trial:
        raise KeyboardInterrupt

    case("train/done", "train", "finished")(lambda: Trial(ours=nothing, check=nothing))
    case("train/stopped", "train", "interrupted")(interrupted)
    case("train/never", "train", "not reached")(lambda: pytest.fail("started after Ctrl-C"))
    saved: list[str] = []
    results = run_cases(
        [REGISTRY[f"train/{name}"] for name in ("done", "stopped", "never")], quick=True, show=lambda result: None,
        save=lambda results: saved.append(json.dumps(results)),
    )  # fmt: skip
    assert results["interrupted"]
    assert [one["name"] for one in results["cases"]] == ["train/done"]
    assert [one["name"] for one in json.loads(saved[0])["cases"]] == ["train/done"]  # saved before the next case began
    assert json.loads(saved[-1])["interrupted"]
    assert not_run(results) == ["train/stopped", "train/never"]


@pytest.mark.usefixtures("temporary_cases")
def test_results_are_unfinished_until_the_last_case():
    names = ("train/one", "train/two")
    for name in names:
        case(name, "train", "a test")(lambda: Trial(ours=nothing, check=nothing))
    saved: list[dict] = []
    done = run_cases(
        [REGISTRY[name] for name in names], quick=True, show=lambda result: None,
        save=lambda results: saved.append(json.loads(json.dumps(results))),
    )  # fmt: skip
    assert [results["finished"] for results in saved] == [False, False, True]
    assert not_run(saved[0]) == ["train/two"]
    assert not_run(done) == []


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_an_invalid_limit_is_refused(limit):
    with pytest.raises(OnelaunchError, match=f"limit={limit:g} must be 0 or more"):
        run_cases([], quick=True, show=lambda result: None, limit=limit)


@pytest.mark.usefixtures("temporary_cases")
def test_no_case_is_started_past_the_limit(monkeypatch):
    monkeypatch.setattr(
        "onelaunch.bench.run.measure", lambda works, **options: measure(works, **options | {"repeats": 2})
    )
    case("train/first", "train", "one")(lambda: Trial(ours=nothing, check=lambda: time.sleep(0.3)))
    case("train/second", "train", "two")(lambda: pytest.fail("started past the limit"))
    chosen = [REGISTRY["train/first"], REGISTRY["train/second"]]
    results = run_cases(chosen, quick=False, show=lambda result: None, limit=0.25)
    assert [one["name"] for one in results["cases"]] == ["train/first"]
    assert results["left_out"] == ["train/second"]


class Disposed:
    """Like a compiled program, whose destructor runs other code: Ctrl-C may arrive there."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("temporary_cases")
def test_ctrl_c_in_a_destructor_is_not_lost():
    case("train/disposed", "train", "one")(lambda: Trial(ours=Disposed, check=nothing))
    case("train/after", "train", "two")(lambda: pytest.fail("started after Ctrl-C"))
    before = signal.getsignal(signal.SIGINT)
    results = run_cases([REGISTRY["train/disposed"], REGISTRY["train/after"]], quick=True, show=lambda result: None)
    assert results["cases"] == []  # what was cut short has no time
    assert results["interrupted"]
    assert not results["finished"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("temporary_cases")
def test_ctrl_c_that_a_peer_swallows_is_not_lost():
    """As scikit-learn does: it warns and returns what it has."""
    calls: list[int] = []

    def swallows() -> None:
        calls.append(len(calls))
        with suppress(KeyboardInterrupt):
            if len(calls) == 3:
                signal.raise_signal(signal.SIGINT)

    case("train/swallowed", "train", "one")(lambda: Trial(ours=nothing, check=nothing, peers={"peer": swallows}))
    results = run_cases([REGISTRY["train/swallowed"]], quick=True, show=lambda result: None)
    assert results["interrupted"]
    assert results["cases"] == []


@pytest.mark.usefixtures("temporary_cases")
def test_a_case_that_the_machine_cannot_run_is_skipped():
    def needs_gpu() -> Trial:
        raise UnsupportedError("needs a CUDA device")

    case("train/gpu-only", "train", "for GPUs")(needs_gpu)
    result = run_case(REGISTRY["train/gpu-only"], quick=True, ceilings=Ceilings())
    assert result["check"] == "skipped: needs a CUDA device"
    assert failures({"cases": [result]}) == []


@pytest.mark.usefixtures("temporary_cases", "one_thread")
def test_a_floor_in_bytes_uses_the_measured_copy_rate():
    source, target = torch.rand(2**16), torch.empty(2**16)
    moved = 2 * 4 * source.numel()
    ceilings = Ceilings()
    case("train/copy", "train", "a copy")(
        lambda: Trial(ours=lambda: target.copy_(source), check=nothing, floor_bytes=moved, units=2)
    )
    result = run_case(REGISTRY["train/copy"], quick=True, ceilings=ceilings)
    bandwidth = ceilings.measured["cpu"]["copy"]
    assert result["floor_seconds"] == pytest.approx(moved / 2 / bandwidth)
    assert result["floor_share"] == pytest.approx(result["floor_seconds"] / result["times"]["onelaunch"]["median"])
    assert result["work"] == {"bytes": moved / 2}


@pytest.mark.usefixtures("temporary_cases")
def test_a_contender_called_floor_is_the_floor(clock):
    peers = {"floor: half": lambda: clock.sleep(0.004), "peer": lambda: clock.sleep(0.016)}
    result = run_one(Trial(ours=lambda: clock.sleep(0.008), check=nothing, peers=peers))
    assert result["floor_share"] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_two_quick_runs_agree_within_their_spreads(seed):
    """For work whose time varies by a tenth, and drifts."""
    random = np.random.default_rng(seed)

    def noisy() -> float:
        return float(1e-3 * math.exp(random.normal(0, 0.1)) * (1 + 0.05 * random.random()))

    one = Case("train/noisy", "train", "noisy", lambda: Trial(ours=noisy, check=nothing, self_timed=True))
    first, second = (run_case(one, quick=True, ceilings=Ceilings())["times"]["onelaunch"] for _ in range(2))
    ratio = max(first["median"], second["median"]) / min(first["median"], second["median"])
    assert ratio <= (1 + first["spread"]) * (1 + second["spread"])
    assert first["spread"] < 0.5


def test_unknown_groups_and_filters_suggest_existing_ones():
    with pytest.raises(OnelaunchError, match="did you mean 'train'"):
        select(["trian"])
    with pytest.raises(OnelaunchError, match="cpu/64-32-10"):
        select("cpu", "nothing like it")
    with pytest.raises(OnelaunchError, match=r"filter='adan' .*adam.* and \d+ more$") as caught:
        select("all", "adan")
    assert len(str(caught.value)) < 400
    groups = {one.group for one in select(["cpu", "ops"])}
    assert groups == {"cpu", "ops"}


@pytest.mark.usefixtures("temporary_cases")
def test_a_case_is_shown_even_if_it_cannot_be_saved():
    def full(found: dict) -> None:
        raise OnelaunchError("no space left")

    case("train/one", "train", "a test")(lambda: Trial(ours=nothing, check=nothing))
    shown: list[dict] = []
    with pytest.raises(OnelaunchError, match="no space left"):
        run_cases([REGISTRY["train/one"]], quick=True, show=shown.append, save=full)
    assert [found["check"] for found in shown] == ["passed"]


@pytest.mark.usefixtures("temporary_cases")
def test_results_are_interrupted_when_the_reader_closes_the_pipe():
    def closed(found: dict) -> None:
        raise SystemExit(1)  # as rich raises it on a broken pipe

    case("train/one", "train", "a test")(lambda: Trial(ours=nothing, check=nothing))
    saved: list[str] = []
    with pytest.raises(SystemExit):
        run_cases([REGISTRY["train/one"]], quick=True, show=closed, save=lambda found: saved.append(json.dumps(found)))
    last = json.loads(saved[-1])
    assert (last["interrupted"], last["finished"], len(last["cases"])) == (True, False, 1)


@pytest.mark.usefixtures("temporary_cases")
def test_ctrl_c_in_the_first_case_saves_nothing():
    def stop() -> None:
        raise KeyboardInterrupt

    case("train/one", "train", "a test")(lambda: Trial(ours=nothing, check=stop))
    saved: list[dict] = []
    found = run_cases([REGISTRY["train/one"]], quick=True, show=lambda found: None, save=saved.append)
    assert (found["interrupted"], saved) == (True, [])
