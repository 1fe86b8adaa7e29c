"""On a GPU both forms of a step are recorded in turns, in one memory, and the choice is kept on disk."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.step.candidates import TURNS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]  # Inductor's own end its compilation


def transformer(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, activation="gelu")
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(128, 8)).to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_both_forms_train_in_turns(dtype: torch.dtype, accumulate: int) -> None:
    model = transformer(dtype)
    plain = copy.deepcopy(model).double()
    x, y = torch.randn(64, 32, 128, device="cuda", dtype=dtype), torch.randn(64, 32, 8, device="cuda", dtype=dtype)
    step = ol.train_step(
        model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.001), tune=True, accumulate=accumulate
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.001)
    losses, expected, forms = [], [], set()
    for number in range(2 * accumulate * TURNS + 60):
        losses.append(step(x, y))
        forms.add(step._plain.candidates.current)
        loss = F.mse_loss(plain(x.double()), y.double())
        (loss / accumulate).backward()
        expected.append(loss.detach())
        if number % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    assert step.reason == ""
    if step._plain.candidates._kinds:  # patterns that match
        assert forms == {0, 1}
        assert "per step" in step.choice
        again = ol.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.001), accumulate=accumulate)
        again(x, y)
        assert "measured before" in again.choice
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(torch.stack(losses).double(), torch.stack(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_step_of_a_network_with_batch_norms_copies_nothing(dtype: torch.dtype) -> None:
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 64, 4)).to("cuda", dtype)
    step = ol.train_step(model, F.cross_entropy, torch.optim.AdamW(model.parameters()))
    x, y = torch.randn(4, 8, 8, 8, device="cuda", dtype=dtype), torch.randint(4, (4,), device="cuda")
    for _ in range(4):
        step(x, y)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step(x, y)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("triton" in name for name in names)
    assert not [name for name in names if "Memcpy" in name]
    assert int(model[1].num_batches_tracked) == 5
