"""Networks that do not fit into memory are refused before they are made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.train.memory import no_room_reason, parameters_of, training_copies
from onelaunch.train.mlp import mlp


@pytest.fixture
def one_gib(monkeypatch):
    monkeypatch.setattr("onelaunch.train.memory.free_memory", lambda: 2**30)


def test_parameters_are_counted_as_the_network_has_them():
    widths = [5, 7, 3]
    assert parameters_of(widths) == sum(parameter.numel() for parameter in mlp(widths).parameters())


def test_the_reason_names_count_size_and_what_is_free(one_gib):
    assert no_room_reason(2**28) == ""
    assert no_room_reason(2**28 + 1) == "268,435,457 parameters take 1.00 GiB, 1.00 GiB are free"
    assert no_room_reason(2**28, copies=4) == "268,435,456 parameters take 4.00 GiB, 1.00 GiB are free"


def test_nothing_is_refused_where_free_memory_is_unknown(monkeypatch):
    monkeypatch.setattr("onelaunch.train.memory.free_memory", lambda: None)
    assert no_room_reason(10**12) == ""


def test_copies_follow_from_the_optimizer():
    found = [training_copies("adam"), training_copies("sgd"), training_copies("sgd", momentum=0.9)]
    assert found == [4, 2, 3]


def test_an_mlp_is_refused_by_its_widths(one_gib):
    message = (
        r"^layers=\[4, 1000000000, 3\] do not fit into memory \(8,000,000,003 parameters take 29\.8 GiB, 1\.00 GiB "
    )
    with pytest.raises(ol.OnelaunchError, match=message):
        mlp([4, 10**9, 3])


def test_fit_refuses_a_model_whose_optimizer_state_does_not_fit(monkeypatch):
    monkeypatch.setattr("onelaunch.train.memory.free_memory", lambda: 1000)
    monkeypatch.setattr("onelaunch.train.memory.MIN_CHECKED_BYTES", 0)
    model = nn.Sequential(nn.Linear(20, 5))  # 105 parameters: 420 bytes of gradients, and 840 of Adam's state
    x, y = torch.zeros(8, 20), torch.zeros(8, dtype=torch.int64)
    message = (
        "model is too large to train here with optimizer='adam': gradient and state of its 105 parameters take 1.23 KiB"
    )
    with pytest.raises(ol.OnelaunchError, match=message):
        ol.fit(model, x, y, epochs=1, progress=False)
    ol.fit(model, x, y, epochs=1, optimizer="sgd", engine="eager", progress=False)


def test_fit_refuses_a_model_whose_checkpoint_does_not_fit(monkeypatch, tmp_path):
    monkeypatch.setattr("onelaunch.train.memory.free_memory", lambda: 2000)
    monkeypatch.setattr("onelaunch.train.memory.MIN_CHECKED_BYTES", 0)
    model = nn.Sequential(nn.Linear(20, 5))
    arguments = {"epochs": 1, "engine": "eager", "progress": False}
    x, y = torch.zeros(8, 20), torch.zeros(8, dtype=torch.int64)
    ol.fit(model, x, y, **arguments)
    message = "model is too large for checkpoints here: with them, its 105 parameters take 3.69 KiB, 1.95 KiB"
    with pytest.raises(ol.OnelaunchError, match=message):
        ol.fit(model, x, y, checkpoint=tmp_path / "run.safetensors", **arguments)
    assert not (tmp_path / "run.safetensors").exists()
    ol.fit(model, x, y, checkpoint=tmp_path / "run.safetensors", optimizer="sgd", **arguments)
