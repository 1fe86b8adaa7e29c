"""This machine: its processors, what they can do, and the versions of the packages that onelaunch uses."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.operating_system import cpu_name, usable_cores
from onelaunch.version import VERSION

PACKAGES = ("torch", "triton", "llvmlite", "cuda-core", "numpy", "safetensors")
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by the name of the precision
BUSY_SHARE = 0.25  # of the cores: when other programs use more, measured times mean little


@dataclass(frozen=True)
class Chip:
    """The properties of a GPU on which the engines' plans depend."""

    multiprocessors: int
    shared_bytes: int  # maximum shared memory per thread block
    clusters: bool = False  # has thread block clusters with distributed shared memory
    tma: bool = False  # has a tensor memory accelerator
    largest_cluster: int = 16


H200 = Chip(132, 227 * 1024, clusters=True, tma=True)
A100 = Chip(108, 163 * 1024)
TMA_CAPABILITIES = ((9, 0), (10, 0), (10, 3))


def chip_of(device: torch.device) -> Chip:
    """The chip of a CUDA device; H200, on which the tiles were measured, for another device (interpreted kernels)."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    clusters, tma = capability >= (9, 0), capability in TMA_CAPABILITIES
    return Chip(properties.multi_processor_count, shared_bytes, clusters, tma)


def default_device() -> torch.device:
    """The device for a new model: the first CUDA device, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cuda_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def versions() -> dict[str, str]:
    """Versions of onelaunch, Python and PACKAGES; "absent" for a package that is not installed."""
    found = {"onelaunch": VERSION, "python": platform.python_version()}
    return found | {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def describe_machine() -> dict[str, Any]:
    """Versions and processors, as run folders and benchmarks record them."""
    gpus = [
        {
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory_gib": round(gpu.total_memory / 2**30, 1),
            "multiprocessors": gpu.multi_processor_count,
        }
        for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    return {
        "system": platform.platform(),
        "cpu": {"name": cpu_name(), "cores": usable_cores(), "torch_threads": torch.get_num_threads()},
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "versions": versions(),
    }


def cuda_unavailable_reason(device: torch.device) -> str:
    """Why an engine for CUDA cannot take a model on `device`, with the remedy if there is one; empty if it can."""
    if device.type == "cuda":
        return ""
    if torch.cuda.is_available():
        return f"the model is on {device}: model.cuda() moves it to the GPU"
    return "this machine has no CUDA device"
