"""`explain` and `fuse(model, x)` run a model to learn its sizes: the model stays as it was, and any model can be run."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from tests.fuse.test_guards import WIDE, Base, layer, rows


class Grows(nn.Module):
    """A cache of positions that grows with the batch, as rotary embeddings have it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._grow(rows)

    def _grow(self, rows: int) -> None:
        self.register_buffer("places", torch.arange(float(rows))[:, None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.places):  # type: ignore[arg-type]
            self._grow(len(x))
        return F.relu(self.linear(x)) + self.places[: len(x)]  # type: ignore[index]


class MakesItsMask(nn.Module):
    mask: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones_like(x)
        return F.relu(self.linear(x)) * self.mask


class WritesToItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return F.relu(self.linear(x))


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, value=x, dropout_p=self.dropout)


@pytest.mark.parametrize("make", [lambda: Grows(1), lambda: Grows(3), MakesItsMask], ids=["from one", "from 3", "mask"])
@pytest.mark.parametrize("inside", [False, True])
def test_buffers_that_a_forward_makes_or_grows_are_put_back(make: Any, inside: bool) -> None:
    model = nn.Sequential(make(), nn.Linear(4, 4), nn.ReLU()) if inside else make()
    x = torch.randn(8, 4)
    expected, before = copy.deepcopy(model)(x), copy.deepcopy(dict(model.named_buffers()))
    ol.explain(model, x)
    assert {name: len(buffer) for name, buffer in model.named_buffers()} == {
        name: len(buffer) for name, buffer in before.items()
    }
    fused = ol.fuse(model, x)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(fused(x), expected)


def test_a_forward_that_writes_to_weights_is_told() -> None:
    said = ol.explain(WritesToItsWeight(), torch.randn(3, 4)).notes
    assert any("writes to linear.weight" in note for note in said)
    assert not any("writes" in note for note in ol.explain(nn.Linear(4, 4), torch.randn(3, 4)).notes)


def test_attention_costs_what_one_kernel_does_whatever_the_cpu_runs() -> None:
    x = torch.randn(2, 4, 64, 8, requires_grad=True)
    plain, dropped = (ol.explain(Attention(p).train(), x).operations[0].work.forward for p in (0.0, 0.1))
    assert plain == dropped
    assert plain.launches == 1
    assert plain.bytes == 4 * x.numel() * 4
    assert plain.flops == 4 * 2 * 4 * 64 * 64 * 8


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_compiled_model_is_explained_and_said_to_stay_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert "compiled" in ol.explain(torch.compile(model), torch.randn(3, 4)).notes[0]


def test_a_module_without_a_forward_is_named() -> None:
    with pytest.raises(ol.OnelaunchError, match="ModuleList, which has no forward"):
        ol.explain(nn.ModuleList([nn.Linear(4, 4)]), torch.randn(3, 4))


@pytest.mark.parametrize("columns", [80, 200])
def test_print_and_prompt_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    explanation = ol.explain(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4))
    assert max(map(len, str(explanation).splitlines())) <= columns
    assert repr(explanation) == str(explanation)


class Initialises(Base):
    """By its first batch, as ActNorm does; and keeps a record of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDE, dtype=torch.float64))
        self.tail = nn.Sequential(layer(), nn.ReLU())
        self.ready, self.steps = False, 0
        self.seen: dict[str, list[float]] = {"means": []}
        self.cache = torch.zeros(2, WIDE, dtype=torch.float64)
        self.frozen = torch.eye(WIDE, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.seen["means"].append(random.random())
        self.cache[0] += 1
        if not self.ready:
            self.shift.data.view(2, -1).copy_(-x.mean(0).view(2, -1))
            self.fc.weight.data = self.frozen
            self.ready = True
        return self.tail(self.fc(x + self.shift))


@pytest.mark.usefixtures("one_thread", "every_chain")
@pytest.mark.parametrize("run", [ol.explain, ol.fuse])
def test_a_trial_run_leaves_nothing_behind(run: Callable[..., Any]) -> None:
    model, x = Initialises(), rows()
    before, numbers, memory = copy.deepcopy(model), random.getstate(), model.fc.weight.data_ptr()
    result = run(model, x)
    assert random.getstate() == numbers
    models: list[Any] = [model, result] if isinstance(result, nn.Module) else [model]
    for one in models:
        assert (one.ready, one.steps, one.seen) == (False, 0, {"means": []})
        assert not one.cache.any()
        assert not one.shift.any()
        assert torch.equal(one.frozen, torch.eye(WIDE, dtype=torch.float64))
        assert torch.equal(one.fc.weight, before.fc.weight)
        assert one.fc.weight.data_ptr() == memory
    if isinstance(result, nn.Module):
        torch.testing.assert_close(result(x), before(x), rtol=0, atol=1e-12)
    else:
        assert any("writes to cache" in note for note in result.notes)
