"""Which operations hand values of tensors on a device to the host: a CUDA graph cannot record them."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tests.databases.module_cases import tensors_of

READS = {
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2",
    "_ctc_loss.Tensor",  # the lengths
}  # fmt: skip


class HostReads(TorchDispatchMode):
    """Around calls: `seen` has the names of those that would wait for a device, as values or sizes on the host do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        to_host = any(one.is_cuda for one in tensors_of((args, kwargs))) and not all(
            one.is_cuda for one in tensors_of(result)
        )
        if to_host or READS & {name, f"{name}.{function._overloadname}"}:
            self.seen.add(name)
        return result
