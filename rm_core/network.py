"""The forward pass: token ids in, one fp32 reward per sequence out.

Invariant: a reward is read at the sequence's own last token, found from its length and never from a token id, and the
head is computed in fp32 on fp32 hidden states, whatever dtype the backbone runs in.

Shapes: B sequences, T padded length, N packed tokens, H hidden size.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from rm_core.attention import TreePlan, install
from rm_core.fused import FusedDecoder
from rm_core.fused_training import FusedTrainer
from rm_core.llama_layers import NotFusedError
from rm_core.tree import build_tree, count_tokens
from rm_core.tree_support import SelfCheck, batches_by_rope_regime, why_no_tree

Ids = Sequence[int]


class UnsupportedModelError(ValueError):
    """A model that is not a one-label sequence classifier we can read a reward from."""


class RewardNetwork(nn.Module):
    """A one-label sequence classifier of transformers (peft-wrapped or not) with our pooling and head.

    Decoders (``model`` + ``score``) are pooled and projected here, over a token tree where the architecture allows it.
    Encoders keep their own pooler and classifier, and are computed in fp32 as a whole.
    """

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier: Any = classifier
        self.training = classifier.training  # a new Module says True whatever is inside it
        base = _base(classifier)
        self.heads: torch.Tensor | None
        self.register_buffer("heads", None, persistent=False)  # a loaded checkpoint's single heads, fp32 [K, H]
        self.is_decoder = isinstance(_unwrapped(getattr(base, "score", None)), nn.Linear)
        if getattr(base.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(f"{type(base).__name__} is an encoder-decoder; use a decoder or an encoder")
        self.fp32_head()
        self.tree_off: str | None = "it is an encoder" if not self.is_decoder else why_no_tree(self.backbone)
        """Why sequences are computed one by one in padded rows; None where the token tree is used."""
        self._fused: FusedDecoder | FusedTrainer | None = None
        self.fused_off: str | None = "it was not asked for"
        """Why the model goes through transformers' own layers; None where a fused forward pass is used."""
        if self.tree_off is None:
            install(self.backbone)

    @property
    def base(self) -> Any:
        """The transformers model with its classification head, inside any peft wrapper."""
        return _base(self.classifier)

    @property
    def backbone(self) -> Any:
        """The transformer without its head; LoRA layers are inside it."""
        return getattr(self.base, self.base.base_model_prefix)

    @property
    def head(self) -> nn.Linear:
        """A decoder's head: [1, H] in fp32; [K, H] while several are trained."""
        head = _unwrapped(self.base.score)
        assert isinstance(head, nn.Linear)
        return head

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.classifier.parameters()).device
        return device

    def fp32_head(self) -> None:
        """Put the head (for encoders: everything) into fp32. Called again after any ``.to(dtype)``."""
        if self.is_decoder:
            self.base.score.float()
        else:
            self.classifier.float()

    def use_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass. The embeddings' output needs a gradient for LoRA to get one."""
        self.base.activation_checkpointing_enable({"use_reentrant": False})
        self.classifier.enable_input_require_grads()

    # ------------------------------------------------------------------ forward

    @property
    def num_heads(self) -> int:
        """How many heads the reward is the mean of."""
        if not self.is_decoder:
            return 1
        return self.head.out_features if self.heads is None else len(self.heads)

    def forward(self, sequences: Sequence[Ids], *, all_heads: bool = False) -> torch.Tensor:
        """Rewards, fp32 [B], of ``sequences`` (each at least one id); gradients flow where they are enabled.

        ``all_heads``: what ``project_all`` gives of a decoder.
        """
        if self.tree_off is None:
            hidden_BH = self.tree_hidden(sequences)
            return self.project_all(hidden_BH) if all_heads else self.project(hidden_BH)
        parts = batches_by_rope_regime(self.backbone.config, sequences)
        if len(parts) == 1:
            return self.forward_padded(sequences, all_heads=all_heads)
        rewards = torch.cat(
            [self.forward_padded([sequences[index] for index in part], all_heads=all_heads) for part in parts]
        )
        return rewards[torch.tensor([index for part in parts for index in part]).argsort().to(rewards.device)]

    def batch_tokens(self, sequences: Sequence[Ids]) -> int:
        """How many tokens one forward of these sequences computes."""
        if self.tree_off is None:
            return count_tokens(sequences)
        return len(sequences) * max(map(len, sequences), default=0)

    @property
    def scores_in_lanes(self) -> bool:
        """Whether several threads may score at the same time: only our own forward pass keeps nothing between calls."""
        return isinstance(self._fused, FusedDecoder)

    def tree_hidden(self, sequences: Sequence[Ids]) -> torch.Tensor:
        """Hidden states [B, H] at the sequences' last tokens, computed over their token tree."""
        tree = build_tree(sequences)
        return self.run_tree(tree.ids, tree.positions, TreePlan.of(tree), tree.last)

    def run_tree(self, ids: np.ndarray, positions: np.ndarray, plan: TreePlan, rows: np.ndarray) -> torch.Tensor:
        """Hidden states [B, H] at ``rows`` (int64 [B]) of a packed row: ids and positions int64 [N]."""
        ids_N, positions_N, rows_B = (torch.from_numpy(array).to(self.device) for array in (ids, positions, rows))
        if self._fused is not None and self._takes(self._fused, plan):
            return self._fused(ids_N, positions_N, plan, rows_B)
        hidden_1NH: torch.Tensor = self.backbone(
            input_ids=ids_N[None],
            position_ids=positions_N[None],
            # transformers hands a mask of four dimensions through as it is; ours comes from the tree instead
            attention_mask=torch.zeros((1, 1, 1, 1), device=self.device),
            use_cache=False,
            tree=plan,
        ).last_hidden_state
        return hidden_1NH[0, rows_B]

    def _takes(self, fused: FusedDecoder | FusedTrainer, plan: TreePlan) -> bool:
        if isinstance(fused, FusedDecoder):
            return not torch.is_grad_enabled()
        recomputes = getattr(self.backbone, "gradient_checkpointing", False)  # activations, to hold fewer of them
        return not (plan.prefixes or plan.keep or recomputes) and fused.takes(plan)

    def forward_padded(
        self, sequences: Sequence[Ids], padding_side: Literal["right", "left"] = "right", *, all_heads: bool = False
    ) -> torch.Tensor:
        """Rewards by the plain path, one row per sequence: the reference, and what models without a tree use."""
        if self.is_decoder:
            hidden_BH = self.padded_hidden(sequences, padding_side)
            return self.project_all(hidden_BH) if all_heads else self.project(hidden_BH)
        input_ids_BT, mask_BT, _ = self._pad(sequences, padding_side)
        logits: torch.Tensor = self.classifier(input_ids=input_ids_BT, attention_mask=mask_BT).logits
        return logits[:, 0].float()

    def padded_hidden(self, sequences: Sequence[Ids], padding_side: Literal["right", "left"] = "right") -> torch.Tensor:
        """Hidden states [B, H] at the sequences' last tokens, by the plain path."""
        hidden_BTH, last_B = self._padded_states(sequences, padding_side)
        return hidden_BTH[torch.arange(len(sequences), device=self.device), last_B]

    def _padded_states(self, sequences: Sequence[Ids], padding_side: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [B, T, H] by the plain path, and the column of each last token [B]."""
        input_ids_BT, mask_BT, last_B = self._pad(sequences, padding_side)
        position_BT = (mask_BT.cumsum(dim=1) - 1).clamp(min=0)
        hidden_BTH: torch.Tensor = self.backbone(
            input_ids=input_ids_BT, attention_mask=mask_BT, position_ids=position_BT, use_cache=False
        ).last_hidden_state
        return hidden_BTH, last_B

    def read_padded(self, sequences: Sequence[Ids], first: Sequence[int]) -> list[torch.Tensor]:
        """For each sequence of a decoder what ``project_all`` gives at its tokens from ``first`` on, by the plain path:
        fp32 [length − first, 1 + K]."""
        read: dict[int, torch.Tensor] = {}
        for part in batches_by_rope_regime(self.backbone.config, sequences):
            hidden_BTH, _ = self._padded_states([sequences[index] for index in part], "right")
            for row, index in enumerate(part):
                read[index] = self.project_all(hidden_BTH[row, first[index] : len(sequences[index])])
        return [read[index] for index in range(len(sequences))]

    def project(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """The head on pooled hidden states [B, H]: rewards [B], fp32 even under autocast.

        While several heads are trained: their rewards [B, K] in training mode, their mean [B] otherwise.
        """
        with torch.autocast(device_type=hidden_BH.device.type, enabled=False):
            rewards_BK: torch.Tensor = self.base.score(hidden_BH.float())
            if rewards_BK.shape[1] == 1:
                return rewards_BK[:, 0].clone()  # torch's fully_shard warns of views
            return rewards_BK if self.training else rewards_BK.mean(dim=1)

    def project_all(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """The reward and behind it each single head's, fp32 [B, 1 + K]; [B, 1] where there is one head alone."""
        with torch.autocast(device_type=hidden_BH.device.type, enabled=False):
            rewards_BK: torch.Tensor = self.base.score(hidden_BH.float())
            if rewards_BK.shape[1] > 1:
                return torch.cat([rewards_BK.mean(dim=1, keepdim=True), rewards_BK], dim=1)
            if self.heads is None:
                return rewards_BK
            return torch.cat([rewards_BK, hidden_BH.float() @ self.heads.T], dim=1)

    def check_tree(self, *, fuse: Literal["inference", "training"] | None = None) -> None:
        """Compute a small tree both ways and turn the tree off, with the reason, where the two differ.

        ``fuse``: take a fused forward pass from now on, if that agrees too. For inference no weight may change any
        more, for training only those of LoRA.
        """
        self.unfuse("it was not asked for")
        if self.tree_off is not None:
            self.unfuse("the model is not computed over a tree")
            return
        check = SelfCheck(self)
        self.tree_off = check.layers()
        if self.tree_off is None and fuse is not None:
            build = FusedDecoder if fuse == "inference" else FusedTrainer
            try:
                self._fused, self.fused_off = build(self.backbone, check.calls), None
            except NotFusedError as error:
                self.fused_off = str(error)
                return
            if (reason := check.difference()) is not None:
                self.unfuse(reason)

    def unfuse(self, reason: str) -> None:
        """Compute by transformers' layers again. Needed before weights are changed, moved or saved."""
        if self._fused is not None:
            with torch.no_grad():
                for parameter in self.backbone.parameters():
                    parameter.data = parameter.data.clone()  # views of joined weights no longer
        self._fused, self.fused_off = None, reason

    def _pad(self, sequences: Sequence[Ids], side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids [B, T], mask [B, T] and the column of each last token [B]."""
        lengths = torch.tensor([len(ids) for ids in sequences])
        width = int(lengths.max())
        input_ids_BT = torch.zeros((len(sequences), width), dtype=torch.long)
        mask_BT = torch.zeros_like(input_ids_BT)
        for row, ids in enumerate(sequences):
            at = slice(0, len(ids)) if side == "right" else slice(width - len(ids), width)
            input_ids_BT[row, at] = torch.as_tensor(ids)
            mask_BT[row, at] = 1
        last_B = lengths - 1 if side == "right" else torch.full_like(lengths, width - 1)
        return input_ids_BT.to(self.device), mask_BT.to(self.device), last_B.to(self.device)


def _base(classifier: nn.Module) -> Any:
    unwrap: Any = getattr(classifier, "get_base_model", None)
    return classifier if unwrap is None else unwrap()


def _unwrapped(module: Any) -> Any:
    """What is inside peft's ModulesToSaveWrapper: the trained copy, not the original it keeps beside it."""
    saved = getattr(module, "modules_to_save", None)
    return saved[module.active_adapters[0]] if isinstance(saved, nn.ModuleDict) else module
