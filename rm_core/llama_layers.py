"""The weights of a Llama-like decoder as the fused forward passes want them: joined where one product can do.

Families are listed by name, since layers can look alike and differ far from where a self-check looks.

Invariant: the model's own weights become views of the joined ones, so memory is not taken twice and what is saved or
merged afterwards is the same.

Shapes: H hidden size, I intermediate size, Q query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from rm_core.attention import AttentionCall

# Families whose layers compute exactly this. Others have layers of the same names that do more: Ministral 3 scales
# queries behind its first context, which no check on short texts sees, SmolLM 3 leaves rotation out of some layers.
_FAMILIES = {"llama", "qwen2", "qwen3", "mistral", "ministral", "seed_oss"}

_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


class NotFusedError(ValueError):
    """Why a model is computed by transformers' own layers, in words."""


class Lora(NamedTuple):
    """The adapter of one projection: ``a`` [r, in], ``b`` [out, r], the modules whose weights are trained."""

    a: nn.Linear
    b: nn.Linear
    scaling: float


@dataclass
class Projection:
    """One product: the weights of one or several linear layers with the same input."""

    weight: torch.Tensor
    """bf16 [out, in]"""
    bias: torch.Tensor | None
    parts: list[tuple[int, Lora | None]] = field(default_factory=list)
    """Output features of each layer, and its adapter."""

    def adapter(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """All adapters as one: fp32 [R, in] and, scaled, block-diagonal [out, R]. Differentiable.

        Ranks of zeros make R a multiple of 32.
        """
        adapters = [lora for _, lora in self.parts if lora is not None]
        if not adapters:
            return None
        missing = -sum(len(lora.a.weight) for lora in adapters) % 32
        inputs = self.weight.shape[1]
        blocks = [
            self.weight.new_zeros((out, 0), dtype=torch.float32) if lora is None else lora.b.weight * lora.scaling
            for out, lora in self.parts
        ]
        first = torch.cat([*(lora.a.weight for lora in adapters), adapters[0].a.weight.new_zeros((missing, inputs))])
        second: torch.Tensor = torch.block_diag(*blocks, blocks[0].new_zeros((0, missing)))
        return first, second


@dataclass
class Layer:
    norm: torch.Tensor
    """fp32 [H], as the next one."""
    mlp_norm: torch.Tensor
    eps: float
    qkv: Projection
    """To (Q + 2K) D."""
    out: Projection
    query_norm: torch.Tensor | None
    """fp32 [D], as the next one."""
    key_norm: torch.Tensor | None
    head_eps: float
    gate_up: Projection
    """To 2I."""
    down: Projection
    scaling: float
    window: int | None


def llama_layers(backbone: Any, calls: Sequence[AttentionCall]) -> list[Layer]:
    """The layers of a model in bf16 on the CPU, with or without LoRA. Raises NotFusedError.

    ``calls`` is what transformers gave the attention of each layer: scale and sliding window are taken from there.
    """
    if (reason := _why_not(backbone, calls)) is not None:
        raise NotFusedError(reason)
    return [_layer(layer, call) for layer, call in zip(backbone.layers, calls, strict=True)]


def _why_not(backbone: Any, calls: Sequence[AttentionCall]) -> str | None:
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
        if _names(layer) != _LAYER or heads != {*_ATTENTION, "o_proj"} or _names(mlp) - {"act_fn"} != set(_MLP):
            return "its layers are not built like Llama's"
        for module in [getattr(attention, name) for name in (*_ATTENTION, "o_proj")] + [getattr(mlp, n) for n in _MLP]:
            if (reason := _why_not_linear(module)) is not None:
                return reason
        norms = [layer.input_layernorm, layer.post_attention_layernorm, backbone.norm]
        if not all(hasattr(norm, "variance_epsilon") for norm in norms):
            return "its norms are not RMS norms"
        sizes = (attention.head_dim, _base(mlp.up_proj).out_features, config.hidden_size)
        if any(size % 32 for size in sizes) or attention.head_dim > 256:
            return "its sizes are not multiples of 32, or its heads are larger than 256"
    if backbone.rotary_emb.inv_freq.numel() * 2 != layers[0].self_attn.head_dim:
        return "its rotary embedding does not cover whole heads"
    if any(call.softcap is not None for call in calls):
        return "its attention has a soft cap"
    return None


def _why_not_linear(module: Any) -> str | None:
    base = _base(module)
    if type(base) is not nn.Linear:
        return "some of its projections are not plain linear layers"
    if base.weight.dtype != torch.bfloat16 or base.weight.device.type != "cpu":
        return "it is not in bfloat16 on the CPU"
    if base is module:
        return None
    adapters = module.active_adapters
    if len(adapters) != 1 or module.merged or module.disable_adapters:
        return "its adapter is merged, disabled or one of several"
    name = adapters[0]
    plain = name in module.lora_A and not module.use_dora.get(name) and not module.lora_bias.get(name)
    if not plain or getattr(module, "lora_variant", None) or getattr(module, "fan_in_fan_out", False):
        return "its adapter is not plain LoRA"
    if not isinstance(module.lora_dropout[name], nn.Identity):
        return "its adapter has dropout"
    return None


def _base(module: Any) -> Any:
    """The frozen linear layer inside peft's."""
    return module.base_layer if hasattr(module, "lora_A") else module


def _lora(module: Any) -> Lora | None:
    if _base(module) is module:
        return None
    name = module.active_adapters[0]
    return Lora(module.lora_A[name], module.lora_B[name], float(module.scaling[name]))


def _names(module: Any) -> set[str]:
    return set() if module is None else {name for name, _ in module.named_children()}


def _layer(layer: Any, call: AttentionCall) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return Layer(
        norm=layer.input_layernorm.weight.detach().float(),
        mlp_norm=layer.post_attention_layernorm.weight.detach().float(),
        eps=float(layer.input_layernorm.variance_epsilon),
        qkv=_joined([getattr(attention, name) for name in _ATTENTION]),
        out=_joined([attention.o_proj]),
        query_norm=None if norms[0] is None else norms[0].weight.detach().float(),
        key_norm=None if norms[1] is None else norms[1].weight.detach().float(),
        head_eps=0.0 if norms[0] is None else float(norms[0].variance_epsilon),
        gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
        down=_joined([mlp.down_proj]),
        scaling=call.scaling,
        window=call.sliding_window,
    )


def _joined(modules: list[Any]) -> Projection:
    """The layers' weights one below the other; their own become views."""
    linears = [_base(module) for module in modules]
    sizes = [linear.out_features for linear in linears]
    parts = [(size, _lora(module)) for size, module in zip(sizes, modules, strict=True)]
    if len(linears) == 1:
        weight = linears[0].weight.detach()
    else:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        for linear, part in zip(linears, torch.split(weight, sizes), strict=True):
            linear.weight = nn.Parameter(part, requires_grad=False)
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat(
            [
                weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
                for linear in linears
            ]
        )
    return Projection(weight, bias, parts)
