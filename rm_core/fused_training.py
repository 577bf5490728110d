"""Forward and backward pass of Llama-like decoders with LoRA in bf16 on the CPU: the fused pass, with its gradient.

The base is frozen, so only LoRA's weights and the activations have gradients. A projection with its adapter is two
products and two small ones into the same memory; autograd is left to connect a handful of functions a layer.

Invariant: the gradient is that of what ``rm_core.fused`` computes plus LoRA, in bf16 with fp32 sums and fp32 residuals.

Shapes: N packed tokens, H hidden size, I intermediate size, R LoRA ranks of a projection together.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from rm_core.attention import AttentionCall, TreePlan
from rm_core.fused import FusedDecoder
from rm_core.llama_layers import Layer, NotFusedError, Projection
from rm_core.tree_kernel import TreeAttention


class FusedTrainer:
    """Built like ``FusedDecoder`` from a model with adapters. Raises NotFusedError."""

    def __init__(self, backbone: Any, calls: Sequence[AttentionCall]) -> None:
        adapted = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}
        if not adapted or not all("lora_" in name for name in adapted):
            raise NotFusedError("more is trained of it than LoRA adapters")
        self._decoder = FusedDecoder(backbone, calls)
        if any(layer.query_norm is not None for layer in self._decoder.layers):
            raise NotFusedError("it normalises its heads")

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, plan: TreePlan, rows: torch.Tensor) -> torch.Tensor:
        """Hidden states, fp32 [B, H], at ``rows`` (int64 [B]) of a packed row of ids and positions (int64 [N]).

        The plan has neither prefixes nor anything to keep, and no layer's window is shorter than its longest sequence.
        """
        with torch.autocast("cpu", enabled=False):  # every dtype is chosen here
            return self._run(ids, positions, plan, rows)

    def takes(self, plan: TreePlan) -> bool:
        """Whether no layer's sliding window cuts into this tree."""
        return all(layer.window is None or layer.window >= plan.longest for layer in self._decoder.layers)

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, plan: TreePlan, rows: torch.Tensor) -> torch.Tensor:
        library = self._decoder.kernels
        residual, attention = self._decoder.begin(ids, positions, plan)
        delta = None
        for index, layer in enumerate(self._decoder.layers):
            residual, hidden = _AddNorm.apply(residual, delta, layer.norm, layer.eps, library)
            qkv = _project(hidden, layer.qkv)
            attended = _Attention.apply(qkv, attention, layer, index)
            if index == len(self._decoder.layers) - 1:
                attended, residual = attended[rows], residual[rows]
            delta = _project(attended, layer.out)
            residual, hidden = _AddNorm.apply(residual, delta, layer.mlp_norm, layer.eps, library)
            gate_up = _project(hidden, layer.gate_up)
            delta = _project(gate_up, layer.down, library)
        assert delta is not None, "this is a bug: a model without layers"
        return self._decoder.end(residual + delta)


def _project(x: torch.Tensor, projection: Projection, library: ctypes.CDLL | None = None) -> torch.Tensor:
    """bf16 [N, in] to [N, out], adapter included; with a ``library``, bf16 [N, 2 in] is activated first."""
    adapter = projection.adapter() or (None, None)
    out: torch.Tensor = _Product.apply(x, projection, *adapter, library)
    return out


def _forward_product(
    x: torch.Tensor, projection: Projection, a: torch.Tensor | None, b: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The product, and the adapter's inner one, bf16 [N, R]."""
    weight, bias = projection.weight, projection.bias
    out = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    if a is None or b is None:
        return out, None
    inner = torch.mm(x, a.t())
    return out.addmm_(inner, b.t()), inner


def _backward_product(
    grad: torch.Tensor, projection: Projection, a: torch.Tensor | None, b: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradient of the product's input, and of the adapter's inner one."""
    grad_x = torch.mm(grad, projection.weight)
    if a is None or b is None:
        return grad_x, None
    grad_inner = torch.mm(grad, b)
    return grad_x.addmm_(grad_inner, a), grad_inner


class _Product(torch.autograd.Function):
    """A projection with its adapter, of ``x``; with a ``library``, of the activation of ``x`` = [gate, up], which the
    backward pass computes again instead of keeping it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        projection: Projection,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        library: ctypes.CDLL | None,
    ) -> torch.Tensor:
        a, b = _in_bf16(a), _in_bf16(b)
        out, inner = _forward_product(x if library is None else _activate(x, library), projection, a, b)
        ctx.save_for_backward(x, a, b, inner)
        ctx.projection, ctx.library = projection, library
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b, inner = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x, grad_inner = _backward_product(grad, ctx.projection, a, b)
        if ctx.library is not None:
            x, grad_x = _activate_backward(x, grad_x, ctx.library)
        if grad_inner is None:
            return grad_x, None, None, None, None
        return grad_x, None, torch.mm(grad_inner.t(), x).float(), torch.mm(grad.t(), inner).float(), None


def _activate(gate_up: torch.Tensor, library: ctypes.CDLL) -> torch.Tensor:
    """SiLU(gate) · up, bf16 [N, I], of bf16 [N, 2I]."""
    activated = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
    library.silu_mul(gate_up.data_ptr(), activated.data_ptr(), *activated.shape, torch.get_num_threads())
    return activated


def _activate_backward(
    gate_up: torch.Tensor, grad: torch.Tensor, library: ctypes.CDLL
) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation again, and the gradient of ``gate_up`` from that of the activation."""
    activated, grad_gate_up = torch.empty_like(grad), torch.empty_like(gate_up)
    library.silu_mul_backward(
        gate_up.data_ptr(), grad.data_ptr(), grad_gate_up.data_ptr(), activated.data_ptr(),
        *activated.shape, torch.get_num_threads(),
    )  # fmt: skip
    return activated, grad_gate_up


class _AddNorm(torch.autograd.Function):
    """(residual + delta, its RMS norm): fp32 [N, H] and bf16 [N, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        library: ctypes.CDLL,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, out = torch.empty_like(residual), torch.empty_like(residual, dtype=torch.bfloat16)
        library.add_rms_norm(
            residual.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(), eps,
            total.data_ptr(), out.data_ptr(), *residual.shape, torch.get_num_threads(),
        )  # fmt: skip
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.library, ctx.has_delta = eps, library, delta is not None
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        grad_total, grad_out = grads[0].contiguous(), grads[1].contiguous()
        grad, grad_delta = torch.empty_like(total), torch.empty_like(grad_out)
        ctx.library.rms_norm_backward(
            total.data_ptr(), weight.data_ptr(), ctx.eps, grad_total.data_ptr(), grad_out.data_ptr(),
            grad.data_ptr(), grad_delta.data_ptr(), *total.shape, torch.get_num_threads(),
        )  # fmt: skip
        return grad, grad_delta if ctx.has_delta else None, None, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, attention: TreeAttention, layer: Layer, index: int) -> torch.Tensor:
        out = qkv.new_empty((len(qkv), layer.out.weight.shape[1]))
        normaliser = attention.new_normaliser()
        attention.forward(qkv, layer, index, out, normaliser=normaliser)
        ctx.save_for_backward(qkv, out, normaliser)
        ctx.attention, ctx.layer = attention, layer
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        qkv, out, normaliser = ctx.saved_tensors
        return ctx.attention.backward(qkv, ctx.layer, out, grads[0].contiguous(), normaliser), None, None, None


def _in_bf16(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(torch.bfloat16)
