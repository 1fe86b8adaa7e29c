"""PyTorch's losses in their default form are ours by name; what we do not have stays a function of the user's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.run.named_loss import with_named_loss

CLASSES, VALUES = torch.tensor([0, 1]), torch.rand(2, 3)


@pytest.mark.parametrize(
    ("loss", "y", "named"),
    [
        (nn.CrossEntropyLoss(), CLASSES, {"loss": "cross_entropy"}),
        (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES, {"loss": "cross_entropy", "label_smoothing": 0.1}),
        (F.cross_entropy, CLASSES, {"loss": "cross_entropy"}),
        (nn.MSELoss(), VALUES, {"loss": "mse"}),
        (F.mse_loss, VALUES, {"loss": "mse"}),
        (nn.BCEWithLogitsLoss(), VALUES, {"loss": "bce_with_logits"}),
        (nn.CrossEntropyLoss(weight=torch.ones(2)), CLASSES, None),
        (nn.CrossEntropyLoss(reduction="sum"), CLASSES, None),
        (nn.CrossEntropyLoss(ignore_index=1), CLASSES, None),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), VALUES, None),
        (nn.CrossEntropyLoss(), VALUES.softmax(1), None),  # probabilities as targets
        (nn.L1Loss(), VALUES, None),
        (lambda output, y: F.cross_entropy(output, y), CLASSES, None),
    ],
)
def test_which_losses_are_ours(loss, y, named):
    options = {"loss": loss}
    assert with_named_loss(options, y) == (named or options)


def test_a_module_trains_like_the_name():
    x = np.random.default_rng(0).random((64, 4), np.float32)
    y = (x[:, 0] > 0.5).astype(int)
    histories = []
    for loss in ("cross_entropy", nn.CrossEntropyLoss()):
        torch.manual_seed(0)
        histories.append(ol.fit(nn.Linear(4, 2), x, y, epochs=3, loss=loss, progress=False))
    assert histories[0].losses == histories[1].losses
    assert histories[0].engine == histories[1].engine


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(output * self.scale, target)

    with pytest.raises(ol.OnelaunchError, match=r"loss=Scaled has parameters.*make them part of it"):
        with_named_loss({"loss": Scaled()}, torch.zeros(3))
    frozen = Scaled().requires_grad_(False)
    assert with_named_loss({"loss": frozen}, torch.zeros(3))["loss"] is frozen
