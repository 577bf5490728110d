"""The forward pass of Llama-like decoders in bf16 on the CPU, made of packed matrix products and our kernels.

transformers computes a layer as some thirty operations, each of which reads and writes whole rows; here the
element-wise ones are three. Rows nobody reads are left out of the last layer. The residual stream is kept in fp32.

Invariant: it computes what the transformers model computes, whose weights it uses. Families are listed by name, since
layers can look alike and differ far from where a check looks; ``tree_support.SelfCheck`` then holds the two together.

Shapes: N packed tokens, H hidden size, I intermediate size, Q query heads, K key/value heads, D head size.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rm_core import kernels
from rm_core.attention import AttentionCall, LayerKV, TreePlan

_ROWS = 32
"""Rows of a block and keys of a group in ``kernels.c``."""

_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

# Families whose layers compute exactly this. Others have layers of the same names that do more: Ministral 3 scales
# queries behind its first context, which no check on short texts sees, SmolLM 3 leaves rotation out of some layers.
_FAMILIES = {"llama", "qwen2", "qwen3", "mistral", "ministral", "seed_oss"}


class NotFusedError(ValueError):
    """Why a model is computed by transformers' own layers, in words."""


@dataclass
class _Layer:
    norm: torch.Tensor
    """fp32 [H], as the next one."""
    mlp_norm: torch.Tensor
    eps: float
    qkv: torch.Tensor
    """[(Q + 2K) D, H]"""
    qkv_bias: torch.Tensor | None
    out: nn.Linear
    query_norm: torch.Tensor | None
    """fp32 [D], as the next one."""
    key_norm: torch.Tensor | None
    head_eps: float
    gate_up: torch.Tensor
    """[2I, H]"""
    gate_up_bias: torch.Tensor | None
    down: nn.Linear
    scaling: float
    window: int | None


class FusedDecoder:
    """``calls`` is what transformers gave the attention of each layer: scale and sliding window are taken from there.

    The model's own q/k/v and gate/up weights become views of the joined ones, so memory is not taken twice.
    Raises NotFusedError.
    """

    def __init__(self, backbone: Any, calls: list[AttentionCall]) -> None:
        try:
            self._kernels = kernels.load()
        except kernels.NoKernelsError as error:
            raise NotFusedError(f"the compiled kernels are not available: {error}") from error
        if (reason := _why_not(backbone, calls)) is not None:
            raise NotFusedError(reason)
        self._embedding: nn.Embedding = backbone.embed_tokens
        self._rotary: nn.Module = backbone.rotary_emb
        self._norm, self._eps = backbone.norm.weight.float(), float(backbone.norm.variance_epsilon)
        first = backbone.layers[0]
        self._head_dim: int = first.self_attn.head_dim
        self._query_heads = first.self_attn.q_proj.out_features // self._head_dim
        self._kv_heads = first.self_attn.k_proj.out_features // self._head_dim
        self._layers = [_layer(layer, call) for layer, call in zip(backbone.layers, calls, strict=True)]

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, plan: TreePlan, rows: torch.Tensor) -> torch.Tensor:
        """Hidden states, fp32 [B, H], at ``rows`` (int64 [B]) of a packed row of ids and positions (int64 [N])."""
        attention = _TreeAttention(self._kernels, plan, self._query_heads, self._kv_heads, self._head_dim, len(ids))
        buffers = _Buffers(len(ids))
        residual = self._embedding(ids).float()
        cosine, sine = self._rotary(residual, positions[None])
        half = self._head_dim // 2
        attention.cosine, attention.sine = cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous()
        plan.kept = [[] for _ in plan.keep]
        delta = None
        for layer in self._layers:
            is_last = layer is self._layers[-1]
            hidden = self._add_and_norm(residual, delta, layer.norm, layer.eps, buffers)
            qkv = buffers.product(hidden, layer.qkv, layer.qkv_bias, "qkv")
            attended = attention(qkv, layer, rows if is_last else None, buffers)
            for path, kept_rows in enumerate(plan.keep):
                plan.kept[path].append(attention.keys_and_values(qkv, kept_rows))
            if is_last:
                attended, residual, buffers = attended[rows], residual[rows], _Buffers(len(rows))
            delta = buffers.product(attended, layer.out.weight, layer.out.bias, "delta")
            hidden = self._add_and_norm(residual, delta, layer.mlp_norm, layer.eps, buffers)
            gate_up = buffers.product(hidden, layer.gate_up, layer.gate_up_bias, "gate_up")
            delta = buffers.product(self._activate(gate_up, buffers), layer.down.weight, layer.down.bias, "delta")
        residual += delta
        scale = torch.rsqrt(residual.square().mean(dim=1, keepdim=True) + self._eps)
        hidden_states: torch.Tensor = residual * scale * self._norm
        return hidden_states

    def _add_and_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, buffers: "_Buffers"
    ) -> torch.Tensor:
        """Add ``delta`` to ``residual`` (fp32 [N, H], in place); the sum's RMS norm, bf16 [N, H]."""
        out = buffers.get("hidden", residual.shape[1])
        self._kernels.add_rms_norm(
            residual.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(), eps, out.data_ptr(),
            *residual.shape, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def _activate(self, gate_up: torch.Tensor, buffers: "_Buffers") -> torch.Tensor:
        out = buffers.get("activated", gate_up.shape[1] // 2)
        self._kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), *out.shape, torch.get_num_threads())
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

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str) -> torch.Tensor:
        """``x`` [N, in] times ``weight`` [out, in], plus ``bias`` [out]."""
        out = self.get(name, len(weight))
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)


class _TreeAttention:
    """What the attention kernel needs to know of a tree, laid out once for all layers."""

    cosine: torch.Tensor
    sine: torch.Tensor
    """fp32 [N, D/2]"""

    def __init__(
        self, library: ctypes.CDLL, plan: TreePlan, query_heads: int, kv_heads: int, head_dim: int, num_tokens: int
    ) -> None:
        self._kernels, self._plan = library, plan
        self._shape = (num_tokens, query_heads, kv_heads, head_dim)
        segments = plan.segments
        self._start = np.array([s.start for s in segments])
        self._length = np.array([s.length for s in segments])
        self._position = np.array([s.position for s in segments])
        self._parent = np.array([s.parent for s in segments])
        self._prefix = np.full(len(segments), -1)
        for index, prefix in enumerate(plan.prefixes):
            self._prefix[(self._start >= prefix.start) & (self._start < prefix.end)] = index
        self._prefix_length = np.array([p.length for p in plan.prefixes], dtype=np.int64)
        lengths = np.concatenate([self._prefix_length, self._length])
        self._group_run, self._group_first = _cut(lengths, np.arange(len(lengths)))
        self._blocks = _cut(self._length, np.arange(len(segments)))
        self._runs = torch.empty(len(lengths) * 6, dtype=torch.int64)
        self._packed = torch.empty((len(self._group_run), 2, kv_heads, _ROWS, head_dim), dtype=torch.bfloat16)
        self._rotated = torch.empty((num_tokens, kv_heads, head_dim), dtype=torch.bfloat16)
        self._calls = 0

    def __call__(self, qkv: torch.Tensor, layer: _Layer, rows: torch.Tensor | None, buffers: _Buffers) -> torch.Tensor:
        """Attention's output [N, Q D] for the next layer's ``qkv`` [N, (Q + 2K) D]; only ``rows`` of it count."""
        num_tokens, query_heads, kv_heads, head_dim = self._shape
        out = buffers.get("attended", query_heads * head_dim)
        blocks = self._blocks if rows is None else self._blocks_of(rows.numpy())
        layers = [prefix.layers[self._calls] for prefix in self._plan.prefixes]
        assert all(x.is_contiguous() for kv in layers for x in kv), "this is a bug: cached keys lie in one piece"
        keys, values = (np.array([kv[i].data_ptr() for kv in layers], dtype=np.int64) for i in (0, 1))
        arrays = [
            self._start, self._length, self._position, self._parent, self._prefix
        ]  # fmt: skip
        self._kernels.tree_attention(
            qkv.data_ptr(), self._rotated.data_ptr(), out.data_ptr(), self.cosine.data_ptr(), self.sine.data_ptr(),
            _pointer(layer.query_norm), _pointer(layer.key_norm), layer.head_eps,
            num_tokens, query_heads, kv_heads, head_dim, layer.scaling, layer.window or 2**62,
            len(self._start), *(array.ctypes.data for array in arrays),
            len(layers), self._prefix_length.ctypes.data, keys.ctypes.data, values.ctypes.data,
            len(blocks[0]), *(array.ctypes.data for array in blocks), self._runs.data_ptr(),
            self._packed.data_ptr(), len(self._group_run), self._group_run.ctypes.data, self._group_first.ctypes.data,
            torch.get_num_threads(),
        )  # fmt: skip
        self._calls += 1
        return out

    def keys_and_values(self, qkv: torch.Tensor, rows: torch.Tensor) -> LayerKV:
        """Keys and values of the layer just computed, at ``rows`` (int64 [S])."""
        num_tokens, query_heads, kv_heads, head_dim = self._shape
        values = qkv.view(num_tokens, -1, head_dim)[:, query_heads + kv_heads :]
        return LayerKV(self._rotated.index_select(0, rows), values.index_select(0, rows))

    def _blocks_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        segment = np.searchsorted(self._start, rows, side="right") - 1
        first = (rows - self._start[segment]) // _ROWS * _ROWS
        pairs = np.unique(np.stack([segment, first]), axis=1)
        return np.ascontiguousarray(pairs[0]), np.ascontiguousarray(pairs[1])


def _cut(lengths: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut runs of tokens into pieces of at most 32: each piece's run, and its first token in it."""
    counts = -(-lengths // _ROWS)
    ends = np.cumsum(counts)
    return np.repeat(owners, counts), (np.arange(counts.sum()) - np.repeat(ends - counts, counts)) * _ROWS


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _why_not(backbone: Any, calls: list[AttentionCall]) -> str | None:
    weights = [p for p in backbone.parameters() if p.dim() == 2]
    if any(p.dtype != torch.bfloat16 or p.device.type != "cpu" for p in weights):
        return "it is not in bfloat16 on the CPU"
    config = backbone.config
    if config.model_type not in _FAMILIES:
        return f"{config.model_type!r} is not a family whose layers are known to be Llama's"
    layers = getattr(backbone, "layers", None)
    if not layers or not all(hasattr(backbone, name) for name in ("embed_tokens", "norm", "rotary_emb")):
        return "it is not built like Llama"
    if getattr(config, "hidden_act", None) != "silu":
        return "its activation is not SiLU"
    for layer in layers:
        attention: Any = getattr(layer, "self_attn", None)
        mlp: Any = getattr(layer, "mlp", None)
        heads = _names(attention) - {"q_norm", "k_norm"}
        if _names(layer) != _LAYER or heads != _ATTENTION or _names(mlp) - {"act_fn"} != _MLP - {"act_fn"}:
            return "its layers are not built like Llama's"
        linears = [getattr(attention, name) for name in _ATTENTION] + [
            mlp.gate_proj, mlp.up_proj, mlp.down_proj
        ]  # fmt: skip
        if not all(type(module) is nn.Linear for module in linears):
            return "some of its projections are not plain linear layers"
        norms = [layer.input_layernorm, layer.post_attention_layernorm, backbone.norm]
        if not all(hasattr(norm, "variance_epsilon") for norm in norms):
            return "its norms are not RMS norms"
        if attention.head_dim % 32 or attention.head_dim > 256 or layer.mlp.up_proj.out_features % 16:
            return "its sizes are not multiples of the vector length"
    if config.hidden_size % 16 or backbone.rotary_emb.inv_freq.numel() * 2 != layers[0].self_attn.head_dim:
        return "its rotary embedding does not cover whole heads"
    if any(call.softcap is not None for call in calls):
        return "its attention has a soft cap"
    return None


def _names(module: Any) -> set[str]:
    return set() if module is None else {name for name, _ in module.named_children()}


def _layer(layer: Any, call: AttentionCall) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
    gate_up, gate_up_bias = _joined([mlp.gate_proj, mlp.up_proj])
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return _Layer(
        norm=layer.input_layernorm.weight.float(),
        mlp_norm=layer.post_attention_layernorm.weight.float(),
        eps=float(layer.input_layernorm.variance_epsilon),
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=attention.o_proj,
        query_norm=None if norms[0] is None else norms[0].weight.float(),
        key_norm=None if norms[1] is None else norms[1].weight.float(),
        head_eps=0.0 if norms[0] is None else float(norms[0].variance_epsilon),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj,
        scaling=call.scaling,
        window=call.sliding_window,
    )


def _joined(linears: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights one below the other, of which the layers' own become views, and the biases."""
    weight = torch.cat([module.weight.detach() for module in linears])
    for module, part in zip(linears, torch.split(weight, [m.out_features for m in linears]), strict=True):
        module.weight = nn.Parameter(part, requires_grad=False)
    if all(module.bias is None for module in linears):
        return weight, None
    return weight, torch.cat(
        [torch.zeros(m.out_features, dtype=weight.dtype) if m.bias is None else m.bias.detach() for m in linears]
    )
