"""Two gloo ranks train as one process does; a rank that dies ends the job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import onelaunch as ol
from onelaunch.errors import UnsupportedError
from onelaunch.run import distributed
from onelaunch.run.distributed import World
from tests.run.distributed_worker import OPTIONS, model_and_data

WORKER = Path(__file__).with_name("distributed_worker.py")


def start_ranks(count: int, *arguments: str | Path, gpu: bool = False) -> list[subprocess.Popen[str]]:
    """So many times `python arguments…`, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join(path for path in sys.path if path)
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    shared |= {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "0" if gpu else ""}
    return [
        subprocess.Popen(
            [sys.executable, *arguments], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip


def outcome(rank: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    try:
        said = rank.communicate(timeout=seconds)[0]
    finally:
        rank.kill()
    return rank.returncode, said


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "one GPU for both"])
def test_two_ranks_are_one_process_also_after_a_resume(tmp_path, gpu):
    for rank in start_ranks(2, WORKER, tmp_path, *(["share"] if gpu else []), gpu=gpu):
        code, said = outcome(rank)
        assert code == 0, said
    got = load_file(tmp_path / "result.safetensors")
    model, x, y = model_and_data("cuda" if gpu else "cpu")
    history = ol.fit(model, x, y, epochs=4, validation=(x, y), engine="eager", **OPTIONS)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(got[name], tensor.cpu(), rtol=0, atol=1e-5)
    torch.testing.assert_close(got["losses"], torch.tensor(history.losses), rtol=1e-5, atol=1e-6)
    expected = [[record["accuracy"], record["validation"]["accuracy"]] for record in history.epochs]
    torch.testing.assert_close(got["accuracies"], torch.tensor(expected))


def test_a_dead_rank_ends_the_job(tmp_path):
    survivor, dead = start_ranks(2, WORKER, tmp_path, "die")
    assert outcome(dead)[0] == 17
    code, said = outcome(survivor, 60)
    assert code == 2, said
    (line,) = [line for line in said.splitlines() if "LostRankError: another process of this job died" in line]
    assert ".cc:" not in line  # a line of gloo's source is of no help


def test_the_command_line(tmp_path):
    """One rank writes and speaks."""
    out = tmp_path / "run"
    flags = ("--data", "digits", "--hidden", "8", "--epochs", "1", "--out", str(out))
    leader, follower = start_ranks(2, "-m", "onelaunch", "train", *flags)
    code, said = outcome(leader)
    assert code == 0, said
    assert "several processes train together" in said
    assert (out / "model.safetensors").exists()
    code, said = outcome(follower)
    assert (code, said) == (0, "")


def test_a_run_that_one_process_began_goes_on_with_both(tmp_path):
    out = tmp_path / "run"
    flags = ("--data", "digits", "--hidden", "8", "--schedule", "constant", "--epochs", "1", "--out", str(out))
    (alone,) = start_ranks(1, "-m", "onelaunch", "train", *flags)
    code, said = outcome(alone)
    assert code == 0, said
    assert "several" not in said
    leader, follower = start_ranks(2, "-m", "onelaunch", "train", "--resume", str(out), "--epochs", "2")
    code, said = outcome(leader)
    assert code == 0, said
    assert "several processes train together" in said
    assert outcome(follower) == (0, "")


def test_parts_of_a_batch():
    for rows in (0, 1, 5, 16):
        parts = [World(rank, 3).part(rows) for rank in range(3)]
        assert [row for part in parts for row in range(rows)[part]] == list(range(rows))


def test_other_engines_say_that_they_run_alone(monkeypatch):
    monkeypatch.setattr(distributed, "world", lambda: World(0, 2))
    monkeypatch.setattr("onelaunch.engines.world", lambda: World(0, 2))
    model, x, y = model_and_data()
    with pytest.raises(UnsupportedError, match=r"engine='cpu' cannot run this: several processes train together"):
        ol.fit(model, x, y, epochs=1, engine="cpu", progress=False)
