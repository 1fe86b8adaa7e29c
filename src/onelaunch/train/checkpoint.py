"""Checkpoints: one safetensors file with the weights, the optimizer's state, the history and the description of the run.

There is no pickle in it, so a checkpoint from a stranger cannot run code. Files are written atomically. A checksum over all
content is verified on load, because safetensors itself does not notice a flipped bit. safetensors is imported only when it is
used: training without a checkpoint needs PyTorch alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onelaunch.engines.contract import Run, State
from onelaunch.errors import CheckpointError, unwritable_reason
from onelaunch.files import exclusive_lock, remove_leftovers, write_atomic
from onelaunch.train.fingerprints import fingerprint, identity_text, validation_fingerprint
from onelaunch.train.tensor_files import read_tensors

FORMAT = 1
FREE_TO_CHANGE = {"engine", "memory", "precision", "metrics"}  # they say how a run is executed and watched
ABOUT = {
    "format": int, "spec": dict, "model": str, "data": str, "engine": str, "epochs": list, "partial": dict,
    "seconds": int | float,
}  # fmt: skip


@dataclass
class Checkpoint:
    model: State
    state: State  # of the optimizer, in the form of engines/contract.py
    losses: torch.Tensor
    about: dict[str, Any]  # spec, data, engine, precision, epochs, partial, seconds, best
    best: State = field(default_factory=dict)  # the weights of the best epoch, where early stopping keeps them
    buffers: State = field(default_factory=dict)  # those that are not in the model's state_dict

    @property
    def step(self) -> int:
        return len(self.losses)


@contextlib.contextmanager
def checkpoint_lock(path: Path | None, *, must_exist: bool) -> Iterator[None]:
    """Lock `path` against other runs. Raises CheckpointError at once if it cannot be written, not after an epoch.

    With `must_exist`, a missing file is not locked: `load_checkpoint` will refuse it.
    """
    with contextlib.ExitStack() as stack:
        if path is not None and (path.is_file() or not must_exist):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(exclusive_lock(path))
                remove_leftovers(path.parent, path.name)
            except BlockingIOError as error:
                raise _error(path, "is being written by another run: wait for its end, or pass another path") from error
            except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
                raise _error(path, unwritable_reason(error)) from error
        yield


def _error(path: Path, message: str) -> CheckpointError:
    return CheckpointError(f"checkpoint={str(path)!r} {message}")


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    from safetensors.torch import save

    tensors = unshared(
        {f"model.{name}": tensor for name, tensor in checkpoint.model.items()}
        | {f"state.{name}": tensor for name, tensor in checkpoint.state.items()}
        | {f"best.{name}": tensor for name, tensor in checkpoint.best.items()}
        | {f"buffer.{name}": tensor for name, tensor in checkpoint.buffers.items()}
        | {"losses": checkpoint.losses}
    )
    about = json.dumps({"format": FORMAT, **checkpoint.about})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save(tensors, {"onelaunch": about, "sha256": digest_of(tensors, about)}))
    except (OSError, ValueError) as error:
        raise _error(path, unwritable_reason(error)) from error


def unshared(tensors: Mapping[str, torch.Tensor]) -> State:
    """The tensors on the CPU, contiguous, to be saved at once. Only those that share memory, such as tied weights, which
    safetensors refuses, are clones: a copy of everything may not fit into memory."""
    found, seen = {}, set()
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        memory = here.untyped_storage()
        shared = memory.nbytes() != here.nbytes or memory.data_ptr() in seen
        seen.add(memory.data_ptr())
        found[name] = here.clone() if shared else here
    return found


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify the checkpoint; raises CheckpointError if it is missing, damaged or not one of ours."""
    from safetensors import SafetensorError

    remedy = "pass the checkpoint of a run, or start a new run without resume"
    if not path.is_file():
        raise _error(path, f"does not exist: {remedy}")
    try:
        tensors, metadata = read_tensors(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _error(path, f"is damaged or not a safetensors file ({error}): {remedy}") from error
    about_text = metadata.get("onelaunch")
    if about_text is None or "losses" not in tensors:
        raise _error(path, f"was not written by onelaunch: {remedy}")
    if metadata.get("sha256") != digest_of(tensors, about_text):
        raise _error(path, f"is damaged (its checksum does not match): {remedy}")
    about = _about(about_text)
    if about.get("format", FORMAT) != FORMAT:
        raise _error(path, f"has format {about.get('format')}, this version reads {FORMAT}")
    if not _is_complete(about) or tensors["losses"].dim() != 1:
        raise _error(path, f"is incomplete: {remedy}")
    model, state, best, buffers = (_part(tensors, f"{kind}.") for kind in ("model", "state", "best", "buffer"))
    return Checkpoint(model, state, tensors["losses"], about, best, buffers)


def _about(text: str) -> dict[str, Any]:
    """The parsed description, or an empty dict if `text` is not a JSON object."""
    try:
        about = json.loads(text)
    except (ValueError, RecursionError):
        about = None
    return about if isinstance(about, dict) else {}


def _is_complete(about: dict[str, Any]) -> bool:
    return (
        all(isinstance(about.get(key), kind) for key, kind in ABOUT.items())
        and {"correct", "epoch_seconds"} <= about["partial"].keys()
        and all(isinstance(record, dict) and "step" in record for record in about["epochs"])
    )


def _part(tensors: State, prefix: str) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def digest_of(tensors: Mapping[str, torch.Tensor], about: str = "") -> str:
    """The SHA-256 of a text and of the names, types, shapes and values of tensors."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.numel():  # NumPy's empty arrays have strides that `view` refuses
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def set_aside(path: Path) -> None:
    """Move a file that a new run would overwrite to the first free name of `name.1`, `name.2`, …, so that nothing is lost."""
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    try:
        path.rename(free)
    except OSError as error:
        raise _error(path, f"exists and cannot be moved aside: {error.strerror}") from error


def check_fits(path: Path, checkpoint: Checkpoint, run: Run) -> None:
    """Raise CheckpointError if the checkpoint is of another model, other data or another run, and name the difference."""
    _check_model(path, checkpoint, run.model)
    # An option that an older version did not have was at its default.
    defaults = {option.name: option.default for option in fields(run.spec)}
    was, now = {**defaults, "metrics": [], **checkpoint.about["spec"]}, run.spec.to_dict()
    length_may_change = run.spec.schedule == "constant"  # in the other schedules every step depends on the run's length
    free = FREE_TO_CHANGE | ({"early_stopping"} if _may_follow(was["early_stopping"], now["early_stopping"]) else set())
    for argument in sorted(now.keys() - free - {"rows"}):
        if was.get(argument) == now[argument] or (argument in ("epochs", "steps") and length_may_change):
            continue
        hint = " (its schedule depends on the length)" if argument in ("epochs", "steps") else ""
        old = f"{argument}={was.get(argument)!r}"
        raise _error(path, f"was made with {old}, not {now[argument]!r}{hint}: pass {old}, or start a new run")
    loss = identity_text(run.loss_function)
    if checkpoint.about.get("loss", loss) != loss:  # an older version did not keep it
        raise _error(path, "was made with another loss function: pass that one as loss, or start a new run")
    if was.get("rows") != now["rows"] or checkpoint.about["data"] != fingerprint(run):
        raise _error(
            path, "was made with other rows or weights: pass the data, validation and sample_weight of that run"
        )
    if run.spec.early_stopping:  # else validation rows do not change the weights
        validation = validation_fingerprint(run)
        if checkpoint.about.get("validation", validation) != validation:  # an older version did not keep it
            rows = "was made with other validation rows, which early_stopping follows"
            raise _error(path, f"{rows}: pass the validation of that run")
    steps = run.spec.total_steps
    if checkpoint.step > steps:
        end = f"is at step {checkpoint.step}, past the end of this run ({steps} steps)"
        raise _error(path, f"{end}: pass more epochs or steps")


def _may_follow(was: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    """Whether a run with the one rule of early stopping can go on with the other: with another patience, or without."""
    return was is not None and (now is None or {**now, "patience": was.get("patience")} == was)


def _check_model(path: Path, checkpoint: Checkpoint, model: nn.Module) -> None:
    remedy = "build the model it was made with, or start a new run"
    saved, have = checkpoint.model, tensors_of(model)
    for name in sorted(saved.keys() | have.keys()):
        theirs = _kind(saved[name]) if name in saved else "none"
        ours = _kind(have[name]) if name in have else "none"
        if theirs != ours:
            raise _error(path, f"is of another model: its {name} is {theirs}, this model's is {ours}; {remedy}")
    lines = checkpoint.about["model"].splitlines(), str(model).splitlines()
    for theirs, ours in zip_longest(*lines, fillvalue="nothing"):
        if theirs != ours:  # the same weights, but another activation or dropout
            difference = f"it has {theirs.strip()} where this one has {ours.strip()}"
            raise _error(path, f"is of another model: {difference}; {remedy}")
    now = frozen_parameters(model)
    was = checkpoint.about.get("frozen", now)
    if was != now:
        frozen = f"was made with {', '.join(was) or 'no parameter'} frozen, not {', '.join(now) or 'none'}"
        raise _error(path, f"{frozen}: set requires_grad as it was, or start a new run")


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)}{'' if tensor.dtype == torch.float32 else f' of {tensor.dtype}'}"


def frozen_parameters(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def tensors_of(model: nn.Module) -> State:
    """The model's state_dict; raises CheckpointError if it has anything but tensors, which would need pickle."""
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"model has {name}, which is not a tensor and cannot be saved: pass checkpoint=None")
    return state


def other_buffers(model: nn.Module) -> State:
    """The buffers that are not persistent, so not in the state_dict: a forward may update them all the same.

    Sparse and complex ones, which safetensors cannot hold, are left out.
    """
    names = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in names and buffer.layout is torch.strided and not buffer.is_complex()
    }


def restore_buffers(model: nn.Module, saved: State) -> None:
    """Give the buffers that are not persistent their saved values; a checkpoint of an older version has none."""
    for name, value in saved.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        here = module._buffers.get(own)
        if here is None or _kind(here) != _kind(value):  # a forward has made it
            device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
            module.register_buffer(own, value.to(device), persistent=False)
        elif not torch.equal(here.cpu(), value):  # one that is expanded cannot be written, nor do its values change
            here.copy_(value)
