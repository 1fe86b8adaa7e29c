"""The result of a sweep can be pickled; where its functions cannot, it says so when it is asked for a network."""

from __future__ import annotations

import copy
import pickle

import pytest

import onelaunch as ol
from onelaunch.errors import OnelaunchError
from tests.sweep.models import make_model, rows, same_weights

GRID = {"width": [4, 8]}


def test_a_pickled_result_makes_its_networks():
    found = ol.sweep(make_model, *rows(), grid=GRID, folds=2, epochs=1)  # with its progress
    again = pickle.loads(pickle.dumps(found))
    assert str(again.table) == str(found.table)
    assert [each.losses for each in again.histories] == [each.losses for each in found.histories]
    assert same_weights(again.best_model, found.best_model)


def test_a_result_whose_functions_cannot_be_pickled_says_so():
    found = ol.sweep(lambda width: make_model(width), *rows(), grid=GRID, epochs=1, progress=False)
    again = pickle.loads(pickle.dumps(found))
    assert str(again.table) == str(found.table)
    with pytest.raises(OnelaunchError, match=r"^this result was pickled without its networks \(Can't pickle [^\n]*$"):
        again.model(0)
    assert same_weights(copy.deepcopy(found).model(0), found.model(0))
