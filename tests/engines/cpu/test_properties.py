"""Random networks, losses and optimizers against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from onelaunch.activations import ACTIVATIONS
from tests import pairwise
from tests.engines.cpu.runs import assert_close, make, train_natively, train_plainly

# Two correct programs may disagree on the side of a kink; the parity tests cover these activations.
SMOOTH = [name for name in ACTIVATIONS if name not in ("relu", "leaky_relu", "selu", "hardswish")]
WIDTHS = st.sampled_from([1, 2, 3, 7, 10, 16, 17, 31, 32, 33, 48, 65, 100])


@st.composite
def networks(draw: st.DrawFn) -> nn.Sequential:
    layers: list[nn.Module] = []
    width = draw(WIDTHS)
    torch.manual_seed(draw(st.integers(0, 1000)))

    def following() -> None:
        for _ in range(draw(st.integers(0, 2))):
            kind = draw(st.integers(0, 5))
            if kind == 0:
                layers.append(nn.Dropout(draw(st.sampled_from([0.0, 0.1, 0.5]))))
            elif kind == 1:
                layers.append(
                    nn.BatchNorm1d(width, affine=draw(st.booleans()), momentum=draw(st.sampled_from([None, 0.1, 0.5])))
                )
            else:
                layers.append(ACTIVATIONS[draw(st.sampled_from(SMOOTH))].make_module())

    if draw(st.booleans()):
        following()
    for _ in range(draw(st.integers(1, 4))):
        outputs = draw(WIDTHS)
        layers.append(nn.Linear(width, outputs, bias=draw(st.booleans())))
        width = outputs
        following()
    return nn.Sequential(*layers)


OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "sgd"},
    {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"optimizer": "adamw", "lr": 1e-3, "eps": 1e-3, "weight_decay": 0.05},
    {"optimizer": "adam", "lr": 1e-3, "eps": 1e-3},
    {"optimizer": "rmsprop", "lr": 1e-3, "eps": 1e-3, "momentum": 0.5},
]


# No shrinking: every example compiles a network, and the failing one is printed whole.
@settings(
    max_examples=40 if pairwise.ALL_CASES else 8, suppress_health_check=list(HealthCheck), derandomize=True,
    phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False,
)  # fmt: skip
@given(
    model=networks(), loss=st.sampled_from(["cross_entropy", "mse", "bce_with_logits"]), rows=st.integers(12, 70),
    batch=st.sampled_from([6, 16, 33, 64]), optimizer=st.sampled_from(OPTIMIZERS), partitions=st.integers(1, 3),
    uint8_rows=st.booleans(), seed=st.integers(0, 2**64 - 1), label_smoothing=st.sampled_from([0.0, 0.1]),
)  # fmt: skip
def test_random_networks(
    model: nn.Sequential, loss: str, rows: int, batch: int, optimizer: dict[str, Any], partitions: int, uint8_rows: bool,
    seed: int, label_smoothing: float, cache_folder: Path,
) -> None:  # fmt: skip
    rows += rows % batch == 1  # BatchNorm1d cannot take a batch of one
    linears = [layer for layer in model if isinstance(layer, nn.Linear)]
    inputs, outputs = linears[0].in_features, linears[-1].out_features
    generator = torch.Generator().manual_seed(rows)
    x = torch.rand(rows, inputs, generator=generator) * 2 - 1
    if uint8_rows:
        x = (x * 100 + 128).to(torch.uint8)
    y = torch.rand(rows, outputs, generator=generator)
    if loss == "cross_entropy":
        y, optimizer = y.argmax(1), {**optimizer, "label_smoothing": label_smoothing}
    run = make(model, x, y, (x[:20], y[:20]), loss=loss, steps=12, batch_size=batch, seed=seed, **optimizer)
    reference, single = train_plainly(run), train_plainly(run, torch.float32)
    ours = train_natively(run, cache_folder, partitions=partitions)
    # As close to float64 as PyTorch in float32 is, within a small factor: some of these networks amplify rounding.
    scale = reference.losses.abs().clamp_min(1e-3)
    losses = max(1e-5, 5 * ((single.losses - reference.losses).abs() / scale).max().item())
    assert single.validation is not None
    assert reference.validation is not None
    losses = max(losses, 5 * abs(single.validation - reference.validation) / max(1e-3, abs(reference.validation)))
    weights = max(1e-5, 5 * max(
        (a.double() - b.double()).abs().max().item()
        for a, b in zip(single.model.state_dict().values(), reference.model.state_dict().values(), strict=True)
    ))  # fmt: skip
    assert_close(ours, reference, losses=losses, weights=weights)
