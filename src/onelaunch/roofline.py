"""What work costs, and how long a device takes for it at best: bytes through memory, floating-point operations, launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onelaunch.errors import require_option


@dataclass(frozen=True)
class Cost:
    bytes: float = 0.0
    flops: float = 0.0
    launches: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops, self.launches + other.launches)

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class DeviceModel:
    """A roofline: the speeds that a device sustains, and what a launch costs."""

    name: str
    bandwidth: float  # bytes per second, read and written
    half_flops: float  # floating-point operations per second of products in fp16 and bf16
    single_flops: float  # the same in fp32, without TF32
    launch_seconds: float = 2e-6  # from one kernel of a stream to the next

    def flops(self, dtype: torch.dtype) -> float:
        if dtype in (torch.float16, torch.bfloat16):
            return self.half_flops
        return self.single_flops / (2 if dtype == torch.float64 else 1)

    def seconds(self, cost: Cost, dtype: torch.dtype) -> float:
        return max(cost.bytes / self.bandwidth, cost.flops / self.flops(dtype)) + cost.launches * self.launch_seconds

    def bound(self, cost: Cost, dtype: torch.dtype) -> str:
        """What the time goes into: "memory", "compute" or "launch"."""
        times = {
            "memory": cost.bytes / self.bandwidth,
            "compute": cost.flops / self.flops(dtype),
            "launch": cost.launches * self.launch_seconds,
        }
        return max(times, key=times.__getitem__)


# The H200's figures are measured (copy of 1 G floats, products of 8192³). The others are their makers' peaks times the fraction
# that the H200 reaches of its own: 89 % of the bandwidth, 71 % of the dense 16-bit products.
DEVICES = {
    model.name: model
    for model in (
        DeviceModel("H200", 4.26e12, 700e12, 51e12),
        DeviceModel("H100", 2.98e12, 700e12, 51e12),
        DeviceModel("B200", 7.1e12, 1600e12, 60e12),
        DeviceModel("A100", 1.8e12, 220e12, 17e12),
        DeviceModel("L4", 0.27e12, 86e12, 23e12),
        DeviceModel("RTX 4090", 0.90e12, 117e12, 62e12),
    )
}
DEFAULT_DEVICE = "H200"


def named_device(name: str) -> DeviceModel:
    require_option("device", name, DEVICES)
    return DEVICES[name]


def device_model(device: torch.device) -> DeviceModel:
    """The roofline of a CUDA device, by its name or by its clocks; the default one for any other device."""
    if device.type != "cuda":
        return DEVICES[DEFAULT_DEVICE]
    properties = torch.cuda.get_device_properties(device)
    for name, model in DEVICES.items():
        if name in properties.name:
            return model
    clock_hz, bus_bits = getattr(properties, "memory_clock_rate", 0) * 1e3, getattr(properties, "memory_bus_width", 0)
    bandwidth = 0.89 * 2 * clock_hz * bus_bits / 8 or 0.5e12
    cores = properties.multi_processor_count
    return DeviceModel(properties.name, bandwidth, cores * 2e12, cores * 0.4e12)
