"""What each command accepts. Its function imports the module that runs it, and torch with it, when it is called.

There is no `from __future__ import annotations`: typer needs the annotations themselves, not their text.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from onelaunch.bench.case import GROUPS
from onelaunch.cli.config import TrainConfig
from onelaunch.cli.flags import numbers, with_flags
from onelaunch.cli.interrupts import raise_on_interrupt
from onelaunch.errors import require_option

DTYPES = ("float32", "float16", "bfloat16", "float64")
SHAPES = "Shape of an input, such as 64x784; 8x128:int64 for indices; NAME=64x784 to pass it by name. Repeat for more inputs."


@with_flags(TrainConfig)
def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; its keys are the flags below.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.")] = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar on a terminal.")] = True,
    flags: dict[str, Any] | None = None,
) -> None:
    """Train an MLP and keep the result in a run folder.

    For a table (.csv, .tsv, .parquet) the defaults of epochs, batch size, hidden widths, optimizer, learning rate and weight
    decay are others than those below: they follow from its rows, and the run's config.toml has them.
    """
    from onelaunch.cli.train import run_train

    raise_on_interrupt()
    run_train(config, resume, progress, flags or {})


@with_flags(TrainConfig)
def sweep(
    config: Annotated[Path, typer.Argument(help="A TOML file, as for `onelaunch train`, with lists of values to try.")],
    strategy: Annotated[str | None, typer.Option(help="grid, random (with --n) or halving; default: grid.")] = None,
    n: Annotated[int | None, typer.Option(help="Number of random candidates.")] = None,
    folds: Annotated[int | None, typer.Option(help="Validate by cross-validation instead of on the test rows.")] = None,
    metric: Annotated[str | None, typer.Option(help="Compare by this: accuracy, loss or one of --metrics.")] = None,
    n_jobs: Annotated[int | None, typer.Option(help="Chunks of members that joblib runs at a time.")] = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar on a terminal.")] = True,
    flags: dict[str, Any] | None = None,
) -> None:
    """Train every combination of the lists in a config together, and the best one into a run folder of its own."""
    from onelaunch.cli.sweep import run_sweep

    raise_on_interrupt()
    own = {"strategy": strategy, "n": n, "folds": folds, "metric": metric, "n_jobs": n_jobs}
    run_sweep(config, {name: value for name, value in own.items() if value is not None}, progress, flags or {})


@with_flags(TrainConfig)
def compare(
    config: Annotated[Path | None, typer.Argument(help="A TOML file, as for `onelaunch train`.")] = None,
    sizes: Annotated[
        str | None,
        typer.Option(parser=numbers(int), metavar="N,N,…", help="Also time a step at these hidden sizes: 128,256,512"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds to train, for means and bands.")] = 1,
    flags: dict[str, Any] | None = None,
) -> None:
    """Train the same network from the same weights in the same row order with PyTorch, torch.compile and our engines.

    Ends with 1 when one of our engines fails or its loss curve does not agree with PyTorch's, or a size cannot be timed.
    """
    from onelaunch.cli.compare import run_compare

    raise_on_interrupt()
    run_compare(config, sizes, seeds, flags or {})  # type: ignore[arg-type]  # the parser of `sizes` returns a list


def bench(
    what: Annotated[
        list[str] | None,
        typer.Argument(help=f"Groups ({', '.join(GROUPS)}; all if none), or: diff OLD.json NEW.json"),
    ] = None,
    filter: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    quick: Annotated[
        bool, typer.Option(help="A first look: few repeats, and at most 60 s per group, or --limit seconds in all.")
    ] = False,
    limit: Annotated[
        float | None,
        typer.Option(help="Start no case after this many seconds; with --quick, end then. Name those left out."),
    ] = None,
    large: Annotated[
        bool, typer.Option(help="In group train: the networks and batches too large to be resident, and no others.")
    ] = False,
    models: Annotated[int, typer.Option(help="In group zoo: how many models are drawn.")] = 48,
    seed: Annotated[int, typer.Option(help="In group zoo: of the draw; another one draws other models.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where to save the results as JSON; else under runs/.")] = None,
) -> None:
    """Time onelaunch and its peers on the same work. A case that fails its check is not timed.

    `bench diff OLD.json NEW.json` tells a change from noise, and ends with 1 when something became slower or fails.
    """
    from onelaunch.cli.bench import run_bench

    raise_on_interrupt()
    run_bench(what or ["all"], filter, quick, limit, large, out, models, seed)


RUN = Annotated[Path, typer.Argument(help="The folder of a finished run.")]
TABLE = Annotated[Path, typer.Argument(help="A table with the columns of training; .npy or .npz for runs on arrays.")]


def predict(
    run: RUN,
    data: TABLE,
    out: Annotated[Path | None, typer.Option(help="The .csv file to write; standard output if not given.")] = None,
) -> None:
    """Predict the target of each row of a file: one line per row, for classes with their probabilities."""
    from onelaunch.cli.predict import run_predict

    raise_on_interrupt()
    run_predict(run, data, out)


def evaluate(
    run: RUN,
    data: TABLE,
    target: Annotated[str | None, typer.Option(help="Array of a .npz file or column of a .npy file.")] = None,
) -> None:
    """Compare the predictions of a run with the targets in a file, and with the best constant prediction."""
    from onelaunch.cli.predict import run_evaluate

    raise_on_interrupt()
    run_evaluate(run, data, target)


def export(run: RUN, path: Annotated[Path, typer.Argument(help="The file to write: model.onnx or model.pt2.")]) -> None:
    """Write a run as one ONNX or PyTorch file, with its preprocessing inside."""
    from onelaunch.cli.predict import run_export

    raise_on_interrupt()
    run_export(run, path)


def report(
    inputs: Annotated[list[Path], typer.Argument(help="Run folders, results files, or folders of either.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; report.html if not given.")] = None,
) -> None:
    """Draw runs and results as one self-contained HTML page. What cannot be read is named and left out."""
    from onelaunch.cli.report import run_report

    raise_on_interrupt()
    run_report(inputs, out)


def explain(
    model: Annotated[str, typer.Argument(help="FILE.py:NAME of a model, or of a function or class that returns one.")],
    input: Annotated[list[str], typer.Option(help=SHAPES)],
    device: Annotated[
        str | None, typer.Option(help="Predict for this device, such as H200; default: this machine's GPU, else H200.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Of the model and its inputs: {', '.join(DTYPES)}.")] = DTYPES[0],
    eval: Annotated[bool, typer.Option("--eval", help="In evaluation mode; without it, in training mode.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write an interactive page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what fusing does to a model: each chain, the decision and its reason, bytes, launches and times."""
    require_option("dtype", dtype, DTYPES)
    from onelaunch import public
    from onelaunch.cli.explain import run_explain

    public.publish()  # for the user's file
    raise_on_interrupt()
    run_explain(model, input, device, dtype, eval, html, as_json)


def examples(
    out: Annotated[
        Path | None, typer.Argument(help="The folder to write them to; if not given, they are listed.")
    ] = None,
) -> None:
    """List the configurations and example scripts that come with onelaunch, or copy them into a folder."""
    from onelaunch.shipped import copy_shipped, shipped_files, shipped_root

    for name in shipped_files() if out is None else copy_shipped(out):
        typer.echo(str(name))
    typer.echo(f"in {shipped_root() if out is None else out}")
    copy = "copy them: onelaunch examples FOLDER; " if out is None else ""
    typer.echo(f"{copy}run a script: python FILE.py; train a configuration by its name: onelaunch train classic-784")


def info() -> None:
    """Show versions, devices, and which engines can run here and why the others cannot."""
    from onelaunch.cli.info import run_info

    raise_on_interrupt()
    run_info()
