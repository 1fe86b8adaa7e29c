"""Fused models on a CUDA device: equal to the original, decided by measurement, explained with the kernels' resources."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.bench.measure import peak_bytes
from onelaunch.fuse import timing
from onelaunch.fuse.decide import NOISE
from onelaunch.fuse.verdict import force
from tests.fuse.test_everywhere import Network
from tests.fuse.test_explain import Block

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    timing._table.cache_clear()
    yield tmp_path / "onelaunch" / "fuse"
    timing._table.cache_clear()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_equal_on_the_device(dtype: torch.dtype, limit: float) -> None:
    model = Network().to("cuda", dtype)
    with force(True):
        fused = ol.fuse(model)
    x, target = torch.randn(256, 12, device="cuda", dtype=dtype), torch.randint(5, (256,), device="cuda")
    exact = Network().double().cuda()
    for mode in (True, False):
        exact.load_state_dict(model.state_dict())
        found = []
        for one, batch in ((fused, x), (exact, x.double())):
            loss = one.train(mode)(batch, target)
            found.append([loss, *torch.autograd.grad(loss, list(one.parameters()))])
        with torch.no_grad():
            found[0].append(fused(x))  # in evaluation mode: with the folded weights
            found[1].append(exact(x.double()))
        for ours, wanted in zip(*found, strict=True):
            error = (ours.double() - wanted).norm()
            assert error <= 5 * limit * max(wanted.norm().item(), 0.1), (mode, error)


def test_dropout_and_graph_capture() -> None:
    fused = ol.fuse(Network(0.5)).cuda()
    x = torch.randn(64, 12, device="cuda")
    fused(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fused(x)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(y.clone())
    assert not torch.equal(*seen)


def test_decisions_are_measured_once(cache: Path) -> None:
    model, x = Block().cuda(), torch.randn(4096, 32, device="cuda")
    buffers = [buffer.clone() for buffer in model.buffers()]
    explained = ol.explain(model, x, time="device")
    (file,) = cache.glob("chains-*.json")
    known = json.loads(file.read_text())
    assert known
    assert all(set(times) == {"apart", "fused"} for times in known.values())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    group = explained.groups[0]
    assert group.measured is not None
    assert group.memory is not None
    leaner = group.memory[1] < group.memory[0]
    assert group.fused == (group.measured[1] < group.measured[0] * (1 + NOISE if leaner else 1))
    if group.fused:
        assert all(kernel.registers > 0 and 0 < kernel.occupancy <= 1 for kernel in group.kernels)
        assert group.kernels
        assert "registers" in str(explained)
    again = ol.explain(model, x, time="device")
    assert again.groups[0].measured == group.measured
    predicted = ol.explain(model, x, device="A100")
    assert predicted.groups[0].measured is None


@pytest.mark.alone
def test_large_chain_pays_and_tiny_one_is_decided() -> None:
    model = nn.Sequential(nn.LayerNorm(4096), nn.ReLU(), nn.Dropout(0.5)).cuda()
    # Large enough that a slow host keeps up with the device, which takes 1.3 ms apart and 0.6 fused.
    (group,) = ol.explain(model, torch.randn(32768, 4096, device="cuda")).groups
    assert group.fused
    assert group.measured is not None
    assert group.measured[1] < group.measured[0]


def bert_block(rows: int) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    layers = nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768), nn.Dropout(0.1)
    x = torch.randn(rows, 768, device="cuda", dtype=torch.bfloat16)
    return nn.Sequential(*layers).to("cuda", torch.bfloat16), x, torch.randn_like(x)


def test_peak_memory_of_a_step_is_far_below_eager() -> None:
    """Bytes by the arithmetic of docs/fusing.md: y and its gradient are never there together, dz takes the memory of z."""
    rows = 8192
    model, x, dy = bert_block(rows)
    with force(True):
        fused = ol.fuse(model)

    def peak(network: nn.Module) -> int:
        def step() -> None:
            network(x).backward(dy)
            model.zero_grad()

        return peak_bytes(step)

    ours, eager = peak(fused), peak(model)
    wide, narrow, weight = rows * 3072 * 2, rows * 768 * 2, 768 * 3072 * 2
    assert ours < 2 * wide + 2 * narrow + weight + narrow // 16 + 2**20
    assert ours < 0.75 * eager


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_do_not_depend_on_whose_memory_they_take(hooked: bool) -> None:
    model, x, _ = bert_block(256)
    layer = model[0]
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    def forward() -> torch.Tensor:
        return ol.linear(x, layer.weight, layer.bias, activation="gelu")

    upstream = torch.randn(256, 3072, device="cuda", dtype=torch.bfloat16)
    if hooked:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = forward()
        before = [tensor.clone() for tensor in kept]
        torch.autograd.grad(y, list(layer.parameters()), upstream)
        assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))  # what a hook holds stays as it is
        return
    y = forward()
    first = torch.autograd.grad(y, list(layer.parameters()), upstream, retain_graph=True)
    second = torch.autograd.grad(y, list(layer.parameters()), upstream, retain_graph=True)
    third = torch.autograd.grad(y, list(layer.parameters()), upstream)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third, strict=True))
    exact = F.gelu(F.linear(x.double(), layer.weight.double(), layer.bias.double()))
    wanted = torch.autograd.grad(exact, list(layer.parameters()), upstream.double())
    assert all((got - true).norm() < 2e-2 * true.norm() for got, true in zip(third, wanted, strict=True))
