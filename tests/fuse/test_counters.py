"""Counters of batch norms run as one operation beside the compiled program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from onelaunch.fuse.counters import take_counters

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.usefixtures("no_code")


class Counting(nn.Module):
    """A layer with whole numbers that are changed in several ways."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("plain", "twice", "read", "shared"):
            self.register_buffer(name, torch.tensor(0))
        self.register_buffer("alias", self.shared.view(()))
        self.register_buffer("real", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.plain += 3
        self.twice += 1
        self.twice += 1
        self.read += 1
        self.real += 1
        self.shared += 1
        return x * self.read + self.real + self.alias


def left_in(graph: fx.Graph) -> int:
    return sum("add" in str(node.target) and node.target != "add" for node in graph.nodes if not node.users)


def compiled(model: nn.Module, seen: list[tuple[int, int]]) -> Any:
    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        before = left_in(gm.graph)
        with_counters = take_counters(gm)
        seen.append((before, left_in(gm.graph)))
        gm.graph.lint()
        return with_counters(gm.forward)

    return torch.compile(model, backend=backend)


def counts(model: nn.Module) -> list[int]:
    return [int(module.num_batches_tracked) for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize("device", DEVICES)
def test_batch_norms_count_outside_the_graph(device: str) -> None:
    layers = [layer for _ in range(5) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))]
    model: nn.Sequential = nn.Sequential(*layers).to(device)
    seen: list[tuple[int, int]] = []
    x, step = torch.randn(4, 3, 5, 5, device=device), compiled(model, seen)
    for _ in range(3):
        step(x)
    assert seen == [(5, 0)]
    assert counts(model) == [3] * 5
    model.eval()
    step(x)
    assert counts(model) == [3] * 5


@pytest.mark.parametrize("device", DEVICES)
def test_other_numbers_stay_in_the_graph(device: str) -> None:
    model, plain = Counting().to(device), Counting().to(device)
    x, step = torch.randn(4, device=device), compiled(model, [])
    for _ in range(3):
        torch.testing.assert_close(step(x), plain(x), rtol=0, atol=0)
    assert model.state_dict() == plain.state_dict()


def test_a_cumulative_average_reads_its_counter() -> None:
    model, plain = (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, momentum=None)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    step = compiled(model, [])
    for _ in range(3):
        x = torch.randn(4, 3, 5, 5)
        torch.testing.assert_close(step(x), plain(x))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
