"""Two gloo ranks compute what one process does, and a rank that dies ends the job."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import onelaunch as ol
from onelaunch.engines import choose
from onelaunch.errors import UnsupportedError
from onelaunch.run import distributed
from onelaunch.run.distributed import World
from onelaunch.train.inputs import make_run
from tests import preloaded
from tests.run.distributed_worker import OPTIONS, model_and_data, train

FLAGS = (
    "--data", "digits", "--hidden", "8", "--batch-size", "256", "--schedule", "constant", "--epochs", "1", "--engine", "eager",
)  # fmt: skip


def run_ranks(
    count: int, folder: Path, function: Callable[..., None], *arguments: Any, gpu: bool = False
) -> list[tuple[int | None, str]]:
    """Run `function` in `count` processes, as torchrun would start them; returns the exit code and output of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    outputs = [folder / f"output {port} {rank}" for rank in range(count)]
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    processes = [
        preloaded.start(function, *arguments, output=output, environment=environment, gpu=gpu)
        for environment, output in zip(ranks, outputs, strict=True)
    ]
    return [preloaded.exit_code_and_output(*started) for started in zip(processes, outputs, strict=True)]


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "one GPU for both"])
def test_two_ranks_equal_one_process_also_after_a_resume(tmp_path, gpu):
    for code, output in run_ranks(2, tmp_path, train, tmp_path, "share" if gpu else "", gpu=gpu):
        assert code == 0, output
    got = load_file(tmp_path / "result.safetensors")
    model, x, y = model_and_data("cuda" if gpu else "cpu")
    history = ol.fit(model, x, y, epochs=4, validation=(x, y), **OPTIONS)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(got[name], tensor.cpu(), rtol=0, atol=1e-5)
    torch.testing.assert_close(got["losses"], torch.tensor(history.losses), rtol=1e-5, atol=1e-6)
    expected = [[record["accuracy"], record["validation"]["accuracy"]] for record in history.epochs]
    torch.testing.assert_close(got["accuracies"], torch.tensor(expected))


def test_a_dead_rank_ends_the_job(tmp_path):
    (code, output), (dead_code, _) = run_ranks(2, tmp_path, train, tmp_path, "die")
    assert dead_code == 17
    assert code == 2, output
    (line,) = [line for line in output.splitlines() if "LostRankError: another process of this job died" in line]
    assert ".cc:" not in line  # a line of gloo's source does not help the user


def test_a_callback_that_changes_the_model_of_one_rank_is_refused(tmp_path):
    (code, output), (other_code, _) = run_ranks(2, tmp_path, train, tmp_path, "freeze")
    assert code == other_code == 2, output
    assert "a callback changed requires_grad of 0.weight in one of 2 processes that train together: " in output


def assert_one_rank_prints(ranks: list[tuple[int | None, str]]) -> None:
    (code, output), follower = ranks
    assert code == 0, output
    assert "engine   eager" in output
    assert follower == (0, "")


def test_with_the_command_line_one_rank_writes_and_prints(tmp_path):
    out = tmp_path / "run"
    assert_one_rank_prints(run_ranks(2, tmp_path, preloaded.onelaunch, "train", *FLAGS, "--out", str(out)))
    assert (out / "model.safetensors").exists()


def test_two_ranks_resume_a_run_that_one_process_began(tmp_path):
    out = tmp_path / "run"
    ((code, output),) = run_ranks(1, tmp_path, preloaded.onelaunch, "train", *FLAGS, "--out", str(out))
    assert code == 0, output
    assert "several" not in output
    resume = ("train", "--resume", str(out), "--epochs", "2")
    assert_one_rank_prints(run_ranks(2, tmp_path, preloaded.onelaunch, *resume))


def test_parts_of_a_batch():
    for rows in (0, 1, 5, 16):
        parts = [World(rank, 3).part(rows) for rank in range(3)]
        assert [row for part in parts for row in range(rows)[part]] == list(range(rows))


def test_other_engines_refuse_several_processes(monkeypatch):
    monkeypatch.setattr(distributed, "world", lambda: World(0, 2))
    monkeypatch.setattr("onelaunch.engines.world", lambda: World(0, 2))
    model, x, y = model_and_data()
    with pytest.raises(UnsupportedError, match=r"engine='cpu' cannot run this: several processes train together"):
        ol.fit(model, x, y, epochs=1, engine="cpu", progress=False)


def test_slower_processes_on_cpus_are_refused(monkeypatch):
    """One process with the CPU engine is faster; a model that only the eager engine takes trains in several."""
    monkeypatch.setattr("onelaunch.engines.world", lambda: World(0, 2))
    model, x, y = model_and_data()
    with pytest.raises(UnsupportedError, match=r"2 processes on CPUs .* pass engine='eager'"):
        choose(make_run(model, x, y, None, {"epochs": 1, "batch_size": 4}))
    softshrink = torch.nn.Sequential(model, torch.nn.Softshrink())
    assert choose(make_run(softshrink, x, y, None, {"epochs": 1, "batch_size": 4}))[0].name == "eager"
