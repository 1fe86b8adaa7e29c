"""Whole training steps of real models by `ol.train_step`, against torch.compile and eager PyTorch, also as one CUDA graph.

A step is forward, loss, backward and optimizer. Times are what a program sees: several steps, then one wait for the device.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from onelaunch.bench import model_zoo
from onelaunch.bench.case import OURS, Trial, Work, case
from onelaunch.bench.contenders import COMPILED, EAGER
from onelaunch.bench.measure import cuda_device
from onelaunch.bench.model_zoo import Workload
from onelaunch.bench.peers_torch import Steps
from onelaunch.bench.step_peers import COMPILED_GRAPH, GRAPH, timed
from onelaunch.capture.graph import capturing
from onelaunch.format import format_seconds
from onelaunch.integers import clamp
from onelaunch.step.train_step import TrainStep, train_step

Make = Callable[[bool], Workload]
Step = Callable[..., torch.Tensor]  # one training step, as `train_step` returns it
REDUCE_OVERHEAD, MAX_AUTOTUNE = "torch.compile reduce-overhead", "torch.compile max-autotune-no-cudagraphs"
LR = 1e-5
CHECKED_STEPS, CHECKED_LR, SLACK, FP32_SLACK = 6, 1e-3, 0.02, 1e-4
SAMPLES = 8
HOST_CALLS = 50  # at most
HOST_SECONDS = 5e-3  # of the device's work at most: its queue of launches must not fill up


def our_step(workload: Workload, optimizer: torch.optim.Optimizer) -> TrainStep:
    return train_step(workload.model, workload.loss, optimizer)


def torch_step(workload: Workload, optimizer: torch.optim.Optimizer, mode: str | None = None) -> Step:
    """The step of a PyTorch user; `mode` is that of torch.compile, or None for eager."""
    model, loss = workload.model, workload.loss

    def forward(*arguments: Any) -> torch.Tensor:
        return model(**arguments[0]).loss if loss is None else loss(model(*arguments[:-1]), arguments[-1])

    function = forward if mode is None else torch.compile(forward, mode=mode)

    def step(*arguments: Any) -> torch.Tensor:
        value = function(*arguments)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach().clone()  # reduce-overhead writes the next loss to the same memory

    return step


def captured_step(workload: Workload, optimizer: torch.optim.Optimizer, mode: str | None = None) -> Step:
    """The same step recorded as one CUDA graph by hand, as PyTorch's documentation shows it.

    The result keeps the model and the optimizer alive: the graph holds their addresses only.
    """
    step, stream = torch_step(workload, optimizer, mode), torch.cuda.Stream()
    static = tree_leaves(workload.arguments)
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*workload.arguments)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, stream=stream):
        loss = step(*workload.arguments)

    def replay(*arguments: Any, kept: object = step) -> torch.Tensor:
        for target, source in zip(static, tree_leaves(arguments), strict=True):
            target.copy_(source)
        graph.replay()
        return loss.clone()

    return replay


AUTOTUNE_MODE = "max-autotune-no-cudagraphs"
PEERS: dict[str, Callable[..., Step]] = {
    EAGER: torch_step,
    COMPILED: functools.partial(torch_step, mode="default"),
    GRAPH: captured_step,
    COMPILED_GRAPH: functools.partial(captured_step, mode="default"),
    REDUCE_OVERHEAD: functools.partial(torch_step, mode="reduce-overhead"),
}
SLOW_PEERS: dict[str, Callable[..., Step]] = {
    MAX_AUTOTUNE: functools.partial(torch_step, mode=AUTOTUNE_MODE),
    f"{GRAPH}, max-autotune": functools.partial(captured_step, mode=AUTOTUNE_MODE),
}


def optimizer_of(workload: Workload, lr: float) -> torch.optim.Optimizer:
    parameters = workload.model.parameters()
    fused = next(iter(workload.model.parameters())).is_cuda
    if isinstance(workload.loss, torch.nn.MSELoss):  # the DQN network
        return torch.optim.Adam(parameters, lr, fused=fused, capturable=fused)
    return torch.optim.AdamW(parameters, lr, fused=fused, capturable=fused)


def _built(
    make: Make, contender: Callable[..., Step], name: str, peaks: dict[str, int]
) -> tuple[Step, tuple[Any, ...]]:
    """A contender's step, compiled and recorded, and its arguments; its peak of memory is added to `peaks`.

    A recorded step allocates while it is recorded only: ours in its third call, PyTorch's in `captured_step`. The steps before,
    which compile, are not counted.
    """
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    workload = make(False)
    step = contender(workload, optimizer_of(workload, LR))
    if getattr(contender, "func", contender) is not captured_step:
        step(*workload.arguments)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step(*workload.arguments)
    torch.cuda.synchronize()
    peaks[name] = torch.cuda.max_memory_allocated() - before
    reason = getattr(step, "reason", "")
    assert not reason, f"the step is not recorded: {reason}"
    return step, workload.arguments


def losses_of(workload: Workload, contender: Callable[..., Step]) -> list[float]:
    """Losses of the first steps, all on the same batch."""
    step = contender(workload, optimizer_of(workload, CHECKED_LR))
    return [step(*workload.arguments).item() for _ in range(CHECKED_STEPS)]


def check_losses(make: Make) -> None:
    """With a small model and without dropout, our losses are as near to those in fp32 as eager's, up to rounding to bf16.

    All steps see the same batch, so that the loss falls fast, and a wrong gradient or update would show.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    exact, eager, ours = (make(True) for _ in range(3))
    for other in (eager, ours):
        other.model.load_state_dict(exact.model.state_dict())
    arguments = exact.arguments
    exact.model.float()
    found = {
        "exact": losses_of(exact._replace(arguments=_in_fp32(arguments)), torch_step),
        "eager": losses_of(eager._replace(arguments=arguments), torch_step),
        OURS: losses_of(ours._replace(arguments=arguments), our_step),
    }
    error, eager_error = (_largest_error(found[name], found["exact"]) for name in (OURS, "eager"))
    bf16 = next(iter(eager.model.parameters())).dtype == torch.bfloat16
    assert error <= 2 * eager_error + (SLACK if bf16 else FP32_SLACK), f"losses differ: {found}"


def _largest_error(losses: list[float], exact: list[float]) -> float:
    """The largest difference of a step's loss, relative to the first loss; infinite for NaN."""
    errors = [abs(loss - other) / abs(exact[0]) for loss, other in zip(losses, exact, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _in_fp32(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple(map(wide, arguments))


def _host_seconds(step: Step, arguments: tuple[Any, ...]) -> float:
    """Seconds of the host per call of our step, while the device works."""

    def seconds(calls: int, wait: bool) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            step(*arguments)
        if wait:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / calls

    return seconds(clamp(1, int(HOST_SECONDS / seconds(1, True)), HOST_CALLS), False)


def _trial(make: Make, steps: int) -> Trial:
    cuda_device()
    make(True)  # skips the case if a library is missing
    peaks: dict[str, int] = {}
    notes: dict[str, str] = {}

    def work(name: str, contender: Callable[..., Step]) -> Work:
        def built() -> Steps:
            step, arguments = _built(make, contender, name, peaks)
            if name == OURS:
                notes["host time of our call"] = format_seconds(_host_seconds(step, arguments))

            def run(count: int) -> None:
                for _ in range(count):
                    step(*arguments)

            return run

        return timed(built, steps, steps)

    return Trial(
        work(OURS, our_step), lambda: check_losses(make), {name: work(name, peer) for name, peer in PEERS.items()},
        slow_peers={name: work(name, peer) for name, peer in SLOW_PEERS.items()}, cuda=True, self_timed=True,
        repeats=SAMPLES, peak_bytes=peaks, notes=notes,
    )  # fmt: skip


def _register(name: str, about: str, make: Make, steps: int = 10) -> None:
    case(f"models/{name}", "models", f"training step of {about}")(lambda: _trial(make, steps))


_register("bert", "BERT-base, 32 x 128 tokens, bf16, AdamW", model_zoo.bert)
_register("gpt2", "GPT-2 small, 8 x 1024 tokens, bf16, AdamW", model_zoo.gpt2)
_register("vit", "ViT-B/16, batch 32, dropout 0.1, bf16, AdamW", model_zoo.vit)
_register("resnet", "ResNet-50, batch 64, channels last, bf16, AdamW", model_zoo.resnet)
_register("llama", "a Llama-like model, 8 layers, 1024 wide, 8 x 1024 tokens, bf16, AdamW", model_zoo.llama)
_register("mixer", "MLP-Mixer B/16, batch 32, bf16, AdamW", model_zoo.mixer)
_register(
    "encoder", "nn.TransformerEncoder, 6 layers, 512 wide, dropout 0.1, 64 x 256 tokens, bf16, AdamW", model_zoo.encoder
)
_register("dqn", "an MLP 8-64-64-4, batch 256, fp32, Adam", model_zoo.dqn, steps=500)
# Models that were first looked at when the patterns were there; some have changed a pattern since.
_register("more/distilbert", "DistilBERT, 32 x 128 tokens, bf16, AdamW", model_zoo.distilbert)
_register("more/roberta", "RoBERTa with its language-model head, 32 x 128 tokens, bf16, AdamW", model_zoo.roberta)
_register("more/t5", "T5, 6 + 6 layers, 512 wide, 16 x 256 tokens, bf16, AdamW", model_zoo.t5)
_register("more/neox", "GPT-NeoX, 8 layers, 768 wide, 8 x 1024 tokens, bf16, AdamW", model_zoo.neox)
_register(
    "more/masked-encoder", "a language model of nn.TransformerEncoder with a causal mask, 6 layers, 512 wide, "
    "16 x 512 tokens, bf16, AdamW", model_zoo.masked_encoder,
)  # fmt: skip
_register("more/convnext", "ConvNeXt-T, batch 64, channels last, bf16, AdamW", model_zoo.convnext)
_register("more/vgg", "VGG-16 with batch norm, batch 64, channels last, bf16, AdamW", model_zoo.vgg)
_register("more/ppo", "an actor and a critic 17-64-64-6, batch 512, PPO's loss, fp32, AdamW", model_zoo.ppo, steps=500)
_register("more/swin", "Swin-T, batch 32, bf16, AdamW", model_zoo.swin)
