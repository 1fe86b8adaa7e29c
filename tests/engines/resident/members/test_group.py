"""Which runs can be trained by the same code."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from onelaunch.engines.resident import ENGINE
from onelaunch.engines.resident.members.group import members_settings
from onelaunch.engines.resident.members.memory import all_uint8
from onelaunch.engines.resident.plan.stages import dropouts_of
from onelaunch.errors import UnsupportedError
from onelaunch.train.inputs import make_run


def run_of(p: float = 0.1, width: int = 8, *, model: nn.Module | None = None, x: torch.Tensor | None = None, **options):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Dropout(p), nn.Linear(width, 3))
    x = torch.randn(40, 5) if x is None else x
    options = {"epochs": 1, "batch_size": 8, "optimizer": "sgd", "lr": 0.1, **options}
    return make_run(model, x, torch.randint(3, (len(x),)), None, options)


def test_options_of_any_member_are_in_the_code():
    runs = [run_of(0.0), run_of(0.3, momentum=0.9), run_of(weight_decay=0.1), run_of(label_smoothing=0.1, lr=0.5)]
    settings = members_settings(runs, uint8_rows=False)
    assert settings.members
    assert settings.momentum
    assert settings.weight_decay
    assert settings.label_smoothing
    assert all(part.p > 0 for part in dropouts_of(settings.stages))


def test_class_weights_may_differ():
    runs = [run_of(class_weight=weight) for weight in (None, "balanced", {0: 3.0})]
    assert ENGINE.members_unsupported_reason(runs) == ""
    assert members_settings(runs, uint8_rows=False).weighted
    assert not members_settings(runs[:1], uint8_rows=False).weighted


def test_a_dropout_that_nobody_uses_is_left_out():
    settings = members_settings([run_of(0.0), run_of(0.0)], uint8_rows=False)
    assert all(part.p == 0 for part in dropouts_of(settings.stages))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"optimizer": "adam"}, "differ in optimizer"),
        ({"schedule": "cosine"}, "differ in schedule"),
        ({"precision": "bf16"}, "differ in precision"),
        ({"batch_size": 16}, "differ in their batch size"),
        ({"width": 16}, "differ in their network"),
    ],
)
def test_differences_are_named(other, reason):
    assert reason in ENGINE.members_unsupported_reason([run_of(), run_of(**other)])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"clip_norm": 1.0}, "clip_norm"),
        ({"model": nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))}, "BatchNorm1d"),
        ({"model": nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3))}, "LayerNorm"),
        ({"model": nn.Sequential(nn.Linear(5, 9000), nn.ReLU(), nn.Linear(9000, 3))}, "does not fit on the chip"),
        ({"model": nn.Sequential(nn.Linear(5, 8), *[nn.Dropout(0.1)] * 17, nn.Linear(8, 3))}, "17 dropout layers"),
    ],
)
def test_what_members_cannot_do_is_refused(options, reason):
    assert reason in ENGINE.members_unsupported_reason([run_of(**options)])


def test_members_with_and_without_validation_rows_are_refused():
    """The code fetches validation rows at the end of every epoch, so all members must have some."""
    run = run_of()
    held = dataclasses.replace(run, validation=(run.x[:9], run.y[:9]))
    assert "some have none" in ENGINE.members_unsupported_reason([run, held])
    assert ENGINE.members_unsupported_reason([held, held]) == ""


def test_a_plain_network_is_taken():
    runs = [run_of(0.1 * i, seed=i, lr=0.1 * (i + 1)) for i in range(3)]
    assert ENGINE.members_unsupported_reason(runs) == ""
    assert ENGINE.members_plan(runs).startswith("3 members, 3 at once: one block for each; predicted")


def test_the_plan_of_members_that_differ_is_refused():
    with pytest.raises(UnsupportedError, match="differ in optimizer"):
        ENGINE.members_plan([run_of(), run_of(optimizer="adam")])


def test_rows_are_uint8_only_if_all_are():
    whole = torch.randint(256, (40, 5)).float() / 255
    assert all_uint8([run_of(x=whole), run_of(x=(whole * 255).round().to(torch.uint8))])
    assert not all_uint8([run_of(x=whole), run_of()])
