"""Rows in host memory give the bits of rows on the device: in Triton's interpreter, and on a GPU from page-locked memory."""

from __future__ import annotations

import copy
import time

import numpy as np
import pytest
import torch

import onelaunch as ol
from onelaunch.engines.graph import streamed
from onelaunch.train import inputs
from onelaunch.train.inputs import make_run
from tests.engines.graph.harness import DEVICE, Silent, data, network, session, use_shape
from tests.reference import assert_same_weights

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTHS = [7, 8, 4]


def row_order(order: torch.Tensor, keys: torch.Tensor, seed: int, epoch: int) -> None:
    order.copy_(ol.permutation(len(order), seed, epoch))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter's rows are all on the CPU")
@pytest.mark.parametrize(("shape", "loss", "weighted"), [("small", "cross_entropy", True), ("large", "mse", False)])
def test_chunks_give_the_bits_of_all_rows(shape, loss, weighted, monkeypatch):
    use_shape(shape, monkeypatch)
    monkeypatch.setattr(streamed, "fill_row_order", row_order)
    monkeypatch.setattr(streamed, "CHUNK_BYTES", 2 * 8 * WIDTHS[0] * 4)  # two steps
    torch.manual_seed(0)
    x, y = data(WIDTHS, loss, 22)  # three steps per epoch, the last one of six rows
    options = {"epochs": 2, "batch_size": 8, "lr": 0.1, "optimizer": "adam", "loss": loss, "precision": "fp32"}
    options |= {"clip_norm": 0.1} if weighted else {}
    weights = torch.rand(22) if weighted else None
    model = network(WIDTHS, "relu", 0.2)
    twin = copy.deepcopy(model)
    whole = session(twin, x, y, options, validation=(x[:5], y[:5]), sample_weight=weights)
    expected = list(whole.segments(0, Silent()))
    whole.close()
    run = make_run(model, x, y, (x[:5], y[:5]), options, sample_weight=weights)
    chunked = streamed.StreamedSession(run, {}, capture=False)
    got = list(chunked.segments(0, Silent()))
    chunked.close()
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.losses, theirs.losses)
        assert (ours.first_step, ours.correct, ours.validation) == (
            theirs.first_step,
            theirs.correct,
            theirs.validation,
        )
        assert (ours.weights is None) == (not weighted)
    assert_same_weights(model, twin, 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["float32", "uint8", "memory-mapped"])
def test_rows_on_the_host_give_the_bits_of_rows_on_the_device(kind, precision, monkeypatch, tmp_path):
    monkeypatch.setattr(streamed, "CHUNK_BYTES", 2**22)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20_000, 96), dtype=np.float32)
    if kind == "uint8":
        x = (x * 40 + 128).clip(0, 255).astype(np.uint8)
    if kind == "memory-mapped":
        np.save(tmp_path / "x.npy", x)
        x = np.load(tmp_path / "x.npy", mmap_mode="r")
    y = rng.integers(10, size=20_000)
    runs = []
    for fraction in (0.6, 0.0):
        monkeypatch.setattr(inputs, "MAX_DEVICE_FRACTION", fraction)
        torch.manual_seed(0)
        model = network([96, 256, 128, 10], "relu", 0.1)
        history = ol.fit(
            model, x, y, epochs=2, batch_size=500, precision=precision, engine="graph", validation=(x[:700], y[:700]),
            progress=False,
        )  # fmt: skip
        assert ("rows in host memory" in history.plan) == (fraction == 0)
        runs.append((history.losses, [epoch["validation"] for epoch in history.epochs], model))
    assert runs[0][:2] == runs[1][:2]
    assert_same_weights(runs[0][2], runs[1][2], 0.0)


@pytest.mark.gpu
@pytest.mark.alone
def test_rows_on_the_host_cost_at_most_15_percent(monkeypatch):
    x = torch.rand(600_000, 784).numpy()
    y = np.resize(np.arange(10), len(x))
    seconds = {}
    for fraction in (0.6, 0.0):
        monkeypatch.setattr(inputs, "MAX_DEVICE_FRACTION", fraction)
        model = network([784, 512, 512, 512, 10], "relu")
        history = ol.fit(model, x, y, epochs=4, batch_size=1024, engine="graph", progress=False)
        seconds[fraction] = min(epoch["seconds"] for epoch in history.epochs)
        time.sleep(0.2)
    cost = seconds[0.0] / seconds[0.6] - 1
    print(f"rows on the host: {cost:+.1%} ({seconds})")
    assert cost <= 0.15
