"""The scripts in benchmarks/, as far as they run without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import cold_launch, first_call, record
from onelaunch.bench.contenders import EAGER, TorchLoop
from onelaunch.bench.run import select
from onelaunch.cli.app import make_app
from onelaunch.engines.contract import Run
from onelaunch.report.recorded import read_recorded


def test_the_cold_launch_script_imports() -> None:
    assert callable(cold_launch.main)


def test_first_calls_are_timed_in_processes_of_their_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first_call.main(["--model", "dqn", "--only", "eager", "--rounds", "1"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows] == [["eager", "empty"], ["eager", "filled"]]
    assert [len(row) for row in rows] == [len(head)] * 2
    found = first_call.in_a_process("eager", "dqn", tmp_path)
    assert [*found] == ["first", "second", "later"]
    assert min(found.values()) > 0


def test_the_second_round_of_first_calls_is_in_reverse_order(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def in_a_process(name: str, *_: object) -> dict[str, float]:
        names.append(name)
        return {"first": 1.0, "second": 1.0, "later": 1.0}

    monkeypatch.setattr(first_call, "in_a_process", in_a_process)
    first_call.main(["--only", "eager", "--only", "ol.fuse"])
    assert names == ["eager", "eager", "ol.fuse", "ol.fuse", "ol.fuse", "ol.fuse", "eager", "eager"]


def test_a_group_is_recorded_case_by_case_into_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each process has one case; the second fails here before it has written anything."""
    names: list[str] = []

    def run(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        name = command[command.index("--filter") + 1]
        names.append(name)
        assert [case.name for case in select(["models"], name)] == [name]
        if len(names) == 2:
            return subprocess.CompletedProcess(command, 1)
        results = {
            "planned": [name],
            "left_out": [],
            "cases": [{"name": name, "check": "skipped", "times": {}}],
            "finished": True,
            "command": "",
        }
        Path(command[-1]).write_text(json.dumps(results))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(record, "subprocess", SimpleNamespace(run=run))
    assert not record.RECORDINGS["models"].record(tmp_path / "models.json")
    whole = json.loads((tmp_path / "models.json").read_text())
    assert names == [case.name for case in select(["models"])]
    assert [case["name"] for case in whole["cases"]] == [names[0], *names[2:]]
    assert (whole["command"], whole["finished"]) == ("onelaunch bench models --quick --limit 36000", False)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, when torch.compile is first used
def test_results_are_taken_out_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small `compare --sizes`: what the recording of the sizes keeps is what `make readme` draws."""

    def in_process(command: tuple[str, ...], **options: object) -> subprocess.CompletedProcess[str]:
        result = CliRunner().invoke(make_app(), list(command[3:]))
        assert result.exit_code == 0, result.output
        return subprocess.CompletedProcess(command, result.exit_code)

    def no_compiler(self: TorchLoop, run: Run) -> None:
        if self.name != EAGER:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(TorchLoop, "_make_ready", no_compiler)
    monkeypatch.setattr("onelaunch.bench.sizes.SAMPLE_SECONDS", 1e-3)
    monkeypatch.setattr("onelaunch.bench.sizes.SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(record, "subprocess", SimpleNamespace(run=in_process))
    arguments = ("compare", "--data=digits", "--hidden=8", "--steps=3", "--engine=eager", "--sizes=4", "--out")
    recording = record.Recording((*record.ONELAUNCH, *arguments), inside="compare.json")
    assert recording.record(tmp_path / "sizes.json")
    assert [sizes.content["sizes"]["hidden"] for sizes in read_recorded(tmp_path).sizes] == [[4]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would record for minutes")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "this machine has no CUDA device"), (["--skip", "train,typo"], "no group typo: pass some of train, ")],
)
def test_recording_refuses_what_it_cannot_do(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["record.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        record.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
