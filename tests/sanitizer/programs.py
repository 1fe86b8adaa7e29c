"""Small GPU programs for compute-sanitizer, one per process: `python -m tests.sanitizer.programs ops`.

A tool that checks every access makes a kernel a hundred times slower, so each program trains small networks for a few steps or
calls each op once. Sizes are odd, so that every edge mask is used. Results are checked, so that no program does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

import onelaunch as ol
from onelaunch.train.inputs import make_run
from tests.engines.graph.harness import network
from tests.engines.resident.gpu_runs import PLACEMENTS, losses_of, placed, rows_of

PRECISIONS = {"fp32": "sgd", "tf32": "rmsprop", "bf16": "adam", "fp16": "lion"}  # and the optimizer to try it with
WIDTHS = [20, 40, 24, 5]


def resident(place: str) -> None:
    """Three steps (the last with a part of a batch) and validation at each precision, with another optimizer each."""
    x, y = rows_of(WIDTHS, rows=70)
    for precision, optimizer in PRECISIONS.items():
        options = {"precision": precision, "optimizer": optimizer, "batch_size": 24, "epochs": 1, "lr": 0.01}
        weights = torch.rand(70) if optimizer in ("sgd", "lion") else None
        run = make_run(network(WIDTHS, "relu", 0.3), x, y, (x[:30], y[:30]), options, sample_weight=weights)
        assert all(0 < loss < 10 for loss in losses_of(placed(run, place, patience=200.0)))


def members(blocks: int, by_rows: bool) -> None:
    """More members than the launch has places, in one block or a cluster each, with a diverging one among them."""
    from onelaunch.engines.members import MemberTask
    from onelaunch.engines.resident.members import train
    from onelaunch.engines.resident.members.placement import Forced

    forced, places = Forced(blocks=blocks, by_rows=by_rows), 2
    x, y = rows_of(WIDTHS, rows=70)
    for precision, optimizer in (("fp32", "sgd"), ("bf16", "adam")):
        tasks = []
        for number in range(5):
            options = {
                "precision": precision,
                "optimizer": optimizer,
                "batch_size": 24,
                "epochs": 2,
                "lr": 0.01,
                "seed": number,
            }
            model, weights = (
                network(WIDTHS, "relu", 0.1 + 0.1 * number),
                torch.rand(70) if optimizer == "adam" else None,
            )
            run = make_run(model, x, y, (x[:30], y[:30]), options, sample_weight=weights)
            tasks.append(MemberTask(number, run, 0, run.spec.total_steps))
        runs = [task.run for task in tasks]
        found, kernel, summing = train.prepare(train.settings_of(runs), runs[0].device, len(runs), forced)
        launch = train.Launch(tasks, replace(found, places=places), kernel, train.SharedRows(found.plan), summing)
        launch.start()
        results = launch.finish(Unattended())
        assert all(0 < loss < 10 for result in results for segment in result.segments for loss in segment.losses)
        assert len(results) == 5


class Unattended:
    """A monitor of members that stops nothing."""

    stop = False

    def report(self, steps: int) -> None:
        """Ignore the progress."""


def graph() -> None:
    """The graph engine's kernels: for few rows, many rows and narrow networks; several optimizers."""
    for widths, batch, optimizer, precision, clip_norm in (
        (WIDTHS, 24, "sgd", "fp32", None),
        ([70, 300, 300, 10], 24, "adam", "bf16", None),
        ([70, 300, 300, 10], 24, "lion", "bf16", 0.1),
        ([70, 300, 300, 10], 520, "adamw", "tf32", None),
        ([70, 300, 300, 10], 520, "sgd", "bf16", 0.1),
        ([64, 64, 48, 16], 4096, "sgd", "bf16", None),
        ([64, 64, 48, 16], 4096, "rmsprop", "fp32", 0.1),
    ):
        x, y = rows_of(widths, rows=2 * batch + 22)
        options = {"batch_size": batch, "epochs": 1, "lr": 0.01, "clip_norm": clip_norm, "progress": False}
        model = network(widths, "gelu", 0.3)
        history = ol.fit(model, x, y, engine="graph", optimizer=optimizer, precision=precision, **options)
        assert all(0 < loss < 10 for loss in history.losses)


def ops() -> None:
    """Forward and backward of every fused op, each dtype."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(37, 50, device="cuda", dtype=dtype, requires_grad=True)
        weight = torch.randn(29, 50, device="cuda", dtype=dtype, requires_grad=True)
        bias = torch.randn(29, device="cuda", dtype=dtype, requires_grad=True)
        target = torch.randint(29, (37,), device="cuda")
        gamma = torch.ones(29, device="cuda", requires_grad=True)
        beta = torch.zeros(29, device="cuda", requires_grad=True)
        z = ol.linear(x, weight, bias, activation="relu", dropout=0.2)
        z = ol.batch_norm(z, None, None, gamma, beta, training=True, activation="silu", dropout=0.1)
        z, total = ol.layer_norm(z, gamma, beta, residual=z.detach(), dropout=0.1, return_sum=True)
        z = ol.rms_norm(z, gamma) + total
        loss = ol.cross_entropy(ol.relu_dropout(z, 0.1), target, label_smoothing=0.1)
        loss.backward()
        for tensor in (x, weight, bias, gamma, beta):
            assert tensor.grad is not None
            assert tensor.grad.isfinite().all()


def hopper() -> None:
    """The CUDA C++ GEMM: more tiles than blocks, partial tiles at every edge; does nothing without a Hopper."""
    from onelaunch.kernels import linear_hopper

    if torch.cuda.get_device_capability() != (9, 0):
        return
    x = torch.randn(9100, 72, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1032, 72, device="cuda", dtype=torch.bfloat16)
    y, z = torch.empty(2, 9100, 1032, device="cuda", dtype=x.dtype).unbind()
    for tile in (linear_hopper.LARGE, linear_hopper.MEDIUM, linear_hopper.SMALL):
        for activation, kept in (("silu", z), ("relu", None)):
            linear_hopper.linear_forward(x, w, w[:, 0].contiguous(), y, kept, activation=activation, tile=tile)
            assert y.isfinite().all()


PROGRAMS: dict[str, Callable[[], None]] = {
    **{f"resident-{place.replace(' ', '-')}": partial(resident, place) for place in PLACEMENTS},
    "members-one-block": partial(members, 1, by_rows=True),
    "members-cluster-by-rows": partial(members, 2, by_rows=True),
    "members-cluster-by-units": partial(members, 2, by_rows=False),
    "graph": graph,
    "ops": ops,
    "hopper": hopper,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
    torch.cuda.synchronize()
    print("done")
