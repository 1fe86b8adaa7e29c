"""`ol.fit` as a user sees it: its arguments, its result, and the state of the model afterwards."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import onelaunch as ol
from onelaunch.run.spec import Spec
from tests.reference import problem

pytestmark = pytest.mark.usefixtures("one_thread")


def small(outputs: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, outputs))


def run(model, x, y, **options):
    return ol.fit(
        model, x, y, **{"epochs": 2, "optimizer": "sgd", "lr": 0.1, "engine": "eager", "progress": False, **options}
    )


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_trains_the_given_model_in_place():
    x, y = problem("cross_entropy")
    model = small()
    before = weights(model)
    parameters = list(model.parameters())
    history = run(model, x, y, epochs=20)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not same(before, weights(model))
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]
    assert all(parameter.grad is None for parameter in parameters)


def test_history_says_what_happened():
    x, y = problem("cross_entropy")
    history = run(small(), x, y, epochs=3, batch_size=40, validation=(x[:50], y[:50]))
    assert len(history.losses) == 3 * 4
    assert [epoch["epoch"] for epoch in history.epochs] == [0, 1, 2]
    assert [epoch["step"] for epoch in history.epochs] == [4, 8, 12]
    first = history.epochs[0]
    by_rows = sum(loss * rows for loss, rows in zip(history.losses[:4], (40, 40, 40, 30), strict=True)) / 150
    assert first["loss"] == pytest.approx(by_rows)
    assert 0 <= first["accuracy"] <= 1
    assert set(first["validation"]) == {"loss", "accuracy"}
    assert first["seconds"] > 0
    assert history.engine == "eager"
    assert history.reason
    assert json.loads(json.dumps(history.to_dict()))["losses"] == history.losses


def test_the_arguments_are_the_fields_of_the_spec_with_its_defaults():
    parameters = inspect.signature(ol.fit).parameters
    for field in dataclasses.fields(Spec):
        if field.name != "rows":
            assert parameters[field.name].default == field.default, field.name


def test_epoch_metrics_are_correct():
    """With lr = 0 the model does not change, so that accuracy and losses can be computed separately."""
    x, y = problem("cross_entropy")
    model = small()
    history = run(model, x, y, lr=0.0, epochs=1, validation=(x[:37], y[:37]))
    output = model(x)
    accuracy = (output.argmax(1) == y).float().mean().item()
    assert history.epochs[0]["accuracy"] == pytest.approx(accuracy)
    assert history.epochs[0]["loss"] == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-5)
    validation = history.epochs[0]["validation"]
    assert validation["loss"] == pytest.approx(nn.functional.cross_entropy(output[:37], y[:37]).item(), rel=1e-5)
    assert validation["accuracy"] == pytest.approx((output[:37].argmax(1) == y[:37]).float().mean().item())


def test_validation_sees_evaluation_mode_and_does_not_disturb_training():
    x, y = problem("cross_entropy")
    model = nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
    twin = copy.deepcopy(model)
    run(model, x, y, validation=(x, y))
    run(twin, x, y)
    assert same(weights(model), weights(twin))
    model.eval()
    run(model, x, y, epochs=1, validation=(x, y))
    assert not model.training


def test_inputs_of_every_kind_give_the_same_run():
    x, y = problem("cross_entropy")
    reference = small()
    run(reference, x, y)
    for kind in (
        (x.numpy(), y.numpy()),
        (x.double(), y.int()),
        (x.tolist(), y.tolist()),
        (np.asfortranarray(x.numpy()), y.numpy()[:, None]),
        (x.numpy().astype(">f4"), y.numpy().astype(np.uint16)),
        (torch.stack([x, x], dim=1)[:, 0], y),
    ):
        model = small()
        run(model, *kind)
        assert same(weights(model), weights(reference))


def test_read_only_arrays_are_taken():
    x, y = problem("cross_entropy")
    frozen = x.numpy().copy()
    frozen.flags.writeable = False
    run(small(), frozen, y)


def test_uint8_means_value_over_255():
    x = torch.randint(256, (100, 4, 4), dtype=torch.uint8)
    y = torch.randint(3, (100,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    twin = copy.deepcopy(model)
    run(model, x, y, validation=(x[:9], y[:9]))
    run(twin, x.float() / 255, y)
    assert same(weights(model), weights(twin))


def test_regression_takes_flat_targets():
    x, y = problem("mse", outputs=1)
    one, two = small(1), small(1)
    run(one, x, y[:, 0], loss="mse")
    history = run(two, x, y, loss="mse", validation=(x, y))
    assert same(weights(one), weights(two))
    assert history.epochs[0]["accuracy"] is None
    assert history.epochs[0]["validation"]["accuracy"] is None


def test_binary_targets_may_be_integers_and_accuracy_counts_elements():
    x, y = problem("bce_with_logits")
    history = run(small(), x, y.long(), loss="bce_with_logits", epochs=30, lr=1.0)
    assert 0.7 < history.epochs[-1]["accuracy"] <= 1


def test_drop_last_and_steps():
    x, y = problem("cross_entropy")
    assert len(run(small(), x, y, epochs=1, drop_last=True).losses) == 4
    assert len(run(small(), x, y, epochs=1).losses) == 5
    history = run(small(), x, y, epochs=None, steps=7, validation=(x, y))
    assert len(history.losses) == 7
    assert [epoch["step"] for epoch in history.epochs] == [5, 7]
    assert history.epochs[-1]["validation"]


@given(rows=st.integers(1, 50), batch=st.integers(1, 60), steps=st.integers(1, 12), drop_last=st.booleans())
@settings(max_examples=15)
def test_any_batching_trains_its_number_of_steps(rows, batch, steps, drop_last):
    if drop_last and batch > rows:
        return
    model = nn.Sequential(nn.Linear(3, 2))
    history = run(model, torch.randn(rows, 3), torch.randint(2, (rows,)), epochs=None, steps=steps, batch_size=batch,
                  drop_last=drop_last)  # fmt: skip
    assert len(history.losses) == steps


class Residual(nn.Module):
    """A model that is not an MLP, with functional dropout from PyTorch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last, self.drop = nn.Linear(7, 7), nn.Linear(7, 4), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(torch.relu(self.inner(x)))
        x = self.drop(x)
        return self.last(nn.functional.dropout(x * 2, 0.1, self.training))


def test_any_module_trains_and_repeats_bit_for_bit(device):
    x, y = problem("cross_entropy")
    torch.manual_seed(0)
    model = Residual().to(device)
    twin = copy.deepcopy(model)
    state = torch.get_rng_state()
    first = run(model, x, y, epochs=5, seed=4)
    assert torch.equal(torch.get_rng_state(), state), "the state of the user's generator changed"
    torch.randn(5)
    second = run(twin, x, y, epochs=5, seed=4)
    assert first.losses == second.losses
    assert same(weights(model), weights(twin))
    chosen = run(twin, x, y, engine="auto")
    assert chosen.engine == "eager"
    assert "forward calls mul" in chosen.reason or device.type == "cuda"
    other = run(copy.deepcopy(model), x, y, seed=5)
    assert other.losses != run(copy.deepcopy(model), x, y, seed=4).losses


def test_tied_and_frozen_weights_keep_their_meaning():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
            self.down.weight = self.up.weight
            self.frozen = nn.Linear(7, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.down(self.up(x)))

    x, y = problem("cross_entropy")
    model = Tied()
    before = model.frozen.weight.clone()
    run(model, x, y)
    assert torch.equal(model.frozen.weight, before)
    assert model.down.weight is model.up.weight


def test_loss_that_is_not_finite_stops_the_run():
    x, y = problem("mse")
    with pytest.raises(ol.DivergedError, match=r"step \d+: pass a smaller lr") as caught:
        run(small(), 1e3 * x, 1e6 * y, loss="mse", lr=1e3, epochs=50)
    assert caught.value.step > 0


def test_weights_that_overflow_in_the_last_step_are_noticed():
    x, y = problem("mse")
    with pytest.raises(ol.DivergedError, match="no longer finite after step 0"):
        run(small(), x, y * 1e15, loss="mse", lr=1e30, epochs=None, steps=1)


def test_surrounding_autocast_does_not_change_the_precision():
    x, y = problem("cross_entropy")
    plain = run(small(), x, y)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(small(), x, y).losses == plain.losses


class Masked(nn.Module):
    """Has a buffer of -inf on purpose, and draws random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 4)
        self.register_buffer("mask", torch.full((3,), -torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + 0.01 * torch.randn_like(x))


def test_buffers_that_were_never_finite_are_no_divergence(tmp_path):
    x, y = problem("cross_entropy")
    state = torch.get_rng_state()
    run(Masked(), x, y)
    assert not torch.equal(torch.get_rng_state(), state)  # making the model drew its weights
    model = Masked()
    state = torch.get_rng_state()
    run(model, x, y, checkpoint=tmp_path / "run.safetensors")
    assert torch.equal(torch.get_rng_state(), state)


def test_lazy_modules_follow_the_seed():
    x, y = problem("cross_entropy")
    models = [nn.Sequential(nn.LazyLinear(4)) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        torch.randn(3)
        run(model, x, y, seed=seed)
    assert same(weights(models[0]), weights(models[1]))
    assert not same(weights(models[0]), weights(models[2]))


def test_a_replaced_forward_of_a_dropout_stays():
    x, y = problem("cross_entropy")
    model = nn.Sequential(nn.Linear(7, 4), nn.Dropout(0.9))
    model[1].forward = lambda z: z
    twin = nn.Sequential(copy.deepcopy(model[0]))
    run(model, x, y)
    run(twin, x, y)
    assert same(weights(model), weights(twin))
    assert "forward" in vars(model[1])


def test_an_infinite_validation_loss_is_json_too():
    x, y = problem("mse")
    history = run(small(), x, y, loss="mse", validation=(x, y * 1e30))
    assert history.epochs[0]["validation"]["loss"] == float("inf")
    assert json.loads(json.dumps(history.to_dict(), allow_nan=False))["epochs"][0]["validation"]["loss"] is None


@pytest.mark.parametrize("engine", ["cpu", "eager"])
def test_a_batch_larger_than_the_data_is_all_rows(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    x, y = torch.randn(20, 5), torch.arange(20) % 3
    losses = [
        ol.fit(
            copy.deepcopy(model), x, y, steps=3, batch_size=size, engine=engine, validation=(x, y), progress=False
        ).losses
        for size in (20, 10**12)
    ]
    assert losses[0] == losses[1]


def test_rows_of_vectors_train_on_the_eager_engine():
    """PyTorch's Linear works along the last axis; those of the native engines do not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(20, 4, 5), torch.randn(20, 4, 2)
    history = ol.fit(model, x, y, epochs=1, batch_size=20, loss="mse", lr=0.1, progress=False)
    assert history.engine == "eager"
    assert "takes each of their vectors" in history.reason
    with pytest.raises(ValueError, match=r"put nn\.Flatten\(\) first"):
        ol.fit(model, x, torch.arange(20) % 2, epochs=1, progress=False)


def test_an_engine_that_refuses_at_its_start_is_replaced(monkeypatch):
    from onelaunch.engines.cpu import ENGINE

    def start(*_: object) -> None:
        raise ol.UnsupportedError("too few of something")

    monkeypatch.setattr(type(ENGINE), "start", start)
    x, y = problem("cross_entropy")
    model = nn.Sequential(nn.Linear(x.shape[1], 4))
    history = ol.fit(model, x, y, epochs=1, progress=False)
    assert history.engine == "eager"
    assert "cpu: too few of something" in history.reason
    with pytest.raises(ol.UnsupportedError, match="too few of something"):
        ol.fit(model, x, y, epochs=1, engine="cpu", progress=False)
