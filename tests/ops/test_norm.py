"""Layer norm and RMS norm with residual and dropout, against PyTorch in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.errors import OnelaunchError
from onelaunch.ops.dropout import unpack
from tests.ops.compare import assert_same_with_gradients
from tests.ops.conftest import DTYPES
from tests.pairwise import cases

norm = importlib.import_module("onelaunch.ops.norm")
SHAPES = [(1, 5), (7,), (40, 129), (17, 5, 24), (5, 8192), (3, 8200), (0, 6)]


def exact_norm(s: Tensor, weight: Tensor | None, bias: Tensor | None, centered: bool, eps: float = 1e-5) -> Tensor:
    if centered:
        return F.layer_norm(s, s.shape[-1:], weight, bias, eps)
    return F.rms_norm(s, s.shape[-1:], weight, eps)


def call(centered: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, **options: Any) -> Any:
    if centered:
        return ol.layer_norm(x, weight, bias, **options)
    return ol.rms_norm(x, weight, **{"eps": 1e-5, **options})


def kept_bits(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mask that the backward pass of y has saved."""
    bits = y.grad_fn.saved_tensors[2]  # type: ignore[union-attr]
    return unpack(bits, shape[-1]).view(shape)


@pytest.mark.parametrize(
    ("dtype", "shape", "centered", "affine", "with_residual", "p"),
    cases(DTYPES, SHAPES, [True, False], ["both", "weight", "none"], [True, False], [0.0, 0.3]),
)
def test_values_and_gradients(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], centered: bool, affine: str, with_residual: bool,
    p: float,
) -> None:  # fmt: skip
    torch.manual_seed(2)
    make = lambda *size: torch.randn(size, device=device).to(dtype).requires_grad_()  # noqa: E731
    inputs = [make(*shape)]
    names = ["x"]
    if affine != "none":
        names, inputs = [*names, "weight"], [*inputs, make(shape[-1])]
    if affine == "both" and centered:
        names, inputs = [*names, "bias"], [*inputs, make(shape[-1])]
    if with_residual:
        names, inputs = [*names, "residual"], [*inputs, make(*shape)]
    given = dict(zip(names, inputs, strict=True))
    options = {"residual": given.get("residual"), "dropout": p, "return_sum": True}
    y, s = call(centered, inputs[0], given.get("weight"), given.get("bias"), **options)
    assert y.dtype == s.dtype == dtype
    assert y.shape == s.shape == shape
    keep = kept_bits(y, shape) if p else None

    def reference(*exact: Tensor) -> Tensor:
        named = dict(zip(names, exact, strict=True))
        total = named["x"] if keep is None else torch.where(keep, named["x"] / (1 - p), 0)
        total = total + named["residual"] if with_residual else total
        normed = exact_norm(total, named.get("weight"), named.get("bias"), centered)
        return torch.stack([normed, total])

    assert_same_with_gradients(torch.stack([y, s]), inputs, reference, dtype)


@pytest.mark.parametrize("centered", [True, False])
def test_any_stride_of_any_tensor(device: torch.device, centered: bool) -> None:
    base = torch.randn(4, 6, 8, 10, device=device)
    other = torch.randn(4, 6, 8, 10, device=device)
    for view in (
        lambda t: t.transpose(1, 3),
        lambda t: t[:, ::2],
        lambda t: t[..., 1:9:2],
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t[:1].expand(4, 6, 8, 10),
    ):
        x, residual = (view(one).detach().requires_grad_() for one in (base, other))
        weight = torch.randn(2 * x.shape[-1], device=device)[::2].requires_grad_()
        y = call(centered, x, weight, None, residual=residual)
        upstream = torch.randn_like(y).transpose(0, 1).contiguous().transpose(0, 1)
        reference = lambda x, weight, residual: exact_norm(x + residual, weight, None, centered)  # noqa: E731
        assert_same_with_gradients(y, [x, weight, residual], reference, torch.float32, upstream)


def test_only_the_sum_is_used(device: torch.device) -> None:
    x, residual = torch.randn(2, 5, 8, device=device, requires_grad=True)
    _, s = norm.layer_norm(x, residual=residual, dropout=0.5, return_sum=True)
    upstream = torch.randn_like(s)
    dx, dresidual = torch.autograd.grad(s, (x, residual), upstream)
    assert torch.equal(dresidual, upstream)
    kept = dx != 0
    torch.testing.assert_close(dx, torch.where(kept, 2 * upstream, 0))
    torch.testing.assert_close(s.detach(), torch.where(kept, 2 * x.detach(), 0) + residual.detach())


@pytest.mark.parametrize("centered", [True, False])
def test_evaluation_is_the_norm_of_the_sum_and_saves_nothing(device: torch.device, centered: bool) -> None:
    x, residual = torch.randn(2, 6, 12, device=device)
    expected = exact_norm(x + residual, None, None, centered)
    y = call(centered, x, None, None, residual=residual, dropout=0.5, training=False)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    y, s = call(centered, x, None, None, return_sum=True)
    assert s is x
    outputs = norm.norm_op(x, residual, None, None, 1e-5, 0.5, centered, x.dtype, False)
    assert [one.numel() for one in outputs[1:]] == [0, 0, 0]


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_parameters_and_residual_of_another_type(
    device: torch.device, centered: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    narrow, wide = dtypes
    x = torch.randn(6, 12, device=device, dtype=narrow, requires_grad=True)
    residual = torch.randn(6, 12, device=device, dtype=wide, requires_grad=True)
    weight = torch.randn(12, device=device, dtype=wide, requires_grad=True)
    y, s = call(centered, x, weight, None, residual=residual, return_sum=True)
    assert y.dtype == s.dtype == wide
    reference = lambda x, r, w: exact_norm(x + r, w, None, centered)  # noqa: E731
    assert_same_with_gradients(y, [x, residual, weight], reference, narrow)  # the tolerance of the gradient of x


@pytest.mark.gpu
@pytest.mark.parametrize("centered", [True, False])
def test_autocast_on_a_gpu_gives_fp32(centered: bool) -> None:
    """As PyTorch's layer_norm does, and its rms_norm from 2.12 on."""
    weight = torch.randn(16, device="cuda", requires_grad=True)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(6, 16, device="cuda", dtype=dtype, requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            y = call(centered, x, weight, None)
            assert not centered or exact_norm(x, weight, None, True).dtype == torch.float32
        assert y.dtype == torch.float32
        expected = exact_norm(x.double(), weight.double(), None, centered)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.autograd.grad(y.sum(), x)[0].dtype == dtype


def test_autocast_on_a_cpu_keeps_the_type() -> None:
    x, weight = torch.randn(6, 16, dtype=torch.bfloat16), torch.randn(16)
    with torch.autocast("cpu", torch.bfloat16):
        assert ol.layer_norm(x, weight).dtype == F.layer_norm(x, (16,), weight).dtype


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_no_eps_is_that_of_pytorch(device: torch.device, dtype: torch.dtype) -> None:
    x = (torch.randn(6, 16, device=device) * 1e-4).to(dtype)
    torch.testing.assert_close(ol.rms_norm(x, eps=None), F.rms_norm(x, (16,)))
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    y = norm.norm_reference(x, None, None, eps, False)
    torch.testing.assert_close(y.to(dtype), F.rms_norm(x, (16,)))


def test_masks_follow_the_seed_and_differ_between_calls_and_rows(device: torch.device) -> None:
    x = torch.ones(64, 256, device=device)

    def mask() -> Tensor:
        return norm.layer_norm(x, dropout=0.25, return_sum=True)[1] != 0

    torch.manual_seed(3)
    first, second = mask(), mask()
    torch.manual_seed(3)
    assert torch.equal(mask(), first)
    assert not torch.equal(first, second)
    assert torch.unique(first, dim=0).shape[0] == 64
    assert abs(first.double().mean() - 0.75) < 4 * (0.75 * 0.25 / x.numel()) ** 0.5


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("centered", [True, False])
def test_opcheck(device: torch.device, centered: bool, p: float, save: bool) -> None:
    x, residual = (torch.randn(3, 4, 10, device=device, requires_grad=save) for _ in range(2))
    weight = torch.rand(10, device=device, requires_grad=save)
    for one in (residual, None):
        torch.library.opcheck(norm.norm_op, (x, one, weight, None, 1e-5, p, centered, torch.float32, save))
    rows = torch.randn(4, 10, device=device)
    statistics = torch.rand(1 + centered, 4, device=device)
    bits = torch.zeros((4, 2) if p else (0, 0), dtype=torch.uint8, device=device)
    for residual_type in (None, torch.float32, torch.float64):
        options = (p, centered, torch.float32, residual_type, torch.float32)
        torch.library.opcheck(norm.norm_backward_op, (rows, None, rows, statistics, bits, weight.detach(), *options))


def test_two_backward_passes_have_the_same_bits(device: torch.device) -> None:
    x = torch.randn(3000, 257, device=device, requires_grad=True)
    weight, bias = torch.randn(2, 257, device=device, requires_grad=True)
    y = norm.layer_norm(x, weight, bias, dropout=0.2)
    first, second = (torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y), retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


MISTAKES: list[tuple[Callable[[Tensor], object], str]] = [
    (lambda x: ol.layer_norm(x, dropout=1.5), r"dropout=1\.5 is not a probability"),
    (lambda x: ol.layer_norm(x, eps="small"), "eps='small' is not a number: pass a small number"),
    (lambda x: ol.rms_norm(x, eps=-1e-5), "eps=-1e-05 must not be below 0: pass a small number"),
    (lambda x: ol.layer_norm(x, torch.ones(5)), r"weight has shape \(5,\) and x \(3, 4\): pass weight of shape \(4,\)"),
    (lambda x: ol.layer_norm(x, None, x), r"bias has shape \(3, 4\) and x \(3, 4\): pass bias of shape \(4,\)"),
    (lambda x: ol.rms_norm(x, residual=x[0]), r"residual has shape \(4,\) and x \(3, 4\): pass residual of shape"),
    (lambda x: ol.rms_norm(x, residual=x.to("meta")), "residual is on meta and x on cpu: move one"),
    (lambda x: ol.rms_norm(x.int()), "x has dtype torch.int32: pass float32"),
    (lambda x: ol.rms_norm(x.sum()), r"x has no dimensions: pass \[..., units\]"),
    (lambda x: ol.layer_norm([1.0]), "x is a list: pass a torch.Tensor"),  # type: ignore[arg-type]
    (lambda x: ol.nn.LayerNorm((3, 4)), r"normalized_shape=\(3, 4\) is not one dimension: pass the size of the last"),
    (lambda x: ol.nn.RMSNorm(4, dropout=2), "dropout=2 is not a probability"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_a_mistake_is_one_line(mistake: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(OnelaunchError, match=message) as caught:
        mistake(torch.randn(3, 4))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ol.nn.LayerNorm(6), nn.LayerNorm(6)),
        (ol.nn.LayerNorm(6, bias=False), nn.LayerNorm(6, bias=False)),
        (ol.nn.LayerNorm(6, 1e-3, elementwise_affine=False), nn.LayerNorm(6, 1e-3, elementwise_affine=False)),
        (ol.nn.RMSNorm(6), nn.RMSNorm(6)),
        (ol.nn.RMSNorm(6, 1e-3), nn.RMSNorm(6, 1e-3)),
    ],
    ids=repr,
)
def test_modules_replace_those_of_pytorch(ours: Any, theirs: Any) -> None:
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, type(theirs))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert "fused" in repr(ours)
    x, residual = torch.randn(2, 5, 6)
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours(input=x, residual=residual), theirs(x + residual))
    assert torch.equal(ours(x, residual, return_sum=True)[1], x + residual)
    ours.dropout = 0.5
    assert (ours(torch.ones(4, 6), return_sum=True)[1] == 0).any()
    assert torch.equal(ours.eval()(x), theirs(x))
