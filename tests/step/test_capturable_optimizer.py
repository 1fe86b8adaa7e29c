"""Optimizers made ready for a recording: their forms, rates and settings. The device is the CPU here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onelaunch.step.capturable_optimizer import CapturableOptimizer

CPU = torch.device("cpu")


def made(kind: type[torch.optim.Optimizer], **options: object) -> CapturableOptimizer:
    return CapturableOptimizer(kind(nn.Linear(3, 3).parameters(), **options), CPU)


def test_what_cannot_be_recorded() -> None:
    assert made(torch.optim.Adagrad).unsupported_reason() == "Adagrad has no capturable form"  # fused on a CPU only
    assert made(torch.optim.LBFGS).unsupported_reason() == "LBFGS decides on the host"
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam):
        assert made(kind, lr=0.1).unsupported_reason() == ""

    class Own(torch.optim.Optimizer):
        pass

    assert made(Own, defaults={"lr": 0.1}).unsupported_reason() == "Own has no capturable form"


def test_the_fused_form_unless_another_is_asked_for() -> None:
    one, other = made(torch.optim.Adam), made(torch.optim.Adam, foreach=True)
    for capturable in (one, other):
        capturable.prepare()
        assert capturable.optimizer.param_groups[0]["capturable"]
    assert one.optimizer.param_groups[0]["fused"]
    assert not other.optimizer.param_groups[0]["fused"]


def test_rates_are_tensors_inside_and_restored_after_an_error() -> None:
    capturable = made(torch.optim.SGD, lr=0.5)
    capturable.prepare()
    group = capturable.optimizer.param_groups[0]
    capturable.upload()
    with pytest.raises(KeyError), capturable.rates_on_device():
        raise KeyError(float(group["lr"]))
    assert group["lr"] == 0.5
    group["lr"] = 0.25
    capturable.upload()
    with capturable.rates_on_device():
        assert isinstance(group["lr"], torch.Tensor)
        assert group["lr"] == 0.25
    assert not capturable.settings_changed()  # a rate is not a setting


def test_a_rate_that_is_a_tensor_on_the_device_is_read_where_it_is() -> None:
    rate = torch.tensor(0.5)
    capturable = made(torch.optim.Adam, lr=rate, capturable=True, foreach=True)
    capturable.prepare()
    with capturable.rates_on_device():
        assert capturable.optimizer.param_groups[0]["lr"] is rate


def numbers(capturable: CapturableOptimizer) -> list[float]:
    return [float(capturable.rates[0]), *capturable.settings[0].tolist()]


@pytest.mark.parametrize(
    ("kind", "options", "changes", "expected"),
    [
        (torch.optim.Adam, {}, {"betas": (0.8, 0.9), "eps": 0.1}, [0.001, 0.8, 0.9, 0.1, 0]),
        (torch.optim.AdamW, {"lr": 0.5}, {"weight_decay": 0.25, "lr": 2}, [2, 0.9, 0.999, 1e-8, 0.25]),
        (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}, {"momentum": 0.8, "dampening": 0.5}, [0.5, 0.8, 0.5, 0]),
    ],
)
def test_what_our_update_reads_is_no_setting_of_a_recording(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], changes: dict[str, Any], expected: list[float]
) -> None:
    capturable = made(kind, **options)
    group = capturable.optimizer.param_groups[0]
    before = dict(group)
    capturable.prepare()
    assert capturable.ready()
    for values, reached in ((changes, expected), ({name: before[name] for name in changes}, None)):
        group.update(values)
        assert capturable.ready()
        assert reached is None or numbers(capturable) == pytest.approx(reached)
    capturable.follow_update(is_ours=False)
    assert capturable.ready()
    group.update(changes)
    assert not capturable.ready()


def test_momentum_that_begins_and_settings_that_are_tensors_are_noticed() -> None:
    for change in ({"momentum": 0.9}, {"weight_decay": torch.tensor(0.1)}, {"nesterov": True}):
        capturable = made(torch.optim.SGD, lr=0.1)
        capturable.prepare()
        assert capturable.ready()
        capturable.optimizer.param_groups[0].update(change)
        assert not capturable.ready()


def test_a_rate_of_the_user_on_the_device_is_never_written() -> None:
    base = torch.tensor(0.5)
    capturable = made(torch.optim.SGD, lr=base)
    capturable.prepare()
    assert capturable.ready()
    for rate in (base * 0.5, 0.25, base):
        capturable.optimizer.param_groups[0]["lr"] = rate
        assert capturable.ready() == (float(rate) == 0.5) or not isinstance(rate, torch.Tensor)
        capturable.prepare()
        capturable.upload()
        assert capturable.ready()
        assert float(capturable.rates[0]) == float(rate)
    assert float(base) == 0.5


def test_settings_that_are_arrays_and_not_a_number() -> None:
    capturable = made(torch.optim.SGD, lr=0.1)
    group = capturable.optimizer.param_groups[0]
    group.update(mask=np.ones(3), unknown=math.nan)
    capturable.prepare()
    group["unknown"] = float("nan")
    assert capturable.ready()
    group["mask"] = np.ones(3)
    assert not capturable.ready()


def test_changed_settings_groups_and_loaded_state_are_noticed() -> None:
    capturable = made(torch.optim.Adam)
    optimizer = capturable.optimizer
    capturable.prepare()
    assert not capturable.settings_changed()
    optimizer.param_groups[0]["amsgrad"] = True
    assert capturable.settings_changed()
    capturable.prepare()
    optimizer.load_state_dict(optimizer.state_dict())
    assert capturable.settings_changed()
    capturable.prepare()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert capturable.settings_changed()


def test_step_counts_of_an_existing_state_move() -> None:
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    CapturableOptimizer(optimizer, torch.device("meta")).prepare()
    assert all(state["step"].device.type == "meta" for state in optimizer.state.values())
