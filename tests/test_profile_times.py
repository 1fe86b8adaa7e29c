"""Which operations of a profile belong to a compiled graph. On a CPU they are the library calls of the graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onelaunch.fuse.backend import no_code_generator_reason
from onelaunch.profile_times import in_graph


@pytest.mark.skipif(bool(no_code_generator_reason("cpu")), reason="Inductor needs a C++ compiler")
def test_operations_of_compiled_graphs_forward_and_backward():
    model = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24))
    compiled = torch.compile(model)
    x = torch.randn(8, 24)

    def run() -> None:
        (compiled(x) * 2).sum().backward()

    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    names = [event.name for event in profile.events() if in_graph(event)]
    products = [name for name in names if name.endswith("mm")]
    assert len(products) == 5  # two forward; of the weights twice and of one input backward
    outside = {event.name for event in profile.events() if not in_graph(event)}
    assert {"aten::mul", "aten::sum"} <= outside
    assert not {"aten::mul", "aten::sum"} & set(names)
