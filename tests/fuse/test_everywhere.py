"""What a fused model must survive: device moves, copies, pickles, DDP, autocast, checkpointing, compile, export."""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onelaunch as ol
from onelaunch.fuse import calls
from onelaunch.fuse.placing import fusion_of, regions
from onelaunch.fuse.verdict import force
from tests.conftest import ROOT
from tests.fuse.compare import assert_same

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


class Network(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout))
        self.last = nn.Linear(16, 5)
        self.first_again = [self.first]  # a list is no registered child, but it is the same module

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        logits = torch.tanh(self.last(self.first(x)))
        return logits if target is None else F.cross_entropy(logits, target)


def batch(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(20, 12, dtype=dtype), torch.randint(5, (20,))


def test_one_set_of_parameters_and_buffers() -> None:
    model = Network().double()
    fused = ol.fuse(model)
    assert isinstance(fused, Network)
    assert fused.first_again[0] is fused.first
    assert fused.first is not model.first
    x, target = batch()
    optimizer = torch.optim.SGD(fused.parameters(), lr=0.1)
    fused(x, target).backward()
    optimizer.step()
    for (name, a), (other, b) in zip(model.state_dict().items(), fused.state_dict().items(), strict=True):
        assert name == other
        assert a.data_ptr() == b.data_ptr()
    fused.to(torch.float32)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32, torch.int64}
    model.to(torch.float64)
    assert fused.last.weight.dtype == torch.float64
    model.load_state_dict(Network().double().state_dict())
    assert_same(model, fused, x, target)
    assert list(inspect.signature(fused.forward).parameters) == ["x", "target"]
    assert repr(fused) == repr(model)


def test_copies_and_pickles() -> None:
    model = Network().double()
    fused = ol.fuse(model)
    x, target = batch()
    buffer = io.BytesIO()
    torch.save(fused, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), torch.load(buffer, weights_only=False)]
    fused.eval()
    for one in copies:
        assert [region.path for region in regions(one)] == [region.path for region in regions(fused)]
        assert regions(one)[0].module is one
        assert regions(one)[0].fusion is fusion_of(one)
        assert ol.fuse(one) is one
        one.eval()
        torch.testing.assert_close(one(x), fused(x), rtol=0, atol=0)
        with torch.no_grad():
            next(one.parameters()).zero_()
        assert not torch.equal(one(x), fused(x))
    state = io.BytesIO()
    torch.save(fused.state_dict(), state)
    state.seek(0)
    fresh = Network().double()
    fresh.load_state_dict(torch.load(state))
    assert_same(fresh, ol.fuse(fresh), x, target)


def test_autocast() -> None:
    model = Network()
    fused = ol.fuse(model)
    x, target = batch(torch.float32)
    for mode in (True, False):
        model.train(mode)
        fused.train(mode)
        with torch.autocast("cpu", torch.bfloat16):
            ours, expected = fused(x), model(x)
            assert ours.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)
            assert fused(x, target).dtype == torch.float32


def test_checkpointing_recomputes_the_same_masks() -> None:
    fused = ol.fuse(Network(0.5)).double()
    x = batch()[0].requires_grad_()
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(3)
        y = checkpoint(fused, x, use_reentrant=False) if recompute else fused(x)
        gradients.append(torch.autograd.grad(y.square().sum(), x)[0])
    torch.testing.assert_close(gradients[0], gradients[1])


def ddp_gradients(store: str) -> None:
    """In a process of its own, which ends at once: gloo's threads and the reducer can wait for each other at its end."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    model = Network().double()
    x, target = batch()
    with force(True):
        wrapped = nn.parallel.DistributedDataParallel(ol.fuse(model))
    calls.plain_elsewhere = False
    wrapped(x, target).backward()
    got = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model(x, target).backward()
    for mine, parameter in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=0, atol=1e-12)
    print("the same gradients", flush=True)
    os._exit(0)


def test_ddp(tmp_path: Path) -> None:
    script = f"from tests.fuse.test_everywhere import ddp_gradients; ddp_gradients({str(tmp_path / 'store')!r})"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "the same gradients" in done.stdout, done.stderr[-2000:]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the compiler itself
def test_compiled_in_one_graph_with_the_fused_ops_in_it() -> None:
    torch._dynamo.reset()
    model = Network().double()
    fused = ol.fuse(model)
    x, _ = batch()
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: object) -> object:
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(fused, backend=keep, fullgraph=True)
    for mode in (True, False):
        model.train(mode)
        fused.train(mode)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-12)
        names = [str(node.target) for node in graphs[-1].graph.nodes]
        assert any("onelaunch.linear" in name for name in names)
        assert any("onelaunch.batch_norm" in name for name in names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_backend_of_torch_compile() -> None:
    torch._dynamo.reset()
    model = Network().double()
    x, target = batch()
    from onelaunch.fuse.backend import onelaunch

    rewritten: list[torch.fx.GraphModule] = []

    def spy(gm: torch.fx.GraphModule, inputs: list[object]) -> object:
        run = onelaunch(gm, inputs)
        rewritten.append(gm)
        return run

    compiled = torch.compile(model, backend=spy, fullgraph=True)
    for mode in (True, False):
        model.train(mode)
        assert_same_call(compiled, model, x, target)
    names = [node.meta.get("chain") for node in rewritten[0].graph.nodes if node.meta.get("chain")]
    assert names == ["batch_norm + relu + dropout", "linear + tanh", "cross_entropy"]
    assert "onelaunch" in torch._dynamo.list_backends(exclude_tags=())
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model.eval(), backend="onelaunch")(x), model(x), rtol=0, atol=1e-12)


def assert_same_call(compiled: nn.Module, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
    gradients = []
    state = copy.deepcopy(model.state_dict())
    for one in (compiled, model):
        model.load_state_dict(state)
        model.zero_grad()
        loss = one(x, target)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        gradients[-1] += [buffer.clone() for buffer in model.buffers()]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_settings_for_another_backend_are_said_to_be_that() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="has no use for mode='max-autotune': they are inductor's"):
        y = torch.compile(model, backend="onelaunch", mode="max-autotune")(x)
    torch.testing.assert_close(y, model(x), rtol=0, atol=1e-12)


def test_export() -> None:
    fused = ol.fuse(Network().double()).eval()
    x, _ = batch()
    exported = torch.export.export(fused, (x,))
    assert "onelaunch" in str(exported.graph)
    torch.testing.assert_close(exported.module()(x), fused(x), rtol=0, atol=1e-12)


def test_transforms_of_torch_func() -> None:
    model = Network().double().eval()
    fused = ol.fuse(model)
    x, target = batch()
    stacked = torch.stack([x, 2 * x])
    expected = torch.stack([model(x), model(2 * x)])
    torch.testing.assert_close(torch.func.vmap(fused)(stacked), expected, rtol=0, atol=1e-12)
    weights = {name: value.detach() for name, value in fused.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], network: nn.Module) -> torch.Tensor:
        return torch.func.functional_call(network, weights, (x, target))

    ours, theirs = (torch.func.grad(loss)(weights, network) for network in (fused, model))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-12)
    doubled = {name: 2 * value for name, value in weights.items()}
    with torch.no_grad():
        torch.testing.assert_close(loss(doubled, fused), loss(doubled, model), rtol=0, atol=1e-12)
        torch.testing.assert_close(loss(weights, fused), loss(weights, model), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Profiler clears events")  # PyTorch's own
def test_plain_pytorch_where_the_kernels_are_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "plain_elsewhere", True)
    model = Network().double()
    fused = ol.fuse(model)
    x, target = batch()
    assert_same(model, fused, x, target)
    assert "onelaunch" not in str(torch.export.export(fused, (x,)).graph)
    names = [event.name for event in profiled(lambda: fused(x, target).backward())]
    assert not any("onelaunch" in name for name in names)


def profiled(run: Callable[[], object]) -> list[torch.autograd.profiler_util.FunctionEvent]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return list(profile.events())


def test_scripted_child_is_shared() -> None:
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(12, 12), nn.ReLU()))
    model = nn.Sequential(scripted, nn.Linear(12, 12), nn.Tanh()).double()
    fused = ol.fuse(model)
    assert fused[0] is model[0]
    x, _ = batch()
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)
