"""Captured graphs: as many as the program has, with plain reasons; and code objects of their own."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from onelaunch.capture.dynamo import own_code, plain_break
from onelaunch.errors import first_line
from onelaunch.fuse.captured import capture_graphs, uncompiled_call


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        if x.sum().item() > 0:
            x = x * 2
        print(end="")
        return x.relu() if x.sum() > 0 else x


def test_breaks_have_a_plain_reason_and_a_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        captured = capture_graphs(uncompiled_call(Broken()), (torch.ones(3),), {})
    reasons = [one.break_reason for one in captured]
    assert [reason.split(" (")[0] for reason in reasons] == [
        "a tensor's value is read on the host",
        "the program calls `print`",
        "the program branches on a tensor's value",
        "",
    ]
    assert all("(test_captured.py:" in reason for reason in reasons[:-1])
    assert not caplog.records


def test_a_warning_of_transformers_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", logging.Logger.warning, raising=False)
    log = logging.getLogger("transformers.which_warns_once")

    def function(x: torch.Tensor) -> torch.Tensor:
        log.warning_once("here")  # type: ignore[attr-defined]
        return x + 1

    assert len(capture_graphs(function, (torch.ones(3),), {})) == 1


@pytest.mark.parametrize("name", ["mine", "transformers.which_warns"])
def test_only_warnings_of_transformers_are_left_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger(name)

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        log.warning("here")
        return x * 2

    with caplog.at_level(logging.WARNING):
        capture_graphs(function, (torch.ones(3),), {})
    if name == "mine":
        assert [record.getMessage() for record in caplog.records] == ["here"]
    elif hasattr(torch._dynamo.config, "ignore_logging_functions"):  # PyTorch 2.11 leaves out one method alone
        assert not caplog.records


def test_reasons_in_one_line() -> None:
    assert plain_break("Something new\n  Explanation: long\n") == "Something new"
    assert len(plain_break("x" * 1000)) == 120
    assert plain_break("") == "no reason is given"
    assert first_line(ValueError("\n first \n second")) == "first"


def test_many_models_do_not_share_dynamos_limit() -> None:
    """Each is compiled: with one code object for all, Dynamo stops after 8."""
    for width in range(1, 13):
        assert len(capture_graphs(uncompiled_call(nn.Linear(3, width)), (torch.ones(2, 3),), {})) == 1


def test_own_code_keeps_defaults_and_the_instance() -> None:
    class Counter:
        base = 2

        def add(self, a: int, b: int = 3, *, c: int = 4) -> int:
            return self.base + a + b + c

    one = own_code(Counter().add)
    assert one(1) == 10
    assert one(1, c=0) == 6
    assert own_code(len) is len
    assert own_code(uncompiled_call).__code__ is not uncompiled_call.__code__
