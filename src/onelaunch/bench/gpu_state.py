"""What the driver says of a GPU while it is measured: clocks, what holds them back, temperature, power, energy.

NVML is read through ctypes: the library comes with every driver, and six calls need no package. Nothing here changes a setting.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")
CLOCKS = {"sm_mhz": 1, "memory_mhz": 2}  # NVML_CLOCK_SM, NVML_CLOCK_MEM
# nvmlClocksEventReasons: what keeps a clock below what was asked for. Idle and the user's own settings are no fault of the run.
HOLDS = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "power brake",
}  # fmt: skip


class Gpu:
    """NVML's handle of a CUDA device. A figure that this driver or card does not give is None."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    def _ask(self, function: str, kind: Any, *arguments: Any) -> Any:
        value = kind()
        try:
            status = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        except AttributeError:  # an older driver
            return None
        return value.value if status == 0 else None

    def millijoules(self) -> int | None:
        """Since the driver was loaded; the counter moves every 20 to 100 ms."""
        return self._ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)

    def state(self) -> dict[str, Any]:
        clocks = {name: self._ask("nvmlDeviceGetClockInfo", ctypes.c_uint, kind) for name, kind in CLOCKS.items()}
        power = self._ask("nvmlDeviceGetPowerUsage", ctypes.c_uint)
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong) or 0
        return {
            **clocks,
            "celsius": self._ask("nvmlDeviceGetTemperature", ctypes.c_uint, 0),
            "watts": None if power is None else power / 1e3,
            "held_back_by": [name for bit, name in HOLDS.items() if reasons & bit],
        }

    def driver(self) -> str:
        text = ctypes.create_string_buffer(96)
        return text.value.decode() if self._library.nvmlSystemGetDriverVersion(text, 96) == 0 else ""


@functools.cache
def current_gpu() -> Gpu | None:
    """The current CUDA device as NVML knows it; None where there is none, or no NVML."""
    if not torch.cuda.is_available():
        return None
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() == 0 and _find(library, handle) == 0:
            return Gpu(library, handle)
    return None


def _find(library: Any, handle: ctypes.c_void_p) -> int:
    """By UUID: NVML numbers the cards of the machine, CUDA those it was shown."""
    identity = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return int(library.nvmlDeviceGetHandleByUUID(identity.encode(), ctypes.byref(handle)))
