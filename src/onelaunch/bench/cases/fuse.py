"""Fused models against PyTorch eager, torch.compile and a CUDA graph of eager: device time and peak memory of whole steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from onelaunch.bench.case import Trial, Work, case
from onelaunch.bench.measure import cuda_device
from onelaunch.capture import capturing
from onelaunch.fuse import fuse

WIDTH, LAYERS, TRAINING_ROWS, INFERENCE_ROWS = 4096, 6, 8192, 64
BERT_ROWS, BERT_HIDDEN, BERT_INNER = 32 * 512, 768, 3072
CALLS = 4  # inferences per sample: the host launches all of them within the lead that `measure` gives it
DTYPE = torch.bfloat16


def mlp(dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise([WIDTH] * (LAYERS + 1)):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(dropout)]
    return _in_bf16(nn.Sequential(*layers))


def bert_block(dropout: float) -> nn.Sequential:
    layers = nn.Linear(BERT_HIDDEN, BERT_INNER), nn.GELU(), nn.Linear(BERT_INNER, BERT_HIDDEN), nn.Dropout(dropout)
    return _in_bf16(nn.Sequential(*layers))


def _in_bf16(model: nn.Sequential) -> nn.Sequential:
    """Products in bf16; batch norms keep their parameters and statistics in fp32."""
    model = model.to("cuda", DTYPE)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.float()
    return model


def _check(make: Callable[[float], nn.Sequential], rows: int, width: int) -> None:
    """Without dropout, the fused model's output and gradients are as close to float64 as eager's, in both modes."""
    model = make(0.0)
    x = torch.randn(rows, width, device="cuda", dtype=DTYPE)
    fused = fuse(model, x, time="device")
    for training in (True, False):
        exact = make(0.0).double()
        exact.load_state_dict(model.state_dict())
        results = {}
        for name, one in (("fused", fused), ("eager", model), ("exact", exact)):
            one.train(training)
            y = one(x.double() if one is exact else x)
            parameters = [p for p in one.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(y, parameters, torch.ones_like(y) / rows) if training else ()
            results[name] = [y.detach(), *gradients]
        for index, expected in enumerate(results["exact"]):
            scale = expected.norm().clamp_min(1e-30)
            ours, eager = (
                ((results[name][index].double() - expected).norm() / scale).item() for name in ("fused", "eager")
            )
            # The gradient of a bias before a batch norm is rounding error only.
            assert ours < 2 * eager + 1e-3 or scale < 1e-6, (
                f"result {index} differs by {ours:.1e}, eager's by {eager:.1e}"
            )


def _training(make: Callable[[float], nn.Sequential], rows: int, width: int) -> Trial:
    cuda_device()
    model = make(0.1).train()
    x = torch.randn(rows, width, device="cuda", dtype=DTYPE)
    dy = torch.randn(rows, width, device="cuda", dtype=DTYPE) / rows
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(network: Callable[[torch.Tensor], torch.Tensor]) -> Work:
        def work() -> None:
            network(x).backward(dy)
            optimizer.step()
            optimizer.zero_grad()

        return work

    ours = step(fuse(model, x, time="device").train())  # this case measures device time
    peers = {"torch eager": step(model), "torch.compile": step(torch.compile(model))}
    return Trial(ours, lambda: _check(make, rows, width), peers, cuda=True, memory={"onelaunch": ours, **peers})


@case(
    "fuse/mlp-training", "fuse", "training step of a 6-layer MLP, 4096 wide, BatchNorm, Dropout, batch 8192, bf16, SGD"
)
def _mlp_training() -> Trial:
    return _training(mlp, TRAINING_ROWS, WIDTH)


@case("fuse/bert-mlp-training", "fuse", "training step of BERT-base's MLP block, dropout, 32 x 512 tokens, bf16, SGD")
def _bert_training() -> Trial:
    return _training(bert_block, BERT_ROWS, BERT_HIDDEN)


@case("fuse/mlp-inference", "fuse", "the 6-layer MLP in evaluation mode, batch 64, bf16", unit="call")
def _mlp_inference() -> Trial:
    cuda_device()
    model = mlp(0.1).eval()
    x = torch.randn(INFERENCE_ROWS, WIDTH, device="cuda", dtype=DTYPE)
    fused = fuse(model, x, time="device").eval()

    def calls(network: Callable[[torch.Tensor], torch.Tensor], times: int = CALLS) -> Work:
        def work() -> None:
            with torch.no_grad():
                for _ in range(times):
                    network(x)

        return work

    def graphed(network: Callable[[torch.Tensor], torch.Tensor]) -> Work:
        calls(network, 3)()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            calls(network)()
        return graph.replay

    compiled = torch.compile(model)
    peers = {"torch eager": calls(model), "torch.compile": calls(compiled), "CUDA graph of eager": graphed(model)}
    memory = {"onelaunch": calls(fused, 1), "torch eager": calls(model, 1), "torch.compile": calls(compiled, 1)}
    return Trial(calls(fused), lambda: _check(mlp, INFERENCE_ROWS, WIDTH), peers, units=CALLS, cuda=True, memory=memory)
