"""How a forward takes its arguments: by place, by name, with stars, by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import onelaunch as ol
from onelaunch.cli.app import make_app
from onelaunch.fuse.decide import _ByPosition
from tests.fuse.compare import assert_same, fused_names
from tests.fuse.small_models import Layer, rows

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


def test_forwards_with_star_arguments_and_defaults_only() -> None:
    class Star(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 12)

        def forward(self, *inputs: torch.Tensor, **options: float) -> torch.Tensor:
            return F.relu(self.fc(inputs[0])) * options.get("scale", 1.0)

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> torch.Tensor:
            assert x is not None
            y = torch.tanh(self.fc(x))
            return y if mask is None else y * mask

    star, optional = Star().double(), Optional().double()
    assert fused_names(ol.fuse(star), True) == ["linear + relu"]
    assert_same(star, ol.fuse(star), rows())
    assert_same(star, ol.fuse(star), rows(), scale=2.0)
    assert fused_names(ol.fuse(optional), True) == ["linear + tanh"]
    assert_same(optional, ol.fuse(optional), rows())
    assert_same(optional, ol.fuse(optional), mask=rows(), x=rows())


class ByName(Layer):
    def forward(  # type: ignore[override]
        self, scale: float = 1.0, *, x: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        return F.relu(self.fc(x)) * scale


def test_inputs_by_name() -> None:
    model, x = ByName().double(), rows()
    for fused in (ol.fuse(model), ol.fuse(model, x=x), ol.fuse(model, 2.0, x=x)):
        assert fused_names(fused, training=True) == ["linear + relu"]
        assert_same(model, fused, x=x)
        assert_same(model, fused, 3.0, x=x)
    assert [group.name for group in ol.explain(model, x=x).groups] == ["linear + relu"]
    assert [group.name for group in ol.explain(ol.fuse(model), scale=2.0, x=x).groups] == ["linear + relu"]
    assert torch.equal(_ByPosition(model, ["x"])(2.0, x), model(2.0, x=x))  # for the times on a CUDA device
    with pytest.raises(TypeError, match=r"evalonly is neither an option nor an input.*did you mean 'eval_only'"):
        ol.fuse(model, evalonly=True)
    with pytest.raises(
        TypeError, match=r"y is neither an option nor an input that ByName\.forward names: pass device, time"
    ):
        ol.explain(model, y=x)
    with pytest.raises(ol.OnelaunchError, match="inputs do not fit ByName"):
        ol.explain(model, x)


NOISY = """
import torch
print("made")
class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(6, 6)
    def forward(self, *, x):
        print("run")
        return torch.relu(self.fc(x))
"""


def test_the_command_line_takes_names_and_keeps_what_the_model_prints_apart(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(NOISY)
    ran = CliRunner().invoke(make_app(), ["explain", f"{tmp_path}/model.py:Noisy", "--input", "x=5x6", "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["operations"]
    assert ran.stderr.startswith("made\nrun\n")
    assert CliRunner().invoke(make_app(), ["explain", f"{tmp_path}/model.py:Noisy", "--input", "time=5x6"]).exit_code == 2
