"""Finds the chains of operations in a graph that one kernel can do, and says why where it cannot.

A chain is a run of nodes, each the only reader of the one before:

    linear [batch_norm, in evaluation] [activation] [dropout]      batch_norm [activation] [dropout]
    relu dropout                                                   log_softmax nll_loss         cross_entropy

The fused call takes the place of the first node, or of the last where a later operation takes a value of its own (a target),
which may be made in between. A chain is left alone if something it reads is changed between where it was read and that place.
Values inside the chain are seen by nobody else. What remains is a change in place, later, of the chain's input or output: what
the kernels keep for the backward is not always what PyTorch keeps, so such a chain is left alone too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from onelaunch.fuse.aliases import Changes, label, state_of
from onelaunch.fuse.operations import Operation, of_call, of_module
from onelaunch.fuse.tracing import Trace


@dataclass(eq=False)
class Chain:
    """Operations that could be one, or (with a reason) could have been."""

    nodes: list[fx.Node]
    operations: list[Operation]
    reason: str | None = None  # why it is not fused; None: it can be

    @property
    def place(self) -> fx.Node:
        """Where the fused call stands: where all it takes is there, and as early as that."""
        later = [
            value for operation in self.operations[1:] for name, value in operation.arguments.items() if name != "input"
        ]
        return self.nodes[-1 if any(isinstance(value, fx.Node) for value in later) else 0]

    @property
    def name(self) -> str:
        return " + ".join(f"{op.name} (spelled out)" if op.spelled else op.name for op in self.operations)

    @property
    def owner(self) -> str:
        """The path of the innermost module that holds the whole chain."""
        paths = [str(node.meta.get("owner", "")).split(".") for node in self.nodes]
        shared: list[str] = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            shared.append(parts[0])
        return ".".join(shared)

    @property
    def key(self) -> tuple[str, ...]:
        """What tells this chain from the others of its graph."""
        return tuple(str(node.target) if node.op == "call_module" else node.name for node in self.nodes)

    @property
    def modules(self) -> list[str]:
        """Paths of the modules it takes in; a function belongs to the module whose forward calls it."""
        return [
            op.path or str(node.meta.get("owner", "")) for node, op in zip(self.nodes, self.operations, strict=True)
        ]


def _mode(operation: Operation) -> Any:
    """Training or not; a node where the program computes it."""
    return operation.option("training", operation.role == "dropout")


def _training(operation: Operation) -> bool:
    return operation.role in ("batch_norm", "dropout") and _mode(operation)


def operations_of(trace: Trace, shared: frozenset[str]) -> dict[fx.Node, Operation]:
    """The nodes level 1 knows, with what blocks each: a hook, a subclass, a module that is called at several places."""
    calls = Counter(trace.module(node) for node in trace.graph.nodes if node.op == "call_module")
    found: dict[fx.Node, Operation] = {}
    for node in trace.graph.nodes:
        operation: Operation | None = None
        if node.op == "call_module":
            module, path = trace.module(node), str(node.target)
            operation = of_module(module, path, node.args, node.kwargs)
            holds_state = operation is not None and operation.role in ("linear", "batch_norm")
            if operation and holds_state and not operation.blocked and (calls[module] > 1 or path in shared):
                operation = Operation(
                    operation.role, operation.name, operation.arguments, module, path, f"{path} is shared"
                )
        elif node.op in ("call_function", "call_method"):
            operation = of_call(node.target, node.args, node.kwargs)
        if operation is not None and isinstance(operation.input, fx.Node) and isinstance(_mode(operation), bool):
            found[node] = operation
    return found


def find_chains(trace: Trace, shared: frozenset[str] = frozenset()) -> list[Chain]:
    """All chains of a graph, in its order; a node is in one chain without a reason at most."""
    known = operations_of(trace, shared)
    changes = Changes(trace)
    unwritable = _unwritable(trace.graph)
    chains: list[Chain] = []
    taken: set[fx.Node] = set()
    for node in known:
        if node in taken:
            continue
        chain, refused = _grow(node, known)
        if chain is not None:
            chain.reason = chain.reason or unwritable or _why_changed(chain, changes)
            chains.append(chain)
            if chain.reason is None:
                taken.update(chain.nodes)
        if refused is not None:
            chains.append(refused)
    return chains


def _unwritable(graph: fx.Graph) -> str | None:
    """Why the graph cannot be written as code: fx writes names as they are, and a backslash would be read as another sign."""
    names = (str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr"))
    return next((f"the name {name!r} has a backslash" for name in names if "\\" in name), None)


def _why_changed(chain: Chain, changes: Changes) -> str | None:
    steps = zip(chain.nodes, chain.operations, strict=True)
    reads = [
        (node, [*(v for v in operation.arguments.values() if isinstance(v, fx.Node)), *state_of(operation.module)])
        for node, operation in steps
    ]
    return changes.after(chain.nodes, chain.operations[0].input) or changes.moved(chain.nodes, reads, chain.place)


def _grow(head: fx.Node, known: dict[fx.Node, Operation]) -> tuple[Chain | None, Chain | None]:
    """The longest chain from here on, if there is one, and the step that was refused, if one was."""
    first = known[head]
    nodes, operations = [head], [first]
    refused: Chain | None = None

    def step(role: str, allowed: Any = lambda operation: None) -> bool:
        """Take in the next node if it has this role; note why not."""
        nonlocal refused
        last = nodes[-1]
        readers = list(last.users)
        follower = next((n for n in readers if n in known and known[n].role == role and known[n].input is last), None)
        if follower is None:
            return False
        operation = known[follower]
        reason = _blocker(operations[-1], operation, last) or allowed(operation)
        if reason:
            if reason is not _NOTHING_GAINED:
                refused = Chain([last, follower], [operations[-1], operation], str(reason))
            return False
        nodes.append(follower)
        operations.append(operation)
        return True

    gains = False
    match first.role:
        case "linear":
            folds = step(
                "batch_norm", lambda norm: _NOTHING_GAINED if _training(norm) or not _can_fold(first, norm) else None
            )
            gains = step("activation") or folds
            gains = (
                step("dropout", lambda drop: _mixed_modes(operations, drop)) and operations[-1].dropped > 0
            ) or gains
        case "batch_norm":
            gains = step("activation")
            gains = (
                step("dropout", lambda drop: _mixed_modes(operations, drop)) and operations[-1].dropped > 0
            ) or gains
        case "activation" if first.name == "relu":
            in_place = "relu works in place on a value that others may hold" if first.inplace else None
            gains = step("dropout", lambda drop: _NOTHING_GAINED if drop.dropped == 0 else in_place)
        case "activation" if first.spelled and not first.blocked:
            gains = True
        case "log_softmax":
            gains = step("nll_loss", lambda loss: _loss_blocker(loss) or _softmax_blocker(first))
        case "cross_entropy":
            gains = True
            reason = first.blocked or _loss_blocker(first)
            if reason:
                return Chain(nodes, operations, reason), None
    return (Chain(nodes, operations) if gains else None), refused


_NOTHING_GAINED = "nothing is gained"


def _blocker(before: Operation, operation: Operation, node: fx.Node) -> str | None:
    """Why `operation` cannot be taken into the chain that `node` ends."""
    if before.blocked or operation.blocked:
        return before.blocked or operation.blocked
    if len(node.users) > 1:
        names = ", ".join(sorted("the caller" if user.op == "output" else label(user) for user in node.users))
        return f"the value of {label(node)} has {len(node.users)} readers: {names}"
    if sum(value is node for value in operation.arguments.values()) > 1:
        return f"{operation.name} takes the value of {label(node)} twice"
    if any(isinstance(operation.arguments.get(name), fx.Node) for name in ("p", "training", "inplace", "approximate")):
        return f"an option of {operation.name} is computed"
    return None


def _can_fold(linear: Operation, norm: Operation) -> bool:
    return (
        isinstance(linear.module, nn.Linear)
        and isinstance(norm.module, nn.BatchNorm1d)
        and norm.module.track_running_stats
    )


def _mixed_modes(operations: list[Operation], drop: Operation) -> str | None:
    norm = next((operation for operation in operations if operation.role == "batch_norm"), None)
    if norm is not None and not _training(norm) and drop.dropped > 0:
        return "the batch norm is in evaluation mode and the dropout in training mode"
    return None


def _loss_blocker(loss: Operation) -> str | None:
    if loss.option("weight") is not None:
        return f"{loss.name} has class weights"
    if loss.module is None and (
        loss.arguments.get("size_average") is not None or loss.arguments.get("reduce") is not None
    ):
        return f"{loss.name} is called with size_average or reduce"
    if loss.arguments.get("target") is None:
        return f"{loss.name} has no target"
    options = [loss.option(name, 0) for name in ("ignore_index", "reduction")]
    if any(isinstance(option, fx.Node) for option in options):
        return f"an option of {loss.name} is computed"
    return None


def _softmax_blocker(softmax: Operation) -> str | None:
    dim = softmax.option("dim")
    if dim not in (1, -1):
        return f"log_softmax goes along dim {dim}: the classes must be dim 1"
    if softmax.module is None and softmax.arguments.get("dtype") is not None:
        return "log_softmax changes the dtype"
    return None
