"""Many networks at once in other libraries: JAX's vmap inside a scan, torch.func's vmap in a CUDA graph, scikit-learn's search.

Every member has its own weights and its own batches, those of `fit` with its seed. All members share the rows on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from onelaunch.bench.peers_jax import MATMUL, features, jax_loss, jax_optimizer, jax_unavailable_reason
from onelaunch.bench.peers_torch import WARM_UP, row_order
from onelaunch.bench.torch_step import matmul_precision
from onelaunch.capture.graph import capturing
from onelaunch.engines.contract import Run
from onelaunch.errors import UnsupportedError
from onelaunch.run.objective import as_features


def member_orders(runs: Sequence[Run], steps: int) -> torch.Tensor:
    """Row numbers of each step and member, int64 [steps, members, batch]."""
    return torch.stack([row_order(run, steps) for run in runs], dim=1)


def jax_vmap_scan(runs: Sequence[Run], steps: int, unroll: int = 1) -> Callable[[], Any]:
    """A function that trains `steps` steps of every member in one call, from where its last call ended.

    It returns the losses [steps, members]. Raises UnsupportedError where JAX cannot run on the runs' device.
    """
    run = runs[0]
    if reason := jax_unavailable_reason(run.device):
        raise UnsupportedError(reason)
    import jax
    import jax.numpy as jnp

    names = [name for name, _ in run.model.named_parameters()]
    layers = {
        name: jnp.stack([jnp.asarray(each.model.get_parameter(name).detach().cpu().numpy()) for each in runs])
        for name in names
    }
    order = jnp.asarray(member_orders(runs, steps).int().cpu().numpy())
    x, y = (jnp.asarray(tensor.cpu().numpy()) for tensor in (run.x.flatten(1), run.y))
    gradients_of = jax.vmap(jax.value_and_grad(jax_loss(run)))
    update, state = jax_optimizer(run, layers)

    def train(carry: Any, x: Any, y: Any, order: Any) -> Any:
        def step(carry: Any, rows: Any) -> Any:
            layers, state = carry
            loss, gradients = gradients_of(layers, features(x[rows]), y[rows])
            return update(layers, gradients, state), loss

        return jax.lax.scan(step, carry, order, unroll=unroll)

    with jax.default_matmul_precision(MATMUL[run.spec.precision]):
        compiled = jax.jit(train, donate_argnums=0).lower((layers, state), x, y, order).compile()
    carried = [jax.tree.map(jnp.copy, (layers, state))]  # the first and second moments begin as the same zeros

    def work() -> Any:
        carried[0], losses = compiled(carried[0], x, y, order)
        return jax.block_until_ready(losses)

    return work


class TorchVmap:
    """Steps of all members: torch.func's vmap over stacked parameters, and one optimizer over them; a CUDA graph on a GPU.

    A call takes a number of steps; `losses` has the last step's, one per member.
    """

    def __init__(self, runs: Sequence[Run], steps: int) -> None:
        self.run, self.order = runs[0], member_orders(runs, steps)
        self.x = self.run.x.flatten(1)
        self.skeleton = copy.deepcopy(self.run.model).to("meta")
        stacked, _ = torch.func.stack_module_state([run.model for run in runs])
        self.parameters = {name: nn.Parameter(tensor.detach().clone()) for name, tensor in stacked.items()}
        spec, on_gpu = self.run.spec, self.run.device.type == "cuda"
        if spec.optimizer == "adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
                self.parameters.values(), spec.lr, spec.betas, spec.eps, fused=on_gpu, capturable=on_gpu
            )
        else:
            assert spec.optimizer == "sgd"
            self.optimizer = torch.optim.SGD(self.parameters.values(), spec.lr, fused=on_gpu)
        self.gradients_of = torch.func.vmap(torch.func.grad_and_value(self._loss))
        self.position = torch.zeros(1, dtype=torch.int64, device=self.run.device)
        self.losses = torch.zeros(len(runs), device=self.run.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if on_gpu:
            self._capture()

    def _loss(self, parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(self.skeleton, parameters, (x,))
        return nn.functional.cross_entropy(output.float(), y)

    def _step(self) -> None:
        rows = self.order.index_select(0, self.position)[0]
        bf16 = self.run.spec.precision == "bf16"
        with torch.autocast(self.run.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            values = {name: parameter.detach() for name, parameter in self.parameters.items()}
            gradients, losses = self.gradients_of(values, as_features(self.x[rows], torch.float32), self.run.y[rows])
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]
        self.optimizer.step()
        self.losses.copy_(losses)
        self.position.add_(1).remainder_(len(self.order))

    def _capture(self) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with matmul_precision(self.run):
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            with capturing(graph, stream=stream):
                self._step()
        self.graph = graph

    def __call__(self, count: int) -> None:
        for _ in range(count):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step()


def scikit_learn_search(x: Any, y: Any, grid: dict[str, list[Any]], *, epochs: int, batch: int, folds: int) -> Any:
    """A fitted GridSearchCV over scikit-learn's MLPClassifier of 32 hidden units, on two processes."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import GridSearchCV
    from sklearn.neural_network import MLPClassifier

    model = MLPClassifier((32,), max_iter=epochs, batch_size=batch, n_iter_no_change=epochs, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return GridSearchCV(model, grid, cv=folds, n_jobs=2, refit=False, error_score="raise").fit(x, y)
