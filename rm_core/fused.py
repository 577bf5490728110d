"""The forward pass of Llama-like decoders in bf16 on the CPU, made of packed matrix products and our kernels.

transformers computes a layer as some thirty operations, each of which reads and writes whole rows; here the
element-wise ones are three. Rows nobody reads are left out of the last layer. The residual stream is kept in fp32.

Invariant: it computes what the transformers model computes, whose weights it uses; ``tree_support.SelfCheck`` holds the
two together at load.

Shapes: N packed tokens, H hidden size, I intermediate size, Q query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rm_core import kernels
from rm_core.attention import AttentionCall, TreePlan
from rm_core.llama_layers import Layer, NotFusedError, Projection, llama_layers
from rm_core.tree_kernel import Heads, TreeAttention


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
        buffers = _Buffers(len(ids))
        plan.kept = [[] for _ in plan.keep]
        delta = None
        for index, layer in enumerate(self.layers):
            is_last = index == len(self.layers) - 1
            hidden = self._add_and_norm(residual, delta, layer.norm, layer.eps, buffers)
            qkv = buffers.product(hidden, layer.qkv, "qkv")
            attended = buffers.get("attended", layer.out.weight.shape[1])
            attention.forward(qkv, layer, index, attended, rows=rows if is_last else None)
            for path, kept_rows in enumerate(plan.keep):
                plan.kept[path].append(attention.keys_and_values(qkv, kept_rows))
            if is_last:
                attended, residual, buffers = attended[rows], residual[rows], _Buffers(len(rows))
            delta = buffers.product(attended, layer.out, "delta")
            hidden = self._add_and_norm(residual, delta, layer.mlp_norm, layer.eps, buffers)
            gate_up = buffers.product(hidden, layer.gate_up, "gate_up")
            activated = buffers.get("activated", layer.down.weight.shape[1])
            self.kernels.silu_mul(
                gate_up.data_ptr(), activated.data_ptr(), *activated.shape, torch.get_num_threads()
            )  # fmt: skip
            delta = buffers.product(activated, layer.down, "delta")
        assert delta is not None, "this is a bug: a model without layers"
        return self.end(residual + delta)

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

    def _add_and_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, buffers: "_Buffers"
    ) -> torch.Tensor:
        """Add ``delta`` to ``residual`` (fp32 [N, H], in place); the sum's RMS norm, bf16 [N, H]."""
        out = buffers.get("hidden", residual.shape[1])
        self.kernels.add_rms_norm(
            residual.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(), eps,
            residual.data_ptr(), out.data_ptr(), *residual.shape, torch.get_num_threads(),
        )  # fmt: skip
        return out


class _Buffers:
    """Memory for N rows of each intermediate result, the same in every layer: the system clears each new page anew."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._of: dict[str, torch.Tensor] = {}

    def get(self, name: str, width: int) -> torch.Tensor:
        """bf16 [N, width] that holds whatever it held in the last layer."""
        if name not in self._of:
            self._of[name] = torch.empty((self._num_rows, width), dtype=torch.bfloat16)
        return self._of[name]

    def product(self, x: torch.Tensor, projection: Projection, name: str) -> torch.Tensor:
        """``x`` [N, in] through a projection: [N, out]."""
        out = self.get(name, len(projection.weight))
        if projection.bias is None:
            return torch.mm(x, projection.weight.t(), out=out)
        return torch.addmm(projection.bias, x, projection.weight.t(), out=out)
