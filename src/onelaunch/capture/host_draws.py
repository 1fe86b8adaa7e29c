"""Random numbers of the host, which a recording would repeat for ever."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from onelaunch.errors import OnelaunchError
from onelaunch.trial_runs import GENERATOR_STATES, Generators


class DrawnOnHost(OnelaunchError):
    """What was recorded has drawn a random number on the host."""


@contextmanager
def no_draws_on_host(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Around a recording: raise DrawnOnHost after one in which a generator on the host has drawn, a global one or a module's.

    After an error the generators are as they were.
    """
    host = Generators(_generators_of(modules))
    try:
        yield
        if host.have_drawn():
            raise DrawnOnHost(
                "forward, the loss or another thread draws random numbers on the host, as by random.random(): draw them on the "
                "model's device, as by torch.rand(1, device=x.device)"
            )
    except BaseException:
        host.restore()
        raise


def _generators_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for value in (value for module in modules for value in vars(module).values()):
        if isinstance(value, random.SystemRandom) or not issubclass(type(value), tuple(GENERATOR_STATES)):
            continue  # the first has no state
        if not isinstance(value, torch.Generator) or value.device.type == "cpu":
            yield value
