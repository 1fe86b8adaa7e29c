"""A tracer that leaves the calls of other threads alone.

`torch.fx` replaces `nn.Module.__call__` and `__getattr__` for the whole process while it traces. Each call comes back to the
tracer, which here sends those of another thread on their way. Two traces at a time would put back each other's replacements.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import fx, nn

ONE_AT_A_TIME = threading.RLock()


class OwnThreadTracer(fx.Tracer):
    def __init__(self) -> None:
        self.thread = threading.get_ident()
        super().__init__()

    @property
    def elsewhere(self) -> bool:
        return threading.get_ident() != self.thread

    @property
    def _autowrap_function_ids(self) -> set[int]:
        """What fx wraps in the globals of a module that is called: nothing for another thread's."""
        return set() if self.elsewhere else self.wrapped

    @_autowrap_function_ids.setter
    def _autowrap_function_ids(self, functions: set[int]) -> None:
        self.wrapped = functions

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with ONE_AT_A_TIME:
            return super().trace(root, concrete_args)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.elsewhere else super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs) if self.elsewhere else super().call_module(m, forward, args, kwargs)
