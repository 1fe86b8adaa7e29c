"""Tables of every kind on the command line: rare classes, decimal commas, files without a header."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import onelaunch as ol
from tests.cli.conftest import invoke

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ("--hidden", "16", "--epochs", "12", "--lr", "0.02", "--no-progress")


@pytest.mark.parametrize("seed", range(3))
def test_rare_classes_are_held_out_by_their_share(cli, tmp_path, seed):
    """A class with 10 of 210 rows gives 2; a class with a single row is learned, and a note says that it has no score."""
    labels = ["rare"] * 10 + ["usual"] * 199 + ["single"]
    lines = [f"{number % 7}.5,{number % 4},{label}" for number, label in enumerate(labels)]
    (tmp_path / "rare.csv").write_text("a,b,y\n" + "\n".join(lines))
    outcome = cli("train", "--data", "rare.csv", *QUICK, "--epochs", "1", "--seed", str(seed), "--out", "run")
    assert outcome.code == 0, outcome.err
    assert "no row of class 'single' is held out: the scores say nothing about it\n" in outcome.out
    confusion = json.loads((tmp_path / "run" / "predictions.json").read_text())["confusion"]
    held_out = [sum(count for true, _, count in confusion if true == code) for code in range(3)]
    assert held_out == [2, 0, 40]


def comma_table(path: Path) -> None:
    """A number with decimal commas in every row, a few of them in another column, and a target of the same kind."""
    rows = [f"{number},5;{number % 3},5;{number % 2};{number * 2},25" for number in range(60)]
    path.write_text("size;grade;kind;price\n" + "\n".join(rows) + "\n")


def test_decimal_commas_are_noted(cli, tmp_path):
    comma_table(tmp_path / "commas.csv")
    outcome = cli("train", "--data", "commas.csv", "--target", "kind", *QUICK, "--out", "run")
    assert outcome.code == 0, outcome.err
    assert "column 'size' is not used: it has numbers with decimal commas, such as '" in outcome.out
    assert "column 'grade' is text, as '0,5' has a decimal comma: for numbers write 0.5" in outcome.out
    outcome = cli("train", "--data", "commas.csv", "--target", "grade", *QUICK, "--out", "other")
    assert "column 'grade' is text, as '0,5' has a decimal comma: for numbers write 0.5" in outcome.out
    for task, message in (
        ((), "which make them text: write 0.25 for 0,25"),
        (("--task", "regression"), ": write 0.25, or"),
    ):
        outcome = cli("train", "--data", "commas.csv", "--target", "price", *task, *QUICK, "--out", "third")
        assert outcome.code == 2
        assert message in outcome.err


def test_decimal_commas_are_noted_without_a_header_too(cli, tmp_path):
    comma_table(tmp_path / "commas.csv")
    lines = (tmp_path / "commas.csv").read_text().splitlines()[1:]
    (tmp_path / "bare.csv").write_text("\n".join(lines))
    outcome = cli("train", "--data", "bare.csv", "--target", "2", *QUICK, "--out", "run")
    assert outcome.code == 0, outcome.err
    assert "60 rows of 3 columns (1 of text), 2 classes in column '2', no header line" in outcome.out
    assert "column '0' is not used: it has numbers with decimal commas, such as '" in outcome.out
    assert "column '1' is text, as '0,5' has a decimal comma: for numbers write 0.5" in outcome.out
    (tmp_path / "bare.csv").write_text("".join(f"{number},25;{'yn'[number % 2]}\n" for number in range(60)))
    outcome = cli("train", "--data", "bare.csv", "--target", "1", *QUICK, "--out", "other")
    assert outcome.code == 2
    assert re.search(r"says anything \('0' has numbers with decimal commas, .*: write \d+\.25\): add or", outcome.err)


def test_a_run_from_before_stratify_resumes_with_its_rows(cli, tmp_path):
    lines = [f"{number % 7}.5,{number % 4},{'ab'[number % 3 == 0]}" for number in range(90)]
    (tmp_path / "t.csv").write_text("a,b,y\n" + "\n".join(lines))
    first = ("--data", "t.csv", *QUICK, "--no-stratify", "--schedule", "constant")
    assert cli("train", *first, "--out", "old").code == 0
    config = tmp_path / "old" / "config.toml"
    config.write_text(config.read_text().replace("stratify = false\n", ""))
    resumed = cli("train", "--resume", "old", "--epochs", 14, "--no-progress")
    assert resumed.code == 0, resumed.err
    assert cli("train", *first, "--epochs", 14, "--out", "whole").code == 0
    old, whole = (json.loads((tmp_path / name / "run.json").read_text())["scores"] for name in ("old", "whole"))
    assert old == whole


@pytest.fixture(scope="module")
def positional(tmp_path_factory) -> Path:
    """A folder with a run on bare.csv, a file without a header: a target, two numbers, text, and a constant last column."""
    folder = tmp_path_factory.mktemp("positional")
    random = np.random.default_rng(0)
    rows = [[*random.normal(size=2).round(2), random.choice(["u", "v"])] for _ in range(120)]
    (folder / "bare.csv").write_text("".join(f"{'y' if a > b else 'n'},{a},{b},{text},7\n" for a, b, text in rows))
    out = invoke("train", "--data", folder / "bare.csv", "--target", "0", *QUICK, "--out", folder / "run")
    assert out.code == 0, out.err
    assert "in column '0', no header line" in out.out
    return folder


def test_columns_without_names_are_found_by_position(cli, positional, tmp_path):
    lines = (positional / "bare.csv").read_text().splitlines()
    expected = cli("predict", positional / "run", positional / "bare.csv").out
    for target in ("?", "", "anything"):
        (tmp_path / "new.csv").write_text("\n".join(f"{target}{line[1:]}" for line in lines))
        outcome = cli("predict", positional / "run", "new.csv")
        assert (outcome.code, outcome.out, outcome.err) == (0, expected, "")
    (tmp_path / "new.csv").write_text("y,,,u,7\n")  # like a header, as far as the file can tell
    assert len(cli("predict", positional / "run", "new.csv").out.splitlines()) == 2
    frame = {number: [line.split(",")[number] for line in lines] for number in range(1, 5)}
    assert ol.load(positional / "run").predict(frame).tolist() == [
        line.split(",")[0] for line in expected.splitlines()[1:]
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "0.5,1.5,u,7\n",
            "has 4 columns and training had 5, without a header line: pass the same columns in the same order",
        ),
        ("0.5,1.5,u,7\n", "; column 0, the target, may be any text, such as ?"),
        ("?,0.5,1.5,u,7,8\n", "has 6 columns and training had 5"),
        ("y,a,b,c,d\n?,0.5,1.5,u,7\n", "line 1, column '1': 'a' is not a number, as in training"),
    ],
)
def test_other_columns_than_those_of_training_are_refused(cli, positional, tmp_path, content, message):
    """Without the target, column 1 would be the second number, and the constant column would not be missed."""
    (tmp_path / "new.csv").write_text(content)
    outcome = cli("predict", positional / "run", "new.csv")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert message in outcome.err


@pytest.mark.parametrize("frames", [True, False])
def test_a_bad_value_of_a_frame_is_found_by_its_row(positional, frames):
    kind = pytest.importorskip("pandas").DataFrame if frames else dict
    frame = kind({1: ["0.5", "big"], 2: ["1.5", "1.5"], 3: ["u", "u"], 4: [7, 7]})
    with pytest.raises(ValueError, match=r"^x: row 1, column '1': 'big' is not a number, as in training: correct it$"):
        ol.load(positional / "run").predict(frame)


def test_a_target_in_the_last_place_may_be_missing(cli, tmp_path):
    lines = [f"{number % 5}.5,{number % 3},{'no' if number % 5 < 2 else 'yes'}" for number in range(60)]
    (tmp_path / "bare.csv").write_text("\n".join(lines))
    assert cli("train", "--data", "bare.csv", "--target", "-1", *QUICK, "--out", "run").code == 0
    (tmp_path / "new.csv").write_text("\n".join(line.rsplit(",", 1)[0] for line in lines))
    assert cli("predict", "run", "new.csv").out == cli("predict", "run", "bare.csv").out
    (tmp_path / "new.csv").write_text("0.5\n1.5\n")
    assert "; column 2, the target, may be missing" in cli("predict", "run", "new.csv").err


@pytest.mark.parametrize("target", ["won", "flag"])
def test_booleans_of_a_data_frame_are_those_of_the_file(cli, tmp_path, target):
    pandas = pytest.importorskip("pandas")
    random = np.random.default_rng(0)
    flag, x = random.random(120) < 0.5, random.normal(size=120)
    frame = pandas.DataFrame({"flag": flag, "x": x, "won": np.where(flag, "yes", "no")})
    frame.to_csv(tmp_path / "t.csv", index=False)
    outcome = cli("train", "--data", "t.csv", "--target", target, "--hidden", "8", "--epochs", "20", "--lr", "0.05",
                  "--no-progress", "--out", "run")  # fmt: skip
    assert outcome.code == 0, outcome.err
    predictor = ol.load(tmp_path / "run")
    expected = predictor.evaluate(tmp_path / "t.csv")
    assert expected["scores"]["accuracy"] == 1
    assert predictor.evaluate(pandas.read_csv(tmp_path / "t.csv")) == expected
    assert predictor.evaluate(frame, frame[target]) == expected
    one = {name: frame[name].tolist()[0] for name in frame}
    assert predictor.predict(one).tolist() == [str(one[target])]


def test_dates_are_numbers(cli, tmp_path):
    pandas = pytest.importorskip("pandas")
    random = np.random.default_rng(0)
    days = random.permutation(200)
    frame = pandas.DataFrame({
        "day": pandas.Timestamp("2024-01-01") + pandas.to_timedelta(days, unit="D"),
        "x": random.normal(size=200), "price": 100 + days + random.normal(size=200),
    })  # fmt: skip
    frame.to_csv(tmp_path / "t.csv", index=False)
    outcome = cli("train", "--data", "t.csv", "--target", "price", *QUICK, "--out", "run")
    assert "200 rows of 2 columns (1 of dates), values in column 'price'" in outcome.out
    assert "note " not in outcome.out
    predictor = ol.load(tmp_path / "run")
    expected = predictor.evaluate(tmp_path / "t.csv")
    assert expected["scores"]["R²"] > 0.9
    assert predictor.evaluate(frame) == expected
    assert cli("export", "run", "model.pt2").code == 0
    extra = {"onelaunch": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    assert json.loads(extra["onelaunch"])["dates"] == ["day"]


@pytest.mark.parametrize("seed", range(3))
def test_a_word_among_the_dates_makes_them_text_wherever_it_is_held_out(cli, tmp_path, seed):
    rows = "".join(f"{'soon' if row == 7 else f'2024-01-0{1 + row % 9}'},{row % 5},{row % 2}\n" for row in range(40))
    (tmp_path / "t.csv").write_text(f"day,x,y\n{rows}")
    outcome = cli("train", "--data", "t.csv", *QUICK, "--epochs", "1", "--seed", str(seed), "--out", "run")
    assert (outcome.code, "2 columns (1 of text)" in outcome.out) == (0, True)
