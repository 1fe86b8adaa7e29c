"""What `ol.explain` says: who runs each operation, what it costs, where graphs end; on a machine without a GPU too."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import onelaunch as ol
from onelaunch.fuse.explain import _sources
from onelaunch.fuse.explanation import INDUCTOR, LIBRARY, OURS
from tests.fuse.models import ResNet


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no word of a table is broken."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def encoder() -> ol.Explanation:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return ol.explain(nn.TransformerEncoder(layer, 3), torch.randn(2, 5, 16))


def test_equal_blocks_are_shown_once(encoder: ol.Explanation) -> None:
    rows = {group.name: count for count, group in encoder.rows()}
    assert rows["linear + relu + dropout"] == 3
    assert rows["linear + dropout"] == 3
    text = str(encoder)
    assert "linear + relu + dropout × 3" in text
    assert "layers.*.linear1" in text
    assert "symbolically traced" not in text
    assert encoder.notes == ["chains that no pattern of ours takes: multi_head_attention → dropout × 3"]


def test_who_runs_what(encoder: ol.Explanation) -> None:
    runs = {group.runs for group in encoder.groups}
    assert runs == {OURS, INDUCTOR, LIBRARY}
    seen = sorted(index for group in encoder.groups for index in group.operations)
    assert seen == list(range(len(encoder.operations)))  # each operation in one group
    for group in encoder.groups:
        assert group.after.bytes <= group.before.bytes
        assert group.after.launches <= group.before.launches
    assert encoder.after.seconds < encoder.before.seconds
    assert "pattern linear" in str(encoder)


def test_resnet() -> None:
    explained = ol.explain(ResNet(), torch.randn(4, 3, 16, 16))
    names = [group.name for group in explained.groups]
    assert names.count("batch_norm + relu") == 5
    assert "add" not in names  # batch norm's counter is no operation
    assert sum(group.runs == LIBRARY for group in explained.groups) == 11


def test_predicted_kernels_never_cross_a_library_call() -> None:
    """An operation that waits for a product that waits for another operation is in another kernel than it."""
    weight = torch.randn(8, 8)

    def forward(x: torch.Tensor) -> torch.Tensor:
        a = torch.sin(x)
        b = torch.cos(a)
        c = F.linear(a, weight)
        return torch.exp(b + c) + a

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(x)

    explained = ol.explain(Model(), torch.randn(4, 8))
    assert [group.name for group in explained.groups] == ["sin + cos", "linear", "add + exp + add"]
    for number, group in enumerate(explained.groups):
        sources = {source for index in group.operations for source in explained.operations[index].sources}
        before = {index for other in explained.groups[:number] for index in other.operations}
        assert sources <= before | set(group.operations)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.a(x))
        if x.sum().item() > 1e9:
            return x
        return F.relu(self.b(x))


def test_a_graph_break_is_a_plain_note() -> None:
    explained = ol.explain(Broken(), torch.randn(3, 4))
    note = explained.notes[0]
    assert note.startswith("graph 1 of 2 ends here: a tensor's value is read on the host (test_explain.py:")
    assert [group.name for group in explained.groups].count("linear + relu") == 2


def test_operations_without_a_pattern_have_a_note() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 4), nn.Softmax(1))
    explained = ol.explain(model, torch.randn(3, 4))
    assert explained.notes == ["chains that no pattern of ours takes: linear → softmax × 2"]
    assert [group.reason for group in explained.groups] == [
        "no pattern takes linear → softmax", "alone beside linear (library)",
        "no pattern takes linear → softmax", "alone beside linear (library)",
    ]  # fmt: skip


def test_a_recurrent_model_says_why_it_is_not_captured() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0]

    explained = ol.explain(Recurrent(), torch.randn(3, 2, 4))
    assert explained.notes == [
        "Dynamo captured nothing (recurrent layers are not captured): the model runs as PyTorch operations"
    ]
    assert "0 operations" in str(explained)


def test_evaluation_counts_no_backward_pass() -> None:
    explained = ol.explain(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(3, 4))
    assert explained.before.launches == 2
    with_gradient = ol.explain(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(3, 4, requires_grad=True))
    assert with_gradient.before.launches == 5


@pytest.fixture
def read(inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: kernels are read from what Inductor generates, here for the CPU, with the patterns that would pay."""
    monkeypatch.setattr(sys.modules["onelaunch.fuse.explain"], "is_read", lambda device: True)
    for name in ("onelaunch.fuse.explain", "onelaunch.fuse.patterns"):
        monkeypatch.setattr(sys.modules[name], "pays", lambda match: match.pattern.pays(match))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(F.gelu(self.a(x)) + x)
        return torch.tanh(self.b(y) * 2).exp()


@pytest.mark.parametrize("training", [True, False])
def test_kernels_read_from_generated_code(training: bool, read: None) -> None:
    explained = ol.explain(Small().train(training), torch.randn(4, 8))
    assert explained.read
    assert [(group.name, group.runs) for group in explained.groups] == [
        ("linear + gelu", OURS), ("add + layer_norm", INDUCTOR), ("linear", LIBRARY), ("mul + tanh + exp", INDUCTOR),
    ]  # fmt: skip
    if not training:
        assert [group.after.launches for group in explained.groups] == [1, 1, 1, 1]
        assert explained.groups[1].reason == "one kernel for 2 operations"
    else:
        assert all(group.after.launches >= 2 for group in explained.groups)
    assert explained.groups[2].reason == "no pattern takes linear → mul"
    assert "kernels as generated" in str(explained)
    assert all(group.measured is None for group in explained.groups)  # of CUDA kernels alone


def test_reading_follows_the_measured_decision(read: None, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"uncompiled": 3.0, "compiled": 1.0, "compiled as a CUDA graph": 2.0, "linear as a CUDA graph": 2.0}
    monkeypatch.setattr(sys.modules["onelaunch.fuse.explain"], "known_seconds", lambda *args: times)
    explained = ol.explain(Small().eval(), torch.randn(4, 8))
    assert explained.groups[0].runs == LIBRARY
    assert explained.groups[0].reason == "pattern linear was slower"
    assert "compiled as a CUDA graph 2.00 s" in str(explained)


def test_patterns_that_training_outside_a_graph_does_not_try(read: None, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"uncompiled": 3.0, "compiled": 1.0}
    monkeypatch.setattr(sys.modules["onelaunch.fuse.explain"], "known_seconds", lambda *args: times)
    explained = ol.explain(Small().train(), torch.randn(4, 8))
    assert explained.groups[0].reason == "pattern linear is for CUDA graphs, as of train_step"
    unaligned = ol.explain(nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(100)), torch.randn(64, 100))
    assert unaligned.groups[0].reason == "pattern aligned_linear does not pay for this size, type or mode"


def test_graph_breaks_are_read_graph_by_graph(read: None) -> None:
    explained = ol.explain(Broken().eval(), torch.randn(3, 4))
    assert [(group.name, group.runs) for group in explained.groups] == [
        ("linear + relu", OURS), ("sum", INDUCTOR), ("linear + relu", OURS)
    ]  # fmt: skip


def test_a_compiler_that_fails_is_replaced_by_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no space left\nand more")

    monkeypatch.setattr(sys.modules["onelaunch.fuse.explain"], "is_read", lambda device: True)
    monkeypatch.setattr(sys.modules["onelaunch.fuse.explain"], "read_kernels", fail)
    explained = ol.explain(Small(), torch.randn(4, 8))
    assert not explained.read
    assert explained.notes[0] == "predicted, since Inductor cannot compile the model: no space left"


@pytest.mark.gpu
def test_kernels_are_read_and_timed_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512)).cuda()
    for training in (True, False):
        explained = ol.explain(model.train(training), torch.randn(256, 512, device="cuda"))
        assert explained.notes == []
        assert explained.read
        assert all(group.measured is not None and group.measured > 0 for group in explained.groups)
        assert "measured" in str(explained)


def test_what_does_not_pay_says_so() -> None:
    explained = ol.explain(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).double(), torch.randn(3, 4).double())
    assert {group.runs for group in explained.groups} == {LIBRARY, INDUCTOR}
    assert all(group.reason == "pattern linear does not pay for this size, type or mode" for group in explained.groups)
    evaluated = ol.explain(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()).eval(), torch.randn(3, 4))
    assert evaluated.groups[0].runs == INDUCTOR


def test_fused_models_inputs_and_state() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    x = torch.randn(3, 4)
    before, state = x.clone(), torch.get_rng_state()
    plain, fused = ol.explain(model, x), ol.explain(ol.fuse(model), x)
    assert fused.to_dict() == plain.to_dict()
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert int(model[1].num_batches_tracked) == 0
    changed = nn.ReLU(inplace=True)
    ol.explain(changed, x)
    assert torch.equal(x, before)


def test_named_inputs_devices_and_dict(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    explained = ol.explain(model, input=torch.randn(3, 4), device="A100")
    assert explained.device.name == "A100"
    read = json.loads(json.dumps(explained.to_dict()))
    assert set(read) == {
        "model",
        "mode",
        "device",
        "before",
        "after",
        "measured",
        "read",
        "groups",
        "operations",
        "notes",
        "rows",
    }
    assert set(read["groups"][0]) == {
        "name", "runs", "where", "operations", "fused", "reason", "bytes", "launches", "flops", "intensity", "bound",
        "predicted_seconds", "measured_seconds",
    }  # fmt: skip
    page = explained.html(tmp_path / "a" / "page.html")
    assert "Linear" in page.read_text()
    with pytest.raises(TypeError, match="path=3 is not a path"):
        explained.html(3)


def test_measured_candidates_are_shown() -> None:
    explained = ol.explain(nn.Linear(4, 4), torch.randn(3, 4))
    explained.measured = {"compiled": 2e-3}
    assert "measured per call: compiled 2.00 ms" in str(explained)


def test_errors_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^inputs is empty: pass example inputs"):
        ol.explain(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"^device='Z80' is not known"):
        ol.explain(nn.Linear(4, 4), torch.randn(3, 4), device="Z80")
    with pytest.raises(ValueError, match="not initialised"):
        ol.explain(nn.LazyLinear(4), torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"^explain\(float32\[3, 5\]\) is not possible: mat1 and mat2 shapes [^\n]*$"):
        ol.explain(nn.Linear(4, 4), torch.randn(3, 5))
    with pytest.raises(TypeError, match=r"^explain has no argument 'devise', nor has the model: Linear\.forward has"):
        ol.explain(nn.Linear(4, 4), torch.randn(3, 4), devise="H200")


class LanguageModel(nn.Module):
    """Returns its logits and, for labels, its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Embedding(5000, 8), nn.Linear(8, 5000)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(tokens))
        return (
            {"logits": logits}
            if labels is None
            else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        )


def test_results_beside_a_loss_are_left_out_as_in_a_step() -> None:
    model, tokens = LanguageModel(), torch.randint(5000, (64,))
    explained = ol.explain(model, tokens, labels=tokens)
    assert [group.name for group in explained.groups if group.runs == OURS] == ["linear + cross_entropy"]
    assert [group.where for group in explained.groups] == ["body", "head"]
    assert explained.notes == ["what the model returns beside its loss is left out, as train_step does"]
    for alone in (ol.explain(model, tokens), ol.explain(model.eval(), tokens, labels=tokens)):
        assert not any(group.runs == OURS for group in alone.groups)
        assert not any("beside its loss" in note for note in alone.notes)


class Output:
    def __init__(self, **values: torch.Tensor) -> None:
        vars(self).update(values)

    @property
    def loss(self) -> torch.Tensor:
        raise ValueError("no labels")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss, logits: (logits, loss), lambda loss, logits: {"loss": None, "logits": logits, "other": loss},
        lambda loss, logits: {"loss": loss.detach(), "logits": logits}, lambda loss, logits: {"loss": logits, "other": loss},
        lambda loss, logits: Output(logits=logits, other=loss), lambda loss, logits: {"loss": loss},
    ],
)  # fmt: skip
def test_results_without_a_loss_of_their_own_stay(wrap: Callable[..., Any]) -> None:
    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = LanguageModel()

        def forward(self, tokens: torch.Tensor, batch: dict[str, torch.Tensor]) -> Any:
            found = self.inner(tokens, batch.pop("labels"))  # an input that is gone after one call
            return wrap(found["loss"], found["logits"])

    tokens = torch.randint(5000, (64,))
    notes = ol.explain(Wraps(), tokens, {"labels": tokens}).notes
    assert not any("beside its loss" in note for note in notes)


def test_inputs_without_rows_and_features() -> None:
    assert len(ol.explain(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(0, 8)).operations) == 2
    assert len(ol.explain(nn.GRUCell(0, 5), torch.randn(4, 0)).operations) >= 1


def test_the_table_fits_its_terminal(encoder: ol.Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 100, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, str(encoder).splitlines())) <= columns


def test_what_is_scattered_is_whole_before_it_is_read() -> None:
    class Scatters(nn.Module):
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x).index_add(0, index, x).exp() + 1

    groups = ol.explain(Scatters(), torch.randn(4, 3), torch.arange(4)).groups
    assert [group.name for group in groups] == ["zeros_like", "index_add", "exp + add"]


def test_a_forward_that_computes_gradients_is_explained_in_training() -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.body(x).sum(), x, create_graph=True)[0]

    with pytest.raises(
        ValueError, match=r"evaluation runs without gradients here, which Slope computes: call its train\(\)"
    ):
        ol.explain(Slope().eval(), torch.rand(8, 1))


def test_sources_through_many_views() -> None:
    """Each node is looked at once: paths through views with two inputs are exponentially many, and chains may be long."""

    class Looked(dict[fx.Node, int]):
        count = 0

        def __contains__(self, node: object) -> bool:
            self.count += 1
            assert self.count < 10_000
            return super().__contains__(node)

    graph = fx.Graph()
    one, two = graph.placeholder("one"), graph.placeholder("two")
    node = graph.call_method("view_as", (one, two))
    for _ in range(1500):
        node = graph.call_method("view_as", (node, graph.call_method("view", (node, 24))))
    assert _sources(node, Looked({one: 0, two: 1})) == [one, two]
    assert _sources(graph.call_method("view_as", (two, node)), Looked({one: 0, two: 1})) == [two, one]


def test_checkpointed_blocks_are_shown_and_have_no_patterns() -> None:
    class Block(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
            self.checkpointed = checkpointed

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
            return x + inner

    with_it, without = (ol.explain(Block(on), torch.randn(4096, 512)) for on in (True, False))
    assert [operation.name for operation in with_it.operations] == ["linear", "gelu", "linear", "add"]
    assert with_it.before == without.before == with_it.after
    assert sum("is not used in checkpointed blocks" in group.reason for group in with_it.groups) == 2
    assert "the second forward pass of checkpointed blocks is not counted" in with_it.notes


def test_parts_that_are_not_captured_are_named() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.loops, self.unused = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return excluded(self.loops, x) + 1

    @torch.compiler.disable
    def excluded(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x)

    (note,) = [note for note in ol.explain(Sometimes(), torch.randn(3, 4)).notes if note.startswith("in no captured")]
    assert note == "in no captured graph, or unused (a function is excluded by torch.compiler.disable): loops, unused"
    plain = nn.Sequential(nn.Linear(4, 4))
    plain.unused = nn.Linear(4, 4)
    plain.forward = plain[0].forward  # type: ignore[method-assign]
    assert not [note for note in ol.explain(plain, torch.randn(3, 4)).notes if note.startswith("in no captured")]
