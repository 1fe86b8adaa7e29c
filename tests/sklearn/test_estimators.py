"""The estimators inside scikit-learn: targets and inputs of every kind, weights, pipelines, searches, pickles, attributes."""

from __future__ import annotations

import pickle

import joblib
import numpy as np
import pandas as pd
import pytest
import sklearn
from scipy import sparse
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, make_multilabel_classification
from sklearn.exceptions import NotFittedError
from sklearn.inspection import permutation_importance
from sklearn.model_selection import GridSearchCV, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from onelaunch.sklearn import MLPClassifier, MLPRegressor

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = {"hidden_layer_sizes": (16,), "max_iter": 20, "learning_rate_init": 0.02, "random_state": 0, "device": "cpu"}
IRIS_X, IRIS_Y = load_iris(return_X_y=True)
IRIS_NAMES = load_iris().target_names[IRIS_Y]


@pytest.fixture(scope="module")
def fitted() -> MLPClassifier:
    return MLPClassifier(**QUICK).fit(IRIS_X, IRIS_NAMES)


def test_string_labels_and_probabilities(fitted):
    assert fitted.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert fitted.score(IRIS_X, IRIS_NAMES) > 0.9
    probabilities = fitted.predict_proba(IRIS_X)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    np.testing.assert_array_equal(fitted.classes_[probabilities.argmax(axis=1)], fitted.predict(IRIS_X))
    np.testing.assert_allclose(fitted.predict_log_proba(IRIS_X), np.log(probabilities))


def test_attributes_of_scikit_learns_class(fitted):
    assert [weight.shape for weight in fitted.coefs_] == [(4, 16), (16, 3)]
    assert [bias.shape for bias in fitted.intercepts_] == [(16,), (3,)]
    assert (fitted.n_layers_, fitted.n_outputs_, fitted.out_activation_) == (3, 3, "softmax")
    assert (fitted.n_iter_, fitted.n_features_in_, fitted.t_ % fitted.n_iter_) == (20, 4, 0)
    assert len(fitted.loss_curve_) == 20
    assert fitted.loss_ == fitted.loss_curve_[-1]
    assert fitted.best_loss_ == min(fitted.loss_curve_)
    assert fitted.validation_scores_ is None
    assert isinstance(fitted.model_, nn.Sequential)
    frame = pd.DataFrame(IRIS_X, columns=list("abcd"))
    assert MLPClassifier(**QUICK).fit(frame, IRIS_Y).feature_names_in_.tolist() == list("abcd")


@pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor])
@pytest.mark.parametrize(("values", "message"), [
    (["Oslo", "Rome", "Oslo"], "could not convert string to float: 'Oslo'"),
    ([1.0, np.nan, 2.0], "Input X contains NaN."),
    (pd.array([1, None, 2], "Int64").astype(object), "float() argument must be"),
])  # fmt: skip
def test_text_and_missing_values_name_the_table_encoder(kind, values, message):
    frame = pd.DataFrame({"age": [1, 2, 3], "other": values})
    with pytest.raises((ValueError, TypeError)) as caught:
        kind(**QUICK).fit(frame, [0, 1, 1])
    first, *_, last = str(caught.value).split("\n")
    assert first.startswith(message)
    assert last == (
        "TableEncoder of onelaunch.sklearn takes a DataFrame with text and missing values: "
        f"make_pipeline(TableEncoder(), {kind.__name__}(scale=None))"
    )
    with pytest.raises((ValueError, TypeError), match="TableEncoder"):
        kind(**QUICK).fit(frame[["age", "age"]].set_axis(["age", "other"], axis=1), [0, 1, 1]).predict(frame)


@pytest.mark.parametrize(("x", "y"), [([[1.0], [2.0]], ["a", "b"]), ([[1.0], [2.0]], [1.0, np.nan]),
                                      ([[1.0], [np.inf]], [1.0, 2.0])])  # fmt: skip
def test_other_mistakes_do_not_name_the_table_encoder(x, y):
    with pytest.raises(ValueError) as caught:
        MLPRegressor(**QUICK).fit(x, y)
    assert "TableEncoder" not in str(caught.value)


def test_every_parameter_of_scikit_learn_that_is_promised():
    ours = set(MLPClassifier().get_params())
    assert {
        "hidden_layer_sizes", "activation", "alpha", "batch_size", "learning_rate_init", "max_iter", "early_stopping",
        "validation_fraction", "n_iter_no_change", "tol", "random_state", "warm_start", "verbose", "solver", "learning_rate",
        "shuffle", "momentum", "nesterovs_momentum", "beta_1", "beta_2", "epsilon",
    } <= ours & set(sklearn.neural_network.MLPClassifier().get_params())  # fmt: skip
    assert {"dropout", "batch_norm", "layer_norm", "schedule", "optimizer", "precision", "engine", "device"} <= ours
    assert ours - set(MLPRegressor().get_params()) == {"class_weight", "label_smoothing"}


@pytest.mark.filterwarnings("ignore:training ended after max_iter:sklearn.exceptions.ConvergenceWarning")
def test_solvers_of_scikit_learn():
    """What they mean is what `optimizer` and `schedule` mean."""
    sgd, constant = {"solver": "sgd", "learning_rate": "constant"}, {"optimizer": "sgd", "schedule": "constant"}
    for theirs, ours in (({"solver": "adam"}, {"optimizer": "adam"}), (sgd, constant)):
        one, other = (MLPClassifier(**QUICK, **given).fit(IRIS_X, IRIS_Y) for given in (theirs, ours))
        assert one.loss_curve_ == other.loss_curve_
    sgd = {"solver": "sgd", "momentum": 0.5, "nesterovs_momentum": False}
    plain, heavy = (MLPRegressor(**QUICK, **sgd | more) for more in ({"momentum": 0.0}, {}))
    assert plain._optimizer_options() == {"optimizer": "sgd", "momentum": 0.0, "nesterov": False}
    assert plain.fit(IRIS_X, IRIS_Y).loss_curve_ != heavy.fit(IRIS_X, IRIS_Y).loss_curve_
    adam = MLPRegressor(solver="adam", beta_1=0.8, epsilon=1e-7)
    assert adam._optimizer_options() == {"optimizer": "adam", "betas": (0.8, 0.95), "eps": 1e-7}


def test_the_same_seed_gives_the_same_bits_in_any_order_of_the_rows(fitted):
    order = np.random.default_rng(0).permutation(len(IRIS_X))
    again = clone(fitted).fit(IRIS_X[order], IRIS_NAMES[order])
    np.testing.assert_array_equal(again.predict_proba(IRIS_X), fitted.predict_proba(IRIS_X))
    other = clone(fitted).set_params(random_state=1).fit(IRIS_X, IRIS_NAMES)
    assert not np.array_equal(other.predict_proba(IRIS_X), fitted.predict_proba(IRIS_X))


def test_features_of_any_scale_are_learned(fitted):
    stretched = IRIS_X * [1e6, 1e-6, 1, 1e3] + [1e8, 0, -5, 0]
    again = clone(fitted).fit(stretched, IRIS_NAMES)
    np.testing.assert_allclose(again.predict_proba(stretched), fitted.predict_proba(IRIS_X), atol=1e-3)
    unscaled = clone(fitted).set_params(scale=None, max_iter=3).fit(IRIS_X, IRIS_Y)
    assert unscaled.score(IRIS_X, IRIS_Y) > 0.3


def test_multilabel_targets():
    x, y = make_multilabel_classification(200, n_classes=4, random_state=0)
    model = MLPClassifier(**QUICK).fit(x, y)
    assert model.predict(x).shape == model.predict_proba(x).shape == (200, 4)
    assert (model.predict(x) == y).mean() > 0.75
    assert model.out_activation_ == "logistic"


def test_regression_with_one_and_with_several_targets():
    x, y = load_diabetes(return_X_y=True)
    model = MLPRegressor(**QUICK).fit(x, 1e6 * y)
    assert model.predict(x).shape == (442,)
    assert model.score(x, 1e6 * y) > 0.4
    both = MLPRegressor(**QUICK).fit(x, np.stack([y, -1e-3 * y], 1))
    assert both.predict(x).shape == (442, 2)
    assert both.score(x, np.stack([y, -1e-3 * y], 1)) > 0.4
    assert MLPRegressor(**QUICK, scale=None, scale_target=False).fit(x, y / 100).score(x, y / 100) > 0.2


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("targets", [1, 2])
def test_targets_are_standardised_whatever_the_features_are(weighted, targets):
    x, y = load_diabetes(return_X_y=True)
    x = 20 * x  # around 1
    y = np.stack([1e4 + 1e3 * y, 1e-3 * y], 1)[:, :targets]
    weight = np.linspace(0.1, 2, len(y)) if weighted else None
    scaled = MLPRegressor(**QUICK, scale=None).fit(x, y[:, 0] if targets == 1 else y, weight)
    assert scaled._scaling is None
    assert scaled.score(x, y) > 0.4
    plain = clone(scaled).set_params(scale="robust", scale_target=False).fit(x, y[:, 0] if targets == 1 else y)
    assert plain._scaling is not None
    assert plain.score(x, y) < 0  # the targets are far from 0


@pytest.mark.parametrize("scale_target", [False, True])
def test_a_constant_target_is_learned(scale_target):
    model = MLPRegressor(**QUICK, scale_target=scale_target).fit(IRIS_X, np.full(len(IRIS_X), 0.5))
    np.testing.assert_allclose(model.predict(IRIS_X), 0.5, atol=0.2)


@pytest.mark.parametrize("scale", [None, "robust"])
def test_a_regressor_that_was_saved_without_scale_target_is_read(scale):
    model = MLPRegressor(**QUICK, scale=scale, scale_target=scale is not None).fit(IRIS_X, IRIS_Y)
    state = {name: value for name, value in vars(model).items() if name != "scale_target"}
    again = MLPRegressor.__new__(MLPRegressor)
    again.__setstate__(state)
    assert again.get_params() == model.get_params()
    np.testing.assert_array_equal(again.predict(IRIS_X), model.predict(IRIS_X))


@pytest.mark.parametrize("kind", ["csr", "frame", "polars", "float32", "list"])
def test_inputs_of_every_kind(fitted, kind):
    x: object = IRIS_X
    if kind == "csr":
        x = sparse.csr_array(IRIS_X)
    elif kind == "frame":
        x = pd.DataFrame(IRIS_X)
    elif kind == "polars":
        x = pytest.importorskip("polars").DataFrame(IRIS_X)
    elif kind == "float32":
        x = IRIS_X.astype(np.float32)
    else:
        x = IRIS_X.tolist()
    again = clone(fitted).fit(x, IRIS_NAMES)
    np.testing.assert_allclose(again.predict_proba(x), fitted.predict_proba(IRIS_X), atol=1e-4)


def test_pickle_joblib_and_clone(fitted, tmp_path):
    expected = fitted.predict_proba(IRIS_X)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict_proba(IRIS_X), expected)
    joblib.dump(fitted, tmp_path / "model.joblib")
    np.testing.assert_array_equal(joblib.load(tmp_path / "model.joblib").predict_proba(IRIS_X), expected)
    with pytest.raises(NotFittedError):
        clone(fitted).predict(IRIS_X)


def test_inside_pipelines_searches_and_calibration(fitted):
    pipeline = make_pipeline(StandardScaler(), clone(fitted))
    assert cross_val_score(pipeline, IRIS_X, IRIS_Y, cv=3).mean() > 0.85
    search = GridSearchCV(clone(fitted), {"alpha": [0.0, 0.1]}, cv=2).fit(IRIS_X, IRIS_Y)
    assert search.best_score_ > 0.85
    calibrated = CalibratedClassifierCV(clone(fitted), cv=2).fit(IRIS_X, IRIS_Y)
    assert calibrated.score(IRIS_X, IRIS_Y) > 0.85
    importance = permutation_importance(fitted, IRIS_X, IRIS_NAMES, n_repeats=2, random_state=0).importances_mean
    assert importance[2:].max() > importance[:2].max()


def test_weights_are_routed():
    weight = np.where(IRIS_Y == 2, 0.0, 1.0)
    with sklearn.config_context(enable_metadata_routing=True):
        model = MLPClassifier(**QUICK).set_fit_request(sample_weight=True).set_score_request(sample_weight=False)
        found = cross_validate(
            model, IRIS_X, IRIS_Y, cv=2, params={"sample_weight": weight}, return_estimator=True, error_score="raise"
        )
    predicted = [estimator.predict(IRIS_X) for estimator in found["estimator"]]
    assert not any((labels == 2).any() for labels in predicted), "rows of weight 0 were learned"


@pytest.mark.parametrize("engine", ["eager", "cpu"])
def test_an_integer_weight_is_a_repeated_row(engine):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(40, 3)), random.normal(size=40)
    weight = random.integers(0, 4, 40)
    model = MLPRegressor(**QUICK, engine=engine)
    weighted = clone(model).fit(x, y, sample_weight=weight)
    repeated = clone(model).fit(x.repeat(weight, axis=0), y.repeat(weight))
    np.testing.assert_array_equal(weighted.predict(x), repeated.predict(x))
    with pytest.raises(ValueError, match=r"at least one non-zero|no value above 0"):
        clone(model).fit(x, y, sample_weight=np.zeros(40))


def test_class_weights_move_the_decision():
    x, y = load_breast_cancer(return_X_y=True)
    x = x[:, :2]
    rare = {weight: MLPClassifier(**QUICK, class_weight={0: weight}).fit(x, y).predict(x).mean() for weight in (1, 100)}
    assert rare[100] < rare[1] - 0.1
    balanced = MLPClassifier(**QUICK, class_weight="balanced").fit(x, y)
    assert balanced.score(x, y) > 0.8


def test_several_networks_average_their_probabilities(fitted):
    models = clone(fitted).set_params(n_estimators=3).fit(IRIS_X, IRIS_NAMES)
    assert len(models.models_) == 3
    np.testing.assert_array_equal(models.model_[1].weight.detach(), fitted.model_[1].weight.detach())
    assert not np.array_equal(models.models_[1][1].weight.detach(), models.models_[0][1].weight.detach())
    assert models.score(IRIS_X, IRIS_NAMES) > 0.9


def test_partial_fit_and_warm_start():
    model = MLPClassifier(**QUICK)
    with pytest.raises(ValueError, match="classes must be passed"):
        model.partial_fit(IRIS_X[:50], IRIS_Y[:50])
    for epoch in range(30):
        part = np.random.default_rng(epoch).permutation(150)[:100]
        model.partial_fit(IRIS_X[part], IRIS_Y[part], classes=[0, 1, 2])
    assert model.n_iter_ == 30
    assert model.score(IRIS_X, IRIS_Y) > 0.8
    with pytest.raises(ValueError, match="not the same as on the last call"):
        model.partial_fit(IRIS_X, IRIS_Y, classes=[0, 1])
    warm = MLPClassifier(**QUICK, warm_start=True).fit(IRIS_X, IRIS_Y)
    first = warm.loss_
    assert warm.fit(IRIS_X, IRIS_Y).loss_ < first
    assert warm.n_iter_ == 40
    with pytest.raises(ValueError, match="not those of the fitted estimator"):
        warm.fit(IRIS_X[:100], IRIS_Y[:100])


def test_the_rate_of_partial_fit_is_constant_unless_a_schedule_is_given():
    def last_rate(**given):
        model = MLPClassifier(batch_size=50, learning_rate_init=0.3, device="cpu", engine="eager", **given)
        return model.partial_fit(IRIS_X, IRIS_Y, classes=[0, 1, 2]).history_.epochs[-1]["lr"]

    assert last_rate() == last_rate(learning_rate="constant") == 0.3
    assert last_rate(schedule="linear") == pytest.approx(0.1)
    assert last_rate(schedule="one_cycle") == pytest.approx(0.3 / 4)  # of three steps
    options = MLPClassifier(batch_size=50)._options(150, "cross_entropy", None)
    assert options["schedule"] == "one_cycle"


@pytest.mark.parametrize("rows", [32, 44])
def test_partial_fit_learns_from_batches_as_that_of_scikit_learn(rows):
    """A batch is one step or two, and the last one has 5 or 37 of 1,797 rows."""
    x, y = load_digits(return_X_y=True)
    ours = MLPClassifier(random_state=0, device="cpu")
    theirs = sklearn.neural_network.MLPClassifier(random_state=0)
    for epoch in range(5):
        order = np.random.default_rng(epoch).permutation(len(x))
        for batch in np.split(order, range(rows, len(x), rows)):
            for model in (ours, theirs):
                model.partial_fit(x[batch], y[batch], classes=range(10))
    assert ours.score(x, y) > theirs.score(x, y) - 0.02


def test_early_stopping_holds_rows_out_and_keeps_the_best_epoch():
    x, y = load_breast_cancer(return_X_y=True)
    options = QUICK | {"max_iter": 200, "schedule": "constant"}
    model = MLPClassifier(**options, early_stopping=True, n_iter_no_change=5).fit(x, y)
    assert model.n_iter_ < 200
    assert len(model.validation_scores_) == model.n_iter_
    assert model.best_validation_score_ == max(model.validation_scores_)
    assert model.best_loss_ is None
    assert model.score(x, y) > 0.9


@pytest.mark.parametrize(
    "parameters", [{"batch_norm": True, "batch_size": 149}, {"layer_norm": True}, {"dropout": 0.5}]
)
def test_networks_with_norms_and_dropout(parameters):
    model = MLPClassifier(**(QUICK | {"max_iter": 40}), **parameters).fit(IRIS_X, IRIS_Y)
    assert model.score(IRIS_X, IRIS_Y) > 0.8


@pytest.mark.parametrize("activation", ["logistic", "identity", "tanh", "mish"])
def test_activations(activation):
    assert MLPClassifier(**(QUICK | {"activation": activation})).fit(IRIS_X, IRIS_Y).score(IRIS_X, IRIS_Y) > 0.6


def test_a_single_class_is_predicted_with_a_warning(caplog):
    model = MLPClassifier(**QUICK).fit(IRIS_X, np.full(len(IRIS_X), "only"))
    assert caplog.messages[0] == "y has 1 class, 'only', which will be predicted for every row"
    assert set(model.predict(IRIS_X)) == {"only"}
    np.testing.assert_array_equal(model.predict_proba(IRIS_X), 1)
