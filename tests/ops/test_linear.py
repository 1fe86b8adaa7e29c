# mypy: disable-error-code="call-arg, arg-type"
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from onelaunch.kernels.dropout_key import NO_KEY
from onelaunch.measured_times import MeasuredTimes
from onelaunch.nn import Linear
from onelaunch.ops import linear, linear_choice
from onelaunch.ops.arguments import ACTIVATIONS
from onelaunch.ops.linear import linear_op, linear_slope_op
from onelaunch.ops.linear_choice import (
    EPILOGUE,
    LIBRARY,
    Call,
    calls_over_copies,
    fastest,
    force_implementation,
    shape_class,
    triton_gemm,
)
from onelaunch.ops.linear_reference import linear_reference
from tests.ops.compare import assert_same_with_gradients

# The autograd thread has no CUDA context yet when its first product is a library's.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")


def inputs(device: torch.device, dtype: torch.dtype, m: int = 24, n: int = 40, k: int = 32) -> list[torch.Tensor]:
    x = torch.randn(m, k, device=device, dtype=dtype, requires_grad=True)
    w = (torch.randn(n, k, device=device) / k**0.5).to(dtype).requires_grad_()
    return [x, w, torch.randn(n, device=device, dtype=dtype, requires_grad=True)]


def drawn(tensors: list[torch.Tensor], p: float, seed: int) -> torch.Tensor:
    """The mask of a call right after `manual_seed`. Sigmoid's values are never 0, what others give may be by chance."""
    torch.manual_seed(seed)
    return linear(*[tensor.detach() for tensor in tensors], activation="sigmoid", dropout=p) != 0


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_values_and_gradients(device: torch.device, dtype: torch.dtype, activation: str | None, p: float) -> None:
    if activation in ("relu", "leaky_relu") and dtype != torch.float32:
        torch.manual_seed(
            1
        )  # a sign that rounding turns would show as an error; with this seed there is none near zero
    tensors, seed = inputs(device, dtype), torch.seed()
    with force_implementation(LIBRARY):
        torch.manual_seed(seed)
        y = linear(*tensors, activation=activation, dropout=p)
        keep = drawn(tensors, p, seed) if p else None
    assert_same_with_gradients(y, tensors, lambda *exact: linear_reference(*exact, activation, keep, p), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(16, 32, 64, 4, 3), (64, 64, 64, 4, 3), (128, 128, 64, 8, 3, True)])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "sigmoid"])
def test_fused_tiles_draw_the_mask_of_the_library(tile: tuple[int, ...], activation: str) -> None:
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
    assert (masks[0] != masks[1]).float().mean() < 1e-3  # relu's sign may turn by rounding, the mask does not


@pytest.mark.gpu
@pytest.mark.parametrize("apart", ["x", "weight", "bias"])
def test_a_choice_is_not_made_for_tensors_that_lie_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: str
) -> None:
    """The copy engine wants multiples of 16 bytes: what was chosen for tensors there cannot run on ones beside."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(linear_choice, "_times_by_device", {})
    monkeypatch.setattr(linear_choice, "_chosen", {})

    def measured(options: list[linear_choice.Implementation], call: linear_choice.Call) -> dict[str, float]:
        return {option.name: float("tma" not in option.name and "cuda" not in option.name) for option in options}

    monkeypatch.setattr(linear_choice, "time_implementations", measured)
    tensors = dict(
        zip(("x", "weight", "bias"), inputs(torch.device("cuda"), torch.bfloat16, 8192, 512, 64), strict=True)
    )
    beside = tensors[apart].new_empty(tensors[apart].numel() + 1)[1:].view_as(tensors[apart])
    moved = {**tensors, apart: beside.copy_(tensors[apart].detach())}
    with torch.no_grad():
        first, second = (linear(**given, activation="silu") for given in (tensors, moved))
    torch.testing.assert_close(first, second, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 32_768])
def test_a_single_row_may_have_any_stride(n: int) -> None:
    """It is contiguous all the same, and a choice that was measured for others must not be taken for it."""
    w = torch.randn(n, 64, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(1, 64, device="cuda", dtype=torch.bfloat16)
    for x in (rows, rows.expand(5, 64)[2:3], rows.flatten().unfold(0, 64, 8)[:1]):
        y = linear(x, w, activation="sigmoid")
        torch.testing.assert_close(y.double(), (x.double() @ w.double().t()).sigmoid(), rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.gpu
def test_measured_choice_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(linear_choice, "_times_by_device", {})
    monkeypatch.setattr(linear_choice, "_chosen", {})
    tensors = [tensor.detach() for tensor in inputs(torch.device("cuda"), torch.bfloat16)]
    first = linear(*tensors, activation="relu")
    (file,) = (tmp_path / "onelaunch" / "linear").iterdir()
    (times,) = MeasuredTimes(file).entries.values()
    assert len(times) > 2
    monkeypatch.setattr(linear_choice, "_times_by_device", {})
    monkeypatch.setattr(linear_choice, "_chosen", {})
    monkeypatch.setattr(linear_choice, "time_implementations", None)  # measuring again would fail
    torch.testing.assert_close(linear(*tensors, activation="relu"), first)


def a_call(x: torch.Tensor, weight: torch.Tensor) -> Call:
    return Call(x, weight, None, x.new_empty(len(x), len(weight)), None, None, None, 0.0, NO_KEY)


def test_candidates_are_timed_on_operands_that_come_from_memory() -> None:
    """Copies enough to leave the cache, that lie as the operands do; one call where one is enough, or they lie oddly."""
    x, weight = torch.randn(6, 16)[:, :8], torch.randn(5, 8)
    calls = calls_over_copies(a_call(x, weight), cache_bytes=4 * (6 * 8 + 5 * 8) * 4)
    assert len(calls) == 7
    assert len({call.x.data_ptr() for call in calls} | {call.weight.data_ptr() for call in calls}) == 14
    for call in calls:
        assert call.x.equal(x)
        assert call.weight.equal(weight)
        assert (call.x.stride(), call.weight.stride()) == (x.stride(), weight.stride())
    assert len(calls_over_copies(a_call(x, weight), cache_bytes=100)) == 1
    apart = torch.randn(6, 1000)[:, :8]  # whose copies lie as far apart
    assert len(calls_over_copies(a_call(apart, weight), cache_bytes=4 * (6 * 8 + 5 * 8) * 4)) == 1
    assert len(calls_over_copies(a_call(x, torch.randn(41)[1:].view(5, 8)), cache_bytes=10**6)) == 1


def test_a_library_is_taken_where_it_is_clearly_faster() -> None:
    times = {LIBRARY.name: 1.3, EPILOGUE.name: 1.0, "ours": 1.01, "slow": 2.0}
    assert fastest(times) == "ours"
    assert fastest({**times, "ours": 1.05}) == EPILOGUE.name
    assert fastest({LIBRARY.name: 1.0, "does not fit": float("inf")}) == LIBRARY.name


def test_candidates_are_those_of_the_class() -> None:
    """Else two batches of one class would each find the other's times wanting, and measure again, for ever."""
    pytest.importorskip("triton")
    for n in (8, 64, 784):
        w = torch.randn(n, 64)
        names = [[one.name for one in linear_choice.candidates(a_call(torch.randn(m, 64), w))] for m in (300, 512)]
        assert names[0] == names[1]


def test_batch_sizes_share_a_choice_up_to_the_next_power_of_two() -> None:
    assert [shape_class(m) for m in (1, 16, 17, 100)] == [16, 16, 32, 128]


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
