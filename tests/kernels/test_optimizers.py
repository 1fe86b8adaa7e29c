"""The kernels of optimizers on tables of tensors, against `torch.optim`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import TOLERANCE
from tests.kernels.conftest import kernel_cases

SIZES = 1, 5, 4096, 4097, 9000
RULES: dict[str, tuple[Any, str, tuple[bool, ...], dict[str, Any], tuple[float, ...]]] = {
    "adam": (torch.optim.Adam, "adam", (False, True), {"weight_decay": 0.1, "maximize": True}, (0.9, 0.999, 1e-8, 0.1)),
    "adamw": (torch.optim.AdamW, "adam", (True, False), {"weight_decay": 0.3}, (0.9, 0.999, 1e-8, 0.3)),
    "sgd": (torch.optim.SGD, "sgd", (False, False, True), {"weight_decay": 0.2, "maximize": True}, (0, 0, 0.2)),
    "momentum": (torch.optim.SGD, "sgd", (True, False, False), {"momentum": 0.8, "dampening": 0.3}, (0.8, 0.3, 0)),
    "plain adam": (torch.optim.Adam, "adam", (False, False), {}, (0.9, 0.999, 1e-8, 0)),
    "nesterov": (torch.optim.SGD, "sgd", (True, True, False), {"momentum": 0.8, "nesterov": True}, (0.8, 0, 0)),
}


@pytest.mark.parametrize(("device", "dtype", "name"), kernel_cases(tuple(RULES)))
def test_a_table_of_tensors(device: torch.device, dtype: torch.dtype, name: str) -> None:
    from onelaunch.kernels import optimizers

    kind, rule, options, arguments, settings = RULES[name]
    torch.manual_seed(0)
    theirs = [torch.nn.Parameter(torch.randn(size, device=device).to(dtype)) for size in SIZES]
    optimizer = kind(theirs, lr=0.1, **arguments)

    def draw_gradients() -> None:
        for one in theirs:
            drawn = torch.rand(one.shape, device=device) - 0.5
            one.grad = (drawn + drawn.sign() / 2).to(dtype)  # the squares of small numbers would be 0 in fp16

    draw_gradients()
    optimizer.step()
    draw_gradients()
    names = optimizers.STATE[rule] if optimizer.state[theirs[0]] else ()
    if not settings[-1]:  # a mask: without a gradient and weight decay it stays
        theirs[-1].data[5] = -torch.inf
        theirs[-1].grad[5] = 0  # type: ignore[index]
    padded = [torch.cat([one.detach(), one.new_full((7,), torch.nan)]) for one in theirs]  # nothing is written behind
    gradients = [one.grad.clone() for one in theirs if one.grad is not None]  # PyTorch's step may change them
    states = [[optimizer.state[one][state].clone() for state in names] for one in theirs]
    rows = []
    for weight, gradient, size, state in zip(padded, gradients, SIZES, states, strict=True):
        if "step" in names:
            state[-1] = (state[-1] + 1).to(device)
        row = [size, *(tensor.data_ptr() for tensor in (weight, gradient, *state))]
        rows.append(row + [0] * (optimizers.COLUMNS - len(row)))
    optimizer.step()

    chunks = [(row, chunk) for row, size in enumerate(SIZES) for chunk in range(-(-size // optimizers.CHUNK))]
    optimizers.update(
        rule, options, torch.tensor(rows, device=device), torch.tensor(chunks, dtype=torch.int32, device=device),
        torch.tensor(settings, dtype=torch.float64, device=device), torch.tensor(0.1, device=device), len(chunks), dtype,
    )  # fmt: skip
    rtol, atol = TOLERANCE[dtype]
    for one, weight, state in zip(theirs, padded, states, strict=True):
        torch.testing.assert_close(weight[: one.numel()], one.detach(), rtol=rtol, atol=atol)
        assert weight[one.numel() :].isnan().all()
        for found, key in zip(state, names, strict=True):
            torch.testing.assert_close(found, optimizer.state[one][key].to(device), rtol=rtol, atol=atol, msg=key)
