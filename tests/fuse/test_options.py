"""What `fuse` takes, and what it gives back when there is nothing to do."""

from __future__ import annotations

import pytest
from torch import nn

import onelaunch as ol
from onelaunch.errors import OnelaunchError
from onelaunch.fuse.placing import place_regions, regions
from onelaunch.fuse.region import Options
from tests.fuse.compare import assert_same, fused_names, planned
from tests.fuse.small_models import rows

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


def named() -> nn.Module:
    model = nn.Sequential()
    for name in ("first", "second"):
        model.add_module(name, nn.Sequential(nn.Linear(12, 12), nn.ReLU()))
    return model.double()


def test_only_and_skip() -> None:
    model = named()
    for options in ({"only": "first"}, {"skip": ["second"]}, {"only": ("first.0", "first.1")}):
        fused = ol.fuse(model, **options)
        assert [region.path for region in regions(fused)] == ["first"]
        assert_same(model, fused, rows())
    with pytest.raises(OnelaunchError, match=r"skip='secnd' is not a module of Sequential.*did you mean 'second'"):
        ol.fuse(model, skip="secnd")
    with pytest.raises(TypeError, match="model is a int: pass a torch"):
        ol.fuse(3)  # type: ignore[type-var]


def test_eval_only() -> None:
    model = named()
    fused = ol.fuse(model, eval_only=True)
    fused.train()
    assert planned(fused, rows()) == []
    fused.eval()
    assert planned(fused, rows()) == ["linear + relu"] * 2
    assert_same(model, fused, rows())


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3),
        nn.Sequential(),
        nn.LayerNorm(3),
        nn.ModuleList([nn.Linear(3, 3)]),
        nn.LazyLinear(3),
        nn.LSTM(3, 3),
    ],
)
def test_nothing_to_fuse_comes_back_and_says_so(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    assert ol.fuse(model) is model
    assert caplog.text.count("fuse: ") == 1


def test_fusing_twice_is_fusing_once() -> None:
    model = named()
    fused = ol.fuse(model)
    assert ol.fuse(fused) is fused
    assert ol.fuse(model) is not fused
    outer = nn.Sequential(fused, nn.Linear(12, 12), nn.ReLU()).double()
    again = ol.fuse(outer)
    assert len(fused_names(again, True)) == 3
    assert_same(outer, again, rows())
    assert [region.path for region in regions(ol.fuse(fused, skip="first"))] == ["second"]


def test_placing_leaves_the_model_as_it_was() -> None:
    model = named()
    next(model.children()).eval()
    before = [dict(vars(module)) for module in model.modules()]
    place_regions(model, Options())
    assert [dict(vars(module)) for module in model.modules()] == before
