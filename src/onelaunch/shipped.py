"""The configurations and examples that come with the package: beside the sources, or where pip has installed them."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from onelaunch.errors import OnelaunchError, unwritable_reason

FOLDERS = ("configs", "examples")


def shipped_root() -> Path:
    """The folder that holds FOLDERS: a checkout's root, or `share/onelaunch` of the environment."""
    checkout = Path(__file__).resolve().parents[2]
    installed = Path(sysconfig.get_path("data")) / "share" / "onelaunch"
    return next((root for root in (checkout, installed) if (root / FOLDERS[0]).is_dir()), installed)


def shipped_files() -> dict[str, Path]:
    """Every shipped file by its name, such as "configs/default.toml"."""
    root = shipped_root()
    found = (path for folder in FOLDERS for path in sorted((root / folder).glob("*.*")))
    return {path.relative_to(root).as_posix(): path for path in found if path.suffix in (".toml", ".py", ".csv")}


def find_config(path: Path) -> Path:
    """`path`, or the shipped configuration of that name if there is no such file."""
    if path.exists():
        return path
    name = path.name if path.suffix else f"{path.name}.toml"
    return shipped_files().get(f"configs/{name}", path)


def copy_shipped(to: Path) -> list[Path]:
    """Copy every shipped file under `to`; files that exist are left alone and refused before anything is written."""
    targets = {source: to / name for name, source in shipped_files().items()}
    if not targets:
        raise OnelaunchError(f"no examples are installed under {str(shipped_root())!r}: install onelaunch again")
    existing = [str(path) for path in targets.values() if path.exists()]
    if existing:
        raise OnelaunchError(f"out={str(to)!r} already has {existing[0]}: pass another folder")
    try:
        for source, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    except OSError as error:
        raise OnelaunchError(f"out={str(to)!r} {unwritable_reason(error, 'pass a folder')}") from error
    return list(targets.values())
