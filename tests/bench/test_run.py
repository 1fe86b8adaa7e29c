"""What must hold of a benchmark: no time for what is wrong, no stop for a peer that fails, nothing lost on the way."""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import json
import math
import shutil
import signal
import subprocess
import time
from contextlib import suppress

import numpy as np
import pytest
import torch

from onelaunch.bench import results
from onelaunch.bench.case import REGISTRY, Case, Trial, case
from onelaunch.bench.ceilings import Ceilings
from onelaunch.bench.measure import reason_in_a_line
from onelaunch.bench.peers_torch import worst_relative
from onelaunch.bench.run import failures, run_case, run_cases, select
from onelaunch.code_cache import CodeCache
from onelaunch.engines.cpu import session
from onelaunch.errors import OnelaunchError, UnsupportedError
from onelaunch.report.remarks import not_run

# PyTorch's own, when torch.compile is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def nothing() -> None:
    pass


def run_one(trial: Trial, name: str = "train/test", **options) -> dict:
    case(name, "train", "a test")(lambda: trial)
    return run_case(REGISTRY[name], quick=True, ceilings=Ceilings(), **options)


@pytest.mark.usefixtures("one_thread")
def test_a_broken_fast_path_has_no_time(monkeypatch):
    """The real check of a real case, while the native code trains with a learning rate that is off by a tenth."""
    scalars = session.step_scalars

    def wrong(*arguments: object) -> dict[str, np.ndarray]:
        made = scalars(*arguments)
        return {**made, "rate": made["rate"] * 1.1}

    (chosen,) = select("cpu", "64-32-10/32/sgd")
    monkeypatch.setattr(session, "step_scalars", wrong)
    result = run_case(chosen, quick=True, ceilings=Ceilings())
    assert result["check"].startswith("failed: AssertionError"), result["check"]
    assert result["times"] == {}
    assert failures({"cases": [result]}) == [chosen.name]


@pytest.mark.usefixtures("temporary_cases")
def test_a_peer_that_raises_late_is_named_and_stops_nobody():
    calls = itertools.count()

    def tires() -> None:
        if next(calls) == 3:
            raise MemoryError("no more\nroom")

    result = run_one(Trial(ours=nothing, check=nothing, peers={"tires": tires, "steady": nothing}))
    assert set(result["times"]) == {"onelaunch", "steady"}
    assert result["absent"] == {"tires": "MemoryError: no more"}
    assert set(result["ratio"]) == {"steady"}


@pytest.mark.usefixtures("temporary_cases")
def test_what_ends_the_program_stops_nobody():
    def leaves() -> None:
        raise SystemExit("bye")

    result = run_one(Trial(ours=nothing, check=nothing, peers={"leaves": leaves, "steady": nothing}))
    assert set(result["times"]) == {"onelaunch", "steady"}
    assert result["absent"] == {"leaves": "SystemExit: bye"}
    red = run_one(Trial(ours=nothing, check=leaves), "train/red")
    assert red["check"] == "failed: SystemExit: bye"


@pytest.mark.usefixtures("temporary_cases")
def test_our_own_failure_while_it_is_timed_is_a_failed_case():
    calls = itertools.count()

    def breaks() -> None:
        if next(calls) == 4:
            raise RuntimeError("illegal address")

    result = run_one(Trial(ours=breaks, check=nothing, peers={"steady": nothing}))
    assert result["check"] == "failed: RuntimeError: illegal address"
    assert result["times"] == {}


@pytest.mark.usefixtures("temporary_cases")
def test_ctrl_c_keeps_what_is_done():
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
def test_results_are_unfinished_until_the_end():
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


@pytest.mark.usefixtures("temporary_cases")
@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_limit_that_is_no_time_is_refused(limit):
    with pytest.raises(OnelaunchError, match=f"limit={limit:g} must be 0 or more"):
        run_cases([], quick=True, show=lambda result: None, limit=limit)


def test_past_the_limit_no_case_is_started_and_those_left_out_are_named():
    case("train/first", "train", "one")(lambda: Trial(ours=nothing, check=lambda: time.sleep(0.05)))
    case("train/second", "train", "two")(lambda: pytest.fail("started past the limit"))
    chosen = [REGISTRY["train/first"], REGISTRY["train/second"]]
    results = run_cases(chosen, quick=True, show=lambda result: None, limit=0.01)
    assert [one["name"] for one in results["cases"]] == ["train/first"]
    assert results["left_out"] == ["train/second"]


class Disposed:
    """As a compiled program is: somebody else's code runs when it goes, and Ctrl-C may strike there."""

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
    """As scikit-learn does: it warns, and returns what it has."""
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
def test_what_the_machine_lacks_is_skipped():
    def needs_gpu() -> Trial:
        raise UnsupportedError("needs a CUDA device")

    case("train/gpu-only", "train", "for GPUs")(needs_gpu)
    result = run_case(REGISTRY["train/gpu-only"], quick=True, ceilings=Ceilings())
    assert result["check"] == "skipped: needs a CUDA device"
    assert failures({"cases": [result]}) == []


@pytest.mark.usefixtures("temporary_cases", "one_thread")
def test_a_floor_in_bytes_is_set_against_the_measured_copy():
    source, target = torch.rand(2**22), torch.empty(2**22)
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


def test_the_longer_of_two_floors_counts():
    ceilings = Ceilings()
    ceilings.measured["cpu"] = {"copy": 100.0, "fp32": 1000.0}
    assert ceilings.seconds("cpu", 50, 100, "fp32") == 0.5
    assert ceilings.seconds("cpu", 50, 1000, "fp32") == 1.0
    assert ceilings.seconds("cpu", None, None, "fp32") is None


@pytest.mark.usefixtures("temporary_cases")
def test_a_contender_called_floor_is_the_floor(clock):
    peers = {"floor: half": lambda: clock.sleep(0.004), "peer": lambda: clock.sleep(0.016)}
    result = run_one(Trial(ours=lambda: clock.sleep(0.008), check=nothing, peers=peers))
    assert result["floor_share"] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_two_quick_runs_agree_within_their_spreads(seed):
    """The spread that a run states is enough for the next one: here of work whose time varies by a tenth, and drifts."""
    random = np.random.default_rng(seed)

    def noisy() -> float:
        return float(1e-3 * math.exp(random.normal(0, 0.1)) * (1 + 0.05 * random.random()))

    one = Case("train/noisy", "train", "noisy", lambda: Trial(ours=noisy, check=nothing, self_timed=True))
    first, second = (run_case(one, quick=True, ceilings=Ceilings())["times"]["onelaunch"] for _ in range(2))
    ratio = max(first["median"], second["median"]) / min(first["median"], second["median"])
    assert ratio <= (1 + first["spread"]) * (1 + second["spread"])
    assert first["spread"] < 0.5


def test_unknown_groups_and_filters_name_what_there_is():
    with pytest.raises(OnelaunchError, match="did you mean 'train'"):
        select(["trian"])
    with pytest.raises(OnelaunchError, match="cpu/64-32-10"):
        select("cpu", "nothing like it")
    with pytest.raises(OnelaunchError, match=r"filter='adan' .*adam.* and \d+ more$") as caught:
        select("all", "adan")
    assert len(str(caught.value)) < 400
    groups = {one.group for one in select(["cpu", "ops"])}
    assert groups == {"cpu", "ops"}


def test_the_source_has_the_name_git_gives_it(tmp_path):
    for name in ("b.py", "a/c.cuh", "a/deep/d.py", "a.py", "é.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"of {name}\n", encoding="utf-8")

    def git(*command: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")
        done = subprocess.run(("git", "-C", tmp_path, *identity, *command), capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    expected = git("write-tree")
    shutil.rmtree(tmp_path / ".git")
    (tmp_path / "__pycache__").mkdir()
    assert results.tree_of(tmp_path) == expected


def test_the_versions_of_peers_are_recorded():
    found = results.provenance("")["machine"]["versions"]
    assert found["scikit-learn"] == importlib.metadata.version("scikit-learn")
    assert found["torch"]


def test_results_without_git_have_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert results.commit() == ""


@pytest.mark.usefixtures("temporary_cases")
def test_on_a_full_disk_a_case_is_at_least_shown():
    def full(found: dict) -> None:
        raise OnelaunchError("no space left")

    case("train/one", "train", "a test")(lambda: Trial(ours=nothing, check=nothing))
    shown: list[dict] = []
    with pytest.raises(OnelaunchError, match="no space left"):
        run_cases([REGISTRY["train/one"]], quick=True, show=shown.append, save=full)
    assert [found["check"] for found in shown] == ["passed"]


@pytest.mark.usefixtures("temporary_cases")
def test_where_nobody_reads_on_the_results_say_that_they_are_interrupted():
    def closed(found: dict) -> None:
        raise SystemExit(1)  # as rich does on a broken pipe

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


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # its folder
def test_a_start_from_a_cache_that_keeps_nothing_fails(monkeypatch):
    monkeypatch.setattr(CodeCache, "store", lambda *arguments: None)
    (chosen,) = select("cpu", "start/cached")
    check = run_case(chosen, quick=True, ceilings=Ceilings())["check"]
    gc.collect()
    assert check.startswith("failed: AssertionError: no code was kept")


def test_a_reason_that_is_announced_is_told():
    assert (
        reason_in_a_line(RuntimeError("backend raised:\n\n  no compiler\nmore"))
        == "RuntimeError: backend raised: no compiler"
    )
    assert reason_in_a_line(ValueError("one\ntwo")) == "ValueError: one"


def test_missing_losses_are_not_equal_to_all():
    assert worst_relative([1.0], torch.ones(50, dtype=torch.float64)) == math.inf
    assert worst_relative([1.0, 1.0], torch.ones(2, dtype=torch.float64)) == 0


def test_a_name_that_leaves_no_room_for_a_temporary_one_is_refused_at_once(tmp_path):
    with pytest.raises(OnelaunchError, match="cannot be written: File name too long"):
        results.check_writable(tmp_path / f"{'y' * 240}.json")
    results.check_writable(tmp_path / "short.json")
    assert not list(tmp_path.iterdir())
