"""The Run of each member, made shortly before it trains. Members share what they have in common: tensors, parsed networks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from onelaunch.engines.contract import Run
from onelaunch.errors import ArgumentTypeError, OnelaunchError, type_and_message
from onelaunch.run.generators import GENERATORS
from onelaunch.run.named_loss import with_named_loss
from onelaunch.run.options import CUSTOM_LOSS
from onelaunch.run.spec import Spec
from onelaunch.sweep.active import MemberError, SplitError
from onelaunch.sweep.grid import OPTIONS, model_parameters
from onelaunch.sweep.member import Member
from onelaunch.sweep.shared_tensors import SharedTensors
from onelaunch.sweep.splits import Splits, pairs_of
from onelaunch.train.arrays import check_finite, check_lengths, to_tensor
from onelaunch.train.inputs import check_batch_norm, make_run
from onelaunch.train.labels import encode
from onelaunch.train.predict import remember_task
from onelaunch.train.row_weights import row_weights_of

MAX_VIEW_BYTES = 2**30  # of rows that are kept for further members
# Options on which neither the tensors of a Run nor its checks depend, besides those of Spec.
FREE = frozenset({
    "epochs", "steps", "optimizer", "lr", "momentum", "nesterov", "weight_decay", "betas", "eps", "schedule",
    "label_smoothing", "class_weight", "clip_norm", "seed",
})  # fmt: skip
NUMBERS = ("lr", "momentum", "weight_decay", "betas", "eps", "label_smoothing", "clip_norm")  # checked by Spec


@dataclass(frozen=True)
class View:
    """The rows of a split, on the model's device."""

    x: torch.Tensor
    y: torch.Tensor
    more_x: tuple[torch.Tensor, ...]
    validation: tuple[torch.Tensor, torch.Tensor] | None
    more_validation: tuple[torch.Tensor, ...]
    sample_weight: torch.Tensor | None
    weights: dict[str, torch.Tensor | None]  # by class_weight

    @property
    def bytes(self) -> int:
        parts = (self.x, self.y, *self.more_x, *(self.validation or ()), *self.more_validation)
        return sum(part.nbytes for part in parts)


class MemberRuns:
    """Makes models and Runs. Threads, which joblib and Dask may have as workers, take turns in `run` and `model`."""

    def __init__(
        self, make_model: Callable[..., nn.Module] | nn.Module, x: Any, y: Any, *, options: dict[str, Any],
        validation: Any = None, sample_weight: Any = None, folds: Any = None, rows: Any = None, bootstrap: bool = False,
    ) -> None:  # fmt: skip
        """`options`: those of every member. The other arguments are those of `ol.sweep`."""
        self.make_model, self.options = make_model, options
        self._parameters, self._takes_any = model_parameters(make_model)
        self._y_ndim = None if y is None else np.ndim(y)
        self._loader = isinstance(x, DataLoader)
        fraction = float(validation) if isinstance(validation, float | np.floating) else None
        if self._loader:
            for name, value in (
                ("folds", folds),
                ("rows", rows),
                ("bootstrap", bootstrap or None),
                ("validation", fraction),
            ):
                if value is not None:
                    raise OnelaunchError(
                        f"{name}={value!r:.60} cannot choose rows of a DataLoader: pass arrays as x and y"
                    )
            self.x, self.y, self.names, self.count = x, y, None, 1
        else:
            if y is None:
                raise ArgumentTypeError("y is missing: pass one target per row, or a DataLoader as x")
            y, self.names = encode("y", y)
            self.x = tuple(to_tensor("x", part) for part in x) if isinstance(x, tuple) else to_tensor("x", x)
            self.y = to_tensor("y", y)
            self.count = len(self.y)
            if hasattr(folds, "split") and hasattr(folds, "get_n_splits"):  # scikit-learn's, such as KFold(5)
                folds = pairs_of(folds, self.count, self.y)
            for part in self.x if isinstance(self.x, tuple) else (self.x,):
                check_lengths("x", part, "y", self.y)
                check_finite("x", part)
        self.splits = Splits(self.count, folds=folds, subsets=rows, bootstrap=bootstrap, fraction=fraction)
        self._validation = None if fraction is not None else validation
        if folds is not None and validation is not None:
            raise OnelaunchError("folds and validation both say which rows to validate on: pass one of the two")
        self._sample_weight = None if sample_weight is None else to_tensor("sample_weight", sample_weight)
        self._threads = torch.get_num_threads()  # of this process, also for members that train in another
        self._seeded = False
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # made and still in use
        self.shared_tensors = SharedTensors()
        self._specs: dict[tuple[int, int], Spec] = {}
        self._bases: dict[Any, Run] = {}
        self._views: OrderedDict[Any, View] = OrderedDict()
        self._classes: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what another process can make itself: joblib sends members to others in chunks."""
        own = {name: value for name, value in vars(self).items() if name != "_models"}  # pickle takes no WeakSet
        return {**own, "_bases": {}, "_views": OrderedDict(), "_seeded": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _models=weakref.WeakSet())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Rows, targets and weights of all members; empty for a DataLoader."""
        if self._loader:
            return []
        weights = [] if self._sample_weight is None else [self._sample_weight]
        return [*(self.x if isinstance(self.x, tuple) else (self.x,)), self.y, *weights]

    @property
    def validates(self) -> bool:
        return self._validation is not None or self.splits.validates

    def options_of(self, member: Member) -> dict[str, Any]:
        """The fields of Options for a member."""
        own = {name: value for name, value in member.parameters.items() if name in OPTIONS}
        found = {**self.options, **own, "seed": member.seed}
        return found if self._loader else with_named_loss(found, self.y)

    def spec(self, member: Member, rows: int) -> Spec:
        """The Spec of a member with this many training rows. Its checks are made once per candidate and number of rows."""
        key = (member.candidate, rows)
        if key not in self._specs:
            options = self.options_of(member)
            options["loss"] = CUSTOM_LOSS if callable(options["loss"]) else options["loss"]
            self._specs[key] = Spec(rows=rows, **options)
        found = copy.copy(self._specs[key])
        object.__setattr__(found, "seed", member.seed)  # checked when the member was made
        return found

    def model_arguments(self, member: Member) -> dict[str, Any]:
        own = {name: value for name, value in member.parameters.items() if name not in OPTIONS}
        return {**own, "seed": member.seed} if "seed" in self._parameters else own

    def kind_of(self, member: Member) -> str:
        """Equal for candidates that differ only in numbers on which it does not depend whether they can be trained."""
        own = {name: value for name, value in member.parameters.items() if name not in NUMBERS}
        return repr(sorted(own.items(), key=lambda item: item[0]))

    def model(self, member: Member) -> nn.Module:
        """The member's network with its initial weights: what make_model returns after `torch.manual_seed(seed)`."""
        if isinstance(self.make_model, nn.Module):
            return copy.deepcopy(self.make_model)
        with GENERATORS:
            self._seed(member.seed)
            model = self._made(self.model_arguments(member))
        if not isinstance(model, nn.Module):
            wrong = ArgumentTypeError(f"make_model returned {model!r:.60}, which is not an nn.Module")
            raise MemberError(str(wrong)) from wrong
        if model in self._models:
            raise OnelaunchError("make_model returned the same module twice: return a new one in each call")
        self._models.add(model)
        self.shared_tensors.add(model)
        return model

    def _made(self, arguments: dict[str, Any]) -> Any:
        assert not isinstance(self.make_model, nn.Module)
        try:
            return self.make_model(**arguments)
        except Exception as error:  # of the user's function
            raise MemberError(f"make_model raised {type_and_message(error)}") from error

    def check_arguments(self, member: Member) -> None:
        """Raise ArgumentTypeError if make_model cannot be called with the candidate's parameters."""
        if isinstance(self.make_model, nn.Module):
            return
        try:
            with contextlib.suppress(ValueError):  # some classes of other libraries have no signature
                inspect.signature(self.make_model).bind(**self.model_arguments(member))
        except TypeError as error:
            raise ArgumentTypeError(f"make_model: {error}: add the name to grid, or give it a default") from error

    def _seed(self, seed: int) -> None:
        """`torch.manual_seed(seed)`, which formats a stack trace (0.5 ms) for each device that is not in use yet."""
        if torch.cuda.is_initialized() or not self._seeded:
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        self._seeded = True

    def run(self, member: Member) -> Run:
        """The checked Run of a member, with a new model. Raises MemberError where others may still be trained."""
        with GENERATORS:
            return self._checked_run(member)

    def _checked_run(self, member: Member) -> Run:
        options, model = self.options_of(member), self.model(member)
        try:
            return dataclasses.replace(self._run(member, options, model), threads=self._threads)
        except MemberError:
            raise
        except OnelaunchError as error:
            raise MemberError(str(error)) from error
        except Exception as error:  # of the user's model, in a trial of two rows
            raise MemberError(f"the model raised {type_and_message(error)}") from error

    def _run(self, member: Member, options: dict[str, Any], model: nn.Module) -> Run:
        if self._loader:  # its length and batch size are those of the loader
            return make_run(model, self.x, self.y, self._validation, options, sample_weight=self._sample_weight)
        base = self._base(member, model, options)
        try:
            return self._on_split(member, model, base)
        except OnelaunchError as error:
            raise SplitError(str(error)) from error

    def _on_split(self, member: Member, model: nn.Module, base: Run) -> Run:
        view = self._view(member, base)
        spec = self.spec(member, len(view.y))
        check_batch_norm(base.network, spec)
        weights_key = repr(spec.class_weight)
        if weights_key not in view.weights:
            view.weights[weights_key] = row_weights_of(spec, view.y, base.outputs, self.names, view.sample_weight, None)
        run = dataclasses.replace(
            base, spec=spec, model=model, x=view.x, y=view.y, more_x=view.more_x, validation=view.validation,
            more_validation_x=view.more_validation, weights=view.weights[weights_key],
        )  # fmt: skip
        if run.loss_function is None:
            remember_task(run, flat=self.names is not None or self._y_ndim == 1)
        return run

    def _base(self, member: Member, model: nn.Module, options: dict[str, Any]) -> Run:
        """The Run of the first member of its kind, on all rows: a source of checked tensors and of the parsed network."""
        trains = tuple(parameter.requires_grad for parameter in model.parameters())
        arguments = {name: value for name, value in self.model_arguments(member).items() if name != "seed"}
        kept = {name: value for name, value in options.items() if name not in FREE}
        key = (repr(model), trains, repr(arguments), repr(kept))
        if key not in self._bases:
            validation = self._validation
            if validation is not None and self.names is not None:
                validation = (validation[0], encode("validation[1]", validation[1], self.names)[0])
            elif self.splits.validates:  # replaced by the split's rows; this checks that they can be evaluated
                x = tuple(part[:2] for part in self.x) if isinstance(self.x, tuple) else self.x[:2]
                validation = (x, self.y[:2])
            # A class weight may be valid on a split only: it is checked there.
            found = make_run(model, self.x, self.y, validation, {**options, "class_weight": None}, names=self.names)
            inputs = (found.x, *found.more_x)  # on the device, so that further networks do not copy them again
            self.x = inputs if isinstance(self.x, tuple) else found.x
            self._bases[key] = found
        return self._bases[key]

    def _view(self, member: Member, base: Run) -> View:
        key = (
            *self.splits.key(member.split, member.seed),
            base.spec.loss,
            base.outputs,
            base.x.data_ptr(),
            base.x.dtype,
        )
        if key in self._views:
            self._views.move_to_end(key)
            return self._views[key]
        split = self.splits.rows_of(member.split, member.seed, self._stratified(base))
        train = None if split.train is None else split.train.to(base.y.device)
        weight = self._sample_weight
        if weight is not None and len(weight) != self.count:
            raise OnelaunchError(
                f"sample_weight has {len(weight)} entries, x {self.count} rows: pass one weight per row"
            )
        validation, more_validation = base.validation, base.more_validation_x
        if split.held is not None:
            held = split.held.to(base.y.device)
            validation = (base.x[held], base.y[held])
            more_validation = tuple(part[held] for part in base.more_x)
        found = View(
            base.x if train is None else base.x[train], base.y if train is None else base.y[train],
            base.more_x if train is None else tuple(part[train] for part in base.more_x), validation, more_validation,
            weight if weight is None or split.train is None else weight[split.train.to(weight.device)], {},
        )  # fmt: skip
        self._views[key] = found
        while len(self._views) > 1 and sum(view.bytes for view in self._views.values()) > MAX_VIEW_BYTES:
            self._views.popitem(last=False)
        return found

    def _stratified(self, base: Run) -> torch.Tensor | None:
        """The class of each row, for losses that have classes."""
        if base.spec.loss != "cross_entropy":
            return None
        if self._classes is None:
            self._classes = base.y.cpu()
        return self._classes
