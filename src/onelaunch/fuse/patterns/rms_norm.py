"""(dropout →) (+ residual →) RMS norm as `ol.rms_norm`, with gradients; also as `transformers` writes it out."""

from __future__ import annotations

import torch
from torch import fx

from onelaunch.fuse.graph import name_of, sole_user, tensor_of
from onelaunch.fuse.patterns.layer_norm import LayerNorm, Norm
from onelaunch.ops import rms_norm


class RmsNorm(LayerNorm):
    name, op, parameters = "rms_norm", staticmethod(rms_norm), ("weight",)

    def norm_at(self, node: fx.Node) -> Norm | None:
        return super().norm_at(node) or _written_out(node)


def _written_out(square: fx.Node) -> Norm | None:
    """`weight * (x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))`, where x may be converted before and after."""
    if name_of(square) != "pow" or square.args[1:] != (2,):
        return None
    chain = [square]
    for name in ("mean", "add", "rsqrt", "mul", "to", "mul"):
        user = sole_user(chain[-1])
        if user is not None and name_of(user) == name:
            chain.append(user)
        elif name != "to":
            return None
    _, mean, shifted, root, product, *_, scaled = chain
    x, eps, weights = square.args[0], shifted.args[-1], [one for one in scaled.args if one is not chain[-2]]
    if (*mean.args[1:], *mean.kwargs.values()) != (-1, True) or {*product.args} != {x, root} or len(weights) != 1:
        return None
    if isinstance(x, fx.Node) and name_of(x) in ("to", "float") and {*x.users} == {square, product}:
        chain.insert(0, x)
        x = x.args[0]
    wide, given = tensor_of(product), tensor_of(x)
    if wide is None or given is None or wide.dtype != torch.promote_types(given.dtype, torch.float32):
        return None
    return chain, {"input": x, "weight": weights[0], "eps": eps}
