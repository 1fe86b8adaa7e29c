"""Settings that PyTorch has once per process and a run needs for itself: random generators, matmul precision, modes.

Inside `run_settings()` the run's values apply, outside the user's. Runs in several threads take turns there. The calls of
CUDA's allocators inside are counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from onelaunch.engines.contract import State
from onelaunch.run.generators import GENERATORS, seeded


class ProcessSettings:
    """The settings of one run. `state` is a snapshot to resume from; without one, the generators start from the seed."""

    def __init__(
        self, device: torch.device, precision: str, seed: int, state: Mapping[str, torch.Tensor], *, exact: bool = False
    ) -> None:  # fmt: skip
        """`exact`: convolutions in fp32 too, for which PyTorch allows tf32 unless told otherwise."""
        self.device, self.precision, self.exact = device, precision, exact
        self.allocations: dict[str, int] = {}
        self._cuda_devices = [device] if device.type == "cuda" else []
        with seeded(seed, self._cuda_devices):
            self._rng = self._generators()
        if "engine.rng_cpu" in state:
            self._rng[0] = state["engine.rng_cpu"].cpu()
        if "engine.rng_cuda" in state and self._cuda_devices:
            self._rng[1] = state["engine.rng_cuda"].cpu()

    def _generators(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda_devices)]

    def snapshot(self) -> State:
        return {f"engine.{name}": tensor for name, tensor in zip(("rng_cpu", "rng_cuda"), self._rng, strict=False)}

    @contextlib.contextmanager
    def run_settings(self) -> Iterator[None]:
        """Apply the run's settings inside the block and restore the user's after it."""
        with GENERATORS, self._applied():
            yield

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        users_precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        users_convolutions = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = users_convolutions and not self.exact
        calls = self._allocator_calls()
        try:
            autocast = torch.autocast(self.device.type, enabled=False)  # even if fit was called inside an autocast
            with torch.random.fork_rng(self._cuda_devices), torch.enable_grad(), autocast:
                torch.set_rng_state(self._rng[0])
                for device in self._cuda_devices:
                    torch.cuda.set_rng_state(self._rng[1], device)
                yield
                self._rng = self._generators()
        finally:
            torch.set_float32_matmul_precision(users_precision)
            torch.backends.cudnn.allow_tf32 = users_convolutions
            for name, count in self._allocator_calls().items():
                self.allocations[name] = self.allocations.get(name, 0) + count - calls[name]

    def _allocator_calls(self) -> dict[str, int]:
        if self.device.type != "cuda":
            return {}
        stats = torch.cuda.memory_stats(self.device)
        return {"cudaMalloc": stats["num_device_alloc"], "pool": stats["allocation.all.allocated"]}
