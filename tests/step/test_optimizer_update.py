"""Our update in a recording, against the step of `torch.optim`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from onelaunch.capture.graph import capturing
from onelaunch.step import capturable_optimizer
from tests.conftest import TOLERANCE

SHAPES = ((3,), (1,), (4096,), (4097,), (65, 129), (2, 3, 5, 7), (1000, 300), ())
OPTIONS: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True, "eps": 1e-3}),
    (torch.optim.AdamW, {"weight_decay": 0.3, "betas": (0.8, 0.97)}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.8, "dampening": 0.3, "maximize": True}),
)
CHANGES = {
    "betas": (0.7, 0.95), "eps": 1e-2, "weight_decay": 0.01, "momentum": 0.6, "dampening": 0.0, "lr": 0.02,
}  # fmt: skip


def gradients_of(parameters: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator("cuda").manual_seed(step)
    for parameter in parameters:
        drawn = torch.rand(parameter.shape, device="cuda", generator=generator) - 0.5
        drawn += drawn.sign() / 2  # the squares of small numbers would be 0 in fp16
        parameter.grad = torch.empty_like(parameter).copy_(drawn)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("make", "options"), OPTIONS)
def test_torchs_own_step_gives_the_same(
    make: type[torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Also when settings change after the recording: the kernel reads them."""
    from onelaunch.step.optimizer_update import optimizer_update

    torch.manual_seed(1)
    ours = [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in SHAPES]
    ours[5].data = ours[5].data.to(memory_format=torch.channels_last)
    theirs = copy.deepcopy(ours)
    mine, other = (make(each, lr=0.05, **options) for each in (ours, theirs))
    capturable = capturable_optimizer.CapturableOptimizer(mine, torch.device("cuda"))
    capturable.prepare()
    for step in range(3):  # the optimizers' own steps
        for each, optimizer in ((ours, mine), (theirs, other)):
            gradients_of(each, step)
            optimizer.step()
    capturable.prepare()  # for the state that there is now
    update = optimizer_update(mine, capturable.rates, capturable.settings, None)
    assert update is not None
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        update.launch()
    update.fill_tables()
    static = [parameter.grad for parameter in ours]
    for step in range(3, 40):
        if step == 20:
            for optimizer in (mine, other):
                (group,) = optimizer.param_groups
                group.update({name: value for name, value in CHANGES.items() if group.get(name)})
        assert capturable.ready()
        gradients_of(theirs, step)
        for target, source in zip(static, theirs, strict=True):
            assert target is not None and source.grad is not None  # noqa: PT018
            target.copy_(source.grad)
        other.step()
        graph.replay()
    rtol, atol = TOLERANCE[dtype]
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=10 * rtol, atol=10 * atol)
        for name, value in mine.state[one].items():
            torch.testing.assert_close(
                value.cpu(), other.state[two][name].cpu(), rtol=10 * rtol, atol=10 * atol, msg=name
            )


def test_a_gradient_that_is_copied_stays_in_its_place() -> None:
    """Other recordings add to it (`accumulate`)."""
    from onelaunch.step.optimizer_update import ALIGNMENT, _as_laid_out

    for gradient in (torch.randn(64, 32).t(), torch.randn(1 + 32 * 64)[1:].view(32, 64)):
        parameter = torch.nn.Parameter(torch.zeros(32, 64))
        parameter.grad = gradient
        laid_out = _as_laid_out(parameter)
        assert parameter.grad is gradient
        assert (laid_out.stride(), laid_out.data_ptr() % ALIGNMENT) == (parameter.stride(), 0)
        assert torch.equal(laid_out, gradient)


@pytest.mark.gpu
def test_a_gradient_in_another_layout_is_copied_and_others_are_refused() -> None:
    from onelaunch.step.optimizer_update import optimizer_update

    parameter = torch.nn.Parameter(torch.randn(64, 32, device="cuda"))
    other = torch.nn.Parameter(parameter.detach().clone())
    mine, theirs = (torch.optim.Adam([one], lr=0.1) for one in (parameter, other))
    capturable = capturable_optimizer.CapturableOptimizer(mine, torch.device("cuda"))
    capturable.prepare()
    capturable.upload()
    for optimizer, one in ((mine, parameter), (theirs, other)):
        one.grad = torch.ones_like(one)
        optimizer.step()
    update = optimizer_update(mine, capturable.rates, capturable.settings, None)
    assert update is not None
    gradient = torch.randn(32, 64, device="cuda").t()
    parameter.grad = gradient
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        update.launch()
    update.fill_tables()
    graph.replay()
    other.grad = gradient.contiguous()
    theirs.step()
    torch.testing.assert_close(parameter, other)

    def refused(made: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> bool:
        return optimizer_update(made, capturable.rates, capturable.settings, scaler) is None

    assert refused(torch.optim.RMSprop([parameter]))
    assert refused(torch.optim.Adam([parameter], amsgrad=True))
    assert refused(torch.optim.SGD([parameter], momentum=0.9))  # there is a gradient, but no momentum yet
    assert refused(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]))
    assert refused(mine, torch.amp.GradScaler("cuda"))
