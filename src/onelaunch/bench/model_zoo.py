"""The models of `onelaunch bench models`, with random weights and one batch of random data each.

Each function makes a model, its loss (None where the model returns it) and the arguments of a training step. `small` makes a
model of the same widths with one or two layers and no dropout, whose losses can be compared step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from onelaunch.errors import UnsupportedError

DEVICE, DTYPE = "cuda", torch.bfloat16


class Workload(NamedTuple):
    """What a training step needs, besides an optimizer."""

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor] | None
    arguments: tuple[Any, ...]


def imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UnsupportedError(f"{name} is not installed") from None


def _tokens(classes: int, *shape: int) -> torch.Tensor:
    return torch.randint(classes, shape, device=DEVICE)


def bert(small: bool) -> Workload:
    transformers = imported("transformers")
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 2} if small else {}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=4, **dropout))
    inputs = {
        "input_ids": _tokens(30000, 32, 128),
        "attention_mask": torch.ones(32, 128, dtype=torch.long, device=DEVICE),
    }
    return Workload(model.to(DEVICE, DTYPE), None, ({**inputs, "labels": _tokens(4, 32)},))


def distilbert(small: bool) -> Workload:
    transformers = imported("transformers")
    dropout = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "n_layers": 2} if small else {}
    config = transformers.DistilBertConfig(num_labels=4, **dropout)
    model = transformers.DistilBertForSequenceClassification(config).to(DEVICE, DTYPE)
    return Workload(model, None, ({"input_ids": _tokens(30000, 32, 128), "labels": _tokens(4, 32)},))


def _language_model(model: Any, *shape: int) -> Workload:
    """A model that predicts its own input, of random tokens."""
    tokens = _tokens(model.config.vocab_size, *shape)
    return Workload(model.to(DEVICE, DTYPE), None, ({"input_ids": tokens, "labels": tokens},))


def gpt2(small: bool) -> Workload:
    transformers = imported("transformers")
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_layer": 2} if small else {}
    return _language_model(transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **dropout)), 8, 1024)


def _decoder(kind: str, small: bool, **sizes: int) -> Workload:
    """A language model of 8 layers, of the classes in `transformers` whose names begin with `kind`."""
    transformers = imported("transformers")
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=2 if small else 8, use_cache=False, **sizes)
    return _language_model(getattr(transformers, f"{kind}ForCausalLM")(config), 8, 1024)


def llama(small: bool) -> Workload:
    return _decoder("Llama", small, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, vocab_size=32000)


def neox(small: bool) -> Workload:
    return _decoder("GPTNeoX", small, hidden_size=768, intermediate_size=3072, num_attention_heads=12, vocab_size=50432)


def roberta(small: bool) -> Workload:
    transformers = imported("transformers")
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 2} if small else {}
    config = transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, **dropout)
    return _language_model(transformers.RobertaForMaskedLM(config), 32, 128)


def t5(small: bool) -> Workload:
    transformers = imported("transformers")
    layers = {"num_layers": 2, "dropout_rate": 0.0} if small else {"num_layers": 6}
    config = transformers.T5Config(d_model=512, num_heads=8, use_cache=False, decoder_start_token_id=0, **layers)
    return _language_model(transformers.T5ForConditionalGeneration(config), 16, 256)


def _classification(model: nn.Module, batch: int, **options: Any) -> Workload:
    """A classifier of random 224 x 224 images into 1000 classes."""
    images = torch.randn(batch, 3, 224, 224, device=DEVICE, dtype=DTYPE).to(**options)
    return Workload(model.to(DEVICE, DTYPE).to(**options), nn.CrossEntropyLoss(), (images, _tokens(1000, batch)))


def vit(small: bool) -> Workload:
    models = imported("torchvision.models")
    if small:
        return _classification(models.VisionTransformer(224, 16, 2, 12, 768, 3072), 32)
    return _classification(models.vit_b_16(dropout=0.1), 32)


def resnet(small: bool) -> Workload:
    models = imported("torchvision.models")
    model = models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1]) if small else models.resnet50()
    return _classification(model, 64, memory_format=torch.channels_last)


def vgg(small: bool) -> Workload:
    models = imported("torchvision.models")
    if small:
        layers = models.vgg.make_layers([64, "M", 128, "M", 256, "M", 512, "M", 512, "M"], batch_norm=True)
        return _classification(models.VGG(layers, dropout=0.0), 64, memory_format=torch.channels_last)
    return _classification(models.vgg16_bn(), 64, memory_format=torch.channels_last)


def convnext(small: bool) -> Workload:
    models = imported("torchvision.models")
    block = models.convnext.CNBlockConfig
    model = models.ConvNeXt([block(96, 192, 1), block(192, None, 1)]) if small else models.convnext_tiny()
    return _classification(model, 64, memory_format=torch.channels_last)


def swin(small: bool) -> Workload:
    models = imported("torchvision.models")
    if small:
        return _classification(
            models.SwinTransformer([4, 4], 96, [1, 1], [3, 6], [7, 7], stochastic_depth_prob=0.0), 32
        )
    return _classification(models.swin_t(), 32)


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, width // 2), nn.GELU(), nn.Linear(width // 2, tokens))
        self.over_channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.over_tokens(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.channel_norm(x))


class Mixer(nn.Module):
    """MLP-Mixer B/16: patches of 16 x 16, 768 wide; 12 layers in the paper."""

    def __init__(self, layers: int = 12, width: int = 768) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(*(MixerBlock(196, width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def mixer(small: bool) -> Workload:
    return _classification(Mixer(2 if small else 12), 32)


def encoder(small: bool) -> Workload:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0 if small else 0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2 if small else 6).to(DEVICE, DTYPE)
    x = torch.randn(64, 256, 512, device=DEVICE, dtype=DTYPE)
    return Workload(model, F.mse_loss, (x, torch.randn_like(x)))


class MaskedLanguageModel(nn.Module):
    """PyTorch's own transformer layers with a causal mask, as in its tutorials."""

    def __init__(self, layers: int, dropout: float, classes: int = 10_000, width: int = 512) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(classes, width), nn.Linear(width, classes)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        return self.head(self.layers(x, mask=mask)).flatten(0, 1)


def masked_encoder(small: bool) -> Workload:
    model = MaskedLanguageModel(2, 0.0) if small else MaskedLanguageModel(6, 0.1)
    tokens = _tokens(10_000, 16, 512)
    return Workload(model.to(DEVICE, DTYPE), nn.CrossEntropyLoss(), (tokens, tokens.flatten()))


def dqn(small: bool) -> Workload:
    layers = nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    arguments = torch.randn(256, 8, device=DEVICE), torch.randn(256, 4, device=DEVICE)
    return Workload(nn.Sequential(*layers).to(DEVICE), nn.MSELoss(), arguments)


class ActorCritic(nn.Module):
    """Two small networks over one observation, as of PPO: the logits of the actions and the value, side by side."""

    def __init__(self, inputs: int = 17, actions: int = 6, width: int = 64) -> None:
        super().__init__()

        def network(outputs: int) -> nn.Sequential:
            hidden = nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
            return nn.Sequential(*hidden, nn.Linear(width, outputs))

        self.actor, self.critic = network(actions), network(1)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.actor(observation), self.critic(observation)], -1)


def ppo_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """PPO's clipped objective, error of the value and entropy; target: action, its old log probability, advantage, return."""
    action, before, advantage, returns = target.unbind(-1)
    logits = output[:, :-1].log_softmax(-1)
    ratio = (logits.gather(-1, action.long()[:, None])[:, 0] - before).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    entropy = -(logits.exp() * logits).sum(-1).mean()
    return F.mse_loss(output[:, -1], returns) / 2 - gain - 0.01 * entropy


def ppo(small: bool) -> Workload:
    model = ActorCritic().to(DEVICE)
    x, target = torch.randn(512, 17, device=DEVICE), torch.randn(512, 4, device=DEVICE)
    target[:, 0], target[:, 1] = torch.randint(6, (512,), device=DEVICE), -math.log(6)
    return Workload(model, ppo_loss, (x, target))


def mlp(small: bool) -> Workload:
    """Six layers of 1024."""
    layers = [module for _ in range(2 if small else 6) for module in (nn.Linear(1024, 1024), nn.ReLU())]
    x = torch.randn(64, 1024, device=DEVICE, dtype=DTYPE)
    return Workload(nn.Sequential(*layers).to(DEVICE, DTYPE), nn.MSELoss(), (x, torch.randn_like(x)))
