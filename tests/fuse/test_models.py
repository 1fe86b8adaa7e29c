"""Models we did not write: fused and original agree in float64, and learn alike with dropout."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.fuse.placing import regions
from tests.fuse.compare import assert_same
from tests.fuse.models import Mixer, Recommender, ResNet, UNet

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


def images(n: int = 2) -> torch.Tensor:
    return torch.randn(n, 3, 16, 16, dtype=torch.float64)


def chains(fused: nn.Module) -> list[str]:
    return [chain.name for region in regions(fused) for plan in region.plans for chain in plan.fused]


@pytest.mark.parametrize("kind", [Mixer, ResNet, UNet])
def test_vision(kind: type[nn.Module]) -> None:
    model = kind().double()
    fused = ol.fuse(model)
    assert type(fused) is kind
    assert chains(fused)
    assert_same(model, fused, images())


def test_recommender() -> None:
    model = Recommender().double()
    fused = ol.fuse(model)
    assert chains(fused).count("linear + relu") >= 2
    assert_same(model, fused, torch.randn(7, 13, dtype=torch.float64), torch.randint(20, (7, 3)))


def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is a test dependency: pip install '.[dev]'")


def small(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return {**sizes, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **more}


def hugging_face(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    hub = transformers()
    torch.manual_seed(0)
    words = torch.randint(50, (2, 9))
    match kind:
        case "bert":
            model = hub.BertForSequenceClassification(hub.BertConfig(vocab_size=50, **small()))
            mask = torch.ones_like(words)
            mask[1, 5:] = 0
            return model, {"input_ids": words, "attention_mask": mask, "labels": torch.tensor([0, 1])}
        case "gpt2":
            config = hub.GPT2Config(
                vocab_size=50, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
            )
            return hub.GPT2LMHeadModel(config), {"input_ids": words, "labels": words}
        case _:
            model = hub.ViTForImageClassification(hub.ViTConfig(image_size=16, patch_size=4, **small()))
            return model, {
                "pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64),
                "labels": torch.tensor([0, 1]),
            }


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit"])
def test_hugging_face(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = hugging_face(kind)
    model = model.double()
    with caplog.at_level(logging.WARNING, "onelaunch"):
        fused = ol.fuse(model)
    # GPT-2's layers are transposed products of its own (Conv1D), and its gelu is spelled out.
    assert ("gelu_tanh (spelled out)" if kind == "gpt2" else "linear + gelu") in chains(fused)
    assert_same(model, fused, **inputs)


def test_bert_learns_alike_with_dropout() -> None:
    hub = transformers()
    words = torch.randint(50, (16, 8), generator=torch.Generator().manual_seed(1))
    labels = words[:, 0] % 2
    losses = []
    for fusing in (False, True):
        torch.manual_seed(3)
        config = hub.BertConfig(vocab_size=50, **small(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1))
        model = hub.BertForSequenceClassification(config)
        model = ol.fuse(model) if fusing else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        run = []
        for _ in range(40):
            loss = model(input_ids=words, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.append(loss.item())
        losses.append(sum(run[-10:]) / 10)
    assert losses[1] < 0.25
    assert losses[0] < 0.25


@pytest.mark.parametrize("kind", [Mixer, UNet])
def test_learns_alike_with_dropout(kind: type[nn.Module]) -> None:
    x = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    target = (x[:, 0].mean((1, 2)) > 0).long() if kind is Mixer else (x[:, 0] > 0).long()
    final = []
    for fusing in (False, True):
        torch.manual_seed(3)
        model = kind(dropout=0.1)  # type: ignore[call-arg]
        model = ol.fuse(model) if fusing else model
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(30):
            loss = nn.functional.cross_entropy(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        final.append(loss.item())
    assert final[0] < 0.4
    assert abs(final[1] - final[0]) < 0.25, final
