"""Which models are in the zoo: drawn by a rule from torchvision, timm and transformers, never by a result.

Each library's families are shuffled by the seed, and one model is drawn of each until there are enough. Settings take turns:
small batches with float32 weights under bf16 autocast, and real batches with bf16 weights, images in channels-last layout. A
model that plain PyTorch cannot train so is left out, with its reason, and counts as not drawn.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

from onelaunch.bench.model_zoo import imported

SHARES = {"torchvision": 3, "timm": 4, "transformers": 5}  # of a dozen models
CLASSES = ("ForCausalLM", "ForMaskedLM", "ForSequenceClassification", "LMHeadModel")  # of transformers
MAX_PARAMETERS = 120e6  # larger image models take minutes to compile


class Drawn(NamedTuple):
    """One model of the zoo. `small`: a small batch, float32 weights and autocast; else a real one in bf16."""

    library: str
    family: str
    name: str
    small: bool

    @property
    def title(self) -> str:
        return f"{self.library}/{self.name}/{'small' if self.small else 'real'}"

    @property
    def about(self) -> str:
        """In words: `resnet18 of torchvision, a small batch, fp32 weights under bf16 autocast, AdamW`."""
        kind = "a small batch, fp32 weights under bf16 autocast" if self.small else "a real batch, bf16"
        return f"{self.name} of {self.library}, {kind}, AdamW"


def draw(models: int, seed: int) -> list[Drawn]:
    """This many models, and some more for those that cannot be trained; the same for the same seed and versions."""
    found = []
    for library, share in SHARES.items():
        generator = random.Random(f"{library} {seed}")
        families = FAMILIES[library]()
        names = sorted(families)
        generator.shuffle(names)
        wanted = -(-models * share // sum(SHARES.values()))
        for number, family in enumerate((names * models)[: wanted + wanted // 3]):
            found.append(Drawn(library, family, generator.choice(sorted(families[family])), number % 2 == 0))
    return list(dict.fromkeys(found))


def _of_torchvision() -> dict[str, list[str]]:
    models = imported("torchvision.models")
    return _by_family((models.get_model_builder(name).__module__, name) for name in models.list_models(module=models))


def _of_timm() -> dict[str, list[str]]:
    timm = imported("timm")
    return _by_family((module, name) for module in timm.list_modules() for name in timm.list_models(module=module))


def _of_transformers() -> dict[str, list[str]]:
    """Text models: families with one of the tasks, as far as their classes can be imported."""
    auto = import_module(imported("transformers").models.auto.modeling_auto.__name__)
    mappings = {
        "ForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "ForMaskedLM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "ForSequenceClassification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }  # fmt: skip
    pairs = [(family, name) for mapping in mappings.values() for family, name in mapping.items()]
    return _by_family(pair for pair in pairs if isinstance(pair[1], str) and pair[1].endswith(CLASSES))


def _by_family(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for family, name in pairs:
        found[family].append(name)
    return dict(found)


FAMILIES: dict[str, Any] = {"torchvision": _of_torchvision, "timm": _of_timm, "transformers": _of_transformers}
