"""The public names, and which processes import them at once."""

from __future__ import annotations

import sys
import types

import pytest

import onelaunch
from onelaunch import public


def test_every_public_name_is_in_the_package():
    assert onelaunch.__all__ == public.__all__
    assert set(public.__all__) <= set(dir(onelaunch))
    assert onelaunch.fuse is public.fuse, "the function, not the folder of that name"


@pytest.mark.parametrize(
    ("program", "original", "expected"),
    [
        ("/usr/bin/onelaunch", [], True),
        ("onelaunch.exe", [], True),
        ("-m", ["python", "-m", "onelaunch", "--help"], True),
        ("-m", ["python", "-m", "mine.train", "onelaunch"], False),  # a package that imports this one
        ("train.py", ["python", "train.py"], False),
        ("", ["python"], False),
    ],
)
def test_only_the_command_line_leaves_the_names_out_at_its_start(program, original, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(sys, "orig_argv", original)
    assert onelaunch._is_command_line() is expected


def test_an_embedded_interpreter_may_have_no_arguments(monkeypatch):
    monkeypatch.delattr(sys, "argv")
    assert not onelaunch._is_command_line()


def test_publish_completes_the_package(monkeypatch):
    package = types.ModuleType("onelaunch")
    vars(package)["fuse"] = types.ModuleType("onelaunch.fuse")  # as after `import onelaunch.fuse`
    monkeypatch.setitem(sys.modules, "onelaunch", package)
    public.publish()
    assert all(getattr(package, name) is getattr(public, name) for name in public.__all__)
