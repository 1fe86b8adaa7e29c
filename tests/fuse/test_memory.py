"""Memory: what a chain keeps for its backward, what the op lets go of early, and the verdict that counts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.bench.memory_timeline import LiveBytes
from onelaunch.fuse import calls, timing
from onelaunch.fuse.costs import Spec, Step
from onelaunch.fuse.decide import NOISE, _verdict, judge, takes_extra_pass
from onelaunch.fuse.memory import kept_apart, kept_fused, memory
from onelaunch.fuse.placing import place_regions
from onelaunch.fuse.record import record
from onelaunch.fuse.region import Options
from onelaunch.fuse.roofline import DEVICES
from onelaunch.measured_times import MeasuredTimes
from onelaunch.ops import linear_choice
from onelaunch.ops.linear import _EagerLinear

ROWS, WIDTH, INNER = 64, 32, 128
BERT = lambda: nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH), nn.Dropout(0.1))  # noqa: E731


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the storages autograd keeps after one call, beside the input, the parameters and the result."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    held = {tensor.untyped_storage()._cdata for tensor in (x, y, *model.parameters(), *model.buffers())}
    return sum(size for key, size in storages.items() if key not in held)


def steps_of(model: nn.Module, x: torch.Tensor) -> list[Step]:
    watched, _ = place_regions(model.train(), Options(), sized=True, everywhere=True)
    recorded = record(watched, (x,))
    (one,) = recorded.chains
    return [recorded.steps[position] for position in one.steps]


@pytest.mark.parametrize(
    "layers",
    [
        (nn.GELU(),), (nn.Dropout(0.1),), (nn.GELU(), nn.Dropout(0.1)), (nn.ReLU(),), (nn.ReLU(), nn.Dropout(0.1)),
        (nn.Sigmoid(), nn.Dropout(0.1)), (nn.SiLU(),), (nn.LeakyReLU(),),
    ],
    ids=lambda layers: " + ".join(type(layer).__name__ for layer in layers),
)  # fmt: skip
def test_kept_bytes_are_those_counted(
    layers: tuple[nn.Module, ...], every_chain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The op itself, as on a GPU.
    monkeypatch.setattr(sys.modules["onelaunch.ops.linear"], "is_eager_cpu", lambda *_: False)
    model = nn.Sequential(nn.Linear(WIDTH, INNER), *layers).to(torch.bfloat16)
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    steps = steps_of(model, x)
    # On a CPU PyTorch's dropout keeps its mask as bf16, on CUDA as bytes.
    mask = ROWS * INNER if any(isinstance(layer, nn.Dropout) for layer in layers) else 0
    assert kept_bytes(model, x) - mask == kept_apart(steps)
    assert kept_bytes(ol.fuse(model), x) == kept_fused(steps)
    apart, fused = memory(steps)
    assert fused <= apart
    assert apart >= kept_apart(steps)


def test_bert_block_keeps_bits_for_a_mask(every_chain: None) -> None:
    model, x = BERT().to(torch.bfloat16), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    z = y = ROWS * INNER * 2  # before and after the gelu
    elements = ROWS * WIDTH
    assert kept_bytes(model, x) == z + y + 2 * elements
    assert kept_bytes(ol.fuse(model), x) == z + y + elements // 8


def test_linear_lets_go_of_its_input_before_the_gradient_of_it_is_made() -> None:
    """The peak of a backward through two layers holds z and one of y and dy, never both of these."""
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((64, 4), (4096, 4), (4096,), (4, 4096), (4,))]
    x, w1, b1, w2, b2 = (tensor.requires_grad_() for tensor in tensors)

    def run() -> torch.Tensor:
        return _EagerLinear.apply(_EagerLinear.apply(x, w1, b1, "gelu", 0.0), w2, b2, None, 0.1)

    live = LiveBytes(torch.device("cpu"))
    with live:
        y = run()
        y.backward(torch.ones_like(y))
    wide = 64 * 4096 * 8
    products = [size for name, size in zip(live.operations, live.bytes, strict=True) if name == "mm"]
    assert products[1] - products[0] < 0.2 * wide  # the gradient of the second layer's input came, its input went

    y = run()
    leaves = (x, w1, b1, w2, b2)
    first = torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)
    second = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, torch.ones_like(y))


INTERPRETED = """
import torch, torch.nn.functional as F
from onelaunch.kernels.activation_dropout import activation_dropout_backward, activation_dropout_forward
from onelaunch.kernels.dropout_key import NO_KEY

z = torch.cat((torch.linspace(-9, 9, 4091), torch.tensor([0.0, -0.0, 1e-30, float("nan"), 40.0]))).view(8, 512)
dy, y, dz, dbias = torch.randn(8, 512), torch.empty(8, 512), torch.empty(8, 512), torch.empty(512)
activation_dropout_forward(z, None, y, None, activation="gelu", p=0.0, key=NO_KEY)
exact = z.double().requires_grad_()
wanted = F.gelu(exact)
(slope,) = torch.autograd.grad(wanted, exact, dy.double())
torch.testing.assert_close(y.double(), wanted.detach(), rtol=1e-6, atol=1e-6, equal_nan=True)
backward = lambda into, sums: activation_dropout_backward(
    dy, z, None, into, sums, activation="gelu", from_output=False, p=0.0)
backward(dz, dbias)
torch.testing.assert_close(dz.double(), slope, rtol=2e-6, atol=2e-6, equal_nan=True)
over, sums = z.clone(), torch.empty(512)
z = over  # the gradient takes the memory of z
backward(over, sums)
assert torch.equal(over.nan_to_num(), dz.nan_to_num()) and torch.equal(sums.nan_to_num(), dbias.nan_to_num())
"""


def test_gelu_of_the_pass_is_right_and_may_write_over_z() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("seconds", "lying", "fuses", "says"),
    [
        ((100e-6, 80e-6), (0, 0), True, "saves 20% of its time (measured)"),
        ((100e-6, 80e-6), (9e6, 1e6), True, "saves 20% of its time and 7.63 MiB of memory (measured)"),
        ((100e-6, 99.5e-6), (0, 0), True, "saves 0.5% of its time (measured)"),
        ((100e-6, 99.5e-6), (9e6, 1e6), True, "as fast within 2%, and saves 7.63 MiB of memory (measured)"),
        ((100e-6, 101.9e-6), (9e6, 1e6), True, "as fast within 2%, and saves 7.63 MiB of memory (measured)"),
        ((100e-6, 102.1e-6), (9e6, 1e6), False, "does not pay: 102 µs fused, 100 µs apart (measured)"),
        ((100e-6, 101e-6), (1e6, 1e6), False, "and no memory saved"),
        ((100e-6, 100e-6), (1e6, 2e6), False, "and no memory saved"),
        ((0.0, 0.0), (0, 0), False, "does not pay"),
    ],
)
def test_the_verdict_counts_time_then_memory(
    seconds: tuple[float, float], lying: tuple[float, float], fuses: bool, says: str
) -> None:
    verdict, reason = _verdict(seconds, lying, "measured")
    assert verdict is fuses
    assert says in reason


def test_measured_and_predicted_times_meet_the_same_rule() -> None:
    steps = steps_of(nn.Sequential(nn.Linear(WIDTH, INNER), nn.Dropout(0.1)), torch.randn(ROWS, WIDTH))
    apart, fused = memory(steps)
    assert fused < apart
    slower = judge(steps, DEVICES["H200"], measured=(1.0, 1.0 + NOISE / 2))
    assert slower.fused
    assert slower.memory == (apart, fused)
    assert not judge(steps, DEVICES["H200"], measured=(1.0, 1.0 + 2 * NOISE)).fused
    predicted = judge(steps, DEVICES["H200"])
    assert predicted.reason.endswith("(predicted)")
    explained = ol.explain(nn.Sequential(nn.Linear(WIDTH, INNER), nn.Dropout(0.1)), torch.randn(ROWS, WIDTH))
    assert explained.to_dict()["groups"][0]["memory"] == [apart, fused]
    assert "of memory" in explained.groups[0].reason


@pytest.mark.parametrize(
    "entry", [None, 3, "apart", {"apart": 1.0}, {"apart": 1.0, "fused": "2"}, {"apart": 1.0, "fused": float("nan")},
              {"apart": 0.0, "fused": 1.0}, {"apart": 1.0, "fused": 2.0, "bytes": 3.0}]
)  # fmt: skip
def test_entries_of_another_version_are_measured_again(entry: Any) -> None:
    assert timing._as_times(entry) is None
    assert timing._as_times({"apart": 1.0, "fused": 2.0}) == {"apart": 1.0, "fused": 2.0}


def test_bytes_said_know_the_implementation_from_the_disk() -> None:
    """An explanation in a new process, whose chains were timed before, says the same bytes as the first."""
    layers = nn.Linear(WIDTH, INNER), nn.GELU(), nn.Dropout(0.1)
    steps = steps_of(nn.Sequential(*layers).to(torch.bfloat16), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))
    key = f"torch.bfloat16 64 {INNER} {WIDTH} gelu True True True False 0 0 True"
    library, tile = linear_choice.LIBRARY.name, "128 x 128 x 64"

    def takes(choices: dict[str, Any], some: list[Step] = steps) -> bool:
        table = MeasuredTimes(Path("nowhere"))
        table.entries = choices
        return takes_extra_pass(some, table)

    assert takes({key: {library: 1.0, tile: 2.0}})
    assert not takes({key: {library: 2.0, tile: 1.0}})
    assert not takes({key.replace("gelu True", "gelu False"): {library: 1.0}})
    assert not takes({key.removesuffix("True") + "False": {library: 1.0}})  # of tensors that lie otherwise
    assert not takes({})
    assert not takes({key: {library: 1.0}}, steps[1:])
    damaged: list[Any] = [None, 3, "x", [], {}, {library: None}]
    assert not any(takes({key: entry}) for entry in damaged)
    bytes_said = [judge(steps, DEVICES["H200"], extra_pass=extra).after.total.bytes for extra in (False, True)]
    assert bytes_said[1] > bytes_said[0]


def test_memory_of_losses_folds_and_evaluation() -> None:
    half = torch.bfloat16
    logits, loss = Spec((64, 100), half, True), Spec((), half, True)
    assert memory([Step("cross_entropy", "cross_entropy", "", [logits], loss)]) == (2 * logits.bytes, logits.bytes)
    parts = [Step("log_softmax", "log_softmax", "", [logits], logits), Step("nll_loss", "nll_loss", "", [logits], loss)]
    assert memory(parts) == (2 * logits.bytes, logits.bytes)
    x, weight, y = Spec((64, 8), half, False), Spec((16, 8), half, False), Spec((64, 16), half, False)
    linear, relu = Step("linear", "linear", "", [x, weight], y), Step("activation", "relu", "", [y], y)
    norm = Step("batch_norm", "batch_norm", "", [y], y)
    assert memory([linear, relu]) == (y.bytes, 0)
    assert memory([linear, Step("activation", "relu", "", [y], y, {"inplace": True})]) == (0, 0)
    assert memory([linear, norm]) == (y.bytes, weight.bytes)


def test_plain_chain_on_a_cpu_keeps_what_pytorch_keeps() -> None:
    model, x = BERT(), torch.randn(ROWS, WIDTH)
    assert calls.plain_elsewhere
    assert kept_bytes(ol.fuse(model), x) == kept_bytes(model, x)
    torch.testing.assert_close(F.gelu(model[0](x)), ol.fuse(model[:2])(x))
