"""`onelaunch predict`, `evaluate` and `export`: what a finished run is used for."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import typer

from onelaunch.cli.say import say
from onelaunch.data import load as load_data
from onelaunch.errors import DataError, OnelaunchError, reason_of, unwritable_reason
from onelaunch.files import write_atomic
from onelaunch.train.export import export
from onelaunch.train.predictor import Predictor, load
from onelaunch.train.scores import describe


def run_predict(run: Path, data: Path, out: Path | None) -> None:
    """Write one line per row: the prediction and, for classes, the probability of each."""
    if out is not None and out.exists() and data.exists() and out.samefile(data):
        raise OnelaunchError(f"out={str(out)!r} is the table itself, and would be replaced: pass another --out")
    predictor = load(run)
    x = _rows(predictor, data)
    predicted = predictor.predict(x)
    head, columns = ["prediction"], [_texts(predicted)]
    if predictor.classes is not None:
        probabilities = predictor.predict_proba(x)
        head += [f"probability {name}" for name in predictor.classes]
        columns += [[f"{value:.6g}" for value in column] for column in probabilities.T]
    elif predicted.ndim == 2:
        head = [f"prediction {number}" for number in range(predicted.shape[1])]
        columns = [_texts(column) for column in predicted.T]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(zip(*columns, strict=True))
    if out is None:
        typer.echo(text.getvalue(), nl=False)
        return
    try:
        write_atomic(out, text.getvalue())
    except OSError as error:
        raise OnelaunchError(f"out={str(out)!r} {unwritable_reason(error, 'pass another --out')}") from error
    typer.echo(f"saved    {len(predicted):,} predictions in {out}")


def run_evaluate(run: Path, data: Path, target: str | None) -> None:
    predictor = load(run)
    if predictor.encoding is not None:
        if target is not None:
            raise OnelaunchError(
                f"target={target!r}: the run has its target, {predictor.encoding.target.name!r}: leave it out"
            )
        x, y = _rows(predictor, data), None
        name = predictor.encoding.target.name
        if name not in x.index:
            raise DataError(
                f"{data} has no column {name!r}, the target of the run: add it, or use onelaunch predict, which needs none"
            )
    else:
        dataset = load_data(data, target=target, values=predictor.loss != "cross_entropy")
        x, y = dataset.x, dataset.y
    found = predictor.evaluate(x, y)
    say("scores", describe(found["scores"], found["constant"], predictor.classes))


def run_export(run: Path, path: Path) -> None:
    typer.echo(f"saved    {export(load(run), path)}")


def _rows(predictor: Predictor, data: Path) -> Any:
    """The rows of a file as the predictor takes them. What may surprise is said on standard error."""
    if predictor.encoding is None:
        return _array(data)
    encoding = predictor.encoding
    table = encoding.read(data)
    known = {*encoding.encoder.columns, *encoding.encoder.left_out, encoding.target.name}
    extra = [name for name in table.names if name not in known]
    if extra:
        typer.echo(f"note     not used: column(s) {', '.join(map(repr, extra[:5]))}{' …' * (len(extra) > 5)}", err=True)
    for name, count in encoding.encoder.unseen(table).items():
        typer.echo(f"note     {count:,} row(s) have a category in {name!r} that training did not have", err=True)
    return table


def _array(path: Path) -> np.ndarray:
    """The array of a .npy file."""
    if path.suffix.lower() != ".npy":
        raise DataError(f"{path}: the run was trained on arrays: pass a .npy file with one row per prediction")
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = " ".join(reason_of(error).split())
        raise DataError(f"{path}: cannot be read ({reason}): save it with numpy.save") from None


def _texts(column: np.ndarray) -> list[str]:
    return [str(value) if column.dtype.kind == "U" else repr(float(value)) for value in column]
