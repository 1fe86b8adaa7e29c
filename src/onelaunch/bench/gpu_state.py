"""The state of a GPU as the driver reports it: clocks, what limits them, temperature, power, energy.

NVML is called through ctypes: the library comes with every driver, and six calls need no package. No setting is changed.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")
CLOCKS = {"sm_mhz": 1, "memory_mhz": 2}  # NVML_CLOCK_SM, NVML_CLOCK_MEM
# nvmlClocksEventReasons, without those that are no fault of the run: an idle GPU and the user's own settings.
LIMITS = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "power brake",
}  # fmt: skip


class Gpu:
    """A CUDA device as NVML knows it. A value that this driver or card does not report is None."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    def _query(self, function: str, kind: Any, *arguments: Any) -> Any:
        value = kind()
        try:
            status = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        except AttributeError:  # an older driver
            return None
        return value.value if status == 0 else None

    def millijoules(self) -> int | None:
        """Energy used since the driver was loaded; the counter moves every 20 to 100 ms."""
        return self._query("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)

    def state(self) -> dict[str, Any]:
        clocks = {name: self._query("nvmlDeviceGetClockInfo", ctypes.c_uint, kind) for name, kind in CLOCKS.items()}
        power = self._query("nvmlDeviceGetPowerUsage", ctypes.c_uint)
        reasons = self._query("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong) or 0
        return {
            **clocks,
            "celsius": self._query("nvmlDeviceGetTemperature", ctypes.c_uint, 0),
            "watts": None if power is None else power / 1e3,
            "held_back_by": [name for bit, name in LIMITS.items() if reasons & bit],
        }

    def driver(self) -> str:
        text = ctypes.create_string_buffer(96)
        return text.value.decode() if self._library.nvmlSystemGetDriverVersion(text, 96) == 0 else ""


@functools.cache
def current_gpu() -> Gpu | None:
    """The current CUDA device; None without a CUDA device or without NVML."""
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
    """Look the device up by UUID: NVML numbers all cards of the machine, CUDA only the visible ones. Returns NVML's status."""
    identity = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return int(library.nvmlDeviceGetHandleByUUID(identity.encode(), ctypes.byref(handle)))
