"""All ops under torch.compile, torch.export, checkpointing, DDP and CUDA graphs, and with very large tensors."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onelaunch.nn import BatchNorm1d, CrossEntropyLoss, LayerNorm, Linear, ReLUDropout, RMSNorm
from onelaunch.ops import batch_norm, cross_entropy, layer_norm, relu_dropout, rms_norm
from onelaunch.ops.linear_choice import LIBRARY, force_implementation

# The autograd thread has no CUDA context yet if cuBLAS is the first to use it.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")


class Network(nn.Module):
    """Every op once; the loss is the output."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Linear(12, 16, activation="gelu", dropout=dropout),
            BatchNorm1d(16, activation="relu", dropout=dropout),
            nn.Linear(16, 16),
            ReLUDropout(dropout),
            LayerNorm(16, dropout=dropout),
            RMSNorm(16, eps=1e-3, dropout=dropout),
            nn.Linear(16, 5),
        )
        self.loss = CrossEntropyLoss()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layers(x), target)


def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(20, 12, device=device), torch.randint(5, (20,), device=device)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # the compiler's own
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compile_in_one_graph(device: torch.device, dropout: float) -> None:
    torch._dynamo.reset()
    model = Network(dropout).to(device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x, target = batch(device)
    with force_implementation(LIBRARY):
        for _ in range(2):
            torch.manual_seed(7)
            ours = compiled(x, target)
            ours.backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            model.zero_grad()
            torch.manual_seed(7)
            expected = model(x, target)
            expected.backward()
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
            for got, parameter in zip(gradients, model.parameters(), strict=True):
                torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-5)
            model.zero_grad()


def test_export(device: torch.device) -> None:
    model = Network(0.3).to(device).eval()
    with force_implementation(LIBRARY):
        exported = torch.export.export(model, batch(device))
        x, target = batch(device)
        torch.testing.assert_close(exported.module()(x, target), model(x, target))
    assert "onelaunch" in str(exported.graph)


def test_checkpoint_recomputes_the_same_mask(device: torch.device) -> None:
    parts = (Linear(12, 64, activation="gelu", dropout=0.5), ReLUDropout(0.5), LayerNorm(64, dropout=0.5))
    model = nn.Sequential(*parts).to(device)
    x = torch.randn(20, 12, device=device, requires_grad=True)
    gradients = []
    with force_implementation(LIBRARY):
        for recompute in (False, True):
            torch.manual_seed(3)
            y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
            gradients.append(torch.autograd.grad(y.square().sum(), x)[0])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_ddp(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Network(0.3))
        model(*batch(torch.device("cpu"))).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        del model
    finally:
        gc.collect()  # DDP must be freed before its group, as in run/distributed.py, or the two may wait for each other
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
def test_a_replayed_graph_draws_new_masks() -> None:
    x = torch.ones(64, 256, device="cuda", requires_grad=True)
    w = torch.eye(256, device="cuda")
    relu_dropout(x)
    graph = torch.cuda.CUDAGraph()
    with force_implementation(LIBRARY):
        Linear(256, 256, activation="relu", dropout=0.5).cuda()(x)
        with torch.cuda.graph(graph):
            y = relu_dropout(x, 0.5)
            (dx,) = torch.autograd.grad(y.sum(), x)
            z = batch_norm(
                x.detach() * torch.arange(64, device="cuda")[:, None], None, None, training=True, dropout=0.5
            )
            summed = layer_norm(x.detach(), dropout=0.5, return_sum=True)[1]
            from onelaunch.ops import linear

            linear_y = linear(x.detach(), w, activation="relu", dropout=0.5)
    masks = []
    for _ in range(2):
        graph.replay()
        assert torch.equal(dx, y.detach())  # 2 where kept, like the output
        masks.append([tensor.detach() != 0 for tensor in (y, z, summed, linear_y)])
    for first, second in zip(*masks, strict=True):
        assert not torch.equal(first, second)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    n = 2**31 + 4096
    x = torch.ones(n, device="cuda", dtype=torch.bfloat16)
    y = relu_dropout(x, 0.5)
    tail, head = y[-4096:].float(), y[:4096].float()
    assert set(tail.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(tail, head)
    assert abs((y[-(2**24) :] != 0).float().mean() - 0.5) < 1e-3
    y = rms_norm(x.view(-1, 4096), residual=x.view(-1, 4096))
    assert torch.equal(y[-1], x[-4096:])
    del y
    logits = x.view(-1, 4096).requires_grad_()
    target = torch.zeros(logits.shape[0], dtype=torch.int64, device="cuda")
    loss = cross_entropy(logits, target, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(
        gradient[-1, :2].float(), torch.tensor([1 / 4096 - 1, 1 / 4096], device="cuda"), rtol=1e-2, atol=0
    )
    del gradient, loss, logits
    z = batch_norm(
        x.view(-1, 4096), torch.zeros(4096, device="cuda"), torch.ones(4096, device="cuda"), activation="relu"
    )
    torch.testing.assert_close(z[-1].float(), torch.ones(4096, device="cuda"), rtol=1e-2, atol=0)


@pytest.mark.gpu
def test_two_launches_give_the_same_bits() -> None:
    x = torch.randn(3000, 257, device="cuda", requires_grad=True)
    w = torch.randn(257, device="cuda", requires_grad=True)
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        y = batch_norm(x, None, None, w, None, training=True, activation="silu", dropout=0.2)
        y = layer_norm(y, w, residual=x, dropout=0.2)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, w))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
