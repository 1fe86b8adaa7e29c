"""Second derivatives and transforms of the ops: forward mode, vmap, tracing, meta tensors, compiling."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from onelaunch.activations import ACTIVATIONS, activate
from onelaunch.nn import BatchNorm1d, CrossEntropyLoss, LayerNorm, Linear, ReLUDropout, RMSNorm
from onelaunch.ops import batch_norm, cross_entropy, layer_norm, linear, relu_dropout, rms_norm
from onelaunch.ops.linear_choice import LIBRARY, force_implementation
from tests.conftest import TOLERANCE

Function = Callable[..., Tensor]
pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS",
    "ignore:`torch.jit",  # PyTorch's own, when forward mode is first used
)


def root_mean_square_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `F.rms_norm`, whose kernel on a GPU has neither a forward mode nor batches in its backward pass."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.fixture(autouse=True)
def without_cudnn() -> Iterator[None]:
    """PyTorch's batch norm with cuDNN has no second derivative in some modes."""
    with torch.backends.cudnn.flags(enabled=False):
        yield


def pairs(device: torch.device) -> dict[str, tuple[Function, Function, list[Tensor]]]:
    """By name: one of our ops, PyTorch's equivalent, and the tensors to differentiate by; without dropout."""
    torch.manual_seed(0)
    x, w, b = torch.randn(6, 4), torch.randn(5, 4), torch.randn(5)
    volume, scale, shift = torch.randn(3, 4, 5), torch.rand(4) + 0.5, torch.randn(4)
    mean, var = torch.randn(4, device=device), torch.rand(4, device=device) + 0.5
    target = torch.tensor([0, 3, -100, 1, 2, 3], device=device)
    found: dict[str, tuple[Function, Function, list[Tensor]]] = {
        f"linear {name}": (
            lambda x, w, b, name=name: linear(x, w, b, activation=name),
            lambda x, w, b, name=name: activate(F.linear(x, w, b), name),
            [x, w, b],
        )
        for name in ACTIVATIONS
    }
    for training in (True, False):
        found[f"batch_norm, training={training}"] = (
            lambda x, w, b, t=training: batch_norm(
                x, mean.to(x.dtype), var.to(x.dtype), w, b, training=t, activation="tanh"
            ),
            lambda x, w, b, t=training: torch.tanh(F.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), w, b, t)),
            [volume, scale, shift],
        )
    found["layer_norm"] = (
        lambda x, w, b: layer_norm(x, w, b, residual=x.sin()),
        lambda x, w, b: F.layer_norm(x + x.sin(), (4,), w, b),
        [volume.transpose(1, 2), scale, shift],
    )
    found["rms_norm and sum"] = (
        lambda x, r, w: torch.cat(rms_norm(x, w, residual=r, eps=1e-3, return_sum=True)),
        lambda x, r, w: torch.cat((root_mean_square_norm(x + r, w, 1e-3), x + r)),
        [x, x.cos(), scale],
    )
    found["cross_entropy"] = (
        lambda x: cross_entropy(x, target, label_smoothing=0.1),
        lambda x: F.cross_entropy(x, target, label_smoothing=0.1),
        [x],
    )
    return {name: (ours, theirs, [t.to(device) for t in tensors]) for name, (ours, theirs, tensors) in found.items()}


NAMES = list(pairs(torch.device("cpu")))
# A transform calls PyTorch's own ops, and what differs between activations is in the second derivatives: one activation of
# each kind is enough here.
TRANSFORMED = [name for name in NAMES if not name.startswith("linear") or name.split()[1] in ("relu", "tanh", "gelu")]


def close(ours: Any, theirs: Any, dtype: torch.dtype = torch.float32) -> None:
    rtol, atol = TOLERANCE[dtype]
    flat, expected = torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs)
    for one, other in zip(flat, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=5 * rtol, atol=20 * atol)


def second_derivatives(function: Function, tensors: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the sum of squared first derivatives, by the tensors and by the upstream gradient."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    upstream = upstream.detach().requires_grad_()
    first = torch.autograd.grad(function(*tensors), tensors, upstream, create_graph=True)
    return torch.autograd.grad(sum(one.square().sum() for one in first), [*tensors, upstream], materialize_grads=True)


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_are_those_of_pytorch(device: torch.device, name: str) -> None:
    ours, theirs, tensors = pairs(device)[name]
    if name == "cross_entropy" and device.type == "cuda":
        pytest.skip("writes its gradient in the forward pass there; see the next test")
    with force_implementation(LIBRARY):
        upstream = torch.randn_like(ours(*tensors))
        found = second_derivatives(ours, tensors, upstream)
    exact = second_derivatives(theirs, [tensor.double() for tensor in tensors], upstream.double())
    close(found, exact)


@pytest.mark.gpu
def test_a_gradient_written_in_the_forward_pass_cannot_be_differentiated() -> None:
    logits = torch.randn(6, 4, device="cuda", requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(6, dtype=torch.int64, device="cuda"))
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    close(gradient, torch.autograd.grad(F.cross_entropy(logits, torch.zeros(6).long().cuda()), logits)[0])
    with pytest.raises(RuntimeError, match=r"use torch\.nn\.functional\.cross_entropy for second derivatives"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("activation", [None, "relu", "tanh", "gelu"])
def test_second_derivatives_with_dropout(activation: str | None) -> None:
    """By finite differences, in float64; the same seed draws the same mask."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w, b = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)

    def seeded(function: Function) -> Function:
        def call(*tensors: Tensor) -> Tensor:
            torch.manual_seed(5)
            return function(*tensors)

        return call

    assert torch.autograd.gradgradcheck(
        seeded(lambda x, w: linear(x, w, b, activation=activation, dropout=0.4)), (x, w)
    )
    scale = torch.rand(4, dtype=torch.float64, requires_grad=True)
    normed = seeded(lambda x, w: batch_norm(x, None, None, w, training=True, activation=activation, dropout=0.4))
    assert torch.autograd.gradgradcheck(normed, (x, scale))
    assert torch.autograd.gradgradcheck(seeded(lambda x: relu_dropout(x.t(), 0.4)), (x,))


@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_derivatives_of_norms_with_dropout(function: Any) -> None:
    """By finite differences, in float64, of both results."""
    x, residual = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scale = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, residual: Tensor, scale: Tensor) -> Any:
        torch.manual_seed(5)
        return function(x, scale, residual=residual, dropout=0.4, return_sum=True)

    assert torch.autograd.gradcheck(call, (x, residual, scale))
    assert torch.autograd.gradgradcheck(call, (x, residual, scale))


def test_a_bias_changed_in_place_is_an_error_only_if_the_backward_pass_reads_it() -> None:
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4)
    for graph in (False, True):
        bias = torch.randn(5)
        y = torch.ops.onelaunch.linear(x, w, bias, "gelu", 0.0, True)[0]  # `linear` would call PyTorch's own functions
        bias.add_(1)
        if graph:
            with pytest.raises(RuntimeError, match="bias was changed in place"):
                torch.autograd.grad(y.sum(), x, create_graph=True)
        else:
            torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_of_functions(device: torch.device, name: str) -> None:
    ours, theirs, tensors = pairs(device)[name]
    numbers, tangents = tuple(range(len(tensors))), tuple(torch.randn_like(tensor) for tensor in tensors)
    batched = tuple(torch.stack((tensor, tensor + 1)) for tensor in tensors)
    results = []
    for function in (ours, theirs):
        results.append([
            torch.func.grad(lambda *t, f=function: f(*t).square().sum(), numbers)(*tensors),
            *torch.func.jvp(function, tuple(tensors), tangents),
            torch.func.jacrev(function)(*tensors),
            torch.func.hessian(lambda *t, f=function: f(*t).square().sum())(*tensors),
        ])  # fmt: skip
        if "batch_norm, training=True" not in name:  # PyTorch refuses to update statistics that are not batched
            results[-1].append(torch.func.vmap(function)(*batched))
    close(*results)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_batched_upstream_gradient(device: torch.device, name: str) -> None:
    ours, theirs, tensors = pairs(device)[name]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    with force_implementation(LIBRARY):
        results = []
        for function in (ours, theirs):
            y = function(*tensors)
            torch.manual_seed(1)
            upstream = torch.randn(3, *y.shape, device=device)
            by_vmap = torch.func.vmap(lambda v, y=y: torch.autograd.grad(y, tensors, v, retain_graph=True))(upstream)
            results.append((by_vmap, torch.autograd.grad(y, tensors, upstream, is_grads_batched=True)))
    close(*results)


@pytest.mark.parametrize("shape", [(2, 2), (1, 8), (5, 3)])
def test_a_batched_upstream_gradient_of_dropout(device: torch.device, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    y, upstream = relu_dropout(x, 0.5), torch.randn(4, *shape, device=device)
    found = torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(upstream)
    torch.testing.assert_close(found, torch.where(y != 0, 2 * upstream, 0))


def test_forward_mode(device: torch.device) -> None:
    x = torch.randn(40, device=device)
    both: Any = torch.func.jvp(lambda x: relu_dropout(x, 0.5), (x,), (torch.ones_like(x),))
    y, tangent = both
    torch.testing.assert_close(tangent, torch.where(y != 0, 2.0, 0.0))
    assert 0 < (y != 0).sum() < (x > 0).sum()


@pytest.mark.parametrize("name", TRANSFORMED)
def test_forward_over_reverse(device: torch.device, name: str) -> None:
    """A tangent on the upstream gradient of an op that was called before."""
    ours, theirs, tensors = pairs(device)[name]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    results = []
    with force_implementation(LIBRARY):
        for function in (ours, theirs):
            y = function(*tensors)
            torch.manual_seed(1)
            upstream, tangent = torch.randn_like(y), torch.randn_like(y)
            with forward_ad.dual_level():
                gradients = torch.autograd.grad(y, tensors, forward_ad.make_dual(upstream, tangent))
                results.append([forward_ad.unpack_dual(gradient).tangent for gradient in gradients])
    close(*results)


def test_vmap_requires_a_randomness(device: torch.device) -> None:
    x = torch.rand(5, 64, device=device)
    y = torch.func.vmap(relu_dropout, randomness="different")(x)
    torch.testing.assert_close(y, torch.where(y != 0, x * 2, 0))
    assert not torch.equal(y[0] != 0, y[1] != 0)
    same = torch.func.vmap(relu_dropout, randomness="same")(x)
    assert torch.equal(same[0] != 0, same[1] != 0)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(relu_dropout)(x)


MODULES = [
    Linear(12, 12, activation="relu", dropout=0.5),
    BatchNorm1d(12, activation="gelu", dropout=0.5),
    ReLUDropout(0.5),
    LayerNorm(12, dropout=0.5),
    RMSNorm(12, dropout=0.5),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_traced_by_the_older_tools(module: nn.Module) -> None:
    module, x = module.eval(), torch.randn(7, 12)
    torch.testing.assert_close(torch.jit.trace(module, x)(x), module(x))
    if not isinstance(module, BatchNorm1d):  # it reads its input's rank and counts batches
        torch.testing.assert_close(torch.fx.symbolic_trace(nn.Sequential(module))(x), module(x))
    assert module.to("meta")(x.to("meta")).shape == (7, 12)
    module.to_empty(device="cpu")


def test_a_loss_without_data() -> None:
    x, y = torch.randn(4, 12, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta")
    assert CrossEntropyLoss()(x, y).shape == ()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # of torch.export.load, up to torch 2.11
def test_an_exported_batch_norm_in_training_can_be_loaded() -> None:
    model, x = BatchNorm1d(12, activation="relu"), torch.randn(20, 12)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    torch.testing.assert_close(loaded(x), model(x))
    torch.testing.assert_close(loaded.running_var, model.running_var)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # the compiler's own
@pytest.mark.parametrize(
    "call",
    [lambda x: relu_dropout(x), lambda x: linear(x, torch.eye(64, device=x.device), activation="gelu", dropout=0.5),
     lambda x: batch_norm(x, None, None, training=True, activation="sigmoid", dropout=0.5),
     lambda x: layer_norm(x, dropout=0.5, return_sum=True)[1]],
    ids=["relu_dropout", "linear", "batch_norm", "layer_norm"],
)  # fmt: skip
def test_two_equal_calls_of_a_compiled_function_draw_two_masks(device: torch.device, call: Function) -> None:
    torch._dynamo.reset()
    x = torch.rand(64, 64, device=device, requires_grad=True)
    backend = "inductor" if device.type == "cuda" else "aot_eager_decomp_partition"
    with force_implementation(LIBRARY):
        first, second = torch.compile(lambda x: (call(x), call(x)), backend=backend, fullgraph=True)(x)
    assert not torch.equal(first != 0, second != 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_compiled_transform() -> None:
    torch._dynamo.reset()
    x, w = torch.randn(6, 4), torch.randn(5, 4)
    gradient = torch.func.grad(lambda x: linear(x, w, activation="gelu").square().sum())
    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), gradient(x))
    torch.testing.assert_close(compiled(x), torch.func.grad(lambda x: F.gelu(F.linear(x, w)).square().sum())(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("call", "shape"),
    [(lambda x: batch_norm(x.t(), None, None, training=True), (12, 16)),
     (lambda x: layer_norm(x.t(), residual=x.t()), (12, 16)),
     (lambda x: cross_entropy(x.t(), torch.arange(16, device=x.device) % 12), (12, 16)),
     (lambda x: cross_entropy(x, torch.zeros(1, 7, dtype=torch.int64, device=x.device)), (1, 5, 7))],
    ids=["batch_norm", "layer_norm", "cross_entropy", "one image"],
)  # fmt: skip
def test_a_compiled_backward_of_odd_strides(device: torch.device, call: Function, shape: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    x = torch.randn(shape, device=device, requires_grad=True)
    (found,) = torch.autograd.grad(torch.compile(call, fullgraph=True)(x).square().sum(), x)
    close(found, torch.autograd.grad(call(x).square().sum(), x)[0])
