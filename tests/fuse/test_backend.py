"""`torch.compile(backend="onelaunch")`: found by its name, passes options to Inductor, and runs without a code generator."""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from onelaunch.fuse import backend, patterns
from onelaunch.fuse.backend import onelaunch


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches Inductor: (mode, options) of each graph."""
    found: list[Any] = []

    def inductor(gm: Any, example_inputs: Any, mode: Any, options: Any) -> Any:
        found.append((mode, options))
        return gm.forward

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", inductor)
    return found


def test_found_by_name() -> None:
    assert "onelaunch" in torch._dynamo.list_backends()


def test_mode_and_options_reach_inductor(forwarded: list[Any]) -> None:
    x, layer = torch.randn(3, 4), nn.Linear(4, 4)
    torch.compile(layer, backend="onelaunch", mode="max-autotune-no-cudagraphs")(x)
    torch._dynamo.reset()
    torch.compile(layer, backend="onelaunch", options={"max_autotune": True})(x)
    torch._dynamo.reset()
    torch.compile(layer, backend="onelaunch")(x)
    assert forwarded == [("max-autotune-no-cudagraphs", {}), (None, {"max_autotune": True}), (None, {})]


def test_modes_become_settings_of_inductor(inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    found: list[dict[str, Any]] = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, inputs, config_patches: found.append(config_patches))
    gm = torch.fx.symbolic_trace(nn.ReLU())
    backend._inductor(gm, [], "reduce-overhead", {"epilogue_fusion": False})
    assert found[0]["triton.cudagraphs"] is True
    assert found[0]["epilogue_fusion"] is False
    with pytest.raises(RuntimeError, match="mode"):
        backend._inductor(gm, [], "fastest", {})


def test_without_a_code_generator_one_line_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: f"no compiler for {device}")
    backend._log_once.cache_clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(3, 4)
    with caplog.at_level(logging.WARNING, "onelaunch"):
        for _ in range(2):
            torch._dynamo.reset()
            torch.testing.assert_close(torch.compile(model, backend=onelaunch)(x), model(x))
        torch.compile(lambda: torch.ones(3) + 1, backend=onelaunch)()  # a graph without inputs
    messages = [record.getMessage() for record in caplog.records if record.name == "onelaunch"]
    assert messages == ["no compiler for cpu: the model runs as PyTorch operations, without generated code"]
    backend._log_once.cache_clear()


def test_a_missing_compiler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    assert backend.no_code_generator_reason.__wrapped__("cpu") == "there is no C++ compiler"
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    assert backend.no_code_generator_reason.__wrapped__("cuda") == "Triton is not installed"
    assert backend.no_code_generator_reason.__wrapped__("mps") == ""


def test_with_inductor_and_forced_patterns(inductor: None) -> None:
    """The rewritten graph through code generation, forward and backward."""
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU()).double()
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(model, backend=lambda gm, inputs: onelaunch(gm, inputs, forced=True))
    got, expected = compiled(x), model(x)
    torch.testing.assert_close(got, expected)
    one, two = (torch.autograd.grad(y.square().sum(), [x, *model.parameters()]) for y in (got, expected))
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("rows", "options", "replaced"),
    [
        (64, {}, ["linear (2 as one)", "linear (2 as one)"]),
        (64, {"captured": True}, ["linear + gelu", "linear (2 as one)", "linear (2 as one)"]),
        (64, {"mode": "reduce-overhead"}, ["linear + gelu", "linear (2 as one)", "linear (2 as one)"]),
        (2**21, {}, ["linear + gelu", "linear + relu"]),
    ],
)
def test_outside_a_graph_small_results_take_no_op_of_ours(
    rows: int, options: dict[str, Any], replaced: list[str], forwarded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CUDA device. Of 2**21 rows, 16 values have 128 MiB, and the two products are not merged."""
    monkeypatch.setattr(patterns, "is_on_cuda", lambda match: True)
    found: list[str] = []

    def spied(*args: Any, **kwargs: Any) -> Any:
        matches = patterns.rewrite(*args, **kwargs)
        found.extend(match.title for match in matches)
        return matches

    monkeypatch.setattr(backend, "rewrite", spied)
    first, query, key = (nn.Linear(16, 32, device="meta"), *(nn.Linear(32, 16, device="meta") for _ in range(2)))

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(first(x))
        return torch.tanh(query(h)) * torch.relu(key(h)).sum()

    compiled = torch.compile(forward, backend=lambda gm, inputs: onelaunch(gm, inputs, **options))
    compiled(torch.randn(rows, 16, device="meta"))
    assert found == replaced


def test_no_op_of_ours_runs_again_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the logits are not stored, more is recomputed: chains that Inductor fuses, and nothing else."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    for name, forward in (("linear", "forward_reference"), ("linear_cross_entropy", "_forward")):
        module = importlib.import_module(f"onelaunch.ops.{name}")
        monkeypatch.setattr(module, forward, counted(name, getattr(module, forward)))
    partitioned = torch._dynamo.lookup_backend("aot_eager_decomp_partition")
    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, inputs, mode, options: partitioned(gm, inputs))
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model, head = nn.Sequential(*blocks), nn.Linear(64, 5000)
    x, y = torch.randn(4096, 64), torch.randint(5000, (4096,))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(head(model(x)), y)

    ours = partial(onelaunch, forced=True, patterns=("linear", "linear_cross_entropy"))
    torch.compile(loss, backend=ours)(x).backward()
    assert calls == {"linear": 4, "linear_cross_entropy": 1}


def test_a_checkpointed_block_is_recomputed_with_the_same_mask_without_a_code_generator(no_code: None) -> None:
    weight = torch.ones(64, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(weight.sin() * x, 0.5)

    compiled = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False), backend="onelaunch")
    for _ in range(3):
        y = compiled(torch.ones(64))
        (gradient,) = torch.autograd.grad(y.sum(), weight)
        assert torch.equal(y != 0, gradient != 0)
