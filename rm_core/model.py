"""``RewardModel``: a network, its tokenizer and renderer, and the record that says what they are.

Invariant: everything that scores (trainer's evaluation, server, command line) goes through ``score_ids``.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rm_core.chat import Renderer, RenderingRules, sha256_of
from rm_core.checkpoint import (
    CheckpointError,
    CheckpointRecord,
    WeightHashes,
    compute_hashes,
    read_record,
    renderer_for,
    reward_id_of,
    verify_golden,
    verify_identity,
)
from rm_core.hardware import Compute, DtypeName, choose_compute
from rm_core.lanes import Lanes
from rm_core.loading import (
    LoadError,
    Source,
    adapter_base,
    build_for_training,
    kind_of,
    load_adapter,
    load_model,
    load_tokenizer,
    locate,
)
from rm_core.network import RewardNetwork, UnsupportedModelError
from rm_core.padded_passes import score_padded
from rm_core.passes import Scored, score_in_passes
from rm_core.prefix_cache import PrefixCache
from rm_core.reward_heads import as_mean, check_mean, offsets_of, read_heads, write_heads
from rm_core.smollm2 import BundledModelError
from rm_core.token_reads import TokenReads
from rm_core.weights import WeightsError, count_parameters, hash_tensors


class RewardModel:
    """A reward model ready to score or to train. Build it with ``load`` or ``for_training``."""

    def __init__(
        self,
        network: RewardNetwork,
        renderer: Renderer,
        compute: Compute,
        *,
        name: str,
        kind: Literal["adapter", "model"],
        base: Source,
        hashes: WeightHashes | None = None,
        record: CheckpointRecord | None = None,
    ) -> None:
        self.network = network
        self.renderer = renderer
        self.tokenizer = renderer.tokenizer
        self.compute = compute
        self.name = name
        self.kind = kind
        self.base = base
        self.record = record
        self.quantization: str | None = None
        """How the base was stored while training; a loaded checkpoint is never quantised."""
        self.head_offsets = offsets_of(record.head_means) if record else None
        """What is taken off the single heads' rewards, float32 [K]; None where nothing is known of it."""
        self._hashes = hashes
        self._lanes = Lanes()
        config = network.base.config.get_text_config()
        limits = [getattr(config, "max_position_embeddings", None), self.tokenizer.model_max_length]
        # tokenizers without a limit say 10^30
        self.max_length = min((int(limit) for limit in limits if limit and limit < 1e9), default=2**20)
        self.vocab_size = int(config.vocab_size)

    # ------------------------------------------------------------------ building

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: DtypeName = "auto",
        device: str = "auto",
        verify: bool = True,
        base: Source | str | None = None,
        rules: RenderingRules | None = None,
    ) -> "RewardModel":
        """Load a checkpoint of ours, a one-label sequence classifier, or a plain peft adapter; local or from a hub.

        ``base`` overrides where an adapter's base is found. A model that was trained elsewhere is read with
        ``end: template`` unless ``rules`` say otherwise. Raises CheckpointError, in one line, for everything that is
        missing, changed, freshly initialised or not a reward model; ``verify=False`` skips hashes and golden scores.
        """
        try:
            return cls._load(path, choose_compute(dtype, device), verify, base, rules)
        except (LoadError, WeightsError, BundledModelError, UnsupportedModelError) as error:
            raise CheckpointError(str(error)) from error

    @classmethod
    def _load(
        cls, path: str, compute: Compute, verify: bool, base: Source | str | None, rules: RenderingRules | None
    ) -> "RewardModel":
        source = locate(path)
        kind = kind_of(source)
        record = read_record(source.directory)
        if kind == "model":
            origin = source
        elif isinstance(base, Source):
            origin = base
        elif base is not None or record is None:
            origin = locate(base or adapter_base(source))
        else:
            origin = locate(record.base_model.name, record.base_model.revision)
        tokenizer = load_tokenizer(source.directory if _has_tokenizer(source.directory) else origin.directory)
        rules = rules or (record.rules if record else None)
        renderer = Renderer(tokenizer, rules) if rules else Renderer.for_tokenizer(tokenizer, end="template")
        hashes = compute_hashes(source.directory, kind, origin.directory, tokenizer)
        if record and verify:
            verify_identity(record, hashes, renderer, source.directory, origin.directory)
        network = load_model(source, compute.dtype) if kind == "model" else load_adapter(source, origin)
        network.heads = read_heads(source.directory)
        if network.heads is not None:
            check_mean(network.heads, network.head.weight)
        if record and record.head_means is not None and len(record.head_means) != network.num_heads:
            raise CheckpointError(f"{source.directory}: head_means were edited: there are {network.num_heads} heads")
        model = cls(network, renderer, compute, name=path, kind=kind, base=origin, hashes=hashes, record=record)
        model.to_dtype(compute.dtype_name)
        network.to(compute.device)
        network.eval().requires_grad_(False)
        network.check_tree(fuse="inference")
        if record and verify:
            verify_golden(record, model, source.directory)
        return model

    @classmethod
    def for_training(
        cls,
        base: str,
        *,
        lora: Mapping[str, Any] | None,
        seed: int,
        revision: str | None = None,
        head_init_scale: float = 0.01,
        dtype: DtypeName = "auto",
        device: str = "auto",
        text_as: Literal["raw", "chat"] | None = None,
        end: Literal["token", "template"] | None = None,
        quantize: Literal["4bit", "8bit"] | None = None,
        num_heads: int = 1,
    ) -> "RewardModel":
        """A base model with a new head; ``lora`` are options of ``peft.LoraConfig``, None trains every weight.

        ``base`` may be a reward model to go on from: a full one, or an adapter checkpoint (with the same ``lora``). It
        then renders as its record says; ``renderer_for`` reads ``text_as`` and ``end``.
        """
        try:
            compute = choose_compute(dtype, device)
            source, start = locate(base, revision), None
            tokens = source.directory
            if kind_of(source) == "adapter":
                start, source = source, _base_of(source)
                tokens = start.directory if _has_tokenizer(start.directory) else source.directory
            record = read_record((start or source).directory)
            renderer = renderer_for(load_tokenizer(tokens), record, base, text_as=text_as, end=end)
            network = build_for_training(
                source, lora=lora, dtype=compute.dtype, seed=seed, head_init_scale=head_init_scale,
                start=start, quantize=quantize, device=compute.device, num_heads=num_heads,
            )  # fmt: skip
        except (LoadError, WeightsError, BundledModelError, UnsupportedModelError) as error:
            raise CheckpointError(str(error)) from error
        if not network.is_decoder:
            compute = _fp32(compute)
        network.to(compute.device)
        network.check_tree(fuse="training")
        kind: Literal["adapter", "model"] = "model" if lora is None else "adapter"
        model = cls(network, renderer, compute, name=base, kind=kind, base=source)
        model.quantization = quantize
        return model

    def save_weights(self, directory: Path) -> None:
        """Write weights and tokenizer as plain peft or transformers would (safetensors), without our record."""
        self.network.unfuse("its weights were saved")
        several = self.network.num_heads > 1
        with as_mean(self.network.head) if several and self.network.heads is None else nullcontext():
            self.network.classifier.save_pretrained(str(directory), safe_serialization=True)
        if several:
            write_heads(directory, self.network.head.weight if self.network.heads is None else self.network.heads)
        self.tokenizer.save_pretrained(str(directory))
        (directory / "README.md").unlink(missing_ok=True)  # peft's model card is a form with empty fields

    def to_dtype(self, dtype: str) -> None:
        """Compute the backbone in this dtype from now on; the head stays fp32, and so do encoders as a whole."""
        target = getattr(torch, dtype)
        self.network.unfuse("its dtype was changed")
        if self.network.is_decoder:
            # Weights only: rotary frequencies are buffers; in bf16 they would turn the 500th token by half a radian.
            for parameter in self.network.backbone.parameters():
                parameter.data = parameter.data.to(target)
        self.network.fp32_head()
        if not self.network.is_decoder:
            self.compute = _fp32(self.compute)
        elif target != self.compute.dtype:
            self.compute = Compute(self.compute.device, target, self.compute.reason)

    # ------------------------------------------------------------------ scoring

    def score_ids(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Rewards, float32 [N], of N id sequences in one forward; the caller bounds the tokens.

        Raises ValueError for an empty sequence. NaN or infinity is returned as such: the caller decides.
        """
        return self.score_batch(sequences).rewards

    def score_batch(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        max_tokens: int | None = None,
        cache: PrefixCache | None = None,
        read_from: Sequence[int | None] | None = None,
    ) -> Scored:
        """Rewards and what they cost, in forward passes of at most ``max_tokens`` tokens after sharing (None: in one).

        ``Scored.heads`` are without the single heads' offsets; the rewards are their mean either way.

        ``cache`` is used and filled where prefixes are shared. A model without sharing takes padded rows, and a
        sequence longer than the budget a pass of its own. ``read_from``: for each sequence the place from which on the
        reward is wanted at every token (``Scored.token_rewards``), or None. Raises ValueError for an empty sequence, a
        place outside of its sequence, and for ``read_from`` where ``token_rewards_off`` says why not.
        """
        if not all(len(ids) for ids in sequences):
            raise ValueError("an empty sequence has no reward")
        if not sequences:
            return Scored(np.zeros(0, dtype=np.float32), np.zeros(0), 0)
        budget = max_tokens or 2**62
        if read_from is not None and self.token_rewards_off is not None:
            raise ValueError(f"read_from: {self.token_rewards_off}")
        reads = TokenReads(sequences, read_from) if read_from is not None else None
        with torch.inference_mode():
            if self.network.scores_in_lanes and reads is None:
                scored = self._lanes.score(self.network, sequences, budget, cache)
            elif self.sharing_off is None:
                scored = score_in_passes(self.network, sequences, budget, cache, reads)
            else:
                scored = score_padded(self.network, sequences, budget, reads)
        if scored.heads is None or self.head_offsets is None:
            return scored
        return replace(scored, heads=scored.heads - self.head_offsets)

    # ------------------------------------------------------------------ memory

    def leave_device(self) -> int:
        """Move the weights off a GPU and return the bytes freed there; on the CPU they stay where they are (0).

        Nothing may be scored until ``return_to_device``.
        """
        if self.device.type == "cpu":
            return 0
        weights = [*self.network.parameters(), *self.network.buffers()]
        num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        self.network.to("cpu")
        return num_bytes

    def return_to_device(self) -> None:
        """Undo ``leave_device``."""
        self.network.to(self.compute.device)

    # ------------------------------------------------------------------ facts

    @property
    def dtype(self) -> str:
        return self.compute.dtype_name

    @property
    def dtype_reason(self) -> str:
        """Why these numbers, and what computes in them."""
        off = self.network.fused_off
        return f"{self.compute.reason}; {'fused layers' if off is None else f'layers of transformers: {off}'}"

    @property
    def num_heads(self) -> int:
        """How many heads the reward is the mean of."""
        return self.network.num_heads

    @property
    def shares_prefixes(self) -> bool:
        """Whether common prefixes of a batch are computed once."""
        return self.sharing_off is None

    @property
    def sharing_off(self) -> str | None:
        """Why common prefixes are not shared (the reason in words), or None where they are."""
        return self.network.tree_off

    @property
    def token_rewards_off(self) -> str | None:
        """Why no reward can be read at the single tokens (the reason in words), or None where it can."""
        return None if self.network.is_decoder else "an encoder reads the whole text for its one reward"

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def hashes(self) -> WeightHashes:
        assert self._hashes is not None, "this is a bug: a model in training has no hashes yet"
        return self._hashes

    @property
    def reward_id(self) -> str:
        """Identity of the reward; equal in every process that loads the same files."""
        return self.record.reward_id if self.record else self._computed_reward_id

    @cached_property
    def _computed_reward_id(self) -> str:
        return reward_id_of(self.hashes, self.renderer.rules)

    @property
    def tokenizer_hash(self) -> str:
        return self.hashes.tokenizer


def hash_weights(path: str, revision: str | None = None) -> str:
    """``sha256:`` of all weights in a model's files, an adapter's base included; the folders' names do not count.

    Raises CheckpointError as ``RewardModel.load`` does for what is missing.
    """
    try:
        source = locate(path, revision)
        own = hash_tensors(source.directory)
        return own if kind_of(source) == "model" else sha256_of(own + hash_tensors(_base_of(source).directory))
    except (LoadError, WeightsError, BundledModelError) as error:
        raise CheckpointError(str(error)) from error


def count_weights(path: str) -> tuple[int, Literal["adapter", "model"]]:
    """How many numbers a model's files hold, base included, and its kind; reads headers alone.

    Raises CheckpointError as ``RewardModel.load`` does for what is missing.
    """
    try:
        source = locate(path)
        kind = kind_of(source)
        if kind == "model":
            return count_parameters(source.directory), kind
        return count_parameters(_base_of(source).directory) + count_parameters(source.directory), kind
    except (LoadError, WeightsError, BundledModelError) as error:
        raise CheckpointError(str(error)) from error


def _fp32(compute: Compute) -> Compute:
    """Encoders are computed in fp32 as a whole, for their head is inside their own forward."""
    if compute.dtype == torch.float32:
        return compute
    return Compute(compute.device, torch.float32, "float32: encoders are computed in it as a whole")


def _base_of(adapter: Source) -> Source:
    """The base that an adapter's record names, or else its config."""
    record = read_record(adapter.directory)
    return locate(record.base_model.name, record.base_model.revision) if record else locate(adapter_base(adapter))


def _has_tokenizer(directory: Path) -> bool:
    return (directory / "tokenizer.json").is_file() or (directory / "tokenizer_config.json").is_file()


__all__ = ["CheckpointError", "RewardModel", "count_weights", "hash_weights"]
