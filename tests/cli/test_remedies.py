"""Messages of the library on the command line: what to pass is named as a flag."""

from __future__ import annotations

import pytest

from onelaunch.cli.config import TrainConfig
from onelaunch.cli.remedies import in_flags

FLAGS = TrainConfig.__dataclass_fields__


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("pass categorical='a' to read it", "pass --categorical a to read it"),
        ("pass categorical='my zip', or not", "pass --categorical 'my zip', or not"),
        ("pass epochs= or steps=, one (got neither)", "pass --epochs or --steps, one (got neither)"),
        ("pass momentum=0.9, or nesterov=False", "pass --momentum 0.9, or --no-nesterov"),
        ("pass drop_last=True or another batch_size", "pass --drop-last or another --batch-size"),
        ("pass betas=[0.9, 0.95], or start a new run", "pass --betas 0.9,0.95, or start a new run"),
        ("pass lr=1e-05.", "pass --lr 1e-05."),
        ("pass clip_norm=None", "pass no --clip-norm"),
        ("pass target as one of 'a', 'target'", "pass --target as one of 'a', 'target'"),
        ("pass another target", "pass another --target"),
    ],
)
def test_a_remedy_is_a_flag(message, shown):
    assert in_flags(f"lr=3 is wrong: {message}", FLAGS) == f"lr=3 is wrong: {shown}"


@pytest.mark.parametrize(
    "message",
    [
        "batch_size=0 must be 1 or more",  # no remedy
        "pass validation=(x, y), or a smaller lr",  # no flag takes a pair
        "pass metric='loss'",  # not a flag of train
        "pass one of 'batch_size', 'lr'",
        "pass data and a target as arrays",  # ordinary words
    ],
)
def test_what_is_no_flag_stays(message):
    assert in_flags(message, FLAGS) == message


def test_the_column_of_a_table(cli, tmp_path):
    rows = "".join(f"{number},{number % 2}\n" for number in range(30))
    (tmp_path / "table.csv").write_text(f"zip code,y\n{rows}12a,1\n")
    result = cli("train", "--data", "table.csv", "--out", "run")
    assert result.code == 2
    assert "or pass --categorical 'zip code' to read the column as categories" in result.err


def test_the_target_of_a_table(cli, tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n1,2\n3,4\n")
    result = cli("train", "--data", "table.csv", "--out", "run")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.endswith("pass --target as one of 'a', 'b'\n")
