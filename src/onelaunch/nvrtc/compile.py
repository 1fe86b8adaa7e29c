"""Compiles CUDA C++ to a cubin with NVRTC (through `cuda.core`) and caches it on disk. Needs neither a GPU nor a CUDA toolkit.

A translation unit is generated text (for a plan or a tile) that includes `.cuh` files: those of a given folder and those beside
this file. ptxas reports registers and spills in the log, which is cached with the code, so both are known without a GPU.
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

SHARED_HEADERS = Path(__file__).parent
CUBINS = CodeCache("cubins", layout="onelaunch cubin 1", suffix=".cubin")
END_OF_LOG = b"\0"
INSTALL = "pip install 'onelaunch[gpu]'"


class CompileError(RuntimeError):
    """NVRTC refused a source that this package generated: a bug here, not of the user. The message ends with NVRTC's log."""


@dataclass(frozen=True)
class Cubin:
    code: bytes
    seconds: float  # of NVRTC; 0 when cached
    cached: bool
    log: str  # warnings, then the report of ptxas per kernel: registers, stack frame, spills, shared memory


def unavailable_reason() -> str:
    """Why this machine cannot compile and launch CUDA C++, with the remedy; empty when it can (it may still lack a GPU)."""
    try:
        from cuda.core import ObjectCode, Program, ProgramOptions  # noqa: F401 (older versions have them elsewhere)
    except Exception as error:  # also when installed packages do not match
        return f"cuda-core cannot be imported ({_one_line(error)}): {INSTALL}"
    try:
        major, minor = _nvrtc_version()
    except Exception as error:  # the loader has a different error class for each missing part
        return f"NVRTC cannot be loaded ({_one_line(error)}): {INSTALL}"
    known = _driver_version()
    if known is not None and known // 1000 < major:  # the driver refuses to load code of a newer major version
        return (
            f"NVRTC is of CUDA {major}.{minor} and the driver knows CUDA {known // 1000}.{known % 1000 // 10}: update the "
            f"driver, or pip install 'cuda-bindings=={known // 1000}.*' and the NVRTC of that version"
        )
    return ""


def compile_cubin(source: str, arch: str, *, headers: Path | None = None, place: Path | None = None) -> Cubin:
    """The cubin of one translation unit for `arch`, such as "sm_90a".

    `headers`: a folder of `.cuh` files that it may include. `place`: the folder of the cache; None is the user's cache.
    """
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
    """The cache key. Each part enters by its own digest, so that parts cannot run together."""
    parts = [source.encode(), repr(sorted(_options(arch).items())).encode(), repr(_nvrtc_version()).encode()]
    parts.append(repr(_driver_version()).encode())
    for folder in _folders(headers):
        for path in sorted(folder.glob("*.cuh")):
            parts += [path.name.encode(), path.read_bytes()]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _folders(headers: Path | None) -> list[Path]:
    return [headers, SHARED_HEADERS] if headers else [SHARED_HEADERS]


def _options(arch: str) -> dict[str, Any]:
    return {
        "name": "onelaunch.cu",
        "arch": arch,
        "std": "c++17",
        "no_source_include": True,  # otherwise a file of the same name in the working directory would come first
        "ptxas_options": ["-v"],
    }


def _compile(source: str, arch: str, headers: Path | None) -> tuple[bytes, str]:
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = _options(arch) | {"include_path": [str(folder) for folder in _folders(headers)]}
    try:
        compiled = Program(source, "c++", ProgramOptions(**options)).compile("cubin", logs=log)
    except Exception as error:  # NVRTCError is not public
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
    """The newest CUDA version that the driver supports, 13000 for 13.0; None without a driver."""
    from cuda.bindings import driver

    try:
        status, version = driver.cuDriverGetVersion()
    except RuntimeError:  # no libcuda
        return None
    return version if status == driver.CUresult.CUDA_SUCCESS else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
