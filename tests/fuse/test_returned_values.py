"""What a forward returns, or a child that is called as a whole: None among its parts, dataclasses that are more than parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.fuse.placing import regions
from tests.fuse.compare import assert_same
from tests.fuse.small_models import Backbone, rows

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


# Whether something is None in what a child returns that is called as a whole.


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


# What a forward makes itself.


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
