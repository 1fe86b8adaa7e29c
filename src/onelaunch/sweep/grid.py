"""The candidates of a sweep: every combination of a grid's values, or random draws from it."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from onelaunch.errors import ArgumentTypeError, OnelaunchError, abbreviate, require_integer, suggest
from onelaunch.rng import check_seed
from onelaunch.run.options import Options
from onelaunch.train.argument_names import ELSEWHERE

MAX_MEMBERS = 10_000_000
OPTIONS = tuple(field.name for field in dataclasses.fields(Options))
PAIRS = ("betas",)  # options whose value is itself a sequence of numbers

Candidate = dict[str, Any]  # parameters by name, without the seed


@dataclasses.dataclass(frozen=True)
class Grid:
    """The checked argument `grid`: values or a distribution per name, and the seeds."""

    parts: tuple[dict[str, Any], ...]  # a list of grids is their union
    seeds: tuple[int, ...] | None  # None: the grid does not name any

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.parts for name in part))

    @property
    def size(self) -> int | None:
        """The number of combinations; None if a name has a distribution."""
        if any(_is_distribution(values) for part in self.parts for values in part.values()):
            return None
        return sum(math.prod(len(values) for values in part.values()) for part in self.parts)

    def all(self) -> list[Candidate]:
        """Every combination, the last name varying fastest."""
        if self.size is None:
            raise OnelaunchError("grid has a distribution, which has no end: pass strategy='random' and n=, or a list")
        if self.size > MAX_MEMBERS:
            raise OnelaunchError(f"grid has {self.size:,} combinations: pass fewer values, or strategy='random' and n=")
        return [
            dict(zip(part, values, strict=True)) for part in self.parts for values in itertools.product(*part.values())
        ]

    def draw(self, n: int, seed: int) -> list[Candidate]:
        """`n` random candidates. Combinations of lists are drawn without repetition; all of them if there are not more."""
        if self.size is not None:
            everything = self.all()
            if n >= len(everything):
                return everything
            chosen = np.random.default_rng(seed).permutation(len(everything))[:n]
            return [everything[number] for number in sorted(chosen.tolist())]
        random = np.random.RandomState(seed % 2**32)  # what the distributions of SciPy take
        found = []
        for _ in range(n):
            part = self.parts[random.randint(len(self.parts))]
            found.append({name: _draw_one(values, random) for name, values in part.items()})
        return found


def _is_distribution(values: Any) -> bool:
    return hasattr(values, "rvs")


def _draw_one(values: Any, random: np.random.RandomState) -> Any:
    if _is_distribution(values):
        return _plain(values.rvs(random_state=random))
    return values[random.randint(len(values))]


def _plain(value: Any) -> Any:
    """A NumPy scalar as Python's own number."""
    return value.item() if isinstance(value, np.generic) else value


def make_grid(grid: Any, make_model: Callable[..., nn.Module] | nn.Module) -> Grid:
    """Check `grid` against the options of `fit` and the parameters of `make_model`; raises OnelaunchError for a mistake."""
    parts = list(grid) if isinstance(grid, Sequence) and not isinstance(grid, str) else [grid]
    if not parts or not all(isinstance(part, Mapping) for part in parts):
        raise ArgumentTypeError(
            f"grid={abbreviate(grid)} is not a dict of lists: pass for example {{'lr': [1e-3, 1e-2]}}"
        )
    parameters, takes_any = model_parameters(make_model)
    checked = [{str(name): _values(str(name), values) for name, values in part.items()} for part in parts]
    for name in dict.fromkeys(name for part in checked for name in part):
        if name in parameters and name in OPTIONS and name != "seed":
            raise OnelaunchError(f"grid[{name!r}] is an argument of both fit and make_model: rename make_model's")
        if name not in parameters and name not in OPTIONS and not takes_any:
            raise OnelaunchError(_unknown(name, parameters))
    seeds = {tuple(map(check_seed, part.pop("seed"))) if "seed" in part else None for part in checked}
    if len(seeds) > 1:
        raise OnelaunchError("grid: all of its dicts need the same seeds: name 'seed' in each of them, or in none")
    found = seeds.pop()
    if found is not None and len(set(found)) < len(found):
        raise OnelaunchError(f"grid['seed']={abbreviate(list(found))} repeats a seed: pass different ones")
    return Grid(tuple(checked), found)


def _unknown(name: str, parameters: Sequence[str]) -> str:
    if name in ELSEWHERE:
        return f"grid[{name!r}] is not known: here it is {ELSEWHERE[name]}"
    known = [*OPTIONS, *parameters]
    own = f"make_model's ({', '.join(parameters)})" if parameters else "make_model's parameters, which has none"
    return f"grid[{name!r}] is not known: pass an option of fit or one of {own}{suggest(name, known)}"


def _values(name: str, values: Any) -> Any:
    """The values of one name as a list of plain objects, or a distribution."""
    if _is_distribution(values):
        if name == "seed":
            raise OnelaunchError("grid['seed'] is a distribution: pass the seeds themselves, such as range(8)")
        return values
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ArgumentTypeError(f"grid[{name!r}]={abbreviate(values)} is not a list: pass [{abbreviate(values)}]")
    found = [_plain(value) for value in values]
    if name in PAIRS and len(found) == 2 and not any(hasattr(value, "__len__") for value in found):
        raise OnelaunchError(
            f"grid[{name!r}]={abbreviate(found)} needs a list of pairs: pass [({found[0]}, {found[1]})]"
        )
    if not found:
        raise OnelaunchError(f"grid[{name!r}] is empty: pass at least one value, or leave it out")
    return found


def model_parameters(make_model: Callable[..., nn.Module] | nn.Module) -> tuple[list[str], bool]:
    """The names of make_model's parameters, and whether it takes any name (**kwargs). A module has none."""
    if isinstance(make_model, nn.Module):
        return [], False
    if not callable(make_model):
        raise ArgumentTypeError(
            f"make_model={abbreviate(make_model)} cannot be called: pass a function that returns a model"
        )
    found = inspect.signature(make_model).parameters.values()
    named = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind is p.VAR_KEYWORD for p in found)


def candidates_of(grid: Grid, strategy: str, n: Any, seed: int) -> list[Candidate]:
    """The candidates of a strategy, in a fixed order."""
    if n is not None and (n := require_integer("n", n, "the number of random candidates, 1 or more")) < 1:
        raise OnelaunchError(f"n={n} must be 1 or more")
    if strategy == "grid" and n is not None:
        raise OnelaunchError(f"n={n} is for strategy='random' or 'halving': leave it out, or pass one of them")
    if strategy == "random" and n is None:
        raise OnelaunchError("strategy='random' needs n=, the number of candidates to draw")
    return grid.all() if n is None else grid.draw(n, seed)
