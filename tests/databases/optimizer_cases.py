"""The settings of PyTorch's `optim_db`: optimizers, their arguments, and how they may be implemented."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests import pairwise
from tests.databases.load import load
from tests.step.loops import network

INFOS = {info.optim_cls.__name__: info for info in load("optimizers", "optim_db")}


@dataclass(frozen=True)
class Setting:
    """Arguments of one optimizer: those of the database, the kind of implementation, and the rate as a number or a tensor."""

    name: str
    index: int  # among the database's inputs for this device
    flags: tuple[tuple[str, bool], ...]
    rate: str
    groups: int
    device: str

    def __str__(self) -> str:
        flags = "+".join(flag if on else f"no_{flag}" for flag, on in self.flags) or "default"
        return f"{self.name}-{self.index}-{flags}-{self.rate}_rate-{self.groups}_groups"

    def make(self, model: nn.Module, device: str | None = None) -> torch.optim.Optimizer:
        info, device = INFOS[self.name], device or self.device
        options = {**copy.deepcopy(info.optim_inputs_func(device=self.device)[self.index].kwargs), **dict(self.flags)}
        parameters = [one for one in model.parameters() if one.ndim == 2 or self.name != "Muon"]
        rate = float(options.get("lr", info.optim_cls(parameters).defaults["lr"]))
        if self.rate != "given":
            options["lr"] = torch.tensor(rate, device=device if self.rate == "device" else "cpu")
        if self.groups == 1:
            return info.optim_cls(parameters, **options)
        slower = torch.as_tensor(options["lr"]) / 2 if isinstance(options.get("lr"), Tensor) else rate / 2
        return info.optim_cls([{"params": parameters[:1]}, {"params": parameters[1:], "lr": slower}], **options)


def settings() -> list[Setting]:
    """Pairs of the database's arguments, the implementation, the kind of rate and the groups; all with `--all-cases`. Those
    that PyTorch's constructor refuses are left out.
    """
    found, model = [], network()
    for name, info in INFOS.items():
        if info.only_supports_sparse_grads or info.step_requires_closure:
            continue
        for device in ("cpu", "cuda"):
            kinds = [one for one in info.supported_impls if one != "fused" or device in info.supports_fused_on]
            flags = [(), *(((kind, True),) for kind in kinds), tuple((kind, False) for kind in kinds)]
            rates = ["given", "cpu", "device"] if device == "cuda" else ["given", "cpu"]
            inputs = range(len(info.optim_inputs_func(device=device)))
            for each in pairwise.cases(inputs, list(dict.fromkeys(flags)), rates, [1, 2]):
                setting = Setting(name, *each, device)
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        setting.make(model, "cpu")
                except (ValueError, RuntimeError):
                    continue
                found.append(setting)
    return found


def sparse_settings() -> list[tuple[str, int]]:
    return [
        (name, index)
        for name, info in INFOS.items()
        if info.supports_sparse or info.only_supports_sparse_grads
        for index, each in enumerate(info.optim_inputs_func(device="cpu"))
        if not each.kwargs.get("weight_decay")  # which PyTorch refuses for sparse gradients
    ]
