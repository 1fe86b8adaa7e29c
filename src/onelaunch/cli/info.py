"""`onelaunch info`: versions, devices, and which engines can run here."""

from __future__ import annotations

import torch
import typer

from onelaunch.device import default_device, describe_machine
from onelaunch.train.engines import FASTEST_FIRST, engine_or_reason


def info() -> None:
    """Show versions, devices, and which engines can run here and why the others cannot."""
    machine = describe_machine()
    rows = [("system", machine["system"])]
    rows += list(machine["versions"].items())
    cpu = machine["cpu"]
    rows.append(("cpu", f"{cpu['name']}, {cpu['cores']} cores, {cpu['torch_threads']} threads"))
    for gpu in machine["gpus"]:
        rows.append(("gpu", f"{gpu['name']}, {gpu['memory_gib']} GiB, compute capability {gpu['capability']}"))
    if not machine["gpus"]:
        rows.append(("gpu", "none that this PyTorch can use"))
    for name in FASTEST_FIRST:
        found = engine_or_reason(name, torch.device("cpu") if name == "cpu" else default_device())
        rows.append((f"engine {name}", f"no: {found}" if isinstance(found, str) else "yes"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")
