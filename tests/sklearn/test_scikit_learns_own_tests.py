"""scikit-learn's tests of its own MLPs, run on ours: the source of its test module with the import exchanged.

`DIFFERENCES` has the tests that ask for something that our estimators do otherwise, with the reason. docs/tables.md lists
them for users.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

THEIRS = "from sklearn.neural_network import MLPClassifier, MLPRegressor"
OURS = "from onelaunch.sklearn import MLPClassifier, MLPRegressor"
SEED = 42  # of scikit-learn's fixture `global_random_seed`, by default
TESTS_OF = "sklearn.neural_network.tests.test_mlp"

DIFFERENCES = {  # by the name of the test, with its parameters where not all of them differ
    "test_fit": "sets private attributes of scikit-learn's implementation, and assigns coefs_",
    "test_gradient": "calls the private method _loss_grad_lbfgs",
    "test_lbfgs_classification_maxfun[X1-y1]": "on scaled rows L-BFGS converges in 10 losses, with no limit to warn of",
    "test_multilabel_classification": "the loss is the mean over the labels, not their sum: 100 calls are too few",
    "test_partial_fit_regression": "fit has a one-cycle schedule by default, partial_fit a constant rate",
    "test_nonfinite_params": "features of any size are scaled, so training succeeds",
    "test_early_stopping_stratified": "a class of one row is accepted",
    "test_mlp_loading_from_joblib_partial_fit": "dropout, and an optimizer that starts afresh, leave an error above 1e-4",
    "test_mlp_diverging_loss": "a run that diverges raises DivergedError instead of scoring NaN",
    "test_mlp_vs_poisson_glm_equivalent": "MLPRegressor has no loss='poisson'",
    "test_minimum_input_sample_size": "one held-out row is accepted",
}

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def load_their_tests() -> types.ModuleType:
    """scikit-learn's test module with our estimators in place of its own."""
    found = importlib.util.find_spec(TESTS_OF)
    if found is None or found.origin is None:
        pytest.skip("this scikit-learn comes without its tests", allow_module_level=True)
    source = Path(found.origin).read_text(encoding="utf-8")
    assert THEIRS in source, "scikit-learn's tests import their estimators in another way now"
    module = types.ModuleType("scikit_learns_tests_of_mlps")
    exec(compile(source.replace(THEIRS, OURS), found.origin, "exec"), module.__dict__)
    return module


THEIR_TESTS = {name: test for name, test in vars(load_their_tests()).items() if name.startswith("test_")}
globals().update(THEIR_TESTS)  # pytest collects them here, with the parameters that scikit-learn gives them


@pytest.fixture
def global_random_seed() -> int:
    return SEED


@pytest.fixture(autouse=True)
def _same_numbers_in_every_run() -> Iterator[None]:
    """Many of the tests pass no random_state: their estimators draw from NumPy's global generator."""
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(SEED)  # noqa: NPY002
    yield
    np.random.set_state(before)  # noqa: NPY002


@pytest.fixture(autouse=True)
def _known_difference(request: pytest.FixtureRequest) -> None:
    reason = DIFFERENCES.get(request.node.name) or DIFFERENCES.get(request.node.originalname)
    if reason:
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))


def test_every_difference_is_one_of_their_tests():
    assert {name.split("[")[0] for name in DIFFERENCES} <= set(THEIR_TESTS)
