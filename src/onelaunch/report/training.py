"""The section of a training run: its result, curves and predictions, how to use the model, and what was trained where."""

from __future__ import annotations

import re
import shlex
from typing import Any, NamedTuple

from onelaunch.format import NONE, format_count, format_number, format_percent, format_seconds
from onelaunch.integers import ceil_div
from onelaunch.report.draw import Line, line_chart, nan_for_null
from onelaunch.report.figure import Code, Figure, Headline, Section, Table
from onelaunch.report.machine import machine_facts
from onelaunch.report.palette import Palette
from onelaunch.report.predictions import mistakes, prediction_figures
from onelaunch.report.read import Source
from onelaunch.report.scale import is_wide
from onelaunch.train.history import kept_epoch
from onelaunch.train.run_folder import CHOSEN_AMONG, CONFIG

POINTS = 120
SHOWN = ("batch_size", "loss", "optimizer", "lr", "schedule", "precision", "seed", "class_weight", "early_stopping")


class Result(NamedTuple):
    """The figure that a run is judged by."""

    name: str
    value: float
    held_out: bool  # by the Predictor on the held-out rows; otherwise by the last epoch
    higher_is_better: bool

    def __str__(self) -> str:
        return format_percent(self.value, 2) if self.name == "accuracy" else format_number(self.value)


def run_section(source: Source, identity: str, palette: Palette) -> Section:
    about, epochs, config = (source.content[key] for key in ("about", "epochs", "config"))
    predictions = source.content.get("predictions") or {}
    command = f"onelaunch train {shlex.quote(str(source.path / CONFIG))}"
    facts = [
        ("network", network_of(source.content)),
        ("data", about.get("data", "")),
        *(("note", str(note)) for note in about.get("notes") or ()),
        ("run", _run_words(epochs, config)),
        ("status", about.get("status", "")),
        ("engine", about.get("reason", "")),
        ("time", _time(about)),
        ("allocations", ", ".join(f"{name} {count:,}" for name, count in (about.get("allocations") or {}).items())),
        *machine_facts(about),
    ]
    figures = []
    if epochs:
        figures.append(_loss(epochs, identity, command, palette))
        if any(epoch.get("accuracy") is not None for epoch in epochs):
            figures.append(_accuracy(epochs, about.get("best_epoch"), identity, command, palette))
    figures += prediction_figures(predictions, identity, command)
    statements = [] if epochs else [("note", "No epoch is finished yet.")]
    if advice := str(about.get("advice") or ""):
        statements.append(("note", f"{advice[0].upper()}{advice[1:]}."))
    running = about.get("status") == "running"
    if running:
        statements.append(("bad", "Unfinished: this run had not ended when the page was made. This is what was done."))
    title = f"Training run: {source.name}{' (unfinished)' if running else ''}"
    parts = [*mistakes(predictions), *([_usage(source)] if source.content.get("has_model") else [])]
    return Section(identity, title, facts, [], figures, statements, headline(source.content), parts)


def result_of(content: dict[str, Any]) -> Result | None:
    """The accuracy or R² of the held-out rows, else the validation accuracy or loss, else the training loss, of the epoch whose
    weights the model has."""
    scores = (content["about"].get("scores") or {}).get("scores") or {}
    for name, higher in (("accuracy", True), ("R²", True), ("RMSE", False)):
        if scores.get(name) is not None:
            return Result(name, scores[name], True, higher)
    if not content["epochs"]:
        return None
    kept = content["epochs"][_kept_epoch(content)]
    found = {f"validation {name}": value for name, value in (kept.get("validation") or {}).items()} | {
        "loss": kept["loss"]
    }
    names = [name for name in ("validation accuracy", "validation loss", "loss") if found.get(name) is not None]
    if not names:
        return None
    accuracy = names[0] == "validation accuracy"
    return Result("accuracy" if accuracy else names[0], found[names[0]], False, accuracy)


def _kept_epoch(content: dict[str, Any]) -> int:
    return kept_epoch(len(content["epochs"]), content["about"].get("best_epoch"))


def headline(content: dict[str, Any]) -> Headline | None:
    """The result of a run with what belongs beside it; None for a run without a finished epoch."""
    result, about = result_of(content), content["about"]
    if result is None:
        return None
    scores, constant = ((about.get("scores") or {}).get(key) or {} for key in ("scores", "constant"))
    rows = (content.get("predictions") or {}).get("rows")
    epoch = _kept_epoch(content)
    where = "after the last epoch" if epoch == len(content["epochs"]) - 1 else f"after epoch {epoch + 1}, the best"
    if result.held_out:
        where = (f"on {rows:,} held-out rows" if rows else "on the held-out rows") + _choice(content)
    more = []
    if constant.get(result.name) is not None:
        always = "the most frequent class" if result.name == "accuracy" else "the mean"
        more.append((f"always {always}", str(result._replace(value=constant[result.name]))))
    more += [(name, format_number(value)) for name, value in scores.items() if name != result.name]
    more += [("training", format_seconds(about.get("seconds"))), ("engine", about.get("engine", ""))]
    more += [("parameters", f"{about['parameters']:,}")] if "parameters" in about else []
    return Headline(str(result), f"{result.name} {where}", more)


def _choice(content: dict[str, Any]) -> str:
    """What the held-out rows have chosen: `, which chose it among 4 networks and 12 epochs`; empty if nothing."""
    counts = {"networks": content["about"].get(CHOSEN_AMONG, 1)}
    if content["about"].get("best_epoch") is not None:  # with early stopping
        counts["epochs"] = len(content["epochs"])
    among = " and ".join(f"{count:,} {things}" for things, count in counts.items() if count > 1)
    return f", which chose it among {among}" if among else ""


def _usage(source: Source) -> Code:
    """How to load the model and predict with it."""
    run = str(source.path)
    quoted, file = shlex.quote(run), "new.csv" if source.content.get("is_table") else "rows.npy"
    rows = repr(file) if source.content.get("is_table") else f"numpy.load({file!r})"
    lines = ["import onelaunch as ol", "", f"model = ol.load({run!r})", f"print(model.predict({rows}))"]
    if source.content.get("is_table"):
        what = "In Python; the file has the columns of training, the target may be missing"
    else:
        lines.insert(0, "import numpy")
        what = "In Python; rows have the shape of training"
    shell = [f"onelaunch predict {quoted} {file} --out predictions.csv", f"onelaunch export {quoted} model.onnx"]
    return Code("Use this model", [(what, "\n".join(lines)), ("On the command line", "\n".join(shell))])


def network_of(content: dict[str, Any]) -> str:
    """`784-512-10, relu, dropout 0.2`. The widths are the model's, or else those that the configuration names."""
    about, config = content["about"], content["config"]
    linears = re.findall(r"in_features=(\d+), out_features=(\d+)", about.get("model") or "")
    widths = [linears[0][0], *(out for _, out in linears)] if linears else config.get("layers") or config.get("hidden")
    parts = ["-".join(map(str, widths))] if widths else []
    parts += [config["activation"]] if "activation" in config else []
    parts += [f"dropout {config['dropout']:g}"] if "dropout" in config else []
    return ", ".join([*parts, *(["batch norm"] if config.get("batch_norm") else [])])


def _counted(number: int, things: str) -> str:
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"


def _run_words(epochs: list[dict[str, Any]], config: dict[str, Any]) -> str:
    """`2 epochs, 24 steps done, batch_size 128, …`"""
    asked = [_counted(config[key], key) for key in ("epochs", "steps") if config.get(key)]
    done = [f"{_counted(epochs[-1]['step'], 'steps')} done"] if epochs else []
    return ", ".join([*asked, *done, *(f"{key} {config[key]}" for key in SHOWN if config.get(key) is not None)])


def _time(about: dict[str, Any]) -> str:
    if "seconds" not in about:
        return ""
    startup = format_seconds(about.get("startup_seconds"))
    return f"{format_seconds(about['seconds'])} of training and validation, {startup} to start"


def _loss(epochs: list[dict[str, Any]], identity: str, command: str, palette: Palette) -> Figure:
    losses = nan_for_null(loss for epoch in epochs for loss in epoch.get("losses", []))
    stretch = max(1, ceil_div(len(losses), POINTS))
    means = [sum(losses[i : i + stretch]) / len(losses[i : i + stretch]) for i in range(0, len(losses), stretch)]
    ends = [min(i + stretch, len(losses)) for i in range(0, len(losses), stretch)]
    lines = [Line("training", ends, means)] if means else []
    validated = [epoch for epoch in epochs if epoch.get("validation")]
    if validated:
        lines.append(
            Line("validation", [e["step"] for e in validated], nan_for_null(e["validation"]["loss"] for e in validated))
        )
    wide = is_wide(value for line in lines for value in line.y)
    svg = line_chart(f"{identity}-loss", "Loss", lines, x_label="step", y_label="loss", log_y=wide, palette=palette)
    rows = [
        [str(e["epoch"] + 1), format_number(e["loss"]), _validation(e, "loss"), format_percent(e.get("accuracy"), 2),
         _validation(e, "accuracy"), format_seconds(e.get("seconds"))]
        for e in epochs
    ]  # fmt: skip
    head = ["epoch", "loss", "validation loss", "accuracy", "validation accuracy", "time"]
    note = f"Each point is the mean of {stretch:,} steps." if stretch > 1 else ""
    return Figure("Loss", svg, Table("Metrics of each epoch", head, rows), command, note)


def _validation(epoch: dict[str, Any], key: str) -> str:
    value = (epoch.get("validation") or {}).get(key)
    if value is None:
        return NONE
    return format_percent(value, 2) if key == "accuracy" else format_number(value)


def _accuracy(epochs: list[dict[str, Any]], best: int | None, identity: str, command: str, palette: Palette) -> Figure:
    """`best`: the epoch whose weights the model has, with early stopping."""
    numbers = [epoch["epoch"] + 1 for epoch in epochs]
    lines = [Line("training", numbers, [100 * epoch["accuracy"] for epoch in epochs])]
    validated = [e for e in epochs if (e.get("validation") or {}).get("accuracy") is not None]
    if validated:
        values = [100 * e["validation"]["accuracy"] for e in validated]
        lines.append(Line("validation", [e["epoch"] + 1 for e in validated], values))
    svg = line_chart(
        f"{identity}-accuracy", "Accuracy", lines, x_label="epoch", y_label="accuracy, %", write_x=format_count,
        write_y=lambda value, figures=4: format_number(value, max(4, figures)),
        x_ticks=numbers if len(numbers) <= 12 else (), palette=palette,
    )  # fmt: skip
    rows = [[str(e["epoch"] + 1), format_percent(e["accuracy"], 2), _validation(e, "accuracy")] for e in epochs]
    note = f"At the end: {_validation(validated[-1], 'accuracy')} on the validation rows." if validated else ""
    if best is not None and best < len(epochs):
        note = f"The model is that of epoch {best + 1}: {_validation(epochs[best], 'accuracy')} on the validation rows."
    return Figure("Accuracy", svg, Table("Accuracy by epoch", ["epoch", "training", "validation"], rows), command, note)
