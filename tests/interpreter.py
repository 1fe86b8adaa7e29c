"""Triton's interpreter at half its time: its calls of device functions patch `triton.language` again and again."""

from __future__ import annotations

from typing import Any


def patch_language_once_per_launch() -> None:
    """Makes the interpreter inspect and patch `triton.language` once per launch instead of once per device function call."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version of Triton
    patch, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(fn: Any) -> Any:
        modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if modules <= patched:
            return interpreter._LangPatchScope()
        patched.update(modules)
        return patch(fn)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return execute(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch
