"""Forward and backward pass of Llama-like decoders with LoRA in bf16 on the CPU: the fused pass, with its gradient.

The base is frozen, so only LoRA's weights and the activations have gradients. A projection and its adapter are one
kernel; autograd is left to connect a handful of functions a layer.

Invariant: the gradient is that of what ``rm_core.fused`` computes plus LoRA, in bf16 with fp32 sums and fp32 residuals.

Shapes: N packed tokens, H hidden size, I intermediate size, R LoRA ranks of a projection together.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from rm_core import kernels
from rm_core.attention import AttentionCall, TreePlan
from rm_core.fused import FusedDecoder, rows_of_a_chunk
from rm_core.llama_layers import Layer, NotFusedError, Projection
from rm_core.tree_kernel import TreeAttention

_CHUNK_NUMBERS = 600_000
"""Numbers of a chunk of rows: they stay in the second-level cache."""


class FusedTrainer:
    """Built like ``FusedDecoder`` from a model with adapters. Raises NotFusedError."""

    def __init__(self, backbone: Any, calls: Sequence[AttentionCall]) -> None:
        adapted = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}
        if not adapted or not all("lora_" in name for name in adapted):
            raise NotFusedError("more is trained of it than LoRA adapters")
        self._decoder = FusedDecoder(backbone, calls)
        self._products = Products(self._decoder.kernels)
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
            qkv = self._project(hidden, layer.qkv)
            attended = _Attention.apply(qkv, attention, layer, index)
            if index == len(self._decoder.layers) - 1:
                attended, residual = attended[rows], residual[rows]
            delta = self._project(attended, layer.out)
            residual, hidden = _AddNorm.apply(residual, delta, layer.mlp_norm, layer.eps, library)
            gate_up = self._project(hidden, layer.gate_up)
            delta = self._project(gate_up, layer.down, is_gate_up=True)
        assert delta is not None, "this is a bug: a model without layers"
        return self._decoder.end(residual + delta)

    def _project(self, x: torch.Tensor, projection: Projection, *, is_gate_up: bool = False) -> torch.Tensor:
        a, b = projection.adapter() or (None, None)
        out: torch.Tensor = _Product.apply(x, projection, a, b, self._products, is_gate_up)
        return out


class Products:
    """Products of projections with their adapters, and the memory in which weights and rows are laid out for them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._packed = torch.empty(0, dtype=torch.bfloat16)
        self._chunks = torch.empty(0, dtype=torch.bfloat16)

    def forward(
        self, x: torch.Tensor, projection: Projection, a: torch.Tensor | None, b: torch.Tensor | None, is_gate_up: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The projection of bf16 ``x`` [N, in], or of the activation of [gate, up] = ``x``, with its adapter, bf16
        [N, out]; and what stands between the adapter's two products, bf16 [N, R]."""
        adapter = None if a is None or b is None else (kernels.Product.of(a, None), kernels.Product.of(b, None))
        base = kernels.Product.of(projection.weight, projection.bias)
        return self._run(x, base, adapter, is_gate_up=is_gate_up, is_backward=False)

    def backward(
        self, grad: torch.Tensor, projection: Projection, a: torch.Tensor | None, b: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients of what was multiplied, bf16 [N, in], and of what stands between the adapter's products."""
        transposed = kernels.Product.of_transposed
        adapter = None if a is None or b is None else (transposed(b), transposed(a))
        return self._run(grad, transposed(projection.weight), adapter, is_gate_up=False, is_backward=True)

    def _run(
        self,
        x: torch.Tensor,
        base: kernels.Product,
        adapter: tuple[kernels.Product, kernels.Product] | None,
        *,
        is_gate_up: bool,
        is_backward: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert x.is_contiguous(), "this is a bug: rows with gaps"
        num_rows, threads = len(x), torch.get_num_threads()
        out = x.new_empty((num_rows, base.outputs))
        inner = None if adapter is None else x.new_empty((num_rows, adapter[0].outputs))
        first, second = (None, None) if adapter is None else map(ctypes.byref, adapter)
        width = base.inputs + (0 if inner is None else inner.shape[1])
        chunk = rows_of_a_chunk(num_rows, threads, max(32, _CHUNK_NUMBERS // width // 32 * 32))
        weights = (base, *(adapter or ()))
        self._packed = _at_least(self._packed, sum(product.outputs * product.inputs for product in weights))
        self._chunks = _at_least(self._chunks, threads * chunk * width)
        self.library.adapted_rows(
            num_rows, x.data_ptr(), is_gate_up, ctypes.byref(base), first, second, is_backward,
            None if inner is None else inner.data_ptr(), out.data_ptr(), self._packed.data_ptr(),
            self._chunks.data_ptr(), chunk, threads,
        )  # fmt: skip
        return out, inner

    def adapter_gradient(self, inner: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The product of ``inner``, bf16 [N, R], transposed, and ``x``, bf16 [N, width]: fp32 [R, width]."""
        ranks, width = inner.shape[1], x.shape[1]
        gradient = x.new_empty((ranks, width), dtype=torch.float32)
        self._chunks = _at_least(self._chunks, (len(x) + 31) // 32 * 32 * ranks)
        self.library.adapter_gradient(
            len(x), inner.data_ptr(), ranks, x.data_ptr(), width, gradient.data_ptr(), self._chunks.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return gradient


def _at_least(room: torch.Tensor, size: int) -> torch.Tensor:
    return room if room.numel() >= size else room.new_empty(size)


class _Product(torch.autograd.Function):
    """A projection with its adapter, of ``x``, or with ``is_gate_up`` of the activation of ``x`` = [gate, up], which
    the backward pass computes again instead of keeping it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        projection: Projection,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        products: Products,
        is_gate_up: bool,
    ) -> torch.Tensor:
        a, b = _in_bf16(a), _in_bf16(b)
        out, inner = products.forward(x, projection, a, b, is_gate_up)
        ctx.save_for_backward(x, a, b, inner)
        ctx.projection, ctx.products, ctx.is_gate_up = projection, products, is_gate_up
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b, inner = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x, grad_inner = ctx.products.backward(grad, ctx.projection, a, b)
        if ctx.is_gate_up:
            x, grad_x = _activate_backward(x, grad_x, ctx.products.library)
        if grad_inner is None:
            return grad_x, None, None, None, None, None
        grad_a, grad_b = ctx.products.adapter_gradient(grad_inner, x), ctx.products.adapter_gradient(inner, grad)
        return grad_x, None, grad_a, grad_b.t(), None, None


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
