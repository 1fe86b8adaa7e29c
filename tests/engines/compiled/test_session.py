"""The compiled engine against the eager one: a small CNN with dropout, weights and clipping, captured as a CUDA graph."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.engines.compiled import ENGINE
from onelaunch.engines.compiled.dropout import CompiledDropout, run_dropout
from onelaunch.engines.eager.dropout import RunDropout
from onelaunch.rng import dropout_keep, keep_scale, signed_seed
from tests.conftest import TOLERANCE
from tests.reference import assert_same_course, assert_same_weights

ROWS = 330  # not a multiple of the batch


class Net(nn.Module):
    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        # without a bias: its gradient before batch norm is rounding, which Adam makes large
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.Conv2d(8, 16, 3, stride=2)
        self.norm, self.drop, self.head = nn.BatchNorm2d(8), nn.Dropout(dropout), nn.Linear(16 * 5 * 5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.max_pool2d(F.gelu(self.second(x)), 1)
        return self.head(self.drop(x.flatten(1)))


def images() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    y = generator.integers(0, 10, ROWS)
    x = generator.integers(0, 256, (ROWS, 1, 12, 12), dtype=np.uint8)
    return np.minimum(x, 20 * (y[:, None, None, None] + 3)).astype(np.uint8), y


def fit(model: nn.Module, engine: str, **options: Any) -> ol.History:
    x, y = images()
    options = {"epochs": 3, "batch_size": 32, "validation": (x[:300], y[:300]), "progress": False, **options}
    return ol.fit(model, x, y, engine=engine, **options)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*TensorFloat32")
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_eager_engine_gives_the_same(optimizer: str) -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    other = copy.deepcopy(model)
    options: dict[str, Any] = {
        "optimizer": optimizer, "clip_norm": 1.0, "class_weight": "balanced", "lr": 1e-2, "precision": "fp32"
    }  # fmt: skip
    own = model.first.weight.data_ptr()
    found, expected = fit(model, "compiled", **options), fit(other, "eager", **options)
    assert found.engine == "compiled"
    assert "captured as a CUDA graph" in found.plan
    assert model.first.weight.data_ptr() == own
    assert_same_course(found.losses, expected.losses, 1e-4)
    assert_same_weights(model, other, 1e-3)
    assert found.epochs[-1]["validation"]["loss"] == pytest.approx(expected.epochs[-1]["validation"]["loss"], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*TensorFloat32")
def test_a_stopped_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # Without convolutions, whose gradients cuDNN may add up in any order.
    layers = nn.Flatten(), nn.Linear(144, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 10)
    model = nn.Sequential(*layers).cuda()
    other = copy.deepcopy(model)
    fit(other, "compiled", epochs=4)
    with pytest.raises(InterruptedError):
        fit(model, "compiled", epochs=4, checkpoint=tmp_path / "c.safetensors", callbacks=[_stop_after_two])
    resumed = fit(model, "compiled", epochs=4, checkpoint=tmp_path / "c.safetensors", resume=True)
    assert len(resumed.epochs) == 4
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*TensorFloat32")
@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_a_convolutional_network_resumes_on_the_same_course(tmp_path: Path, precision: str) -> None:
    """The optimizer's state is laid out as the weights, so that our kernel updates them before and after."""
    torch.manual_seed(0)
    model = Net().cuda()
    other = copy.deepcopy(model)
    whole = fit(other, "compiled", epochs=4, precision=precision)
    assert whole.precision == ("tf32" if precision == "auto" else precision)
    path = tmp_path / "c.safetensors"
    with pytest.raises(InterruptedError):
        fit(model, "compiled", epochs=4, precision=precision, checkpoint=path, callbacks=[_stop_after_two])
    resumed = fit(model, "compiled", epochs=4, precision=precision, checkpoint=path, resume=True)
    assert_same_course(resumed.losses, whole.losses, 2e-2)


def _stop_after_two(history: ol.History) -> None:
    if len(history.epochs) == 3:  # the second epoch's checkpoint is written by then
        raise InterruptedError


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_cannot_be_compiled_trains_as_in_eager(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_compiling():
                raise RuntimeError("not here")
            return super().forward(x)

    torch.manual_seed(0)
    model = Odd(0.0).cuda()
    with caplog.at_level(logging.WARNING, "onelaunch"):
        history = fit(model, "compiled", epochs=1)
    assert len(history.losses) == 11


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(5, 3), (7, 2, 9, 5), (33, 1030), (0, 4)])
def test_masks_are_those_of_the_run(shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    step = torch.tensor(17, device=device)
    seed = 2**63 + 2**40 + 5
    y = run_dropout(x, step, signed_seed(seed), 3, 0.3)
    units = x[0].numel() if len(x) else 0
    keep = dropout_keep(0.3, seed, 3, 17, len(x), units, device=device).view(shape)
    expected = torch.where(keep, x * keep_scale(0.3), 0)
    rtol, atol = TOLERANCE[torch.float32]
    torch.testing.assert_close(y, expected, rtol=rtol, atol=atol)
    upstream = torch.randn_like(y)
    (got,), (right,) = torch.autograd.grad(y, x, upstream), torch.autograd.grad(expected, x, upstream)
    torch.testing.assert_close(got, right, rtol=rtol, atol=atol)


def test_dropout_modules_are_captured_in_one_graph() -> None:
    """Each kind of module that drops, inside `torch.compile` without a graph break, draws what it draws in eager."""
    kinds = ol.nn.Linear(6, 8, activation="gelu", dropout=0.3), ol.nn.ReLUDropout(0.4), nn.Dropout(0.5)
    model = nn.Sequential(*kinds, ol.nn.BatchNorm1d(8, activation="relu", dropout=0.2))
    x, device = torch.randn(5, 6), torch.device("cpu")
    outputs = []
    for make, run in ((RunDropout, model), (CompiledDropout, torch.compile(model, backend="eager", fullgraph=True))):
        dropout = make(model, 3, 5, device)
        dropout.begin_step(7)
        outputs.append(run(x))
        dropout.release()
    rtol, atol = TOLERANCE[torch.float32]
    torch.testing.assert_close(*outputs, rtol=rtol, atol=atol)


def test_the_op_follows_the_rules_of_custom_ops() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    torch.library.opcheck(run_dropout, (x, torch.tensor(3), 7, 0, 0.5))


def test_a_cpu_has_no_such_engine() -> None:
    assert "CUDA" in ENGINE.unavailable_reason(torch.device("cpu"))
    with pytest.raises(ol.UnsupportedError, match="compiled"):
        fit(Net(), "compiled", epochs=1)
