"""Which models may be computed over a token tree: decided from the config, proved by a self-check.

Invariant: a model that is not known to be causal with full or sliding attention in every layer, or whose tree gives
other numbers than its padded rows, uses padded rows, and says why.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rm_core.attention import AttentionCall, TreePlan

if TYPE_CHECKING:
    from rm_core.network import RewardNetwork

# Frequencies that depend on the longest position of the batch: a long batch mate would change a short one's reward.
_BATCH_DEPENDENT_ROPE = {"longrope", "dynamic"}

# Largest relative difference of hidden states between tree and padded rows. Rounding gives about 1e-6 and, over tens of
# layers in bf16, a few per cent; a wrong mask or position gives about 1.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.2}


def why_no_tree(backbone: Any) -> str | None:
    """The reason why this decoder cannot use the tree, or None where nothing in its config speaks against it."""
    config = backbone.config
    odd = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - {"full_attention", "sliding_attention"}
    if odd:
        return f"it has layers of type {', '.join(sorted(odd))}"
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        return "its positions are ALiBi biases"
    if getattr(config, "model_type", "") in ("bloom", "mpt"):
        return "its positions are ALiBi biases"
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    if any(name.rpartition(".")[2] == "sinks" for name, _ in backbone.named_parameters()):
        return "its attention has sinks"
    if kinds := sorted(_rope_types(config) & _BATCH_DEPENDENT_ROPE):
        return f"its rotary frequencies ({kinds[0]}) depend on the longest sequence of a batch"
    dropout = max((_attention_dropout(module) for module in backbone.modules()), default=0.0)
    if backbone.training and dropout > 0:
        return f"it trains with attention dropout ({dropout:g})"
    if config._attn_implementation not in ("sdpa", "eager", "tree_over_sdpa", "tree_over_eager"):
        return f"its attention is {config._attn_implementation!r}"
    return None


def _attention_dropout(layer: torch.nn.Module) -> float:
    """The rate that a layer gives its attention function, as a number or as the module that has it."""
    rates = [getattr(layer, name, None) for name in ("attention_dropout", "attn_dropout")]
    found = [rate.p if isinstance(rate, torch.nn.Dropout) else rate for rate in rates]
    return max((rate for rate in found if isinstance(rate, float)), default=0.0)


class SelfCheck:
    """A nested tree of random ids, and its hidden states by padded rows, to hold other ways of computing it against."""

    def __init__(self, network: "RewardNetwork") -> None:
        from rm_core.tree import build_tree

        self._network = network
        vocabulary = int(network.backbone.config.get_text_config().vocab_size)
        generator = np.random.default_rng(0)
        shared, branch = generator.integers(0, vocabulary, 24).tolist(), generator.integers(0, vocabulary, 20).tolist()
        tails = [generator.integers(0, vocabulary, length).tolist() for length in (3, 17, 9, 30, 1)]
        sequences = [
            [*shared, *branch, *tails[0]], [*shared, *branch, *tails[1]], [*shared, *tails[2]], tails[3], tails[4]
        ]  # fmt: skip
        self._tree = build_tree(sequences)
        self.calls: list[AttentionCall] = []
        """What transformers asked of each layer's attention the last time."""
        with self._inference():
            self._expected = network.padded_hidden(sequences).float()

    @contextmanager
    def _inference(self) -> Iterator[None]:
        was_training = self._network.training
        self._network.eval()
        try:
            with torch.inference_mode():
                yield
        finally:
            self._network.train(was_training)

    def layers(self) -> str | None:
        """The reason not to compute a tree by the model's own layers, or None where they agree; records ``calls``."""
        plan = TreePlan.of(self._tree)
        try:
            hidden = self._run(plan)
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            return f"its forward does not take a tree ({type(error).__name__})"
        self.calls = plan.calls
        layers = int(self._network.backbone.config.get_text_config().num_hidden_layers)
        if len(plan.calls) != layers:
            return f"{len(plan.calls)} of its {layers} layers pass the tree to their attention"
        return self._compare(hidden)

    def difference(self) -> str | None:
        """The reason not to trust the way the network computes a tree now, or None where it agrees."""
        return self._compare(self._run(TreePlan.of(self._tree)))

    def _run(self, plan: TreePlan) -> torch.Tensor:
        with self._inference():
            return self._network.run_tree(self._tree.ids, self._tree.positions, plan, self._tree.last).float()

    def _compare(self, hidden: torch.Tensor) -> str | None:
        worst = float(((hidden - self._expected).norm(dim=1) / self._expected.norm(dim=1)).max())
        dtype = next(self._network.backbone.parameters()).dtype
        if not worst <= _TOLERANCE.get(dtype, 1e-3):
            return f"the self-check found hidden states that differ by {worst:.2g} (relative) from padded rows"
        return None


def batches_by_rope_regime(config: Any, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of sequences that may share a padded batch.

    With batch-dependent rotary frequencies, all that fit the original context share one, and every longer sequence
    is computed alone; for any other model there is one batch.
    """
    everything = list(range(len(sequences)))
    parameters = [p for p in _rope_parameters(config) if p.get("rope_type") in _BATCH_DEPENDENT_ROPE]
    if not parameters:
        return [everything]
    context = int(
        parameters[0].get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
    )
    short = [index for index in everything if len(sequences[index]) <= context]
    return ([short] if short else []) + [[index] for index in everything if len(sequences[index]) > context]


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """A config's rotary parameters: one set, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "rope_type" in parameters or not parameters:
        yield parameters
    else:
        yield from (value for value in parameters.values() if isinstance(value, Mapping))


def _rope_types(config: Any) -> set[str]:
    return {str(parameters.get("rope_type")) for parameters in _rope_parameters(config)}
