"""A user's mistake raises one line that names the argument, the value and the remedy, and leaves the model unchanged."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import nn

import onelaunch as ol
from onelaunch.engines.cpu.plan import target

pytestmark = pytest.mark.usefixtures("one_thread")

X, Y = torch.randn(20, 7), torch.arange(20) % 4
FLOAT_Y = torch.randn(20, 4)
MODEL = nn.Sequential(nn.Linear(7, 4))
NORMALISED = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4))
HOLED = X.clone()
HOLED[3, 2] = torch.nan

MISTAKES = {
    "neither epochs nor steps": ({"epochs": None}, r"pass epochs= or steps="),
    "both epochs and steps": ({"steps": 3}, r"pass epochs= or steps="),
    "negative epochs": ({"epochs": -1}, r"epochs=-1 must be 1 or more"),
    "float epochs": ({"epochs": 1.5}, r"epochs=1.5 is not an integer"),
    "no batch": ({"batch_size": 0}, r"batch_size=0 must be 1 or more"),
    "no batch size": ({"batch_size": None}, r"batch_size=None is not an integer"),
    "no flag": ({"drop_last": "no"}, r"^drop_last='no' must be True or False"),
    "boolean batch": ({"batch_size": True}, r"batch_size=True is not an integer"),
    "nearest optimizer": ({"optimizer": "adamm"}, r"optimizer='adamm' .*did you mean 'adam'"),
    "unknown loss": ({"loss": "hinge"}, r"loss='hinge' is not known: pass one of 'cross_entropy'"),
    "unknown schedule": ({"schedule": "step"}, r"schedule='step' is not known"),
    "unknown engine": ({"engine": "gpu"}, r"engine='gpu' is not known"),
    "unknown precision": ({"precision": "int8"}, r"precision='int8' is not known"),
    "negative lr": ({"lr": -0.1}, r"lr=-0.1 must be a finite number"),
    "nan lr": ({"lr": float("nan")}, r"lr=nan must be a finite number"),
    "text lr": ({"lr": "0.1"}, r"lr='0.1' is not a number"),
    "momentum of one": ({"momentum": 1.0}, r"momentum=1.0 must be .* below 1"),
    "momentum with adam": ({"optimizer": "adam", "momentum": 0.9}, r"momentum=0.9 belongs to optimizer='sgd'"),
    "nesterov alone": ({"nesterov": True, "optimizer": "sgd"}, r"nesterov=True needs momentum"),
    "three betas": ({"betas": (0.9, 0.9, 0.9)}, r"betas=.* must be two numbers"),
    "smoothing above one": ({"label_smoothing": 1.1}, r"label_smoothing=1.1 must be"),
    "smoothing of mse": ({"label_smoothing": 0.1, "loss": "mse", "y": FLOAT_Y}, r"label_smoothing=0.1 needs"),
    "seed": ({"seed": -1}, r"seed=-1 is out of range"),
    "text seed": ({"seed": "1"}, r"seed='1' is not an integer"),
    "lengths": ({"y": Y[:-1]}, r"x has 20 rows and y has 19"),
    "empty": ({"x": X[:0], "y": Y[:0]}, r"x is empty"),
    "label above": ({"y": Y + 1}, r"y\[3\]=4 is not a class of this model: its 4 outputs take 0 to 3"),
    "label below": ({"y": Y - 1}, r"y\[0\]=-1 is not a class"),
    "float labels": ({"y": Y.float()}, r"y is torch.float32.*pass y.astype\(int\), or loss='mse'"),
    "soft labels": ({"y": torch.full((20, 4), 0.25)}, r"y has 4 values per row, and row 0 is not one-hot: pass class numbers"),
    "two classes per row": ({"y": torch.ones(20, 3, dtype=torch.int64)}, r"y has shape \[20, 3\].*one class per row"),
    "more names than outputs": ({"y": list("abcdeabcdeabcdeabcde")}, r"y has 5 classes \(a, b, c, d, e\), the model 4 outputs"),
    "names and numbers": ({"y": np.array(["a", 1] * 10, dtype=object)}, r"y holds 1: pass class names alone, or numbers alone"),
    "names for mse": ({"y": ["a", "b"] * 10, "loss": "mse"}, r"y holds class names, which loss='mse' does not take"),
    "unknown validation name": (
        {"y": ["cat", "dog"] * 10, "validation": (X, ["cat", "dgo"] * 10)},
        r"validation\[1\]\[1\]='dgo' is not a class of y, which has cat, dog; did you mean 'dog'\?",
    ),
    "names for training only": (
        {"y": ["cat", "dog"] * 10, "validation": (X, Y % 2)}, r"validation\[1\] and y must both hold class names",
    ),
    "validation fraction": ({"validation": 1.5}, r"validation=1.5 must be a fraction between 0 and 1, or a pair"),
    "class_weight kind": ({"class_weight": 3}, r"class_weight=3 is not known: pass 'balanced'"),
    "class_weight name": ({"class_weight": "balance"}, r"class_weight='balance' is not known.*did you mean 'balanced'"),
    "class_weight class": ({"class_weight": {7: 1.0}}, r"class_weight names '7', which is not a class here"),
    "class_weight value": ({"class_weight": {0: -1.0}}, r"class_weight\[0\]=-1.0 must be a finite number"),
    "class_weight short": (
        {"class_weight": [1.0, 2.0]},
        r"class_weight has length 2 for 4 classes: pass one weight per class",
    ),
    "class_weight short tuple": ({"class_weight": (1.0,)}, r"class_weight has length 1 for 4 classes"),
    "class_weight short array": ({"class_weight": np.ones(3)}, r"class_weight has length 3 for 4 classes"),
    "class_weight long tensor": ({"class_weight": torch.ones(5)}, r"class_weight has length 5 for 4 classes"),
    "class_weight by name": (
        {"y": ["cat", "dog"] * 10, "class_weight": [1.0, 2.0]},
        r"class_weight is a list, but y has class names: pass a dict such as {'cat': 1}",
    ),
    "class_weight square": ({"class_weight": np.ones((4, 4))}, r"class_weight=array.* is not known: pass 'balanced'"),
    "class_weight nested": ({"class_weight": [[1.0], 1, 1, 1]}, r"class_weight\[0\]=\[1.0\] is not a number"),
    "class_weight of vectors": ({"class_weight": {0: np.ones(2)}}, r"class_weight\[0\]=array.* is not a number"),
    "class_weight set": ({"class_weight": {1.0, 2.0, 3.0, 4.0}}, r"class_weight={.* is not known: pass 'balanced'"),
    "class_weight empty": ({"class_weight": {}}, r"class_weight is empty: pass the weight of a class"),
    "class_weight zero": ({"class_weight": [0, 0, 0, 0]}, r"class_weight is 0 for every class"),
    "class_weight of mse": ({"class_weight": "balanced", "loss": "mse", "y": FLOAT_Y}, r"class_weight needs classes"),
    "sample_weight length": ({"sample_weight": [1.0, 2.0]}, r"sample_weight has shape \[2\]: pass one weight per row, 20"),
    "sample_weight sign": ({"sample_weight": -torch.ones(20)}, r"sample_weight\[0\]=-1.0 must be a finite number, 0 or more"),
    "sample_weight zero": ({"sample_weight": torch.zeros(20)}, r"leave no training row with a weight above 0"),
    "clip_norm zero": ({"clip_norm": 0}, r"clip_norm=0 would remove every gradient"),
    "clip_norm kind": ({"clip_norm": "1"}, r"clip_norm='1' is not a number"),
    "metrics without validation": ({"metrics": ("f1",)}, r"metrics needs validation rows: pass validation=0.1"),
    "metrics as text": ({"metrics": "f1"}, r"metrics='f1' is not a tuple: pass for example"),
    "metrics name": ({"metrics": ("recal",), "validation": 0.2}, r"metrics='recal' is not known: .*mean 'recall'"),
    "metrics of values": ({"metrics": ("r2",), "validation": 0.2}, r"metrics='r2' is for values to regress, not for loss="),
    "early_stopping alone": ({"early_stopping": 3}, r"early_stopping needs validation rows"),
    "early_stopping kind": ({"early_stopping": True}, r"early_stopping=True is not a number of epochs: pass 5"),
    "early_stopping zero": ({"early_stopping": 0}, r"early_stopping.patience=0 must be 1 or more"),
    "callbacks kind": ({"callbacks": print}, r"callbacks=.*is not a list"),
    "callbacks entry": ({"callbacks": [3]}, r"callbacks has 3, which cannot be called"),
    "argument of Keras": ({"validation_split": 0.1}, r"fit has no argument 'validation_split': here it is validation=0.1"),
    "misspelt argument": ({"batchsize": 2}, r"fit has no argument 'batchsize'; did you mean 'batch_size'\?"),
    "unknown argument": ({"xyzzy": 2}, r"fit has no argument 'xyzzy': it has model, x, y, epochs"),
    "NaN in x": ({"x": HOLED}, r"x holds NaN or Inf \(first in row 3\)"),
    "NaN in y": ({"y": FLOAT_Y * torch.nan, "loss": "mse"}, r"y holds NaN or Inf \(first in row 0\)"),
    "y beyond float32": (
        {"y": FLOAT_Y.double().abs() + 1e300, "loss": "mse"},
        r"y has the value 1e\+300 in row 0, too large for torch.float32: scale it down",
    ),
    "bce range": ({"y": FLOAT_Y * 9, "loss": "bce_with_logits"}, r"y must be in \[0, 1\]"),
    "target width": ({"y": FLOAT_Y[:, :3], "loss": "mse"}, r"y has 3 values per row, the model's output has 4"),
    "features": ({"x": X[:, :5]}, r"x has 5 values per row, the model's first Linear takes 7"),
    "images without Flatten": ({"x": torch.randn(20, 7, 7)}, r"put nn.Flatten\(\) first"),
    "words": ({"x": np.array([["a"] * 7] * 20)}, r"x has dtype <U1: pass numbers"),
    "no rows": ({"x": None}, r"x is None: pass one row per sample"),
    "SciPy's sparse": ({"x": sparse.csr_array(X.numpy())}, r"x is a sparse csr_array: pass x.toarray\(\)"),
    "dates": ({"x": pandas.DataFrame({"when": pandas.date_range("2020", periods=20)})}, r"x has dates in column 'when': pass"),
    "ragged": ({"x": [[1.0], [1.0, 2.0]]}, r"x has rows of different lengths"),
    "complex": ({"x": X.to(torch.complex64)}, r"x must be a dense tensor of real numbers"),
    "sparse": ({"x": X.to_sparse()}, r"x must be a dense tensor"),
    "a number": ({"x": 3.0}, r"x is a single number"),
    "not a module": ({"model": "mlp"}, r"model='mlp' is not an nn.Module"),
    "nothing to train": ({"model": nn.Sequential(nn.ReLU())}, r"model has no parameter to train"),
    "no batch left": ({"batch_size": 64, "drop_last": True}, r"batch_size=64 with drop_last=True leaves no batch"),
    "one row for BatchNorm": ({"model": NORMALISED, "batch_size": 19}, r"leaves a batch of one row among 20"),
    "only one row for BatchNorm": (
        {"model": NORMALISED, "batch_size": 1, "epochs": None, "steps": 3}, r"leaves a batch of one row among 20"
    ),
    "targets the other way round": (
        {"model": nn.Sequential(nn.Linear(7, 6), nn.Unflatten(1, (2, 3))), "loss": "mse", "y": torch.randn(20, 3, 2)},
        r"y has rows of shape \(3, 2\), the model's output has \(2, 3\): pass the same shape, or flat",
    ),
    "a pipe for a checkpoint": ({"checkpoint": "/dev/null"}, r"checkpoint='/dev/null' is a device or a pipe"),
    "validation": ({"validation": X}, r"validation must be a fraction of the rows, such as 0.1, or a pair"),
    "validation without rows": ({"validation": (None, None)}, r"validation holds None: .*split"),
    "validation lengths": ({"validation": (X, Y[:3])}, r"validation\[0\] has 20 rows and validation\[1\] has 3"),
    "validation labels": ({"validation": (X, Y + 1)}, r"validation\[1\]\[3\]=4 is not a class"),
    "validation kind": ({"validation": (X.to(torch.uint8), Y)}, r"uint8 means value / 255, so pass the same type for both"),
    "engine not here": ({"engine": "resident"}, r"engine='resident' cannot run this: "),
    "resume of nothing": ({"resume": True}, r"resume=True needs checkpoint="),
    "lr beyond float32": ({"lr": 1e300}, r"lr=1e\+300 must be a finite number, 0 or more, that float32 can hold"),
    "lr beyond float": ({"lr": 10**400}, r"lr=1000000.* must be a finite number"),
    "flat x": ({"model": nn.Sequential(nn.Flatten(), nn.Linear(1, 4)), "x": X[:, 0]}, r"pass x.reshape\(-1, 1\)"),
    "meta x": ({"x": X.to("meta")}, r"x must be a dense tensor of real numbers, not .* on meta"),
    "masked x": ({"x": np.ma.masked_less(X.numpy(), 0)}, r"x is a masked array"),
    "long checkpoint": ({"checkpoint": "x" * 300}, r"checkpoint=.* is not a path"),
    "zero byte": ({"checkpoint": "a\0b"}, r"checkpoint=.* (cannot be written|is not a path)"),
    "checkpoint type": ({"checkpoint": 3}, r"checkpoint=3 is not a path"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_clear_line(mistake):
    changes, message = MISTAKES[mistake]
    arguments = {"model": MODEL, "x": X, "y": Y, "epochs": 1, "progress": False, **changes}
    before = MODEL[0].weight.clone()
    with pytest.raises(ol.OnelaunchError, match=message) as caught:
        ol.fit(arguments.pop("model"), arguments.pop("x"), arguments.pop("y"), **arguments)
    assert "\n" not in str(caught.value)
    assert torch.equal(MODEL[0].weight, before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="these can run on a GPU")
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_precisions_that_a_cpu_without_amx_cannot_run(precision, monkeypatch):
    plain = dataclasses.replace(target.host(), tiles="")
    monkeypatch.setattr(target, "host", lambda: plain)
    with pytest.raises(ol.UnsupportedError, match=f"precision='{precision}' needs a CUDA device"):
        ol.fit(MODEL, X, Y, epochs=1, precision=precision, progress=False)


def test_a_model_that_cannot_take_x_says_so():
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * 2

    with pytest.raises(ol.OnelaunchError, match=r"model cannot take x with rows of shape \(7,\): mat1 and mat2"):
        ol.fit(Wrong(), X, Y, epochs=1, progress=False)


def test_errors_are_value_errors_too():
    with pytest.raises(ValueError, match="epochs"):
        ol.fit(MODEL, X, Y, epochs=0)
    with pytest.raises(TypeError, match="batch_size"):
        ol.fit(MODEL, X, Y, epochs=1, batch_size="32")


def test_inference_mode_is_refused():
    with torch.inference_mode():
        made = nn.Sequential(nn.Linear(7, 4))
        with pytest.raises(ol.OnelaunchError, match="inference_mode"):
            ol.fit(MODEL, X, Y, epochs=1, progress=False)
    with pytest.raises(ol.OnelaunchError, match="model was made"):
        ol.fit(made, X, Y, epochs=1, progress=False)


class Normalised(nn.Module):
    """Contains a BatchNorm1d that fit cannot see before it fails on a batch of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * 2


def test_a_model_that_fails_on_the_way_says_where():
    with pytest.raises(ol.OnelaunchError, match=r"model failed at step 1, on a batch of 1 rows: Expected more than 1"):
        ol.fit(Normalised(), X, Y, epochs=1, batch_size=19, progress=False)


def test_numpy_numbers_are_numbers():
    history = ol.fit(
        MODEL, X, Y, epochs=np.int64(1), batch_size=np.int32(7), lr=np.float32(0.0), seed=np.uint8(3), progress=False
    )
    assert len(history.losses) == 3


@pytest.mark.filterwarnings("ignore")  # PyTorch deprecates such tensors
def test_quantized_rows_are_named():
    rows = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match="x must be a dense tensor of real numbers, not quantized"):
        ol.fit(MODEL, rows, Y, epochs=1, progress=False)


def test_numbers_in_python_objects_are_numbers():
    """pandas' nullable columns and object arrays become such."""
    frame = pandas.DataFrame(X.numpy().astype(np.float64)).astype("Float64")
    targets = (Y, Y.numpy().astype(object), pandas.Series(Y.numpy()).astype("Int64"), [int(y) for y in Y])
    losses = [
        ol.fit(copy.deepcopy(MODEL), rows, y, epochs=1, progress=False).losses
        for rows in (X, frame, X.numpy().astype(object))
        for y in targets
    ]
    assert all(each == losses[0] for each in losses)
    frame.iloc[3, 2] = pandas.NA
    with pytest.raises(ol.OnelaunchError, match=r"x holds NaN or Inf \(first in row 3\)"):
        ol.fit(copy.deepcopy(MODEL), frame, Y, epochs=1, progress=False)


def _without_target(output):
    return output.mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, y: F.cross_entropy(output, y).detach(), "loss failed at step 0, .* do not detach it"),
        (_without_target, "loss failed at step 0, .* takes 1 positional argument but 2 were given"),
        (lambda output, y: output[y + 100].mean(), "loss failed at step 0, .* out of bounds"),
        (lambda output, y: F.cross_entropy(output, y.float()), "loss failed at step 0, "),
    ],
    ids=["detached", "one argument", "index", "type"],
)
def test_an_error_in_a_loss_is_said_to_be_the_losss(loss, message):
    torch.manual_seed(0)
    with pytest.raises(ol.OnelaunchError, match=message):
        ol.fit(nn.Linear(8, 3), torch.randn(50, 8), torch.randint(3, (50,)), loss=loss, steps=2, progress=False)


def test_a_model_of_which_nothing_trains_any_more_is_said_to_be_frozen():
    model = nn.Sequential(nn.Linear(8, 3))
    x, y = torch.randn(50, 8), torch.randint(3, (50,))
    freeze = [lambda history: model.requires_grad_(False)]
    with pytest.raises(ol.OnelaunchError, match="nor freeze the whole model"):
        ol.fit(model, x, y, epochs=3, engine="eager", progress=False, callbacks=freeze)
