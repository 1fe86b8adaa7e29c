"""From a table to predictions on the command line: train, evaluate, predict, export, and one line for every bad table."""

from __future__ import annotations

import csv
import json
import re
import shutil
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

import onelaunch as ol
from onelaunch.data.dataset import held_out_rows
from onelaunch.train.export import export
from tests.cli.conftest import invoke, write_blobs

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ("--hidden", "16", "--epochs", "12", "--lr", "0.02", "--no-progress")
ROWS = 300


def rows_of(seed: int = 0, count: int = ROWS) -> list[dict[str, object]]:
    """Houses whose price and kind follow from their columns: numbers of several scales, text, missing values."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        size, city = random.normal(120, 40), random.choice(["Rome", "Oslo", "Lima"])
        rooms = int(random.integers(1, 7))
        price = 1e5 + 2500 * size + 4e4 * (city == "Oslo") + 1e4 * rooms + random.normal(0, 5e3)
        rows.append({
            "id": f"h{number}", "size": f"{size:.1f}", "rooms": "" if random.random() < 0.1 else rooms, "city": city,
            "empty": "", "same": "x", "price": f"{price:.2f}", "kind": "large" if size + 10 * rooms > 155 else "small",
        })  # fmt: skip
    return rows


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Path]:
    """Finished runs of a regression and of a classification, and their table."""
    folder = tmp_path_factory.mktemp("tables")
    write(folder / "houses.csv", rows_of())
    found = {"table": folder / "houses.csv"}
    for target in ("price", "kind"):
        out = invoke("train", "--data", found["table"], "--target", target, *QUICK, "--out", folder / target)
        assert out.code == 0, out.err
        (folder / f"{target}.txt").write_text(out.out)
        found[target] = folder / target
    return found


def scores(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("scores"))


@pytest.mark.parametrize(("target", "task"), [("price", "regression"), ("kind", "classification")])
def test_a_round_trip_gives_the_scores_of_training(cli, trained, tmp_path, target, task):
    printed = (trained[target].parent / f"{target}.txt").read_text()
    assert f"task     {task} of {target!r}" in printed
    assert "column 'id' is not used: it has 240 different texts in 240 rows" in printed
    assert "column 'empty' is not used: it has no value" in printed
    assert "column 'same' is not used: it is constant" in printed
    rows = rows_of()
    classes = np.array([row["kind"] == "small" for row in rows], np.int64) if target == "kind" else None
    held_out = held_out_rows(ROWS, 0.2, 0, classes)[1]
    new = write(tmp_path / "new.csv", [rows[row] for row in held_out])
    outcome = cli("evaluate", trained[target], new)
    assert (outcome.code, outcome.err) == (0, "")
    assert scores(outcome.out) == scores(printed)
    about = json.loads((trained[target] / "run.json").read_text())
    value, constant = (
        about["scores"][part]["R²" if target == "price" else "accuracy"] for part in ("scores", "constant")
    )
    assert value > 0.85 > 0.7 > constant
    assert not any(path.suffix in (".pkl", ".pickle", ".pt") for path in trained[target].iterdir())


def test_predict_does_not_replace_the_table_it_reads(cli, trained, tmp_path):
    content = Path(trained["table"]).read_bytes()
    outcome = cli("predict", trained["kind"], trained["table"], "--out", trained["table"])
    assert (outcome.code, "is the table itself" in outcome.err) == (2, True)
    assert Path(trained["table"]).read_bytes() == content


@pytest.mark.parametrize("flag", ["--epochs", "--batch-size", "--steps"])
def test_a_length_of_zero_is_refused(cli, trained, flag):
    outcome = cli("train", "--data", trained["table"], "--target", "price", flag, "0", "--out", "none")
    assert outcome.code == 2
    assert f"{flag[2:].replace('-', '_')}=0 must be 1 or more" in outcome.err


def test_predict_writes_one_line_per_row(cli, trained, tmp_path):
    outcome = cli("predict", trained["kind"], trained["table"], "--out", "out.csv")
    assert (outcome.code, outcome.err) == (0, "")
    lines = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert len(lines) == ROWS
    assert list(lines[0]) == ["prediction", "probability large", "probability small"]
    for line in lines[:20]:
        assert float(line[f"probability {line['prediction']}"]) >= 0.5
    values = cli("predict", trained["price"], trained["table"]).out.splitlines()
    predictor = ol.load(trained["price"])
    assert values[0] == "prediction"
    np.testing.assert_allclose([float(value) for value in values[1:]], predictor.predict(trained["table"]), rtol=1e-12)


def test_columns_are_found_by_name_and_surprises_are_said(cli, trained, tmp_path):
    rows = [{"new": 1, **dict(reversed(row.items()))} for row in rows_of(1, 5)]
    rows[0]["city"], rows[1]["size"] = "Cairo", ""
    outcome = cli("predict", trained["kind"], write(tmp_path / "new.csv", rows))
    assert outcome.code == 0
    assert "not used: column(s) 'new'" in outcome.err
    assert "1 row(s) have a category in 'city' that training did not have" in outcome.err
    assert len(outcome.out.splitlines()) == 6


def test_load_takes_data_frames_and_dicts(trained):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(trained["table"])
    for target in ("price", "kind"):
        predictor = ol.load(trained[target])
        expected = predictor.predict(trained["table"])
        np.testing.assert_array_equal(predictor.predict(frame), expected)
        np.testing.assert_array_equal(predictor.predict({name: list(frame[name]) for name in frame}), expected)
        found = predictor.evaluate(frame, frame[target])
        assert found == predictor.evaluate(trained["table"])
    assert predictor.classes == ("large", "small")
    np.testing.assert_allclose(predictor.predict_proba(frame).sum(axis=1), 1)
    with pytest.raises(ol.OnelaunchError, match="is a regression, which has no probabilities"):
        ol.load(trained["price"]).predict_proba(frame)
    with pytest.raises(ol.OnelaunchError, match="x is of type list"):
        predictor.predict([[1, 2]])


@pytest.mark.parametrize("kind", ["None", "NaN", "NA", "empty text"])
def test_rows_in_memory_may_lack_a_number(trained, kind):
    pandas = pytest.importorskip("pandas")
    missing = {"None": None, "NaN": float("nan"), "NA": pandas.NA, "empty text": ""}[kind]
    predictor = ol.load(trained["price"])
    columns: dict[str, list[object]] = {name: [row[name] for row in rows_of(2, 7)] for name in rows_of(1, 7)[0]}
    assert predictor.encoding is not None
    number = predictor.encoding.encoder.numbers[0]
    columns[number][0] = missing
    expected = pandas.DataFrame(columns | {number: [float("nan"), *columns[number][1:]]})
    np.testing.assert_array_equal(predictor.predict(columns), predictor.predict(expected))


@pytest.mark.parametrize("target", ["price", "kind"])
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
@pytest.mark.filterwarnings("ignore")  # PyTorch's exporters warn about their own future
def test_an_exported_model_predicts_the_same(cli, trained, tmp_path, target, suffix, caplog):
    if suffix == "onnx":
        pytest.importorskip("onnxscript")
    outcome = cli("export", trained[target], f"model.{suffix}")
    assert (outcome.code, outcome.out) == (0, f"saved    model.{suffix}\n")
    assert not [record for record in caplog.records if record.name.startswith("torch.onnx") and record.levelno >= 30]
    predictor = ol.load(trained[target])
    assert predictor.encoding is not None
    from onelaunch.data.table_encoding import as_table

    rows = rows_of(2, 7)
    rows[0]["city"] = "Cairo"
    path = write(tmp_path / "new.csv", rows)
    numbers, codes = predictor.encoding.encoder.parts(as_table(path, predictor.encoding.text_columns))
    if suffix == "pt2":
        extra = {"onelaunch": ""}
        program = torch.export.load(tmp_path / "model.pt2", extra_files=extra)
        found = program.module()(torch.from_numpy(numbers), torch.from_numpy(codes)).detach().numpy()
        about = json.loads(extra["onelaunch"])
    else:
        runtime = pytest.importorskip("onnxruntime")
        session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        found = session.run(None, {"numbers": numbers, "categories": codes})[0]
        about = json.loads(session.get_modelmeta().custom_metadata_map["onelaunch"])
    expected = predictor.predict(path) if target == "price" else predictor.predict_proba(path)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert about["numbers"] == list(predictor.encoding.encoder.numbers)
    assert about["categories"]["city"] == ["Lima", "Oslo", "Rome"]


def test_a_run_on_arrays_is_loaded_too(cli, finished_run, tmp_path):
    with np.load(write_blobs(tmp_path)) as file:
        x, y = file["x"], file["y"]
    predictor = ol.load(finished_run)
    assert predictor.evaluate(x, y)["scores"]["accuracy"] > 0.5
    x_with_nan = x.copy()
    x_with_nan[4, 0] = np.nan
    with pytest.raises(ol.OnelaunchError, match=r"x holds NaN or Inf \(first in row 4\)"):
        predictor.predict(x_with_nan)
    np.save(tmp_path / "rows.npy", x)
    outcome = cli("predict", finished_run, "rows.npy")
    assert [line.split(",")[0] for line in outcome.out.splitlines()[1:]] == predictor.predict(x).tolist()
    assert export(predictor, tmp_path / "model.pt2").exists()
    refused = cli("predict", finished_run, "rows.csv")
    assert (refused.code, "pass a .npy file" in refused.err) == (2, True)


BAD_TABLES = {
    "missing target": ("a,y\n1,2.5\n2,\n3,1.5\n", "line 3, column 'y': the target is missing"),
    "one class": ("a,y\n1,b\n2,b\n", "has a single class, 'b'"),
    "one row": ("a,y\n1,2\n", "has 1 row"),
    "repeated name": ("a,a,y\n1,2,u\n3,4,v\n5,6,u\n", "2 columns called 'a'"),
    "text among numbers": (
        "a,y\n" + "".join(f"{i},{i}.5\n" for i in range(40)) + "x,1.5\n",
        "'x' is not a number, but",
    ),
    "names as target": ("a,y\n" + "".join(f"{i},n{i}\n" for i in range(100)), "100 classes in 100 rows"),
    "nothing to learn from": ("a,b,y\n1,,2.5\n1,,3.5\n1,,4.5\n", "no column that says anything"),
    "infinite": ("a,y\ninf,1.5\n2,2.5\n3,3.5\n4,4.5\n5,5.5\n6,6.5\n", "inf is not a finite number"),
}


@pytest.mark.parametrize("bad", BAD_TABLES)
def test_a_bad_table_is_one_line_and_leaves_nothing(cli, tmp_path, bad):
    content, message = BAD_TABLES[bad]
    (tmp_path / "bad.csv").write_text(content)
    outcome = cli("train", "--data", "bad.csv", "--target", "y", *QUICK, "--out", "run")
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--task", "ranking"), "task='ranking' is not known"),
        (("--task", "regression", "--loss", "cross_entropy"), "contradict each other"),
        (("--loss", "bce_with_logits"), "is not for tables"),
        (("--categorical", "zip"), "categorical='zip': .* has no such column"),
        (("--target", "prise"), "no such column.*did you mean 'price'"),
        (("--task", "classification"), "classes in 300 rows.*pass --task regression"),
    ],
)
def test_a_bad_flag_is_one_line(cli, trained, flags, message):
    target = () if "--target" in flags else ("--target", "price")
    outcome = cli("train", "--data", trained["table"], *target, *flags, *QUICK, "--out", "run")
    assert outcome.code == 2
    assert re.search(message, outcome.err)
    assert outcome.err.count("\n") == 1


def test_table_flags_need_a_table(cli, blobs):
    outcome = cli("train", "--data", blobs, "--task", "regression")
    assert (outcome.code, "task='regression' is for tables" in outcome.err) == (2, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [{k: v for k, v in row.items() if k != "size"} for row in rows], "lacks the column(s) 'size'"),
        (lambda rows: [{**row, "size": "big"} for row in rows], "line 2, column 'size': 'big' is not a number"),
        (lambda rows: [{**row, "kind": "tiny"} for row in rows], "'tiny' is a class that is not known"),
        (lambda rows: [{k: v for k, v in row.items() if k != "kind"} for row in rows], "new.csv has no column 'kind'"),
    ],
)
def test_new_rows_that_do_not_fit_are_one_line(cli, trained, tmp_path, change, message):
    path = write(tmp_path / "new.csv", change(rows_of(1, 3)))
    outcome = cli("evaluate", trained["kind"], path)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_file_that_lacks_the_header_of_training_is_one_line(cli, trained, tmp_path):
    (tmp_path / "new.csv").write_text("h1,120.5,3,Rome,,x\nh2,80.5,2,Oslo,,x\n")
    outcome = cli("predict", trained["kind"], "new.csv")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "has no header line, and columns are found by name: add one with the columns 'size', 'rooms'" in outcome.err


def test_f1_says_which_class_it_is_of(cli, trained):
    assert re.search(r"F1 of 'small' 0\.\d+ \(constant", (trained["kind"].parent / "kind.txt").read_text())
    assert "F1 of 'small' 0." in cli("evaluate", trained["kind"], trained["table"]).out


def test_unseen_categories_are_counted_in_python_too(cli, trained, tmp_path, caplog):
    rows = rows_of(1, 4)
    rows[0]["city"] = rows[2]["city"] = "Bonn"
    path = write(tmp_path / "new.csv", rows)
    ol.load(trained["price"]).predict(path)
    assert caplog.messages == ["2 of 4 rows have a category in 'city' that training did not have"]
    caplog.clear()
    outcome = cli("predict", trained["price"], path)
    assert outcome.err.count("that training did not have") == 1
    assert not caplog.messages
    ol.load(trained["price"]).predict(trained["table"])
    assert not caplog.messages


def test_a_run_without_its_table_json_says_so(cli, trained, tmp_path):
    run = shutil.copytree(trained["price"], tmp_path / "run")
    (run / "table.json").unlink()
    outcome = cli("predict", "run", trained["table"])
    assert outcome.code == 2
    assert "run has no table.json" in outcome.err
    assert "put it back, or repeat the run with onelaunch train run/config.toml" in outcome.err


@pytest.mark.parametrize("damage", ["model.safetensors", "run.json", "table.json", "folder", "other table"])
def test_a_damaged_run_is_one_line(cli, trained, tmp_path, damage):
    run = shutil.copytree(trained["price"], tmp_path / "run")
    if damage == "folder":
        shutil.rmtree(run)
    elif damage == "other table":
        content = json.loads((run / "table.json").read_text())
        content["encoder"]["numbers"].pop()
        (run / "table.json").write_text(json.dumps(content))
    else:
        (run / damage).write_bytes((run / damage).read_bytes()[: -len((run / damage).read_bytes()) // 2])
    outcome = cli("predict", "run", trained["table"])
    assert outcome.code == 2
    assert outcome.err.startswith("error: run")
    assert outcome.err.count("\n") == 1


def test_the_outputs_are_written_whole_or_not_at_all(cli, trained, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = cli("predict", trained["price"], trained["table"], "--out", "file/out.csv")
    assert (outcome.code, "cannot be written" in outcome.err) == (2, True)
    outcome = cli("export", trained["price"], "model.bin")
    assert (outcome.code, "must end in .onnx or .pt2" in outcome.err) == (2, True)


def test_resuming_keeps_the_table(cli, trained, tmp_path):
    run = shutil.copytree(trained["price"], tmp_path / "run")
    outcome = cli("train", "--resume", run)
    assert (outcome.code, "nothing is left to train" in outcome.out) == (0, True)


def test_a_flipped_byte_in_the_weights_is_noticed(finished_run):
    weights = finished_run / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    with pytest.raises(
        ol.OnelaunchError, match=r"model\.safetensors is damaged .*checksum does not match.*: train it again"
    ):
        ol.load(finished_run)
    weights.write_bytes(save(load(good)))  # as older versions wrote it
    ol.load(finished_run)
    weights.unlink()
    with pytest.raises(ol.OnelaunchError, match=r"model\.safetensors: No such file or directory\): pass one of"):
        ol.load(finished_run)


def test_what_a_user_should_know_of_the_run_is_said(cli, tmp_path):
    """Dates and cut categories become notes, and so does a validation loss that has risen since its lowest value."""
    random = np.random.default_rng(3)
    rows: list[dict[str, object]] = [
        {
            "day": f"{1 + number % 28}.3.2024",
            "hour": f"{1 + number % 28}/{1 + number // 28}/2024 12:{number % 60:02d}",
            "noise": f"{random.normal():.3f}",
            "y": random.choice(["a", "b"]),
        }
        for number in range(160)
    ]
    table = write(tmp_path / "t.csv", rows)
    flags = ("--data", table, "--target", "y", "--hidden", "64,64", "--lr", "0.02", "--no-progress")
    out = cli("train", *flags, "--epochs", "40", "--out", tmp_path / "run").out
    assert "column 'day' is text, as '1.3.2024' is a date: write dates as 2024-05-31, or leave it out" in out
    assert re.search(
        r"column 'hour' is not used: it has dates, such as '\d+/\d/2024 12:\d+', which are text: write dates", out
    )
    assert re.search(r"the validation loss was lowest in epoch \d+ \(\S+\): --early-stopping 5 keeps that model", out)
    notes = re.findall(r"^note     (.*)$", out, re.MULTILINE)
    assert len(notes) == 3
    assert json.loads((tmp_path / "run" / "run.json").read_text())["notes"] == notes
    page = unescape((tmp_path / "run" / "report.html").read_text())
    assert "".join(f"<dt>note</dt><dd>{note}</dd>" for note in notes) in page
    assert f'<p class="note">T{notes[-1][1:]}.</p>' in page  # the advice is not folded
    stopped = cli("train", *flags, "--epochs", "40", "--early-stopping", "3", "--out", tmp_path / "stopped").out
    best = re.search(r"best epoch (\d+) of (\d+): .*validation loss ([\d.]+)", stopped)
    assert best is not None
    assert int(best[1]) < int(best[2])
    assert f"in epoch {best[1]}, the best" in stopped  # beside the course of the loss
    assert f"held-out rows, which chose it among {best[2]} epochs" in stopped
    assert "was lowest in" not in stopped
    about = json.loads((tmp_path / "stopped" / "run.json").read_text())
    assert about["best_epoch"] == int(best[1]) - 1
    page = (tmp_path / "stopped" / "report.html").read_text()
    assert f"The model is that of epoch {best[1]}" in page
    assert "early_stopping" in page
