"""The whole program: code for other machines compiles and, where this one can run it, trains; the IR is readable."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.engines.cpu.code.program import Program
from onelaunch.engines.cpu.native import machine_for, object_code
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.target import Target, host, named
from onelaunch.engines.cpu.session import settings_for
from tests.engines.cpu.native_functions import runnable_targets
from tests.engines.cpu.runs import assert_close, data, make, train_natively, train_plainly


def everything(steps: int = 40) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(21, 40), nn.BatchNorm1d(40), nn.GELU(), nn.Dropout(0.3), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 5)
    )  # fmt: skip
    x, y = data("cross_entropy", 61, 21, 5)
    return make(model, x, y, (x, y), steps=steps, batch_size=16, momentum=0.9)


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("target", runnable_targets()[1:], ids=lambda target: target.cpu)
def test_narrower_vectors_compute_the_same(target: Target, partitions: int, cache_folder: Path) -> None:
    run = everything()
    ours = train_natively(run, cache_folder, target=target, partitions=partitions)
    assert_close(ours, train_plainly(run))


def test_uint8_rows_with_and_without_fma(cache_folder: Path) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(8, 32)
    run = make(nn.Sequential(nn.Linear(32, 3)), x, torch.zeros(8, dtype=torch.int64), steps=8, batch_size=8)
    for target in runnable_targets():
        ours = train_natively(run, cache_folder, target=target)
        assert_close(ours, train_plainly(run))


@pytest.mark.parametrize("triple", ["aarch64-unknown-linux-gnu", "arm64-apple-macosx", "x86_64-pc-windows-msvc"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_code_for_other_machines_compiles(triple: str, optimizer: str) -> None:
    target = named(triple)
    model = nn.Sequential(nn.Linear(9, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 3))
    x, y = data("cross_entropy", 16, 9, 3)
    run = make(model, x, y, steps=1, optimizer=optimizer)
    settings = dataclasses.replace(settings_for(run), partitions=2)
    code = object_code(Program(Plan(settings, target)).text, machine_for(target, foreign=True))
    assert len(code) > 10_000


def test_no_call_leaves_the_program() -> None:
    """Neither libm nor memcpy: the object needs no library on any platform."""
    declared = re.findall(r"^declare .*@([\w.]+)\(", Program(Plan(settings_for(everything()), host())).text, re.M)
    assert declared
    assert all(name.startswith("llvm.") for name in declared)


def test_the_ir_of_a_small_network_is_readable() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    x, y = data("cross_entropy", 64, 64, 10)
    text = Program(Plan(settings_for(make(model, x, y, steps=1, batch_size=32)), host())).text
    functions = re.findall(r"^define (?:internal )?void @(\w+)", text, re.M)
    assert functions[0] == "row_order"
    assert "train_alone" in functions
    phases = [name for name in functions if name.startswith("train_") and name[-1].isdigit()]
    assert phases == ["train_forward_1_0", "train_forward_2_loss_0", "train_backward_0_0"]
    assert any(name.startswith("forward_relu_") for name in functions)
    assert any(name.startswith("weight_update_") for name in functions)
    body = text[text.index("@train_alone") :]
    called = re.findall(r"call void @(\w+)\(ptr %arena", body[: body.index("ret void")])
    assert called == ["gather_first_0", *phases]
    # Results are named after their content, not numbered.
    assert re.search(r"%bias_1\.\d+ = getelementptr", text)
    assert not re.search(r"^\s+%\d+ = ", text, re.M)
    assert max(map(len, text.splitlines())) < 700
