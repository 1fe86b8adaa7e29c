"""Recorded steps read their arguments and write their losses through addresses."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from tests.conftest import LOSS_TOLERANCE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_code")]


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
    return model, copy.deepcopy(model)


def plain(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]], lr: float) -> list[float]:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr), []
    for x, y in data:
        loss = F.mse_loss(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def test_thousands_of_losses_are_kept() -> None:
    """More calls than the ring has slots, all in flight at once, and every loss is still there at the end."""
    model, other = pair()
    data = [(torch.randn(5, 6, device="cuda"), torch.randn(5, 3, device="cuda")) for _ in range(40)]
    step = ol.train_step(model, F.mse_loss, torch.optim.Adam(model.parameters(), 1e-3))
    losses = [step(*data[number % 40]) for number in range(2600)]
    expected = plain(other, [data[number % 40] for number in range(2600)], 1e-3)
    assert step.reason == ""
    torch.testing.assert_close(torch.stack(losses).tolist(), expected, rtol=100 * LOSS_TOLERANCE, atol=1e-5)


def test_arguments_of_every_kind() -> None:
    """Freed at once, on the CPU, with gaps, shared, of two shapes in turn."""
    model, other = pair()
    data = []
    for number in range(60):
        x, y = torch.randn(5 + number % 2, 6), torch.randn(5 + number % 2, 3)
        if number % 3:
            x, y = x.cuda(), y.cuda()
        if number % 5 == 1:
            x = torch.randn(6, len(x), device="cuda").t()
        data.append((x, y))
    step = ol.train_step(model, F.mse_loss, torch.optim.Adam(model.parameters(), 1e-2))
    losses = [step(x * 1, y * 1).item() for x, y in data]
    torch.testing.assert_close(losses, plain(other, data, 1e-2), rtol=100 * LOSS_TOLERANCE, atol=1e-5)


def test_an_interrupted_call_is_not_counted() -> None:
    model, other = pair()
    data = [(torch.randn(5, 6, device="cuda"), torch.randn(5, 3, device="cuda")) for _ in range(20)]
    step = ol.train_step(model, F.mse_loss, torch.optim.Adam(model.parameters(), 1e-2))
    losses = []
    for number, (x, y) in enumerate(data):
        if number == 10:
            recorded: Any = step._recordings.latest
            graph, recorded.graph = recorded.graph, Interrupted()
            with pytest.raises(KeyboardInterrupt):
                step(x, y)
            recorded.graph = graph
            assert recorded.ring.calls == int(recorded.ring.state[0])
        losses.append(step(x, y).item())
    torch.testing.assert_close(losses, plain(other, data, 1e-2), rtol=100 * LOSS_TOLERANCE, atol=1e-5)


class Interrupted:
    def replay(self) -> None:
        raise KeyboardInterrupt


def test_a_model_with_one_tensor_as_two_arguments() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.layer(x), y if x is y else 2 * y)

    model = Both().cuda()
    other = copy.deepcopy(model)
    step = ol.train_step(model, None, torch.optim.Adam(model.parameters(), 1e-2))
    theirs = torch.optim.Adam(other.parameters(), 1e-2)
    for number in range(16):
        x, y = torch.randn(4, 6, device="cuda"), torch.randn(4, 6, device="cuda")
        arguments = (x, x) if number % 2 else (x, y)
        loss = other(*arguments)
        torch.testing.assert_close(step(*arguments), loss.detach(), rtol=1e-4, atol=1e-5)
        loss.backward()
        theirs.step()
        theirs.zero_grad()
    assert step.reason == ""


class Prunes(nn.Linear):
    """As pruned and weight-normalized layers do, it keeps the weight that was computed for the last pass."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.weight.tril()
        return F.linear(x, self.kept, self.bias)


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("when", [0, 2, 9])
def test_what_is_kept_of_another_pass_does_not_end_recording(when: int, compile: bool) -> None:
    """Its nodes for gradients are of another stream."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Prunes()).cuda()
    other = copy.deepcopy(model)
    sizes = [5] * 10 + [6] * 6
    data = [(torch.randn(rows, 6, device="cuda"), torch.randn(rows, 3, device="cuda")) for rows in sizes]
    step = ol.train_step(model, F.mse_loss, torch.optim.Adam(model.parameters(), 1e-2), compile=compile)
    losses, kept = [], []
    for number, (x, y) in enumerate(data):
        if number == when:
            kept.append(model(x))
        losses.append(step(x, y))
    assert step.reason == ""
    assert len(step._recordings) == 2
    found = torch.stack(losses).tolist()
    torch.testing.assert_close(found, plain(other, data, 1e-2), rtol=100 * LOSS_TOLERANCE, atol=1e-5)
    kept[0].sum().backward()


class DropsLayers(nn.Module):
    """It decides on the host in every pass whether to skip a layer."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layerdrop = layerdrop
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x if torch.rand([]) < self.layerdrop else self.first(x))


@pytest.mark.parametrize("chance", [0.5, 0.0])
@pytest.mark.parametrize("compile", [True, False])
def test_random_numbers_of_the_host_that_decide_end_recording(compile: bool, chance: float) -> None:
    torch.manual_seed(0)
    model = DropsLayers(chance).cuda()
    other = copy.deepcopy(model)
    data = [(torch.randn(5, 6, device="cuda"), torch.randn(5, 3, device="cuda")) for _ in range(16)]
    step = ol.train_step(model, F.mse_loss, torch.optim.Adam(model.parameters(), 1e-2), compile=compile)
    torch.manual_seed(1)
    losses = torch.stack([step(x, y) for x, y in data]).tolist()
    assert step.reason.startswith(
        "what they depend on is not known: the program branches on a tensor's value (test_recorded.py:"
    )
    if not compile or not chance:
        torch.manual_seed(1)
        torch.testing.assert_close(losses, plain(other, data, 1e-2), rtol=100 * LOSS_TOLERANCE, atol=1e-5)


class Noisy(nn.Linear):
    """It needs a number that PyTorch draws on the host, as a device without a generator of its own would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.rand(())


def test_draws_that_dynamo_knows_end_recording() -> None:
    model = Noisy(8, 4).cuda()
    step: Any = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.0))
    x, y = torch.randn(5, 8, device="cuda"), torch.randint(4, (5,), device="cuda")
    losses = {float(step(x, y)) for _ in range(8)}
    assert len(losses) == 8
    assert step.reason.startswith("forward, the loss or another thread draws random numbers on the host")
    assert step._recordings._retries == 0


class Selects(nn.Module):
    """How many rows it takes is known on the device only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[x[:, 0] > -9]  # all of them
        return self.layer(rows)


def train(step: Any, count: int = 8) -> list[float]:
    data = [(torch.randn(5, 6, device="cuda"), torch.randn(5, 3, device="cuda")) for _ in range(count)]
    return torch.stack([step(x, y) for x, y in data]).tolist()


def test_what_dynamo_does_not_know_is_named() -> None:
    model = Selects().cuda()
    step = ol.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), compile=False)
    assert all(loss > 0 for loss in train(step))
    assert step.reason.startswith("what they depend on is not known: ")


class Waits(nn.Module):
    """It waits for the device by a call that Dynamo leaves in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return self.layer(x)


def test_what_a_capture_forbids_is_named_with_its_place() -> None:
    model = Waits().cuda()
    step = ol.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), compile=False)
    assert all(loss > 0 for loss in train(step))
    assert "test_recorded.py:" in step.reason


def test_an_optimizer_without_a_capturable_form() -> None:
    model, _ = pair()
    step = ol.train_step(model, F.mse_loss, torch.optim.Adagrad(model.parameters(), 0.1), compile=False)
    assert all(loss > 0 for loss in train(step))
    assert step.reason == "Adagrad has no capturable form"


def test_a_gpu_as_the_default_device() -> None:
    model, _ = pair()
    step = ol.train_step(model, F.mse_loss, torch.optim.Adam(model.parameters(), 0.1))
    with torch.device("cuda"):
        assert all(loss > 0 for loss in train(step))
    assert step.reason == ""


def test_another_stream_and_another_thread() -> None:
    model, other = pair()
    data = [(torch.randn(5, 6, device="cuda"), torch.randn(5, 3, device="cuda")) for _ in range(30)]
    step = ol.train_step(model, F.mse_loss, torch.optim.Adam(model.parameters(), 1e-2))
    losses = []

    def ten(begin: int) -> None:
        for x, y in data[begin : begin + 10]:
            losses.append(step(x, y))
        torch.cuda.synchronize()

    ten(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        ten(10)
    thread = threading.Thread(target=ten, args=(20,))
    thread.start()
    thread.join(60)
    found = torch.stack(losses).tolist()
    torch.testing.assert_close(found, plain(other, data, 1e-2), rtol=100 * LOSS_TOLERANCE, atol=1e-5)
