"""What is compiled and cached together, by name: the function that emits a unit's kernels, given the unit's options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onelaunch.engines.cpu.code import (
    apply,
    batch_norm,
    clip,
    driver,
    few_classes,
    gather,
    gradient,
    layer_norm,
    loss,
    philox,
    product,
    summed_update,
    tile_products,
    update,
)
from onelaunch.engines.cpu.code.emit import Module
from onelaunch.engines.cpu.code.kernel import Unit
from onelaunch.engines.cpu.plan.target import Target

ROW_ORDER = Unit("row_order")
UNITS: dict[str, Callable[..., Any]] = {
    "apply": apply.emit,
    "batch_norm": batch_norm.emit_forward,
    "batch_norm_backward": batch_norm.emit_backward,
    "clip": clip.emit,
    "driver": driver.emit,
    "dropout": philox.emit_dropout,
    "few_classes": few_classes.emit,
    "gather": gather.emit,
    "layer_norm": layer_norm.emit_forward,
    "layer_norm_backward": layer_norm.emit_backward,
    "loss": loss.emit,
    "product": product.emit,
    "reduce": gradient.emit_reduce,
    "row_order": philox.row_order,
    "summed_update": summed_update.emit,
    "through_group": gradient.emit_through_group,
    "tile_products": tile_products.emit,
    "tile_update": tile_products.emit_update,
    "transpose": gradient.emit_transpose,
    "update": update.emit,
}


def text_of(unit: Unit, target: Target, suffix: str = "") -> str:
    """The IR of a unit; `suffix` is appended to the names of its public functions, so that units can be loaded together."""
    module = Module(target, suffix)
    UNITS[unit.name](module, *unit.options)
    return module.text()
