"""Checkpoint files: a damaged or foreign one is refused, none is overwritten, and no temporary file stays."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.errors import OnelaunchError
from onelaunch.files import write_atomic
from onelaunch.train import checkpoint
from onelaunch.train.checkpoint import digest_of, load_checkpoint, save_checkpoint
from onelaunch.train.fit import fit_with
from onelaunch.train.loop import Listener
from tests.reference import OPTIMIZERS
from tests.train.checkpointed import data, network, run, same

pytest.importorskip("safetensors")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("schedule", ["linear", "cosine", "one_cycle"])
def test_a_schedule_fixes_the_length(tmp_path, schedule):
    path = tmp_path / "run.safetensors"
    run(network(), epochs=2, schedule=schedule, checkpoint=path)
    with pytest.raises(ol.CheckpointError, match=r"epochs=2, not 3 \(its schedule depends on the length\)"):
        run(network(), epochs=3, schedule=schedule, checkpoint=path, resume=True)


def test_tensors_are_cloned_for_a_file_only_where_they_share_memory():
    alone, whole = torch.zeros(3), torch.arange(6.0).reshape(2, 3)
    found = checkpoint.unshared({"alone": alone, "whole": whole, "tied": whole, "row": whole[1], "turned": whole.t()})
    assert [found[name].data_ptr() for name in ("alone", "whole")] == [alone.data_ptr(), whole.data_ptr()]
    assert len({tensor.data_ptr() for tensor in found.values()}) == 5
    assert all(tensor.is_contiguous() for tensor in found.values())
    assert torch.equal(found["tied"], whole)
    assert torch.equal(found["row"], whole[1])


def test_every_kind_of_damage_is_noticed(tmp_path):
    path = tmp_path / "run.safetensors"
    run(network(), epochs=1, checkpoint=path)
    good = path.read_bytes()
    damaged = {
        "empty": b"",
        "cut": good[: len(good) // 2],
        "longer": good + b"x",
        "text": b"not a checkpoint at all, but long enough to look at" * 10,
        "flipped weight": good[:-9] + bytes([good[-9] ^ 1]) + good[-8:],
        "flipped header": good[:60] + bytes([good[60] ^ 1]) + good[61:],
        "huge header": (2**62).to_bytes(8, "little") + good[8:],
    }
    for name, content in damaged.items():
        path.write_bytes(content)
        with pytest.raises(ol.CheckpointError, match=r"run\.safetensors'.*(damaged|not written by)") as caught:
            run(network(), checkpoint=path, resume=True)
        assert "\n" not in str(caught.value), name
        assert path.read_bytes() == content, f"{name}: the file was touched"


def test_any_single_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "run.safetensors"
    run(network(), epochs=1, checkpoint=path)
    good = path.read_bytes()
    for position in torch.randint(len(good), (60,)).tolist():
        path.write_bytes(good[:position] + bytes([good[position] ^ (1 << position % 8)]) + good[position + 1 :])
        with pytest.raises(ol.CheckpointError):
            load_checkpoint(path)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    run(network(), epochs=1, checkpoint=path)
    wider = nn.Sequential(nn.Linear(7, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    before = path.read_bytes()
    for change, message in (
        ({"model": wider}, r"another model: its 0.bias is \[16\], this model's is \[32\]"),
        ({"batch_size": 16}, r"made with batch_size=32, not 16: pass batch_size=32"),
        ({"lr": 0.5}, r"made with lr=0.05, not 0.5"),
        ({"seed": 1}, r"made with seed=0, not 1"),
        ({"seed": 1, "validation": 0.2}, r"made with seed=0, not 1"),  # the seed chooses the rows held out
        ({"sample_weight": np.ones(len(data()[1]))}, r"pass the data, validation and sample_weight of that run"),
    ):
        options = {"model": network(), **change}
        with pytest.raises(ol.CheckpointError, match=message):
            run(options.pop("model"), checkpoint=path, resume=True, **options)
    x, y = data()
    with pytest.raises(ol.CheckpointError, match="other rows or weights"):
        ol.fit(
            network(), x + 1, y, epochs=6, checkpoint=path, resume=True, progress=False, **OPTIMIZERS["sgd-momentum"]
        )
    with pytest.raises(ol.CheckpointError, match="past the end of this run"):
        run(network(), epochs=None, steps=2, checkpoint=path, resume=True)
    with pytest.raises(ol.CheckpointError, match="does not exist"):
        run(network(), checkpoint=tmp_path / "none.safetensors", resume=True)
    assert path.read_bytes() == before


def test_a_checkpoint_of_other_dtypes_or_frozen_layers_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    run(network(), epochs=1, checkpoint=path)
    with pytest.raises(ol.CheckpointError, match=r"its 0.bias is \[16\], this model's is \[16\] of torch.float64"):
        run(network().double(), checkpoint=path, resume=True)
    fixed = network()
    fixed[0].requires_grad_(False)
    with pytest.raises(
        ol.CheckpointError, match=r"with no parameter frozen, not 0\.weight, 0\.bias: set requires_grad"
    ):
        run(fixed, checkpoint=path, resume=True)


@pytest.mark.parametrize("about", [
    "[]", "no JSON", "{}", '{"format": 1}',
    *(f'{{"format": 1, "spec": {{}}, "model": "", "data": "", "engine": "cpu", "seconds": 1, {rest}}}' for rest in (
        '"epochs": [3], "partial": {"correct": 0, "epoch_seconds": 0}', '"epochs": [], "partial": {}',
    )),
])  # fmt: skip
def test_an_incomplete_checkpoint_is_refused(tmp_path, about):
    from safetensors.torch import save_file

    path, tensors = tmp_path / "run.safetensors", {"losses": torch.zeros(3)}
    save_file(tensors, path, {"onelaunch": about, "sha256": digest_of(tensors, about)})
    with pytest.raises(ol.CheckpointError, match="is incomplete"):
        run(network(), checkpoint=path, resume=True)


def test_the_target_of_a_link_is_written(tmp_path):
    target, link = tmp_path / "there.safetensors", tmp_path / "link.safetensors"
    link.symlink_to(target)
    run(network(), epochs=1, checkpoint=link)
    assert link.is_symlink()
    assert load_checkpoint(target).step > 0


def test_a_safetensors_file_of_another_program_is_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(ol.CheckpointError, match="was not written by onelaunch"):
        run(network(), checkpoint=path, resume=True)


def test_a_new_run_does_not_overwrite_an_old_checkpoint(tmp_path):
    path = tmp_path / "run.safetensors"
    run(network(), epochs=1, checkpoint=path)
    first = path.read_bytes()
    run(network(), epochs=1, seed=1, checkpoint=path)
    run(network(), epochs=1, seed=2, checkpoint=path)
    assert path.with_name("run.safetensors.1").read_bytes() == first
    assert path.with_name("run.safetensors.2").exists()


def test_two_runs_do_not_write_one_checkpoint(tmp_path):
    path = tmp_path / "run.safetensors"
    refused = []

    class Second(Listener):
        def epoch(self, history, record):
            with pytest.raises(ol.CheckpointError, match=r"run\.safetensors' is being written by another run"):
                run(network(), epochs=1, checkpoint=path)
            refused.append(record)

    fit_with(network(), *data(), {"epochs": 2}, checkpoint=path, progress=False, listener=Second())
    assert len(refused) == 2
    run(network(), epochs=1, checkpoint=path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.safetensors", "run.safetensors.1"]


def test_an_unwritable_path_is_named(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ol.CheckpointError, match=r"checkpoint=.* cannot be written"):
        run(network(), epochs=1, checkpoint=blocker / "run.safetensors")
    with pytest.raises(ol.OnelaunchError, match="is a folder"):
        run(network(), epochs=1, checkpoint=tmp_path)


def test_no_temporary_files_stay(tmp_path):
    run(network(), epochs=2, checkpoint=tmp_path / "run.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


def test_the_same_weights_with_another_activation_are_another_model(tmp_path):
    path = tmp_path / "run.safetensors"
    run(network(), epochs=1, checkpoint=path)
    other = network()
    other[2] = nn.Tanh()
    with pytest.raises(
        ol.CheckpointError, match=r"another model: it has \(2\): ReLU\(\) where this one has \(2\): Tanh\(\)"
    ):
        run(other, checkpoint=path, resume=True)


def test_another_loss_function_is_refused(tmp_path):
    def loss_of(power: float):
        return lambda output, y: (output - F.one_hot(y.long(), output.shape[1])).abs().pow(power).mean()

    path, common = tmp_path / "run.safetensors", {"optimizer": "sgd", "engine": "eager"}
    run(network(), epochs=1, loss=loss_of(1.5), checkpoint=path, **common)
    with pytest.raises(ol.CheckpointError, match="another loss function: pass that one as loss"):
        run(network(), epochs=2, loss=loss_of(2.0), checkpoint=path, resume=True, **common)
    run(network(), epochs=2, loss=loss_of(1.5), checkpoint=path, resume=True, **common)


def test_state_that_is_not_a_tensor_is_named_before_training(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    x, y = data()
    model = Extra(7, 4)
    before = model.weight.clone()
    with pytest.raises(ol.CheckpointError, match="_extra_state, which is not a tensor"):
        ol.fit(model, x, y, epochs=1, checkpoint=tmp_path / "run.safetensors", progress=False)
    assert torch.equal(model.weight, before)
    ol.fit(model, x, y, epochs=1, progress=False)


def test_the_next_run_removes_what_a_killed_one_left(tmp_path):
    path = tmp_path / "run.safetensors"
    left, another = tmp_path / ".run.safetensors.1-2.tmp", tmp_path / ".other.safetensors.1-2.tmp"
    for file in (left, another):
        file.write_bytes(b"half")
    ol.fit(
        nn.Linear(3, 2), torch.randn(8, 3), torch.zeros(8, dtype=torch.int64), steps=2, checkpoint=path, progress=False
    )
    assert path.exists()
    assert not left.exists()
    assert another.exists()


def test_a_checkpoint_that_is_a_link_to_itself_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    path.symlink_to(path)
    with pytest.raises(OnelaunchError, match="checkpoint="):
        ol.fit(nn.Linear(3, 2), torch.randn(8, 3), torch.zeros(8, dtype=torch.int64), steps=2, checkpoint=path)


def test_a_checkpoint_from_before_these_options_resumes(tmp_path):
    path = tmp_path / "run.safetensors"
    run(network(), epochs=2, checkpoint=path)
    old = load_checkpoint(path)
    for name in ("class_weight", "clip_norm", "metrics", "early_stopping"):
        del old.about["spec"][name]
    for name in ("weighted_loss", "weight"):
        del old.about["partial"][name]
    del old.about["best"]
    save_checkpoint(path, old)
    model, whole = network(), network()
    assert run(model, checkpoint=path, resume=True).losses == run(whole).losses
    assert same(model, whole)
    save_checkpoint(path, old)
    with pytest.raises(ol.CheckpointError, match=r"made with clip_norm=None, not 1.0"):
        run(network(), checkpoint=path, resume=True, clip_norm=1.0)


@pytest.mark.parametrize("engine", ["eager", "cpu"])
def test_a_full_disk_is_named_and_the_weights_stay_in_the_model(tmp_path, monkeypatch, engine):
    """The first epoch is trained; its checkpoint cannot be written."""
    written = []

    def write(path, content):
        written.append(path)
        if len(written) > 1:  # the first is that of the start
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_atomic(path, content)

    monkeypatch.setattr(checkpoint, "write_atomic", write)
    path = tmp_path / "run.safetensors"
    model, expected = network(), network()
    with pytest.raises(ol.CheckpointError) as caught:
        run(model, epochs=3, engine=engine, checkpoint=path)
    assert str(caught.value) == (
        f"checkpoint={str(path)!r} cannot be written: No space left on device; free some space, or pass another path"
    )
    run(expected, epochs=1, engine=engine)
    assert same(model, expected)
    assert load_checkpoint(path).step == 0
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


class Remembers(nn.Module):
    """Adds what it has seen in training, which is in buffers that are not persistent; one of them is made by the forward."""

    mean: torch.Tensor
    last: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 4)
        self.register_buffer("mean", torch.zeros(7), persistent=False)
        self.register_buffer("last", None, persistent=False)
        self.register_buffer("positions", torch.arange(7).expand(3, -1), persistent=False)
        self.register_buffer("sparse", torch.eye(7).to_sparse(), persistent=False)
        self.register_buffer("complex", torch.zeros(2, dtype=torch.complex64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.mean if self.last is None else self.mean + self.last
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            self.last = x.detach()[0].clone()
        return self.layer(x + before)


@pytest.mark.parametrize("wrapped", [False, True])
def test_buffers_that_are_not_persistent_are_resumed(tmp_path, wrapped):
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Remembers()) if wrapped else Remembers()

    path, whole, model = tmp_path / "run.safetensors", make(), make()
    expected = run(whole)
    run(make(), epochs=3, checkpoint=path)
    old = load_checkpoint(path)
    assert run(model, checkpoint=path, resume=True).losses == expected.losses
    assert same(model, whole)
    for left, right in zip(model.buffers(), whole.buffers(), strict=True):
        assert torch.equal(left.to_dense(), right.to_dense())
    old.buffers = {}  # as older versions wrote it
    save_checkpoint(path, old)
    assert run(make(), checkpoint=path, resume=True).losses[:15] == expected.losses[:15]
