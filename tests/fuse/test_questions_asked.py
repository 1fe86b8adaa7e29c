"""Questions that a forward asks where its names do not lead: in what it runs, and in contexts it enters."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.fuse.placing import regions
from onelaunch.fuse.readable import read
from tests.fuse.compare import assert_same, fused_names, refusal
from tests.fuse.small_models import Layer, rows

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


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
