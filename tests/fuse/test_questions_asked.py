"""Questions that a forward asks where its names do not lead, and those whose answer may be another one at the next call."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.fuse.arguments import Arguments
from onelaunch.fuse.placing import regions
from onelaunch.fuse.readable import read
from onelaunch.fuse.region import MOST_PLANS, WORTH_A_PLAN
from onelaunch.fuse.tracing import RefusedError, trace
from tests.fuse.compare import assert_same, fused_names, planned

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


def rows() -> torch.Tensor:
    return torch.randn(9, 12, dtype=torch.float64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))


def refusal(model: nn.Module) -> str:
    with pytest.raises(RefusedError) as refused:
        trace(model, Arguments.required_by(type(model).forward))
    return str(refused.value)


# What a forward runs though its own code does not say so.


class AsksForMode(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if torch.is_grad_enabled() else 1)


class AsksForDtype(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.dtype is torch.float64 else 1)


class Catches(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x) + x[:, :, 0]
        except IndexError:
            return super().forward(x)


def child_of(kind: type[Layer]) -> Layer:
    class Child(kind):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    return Child()


def doubled_with_gradients(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.is_grad_enabled() else x


def undressed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: nn.Module, x: torch.Tensor) -> Any:
        return forward(self, x)

    return called


class Helped(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return doubled_with_gradients(super().forward(x))


class Held(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.functions = {"double": functools.partial(doubled_with_gradients)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.functions["double"](super().forward(x))


class Property(Layer):
    @property
    def scale(self) -> float:
        return 2.0 if torch.is_grad_enabled() else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class OfTheClass(Layer):
    @classmethod
    def scaled(cls, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.is_grad_enabled() else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(super().forward(x))


class Decorated(Layer):
    @undressed
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x)) * (2 if torch.is_grad_enabled() else 1)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (child_of(AsksForMode), "AsksForMode.forward, which calls is_grad_enabled"),
        (child_of(AsksForDtype), "AsksForDtype.forward, which compares a dtype"),
        (child_of(Catches), "Catches.forward, which catches exceptions"),
        (Helped(), "doubled_with_gradients, which calls is_grad_enabled"),
        (Held(), "doubled_with_gradients, which calls is_grad_enabled"),
        (Property(), "Property.scale, which calls is_grad_enabled"),
        (OfTheClass(), "OfTheClass.scaled, which calls is_grad_enabled"),
        (Decorated(), "Decorated.forward, which calls is_grad_enabled"),
    ],
)
def test_all_that_runs_is_read(model: nn.Module, reason: str) -> None:
    assert reason in refusal(model.double())
    outer = nn.Sequential(model, nn.Linear(12, 12), nn.Tanh()).double()
    fused = ol.fuse(outer)
    assert fused_names(fused, True) == ["linear + tanh"]
    assert_same(outer, fused, rows())


def test_all_that_runs_is_read_while_a_file_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fused_at_import.py"
    file.write_text("import onelaunch as ol\nfrom tests.fuse.test_questions_asked import Helped\nmodel = Helped()\n")
    with file.open("a") as added:
        added.write("fused = ol.fuse(model)\n")
    monkeypatch.syspath_prepend(tmp_path)
    imported = importlib.import_module("fused_at_import")
    assert imported.fused is imported.model


def test_what_an_import_inside_the_forward_runs_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_on_the_way.py").write_text(
        "def tried():\n    try:\n        return 2\n    except ValueError:\n        return 3\nfactor = tried()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    class Imports(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import imported_on_the_way  # type: ignore[import-not-found]

            return super().forward(x) * imported_on_the_way.factor

    model = Imports().double()
    fused = ol.fuse(model)
    assert fused_names(fused, True) == ["linear + relu"]
    assert_same(model, fused, rows())


def test_a_class_is_read_once() -> None:
    ol.fuse(nn.Sequential(Layer(), Layer()))
    before = read.cache_info().misses
    ol.fuse(nn.Sequential(Layer(), Layer(), Layer()))
    assert read.cache_info().misses == before


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


class AsksOfConstants(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * pair(3)[1]


def test_a_helper_may_ask_for_the_types_of_constants() -> None:
    model = AsksOfConstants().double()
    fused = ol.fuse(model)
    assert fused_names(fused, True) == ["linear + relu"]
    assert_same(model, fused, rows())


def test_what_the_garbage_collector_calls_is_not_read() -> None:
    def collected(phase: str, found: dict[str, int]) -> None:
        with contextlib.suppress(ValueError):
            torch.is_grad_enabled()

    model = nn.Sequential(*(Layer() for _ in range(8))).double()
    threshold = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        fused = ol.fuse(model)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collected)
    assert gc.isenabled()
    assert fused_names(fused, True) == ["linear + relu"] * 8


def test_debuggers_and_profilers_stay_where_they_are() -> None:
    def watch(frame: FrameType, event: str, argument: Any) -> None:
        return None

    model = Helped().double()
    debugger, profiler = sys.gettrace(), sys.getprofile()
    try:
        sys.settrace(watch)
        assert "is_grad_enabled" in refusal(model)
        assert sys.gettrace() is watch
        sys.setprofile(watch)
        assert "a debugger and a profiler" in refusal(model)
        sys.settrace(None)
        assert "is_grad_enabled" in refusal(model)
        assert sys.getprofile() is watch
    finally:
        sys.settrace(debugger)
        sys.setprofile(profiler)
    assert (sys.gettrace(), sys.getprofile()) == (debugger, profiler)


# A context that only a trace would enter.

scale = contextvars.ContextVar("scale", default=1.0)


@contextlib.contextmanager
def scaled(by: float) -> Iterator[None]:
    token = scale.set(by)
    yield
    scale.reset(token)


class Scaled(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError(x)
        return super().forward(x) * scale.get()


class Contexts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child, self.fc, self.last = Scaled(), nn.Linear(12, 12), nn.Sequential(nn.Linear(12, 12), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sigmoid(self.fc(self.inside(x))))

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        with scaled(2.0):
            return self.child(x)


class NotToday(Contexts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sigmoid(self.fc(self.child(x) if self.fc.in_features > 1 else self.inside(x))))


def test_a_context_that_is_not_entered() -> None:
    model = NotToday().double()
    fused = ol.fuse(model)
    assert {region.path for region in regions(fused)} == {"", "last"}
    assert_same(model, fused, rows())


class DecoratedByAContext(Contexts):
    @scaled(3.0)
    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x)


class EnteredByHand(Contexts):
    def inside(self, x: torch.Tensor) -> torch.Tensor:
        stack = contextlib.ExitStack()
        stack.enter_context(scaled(4.0))
        x = self.child(x)
        stack.close()
        return x


@scaled(5.0)
def called_inside(child: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return child(x)


class InAHelper(Contexts):
    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return called_inside(self.child, x)


@pytest.mark.parametrize("kind", [Contexts, DecoratedByAContext, EnteredByHand, InAHelper])
def test_a_context_around_a_child(kind: type[Contexts]) -> None:
    model = kind().double()
    fused = ol.fuse(model)
    assert [region.path for region in regions(fused)] == ["last"]
    assert_same(model, fused, rows())


# Whether something is None in what a child returns that is called as a whole.


@dataclass
class Found:
    main: torch.Tensor
    aux: torch.Tensor | None = None


class Backbone(Layer):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        h = super().forward(x)
        if x.isnan().any():
            raise ValueError(x)
        match self.kind:
            case "dataclass":
                return Found(h)
            case "dict":
                return {"main": h, "aux": None}
        return h, None


def first_given(a: torch.Tensor | None, b: torch.Tensor) -> torch.Tensor:
    return b if a is None else a


class Head(nn.Module):
    def __init__(self, kind: str, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.backbone, self.fc, self.body = Backbone(kind), nn.Linear(12, 12), body
        self.later = nn.Sequential(nn.Linear(12, 12), nn.Tanh())

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            mask = x * 0 + 1
        return self.later(torch.sigmoid(self.fc(self.body(self.backbone(x), mask))))


def attribute(out: Any, mask: torch.Tensor) -> torch.Tensor:
    return mask * (out.main if out.aux is None else out.aux)


def attribute_in_a_variable(out: Any, mask: torch.Tensor) -> torch.Tensor:
    aux = out.aux
    return mask * (out.main if aux is None else aux)


def attribute_that_is_not_there(out: Any, mask: torch.Tensor) -> torch.Tensor:
    extra = getattr(out, "extra", None)
    return mask * (out.main if extra is None else extra)


def asked_by_a_helper(out: Any, mask: torch.Tensor) -> torch.Tensor:
    return mask * first_given(out.aux, out.main)


def asked_in_a_list(out: Any, mask: torch.Tensor) -> torch.Tensor:
    return mask * next(part for part in [out.aux, out.main] if part is not None)


def item(out: Any, mask: torch.Tensor) -> torch.Tensor:
    return mask * (out["main"] if out["aux"] is None else out["aux"])


def item_with_a_default(out: Any, mask: torch.Tensor) -> torch.Tensor:
    aux = out.get("aux")
    return mask * (out["main"] if aux is None else aux)


def unpacked(out: Any, mask: torch.Tensor) -> torch.Tensor:
    main, aux = out
    return mask * (main if aux is None else aux)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("dataclass", attribute),
        ("dataclass", attribute_in_a_variable),
        ("dataclass", attribute_that_is_not_there),
        ("dataclass", asked_by_a_helper),
        ("dataclass", asked_in_a_list),
        ("dict", item),
        ("dict", item_with_a_default),
        ("tuple", unpacked),
        ("tuple", lambda out, mask: mask * (out[0] if out[1] is None else out[1])),
    ],
)
def test_none_in_what_a_child_returns(kind: str, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    model = Head(kind, body).double()
    fused = ol.fuse(model)
    assert [region.path for region in regions(fused)] == ["later"]
    assert_same(model, fused, rows())


def test_parts_that_nobody_compares() -> None:
    """The mask, which is compared, is an argument."""
    model = Head("dataclass", lambda out, mask: out.main * mask).double()
    fused = ol.fuse(model)
    assert "" in [region.path for region in regions(fused)]
    assert_same(model, fused, rows())
    assert_same(model, fused, rows(), mask=rows())


# What parameters answer, which a later `double()` or `requires_grad_()` changes.


class AsksParameters(Layer):
    def __init__(self, question: Callable[[nn.Module], float]) -> None:
        super().__init__()
        self.question = question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(next(self.parameters()).dtype)) * self.question(self)


def frozen(model: nn.Module) -> float:
    return 1.0 if all(parameter.requires_grad for parameter in model.parameters()) else 3.0


def counted(model: nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) + 0.5


def precise(model: nn.Module) -> float:
    return 2.0 if next(model.parameters()).dtype.itemsize == 8 else 1.0


@pytest.mark.parametrize("question", [frozen, counted, precise])
def test_answers_of_parameters_are_guarded(question: Callable[[nn.Module], float]) -> None:
    model = AsksParameters(question)
    fused = ol.fuse(model)
    for change in (
        lambda: None,
        lambda: model.fc.requires_grad_(False),
        lambda: fused.double(),
        lambda: fused.requires_grad_(True),
        lambda: model.fc.bias.requires_grad_(False),
        lambda: setattr(model.fc, "weight", nn.Parameter(torch.randn(12, 12))),
    ):
        model.float()
        change()
        x = rows()
        assert planned(fused, x) == ["linear + relu"]
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-5)
        assert fused(x).dtype == model(x).dtype
    model.double()
    assert_same(model, fused, rows())


def test_answers_of_the_parameters_of_a_child_that_is_called_as_a_whole() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.fc = nn.Sequential(Backbone("tuple")), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.fc(self.backbone(x)[0])) * frozen(self.backbone)

    model = Whole().double()
    fused = ol.fuse(model)
    assert_same(model, fused, rows())
    for tree in (model, fused):
        new = Backbone("tuple").double().requires_grad_(False)
        new.load_state_dict(fused.backbone[0].state_dict())
        tree.backbone[0] = new  # type: ignore[index]
    x = rows()
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)
    assert planned(fused, x)


@pytest.mark.parametrize("name", ["grad", "data", "_version"])
def test_what_parameters_are_not_asked(name: str) -> None:
    model = AsksParameters(lambda model: 1.0 if getattr(next(model.parameters()), name) is None else 2.0)
    assert f"asks a tensor for its {name}" in refusal(model.double())
    assert ol.fuse(model) is model


# More ways to be called than a region has plans for.


def annealed() -> tuple[nn.Sequential, nn.Sequential]:
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.5)).double()
    return model, ol.fuse(model)


def test_values_that_never_repeat_are_left_alone_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    _, fused = annealed()
    x = rows()
    with caplog.at_level(logging.WARNING, "onelaunch"):
        for step in range(3 * MOST_PLANS):
            fused[2].p = 0.5 - step / 1000
            fused(x)
    assert [record.message.count("runs unfused") for record in caplog.records] == [1]
    region = regions(fused)[0]
    assert len(region.plans) == MOST_PLANS
    assert region.known_plan(Arguments.of((x,), {})) is None


def test_values_that_repeat_are_fused_however_many_there_were() -> None:
    model, fused = annealed()
    x = rows()
    for step in range(2 * MOST_PLANS):
        fused[2].p = model[2].p = 0.5 - step / 100
        fused(x)
    assert planned(fused, x) == []
    for mode in (True, False):
        fused.train(mode)
        for _ in range(WORTH_A_PLAN):
            fused(x)
        fused(x)
        assert planned(fused, x) == ["linear + relu + dropout"]
    assert len(regions(fused)[0].plans) == MOST_PLANS
    assert_same(model, fused, x)


def test_the_plan_that_goes_is_the_one_that_was_not_used_for_longest() -> None:
    _, fused = annealed()
    x = rows()
    for step in range(MOST_PLANS - 2):
        fused[2].p = 0.5 - (step + 1) / 100
        fused(x)
    region = regions(fused)[0]
    assert len(region.plans) == MOST_PLANS
    fused[2].p = 0.5  # of the first plan
    first = region.plan((x,), {})
    fused[2].p = 0.1
    for _ in range(WORTH_A_PLAN + 2):
        fused(x)
    assert planned(fused, x)
    assert any(plan is first for plan in region.plans)


@dataclass
class Doubled:
    logits: Tensor

    def __post_init__(self) -> None:
        self.logits = self.logits * 2


@dataclass
class Chances:
    logits: Tensor
    chances: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.chances = self.logits.softmax(-1)


@dataclass
class Plain:
    logits: Tensor


class Makes(nn.Module):
    def __init__(self, kind: Any, extra: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
        self.kind, self.extra = kind, extra

    def forward(self, x: Tensor) -> Any:
        made = self.kind(self.layers(x))
        if self.extra:
            made.note = "added"
        return made


@pytest.mark.parametrize("kind", [Doubled, Chances, Plain])
@pytest.mark.parametrize("extra", [False, True])
def test_a_dataclass_is_made_once(kind: Any, extra: bool) -> None:
    model, x = Makes(kind, extra).double(), torch.randn(3, 8, dtype=torch.float64)
    expected, found = model(x), ol.fuse(model)(x)
    assert vars(expected).keys() == vars(found).keys()
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-12)
