# mypy: disable-error-code="call-arg, arg-type"
from __future__ import annotations

import pytest
import torch
from torch import nn

from onelaunch.activations import ACTIVATIONS
from onelaunch.nn import Linear
from onelaunch.ops import linear
from onelaunch.ops.linear import linear_op, linear_slope_op
from onelaunch.ops.linear_choice import LIBRARY, force_implementation, triton_gemm
from onelaunch.ops.linear_reference import linear_reference
from tests.ops.compare import assert_same_with_gradients
from tests.ops.conftest import DTYPES
from tests.pairwise import cases

SEED = 1

# The autograd thread has no CUDA context yet if cuBLAS is the first to use it.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")


def inputs(device: torch.device, dtype: torch.dtype, m: int = 24, n: int = 40, k: int = 32) -> list[torch.Tensor]:
    """x, weight and bias; drawn on the CPU, so that a seed gives the same numbers on every device."""
    numbers = torch.randn(m, k), torch.randn(n, k) / k**0.5, torch.randn(n)
    return [one.to(device, dtype).requires_grad_() for one in numbers]


def drawn(tensors: list[torch.Tensor], p: float, seed: int) -> torch.Tensor:
    """The mask of a call right after `manual_seed`. A sigmoid is never 0, other activations may be."""
    torch.manual_seed(seed)
    return linear(*[tensor.detach() for tensor in tensors], activation="sigmoid", dropout=p) != 0


@pytest.mark.parametrize(("dtype", "activation", "p"), cases(DTYPES, [None, *ACTIVATIONS], [0.0, 0.4]))
def test_values_and_gradients(device: torch.device, dtype: torch.dtype, activation: str | None, p: float) -> None:
    # Where a derivative jumps, rounding may choose the other side, which is an error. This seed has no value so close.
    torch.manual_seed(SEED)
    tensors, seed = inputs(device, dtype), torch.seed()
    with force_implementation(LIBRARY):
        torch.manual_seed(seed)
        y = linear(*tensors, activation=activation, dropout=p)
        keep = drawn(tensors, p, seed) if p else None
    assert_same_with_gradients(y, tensors, lambda *exact: linear_reference(*exact, activation, keep, p), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(16, 32, 64, 4, 3), (64, 64, 64, 4, 3), (128, 128, 64, 8, 3, True)])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "sigmoid"])
def test_triton_gemms_draw_the_mask_of_the_library_path(tile: tuple[int, ...], activation: str) -> None:
    tensors = inputs(torch.device("cuda"), torch.bfloat16, 200, 264, 136)
    masks = []
    for implementation in (LIBRARY, triton_gemm(*tile)):
        for tensor in tensors:
            tensor.grad = None
        torch.manual_seed(5)
        with force_implementation(implementation):
            y = linear(*tensors, activation=activation, dropout=0.3)
            keep = drawn(tensors, 0.3, 5)
        masks.append(y.detach() != 0)
        assert_same_with_gradients(
            y, tensors, lambda *exact, keep=keep: linear_reference(*exact, activation, keep, 0.3), torch.bfloat16
        )
    assert (masks[0] != masks[1]).float().mean() < 1e-3  # rounding may change relu's sign, but not the mask


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 32_768])
def test_a_single_row_may_have_any_stride(n: int) -> None:
    """It is contiguous all the same, and a choice measured for other strides must not be taken for it."""
    w = torch.randn(n, 64, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(1, 64, device="cuda", dtype=torch.bfloat16)
    for x in (rows, rows.expand(5, 64)[2:3], rows.flatten().unfold(0, 64, 8)[:1]):
        y = linear(x, w, activation="sigmoid")
        torch.testing.assert_close(y.double(), (x.double() @ w.double().t()).sigmoid(), rtol=1.6e-2, atol=1.6e-2)


def test_any_rank_and_stride(device: torch.device) -> None:
    w = torch.randn(5, 8, device=device)
    for x in (
        torch.randn(8, device=device),
        torch.randn(2, 3, 8, device=device),
        torch.randn(8, 4, device=device).t(),
        torch.randn(1, 8, device=device).expand(6, 8),
    ):
        with force_implementation(LIBRARY):
            torch.testing.assert_close(linear(x, w, activation="relu"), linear_reference(x, w, None, "relu", None, 0.0))
    assert linear(torch.empty(0, 8, device=device), w, activation="relu").shape == (0, 5)
    nothing = torch.empty(5, 0, device=device)
    assert linear(torch.empty(2, 3, 0, device=device), nothing, activation="relu").shape == (2, 3, 5)
    assert linear(torch.empty(0, device=device), nothing, activation="relu").shape == (5,)


def test_autocast(device: torch.device) -> None:
    x, w, bias = inputs(device, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device.type, dtype), force_implementation(LIBRARY):
            y = linear(x, w, bias, activation="gelu", dropout=0.1)
        assert y.dtype == dtype
        y.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == torch.float32


def test_opcheck(device: torch.device) -> None:
    with force_implementation(LIBRARY):
        for activation, p in (("relu", 0.3), ("gelu", 0.0)):
            torch.library.opcheck(linear_op, (*inputs(device, torch.float32, 6, 12, 10), activation, p, True))
        bits = torch.zeros(4, 2, dtype=torch.uint8, device=device)
        dy = torch.randn(4, 10, device=device)
        torch.library.opcheck(linear_slope_op, (dy, torch.randn(4, 10, device=device), bits, "tanh", 0.5))


def test_errors_name_the_argument() -> None:
    x, w = torch.ones(3, 4), torch.ones(5, 4)
    with pytest.raises(ValueError, match=r"activation='swish' is not known.*; did you mean 'silu'\?$"):
        linear(x, w, activation="swish")
    with pytest.raises(ValueError, match=r"activation='relo'.*'relu'.*did you mean 'relu'"):
        linear(x, w, activation="relo")
    with pytest.raises(ValueError, match=r"dropout=-0\.1"):
        linear(x, w, dropout=-0.1)
    with pytest.raises(ValueError, match=r"x has shape \(3, 4\)"):
        linear(x, torch.ones(5, 6))
    with pytest.raises(ValueError, match="bias has shape"):
        linear(x, w, torch.ones(4))
    with pytest.raises(ValueError, match="weight is on meta and x on cpu"):
        linear(x, w.to("meta"))
    with pytest.raises(ValueError, match=r"weight has dtype torch\.float64"):
        linear(x, w.double(), activation="relu")
    with pytest.raises(ValueError, match=r"activation='None'.*or None for none"):
        linear(x, w, activation="None")
    with pytest.raises(ValueError, match="dropout=nan"):
        linear(x, w, dropout=float("nan"), training=False)
    with pytest.raises(TypeError, match="weight is a NoneType"):
        linear(x, None)  # type: ignore[arg-type]


def test_module_takes_the_state_of_nn_linear() -> None:
    theirs, ours = nn.Linear(6, 4), Linear(6, 4, activation="relu", dropout=0.5)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert "linear + relu + dropout" in repr(ours)
    x = torch.randn(3, 6)
    torch.testing.assert_close(ours.eval()(x), torch.relu(theirs(x)))
