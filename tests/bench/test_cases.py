"""The real cases: their checks can fail, and without a GPU its cases are skipped."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from onelaunch.bench import model_zoo
from onelaunch.bench.cases import models
from onelaunch.bench.cases.train import CHECKED_STEPS, check_losses
from onelaunch.bench.ceilings import Ceilings
from onelaunch.bench.peers_torch import reference_losses
from onelaunch.bench.run import failures, run_case, select
from onelaunch.cli.app import make_app
from onelaunch.code_cache import CodeCache
from onelaunch.engines.cpu import session
from onelaunch.errors import UnsupportedError
from tests.bench.workloads import CPU, WORKLOADS

# PyTorch's own warning, when torch.compile is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.mark.usefixtures("one_thread")
def test_the_check_of_the_training_cases_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    run = WORKLOADS[0].run(CPU, rows=8 * CHECKED_STEPS, epochs=1)
    check_losses(run)
    wrong = replace(run, spec=replace(run.spec, lr=run.spec.lr * 1.001))
    monkeypatch.setattr("onelaunch.bench.cases.train.reference_losses", lambda _, steps: reference_losses(wrong, steps))
    with pytest.raises(AssertionError, match=r"losses differ from float64 by .* more than 1e-05"):
        check_losses(run)


@pytest.mark.usefixtures("one_thread")
def test_an_engine_that_trains_wrongly_has_no_times(monkeypatch):
    """The real check of a real case, while the native code trains with a learning rate that is 10 % too large."""
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


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # its temporary folder
def test_the_cached_start_fails_with_a_cache_that_keeps_nothing(monkeypatch):
    monkeypatch.setattr(CodeCache, "store", lambda *arguments: None)
    (chosen,) = select("cpu", "start/cached")
    check = run_case(chosen, quick=True, ceilings=Ceilings())["check"]
    gc.collect()
    assert check.startswith("failed: AssertionError: no code was kept")


def test_the_check_of_the_models_can_fail(monkeypatch):
    """On a CPU and uncompiled: the same steps agree, and a rate that is twice as large does not."""
    monkeypatch.setattr(model_zoo, "DEVICE", "cpu")
    monkeypatch.setattr(models, "our_step", models.torch_step)
    models.check_losses(model_zoo.dqn)

    def wrong(workload: model_zoo.Workload, optimizer: torch.optim.Optimizer) -> models.Step:
        optimizer.param_groups[0]["lr"] *= 2
        return models.torch_step(workload, optimizer)

    monkeypatch.setattr(models, "our_step", wrong)
    with pytest.raises(AssertionError, match="losses differ"):
        models.check_losses(model_zoo.dqn)


def test_a_model_of_a_missing_library_is_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(UnsupportedError, match=r"torchvision.models is not installed"):
        model_zoo.vit(True)


def test_large_networks_are_registered():
    names = [one.name for one in select("train") if one.name.startswith("train/large/")]
    assert names == [
        "train/large/784-2048-2048-2048-10/32", "train/large/784-1024-1024-1024-10/4096",
        "train/large/64-64-64-16/262144", "train/large/784-8192-8192-8192-10/32",
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases would run")
@pytest.mark.parametrize(("what", "count"), [(["train", "--large"], 4), (["memory"], 2), (["models"], 22)])
def test_gpu_cases_are_skipped_without_a_gpu(what, count, tmp_path):
    result = CliRunner().invoke(make_app(), ["bench", *what, "--quick", "--out", str(tmp_path / "results.json")])
    assert result.exit_code == 0, result.output
    assert f"{count} cases skipped: this machine has no CUDA device" in result.output
