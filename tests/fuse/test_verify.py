"""`verify=True` finds what compiled code computes wrongly, and nothing else; it leaves no trace."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.errors import ArgumentTypeError, OnelaunchError
from onelaunch.fuse import backend, fuse, verify
from onelaunch.fuse.verify import VerificationError
from onelaunch.step import plain_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Counts(nn.Module):
    """AOTAutograd computes `calls + 1` again in the backward pass, when it has been added already."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) / self.calls


class Drops(nn.Module):
    """Dropout of every kind, and statistics of a batch."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.3, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))
        self.encoder, self.head = encoder, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.layers(x), 0.4, self.training)
        return self.head(self.encoder(y[:, None])[:, 0])


def compiled_by_aot(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AOTAutograd, but without generated code."""
    aot = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, inputs, mode, options: aot(gm, inputs))


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    compiled_by_aot(monkeypatch)


def batch(device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(32, 8, device=device), torch.randint(4, (32,), device=device)


def train_step(model: nn.Module, **options: Any) -> Any:
    return ol.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), verify=True, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_gradient_is_named(device: str) -> None:
    model, (x, y) = Counts().to(device), batch(device)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(VerificationError, match=r"compiled, the gradient of layer\.\w+ differs by 0\.\d+ of its norm"):
        train_step(model)(x, y)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    with pytest.raises(VerificationError, match="use the model itself instead"):
        ol.fuse(model, verify=True)(x)


def test_such_a_program_is_told_unasked(caplog: pytest.LogCaptureFixture) -> None:
    backend._log_once.cache_clear()
    model, (x, y) = Counts(), batch("cpu")
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    with caplog.at_level(logging.WARNING, "onelaunch"):
        step(x, y)
    assert "changes model.calls in place and then computes with it" in caplog.text
    caplog.clear()
    normed = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)), nn.BatchNorm1d(4))
    ol.train_step(normed, F.cross_entropy, torch.optim.SGD(normed.parameters(), 0.1))(x, y)
    assert "in place" not in caplog.text
    backend._log_once.cache_clear()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [None, "bf16"])
def test_a_right_program_passes_and_trains_as_without(device: str, autocast: str | None) -> None:
    model, (x, y) = Drops().to(device), batch(device)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    verified = [float(step(x, y)) for step in [train_step(model, autocast=autocast)] for _ in range(4)]
    torch.manual_seed(1)
    step = ol.train_step(other, nn.CrossEntropyLoss(), torch.optim.SGD(other.parameters(), 0.1), autocast=autocast)
    assert verified == [float(step(x, y)) for _ in range(4)]
    assert model.layers[3].p == 0.5
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_types_of_the_model(device: str, dtype: torch.dtype) -> None:
    model, (x, y) = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4)).to(device, dtype), batch(device)
    assert torch.isfinite(train_step(model)(x.to(dtype), y))
    assert ol.fuse(model.eval(), verify=True)(x.to(dtype)).dtype is dtype


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("caller", [plain_step, fuse])
def test_any_gradient_or_output_that_is_off(at: int, caller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third is an output."""
    results, runs = verify._results, []

    def off(output: Any, parameters: Any) -> Any:
        found = results(output, parameters)
        runs.append(found)
        if len(runs) == 3:  # the compiled one
            found[[name for name in found if "weight" in name or "gradient" not in name][at]].mul_(1.01)
        return found

    monkeypatch.setattr(verify, "_results", off)
    model, (x, y) = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), batch("cpu")
    with pytest.raises(VerificationError, match=r"differs by 0\.01 of its norm"):
        train_step(model)(x, y) if caller is plain_step else ol.fuse(model, verify=True)(x)
    assert len(runs) == 4


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("layer", [Noise(), nn.RReLU()], ids=["noise", "rrelu"])
def test_random_numbers_are_not_compared(layer: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    model, (x, y) = nn.Sequential(nn.Linear(8, 16), layer, nn.Linear(16, 4)), batch("cpu")
    assert torch.isfinite(train_step(model)(x, y))
    assert "depend on random numbers" in caplog.text


class GeM(nn.Module):
    """A layer whose attribute `p` is no probability."""

    def __init__(self) -> None:
        super().__init__()
        self.p = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().add(0.1).pow(self.p).pow(1 / self.p)


def test_other_attributes_called_p_stay(caplog: pytest.LogCaptureFixture) -> None:
    model, (x, y) = nn.Sequential(nn.Linear(8, 16), GeM(), nn.Dropout(0.5), nn.Linear(16, 4)), batch("cpu")
    assert torch.isfinite(train_step(model)(x, y))
    assert "random" not in caplog.text


def test_it_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(plain_step, "verify", lambda *args: calls.append(args))
    model, (x, y) = nn.Linear(8, 4), batch("cpu")
    step = train_step(model)
    for rows in (32, 32, 7):
        step(x[:rows], y[:rows])
    assert len(calls) == 1


def test_wrong_arguments() -> None:
    model = nn.Linear(8, 4)
    with pytest.raises(ArgumentTypeError, match="verify=1 must be True or False"):
        ol.fuse(model, verify=1)
    with pytest.raises(ArgumentTypeError, match="verify='yes' must be True or False"):
        ol.train_step(model, None, torch.optim.SGD(model.parameters(), 0.1), verify="yes")
    with pytest.raises(OnelaunchError, match="leave out compile=False"):
        train_step(model, compile=False)
