"""PyTorch's transformers with masks are captured as one graph, and compute what they compute without a compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.fuse.captured import capture_graphs, uncompiled_call
from tests.fuse.rewritten import Rewritten

LENGTH = 7


class LanguageModel(nn.Module):
    """As in PyTorch's tutorials: the mask is an argument, or made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
        x = self.embedding(tokens)
        return self.head(self.decoder(self.encoder(x, mask), x, tgt_mask=mask))


def masks() -> dict[str, torch.Tensor | None]:
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    return {
        "made": None,
        "causal": causal,
        "random": torch.where(torch.rand(LENGTH, LENGTH) > 0.5, 0.0, -torch.inf).fill_diagonal_(0.0).double(),
        "bool": causal != 0,
        "of another type": causal.float(),
    }


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("training", [True, False])
def test_masked_transformers_are_one_graph(name: str, training: bool) -> None:
    model, mask = LanguageModel().double().train(training), masks()[name]
    tokens = torch.randint(50, (3, LENGTH))
    with torch.set_grad_enabled(training):
        (captured,) = capture_graphs(uncompiled_call(model), (tokens, mask), {})
        assert not captured.break_reason
        rewritten = Rewritten(model)
        torch.testing.assert_close(rewritten(tokens, mask), model(tokens, mask))
    if training:  # four layers attend to themselves, with a mask that only the function itself knows to be causal
        assert rewritten.titles.count("attention (causal mask)") == (4 if name == "made" else 0)


def test_a_mask_that_is_trained_has_the_gradients_it_has_uncompiled() -> None:
    """None while it is exactly causal: PyTorch's layers then do without it."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x, causal = torch.randn(2, 5, 8, dtype=torch.float64), masks()["causal"]
    assert causal is not None
    for start in (causal[:5, :5], torch.zeros(5, 5, dtype=torch.float64)):
        gradients = []
        for function in (model, Rewritten(model)):
            mask = nn.Parameter(start.clone())
            function(x, mask).sum().backward()
            gradients.append(mask.grad)
        assert (gradients[0] is None) == (gradients[1] is None)
        if gradients[0] is not None:
            torch.testing.assert_close(*gradients)


def test_explain_shows_the_layers() -> None:
    explanation = ol.explain(LanguageModel().double(), torch.randint(50, (3, LENGTH)))
    assert any(operation.name == "linear" and "decoder" in operation.where for operation in explanation.operations)
    assert not any("in no captured" in note for note in explanation.notes)


def test_pytorchs_own_way_to_name_the_backend_has_it_too() -> None:
    """In a process of its own: what is substituted stays."""
    program = """
import torch
from torch import nn
layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), 1)
import onelaunch.fuse.backend, importlib
importlib.import_module("onelaunch.fuse.backend").no_code_generator_reason = lambda device: "a test"
compiled = torch.compile(lambda x, mask: layers(x, mask), backend="onelaunch", fullgraph=True)
print(compiled(torch.randn(2, 3, 8), nn.Transformer.generate_square_subsequent_mask(3)).shape)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert "[2, 3, 8]" in done.stdout


def test_another_version_of_pytorch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from onelaunch.capture import substitutes

    monkeypatch.setattr(torch.compiler, "substitute_in_graph", lambda *args, **kwargs: pytest.fail("substituted"))
    monkeypatch.setattr(substitutes.transformer, "_detect_is_causal_mask", lambda other: False)
    substitutes.substitute.__wrapped__()
