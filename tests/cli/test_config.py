"""Configuration: file and flags, which win; every mistake in one line."""

from __future__ import annotations

import tomllib

import pytest

from onelaunch.cli.config import TrainConfig, make_config, read_config
from onelaunch.errors import OnelaunchError
from tests.conftest import ROOT


def test_flags_win_over_the_file_over_the_defaults():
    config = make_config({"lr": 0.5, "batch_size": 7}, {"lr": 0.25})
    assert (config.lr, config.batch_size, config.seed) == (0.25, 7, 0)


def test_default_toml_spells_out_the_defaults():
    spelled = read_config(ROOT / "configs" / "default.toml")
    assert make_config(spelled, {}) == TrainConfig()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_config_in_the_repository_is_valid(path):
    make_config(read_config(path), {})


def test_the_classic_runs_are_what_they_say():
    first = make_config(read_config(ROOT / "configs" / "classic-784.toml"), {})
    assert first.layers == [784, 784, 784, 784, 10]
    assert (first.batch_size, first.optimizer, first.lr, first.epochs) == (64, "sgd", 0.1, 10)
    second = make_config(read_config(ROOT / "configs" / "classic-hidden.toml"), {"hidden": [256, 256, 256]})
    assert second.hidden == [256, 256, 256]
    assert (second.batch_size, second.optimizer, second.lr) == (32, "sgd", 0.003)


def test_a_saved_config_reads_back_the_same():
    config = make_config({}, {"steps": 10, "hidden": [3], "betas": [0.5, 0.6]})
    assert make_config(tomllib.loads(config.to_toml()), {}) == config


def test_steps_set_aside_epochs_and_layers_set_aside_hidden():
    assert make_config({"epochs": 3}, {"steps": 5}).epochs is None
    assert make_config({"steps": 3}, {"epochs": 5}).steps is None
    assert make_config({"hidden": [3]}, {"layers": [4, 5]}).layers == [4, 5]
    assert make_config({"layers": [4, 5]}, {"hidden": [3]}).layers is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batchsize": 3}, r"config key 'batchsize' is not known; did you mean 'batch_size'\?"),
        ({"learning_rate": 0.1}, r"config key 'learning_rate' is not known; did you mean 'lr'"),
        ({"LR": 3}, r"config key 'LR' is not known; did you mean 'lr'"),
        ({"activation": "rely"}, r"did you mean 'relu'"),
        ({"dropout": 2.0}, r"dropout=2.0 must be between"),
        ({"zzz": 3}, r"config key 'zzz' is not known: see onelaunch train --help"),
        ({"epochs": "ten"}, r"epochs='ten' has the wrong type: .*integer"),
        ({"hidden": "128"}, r"hidden='128' has the wrong type: .*list"),
        ({"hidden": [1.5]}, r"hidden=\[1.5\] has the wrong type"),
        ({"dropout": "much"}, r"dropout='much' has the wrong type"),
        ({"dropout": [0.0, 0.2]}, r"dropout=.* \(expected float\); lists of values to try are for `onelaunch sweep`$"),
        ({"split_seed": -1}, "split_seed=-1 must be between 0"),
        ({"batch_norm": 1}, r"batch_norm=1 has the wrong type"),
        ({"epochs": 1, "steps": 1}, r"epochs and steps are both given"),
        ({"layers": [1, 2], "hidden": [3]}, r"layers and hidden are both given"),
        ({"batch_size": -4}, r"batch_size=-4 must be 1 or more"),
        ({"optimizer": "sdg"}, r"did you mean 'sgd'"),
        ({"validation": 1.5}, r"validation=1.5 must be a fraction"),
    ],
)
def test_mistakes_are_named(given, message):
    with pytest.raises(OnelaunchError, match=message) as caught:
        make_config(given, {})
    assert "\n" not in str(caught.value)


def test_files_that_are_no_toml(tmp_path):
    path = tmp_path / "config.toml"
    for content in (b"lr = = 3", b"\xff\xfe", b"a=" + b"[" * 3000, b"seed = 1" + b"0" * 5000):
        path.write_bytes(content)
        with pytest.raises(OnelaunchError, match=r"is not TOML: .*; write lines such as lr = 0\.01") as caught:
            read_config(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"\xef\xbb\xbflr = 0.5\n")
    assert read_config(path) == {"lr": 0.5}
    with pytest.raises(OnelaunchError, match="cannot be read"):
        read_config(tmp_path / "none.toml")
