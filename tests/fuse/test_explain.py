"""What `ol.explain` says: who runs each operation, what it costs, where graphs end; on a machine without a GPU too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.fuse.explanation import INDUCTOR, LIBRARY, OURS
from tests.fuse.models import ResNet


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
    assert encoder.notes == []


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
    assert explained.notes == ["no pattern of ours covers softmax × 2: Inductor runs each by itself"]


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
    assert set(read) == {"model", "mode", "device", "before", "after", "measured", "groups", "operations", "notes"}
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
