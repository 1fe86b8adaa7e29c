"""The explanation: right counts, right totals, honest about what is not fused; on the command line too."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import onelaunch as ol
from onelaunch.cli.app import make_app
from onelaunch.errors import OnelaunchError
from onelaunch.fuse.placing import place_regions, regions
from onelaunch.fuse.record import record
from onelaunch.fuse.region import Options
from onelaunch.fuse.resources import occupancy
from onelaunch.fuse.roofline import DEVICES, Cost
from onelaunch.fuse.timing import contenders
from onelaunch.fuse.verdict import force
from tests.fuse.models import ResNet
from tests.fuse.test_models import transformers

pytestmark = pytest.mark.usefixtures("one_thread", "wide_terminal")


@pytest.fixture
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


ROWS, WIDTH = 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.wide = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(F.relu(self.norm(self.fc(x))))
        z = self.wide(h)
        return torch.tanh(z) + z


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def test_bytes_and_launches_of_a_chain_counted_by_hand() -> None:
    explained = ol.explain(nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU(), nn.Dropout(0.5)), rows())
    (group,) = explained.groups
    n = ROWS * WIDTH
    assert group.name == "relu + dropout"
    assert group.before.forward == Cost(8 * n + 9 * n, 2 * n, 2)
    assert group.before.backward == Cost(12 * n + 9 * n, 2 * n, 2)
    assert group.after.forward.bytes == 8 * n + n / 8
    assert group.after.backward.bytes == 8 * n + n / 8
    assert (group.after.forward.launches, group.after.backward.launches) == (1, 1)


@pytest.mark.parametrize("training", [True, False])
def test_totals_are_the_sum_of_what_is_listed(training: bool) -> None:
    explained = ol.explain(Block().train(training), rows())
    taken = {index for group in explained.groups if group.fused for index in group.operations}
    rest = [op.work.total for index, op in enumerate(explained.operations) if index not in taken]
    for what in ("bytes", "launches", "flops"):
        fused = sum(getattr(group.after.total, what) for group in explained.groups if group.fused)
        assert getattr(explained.after, what) == pytest.approx(fused + sum(getattr(cost, what) for cost in rest))
        before = sum(getattr(op.work.total, what) for op in explained.operations)
        assert getattr(explained.before, what) == pytest.approx(before)
    assert explained.after.bytes < explained.before.bytes
    assert explained.after.seconds < explained.before.seconds
    names = [(group.name, group.fused) for group in explained.groups]
    first = "batch_norm + relu + dropout" if training else "linear + batch_norm + relu + dropout"
    assert names == [(first, True), ("linear + tanh", False)]
    assert "readers" in explained.groups[1].reason


def test_products_counted_by_hand() -> None:
    explained = ol.explain(nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.GELU()), rows().requires_grad_())
    (group,) = explained.groups
    x, w, y = 4 * ROWS * WIDTH, 4 * 8 * WIDTH, 4 * ROWS * 8
    product = 2 * ROWS * WIDTH * 8
    assert group.before.forward.bytes == (x + w + y) + 2 * y
    assert group.before.backward.bytes == 3 * y + (y + w + x) + (y + x + w)
    assert group.after.forward.bytes == x + w + 2 * y  # y, and z for gelu's slope
    assert group.after.backward.bytes == 3 * y + (y + w + x) + (y + x + w)
    assert group.after.total.flops == pytest.approx(3 * product, rel=0.1)


def test_recording_leaves_no_trace() -> None:
    model = Block()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    ol.explain(model, torch.zeros(ROWS, WIDTH))
    ol.fuse(model, torch.zeros(ROWS, WIDTH))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not regions(model)


def test_what_is_explained_is_what_fuse_does() -> None:
    for model in (Block(), ResNet(), Block().eval(), ResNet().eval()):
        x = torch.randn(4, 3, 16, 16) if isinstance(model, ResNet) else rows()
        explained = ol.explain(model, x)
        fused = ol.fuse(model, x)
        wanted = [group.name for group in explained.groups if group.fused]
        again = ol.explain(fused, x)
        assert [group.name for group in again.groups if group.fused] == wanted
        assert again.after == explained.after


def test_a_fusion_that_does_not_pay_is_not_made() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU()).eval()
    small, large = torch.randn(8, WIDTH), torch.randn(200_000, WIDTH)
    assert ol.fuse(model, small, eval_only=True) is model
    assert ol.fuse(model, eval_only=True) is model
    (group,) = ol.explain(model, small).groups
    assert not group.fused
    assert "does not pay" in group.reason
    assert group.before == group.after
    assert regions(ol.fuse(model, large, eval_only=True))
    assert ol.explain(model, large).groups[0].fused
    other = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with force(False):
        assert ol.fuse(other) is other
        assert ol.fuse(other, torch.randn(2, 3)) is other


@pytest.mark.usefixtures("every_chain")
def test_what_is_measured_is_the_chain_itself() -> None:
    """The two contenders of a measurement, run on the CPU: the same gradients, from the chain's own weights."""
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()).double()
    watched, _ = place_regions(model, Options(), sized=True)
    run = record(watched, (rows().double().requires_grad_(),))
    assert [one.chain.name for one in run.chains] == ["linear + gelu", "batch_norm + relu"]
    for one in run.chains:
        apart, fused = contenders(one, [run.steps[position] for position in one.steps], torch.device("cpu"))
        assert fused.args[2] is apart.args[2]  # type: ignore[attr-defined]
        for a, b in zip(apart(), fused(), strict=True):  # type: ignore[call-overload]
            assert (a is None) == (b is None)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_other_devices() -> None:
    model, x = Block(), rows()
    times = [ol.explain(model, x, device=name).before.seconds for name in ("B200", "H200", "L4")]
    assert times == sorted(times)
    with pytest.raises(OnelaunchError, match=r"device='H2000' is not known: pass one of 'H200'.*did you mean 'H200'"):
        ol.explain(model, x, device="H2000")


def test_bad_input() -> None:
    with pytest.raises(OnelaunchError, match="inputs is empty"):
        ol.explain(Block())
    with pytest.raises(OnelaunchError, match=r"inputs do not fit Block: .*; pass what it takes"):
        ol.explain(Block(), torch.randn(3, 5))
    with pytest.raises(TypeError, match="model is a str"):
        ol.explain("model")


def test_a_model_with_nothing_to_fuse() -> None:
    explained = ol.explain(nn.LSTM(4, 4), torch.randn(3, 2, 4))
    assert explained.groups == []
    assert "fuse returns this model as it is" in str(explained)
    assert explained.before.bytes > 0


def test_reasons_of_a_model_in_which_nothing_is_fused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    model[1].register_forward_hook(lambda *_: None)
    (group,) = ol.explain(model, rows()).groups
    assert (group.fused, group.reason) == (False, "1 has a hook")
    assert group.before == group.after


def test_table_and_dictionary() -> None:
    explained = ol.explain(Block(), rows())
    text = str(explained)
    for part in ("batch_norm + relu + dropout", "not fused", "readers", "the whole model", "1 of 2 chains fused"):
        assert part in text
    content = json.loads(json.dumps(explained.to_dict()))
    assert content["groups"][0]["bound"] in ("memory", "compute", "launch")
    assert content["operations"][0]["label"] == "fc"
    assert content["before"]["bytes"] > content["after"]["bytes"]


@pytest.mark.parametrize("measured", [False, True])
def test_a_narrow_terminal_keeps_the_decisions(measured: bool) -> None:
    explained = ol.explain(Block(), rows())
    if measured:  # as on CUDA
        explained.groups = [replace(group, measured=(1.5e-3, 1.25e-3)) for group in explained.groups]
    console = Console(file=io.StringIO(), width=80)
    console.print(explained)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for part in ("batch_norm", "dropout", "not fused", "readers", "the whole model", "chains fused", "launches"):
        assert part in text
    assert ("1.50 ms → 1.25 ms" in text) == measured


def test_a_hugging_face_model_with_opaque_parts() -> None:
    hub = transformers()
    config = hub.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    explained = ol.explain(hub.BertModel(config), torch.randint(50, (2, 9)))
    names = [group.name for group in explained.groups if group.fused]
    assert names.count("linear + gelu") == 2
    assert names.count("linear + dropout") == 4
    assert any("encoder.layer.1.output" in label for group in explained.groups for label in group.labels)
    assert explained.notes


def test_occupancy() -> None:
    chip = {"registers": 65536, "shared_memory": 228 * 1024, "threads": 2048}
    assert occupancy(32, 0, 4, **chip) == 1.0
    assert occupancy(128, 0, 4, **chip) == 0.25
    assert occupancy(255, 0, 8, **chip) == 0.125
    assert occupancy(32, 100 * 1024, 4, **chip) == 8 / 64


def test_roofline() -> None:
    device = DEVICES["H200"]
    assert device.bound(Cost(1e9, 1e6, 1), torch.float32) == "memory"
    assert device.bound(Cost(1e6, 1e13, 1), torch.float32) == "compute"
    assert device.bound(Cost(10, 10, 1), torch.float32) == "launch"
    assert device.seconds(Cost(4.26e9, 0, 0), torch.float32) == pytest.approx(1e-3)


# the command line

MODEL = """
import torch
from torch import nn
def build():
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.fc = nn.Embedding(9, 16), nn.Linear(16, 16)
    def forward(self, words):
        return self.fc(self.table(words)).relu()
ready = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
def broken():
    raise RuntimeError("no weights")
number = 3
def ends():
    raise SystemExit(3)
class Ends(nn.Module):
    def forward(self, x):
        raise SystemExit(3)
class Forgets(nn.Module):
    def __init__(self):
        pass
def weightless():
    return nn.Linear(3, 3, device="meta")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(make_app(), ["explain", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_command(file: Path) -> None:
    code, out, _ = run("model.py:build", "--input", "64x784")
    assert code == 0
    assert "linear + relu + dropout" in out
    code, out, _ = run(
        "model.py:build", "--input", "64x784", "--eval", "--dtype", "bfloat16", "--device", "A100", "--json"
    )
    content = json.loads(out)
    assert (content["mode"], content["device"]["name"]) == ("evaluation", "A100")
    assert content["operations"][0]["dtype"] == "bfloat16"
    code, out, _ = run("model.py:Embeds", "--input", "4x7:int64", "--html", "out/page.html")
    assert "page     out/page.html" in out
    assert (file.parent / "out" / "page.html").read_text().startswith("<!doctype html>")
    assert run("model.py:ready", "--input", "2x3")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("model.py:biuld", "--input", "2x3"), "did you mean 'build'"),
        (("model.py:build", "--input", "2x3", "--html", "page.txt"), "html='page.txt' must end in .html"),
        (("nowhere.py:build", "--input", "2x3"), "names no file"),
        (("model.py", "--input", "2x3"), "names no model in the file: pass model.py:NAME"),
        (("model.py:broken", "--input", "2x3"), "cannot be made: RuntimeError: no weights"),
        (("model.py:number", "--input", "2x3"), "cannot be made"),
        (("model.py:ends", "--input", "2x3"), "cannot be made: SystemExit: 3; mend it"),
        (("model.py:Ends", "--input", "2x3"), "cannot be run: SystemExit: 3; mend it"),
        (("model.py:Forgets", "--input", "2x3"), "cannot be made: AttributeError"),
        (("model.py:weightless", "--input", "2x3"), "cannot be made: NotImplementedError: Cannot copy out of meta"),
        (("model.py:build", "--input", "999999999x99999999"), "input='999999999x99999999' does not fit into memory"),
        (("model.py:build", "--input", f"{10**20}x8"), "does not fit into memory"),
        (("model.py:build", "--input", "2x"), "input='2x' is not a shape"),
        (("model.py:build", "--input", "2x3:half"), "has the type 'half'"),
        (("model.py:build", "--input", "2x3"), "inputs do not fit Sequential"),
        (("model.py:build", "--input", "64x784", "--dtype", "fp8"), "dtype='fp8' is not known"),
        (("model.py:build", "--input", "64x784", "--device", "TPU"), "device='TPU' is not known"),
    ],
)
def test_command_with_bad_input(file: Path, arguments: tuple[str, ...], reason: str) -> None:
    code, _, error = run(*arguments)
    assert code == 2
    assert reason in error
    assert len(error.strip().splitlines()) == 1
