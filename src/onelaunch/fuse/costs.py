"""What the operations of a captured graph cost when each runs by itself: bytes through memory, arithmetic, launches."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onelaunch.fuse.graph import name_of, operation_of, tensor_of, tensors_of
from onelaunch.fuse.memory import in_memory, storages_of, written_by
from onelaunch.roofline import Cost

PRODUCTS = (F.linear, torch.matmul, torch.bmm, torch.mm, torch.addmm, torch.baddbmm, operator.matmul, torch.einsum)
SUMS_FIRST = (torch.addmm, torch.baddbmm, "addmm", "baddbmm")  # whose first argument is added to the product
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, *TRANSPOSED)
ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
COMPOSED = (  # several products and what is between them, in one operation
    "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell", "_transformer_encoder_layer_fwd", "_native_multi_head_attention",
)  # fmt: skip
NO_PRODUCTS = ("topk", "sort", "argsort", "multinomial")  # libraries' all the same
LIBRARY_METHODS = ("matmul", "bmm", "mm", "addmm", "baddbmm", "__matmul__")


def is_library_call(node: fx.Node) -> bool:
    """Whether a library (cuBLAS, cuDNN, attention kernels) computes the node, which Inductor does not fuse with neighbours."""
    if node.op in ("call_method", "call_function") and name_of(node) in (*COMPOSED, *NO_PRODUCTS):
        return True
    if node.op == "call_method":
        return node.target in LIBRARY_METHODS
    return node.target in PRODUCTS or node.target in CONVOLUTIONS or node.target in ATTENTION


def scatters(node: fx.Node) -> bool:
    """Whether the node adds to places that it reads from memory: its result is whole only when its kernel has ended."""
    return any(word in name_of(node) for word in ("scatter", "index_add", "index_put"))


def is_view(node: fx.Node) -> bool:
    """Whether the node moves nothing: its value is another view of its input, its input itself, empty, or no tensor."""
    operation = operation_of(node)
    if operation is not None and operation.dropout == 0.0:
        return True
    if not node.all_input_nodes and tensors_of(node) and not size_of(node):
        return True
    if node.target is operator.getitem and tensor_of(node.args[0]) is None:
        return True  # one of several results
    if written_by(node) or is_library_call(node):
        return False
    return storages_of(node) <= storages_of(*node.all_input_nodes)


def is_counter(node: fx.Node) -> bool:
    """Whether the node counts up one integer, as batch norm's number of batches."""
    tensor = tensor_of(node)
    return bool(written_by(node)) and tensor is not None and tensor.dim() == 0 and not tensor.is_floating_point()


def size_of(node: Any) -> float:
    """Bytes of a node's tensor, or of the tensors it returns; 0 where it has none."""
    return float(sum(tensor.numel() * tensor.element_size() for tensor in map(in_memory, tensors_of(node))))


def unfused_cost(node: fx.Node) -> Cost:
    """Forward, and backward where its value is differentiated: the gradient is read, and one written per input."""
    if is_view(node):
        return Cost()
    read, written = sum(map(size_of, node.all_input_nodes)), size_of(node)
    flops = flops_of(node)
    forward = Cost(read + written, flops, 1)
    if not any(tensor.requires_grad for tensor in tensors_of(node)):
        return forward
    launches = 2 if is_library_call(node) else 1
    return forward + Cost(written + 2 * read, 2 * flops, launches)


def _matrices_of(node: fx.Node) -> list[torch.Tensor]:
    """The weights that a node multiplies by."""
    values = (one.meta.get("example_value") for one in node.all_input_nodes)
    return [value for value in values if isinstance(value, nn.Parameter) and value.dim() == 2]


def flops_of(node: fx.Node) -> float:
    """Floating-point operations of the forward pass; one per element where nothing better is known."""
    tensors = [tensor for tensor in map(tensor_of, node.all_input_nodes) if tensor is not None]
    made = tensor_of(node)
    output = 0 if made is None else int(made.numel())
    if node.target in CONVOLUTIONS and len(tensors) > 1:
        positions = tensors[0].numel() if node.target in TRANSPOSED else output
        return 2.0 * positions * math.prod(tensors[1].shape[1:])
    if node.target is F.multi_head_attention_forward and len(node.args) > 1:  # with its four projections
        query, key = (tensor_of(value) for value in node.args[:2])  # [positions, ..., width]
        assert query is not None and key is not None  # noqa: PT018
        return 4.0 * ((query.numel() + key.numel()) * query.shape[-1] + query.numel() * len(key))
    if name_of(node) in COMPOSED and tensors:  # of attention, without its scores
        rows = tensors[0].numel() / max(1, tensors[0].shape[-1])
        return 2.0 * rows * sum(matrix.numel() for matrix in _matrices_of(node))
    if node.target in ATTENTION and tensors:
        query = tensors[0]
        return 4.0 * query.numel() * (tensors[1].shape[-2] if len(tensors) > 1 else query.shape[-2])
    if is_library_call(node) and tensors and name_of(node) not in NO_PRODUCTS:
        factor = tensors[1] if node.target in SUMS_FIRST and len(tensors) > 2 else tensors[0]
        return 2.0 * output * factor.shape[-1]
    return float(max(output, max((int(tensor.numel()) for tensor in tensors), default=0)))


def fused_cost(nodes: list[fx.Node]) -> Cost:
    """One kernel for all nodes, and one for their backward pass: only values from or for outside go through memory."""
    inside = set(nodes)
    read = {source for node in nodes for source in node.all_input_nodes if source not in inside}
    written = [node for node in nodes if any(user not in inside for user in node.users)]
    moved = sum(map(size_of, read)) + sum(map(size_of, written))
    forward = Cost(moved, sum(map(flops_of, nodes)), 1)
    differentiated = [t for t in map(tensor_of, nodes) if t is not None and t.requires_grad]
    if not differentiated:
        return forward
    return forward + Cost(sum(map(size_of, written)) + 2 * sum(map(size_of, read)), 2 * forward.flops, 1)
