"""The forward pass of Llama-like decoders in bf16 on the CPU, made of our kernels.

transformers computes a layer as some thirty operations, each of which reads and writes whole rows; here it is two: the
attention, and everything up to the next one. Rows nobody reads are left out of the last layer. The residual stream is
kept in fp32.

Invariant: it computes what the transformers model computes, whose weights it uses; ``tree_support.SelfCheck`` holds the
two together at load.

Shapes: N packed tokens, H hidden size, I intermediate size, Q query heads, K key/value heads, D head size.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rm_core import kernels
from rm_core.attention import AttentionCall, TreePlan
from rm_core.llama_layers import Layer, NotFusedError, Projection, llama_layers
from rm_core.tree_kernel import Heads, TreeAttention

_BLOCK, _MAX_CHUNK = 32, 320
"""Rows of a block, and of the largest chunk, in ``products.c``."""


class FusedDecoder:
    """``calls`` is what transformers gave the attention of each layer. Raises NotFusedError."""

    def __init__(self, backbone: Any, calls: Sequence[AttentionCall]) -> None:
        try:
            self.kernels = kernels.load()
        except kernels.NoKernelsError as error:
            raise NotFusedError(f"the compiled kernels are not available: {error}") from error
        self.layers: list[Layer] = llama_layers(backbone, calls)
        self._embedding: nn.Embedding = backbone.embed_tokens
        self._rotary: nn.Module = backbone.rotary_emb
        self._norm, self._eps = backbone.norm.weight.detach().float(), float(backbone.norm.variance_epsilon)
        size = backbone.layers[0].self_attn.head_dim
        parts = [features for features, _ in self.layers[0].qkv.parts]
        self._heads = Heads(parts[0] // size, parts[1] // size, size)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, plan: TreePlan, rows: torch.Tensor) -> torch.Tensor:
        """Hidden states, fp32 [B, H], at ``rows`` (int64 [B]) of a packed row of ids and positions (int64 [N])."""
        residual, attention = self.begin(ids, positions, plan)
        plan.kept = [[] for _ in plan.keep]
        steps = _Steps(self.kernels, self.layers, len(ids))
        qkv = torch.empty((len(ids), len(self.layers[0].qkv.weight)), dtype=torch.bfloat16)
        attended = torch.empty((len(ids), self.layers[0].out.weight.shape[1]), dtype=torch.bfloat16)
        steps.run(residual, None, 0, qkv)
        for index, layer in enumerate(self.layers):
            is_last = index == len(self.layers) - 1
            attention.forward(qkv, layer, index, attended, rows=rows if is_last else None)
            for path, kept_rows in enumerate(plan.keep):
                plan.kept[path].append(attention.keys_and_values(qkv, kept_rows))
            if is_last:
                attended, residual = attended[rows], residual[rows]
            steps.run(residual, attended, index, None if is_last else qkv)
        return self.end(residual)

    def begin(self, ids: torch.Tensor, positions: torch.Tensor, plan: TreePlan) -> tuple[torch.Tensor, TreeAttention]:
        """The embeddings, fp32 [N, H], and the attention of every layer."""
        residual = self._embedding(ids).float()
        cosine, sine = self._rotary(residual, positions[None])  # as precise as what it is given: fp32
        return residual, TreeAttention(self.kernels, plan, self._heads, cosine[0], sine[0])

    def end(self, residual: torch.Tensor) -> torch.Tensor:
        """The final norm of fp32 [B, H]."""
        scale = torch.rsqrt(residual.square().mean(dim=1, keepdim=True) + self._eps)
        hidden: torch.Tensor = residual * scale * self._norm
        return hidden


class _Steps:
    """What is between one layer's attention and the next one's, and the memory for it: the same for all layers.

    Each pass lays the weights out anew, one layer's at a time: kept, they would take the model's memory twice.
    """

    def __init__(self, library: ctypes.CDLL, layers: Sequence[Layer], num_rows: int) -> None:
        self._decoder_rows, self._layers = library.decoder_rows, layers
        self._threads = torch.get_num_threads()
        self._chunk = rows_of_a_chunk(num_rows, self._threads)
        layer = layers[0]
        used = (layer.out, layer.gate_up, layer.down, layer.qkv)
        self._packed = torch.empty(sum(projection.weight.numel() for projection in used), dtype=torch.bfloat16)
        width = max(layer.out.weight.shape) + layer.down.weight.shape[1]
        self._chunks = torch.empty((self._threads, self._chunk, width), dtype=torch.bfloat16)

    def run(self, residual: torch.Tensor, attended: torch.Tensor | None, index: int, qkv: torch.Tensor | None) -> None:
        """Update ``residual``, fp32 [N, H], from ``attended``, bf16 [N, Q D], the result of the attention of layer
        ``index``, and fill the next layer's ``qkv``, bf16 [N, (Q + 2K) D]; without ``attended``, this layer's."""
        layer = self._layers[index]
        after = layer if attended is None else self._layers[index + 1] if qkv is not None else None
        assert all(x is None or x.is_contiguous() for x in (residual, attended, qkv)), "this is a bug: rows with gaps"
        self._decoder_rows(
            *residual.shape, _pointer(attended), residual.data_ptr(), _product(layer.out), layer.mlp_norm.data_ptr(),
            _product(layer.gate_up), _product(layer.down), layer.eps, *(
                (None, 0.0, None) if after is None else (after.norm.data_ptr(), after.eps, _product(after.qkv))
            ), _pointer(qkv), self._packed.data_ptr(), self._chunks.data_ptr(), self._chunk, self._threads,
        )  # fmt: skip


def rows_of_a_chunk(num_rows: int, threads: int, largest: int = _MAX_CHUNK) -> int:
    """At most ``largest`` and so many that all threads have about as much to do."""
    largest = min(largest, _MAX_CHUNK)
    of_a_thread = math.ceil(num_rows / threads)
    chunks = math.ceil(of_a_thread / largest)
    return math.ceil(of_a_thread / chunks / _BLOCK) * _BLOCK


def _product(projection: Projection) -> Any:
    return ctypes.byref(kernels.Product.of(projection.weight, projection.bias))


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
