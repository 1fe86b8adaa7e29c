"""The zoo: drawn by a rule, built by libraries, each model in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onelaunch.bench.zoo import draw as drawing
from onelaunch.bench.zoo.draw import SHARES, Drawn, draw
from onelaunch.bench.zoo.models import _text
from onelaunch.bench.zoo.run import record, run_zoo


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {f"family{number}": [f"model{number}{letter}" for letter in "abc"] for number in range(20)}
    monkeypatch.setattr(drawing, "FAMILIES", dict.fromkeys(SHARES, lambda: found))


@pytest.mark.usefixtures("families")
def test_a_draw_is_a_function_of_its_seed() -> None:
    first = draw(24, 0)
    assert first == draw(24, 0)
    assert first != draw(24, 1)
    assert len(first) >= 24
    for library in SHARES:
        of_it = [one for one in first if one.library == library]
        assert len({one.family for one in of_it}) == len(of_it)  # none twice while there are others
        assert {one.small for one in of_it} == {True, False}


@pytest.mark.usefixtures("families")
def test_more_models_than_families() -> None:
    drawn = draw(200, 0)
    assert len(set(drawn)) == len(drawn)
    assert {one.family for one in drawn} == {f"family{number}" for number in range(20)}


def test_text_models_of_transformers_can_be_drawn_and_trained() -> None:
    pytest.importorskip("transformers")
    families = drawing.FAMILIES["transformers"]()
    assert "BertForMaskedLM" in families["bert"]
    model, loss, (batch,) = _text(Drawn("transformers", "distilbert", "DistilBertForMaskedLM", True), 1)
    assert loss is None
    with torch.no_grad():
        assert torch.isfinite(model(**batch).loss)


def test_the_record_of_a_model() -> None:
    drawn = Drawn("timm", "resnet", "resnet18", False)
    assert record(drawn, {"skipped": "it is not installed"})["check"] == "skipped: it is not installed"
    assert record(drawn, {"failed": "x"}) | {"times": {}} == record(drawn, {"failed": "x"})
    seconds = {"onelaunch": [2.0, 2.1, 1.9, 2.0], "CUDA graph, compiled": [3.0, 3.1, 2.9, 3.0]}
    found: dict[str, Any] = {
        "seconds": seconds, "operations": {name: {"kernels": 5, "copies": 1} for name in seconds},
        "peak_bytes": dict.fromkeys(seconds, 7), "choice": "", "reason": "",
    }  # fmt: skip
    case = record(drawn, found)
    assert case["check"] == "passed"
    assert case["ratio"] == {"CUDA graph, compiled": pytest.approx(1.5)}
    assert case["notes"]["choice"] == "no pattern matches"
    assert case["name"] == "zoo/timm/resnet18/real"


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_a_model_that_cannot_be_trained_is_skipped_and_the_next_one_taken() -> None:
    pytest.importorskip("transformers")
    drawn = [Drawn("transformers", "none", name, True) for name in ("NoSuchModel", "DistilBertForMaskedLM")]
    cases: list[dict[str, Any]] = []
    run_zoo(drawn, 0, cases.append, wanted=2, side_by_side=2)
    assert [case["name"] for case in cases] == [f"zoo/{one.title}" for one in drawn]
    assert all(case["check"].startswith("skipped: ") for case in cases)
    assert "NoSuchModel" in cases[0]["check"]
    assert "CUDA" in cases[1]["check"] or "NVIDIA" in cases[1]["check"]


@pytest.mark.gpu
def test_a_model_of_the_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[dict[str, Any]] = []
    run_zoo([Drawn("transformers", "distilbert", "DistilBertForMaskedLM", True)], 0, cases.append, wanted=1)
    assert cases[0]["check"] == "passed"
    assert cases[0]["ratio"]["CUDA graph, compiled"] > 0.5
