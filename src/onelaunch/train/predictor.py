"""`ol.load(RUN)`: the network of a run folder with its preprocessing, ready for new rows.

A folder is read as data alone: run.json and table.json, and the weights from model.safetensors. Nothing in it can run code.
"""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from onelaunch.data.table_encoding import TableEncoding
from onelaunch.data.table_file import Table, text_column
from onelaunch.errors import ArgumentTypeError, OnelaunchError, first_line, reason_of, require_path
from onelaunch.train.arrays import check_finite, to_tensor
from onelaunch.train.checkpoint import digest_of
from onelaunch.train.mlp import mlp
from onelaunch.train.predict import float64_outputs
from onelaunch.train.run_folder import ABOUT, BEST, CONFIG, MODEL, TABLE
from onelaunch.train.scores import Scores, class_scores, value_scores
from onelaunch.train.tensor_files import read_tensors

log = logging.getLogger("onelaunch")


@dataclass(frozen=True)
class Predictor:
    """A trained network. For a run on a table, x is the path of a file, a DataFrame or a dict of columns, found by name;
    for other runs, an array of rows as in training. A category that training did not have is encoded as zeros; the
    logger "onelaunch" warns of the number of such rows."""

    path: Path  # the run folder
    model: nn.Sequential  # the network, which takes encoded rows
    loss: str  # the loss that it was trained with
    classes: tuple[str, ...] | None  # None for a regression
    encoding: TableEncoding | None  # None for a run on arrays
    baseline: float  # the most frequent class number, or the mean, of the training targets

    def __repr__(self) -> str:
        what = "a regression" if self.classes is None else f"{len(self.classes)} classes"
        return f"<Predictor of {self.path}: {what}, {'a table' if self.encoding else 'arrays'}>"

    def predict(self, x: Any) -> np.ndarray:
        """Class names [rows], or numbers in the units of the targets: [rows], or [rows, targets] for several."""
        outputs = self._outputs(x)
        if self.classes is not None:
            return np.array(self.classes)[outputs.argmax(axis=1)]
        return self.values_of(outputs)

    def predict_proba(self, x: Any) -> np.ndarray:
        """The probability of each class, float64 [rows, classes]; raises OnelaunchError for a regression."""
        if self.classes is None:
            raise OnelaunchError(f"{self.path} is a regression, which has no probabilities: call predict")
        return self.probabilities_of(self._outputs(x))

    def probabilities_of(self, outputs: np.ndarray) -> np.ndarray:
        """The softmax of the network's outputs [rows, classes]."""
        exponentials = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)

    def evaluate(self, x: Any, y: Any = None) -> dict[str, Scores]:
        """{"scores": {...}, "constant": {...}}: accuracy, balanced accuracy and F1, or R², RMSE and MAE; and the same
        for the best constant prediction, the most frequent class or the mean in training. F1 is that of the second of
        two classes, `classes[1]`, and the unweighted mean over the classes of more.

        y: the targets, as `predict` returns them; None takes them from the target column of x.
        """
        x = self._as_input(x)
        return self.evaluate_encoded(self._encode(x), self._targets(x, y))

    def evaluate_encoded(self, x: np.ndarray, y: np.ndarray) -> dict[str, Scores]:
        """`evaluate` for encoded inputs, and for targets as class numbers or in their own units."""
        if len(y) != len(x):
            raise OnelaunchError(f"y has {len(y)} rows and x has {len(x)}: pass the same number")
        return self.scores_of(float64_outputs(self.model, x), y)

    def scores_of(self, outputs: np.ndarray, y: np.ndarray) -> dict[str, Scores]:
        """`evaluate` for the network's outputs, and for targets as class numbers or in their own units."""
        if self.classes is not None:
            chosen = outputs.argmax(axis=1)
            scores, constant = class_scores(y, chosen, len(self.classes), int(self.baseline))
        else:
            scores, constant = value_scores(y, self.values_of(outputs), self.baseline)
        return {"scores": scores, "constant": constant}

    def _as_input(self, x: Any) -> Any:
        if isinstance(x, Table):  # its maker has looked for unseen categories
            return x
        if self.encoding is not None:
            table = self.encoding.read(x)
            self._report_unseen(table)
            return table
        if isinstance(x, str | Path):
            raise ArgumentTypeError(f"x={str(x)!r}: {self.path} was trained on arrays: pass an array of rows")
        return np.asarray(x)

    def _report_unseen(self, table: Table) -> None:
        assert self.encoding is not None
        for name, count in self.encoding.encoder.unseen(table).items():
            log.warning("%s of %s rows have a category in %r that training did not have", count, len(table), name)

    def _outputs(self, x: Any) -> np.ndarray:
        return float64_outputs(self.model, self._encode(self._as_input(x)))

    def _encode(self, x: Any) -> np.ndarray:
        """The network's inputs for what `_as_input` returned."""
        rows: np.ndarray = x if self.encoding is None else self.encoding.encoder.transform(x)
        inputs = next(layer.in_features for layer in self.model if isinstance(layer, nn.Linear))
        if rows.ndim < 2 or rows[:1].size != inputs or not len(rows):
            raise OnelaunchError(f"x has shape {list(rows.shape)}: pass rows of {inputs} values, at least one")
        check_finite("x", to_tensor("x", rows))
        return rows

    def values_of(self, outputs: np.ndarray) -> np.ndarray:
        """The network's outputs in the units of the targets: [rows], or [rows, targets] for several."""
        if self.encoding is not None and self.encoding.target.scaling is not None:
            outputs = self.encoding.target.scaling.inverse(outputs)
        return outputs[:, 0] if outputs.shape[1] == 1 else outputs

    def _targets(self, x: Any, y: Any) -> np.ndarray:
        """Class numbers, or values."""
        if y is None:
            if self.encoding is None:
                raise OnelaunchError("y is needed: a run on arrays has no target column")
            name = self.encoding.target.name
            if name not in x.index:
                raise OnelaunchError(f"x has no column {name!r}, the target of the run: add it, or pass y")
            return self.encoding.target.values(x)
        y = np.asarray(y)
        if self.classes is None:
            return y.astype(np.float64)
        if self.encoding is not None:
            column = text_column(map(str, y.tolist()))
            name = self.encoding.target.name
            return self.encoding.target.values(Table("y", (name,), (column,), np.arange(len(y))))
        return y.astype(np.int64)


def load(run_folder: str | Path) -> Predictor:
    """The Predictor of a run that `onelaunch train` has finished; raises OnelaunchError if the folder has none."""
    path = require_path("run_folder", run_folder).expanduser()
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        network = {name: about["network"][name] for name in ("widths", "activation", "dropout", "batch_norm")}
        classes = None if about["classes"] is None or about["loss"] != "cross_entropy" else tuple(about["classes"])
        encoding = None
        if (path / TABLE).exists():
            encoding = TableEncoding.from_json(json.loads((path / TABLE).read_text(encoding="utf-8")))
        elif about.get("table"):
            raise OnelaunchError(
                f"{path} has no {TABLE}, which says how the columns of its table are encoded: put it back, or repeat the run "
                f"with onelaunch train {shlex.quote(str(path / CONFIG))}"
            )
        model = mlp(**network)
        _load_weights(model, path / MODEL)
        return Predictor(path, model, str(about["loss"]), classes, encoding, float(about["baseline"]))
    except OSError as error:
        what = f"{error.filename or path}: {reason_of(error)}"
        remedy = "pass one of `onelaunch train`"
        if (path / CONFIG).exists():
            remedy += f", or end this one with `onelaunch train --resume {path}`"
        elif (path / BEST / ABOUT).exists():
            remedy = f"it is that of a sweep, pass {path / BEST}"
        raise OnelaunchError(f"{path} is not the folder of a finished run ({what}): {remedy}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, OnelaunchError):
            raise
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise OnelaunchError(f"{path} is damaged, or from another version ({reason}): train it again") from error


def _load_weights(model: nn.Module, path: Path) -> None:
    from safetensors import SafetensorError

    try:
        tensors, metadata = read_tensors(path)
        digest = metadata.get("sha256")
        if digest is not None and digest != digest_of(tensors):  # an older version wrote none
            raise RuntimeError("its checksum does not match")
        model.load_state_dict(tensors)
    except (SafetensorError, RuntimeError) as error:
        raise OnelaunchError(
            f"{path} is damaged or of another network ({first_line(error)}): train it again"
        ) from error
    model.eval()
