"""What all tests share: the one table of tolerances, the choice of cases, and the folder of the full data sets."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import pairwise

# (relative, absolute) tolerance against a float64 reference, by dtype. Never loosened to get green.
TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-5, 1e-6),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}
LOSS_TOLERANCE = 1e-5  # relative, fp32, every one of 200 steps
WEIGHT_TOLERANCE = 1e-4  # absolute, fp32, after 200 steps
LONGEST_SECONDS = 300  # of one test

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is: LONGEST_SECONDS bounds the test.
hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="full products of parameters instead of pairs")


def pytest_configure(config: pytest.Config) -> None:
    """Bound every test's time, and keep PyTorch's compile cache of this run apart from the user's."""
    pairwise.ALL_CASES = config.getoption("--all-cases")
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # workers have their parent's
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="onelaunch-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if config.getoption("timeout", 0) is None:  # pytest-timeout is there, and was told nothing
        config.option.timeout = LONGEST_SECONDS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a CUDA device, leave the GPU cases out, so that the skips that remain are worth reading."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if "gpu" in item.keywords]
    items[:] = [item for item in items if "gpu" not in item.keywords]
    config.hook.pytest_deselected(items=gpu)


@pytest.fixture(autouse=True)
def _same_libraries() -> Iterator[None]:
    """On a CPU without bf16, PyTorch gives up oneDNN in a bf16 product: later tests would compute other bits."""
    before = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: on tiny tensors a second brings nothing, and on a busy machine it costs a hundredfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def full_mnist() -> Path:
    """The folder of the full MNIST files, where this machine has it."""
    folder = SHARED_DATA / "mnist"
    if not folder.is_dir():
        pytest.skip("the full MNIST is not beside the project")
    return folder


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
