"""Builds the models of the zoo, with random weights and one batch of random data each."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from onelaunch.bench.model_zoo import DEVICE, Workload, imported
from onelaunch.bench.zoo.draw import MAX_PARAMETERS, Drawn
from onelaunch.errors import UnsupportedError

IMAGES, TOKENS = 64, (8, 512)  # of a real batch
SMALL_BATCHES, SMALL_LENGTH = (1, 2, 4, 10), 128
VOCABULARY, CLASSES = 32000, 1000
TEXT_SIZES = {
    "hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 12,
    "intermediate_size": 3072, "vocab_size": VOCABULARY, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def build(drawn: Drawn, seed: int) -> Workload:
    """The model and its batch on the GPU; the same for the same seed."""
    torch.manual_seed(seed)
    batch = random.Random(f"{drawn.title} {seed}").choice(SMALL_BATCHES)
    make = _text if drawn.library == "transformers" else _images
    model, loss, arguments = make(drawn, batch)
    if sum(one.numel() for one in model.parameters()) > MAX_PARAMETERS:
        raise UnsupportedError(f"it has more than {MAX_PARAMETERS / 1e6:.0f} million parameters")
    options: dict[str, Any] = {"device": DEVICE} if drawn.small else {"device": DEVICE, "dtype": torch.bfloat16}
    arguments = tuple(_moved(one, options) for one in arguments)
    layout: dict[str, Any] = (
        {} if drawn.small or drawn.library == "transformers" else {"memory_format": torch.channels_last}
    )
    if layout:
        arguments = (arguments[0].to(**layout), *arguments[1:])
    return Workload(model.to(**options).to(**layout).train(), loss, arguments)


def _moved(value: Any, options: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: _moved(one, options) for name, one in value.items()}
    return value.to(**options) if value.is_floating_point() else value.to(DEVICE)


def _images(drawn: Drawn, batch: int) -> tuple[nn.Module, Any, tuple[Any, ...]]:
    if drawn.library == "timm":
        model = imported("timm").create_model(drawn.name, pretrained=False)
        size = model.default_cfg.get("input_size", (3, 224, 224))
    else:
        options = {"aux_logits": False, "init_weights": False} if drawn.name in ("googlenet", "inception_v3") else {}
        model = imported("torchvision.models").get_model(drawn.name, weights=None, **options)
        size = (3, 299, 299) if drawn.name == "inception_v3" else (3, 224, 224)
    rows = batch if drawn.small else IMAGES
    with torch.no_grad(), torch.device("cpu"):
        classes = model.eval()(torch.zeros(1, *size)).shape[-1]
    return model, nn.CrossEntropyLoss(), (torch.randn(rows, *size), torch.randint(classes, (rows,)))


def _text(drawn: Drawn, batch: int) -> tuple[nn.Module, Any, tuple[Any, ...]]:
    transformers = imported("transformers")
    kind = getattr(transformers, drawn.name)
    config = kind.config_class(**TEXT_SIZES)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    shape = (batch, SMALL_LENGTH) if drawn.small else TOKENS
    tokens = torch.randint(5, VOCABULARY, shape)
    labels = torch.randint(2, shape[:1]) if "Classification" in drawn.name else tokens
    return kind(config), None, ({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels},)
