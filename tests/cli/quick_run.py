"""A quick run of `onelaunch train`, and what it leaves in its folder."""

from __future__ import annotations

from pathlib import Path

QUICK = ("--hidden", "16", "--epochs", "3", "--schedule", "constant", "--lr", "0.01")
FILES = [
    "checkpoint.safetensors",
    "config.toml",
    "curves.png",
    "metrics.jsonl",
    "model.safetensors",
    "predictions.json",
    "report.html",
    "run.json",
]


def visible(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
