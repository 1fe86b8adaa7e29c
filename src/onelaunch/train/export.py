"""A run as one file for other programs: `.onnx`, or PyTorch's `.pt2`, with the preprocessing inside the graph.

The exported model of a table takes `numbers`, float64 [rows, numeric columns] with NaN for a missing value and the days since
1970-01-01 for a date, and, if the table has text columns, `categories`, int64 [rows, text columns] with -1 for a category that
training did not have. It returns `probabilities` [rows, classes] or `values` [rows]. The names of columns, categories and
classes are stored with it, as JSON under the key "onelaunch". The exported model of a run on arrays takes `rows`, float32.
"""

from __future__ import annotations

import io
import json
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onelaunch.data.scaling import LIMIT
from onelaunch.data.table_encoding import TableEncoding
from onelaunch.errors import OnelaunchError, require_path, unwritable_reason
from onelaunch.files import write_atomic
from onelaunch.loggers import logging_from
from onelaunch.train.predictor import Predictor

SUFFIXES = (".onnx", ".pt2")
KEY = "onelaunch"


class TableModule(nn.Module):
    """Encodes raw columns as `TableEncoder.transform` does, and runs the network on them."""

    center: torch.Tensor
    factor: torch.Tensor
    ramp_column: torch.Tensor
    ramp_low: torch.Tensor
    ramp_slope: torch.Tensor
    flagged: torch.Tensor

    def __init__(self, predictor: Predictor, encoding: TableEncoding) -> None:
        super().__init__()
        encoder = encoding.encoder
        self.network = predictor.model
        for name in encoder.scaling.__dataclass_fields__:
            self.register_buffer(name, torch.from_numpy(getattr(encoder.scaling, name).copy()))
        self.register_buffer("flagged", torch.tensor(encoder.flagged, dtype=torch.int64))
        self.sizes = [len(found) for found in encoder.categories.values()]
        scaling = encoding.target.scaling
        self.affine = None if scaling is None else (float(scaling.deviation[0]), float(scaling.mean[0]))

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor | None = None) -> torch.Tensor:
        z = (numbers - self.center) * self.factor
        z = z / torch.sqrt(1 + torch.square(z / LIMIT))
        if len(self.ramp_column):
            ramps = (numbers.index_select(1, self.ramp_column) - self.ramp_low) * self.ramp_slope
            z = torch.cat([z, ramps.clamp(0, 1) - 0.5], dim=1)
        parts = [torch.where(torch.isnan(z), 0.0, z).to(torch.float32)]
        if len(self.flagged):
            parts.append(torch.isnan(numbers.index_select(1, self.flagged)).to(torch.float32))
        for index, size in enumerate(self.sizes):
            assert categories is not None
            code = categories[:, index : index + 1]
            if size == 2:
                parts.append(torch.where(code < 0, 0, 2 * code - 1).to(torch.float32))
            else:
                parts.append((code == torch.arange(size)).to(torch.float32))
        outputs = self.network(torch.cat(parts, dim=1))
        if self.affine is None:
            return outputs.softmax(dim=1)
        return outputs[:, 0].to(torch.float64) * self.affine[0] + self.affine[1]


class ArrayModule(nn.Module):
    """The network, followed by a softmax if it was trained with cross-entropy."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.network, self.softmax = predictor.model, predictor.loss == "cross_entropy"

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        outputs = self.network(rows)
        return outputs.softmax(dim=1) if self.softmax else outputs


def export(predictor: Predictor, path: str | Path) -> Path:
    """Write the run to `path`, whose suffix (.onnx or .pt2) selects the format, and return the path.

    Raises OnelaunchError for another suffix, a path that cannot be written, and missing packages.
    """
    path = require_path("path", path).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise OnelaunchError(f"path={str(path)!r} must end in .onnx or .pt2")
    module, inputs, names = _module(predictor)
    about = json.dumps(_about(predictor, names))
    rows = torch.export.Dim("rows", min=1)
    shapes = tuple({0: rows} for _ in inputs)
    make = _onnx if path.suffix.lower() == ".onnx" else _pt2
    content = make(module.eval(), inputs, names, shapes, about, predictor.classes is not None)
    try:
        write_atomic(path, content)
    except OSError as error:
        raise OnelaunchError(f"path={str(path)!r} {unwritable_reason(error, 'pass another one')}") from error
    return path


def _module(predictor: Predictor) -> tuple[nn.Module, tuple[torch.Tensor, ...], list[str]]:
    """The module to export, two example rows for each of its inputs, and the names of the inputs."""
    if predictor.encoding is None:
        first = next(layer for layer in predictor.model if isinstance(layer, nn.Linear))
        return ArrayModule(predictor), (torch.zeros(2, first.in_features),), ["rows"]
    encoder = predictor.encoding.encoder
    numbers = torch.zeros(2, len(encoder.numbers), dtype=torch.float64)
    categories = torch.zeros(2, len(encoder.categories), dtype=torch.int64)
    module = TableModule(predictor, predictor.encoding)
    if not encoder.categories:
        return module, (numbers,), ["numbers"]
    return module, (numbers, categories), ["numbers", "categories"]


def _about(predictor: Predictor, names: list[str]) -> dict[str, Any]:
    about: dict[str, Any] = {"inputs": names, "classes": predictor.classes}
    if predictor.encoding is not None:
        encoder = predictor.encoding.encoder
        about |= {
            "numbers": encoder.numbers,
            "dates": encoder.dates,
            "categories": dict(encoder.categories),
            "target": predictor.encoding.target.name,
        }
    return about


def _pt2(module: nn.Module, inputs: Any, names: list[str], shapes: Any, about: str, classifies: bool) -> bytes:
    file = io.BytesIO()
    program = torch.export.export(module, inputs, dynamic_shapes=shapes)
    torch.export.save(program, file, extra_files={KEY: about})
    return file.getvalue()


def _onnx(module: nn.Module, inputs: Any, names: list[str], shapes: Any, about: str, classifies: bool) -> bytes:
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise OnelaunchError(
            f"an .onnx file needs {error.name}: pip install 'onelaunch[onnx]', or export to .pt2"
        ) from None
    # The exporter warns of packages that our models do not need.
    with warnings.catch_warnings(), logging_from(logging.ERROR, "torch.onnx"):
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        program = torch.onnx.export(
            module, inputs, dynamo=True, dynamic_shapes=shapes, input_names=names, verbose=False,
            output_names=["probabilities" if classifies else "values"],
        )  # fmt: skip
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="onelaunch-") as folder:
        file = str(Path(folder, "model.onnx"))
        program.save(file)
        model = onnx.load(file)
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, about
    content: bytes = model.SerializeToString()
    return content
