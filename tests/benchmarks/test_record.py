"""The scripts in benchmarks/, as far as they run without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import cold_launch, record
from onelaunch.bench.contenders import EAGER, TorchLoop
from onelaunch.bench.run import select
from onelaunch.cli.app import make_app
from onelaunch.engines.contract import Run
from onelaunch.report.recorded import read_recorded


def test_the_cold_launch_script_imports() -> None:
    assert callable(cold_launch.main)


def test_every_warm_up_filter_selects_cases() -> None:
    """A filter that matches nothing would silently warm up nothing."""
    for name, recording in record.RECORDINGS.items():
        if isinstance(recording, record.SideBySide):
            cases = [
                case.name for part in (*recording.filters, *recording.alone) for case in select([recording.group], part)
            ]
            assert sorted(cases) == sorted(case.name for case in select([recording.group]))
            continue
        for option, part in recording.parts:
            if option == "--filter":
                group = recording.command[recording.command.index("bench") + 1]
                assert select([group], part), f"{name}: --filter {part}"


def test_the_warm_up_runs_every_part_once_with_a_path_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(record, "subprocess", SimpleNamespace(run=lambda command, **_: commands.append(command)))
    monkeypatch.setattr(record, "cache_folder", lambda name: tmp_path / name)
    record.warm_up(list(record.RECORDINGS.values()), 1.0)
    outs = [command[command.index("--out") + 1] for command in commands]
    assert len(set(outs)) == len(commands)
    assert not any(out.startswith("--") for out in outs)
    for name in ("models/llama", "models/fuse-resnet", "sweep/digits"):
        assert sum(name in command for command in commands) == 1
    large = [number for number, command in enumerate(commands) if "bench" in command and "models" in command][:2]
    assert large[1] - large[0] > 1  # not side by side


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
