"""What a trial run of a model changes of it, put back: buffers that it writes to, replaces, makes or grows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def buffers_put_back(model: nn.Module) -> Iterator[None]:
    names = [
        (kept, kept.copy())
        for module in model.modules()
        for kept in (module._buffers, module._non_persistent_buffers_set)
    ]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for kept, before in names:
            kept.clear()
            kept.update(before)  # type: ignore[arg-type]
        with torch.no_grad():
            for buffer, value in values:
                if buffer.shape == value.shape:
                    buffer.copy_(value)
                else:  # resized where it lay
                    buffer.set_(value)  # type: ignore[call-overload]


def parameter_versions(model: nn.Module) -> dict[str, int]:
    """How often each parameter was written to, by name: a forward that writes to one is not undone, but can be told."""
    return {name: parameter._version for name, parameter in model.named_parameters() if not parameter.is_inference()}
