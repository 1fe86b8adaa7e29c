"""CUDA C++ to a cubin: NVRTC through `cuda.core`, kept on disk. Needs no GPU, no CUDA toolkit and no header but ours.

A translation unit is a text that was written for a purpose (a plan, a tile); it includes the `.cuh` files of a folder of ours
and `words.cuh` beside this file.
ptxas reports registers and spills into the log, which is kept with the code: both are known on a machine without a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelaunch.code_cache import CodeCache

WORDS = Path(__file__).parent  # of words.cuh, which all of it may include
CUBINS = CodeCache("cubins", layout="onelaunch cubin 1", suffix=".cubin")
END_OF_LOG = b"\0"
INSTALL = "pip install 'onelaunch[gpu]'"


class CompileError(RuntimeError):
    """A fault of ours, not of the user: NVRTC refused a source that we generated. The message ends with NVRTC's log."""


@dataclass(frozen=True)
class Cubin:
    code: bytes
    seconds: float  # that NVRTC took; 0 when cached
    cached: bool
    log: str  # warnings, then what ptxas says of each kernel: registers, stack frame, spills, shared memory


def unavailable_reason() -> str:
    """Why this machine cannot compile and launch CUDA C++, with the remedy; empty when it can (it may still lack a GPU)."""
    try:
        from cuda.core import ObjectCode, Program, ProgramOptions  # noqa: F401 (older versions have them elsewhere)
    except Exception as error:  # also of packages that do not fit each other
        return f"cuda-core cannot be imported ({_one_line(error)}): {INSTALL}"
    try:
        major, minor = _nvrtc_version()
    except Exception as error:  # the loader beneath has an error class of its own for each thing that can be missing
        return f"NVRTC cannot be loaded ({_one_line(error)}): {INSTALL}"
    known = _driver_version()
    if known is not None and known // 1000 < major:  # code of a newer major version is refused when it is loaded
        return (
            f"NVRTC is of CUDA {major}.{minor} and the driver knows CUDA {known // 1000}.{known % 1000 // 10}: update the "
            f"driver, or pip install 'cuda-bindings=={known // 1000}.*' and the NVRTC of that version"
        )
    return ""


def compile_cubin(source: str, arch: str, *, headers: Path | None = None, place: Path | None = None) -> Cubin:
    """The cubin of one translation unit for `arch`, such as "sm_90a". `headers`: the folder of the `.cuh` files it may include.
    `place`: the cache's folder; None is the user's."""
    place = place or CUBINS.folder()
    key = key_of(source, arch, headers)
    entry = CUBINS.load(place, key)
    if entry is not None:
        log, _, code = entry.partition(END_OF_LOG)
        return Cubin(code, 0.0, cached=True, log=log.decode())
    begin = time.perf_counter()
    code, text = _compile(source, arch, headers)
    seconds = time.perf_counter() - begin
    CUBINS.store(place, key, text.encode() + END_OF_LOG + code)
    return Cubin(code, seconds, cached=False, log=text)


def key_of(source: str, arch: str, headers: Path | None = None) -> str:
    """Each part goes in by its own digest, so that no two lists of parts run together into one."""
    parts = [source.encode(), repr(sorted(_options(arch).items())).encode(), repr(_nvrtc_version()).encode()]
    parts.append(repr(_driver_version()).encode())
    for folder in _folders(headers):
        for path in sorted(folder.glob("*.cuh")):
            parts += [path.name.encode(), path.read_bytes()]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _folders(headers: Path | None) -> list[Path]:
    return [headers, WORDS] if headers else [WORDS]


def _options(arch: str) -> dict[str, Any]:
    return {
        "name": "onelaunch.cu",
        "arch": arch,
        "std": "c++17",
        "no_source_include": True,  # else a file of the same name in the working folder would be included first
        "ptxas_options": ["-v"],
    }


def _compile(source: str, arch: str, headers: Path | None) -> tuple[bytes, str]:
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = _options(arch) | {"include_path": [str(folder) for folder in _folders(headers)]}
    try:
        compiled = Program(source, "c++", ProgramOptions(**options)).compile("cubin", logs=log)
    except Exception as error:  # NVRTCError is not public; whatever it was, our source did not compile
        raise CompileError(f"a kernel does not compile for {arch}: {str(error).strip()}") from error
    return bytes(compiled.code), log.getvalue().replace("\0", "").strip()


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"nvrtcVersion returns {status.name}")
    return major, minor


@functools.cache
def _driver_version() -> int | None:
    """The newest CUDA version that the driver knows, 13000 for 13.0; None on a machine without one."""
    from cuda.bindings import driver

    try:
        status, version = driver.cuDriverGetVersion()
    except RuntimeError:  # there is no libcuda
        return None
    return version if status == driver.CUresult.CUDA_SUCCESS else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
