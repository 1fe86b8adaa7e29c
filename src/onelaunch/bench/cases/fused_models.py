"""Models made faster by `ol.fuse` alone, in evaluation and in training, against torch.compile and eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onelaunch.bench.case import Trial, Work, case
from onelaunch.bench.cases.models import AUTOTUNE_MODE, MAX_AUTOTUNE, REDUCE_OVERHEAD, SAMPLES, Make
from onelaunch.bench.contenders import COMPILED, EAGER
from onelaunch.bench.measure import cuda_device
from onelaunch.bench.model_zoo import Workload, bert, mlp, resnet
from onelaunch.bench.peers_torch import Steps
from onelaunch.bench.step_peers import timed
from onelaunch.fuse import fuse

Forward = Callable[[], Any]
CALLS = 20  # per sample
PEERS = {REDUCE_OVERHEAD: "reduce-overhead", COMPILED: "default"}
# Errors against fp32, as a multiple of eager's, plus a share of the largest value for results that eager gets exactly.
FACTOR, SHARE = 2.0, 2e-3


def _inputs(workload: Workload) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model that returns its loss takes everything by name; the others take all but the target."""
    return ((), workload.arguments[0]) if workload.loss is None else (workload.arguments[:-1], {})


def _evaluated(workload: Workload, model: nn.Module) -> Forward:
    args, kwargs = _inputs(workload)

    def forward() -> Any:
        with torch.no_grad():
            return model(*args, **kwargs)

    return forward


def trained(workload: Workload, model: nn.Module) -> Forward:
    """Forward, loss and backward; the gradients are dropped, as `zero_grad` does."""
    args, kwargs = _inputs(workload)

    def forward_backward() -> torch.Tensor:
        output = model(*args, **kwargs)
        loss: torch.Tensor = output.loss if workload.loss is None else workload.loss(output, workload.arguments[-1])
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return forward_backward


def _contender(make: Make, training: bool, made: Callable[[Workload], nn.Module]) -> Forward:
    torch.manual_seed(0)
    workload = make(False)
    workload.model.train(training)
    with torch.set_grad_enabled(training):
        model = made(workload)
    return (trained if training else _evaluated)(workload, model)


def fused(workload: Workload) -> nn.Module:
    args, kwargs = _inputs(workload)
    return fuse(workload.model, *args, **kwargs)


def compiled_in(mode: str) -> Callable[[Workload], nn.Module]:
    return lambda workload: torch.compile(workload.model, mode=mode)  # type: ignore[return-value]


def _logits(output: Any) -> torch.Tensor:
    value = output if isinstance(output, torch.Tensor) else output.logits
    assert isinstance(value, torch.Tensor)
    return value.float()


def check_outputs(make: Make) -> None:
    """In evaluation the fused model's outputs are as near to those in fp32 as eager's."""
    torch.manual_seed(0)
    workload = make(True)
    workload.model.eval()
    args, kwargs = _inputs(workload)
    wide = copy.deepcopy(workload.model).float()
    floats = tuple(value.float() if value.is_floating_point() else value for value in args)
    with torch.no_grad():
        exact = _logits(wide(*floats, **kwargs))
        eager = _logits(workload.model(*args, **kwargs))
        ours = _logits(fuse(workload.model, *args, **kwargs)(*args, **kwargs))
    error, eager_error = ((value - exact).abs().max().item() for value in (ours, eager))
    limit = FACTOR * eager_error + SHARE * exact.abs().max().item()
    assert error <= limit, f"outputs differ from fp32 by {error:.2g}, eager's by {eager_error:.2g}"


def _trial(make: Make, training: bool) -> Trial:
    cuda_device()
    make(True)  # skips the case if a library is missing

    def work(made: Callable[[Workload], nn.Module]) -> Work:
        def built() -> Steps:
            call = _contender(make, training, made)

            def run(count: int) -> None:
                for _ in range(count):
                    call()

            return run

        return timed(built, CALLS, CALLS)

    peers = {name: work(compiled_in(mode)) for name, mode in PEERS.items()}
    peers[EAGER] = work(lambda workload: workload.model)
    return Trial(
        work(fused), lambda: check_outputs(make), peers,
        slow_peers={MAX_AUTOTUNE: work(compiled_in(AUTOTUNE_MODE))},
        cuda=True, self_timed=True, repeats=SAMPLES,
    )  # fmt: skip


def _register(name: str, about: str, make: Make, training: bool = False) -> None:
    what = "forward and backward" if training else "evaluation"
    case(f"models/{name}", "models", f"{what} of {about}", unit="call")(lambda: _trial(make, training))


_register("eval-mlp", "a 6-layer MLP, 1024 wide, batch 64, bf16, by ol.fuse", mlp)
_register("eval-bert", "BERT-base, 32 x 128 tokens, bf16, by ol.fuse", bert)
_register("eval-resnet", "ResNet-50, batch 64, channels last, bf16, by ol.fuse", resnet)
_register("fuse-bert", "BERT-base, 32 x 128 tokens, bf16, by ol.fuse", bert, training=True)
_register("fuse-resnet", "ResNet-50, batch 64, channels last, bf16, by ol.fuse", resnet, training=True)
