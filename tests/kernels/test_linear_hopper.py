"""The CUDA C++ GEMM is compiled on any machine, and compared with float64 on a Hopper."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from onelaunch.activations import ACTIVATIONS, activate, saves_input
from onelaunch.kernels import linear_hopper
from onelaunch.kernels.linear_hopper import (
    ARCH,
    HEADERS,
    LARGE,
    MEDIUM,
    SMALL,
    Tile,
    Variant,
    can_run,
    linear_forward,
    source_of,
)
from onelaunch.nvrtc.activations import IMPLEMENTED
from onelaunch.nvrtc.compile import CompileError, compile_cubin, unavailable_reason
from tests.conftest import TOLERANCE
from tests.kernels.reference import poisoned
from tests.pairwise import cases

pytestmark = pytest.mark.skipif(bool(unavailable_reason()), reason=f"cannot compile CUDA here: {unavailable_reason()}")
DTYPES = [torch.bfloat16, torch.float16]
ALL = [None, *ACTIVATIONS]
TILES = [LARGE, MEDIUM, SMALL]
# Less than a tile and a cluster; partial tiles at every edge; k shorter than a stage; one tile per cluster, and many.
SHAPES = [
    (1, 8, 8),
    (100, 72, 136),
    (256, 64, 256),
    (300, 200, 1000),
    (2000, 784, 520),
    (6000, 72, 4104),
    (9000, 328, 2056),
]


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


needs_hopper = [pytest.mark.gpu, pytest.mark.skipif(not hopper(), reason="needs a Hopper")]


@pytest.mark.parametrize(
    ("activation", "tile", "dtype", "biased"), cases(ALL, TILES, DTYPES, (True, False)),
    ids=lambda value: str(value).removeprefix("torch."),
)  # fmt: skip
def test_compiles_without_spills_and_with_products_in_flight(
    activation: str | None, tile: Tile, dtype: torch.dtype, biased: bool
) -> None:
    variant = Variant(tile, activation, dtype, biased, store_z=biased and saves_input(activation))
    made = compile_cubin(source_of(variant), ARCH, headers=HEADERS)
    assert re.search(r"\b0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", made.log), made.log
    assert "serialized" not in made.log  # the warning of ptxas when each product waits for the one before it


def test_every_activation_is_implemented() -> None:
    assert set(ACTIVATIONS) == IMPLEMENTED


def test_a_tensor_on_the_cpu_is_refused() -> None:
    x = torch.empty(256, 64, dtype=torch.bfloat16)
    assert not can_run(x, x, None, x, None, "relu", LARGE)


def operands(m: int, k: int, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    w = (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)
    return [x, w, torch.randn(n, device="cuda", dtype=dtype)]


def check(
    tile: Tile, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, activation: str | None, store_z: bool
) -> None:
    m, n = x.shape[0], w.shape[0]
    y = poisoned(m, n, like=x)
    z = poisoned(m, n, like=x) if store_z else None
    assert can_run(x, w, bias, y, z, activation, tile)
    linear_forward(x, w, bias, y, z, activation=activation, tile=tile)
    exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    rtol, atol = TOLERANCE[x.dtype]
    torch.testing.assert_close(y.double(), activate(exact, activation), rtol=rtol, atol=atol)
    if z is not None:
        torch.testing.assert_close(z.double(), exact, rtol=rtol, atol=atol)


class TestOnAHopper:
    pytestmark = needs_hopper

    @pytest.mark.parametrize("tile", TILES, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_every_edge(self, shape: tuple[int, int, int], dtype: torch.dtype, tile: Tile) -> None:
        x, w, bias = operands(*shape, dtype)
        check(tile, x, w, bias, "silu", store_z=True)
        check(tile, x, w, None, "relu", store_z=False)

    @pytest.mark.parametrize(("activation", "tile", "dtype"), cases(ALL, TILES, DTYPES), ids=str)
    def test_every_activation(self, activation: str | None, tile: Tile, dtype: torch.dtype) -> None:
        x, w, bias = operands(5000, 200, 2056, dtype)
        check(tile, x, w, bias, activation, store_z=False)
        if saves_input(activation):
            check(tile, x, w, bias, activation, store_z=True)

    @pytest.mark.parametrize("tile", TILES, ids=str)
    def test_rows_with_gaps_between_them(self, tile: Tile) -> None:
        wide, tall = operands(600, 256, 512, torch.bfloat16)[:2]
        check(tile, wide[:, 64:192], tall[100:500, 128:], None, "tanh", store_z=False)

    @pytest.mark.parametrize("tile", TILES, ids=str)
    @pytest.mark.parametrize("activation", ALL)
    def test_infinities_and_nan_are_as_in_torch(self, activation: str | None, tile: Tile) -> None:
        x, w, bias = operands(40_000, 64, 256, torch.bfloat16)  # tiles finished by both kinds of warps
        for first in (0, 39_000):
            x[first], x[first + 1, 5], x[first + 2], x[first + 3] = float("inf"), float("nan"), 1e30, -1e30
        y = poisoned(40_000, 256, like=x)
        linear_forward(x, w, bias, y, activation=activation, tile=tile)
        expected = activate(F.linear(x, w, bias), activation)
        assert y.isnan().equal(expected.isnan())
        assert torch.where(y.isinf(), y, 0).equal(torch.where(expected.isinf(), expected, 0))

    @pytest.mark.parametrize("tile", TILES, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
    @pytest.mark.parametrize("activation", ["sigmoid", "silu", "gelu_tanh", "elu", "selu", "mish", "softplus"])
    def test_small_results_keep_their_digits(self, activation: str, dtype: torch.dtype, tile: Tile) -> None:
        """Also where these functions are almost zero, the error is that of the last rounding and little more."""
        x = torch.linspace(-9, 9, 40_000 * 64, device="cuda").to(dtype).view(-1, 64)
        y = poisoned(40_000, 64, like=x)
        linear_forward(x, torch.eye(64, device="cuda", dtype=dtype), None, y, activation=activation, tile=tile)
        rounding = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(y.double(), activate(x.double(), activation), rtol=1.25 * rounding, atol=6e-8)

    @pytest.mark.parametrize("tile", TILES, ids=str)
    def test_calls_that_overlap_wait_for_each_other(self, tile: Tile) -> None:
        """Each call overlaps with the end of the one before it, reads its output and overwrites its input."""
        x, w, _ = operands(4096, 512, 512, torch.bfloat16)
        ends = []
        for serial in (True, False):
            a, b = x.clone(), torch.empty_like(x)
            for _ in range(40):
                linear_forward(a, w, None, b, activation="tanh", tile=tile)
                a, b = b, a
                if serial:
                    torch.cuda.synchronize()
            ends.append(a.clone())
        assert ends[0].equal(ends[1])

    def test_captured_before_it_was_ever_loaded(self) -> None:
        x, w, bias = operands(3000, 136, 512, torch.float16)
        y = poisoned(3000, 512, like=x)
        linear_hopper._launch_of.cache_clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            linear_hopper.linear_forward(x, w, bias, y, activation="leaky_relu", tile=LARGE)
        for _ in range(3):
            x.normal_()
            y.fill_(float("nan"))
            graph.replay()
            rtol, atol = TOLERANCE[x.dtype]
            expected = F.leaky_relu(F.linear(x.double(), w.double(), bias.double()))
            torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=atol)

    @pytest.mark.parametrize("tile", TILES, ids=str)
    def test_streams_side_by_side(self, tile: Tile) -> None:
        x, w, bias = operands(2048, 256, 1024, torch.bfloat16)
        alone = torch.empty(2048, 1024, device="cuda", dtype=x.dtype)
        linear_forward(x, w, bias, alone, activation="gelu", tile=tile)
        outputs = [torch.empty_like(alone) for _ in range(8)]
        streams = [torch.cuda.Stream() for _ in outputs]
        torch.cuda.synchronize()
        for _ in range(5):
            for stream, y in zip(streams, outputs, strict=True):
                with torch.cuda.stream(stream):
                    linear_forward(x, w, bias, y, activation="gelu", tile=tile)
        torch.cuda.synchronize()
        assert all(y.equal(alone) for y in outputs)

    @pytest.mark.parametrize("captured", [False, True])
    def test_a_thread_that_is_new_to_cuda(self, captured: bool) -> None:
        x, w, bias = operands(1024, 128, 512, torch.bfloat16)
        alone, y = torch.empty(2, 1024, 512, device="cuda", dtype=x.dtype).unbind()
        linear_forward(x, w, bias, alone, activation="gelu", tile=SMALL)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()

        def work() -> None:
            if captured:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    linear_forward(x, w, bias, y, activation="gelu", tile=SMALL)
                graph.replay()
            else:
                linear_forward(x, w, bias, y, activation="gelu", tile=SMALL)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()
        torch.cuda.synchronize()
        assert y.equal(alone)

    @pytest.mark.parametrize("fault", ["absent", "compile", "launch"])
    def test_a_missing_part_is_no_error(self, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from onelaunch.nvrtc.launch import CudaError

        def fails(*_: object) -> None:
            raise (CompileError if fault == "compile" else CudaError)("on purpose")

        linear_hopper._loads.cache_clear()
        if fault == "absent":
            monkeypatch.setattr(linear_hopper, "unavailable_reason", lambda: "cuda-core cannot be imported")
        else:
            monkeypatch.setattr(linear_hopper, "_launch_of", fails)
        x, w, bias = operands(256, 64, 512, torch.bfloat16)
        y = torch.empty(256, 512, device="cuda", dtype=x.dtype)
        assert not can_run(x, w, bias, y, None, "relu", LARGE)
        linear_hopper._loads.cache_clear()

    def test_the_tiles_that_are_measured_fit_the_output(self) -> None:
        from onelaunch.kernels.dropout_key import NO_KEY
        from onelaunch.ops.linear_choice import Call, candidates

        for m, n, aligned, expected in (
            (8192, 512, True, [LARGE, MEDIUM]),
            (1024, 1024, True, [MEDIUM, SMALL]),
            (512, 1024, True, [SMALL]),
            (65536, 64, True, [SMALL]),
            (64, 512, True, []),
            (8192, 512, False, []),
        ):
            x, w, bias = operands(m, 264 if aligned else 257, n, torch.bfloat16)
            call = Call(x, w, bias, torch.empty(m, n, device="cuda", dtype=x.dtype), None, None, "silu", 0.0, NO_KEY)
            names = [candidate.name for candidate in candidates(call)]
            assert [tile for tile in TILES if str(tile) in names] == expected
            assert any(name.startswith("triton") for name in names) == (not expected)

    def test_dropout_on_large_outputs_is_a_pass_of_its_own_without_measuring(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from onelaunch.kernels.dropout_key import NO_KEY
        from onelaunch.ops import linear_choice

        monkeypatch.setattr(linear_choice, "time_implementations", lambda *_: pytest.fail("measured"))
        x, w, bias = operands(4096, 256, 512, torch.bfloat16)
        y, keep = torch.empty(4096, 512, device="cuda", dtype=x.dtype), torch.empty(4096 * 64, device="cuda").byte()
        call = linear_choice.Call(x, w, bias, y, None, keep, "relu", 0.5, NO_KEY)
        assert linear_choice.choose_implementation(call) is linear_choice.LIBRARY
