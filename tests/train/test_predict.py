"""`ol.predict`: the preprocessing of `fit`, and outputs turned into what y was."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import onelaunch as ol
from tests.reference import problem

pytestmark = pytest.mark.usefixtures("one_thread")


def network(outputs: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, outputs))


def fitted(y, loss="cross_entropy", outputs=4, x=None):
    model = network(outputs)
    rows = problem("cross_entropy")[0] if x is None else x
    ol.fit(model, rows, y, epochs=2, loss=loss, engine="eager", progress=False)
    return model, rows


def test_classes_and_probabilities():
    model, x = fitted(problem("cross_entropy")[1])
    found, probabilities = ol.predict(model, x), ol.predict(model, x, probabilities=True)
    assert model.training  # as before
    with torch.no_grad():
        outputs = model.eval()(x)
    assert np.array_equal(found, outputs.argmax(1).numpy())
    np.testing.assert_allclose(probabilities, outputs.softmax(1).numpy(), rtol=1e-5, atol=1e-6)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert np.array_equal(ol.predict(other, x.tolist(), batch_size=7), found)


def test_names_come_back_as_names():
    _, y = problem("cross_entropy")
    names = np.array(["ant", "bee", "cat", "dog"])[y.numpy()]
    for given in (names, names.tolist(), names.astype(object)):
        model, x = fitted(given)
        number, _ = fitted(y)
        assert np.array_equal(ol.predict(model, x), np.array(["ant", "bee", "cat", "dog"])[ol.predict(number, x)])


def test_one_hot_rows_are_classes():
    _, y = problem("cross_entropy")
    for given in (nn.functional.one_hot(y, 4), nn.functional.one_hot(y, 4).float().numpy()):
        model, x = fitted(given)
        assert np.array_equal(ol.predict(model, x), ol.predict(fitted(y)[0], x))


@pytest.mark.parametrize("flat", [True, False])
def test_values_and_binary_targets_keep_the_shape_of_y(flat):
    x, y = problem("mse", outputs=1)
    y = y.flatten() if flat else y
    model, x = fitted(y, "mse", 1, x)
    assert ol.predict(model, x).shape == tuple(y.shape)
    with pytest.raises(ol.OnelaunchError, match="trained with loss='mse' has none"):
        ol.predict(model, x, probabilities=True)
    model, x = fitted((y > 0).float(), "bce_with_logits", 1, x)
    assert set(np.unique(ol.predict(model, x))) <= {0, 1}
    chance = ol.predict(model, x, probabilities=True)
    assert chance.shape == tuple(y.shape)
    assert np.array_equal(chance > 0.5, ol.predict(model, x).astype(bool))
    model, x = fitted(np.array(["no", "yes"])[(y.flatten() > 0).int().numpy()], "bce_with_logits", 1, x)
    assert set(ol.predict(model, x)) <= {"no", "yes"}


def test_uint8_rows_mean_value_over_255():
    x = torch.randint(256, (150, 7), dtype=torch.uint8)
    model, _ = fitted(problem("cross_entropy")[1], x=x)
    expected = ol.predict(model, x, probabilities=True)
    np.testing.assert_allclose(ol.predict(model, x.float() / 255, probabilities=True), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ol.OnelaunchError, match=r"values up to 25\d, but the model was trained on uint8 rows"):
        ol.predict(model, x.float())


def test_integer_rows_are_floats_as_in_fit():
    torch.manual_seed(0)
    x = np.random.default_rng(0).integers(0, 3, (60, 4))
    model = nn.Linear(4, 2)
    ol.fit(model, x, x[:, 0] % 2, epochs=1, progress=False)
    expected = ol.predict(model, x.astype(np.float32))
    for dtype in (np.int64, np.int32, bool):
        assert np.array_equal(ol.predict(model, x.astype(dtype)), ol.predict(model, x.astype(dtype).astype(np.float32)))
    assert np.array_equal(ol.predict(model, x), expected)


def test_uint8_rows_are_refused_where_floats_up_to_255_were_trained():
    x = np.random.default_rng(0).integers(0, 256, (60, 4)).astype(np.uint8)
    model = nn.Linear(4, 2)
    ol.fit(model, x.astype(np.float32), x[:, 0] // 128, epochs=1, progress=False)
    with pytest.raises(ol.OnelaunchError, match=r"x is uint8, which means value / 255, .* up to 25\d: pass x.astype"):
        ol.predict(model, x)
    ol.fit(model, x / np.float32(255), x[:, 0] // 128, epochs=1, progress=False)
    ol.predict(model, x)  # the same values


def test_a_model_that_was_not_fitted_gives_its_outputs():
    model = nn.Linear(7, 3)
    x = torch.randn(5, 7)
    np.testing.assert_allclose(ol.predict(model, x), model(x).detach().numpy())
    np.testing.assert_allclose(ol.predict(model, x, probabilities=True).sum(1), np.ones(5), rtol=1e-6)
    two = nn.Bilinear(3, 4, 2)
    assert ol.predict(two, (torch.randn(6, 3), torch.randn(6, 4))).shape == (6, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"x": torch.randn(5, 6)},
            r"model cannot take x with rows of shape \(6,\): its first Linear takes 7 values per row",
        ),
        ({"x": torch.empty(0, 7)}, r"x is empty"),
        ({"batch_size": 0}, r"batch_size=0 must be 1 or more"),
        ({"batch_size": "a"}, r"batch_size='a' is not an integer"),
        ({"probabilities": 1}, r"probabilities=1 must be True or False"),
        ({"proba": True}, r"predict has no argument 'proba': here it is probabilities=True"),
        ({"model": 3}, r"model=3 is not an nn.Module"),
        ({"x": (torch.randn(5, 7), torch.randn(4, 7))}, r"x has inputs of 5, 4 rows"),
    ],
)
def test_mistakes_get_one_line(arguments, message):
    given = {"model": nn.Linear(7, 3), "x": torch.randn(5, 7), **arguments}
    with pytest.raises(ol.OnelaunchError, match=message) as caught:
        ol.predict(given.pop("model"), given.pop("x"), **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_refused_as_in_fit(value):
    x = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    model = nn.Linear(3, 2)
    ol.fit(model, x, np.arange(20) % 2, epochs=1, progress=False)
    x[7, 1] = value
    with pytest.raises(ol.OnelaunchError, match=r"x holds NaN or Inf \(first in row 7\)"):
        ol.predict(model, x)
    assert np.isnan(ol.predict(nn.Linear(3, 2), x * np.nan)).all()  # another model may take them
