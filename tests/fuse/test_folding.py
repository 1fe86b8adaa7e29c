"""A batch norm folded into a linear layer never outlives the weights it was made from, however they were written."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import onelaunch as ol
from onelaunch.fuse import calls

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")

WIDTH = 16


def rows() -> torch.Tensor:
    return torch.randn(9, WIDTH, dtype=torch.float64)


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    """A model in evaluation mode, with statistics of its own, and its fused twin."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()).double().eval()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    return model, ol.fuse(model)


def assert_agree(model: nn.Module, fused: nn.Module) -> None:
    """In evaluation, without gradients."""
    model.eval()
    fused.eval()
    x = rows()
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)


def fold_of(fused: nn.Sequential) -> calls._Folded:
    return calls._folded[fused[0]]


def folds(fused: nn.Sequential) -> bool:
    """Whether the next call uses folded weights."""
    with torch.no_grad():
        return calls._fold_for(rows(), fused[0], fused[1]) is not None


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("who", ["fused", "original"])
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_statistics_moved_in_training(
    plain: bool, who: str, without_gradients: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "plain_elsewhere", plain)
    model, fused = pair()
    for _ in range(2):
        assert_agree(model, fused)
        assert folds(fused)
        with without_gradients():  # type: ignore[attr-defined]
            (fused if who == "fused" else model).train()(rows() * 5 + 1)
    assert_agree(model, fused)


def test_a_norm_that_does_not_count_batches_stays_apart() -> None:
    model, fused = pair()
    model[1].num_batches_tracked = None
    assert_agree(model, fused)
    with torch.no_grad():
        model.train()(rows() * 5 + 1)
    assert_agree(model, fused)
    assert not folds(fused)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("who", ["fused", "original"])
@pytest.mark.parametrize("frozen_norm", [True, False])
def test_optimizers_that_move_no_version(name: str, who: str, frozen_norm: bool) -> None:
    model, fused = pair()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        assert_agree(model, fused)
        assert folds(fused)
        trained = (fused if who == "fused" else model).train()
        trained[1].train(not frozen_norm)
        trained(rows()).square().sum().backward()
        assert_agree(model, fused)  # between backward and step, too
        optimizer.step()
        optimizer.zero_grad()
    assert_agree(model, fused)


def test_a_step_of_another_model_leaves_the_fold_alone() -> None:
    teacher, fused = pair()
    student = nn.Linear(WIDTH, WIDTH).double()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, fused=True)
    assert_agree(teacher, fused)
    before = fold_of(fused)
    student(rows()).square().sum().backward()
    optimizer.step()
    assert_agree(teacher, fused)
    assert fold_of(fused) is before


def test_updates_through_data_after_a_pass_with_gradients() -> None:
    model, fused = pair()
    for _ in range(2):
        assert_agree(model, fused)
        fused(rows()).square().sum().backward()
        for parameter in model.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    assert_agree(model, fused)


def test_weights_of_calls_that_came_and_went() -> None:
    model, fused = pair()
    with torch.no_grad():
        for _ in range(20):
            x, state = rows(), {"0.weight": torch.randn(WIDTH, WIDTH, dtype=torch.float64)}
            got = torch.func.functional_call(fused, state, (x,))
            torch.testing.assert_close(got, torch.func.functional_call(model, state, (x,)), rtol=0, atol=1e-12)
            del state, got


def test_replaced_parameters_and_norms() -> None:
    model, fused = pair()
    for _ in range(20):
        model[0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        model[1].running_mean = torch.randn(WIDTH, dtype=torch.float64)
        assert_agree(model, fused)
        assert folds(fused)


def test_memory_that_comes_back_with_other_weights() -> None:
    """Perturb, evaluate, restore: each perturbation lies where the last one lay, in the same parameters."""
    model, fused = pair()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()

    for _ in range(10):
        nn.utils.vector_to_parameters(weights + torch.randn_like(weights), model.parameters())
        assert_agree(model, fused)
        nn.utils.vector_to_parameters(weights, model.parameters())
    assert_agree(model, fused)


def test_parameters_can_be_swapped() -> None:
    """Which PyTorch refuses for tensors with weak references."""
    model, fused = pair()
    assert_agree(model, fused)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        fused.float().double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_agree(model, fused)
    assert folds(fused)


def test_the_fold_dies_with_its_model() -> None:
    model, fused = pair()
    assert_agree(model, fused)
    before = len(calls._folded)
    del model, fused
    gc.collect()
    assert len(calls._folded) < before


@pytest.mark.parametrize("early", [True, False])
def test_memory_of_several_processes_is_not_folded(early: bool) -> None:
    model, fused = pair()
    if not early:
        assert_agree(model, fused)
        assert folds(fused)
    model.share_memory()
    assert_agree(model, fused)
    model[0].weight.data.add_(1)  # as another process does it: no version moves here
    assert_agree(model, fused)
    assert not folds(fused)


def half(scale_of_weights: float, variance: float) -> tuple[nn.Sequential, nn.Sequential]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).half().eval()
    model[1].float()
    with torch.no_grad():
        model[0].weight.mul_(scale_of_weights)
        model[1].running_var.fill_(variance)
    return model, ol.fuse(model)


@pytest.mark.parametrize(
    ("weights", "variance", "inputs"), [(2000, 1e-9, 1e-3), (0.05, 1e8, 3e4)], ids=["over", "under"]
)
def test_a_fold_that_float16_cannot_hold_is_not_used(weights: float, variance: float, inputs: float) -> None:
    model, fused = half(weights, variance)
    x = (torch.randn(9, WIDTH) * inputs).clamp(-6e4, 6e4).half()
    with torch.no_grad():
        expected, got = model(x), fused(x)
        assert expected.isfinite().all()
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3 * expected.abs().max().item())
        assert not folds_half(fused)
        place = fold_of(fused).weight
        model[0].weight.fill_(0.5)
        model[1].running_var.fill_(1)
        assert folds_half(fused)
        assert fold_of(fused).weight is place


def folds_half(fused: nn.Sequential) -> bool:
    return calls._fold_for(rows().half(), fused[0], fused[1]) is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # PyTorch's own, of forward mode
def test_tangents_pass_a_folded_layer() -> None:
    model, fused = pair()
    assert_agree(model, fused)
    x, direction = rows(), torch.randn_like(model[0].weight)
    tangents = []
    with torch.no_grad(), forward_ad.dual_level():
        for module in (model, fused):
            weight = forward_ad.make_dual(model[0].weight.detach(), direction)
            out = torch.func.functional_call(module, {"0.weight": weight}, (x,))
            tangents.append(forward_ad.unpack_dual(out).tangent)
    torch.testing.assert_close(tangents[1], tangents[0], rtol=0, atol=1e-12)
    assert_agree(model, fused)


def test_batches_are_counted_only_with_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU()).double()
    model[0].track_running_stats = False
    other = copy.deepcopy(model)
    x = rows()
    torch.testing.assert_close(ol.fuse(model)(x), other(x), rtol=0, atol=1e-12)
    for name, buffer in other.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer)


@pytest.mark.parametrize("shape", [(2, 0, 4), (0, WIDTH), (0, WIDTH, 3)])
@pytest.mark.parametrize("training", [True, False])
def test_no_elements(shape: tuple[int, ...], training: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU()).double().train(training)
    x = torch.ones(shape, dtype=torch.float64)
    assert ol.fuse(model)(x).shape == model(x).shape
