"""CUDA C++ is compiled without a GPU; on a GPU, small kernels are launched."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from onelaunch.nvrtc import compile
from onelaunch.nvrtc.compile import CompileError, Cubin, compile_cubin, key_of, unavailable_reason
from tests.spoiled import DAMAGES, spoil

ELF = b"\x7fELF"
SCALE = """
extern "C" __global__ void scale(float *values, float factor) {
    values[blockIdx.x * blockDim.x + threadIdx.x] *= factor;
}
"""
# Each block writes into its neighbour's shared memory, so what it finds in its own came through the cluster.
NEIGHBOURS = """
typedef unsigned int u32;
extern __shared__ u32 mailbox[];
extern "C" __global__ void neighbours(u32 *received) {
    u32 rank, size, mine, theirs;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    asm volatile("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(mine) : "l"(mailbox + threadIdx.x));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"((rank + 1) % size));
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(theirs), "r"(1000 * blockIdx.x + threadIdx.x) : "memory");
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    received[blockIdx.x * blockDim.x + threadIdx.x] = mailbox[threadIdx.x];
}
"""
# No block exits before all have arrived: it deadlocks unless every block is resident. The spin is bounded nevertheless.
ALL_ARRIVE = """
typedef unsigned int u32;
extern "C" __global__ void all_arrive(u32 *counter, u32 *seen) {
    if (threadIdx.x) return;
    u32 arrived = 0;
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    for (long long begin = clock64(); arrived < gridDim.x && clock64() - begin < 2000000000;)
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    seen[blockIdx.x] = arrived;
}
"""
# Counts in host memory until the host asks it to stop; bounded by a clock.
COUNT_UNTIL_STOPPED = """
typedef unsigned int u32;
struct Control { u32 step, stop; };
extern "C" __global__ void count(Control *control) {
    u32 stop = 0;
    for (long long begin = clock64(); !stop && clock64() - begin < 10000000000;) {
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&control->step), "r"(control->step + 1) : "memory");
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(stop) : "l"(&control->stop) : "memory");
    }
}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_a_kernel_compiles_without_a_gpu_and_is_then_cached(arch: str, tmp_path: Path) -> None:
    made = compile_cubin(SCALE, arch, place=tmp_path)
    assert made.code.startswith(ELF)
    assert made.seconds > 0
    assert not made.cached
    assert re.search(rf"entry function 'scale' for '{arch}'", made.log)
    assert re.search(r"0 bytes spill stores(.|\n)*Used \d+ registers", made.log)
    again = compile_cubin(SCALE, arch, place=tmp_path)
    assert again == Cubin(made.code, 0.0, cached=True, log=made.log)


def test_the_cluster_and_grid_kernels_of_these_tests_compile(tmp_path: Path) -> None:
    for source in (NEIGHBOURS, ALL_ARRIVE, COUNT_UNTIL_STOPPED):
        assert compile_cubin(source, "sm_90a", place=tmp_path).code.startswith(ELF)


@pytest.mark.parametrize("damage", [*DAMAGES, "no header"])
def test_a_damaged_entry_is_compiled_again(damage: str, tmp_path: Path) -> None:
    good = compile_cubin(SCALE, "sm_90a", place=tmp_path)
    (entry,) = tmp_path.iterdir()
    if damage == "no header":
        entry.write_bytes(good.code)
    else:
        spoil(entry, damage)
    again = compile_cubin(SCALE, "sm_90a", place=tmp_path)
    assert (again.cached, again.code) == (False, good.code)
    assert compile_cubin(SCALE, "sm_90a", place=tmp_path).cached


def test_a_folder_that_cannot_be_written_only_disables_the_cache(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not compile_cubin(SCALE, "sm_80", place=blocked).cached
    assert not compile_cubin(SCALE, "sm_80", place=blocked).cached


def test_two_processes_at_once_leave_one_whole_entry(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from onelaunch.nvrtc.compile import compile_cubin\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(len(compile_cubin(sys.argv[1], 'sm_90a', place=Path(sys.argv[2])).code))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, SCALE, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # both have imported everything and wait for this line
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert len(list(tmp_path.iterdir())) == 1
    assert compile_cubin(SCALE, "sm_90a", place=tmp_path).cached


def test_headers_are_found_and_change_the_key(tmp_path: Path) -> None:
    source = '#include "factor.cuh"\nextern "C" __global__ void k(int *out) { *out = FACTOR; }'
    header = tmp_path / "factor.cuh"
    header.write_text("#define FACTOR 2\n")
    keys, codes = set(), set()
    for factor in (2, 3):
        header.write_text(f"#define FACTOR {factor}\n")
        keys.add(key_of(source, "sm_80", tmp_path))
        codes.add(compile_cubin(source, "sm_80", headers=tmp_path, place=tmp_path / "cache").code)
    assert (len(keys), len(codes)) == (2, 2)
    assert key_of(source, "sm_80") != key_of(source, "sm_90a")
    assert key_of(source, "sm_80") != key_of(source + " ", "sm_80")


def test_a_header_in_the_working_directory_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stray.cuh").write_text("")
    (tmp_path / "ours").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r"cannot open source file \"stray\.cuh\""):
        compile_cubin('#include "stray.cuh"', "sm_80", headers=tmp_path / "ours", place=tmp_path / "cache")


def test_an_error_in_a_source_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r'sm_90a.*\n(.|\n)*onelaunch\.cu\(2\): error: identifier "weight" is undef'):
        compile_cubin("\n__global__ void k() { weight = 1; }", "sm_90a", place=tmp_path)
    with pytest.raises(CompileError, match=r"for sm_999.*\n*.*gpu-architecture"):
        compile_cubin(SCALE, "sm_999", place=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unavailable_reason() == ""

    def absent() -> None:
        raise RuntimeError("Failure finding libnvrtc.so:\n no wheel")

    with monkeypatch.context() as patch:
        patch.setattr(compile, "_nvrtc_version", absent)
        assert (
            unavailable_reason()
            == "NVRTC cannot be loaded (Failure finding libnvrtc.so: no wheel): pip install 'onelaunch[gpu]'"
        )
    with monkeypatch.context() as patch:
        patch.setattr(compile, "_driver_version", lambda: 12080)
        patch.setattr(compile, "_nvrtc_version", lambda: (13, 0))
        assert unavailable_reason().startswith(
            "NVRTC is of CUDA 13.0 and the driver knows CUDA 12.8: update the driver"
        )
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    assert re.fullmatch(r"cuda-core cannot be imported \(.+\): pip install 'onelaunch\[gpu\]'", unavailable_reason())


CUDA = torch.device("cuda", 0)


def loaded(source: str, name: str, place: Path):
    from onelaunch.nvrtc.launch import load

    major, minor = torch.cuda.get_device_capability(CUDA)
    return load(compile_cubin(source, f"sm_{major}{minor}", place=place), name, CUDA)


@pytest.mark.gpu
def test_a_kernel_is_launched_on_the_given_stream(tmp_path: Path) -> None:
    kernel = loaded(SCALE, "scale", tmp_path)
    assert 0 < kernel.registers < 64
    assert (kernel.local_bytes, kernel.shared_bytes, kernel.max_threads) == (0, 0, 1024)
    values = torch.arange(512.0, device=CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for target in (stream, torch.cuda.current_stream()):
        kernel.launch(target, grid=4, block=128, args=(values.data_ptr(), 1.5))
        torch.cuda.synchronize()
    assert values.equal(torch.arange(512.0, device=CUDA) * 2.25)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cluster", "shared_bytes", "cooperative"), [(2, 256, False), (8, 200_000, True), (16, 256, True)]
)
def test_clusters_exchange_through_shared_memory(
    cluster: int, shared_bytes: int, cooperative: bool, tmp_path: Path
) -> None:
    if torch.cuda.get_device_capability(CUDA) < (9, 0):
        pytest.skip("this chip has no clusters")
    kernel = loaded(NEIGHBOURS, "neighbours", tmp_path)
    assert kernel.max_active_clusters(block=64, cluster=cluster, shared_bytes=shared_bytes) >= 1
    received = torch.full((2 * cluster, 64), -1, dtype=torch.int32, device=CUDA)
    kernel.launch(
        torch.cuda.current_stream(), grid=2 * cluster, block=64, cluster=cluster, shared_bytes=shared_bytes,
        cooperative=cooperative, args=(received.data_ptr(),),
    )  # fmt: skip
    blocks = torch.arange(2 * cluster)
    sender = blocks // cluster * cluster + (blocks - 1) % cluster
    assert received.cpu().equal((1000 * sender[:, None] + torch.arange(64)).int())


@pytest.mark.gpu
def test_a_launch_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    from onelaunch.nvrtc.launch import CudaError

    kernel = loaded(SCALE, "scale", tmp_path)
    assert kernel.max_active_clusters(block=1024, shared_bytes=2**30) == 0
    assert kernel.max_active_clusters(block=1024, cluster=64) == 0
    limit = kernel.max_active_clusters(block=1024)
    assert limit >= torch.cuda.get_device_properties(CUDA).multi_processor_count
    stream, values = torch.cuda.current_stream(), torch.zeros(1, device=CUDA)
    with pytest.raises(CudaError, match="CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"):
        kernel.launch(stream, grid=limit + 1, block=1024, cooperative=True, args=(values.data_ptr(), 1.0))
    with pytest.raises(CudaError, match="1073741824 bytes of dynamic shared memory"):
        kernel.launch(stream, grid=1, block=32, shared_bytes=2**30, args=(values.data_ptr(), 1.0))
    torch.cuda.synchronize()  # the refusals leave the context usable


@pytest.mark.gpu
def test_a_cooperative_grid_is_resident_as_a_whole(tmp_path: Path) -> None:
    kernel = loaded(ALL_ARRIVE, "all_arrive", tmp_path)
    blocks = kernel.max_active_clusters(block=256, shared_bytes=100_000)
    counter, seen = torch.zeros(1, dtype=torch.int32, device=CUDA), torch.zeros(blocks, dtype=torch.int32, device=CUDA)
    kernel.launch(
        torch.cuda.current_stream(), grid=blocks, block=256, shared_bytes=100_000, cooperative=True,
        args=(counter.data_ptr(), seen.data_ptr()),
    )  # fmt: skip
    assert (seen == blocks).all()


@pytest.mark.gpu
def test_the_host_watches_and_stops_a_running_kernel(tmp_path: Path) -> None:
    from onelaunch.engines.resident.pinned import MappedArray

    kernel = loaded(COUNT_UNTIL_STOPPED, "count", tmp_path)
    control = MappedArray(1, [("step", "<u4"), ("stop", "<u4")], CUDA)
    assert (control.array == np.zeros(1, control.array.dtype)).all()
    done = torch.cuda.Event()
    kernel.launch(torch.cuda.current_stream(), grid=1, block=1, args=(control.address,))
    done.record()
    first = _wait_until_above(control.array, 0)
    second = _wait_until_above(control.array, first)
    assert second > first
    assert not done.query()  # seen while the kernel ran
    control.array["stop"] = 1
    done.synchronize()
    assert control.array["step"][0] >= second


def _wait_until_above(array: np.ndarray, bound: int) -> int:
    deadline = time.monotonic() + 5
    while array["step"][0] <= bound and time.monotonic() < deadline:
        pass
    return int(array["step"][0])
