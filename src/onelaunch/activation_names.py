"""The names of the activations, in the order of their table, for help texts that must not import torch."""

ACTIVATION_NAMES = (
    "relu", "leaky_relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "elu", "selu", "mish", "softplus", "hardswish",
)  # fmt: skip
