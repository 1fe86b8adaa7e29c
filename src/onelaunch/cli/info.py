"""`onelaunch info`: versions, devices, and which engines can run here."""

from __future__ import annotations

import torch
import typer

from onelaunch.cli.say import wrap
from onelaunch.device import default_device, describe_machine
from onelaunch.engines import FASTEST_FIRST, engine_or_reason

GPU = "a GPU of compute capability 8.0 or more"
NEEDS = {
    "resident": f"{GPU}, cuda-core and NVRTC (pip install 'onelaunch[gpu]')",
    "graph": f"{GPU}, triton",
    "cpu": "llvmlite, no GPU",
    "compiled": "a CUDA GPU, triton",
    "eager": "PyTorch alone, with a GPU or without",
}


def _unavailable_reason(engine: str) -> str:
    """Why an engine cannot run on this machine; empty when it can."""
    if engine in ("resident", "graph") and not torch.cuda.is_available():
        return (
            "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch finds no CUDA device here"
        )
    found = engine_or_reason(engine, torch.device("cpu") if engine == "cpu" else default_device())
    return found if isinstance(found, str) else ""


def run_info() -> None:
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
        reason = _unavailable_reason(name)
        rows.append((f"engine {name}", f"{f'no: {reason}' if reason else 'yes'}; needs {NEEDS[name]}"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {wrap(value, width + 2)}")
