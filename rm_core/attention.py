"""Attention over a token tree: each token sees its ancestors and the past of its own segment.

Invariant: the result is what full causal attention gives each sequence alone. A query's keys are cut into runs (each
ancestor, and its own segment); each run is attended to apart and the parts are merged by their log-sum-exp, which is
exact (FlashAttention, Dao et al. 2022, arXiv 2205.14135, section 3.1).

Shapes: N packed tokens, S tokens of a run, Q query heads, K key/value heads, D head size.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from rm_core.tree import Segment, TokenTree

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class LayerKV(NamedTuple):
    """Keys and values of one layer for a run of tokens: [S, K, D] each, rotary embedding applied."""

    keys: torch.Tensor
    values: torch.Tensor


class Prefix(NamedTuple):
    """Tokens of an earlier forward that stand before the roots of packed rows ``start`` to ``end``."""

    start: int
    end: int
    length: int
    layers: Sequence[LayerKV]
    """At least ``length`` tokens a layer; the first ``length`` of them count."""


class AttentionCall(NamedTuple):
    """What transformers asks of the attention of one layer."""

    scaling: float
    sliding_window: int | None
    softcap: float | None


@dataclass
class TreePlan:
    """What the attention of one forward needs to know beside queries, keys and values."""

    segments: Sequence[Segment]
    longest: int
    """Longest sequence, in tokens, prefix included: a sliding window of at least this many tokens hides nothing."""
    prefixes: Sequence[Prefix] = ()
    """For disjoint runs of rows; the segments' positions count from the prefix's end."""
    keep: Sequence[torch.Tensor] = ()
    """Rows [S] (int64) whose keys and values are wanted afterwards, one tensor for each path."""
    kept: list[list[LayerKV]] = field(default_factory=list)
    """For each of ``keep`` what was asked for, layer by layer."""
    block_mask: Any = None
    """FlexAttention's masks by window, built once a forward (CUDA)."""
    calls: list[AttentionCall] = field(default_factory=list)
    """What the layers asked for, in order: a model that does not pass ``tree=`` down never does."""

    @classmethod
    def of(cls, tree: TokenTree) -> "TreePlan":
        """The plan of a tree without anything before it."""
        return cls(tree.segments, int(tree.positions.max()) + 1)

    def prefix_of(self, row: int) -> Prefix | None:
        """What stands before the root of a packed row."""
        return next((prefix for prefix in self.prefixes if prefix.start <= row < prefix.end), None)


def tree_attention(
    module: nn.Module,
    query_1QND: torch.Tensor,
    key_1KND: torch.Tensor,
    value_1KND: torch.Tensor,
    plan: TreePlan,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention output [1, N, Q, D] of a packed row. Differentiable in query, key and value (without a prefix)."""
    plan.calls.append(AttentionCall(scaling, sliding_window, softcap))
    # Under autocast, rotary embedding turns query and key into fp32 while the value stays in the lower type.
    query_1QND, key_1KND = query_1QND.to(value_1KND.dtype), key_1KND.to(value_1KND.dtype)
    layer = int(getattr(module, "layer_idx", 0))
    for path, kept_rows in enumerate(plan.keep):
        if len(plan.kept) <= path:
            plan.kept.append([])
        keys, values = (x[0].index_select(1, kept_rows).transpose(0, 1).contiguous() for x in (key_1KND, value_1KND))
        plan.kept[path].append(LayerKV(keys, values))
    window = sliding_window if sliding_window is not None and sliding_window < plan.longest else None
    if query_1QND.device.type == "cuda":
        return _flex(query_1QND, key_1KND, value_1KND, plan, layer, scaling, window, softcap)
    if window is not None or softcap is not None:
        return _by_segment(query_1QND, key_1KND, value_1KND, plan, layer, scaling, window, softcap)
    repeats = query_1QND.shape[1] // key_1KND.shape[1]
    if torch.is_grad_enabled() and (query_1QND.requires_grad or key_1KND.requires_grad or value_1KND.requires_grad):
        assert not plan.prefixes, "this is a bug: training has no cached prefix"
        output: torch.Tensor = _MergedAttention.apply(query_1QND, key_1KND, value_1KND, plan.segments, repeats, scaling)
        return output
    output, normaliser = _merged_forward(query_1QND, key_1KND, value_1KND, plan.segments, repeats, scaling)
    for prefix in plan.prefixes:
        rows = slice(prefix.start, prefix.end)
        before = [_heads(x[: prefix.length].transpose(0, 1)[None], repeats) for x in prefix.layers[layer]]
        part, sums = _flash(query_1QND[:, :, rows], *before, 0.0, False, scale=scaling)
        _merge(output[:, :, rows], normaliser[:, :, rows], part, sums)
    return output.transpose(1, 2)


# ------------------------------------------------------------------ CPU, full attention: flash parts, merged


def _heads(x_1KND: torch.Tensor, repeats: int) -> torch.Tensor:
    """Repeat key/value heads for their query heads: [1, Q, N, D]."""
    return x_1KND if repeats == 1 else x_1KND.repeat_interleave(repeats, dim=1)


def _merged_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Sequence[Segment],
    repeats: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [1, Q, N, D] (token-major in memory) and log-sum-exp [1, Q, N]."""
    key, value = _heads(key, repeats), _heads(value, repeats)
    num_heads, num_tokens, size = query.shape[1:]
    output = query.new_empty((1, num_tokens, num_heads, size)).transpose(1, 2)
    normaliser = query.new_empty((1, num_tokens, num_heads), dtype=torch.float32).transpose(1, 2)
    for segment in segments:
        rows = slice(segment.start, segment.end)
        part, sums = _flash(query[:, :, rows], key[:, :, rows], value[:, :, rows], 0.0, True, scale=scaling)
        output[:, :, rows], normaliser[:, :, rows] = part, sums
    for segment in segments:
        below = slice(segment.end, segment.end_of_descendants)
        if segment.end < segment.end_of_descendants:
            rows = slice(segment.start, segment.end)
            part, sums = _flash(query[:, :, below], key[:, :, rows], value[:, :, rows], 0.0, False, scale=scaling)
            _merge(output[:, :, below], normaliser[:, :, below], part, sums)
    return output, normaliser


def _merge(output: torch.Tensor, normaliser: torch.Tensor, part: torch.Tensor, sums: torch.Tensor) -> None:
    """Add a part to ``output`` and ``normaliser`` in place."""
    share = torch.sigmoid(sums - normaliser)
    output.lerp_(part, share[..., None].to(output.dtype))
    torch.logaddexp(normaliser, sums, out=normaliser)


class _MergedAttention(torch.autograd.Function):
    """The merged attention with its gradient.

    The flash backward of a part, given the *merged* output and log-sum-exp, yields exactly that part's share of the
    gradient: with P = exp(QKᵀ − lse), dV = PᵀdO and dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Sequence[Segment],
        repeats: int,
        scaling: float,
    ) -> torch.Tensor:
        output, normaliser = _merged_forward(query, key, value, segments, repeats, scaling)
        ctx.save_for_backward(query, key, value, output, normaliser)
        ctx.segments, ctx.repeats, ctx.scaling = segments, repeats, scaling
        return output.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, normaliser = ctx.saved_tensors
        repeats, scaling = ctx.repeats, ctx.scaling
        key, value = _heads(key, repeats), _heads(value, repeats)
        grad_output = gradients[0].transpose(1, 2)
        grad_query = torch.zeros_like(query)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for segment in ctx.segments:
            rows = slice(segment.start, segment.end)
            below = slice(segment.end, segment.end_of_descendants)
            for queries, causal in ((rows, True), (below, False)):
                if queries.start == queries.stop:
                    continue
                of_query, of_key, of_value = _flash_backward(
                    grad_output[:, :, queries], query[:, :, queries], key[:, :, rows], value[:, :, rows],
                    output[:, :, queries], normaliser[:, :, queries], 0.0, causal, scale=scaling,
                )  # fmt: skip
                grad_query[:, :, queries] += of_query
                grad_key[:, :, rows] += of_key
                grad_value[:, :, rows] += of_value
        return grad_query, _fold(grad_key, repeats), _fold(grad_value, repeats), None, None, None


def _fold(grad_1QND: torch.Tensor, repeats: int) -> torch.Tensor:
    """Sum the gradients of a key/value head's copies: [1, K, N, D]."""
    if repeats == 1:
        return grad_1QND
    _, num_heads, num_tokens, size = grad_1QND.shape
    return grad_1QND.view(1, num_heads // repeats, repeats, num_tokens, size).sum(dim=2)


# ------------------------------------------------------------------ CPU, sliding window or soft cap: a mask per segment


def _by_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: TreePlan,
    layer: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One attention per segment over [ancestors + own], by ordinary differentiable operations: [1, N, Q, D]."""
    repeats = query.shape[1] // key.shape[1]
    lengths = [segment.length for segment in plan.segments]
    # split and cat copy once; their backward does too, where slicing would add into a full-size zero tensor
    keys, values = torch.split(key, lengths, dim=2), torch.split(value, lengths, dim=2)
    outputs = []
    for index, (segment, q) in enumerate(zip(plan.segments, torch.split(query, lengths, dim=2), strict=True)):
        chain = [index]
        while (parent := plan.segments[chain[-1]].parent) >= 0:
            chain.append(parent)
        chain.reverse()
        k, v = [keys[i] for i in chain], [values[i] for i in chain]
        prefix = plan.prefix_of(segment.start)
        if prefix is not None:
            before = [x[: prefix.length].transpose(0, 1)[None] for x in prefix.layers[layer]]
            k, v = [before[0], *k], [before[1], *v]
        k_all, v_all = _heads(torch.cat(k, dim=2), repeats), _heads(torch.cat(v, dim=2), repeats)
        first = segment.position + (prefix.length if prefix else 0)
        position_q = torch.arange(first, first + segment.length, device=query.device)[:, None]
        position_k = torch.arange(k_all.shape[2], device=query.device)[None, :]
        allowed = position_k <= position_q
        if window is not None:
            allowed = allowed & (position_q - position_k < window)
        if softcap is None:
            outputs.append(scaled_dot_product_attention(q, k_all, v_all, attn_mask=allowed, scale=scaling))
            continue
        scores = torch.tanh((q @ k_all.transpose(2, 3)) * scaling / softcap) * softcap
        weights = scores.float().masked_fill(~allowed, float("-inf")).softmax(dim=-1).to(q.dtype)
        outputs.append(weights @ v_all)
    return torch.cat(outputs, dim=2).transpose(1, 2)


# ------------------------------------------------------------------ CUDA: FlexAttention


def _flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: TreePlan,
    layer: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """FlexAttention with a block mask made from the tree: [1, N, Q, D]."""
    if plan.prefixes:
        # keys of all prefixes, one behind the other, stand before those of the packed row
        before = [[x[: p.length].transpose(0, 1)[None] for x in p.layers[layer]] for p in plan.prefixes]
        key, value = (
            torch.cat([*(k for k, _ in before), key], dim=2),
            torch.cat([*(v for _, v in before), value], dim=2),
        )
    masks = plan.block_mask = plan.block_mask or {}
    if window not in masks:
        masks[window] = tree_block_mask(plan, query.shape[2], query.device, window)

    def cap(score: torch.Tensor, *_: Any) -> torch.Tensor:
        assert softcap is not None
        return torch.tanh(score / softcap) * softcap

    output: torch.Tensor = _compiled_flex()(
        query,
        key,
        value,
        score_mod=None if softcap is None else cap,
        block_mask=masks[window],
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)


def tree_mask_rule(plan: TreePlan, device: torch.device, window: int | None) -> Callable[..., torch.Tensor]:
    """FlexAttention's mask function of a tree: which packed (or prefix) key a packed query may see.

    A segment's descendants stand in one run behind it, so "key's segment is the query's or its ancestor" is: the query
    lies before the end of the key's segment's descendants. With "key not behind query" that is the whole rule.
    """
    lengths = torch.tensor([segment.length for segment in plan.segments])
    reach = torch.tensor([segment.end_of_descendants for segment in plan.segments]).repeat_interleave(lengths)
    start = torch.tensor([segment.start for segment in plan.segments]).repeat_interleave(lengths)
    position = torch.arange(len(reach)) - start
    position += torch.tensor([segment.position for segment in plan.segments]).repeat_interleave(lengths)
    # A prefix is a key run like a segment, seen by the rows that it stands before: keys are [prefixes, packed row].
    first, position_k = torch.arange(len(reach)), position
    for prefix in reversed(plan.prefixes):
        position[prefix.start : prefix.end] += prefix.length
        first = torch.cat([torch.full((prefix.length,), prefix.start), first])
        reach = torch.cat([torch.full((prefix.length,), prefix.end), reach])
        position_k = torch.cat([torch.arange(prefix.length), position_k])
    before = sum(prefix.length for prefix in plan.prefixes)
    position_k = torch.cat([position_k[:before], position]).to(device)
    first, reach, position = first.to(device), reach.to(device), position.to(device)

    def allowed(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen = (first[k] <= q) & (q < reach[k])
        return seen if window is None else seen & (position[q] - position_k[k] < window)

    return allowed


def tree_block_mask(plan: TreePlan, num_queries: int, device: torch.device, window: int | None) -> Any:
    """The block mask of ``tree_mask_rule``, for queries of the packed row and keys of prefix + packed row."""
    from torch.nn.attention.flex_attention import create_block_mask

    rule = tree_mask_rule(plan, device, window)
    num_keys = num_queries + sum(prefix.length for prefix in plan.prefixes)
    return create_block_mask(rule, 1, 1, num_queries, num_keys, device=device)


_flex_function: Callable[..., Any] | None = None


def _compiled_flex() -> Callable[..., Any]:
    global _flex_function
    if _flex_function is None:
        from torch.nn.attention.flex_attention import flex_attention

        # dynamic: a recompile for every new length costs seconds each
        _flex_function = torch.compile(flex_attention, dynamic=True)
    return _flex_function


# ------------------------------------------------------------------ registration with transformers

_PLAIN = {"eager": "tree_over_eager", "sdpa": "tree_over_sdpa"}


def install(backbone: Any) -> None:
    """Make a transformers model call ``tree_attention`` when its forward is given ``tree=``, and its own otherwise."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register("tree_over_eager", _tree_over_eager)
    AttentionInterface.register("tree_over_sdpa", _tree_over_sdpa)
    AttentionMaskInterface.register("tree_over_eager", eager_mask)
    AttentionMaskInterface.register("tree_over_sdpa", sdpa_mask)
    plain = backbone.config._attn_implementation
    if plain in _PLAIN:
        backbone.config._attn_implementation = _PLAIN[plain]


def _tree_over_sdpa(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[Any, None]:
    plan = kwargs.pop("tree", None)
    if plan is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: tuple[Any, None] = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return plain
    return _call_tree(module, query, key, value, plan, kwargs), None


def _tree_over_eager(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[Any, Any]:
    plan = kwargs.pop("tree", None)
    if plan is None:
        # each modeling file has its own eager function, for instance Gemma 2's with a soft cap
        plain: tuple[Any, Any] = sys.modules[type(module).__module__].eager_attention_forward(
            module, query, key, value, mask, **kwargs
        )
        return plain
    return _call_tree(module, query, key, value, plan, kwargs), None


def _call_tree(module: nn.Module, query: Any, key: Any, value: Any, plan: TreePlan, kwargs: dict[str, Any]) -> Any:
    scaling = kwargs.get("scaling")
    return tree_attention(
        module,
        query,
        key,
        value,
        plan,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
    )
