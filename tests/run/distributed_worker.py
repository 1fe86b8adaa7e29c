"""One rank of a job of test_distributed.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed, nn

import onelaunch as ol
from onelaunch.errors import OnelaunchError
from onelaunch.run.distributed import process_group

ROWS, BATCH = 53, 16  # the last batch has five rows, which two ranks cannot share evenly
OPTIONS = {
    "batch_size": BATCH, "optimizer": "adam", "lr": 1e-2, "weight_decay": 1e-3, "seed": 5, "engine": "eager", "progress": False,
}  # fmt: skip


def model_and_data(device: str = "cpu") -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.3), nn.Linear(24, 3))
    return model.to(device), torch.randn(ROWS, 6).to(device), torch.randint(3, (ROWS,)).to(device)


class Dies(nn.Module):
    """Ends its process at the tenth forward pass, as abruptly as a machine that loses power."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == 10 and os.environ["RANK"] == "1":
            os._exit(17)
        return x


def train(folder: Path, mode: str) -> None:
    """Train two epochs, then resume to four, and save the result.

    `mode`: "die", "share" (a GPU), "freeze" (a layer in a callback), or "".
    """
    device = "cuda" if mode == "share" else "cpu"
    model, x, y = model_and_data(device)
    if mode == "die":
        model.append(Dies())
    if mode == "share":  # NCCL gives a GPU to one rank only; gloo communicates tensors on a GPU too
        distributed.init_process_group("gloo")
    with process_group() as team:
        checkpoint = folder / "run.safetensors"
        callbacks = [lambda history: model[0].requires_grad_(mode != "freeze")]
        try:
            first = ol.fit(
                model, x, y, epochs=2, validation=(x, y), checkpoint=checkpoint, callbacks=callbacks, **OPTIONS
            )  # fmt: skip
        except OnelaunchError as error:
            print(f"{type(error).__name__}: {error}")
            sys.exit(2)
        again, _, _ = model_and_data(device)  # a restarted rank has nothing but the file
        history = ol.fit(again, x, y, epochs=4, validation=(x, y), checkpoint=checkpoint, resume=True, **OPTIONS)
    assert len(first.losses) == 8
    if team.leads:
        losses = torch.tensor(history.losses)
        accuracies = torch.tensor([[record["accuracy"], record["validation"]["accuracy"]] for record in history.epochs])
        state = {name: tensor.clone() for name, tensor in again.state_dict().items()}
        save_file({**state, "losses": losses, "accuracies": accuracies}, folder / "result.safetensors")
