"""Settings of the process that a run changes while it trains, and gives back."""

from __future__ import annotations

import pytest
import torch

from onelaunch.engines.eager.process_settings import ProcessSettings


@pytest.mark.parametrize(
    ("precision", "exact", "matmul", "convolutions"),
    [("tf32", False, "high", True), ("fp32", False, "highest", True), ("fp32", True, "highest", False)],
)
def test_a_run_has_its_own_precision(precision: str, exact: bool, matmul: str, convolutions: bool) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    settings = ProcessSettings(torch.device("cpu"), precision, 0, {}, exact=exact)

    def fail() -> None:
        with settings.run_settings():
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (matmul, convolutions)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
