"""What people hand to `fuse` and `explain` that is no plain model: compiled, scripted, unfinished, of odd types."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import onelaunch as ol
from onelaunch.errors import ArgumentTypeError, OnelaunchError
from onelaunch.fuse.placing import regions
from tests.fuse.compare import fused_names

X = torch.randn(5, 8)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))


def compiled_in_place() -> nn.Module:
    model = mlp()
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.compile(mlp(), backend="eager"), "compiled"),
        (compiled_in_place, "compiled"),
        (lambda: torch.jit.trace(mlp().eval(), X), "scripted"),
    ],
    ids=["torch.compile", "module.compile", "jit.trace"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("sized", [False, True])
def test_a_model_that_cannot_be_taken_apart_comes_back(
    make: Any, why: str, sized: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    with caplog.at_level(logging.WARNING, "onelaunch"):
        assert ol.fuse(model, *([X] if sized else [])) is model
    assert f"it is {why}; fuse it before that" in caplog.text


def test_a_compiled_part_stays_as_it_is_beside_fused_ones() -> None:
    inner = mlp().eval()
    compiled: Any = torch.compile(inner, backend="eager")
    model = nn.Sequential(compiled, nn.Linear(8, 8), nn.GELU()).eval()
    fused = ol.fuse(model, X)
    assert fused_names(fused, training=False) == ["linear + gelu"]
    assert not regions(inner)  # the original's own modules
    assert fused[0] is model[0]
    with torch.no_grad():
        torch.testing.assert_close(fused(X), model(X))


def test_explain_looks_into_a_compiled_model() -> None:
    explained = ol.explain(torch.compile(mlp(), backend="eager"), X)
    assert [group.name for group in explained.groups] == ["linear + relu + dropout"]
    with pytest.raises(OnelaunchError, match=r"pass it before model\.compile"):
        ol.explain(compiled_in_place(), X)


def test_a_graph_module_is_fused() -> None:
    model = fx.symbolic_trace(mlp()).eval()
    fused = ol.fuse(model)
    assert fused is not model
    torch.testing.assert_close(fused(X), model(X))


class EndsTheProgram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > -1e9:
            return self.inside(x)
        sys.exit(3)


class Exits(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.exit(3)


def test_a_forward_that_ends_the_program_does_not_end_the_tracing(caplog: pytest.LogCaptureFixture) -> None:
    model = Exits()
    with caplog.at_level(logging.WARNING, "onelaunch"):
        assert ol.fuse(model) is model
    assert "SystemExit 3" in caplog.text
    assert ol.fuse(EndsTheProgram()) is not None


class Deep(nn.Module):
    """Its layer lies below more lists than Python's parser takes parentheses."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = nn.ModuleList([nn.Linear(8, 4)])
        for _ in range(220):
            self.lists = nn.ModuleList([self.lists])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: Any = self.lists
        while len(inner._modules):
            inner = inner[0]
        return F.relu(inner(x))


def test_modules_nested_deeper_than_the_parser_goes(caplog: pytest.LogCaptureFixture) -> None:
    model = Deep()
    with caplog.at_level(logging.WARNING, "onelaunch"):
        assert ol.fuse(model) is model
    assert "its code cannot be written: too many nested parentheses" in caplog.text


class NoConstructor(nn.Module):
    def __init__(self) -> None:
        self.size = 3


@pytest.mark.parametrize("function", [ol.fuse, ol.explain])
def test_unfinished_models_are_refused_in_one_line(function: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"NoConstructor that is no module yet: call super\(\).__init__\(\)"):
        function(NoConstructor(), X)


def test_explain_leaves_an_uninitialised_model_alone() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    with pytest.raises(OnelaunchError, match="call it once before"):
        ol.explain(model, X)
    assert type(model[0]) is nn.LazyLinear
    model(X)
    assert ol.explain(model, X).groups[0].fused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"only": 3}, "only is a int"),
        ({"skip": None}, "skip is a NoneType"),
        ({"only": [0]}, "did you mean '0'"),
        ({"time": "wall"}, "time='wall' is not known: pass one of 'auto', 'device', 'program'"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OnelaunchError, match=says):
        ol.fuse(mlp(), X, **options)


def test_the_whole_model_has_a_name_too() -> None:
    assert fused_names(ol.fuse(mlp(), only=""), training=True) == ["linear + relu + dropout"]
    model = mlp()
    assert ol.fuse(model, skip="") is model


def test_the_time_that_counts_may_be_chosen_where_nothing_is_measured() -> None:
    for time in ("auto", "device", "program"):
        assert ol.explain(mlp(), X, time=time).groups[0].fused
        assert fused_names(ol.fuse(mlp(), X, time=time), training=True) == ["linear + relu + dropout"]


@pytest.mark.parametrize("path", ["", None, 3])
def test_a_page_needs_a_name(path: Any) -> None:
    with pytest.raises(OnelaunchError, match="path"):
        ol.explain(mlp(), X).html(path)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Linear(8, 4, dtype=torch.complex64), nn.Tanh()), X.to(torch.complex64)),
        (nn.Sequential(nn.Linear(8, 4), nn.GELU()), X.to_sparse()),
        (nn.Sequential(nn.Identity(), nn.ReLU(), nn.Dropout(1.0)), torch.ones(3, dtype=torch.int64)),
    ],
    ids=["complex", "sparse", "int"],
)
def test_values_the_ops_cannot_take_go_through_pytorch(model: nn.Module, x: torch.Tensor, every_chain: None) -> None:
    fused = ol.fuse(model)
    assert fused is not model
    assert torch.equal(fused(x), model(x))


def test_a_list_is_refused_as_pytorch_refuses_it() -> None:
    fused = ol.fuse(nn.Sequential(nn.Linear(8, 4), nn.GELU()))
    with pytest.raises(TypeError, match="must be Tensor, not list"):
        fused([1.0])
    with pytest.raises(OnelaunchError, match="inputs do not fit Sequential"):
        ol.explain(fused, [1.0])


class Keyed(nn.Module):
    """Takes and gives dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"logits": F.relu(self.layer(batch["x"])), "size": 3}


def test_dictionaries_in_and_out() -> None:
    model = Keyed()
    fused = ol.fuse(model, {"x": X})
    assert fused_names(fused, training=True) == ["linear + relu"]
    assert fused({"x": X})["size"] == 3
    torch.testing.assert_close(fused({"x": X})["logits"], model({"x": X})["logits"])
    with pytest.raises(OnelaunchError, match="inputs do not fit Keyed: KeyError 'x'"):
        ol.explain(model, {"y": X})


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_model_and_a_scripted_part_are_explained() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()))
    before = scripted[0].running_mean.clone()
    explained = ol.explain(nn.Sequential(scripted, nn.Linear(8, 8), nn.ReLU()), X)
    assert [group.name for group in explained.groups] == ["linear + relu"]
    assert any("it is scripted" in note for note in explained.notes)
    assert torch.equal(scripted[0].running_mean, before)
    assert not ol.explain(scripted, X).groups


class Labelled(nn.Module):
    """As many models take their target: or they do without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: None = None, labels: torch.Tensor | None = None) -> Any:
        z = self.layer(x)
        return z, None if labels is None else F.cross_entropy(z, labels)


def test_a_loss_behind_an_argument_that_may_be_left_out() -> None:
    model, labels = Labelled().double(), torch.randint(3, (5,))
    x = X.double()
    assert ol.fuse(model) is model  # nobody says that there will be labels
    fused = ol.fuse(model, x, labels=labels)
    assert [group.name for group in ol.explain(model, x, labels=labels).groups] == ["cross_entropy"]
    assert any(plan.fused for region in regions(fused) for plan in region.plans)
    for arguments in ({"labels": labels}, {}):
        for got, wanted in zip(fused(x, **arguments), model(x, **arguments), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    compiled: Any = torch.compile(fused, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, labels=labels)[1], model(x, labels=labels)[1], rtol=0, atol=1e-12)
