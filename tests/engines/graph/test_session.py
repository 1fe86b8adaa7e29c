"""A run on the graph engine: it stops and continues, runs ahead of its results, and uses any source of memory."""

from __future__ import annotations

import pytest
import torch

import onelaunch as ol
from tests.engines.graph.harness import DEVICE, Silent, data, network, session, train
from tests.reference import assert_same_weights

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTHS = [7, 20, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["plan", "caching", "stream"])
def test_the_same_bits_from_every_source_of_memory(memory):
    torch.manual_seed(0)
    x, y = torch.randn(700, 96, device=DEVICE), torch.randint(10, (700,), device=DEVICE)
    runs = []
    for kind in ("plan", memory):
        torch.manual_seed(1)
        model = network([96, 200, 72, 10], "gelu", 0.1)
        ol.fit(
            model,
            x,
            y,
            epochs=3,
            batch_size=96,
            optimizer="sgd",
            lr=0.05,
            engine="graph",
            precision="bf16",
            memory=kind,
            progress=False,
        )
        runs.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*runs)


def test_stops_at_a_step_and_continues_from_its_state():
    options = {"steps": 4, "batch_size": 5, "lr": 0.05, "momentum": 0.9}
    x, y = data(WIDTHS, "cross_entropy", rows=14)  # three steps per epoch
    model, twin = network(WIDTHS, "relu", 0.2), network(WIDTHS, "relu", 0.2)
    twin.load_state_dict(model.state_dict())
    expected, _ = train(twin, x, y, options)
    part = session(model, x, y, options)
    first = next(part.segments(0, Silent(reports=1)))
    assert len(first.losses) == 2  # the reported step, and the one that was queued by then
    state = part.snapshot()
    part.close()
    assert set(state) == {f"momentum.{name}" for name in model.state_dict()}
    rest = session(model, x, y, options, state=state)
    got = torch.cat([first.losses, *(segment.losses for segment in rest.segments(2, Silent()))])
    rest.close()
    assert torch.equal(got, expected)
    assert_same_weights(model, twin, 0.0)


def test_epochs_run_ahead_of_their_results(monkeypatch):
    from onelaunch.engines.graph.session import GraphSession

    options = {"epochs": 3, "batch_size": 10, "lr": 0.05}
    x, y = data(WIDTHS, "cross_entropy", rows=10)
    model, twin = network(WIDTHS, "relu"), network(WIDTHS, "relu")
    twin.load_state_dict(model.state_dict())
    validation = (x[:5], y[:5])
    _, expected = train(twin, x, y, options, validation=validation)
    monkeypatch.setattr(GraphSession, "_is_short", lambda self, step: True)
    _, segments = train(model, x, y, options, validation=validation)
    for got, want in zip(segments, expected, strict=True):
        assert torch.equal(got.losses, want.losses)
        assert (got.first_step, got.correct, got.validation) == (want.first_step, want.correct, want.validation)
    assert_same_weights(model, twin, 0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
def test_stops_when_the_loss_is_not_finite():
    options = {"epochs": 1, "batch_size": 10, "lr": 1e30}
    x, y = data(WIDTHS, "cross_entropy")
    graph = session(network(WIDTHS, "relu"), x, y, options)
    segment = next(graph.segments(0, Silent()))
    graph.close()
    assert len(segment.losses) < 5
    assert not torch.isfinite(segment.losses[-1])
