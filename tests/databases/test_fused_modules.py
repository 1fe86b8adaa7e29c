"""`ol.fuse` of every module of PyTorch's database, with every match replaced, against the plain module."""

from __future__ import annotations

import copy

import pytest
import torch

import onelaunch as ol
from onelaunch.errors import OnelaunchError
from onelaunch.fuse import decide
from tests.databases.compare import assert_same
from tests.databases.exceptions import parameters
from tests.databases.module_cases import Case, cases, copy_of, is_lazy, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch warns of settings that it finds unwise


@pytest.fixture(autouse=True)
def forced(no_code: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without code generation, and whether a match pays or not."""
    original = decide.onelaunch
    monkeypatch.setattr(decide, "onelaunch", lambda gm, inputs, **options: original(gm, inputs, forced=True, **options))


@pytest.mark.parametrize(("case", "device"), parameters("fuse", cases()))
def test_a_fused_module_computes_what_it_does_unfused(case: Case, device: str) -> None:
    module, args, kwargs = case.make(device)
    if is_lazy(module):
        with pytest.raises(OnelaunchError, match="call it on a batch first"):
            ol.fuse(module)
        module(*args, **kwargs)
    other, inputs, others = copy.deepcopy(module), (args, kwargs), copy_of((args, kwargs))
    fused = ol.fuse(module)
    torch.manual_seed(1)
    expected = other(*others[0], **others[1])
    torch.manual_seed(1)
    got = fused(*args, **kwargs)
    assert type(got) is type(expected)
    assert_same("outputs", tensors_of(got), tensors_of(expected))
    differentiated = [one for one in tensors_of(expected) if one.requires_grad]
    if not differentiated:
        return
    upstream = [torch.randn_like(one) for one in differentiated]
    torch.autograd.backward(differentiated, upstream)
    torch.autograd.backward([one for one in tensors_of(got) if one.requires_grad], upstream)
    assert_same("inputs", [one.grad for one in tensors_of(inputs)], [one.grad for one in tensors_of(others)])
    assert_same("parameters", [one.grad for one in module.parameters()], [one.grad for one in other.parameters()])
    assert_same("buffers", list(module.buffers()), list(other.buffers()))
