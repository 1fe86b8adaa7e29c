"""Hooks that a model and its fused one share: each is called once, with the module of the model that runs."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from tests.fuse.test_guards import Base, layer, rows

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


class Calibrated(Base):
    def __init__(self) -> None:
        super().__init__()
        self.ready, self.extra = False, 1.0
        self.register_load_state_dict_pre_hook(self.before)
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "loaded", True))
        self._register_state_dict_hook(self.after)  # type: ignore[no-untyped-call]

    def before(self, module: nn.Module, *_: Any) -> None:
        assert module is self
        self.ready = True

    def after(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}extra"] = torch.tensor(self.extra)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.fc(x)) * (2 if self.ready else 1)


def test_hooks_on_the_state_that_are_methods_act_on_the_fused_model() -> None:
    model = Calibrated()
    fused = ol.fuse(model)
    state = copy.deepcopy(fused.state_dict())
    fused.extra = 5.0
    assert (model.state_dict()["extra"], fused.state_dict()["extra"]) == (1.0, 5.0)
    del state["extra"]
    fused.load_state_dict(state)
    assert (model.ready, fused.ready, fused.loaded) == (False, True, True)
    assert not hasattr(model, "loaded")


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("on", ["model", "fused"])
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_backward_hook"])
def test_a_backward_hook_on_one_model_is_one_on_the_other(on: str, kind: str) -> None:
    model = nn.Sequential(layer(), nn.ReLU(), nn.Sequential(layer(), nn.Tanh()))
    fused = ol.fuse(model)
    other, x = ol.fuse(model, eval_only=True), rows()
    called: list[nn.Module] = []
    hook = getattr({"model": model, "fused": fused}[on][2], kind)(lambda module, *_: called.append(module))
    for one in (model, fused, other, copy.deepcopy(fused)):
        one(x).sum().backward()
        assert called == [one[2]]
        called.clear()
    hook.remove()
    fused(x).sum().backward()
    assert not called
    assert type(copy.deepcopy(model)[0]._backward_hooks) is collections.OrderedDict


def recorder(found: list[Any], key: str) -> Callable[..., None]:
    def record(module: nn.Module, given: Any, result: Any) -> None:
        found.append((key, module))

    return record


class RecordsLazily(Base):
    """Puts hooks on its layers when it is first asked to record, as transformers does for hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(layer(), nn.Tanh()), nn.Sequential(layer(), nn.ReLU())])

    def forward(self, x: torch.Tensor, found: list[Any] | None = None) -> torch.Tensor:
        if found is not None and not getattr(self, "installed", False):
            for index, one in enumerate(self.layers):
                one.register_forward_hook(recorder(found, f"layer {index}"), prepend=True)
            self.installed = True
        for one in self.layers:
            x = one(x)
        return x


@pytest.mark.parametrize("fused_first", [False, True])
def test_a_hook_that_is_made_for_both_models_counts_once(fused_first: bool) -> None:
    model, x = RecordsLazily(), rows()
    fused, found = ol.fuse(model), []  # type: tuple[RecordsLazily, list[Any]]
    for one in (fused, model, fused) if fused_first else (model, fused, model):
        found.clear()
        torch.testing.assert_close(one(x, found), model(x), rtol=0, atol=1e-12)
        assert found[:2] == [("layer 0", one.layers[0]), ("layer 1", one.layers[1])]
        assert len(found) == 4  # with the two of the model that it is compared with
    other: list[Any] = []
    handles = [model.layers[0].register_forward_hook(recorder(other, "again")) for _ in range(2)]
    fused(x)
    assert len(other) == 2  # one model may have a hook twice
    for handle in handles:
        handle.remove()
    fused(x)
    assert len(other) == 2


def test_a_dictionary_of_hooks_that_was_shared_stays_the_one() -> None:
    model, x = nn.Sequential(layer(), nn.Tanh()), rows()
    handle = model[0].register_forward_hook(lambda *_: None)
    first = ol.fuse(model, only="0", eval_only=True) if ol.fuse(model) is model else ol.fuse(model)
    handle.remove()
    ol.fuse(model)
    called: list[int] = []
    model[0].register_forward_hook(lambda *_: called.append(1))
    first(x)
    assert called == [1]
