"""LayerNorm and residual additions on the CPU engine against plain PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from onelaunch.engines.eager import ENGINE
from tests.engines.cpu.runs import (
    Bystander,
    assert_close,
    copy_of,
    data,
    make,
    train_natively,
    train_plainly,
)
from tests.reference import OPTIMIZERS


class Branch(nn.Module):
    """x + inner(x), then `after`."""

    def __init__(self, *inner: nn.Module, after: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.after = nn.Sequential(*inner), after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.inner(x))


class Dense(nn.Module):
    """Additions of the same value twice, of a value inside a stage, and of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = torch.tanh(a)
        c = a + torch.relu(self.second(b) + b)
        return torch.nn.functional.gelu(self.norm(self.third(c) + a) + x)


def prenorm(width: int, inner: int) -> Branch:
    return Branch(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


NETWORKS: dict[str, tuple[Callable[[], list[nn.Module]], int, int, int]] = {  # layers, rows, batch, outputs
    "layer norm, relu": (
        lambda: [nn.Linear(7, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 33), nn.ReLU(), nn.LayerNorm(33),
                 nn.Linear(33, 3)], 150, 32, 3,
    ),
    "wide, odd, without parameters": (
        lambda: [nn.Linear(7, 300), nn.LayerNorm(300, elementwise_affine=False), nn.SiLU(), nn.Linear(300, 5)], 60, 16, 5,
    ),
    "wide, without bias": (
        lambda: [nn.Linear(7, 256), nn.LayerNorm(256, bias=False), nn.Tanh(), nn.Linear(256, 5)], 60, 24, 5,
    ),
    "first and last": (
        lambda: [nn.LayerNorm(7), nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 17), nn.LayerNorm(17), nn.Tanh()], 75, 16, 17,
    ),
    "layer norm twice after one Linear": (
        lambda: [nn.Linear(7, 40), nn.LayerNorm(40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 3)], 75, 16, 3,
    ),
    "relu after the branch": (
        lambda: [nn.Linear(7, 40), Branch(nn.Linear(40, 40), nn.ReLU()), Branch(nn.Linear(40, 40), after=nn.ReLU()),
                 nn.Linear(40, 3)], 75, 16, 3,
    ),
    "from the input": (lambda: [Branch(nn.Linear(7, 30), nn.ReLU(), nn.Linear(30, 7)), nn.Linear(7, 3)], 75, 16, 3),
    "to the output": (lambda: [nn.Linear(7, 3), Branch(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 3))], 75, 16, 3),
    "pre-norm": (
        lambda: [nn.Linear(7, 40), prenorm(40, 70), prenorm(40, 33), nn.LayerNorm(40), nn.Linear(40, 3)], 75, 16, 3,
    ),
    "post-norm": (
        lambda: [nn.Linear(7, 40), Branch(nn.Linear(40, 40), nn.ReLU(), after=nn.LayerNorm(40)),
                 Branch(nn.Linear(40, 40), nn.ReLU(), after=nn.LayerNorm(40)), nn.Linear(40, 3)], 75, 16, 3,
    ),
    "batch norm": (
        lambda: [nn.Linear(7, 40), nn.BatchNorm1d(40), nn.ReLU(),
                 Branch(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 40), nn.BatchNorm1d(40),
                        after=nn.ReLU()), nn.Linear(40, 3)], 80, 16, 3,
    ),
    "dense": (lambda: [nn.LayerNorm(7), Dense(7), nn.Linear(7, 3)], 75, 16, 3),
    "batch of one": (lambda: [nn.Linear(7, 20), prenorm(20, 8), nn.Linear(20, 3)], 10, 1, 3),
}  # fmt: skip


@pytest.mark.parametrize(("name", "partitions"), [(name, (2, 3, 1)[n % 3]) for n, name in enumerate(NETWORKS)])
def test_every_shape_follows_plain_pytorch(name: str, partitions: int, cache_folder: Path) -> None:
    layers, rows, batch, outputs = NETWORKS[name]
    torch.manual_seed(2)
    x, y = data("cross_entropy", rows, 7, outputs)
    run = make(nn.Sequential(*layers()), x, y, (x[:50], y[:50]), steps=60, batch_size=batch)
    assert run.network is not None, run.no_network_reason
    assert_close(train_natively(run, cache_folder, partitions=partitions), train_plainly(run))


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if "sgd" not in name])
def test_every_optimizer(optimizer: str, cache_folder: Path) -> None:
    torch.manual_seed(2)
    x, y = data("mse", 100, 7, 4)
    options = dict(OPTIMIZERS[optimizer])
    if options["optimizer"] == "lion":
        options["lr"] = 2e-5
    model = nn.Sequential(nn.Linear(7, 24), prenorm(24, 40), nn.Linear(24, 4))
    run = make(model, x, y, loss="mse", steps=120, **options)
    assert_close(train_natively(run, cache_folder), train_plainly(run))


def test_dropout_draws_the_masks_of_the_eager_engine(cache_folder: Path) -> None:
    torch.manual_seed(2)
    x, y = data("cross_entropy", 100, 7, 4)
    inner = (nn.LayerNorm(24), nn.Dropout(0.2), nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.5))
    model = nn.Sequential(nn.Linear(7, 24), nn.Dropout(0.1), Branch(*inner), nn.Linear(24, 4))
    run = make(model, x, y, steps=60)
    session = ENGINE.start(copy_of(run), {})
    losses = torch.cat([segment.losses for segment in session.segments(0, Bystander())])
    session.close()
    ours = train_natively(run, cache_folder, partitions=2)
    torch.testing.assert_close(ours.losses.float(), losses, rtol=1e-5, atol=0)
