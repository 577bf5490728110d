"""The forward pass: token ids in, one fp32 reward per sequence out.

Invariant: a reward is read at the sequence's own last token, found from its length and never from a token id, and the
head is computed in fp32 on fp32 hidden states, whatever dtype the backbone runs in.

Shapes: B sequences, T padded length, H hidden size.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

Ids = Sequence[int]


class UnsupportedModelError(ValueError):
    """A model that is not a one-label sequence classifier we can read a reward from."""


class RewardNetwork(nn.Module):
    """A one-label sequence classifier of transformers (peft-wrapped or not) with our pooling and head.

    Decoders (``model`` + ``score``) are pooled and projected here. Encoders keep their own pooler and classifier, and
    are computed in fp32 as a whole.
    """

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier: Any = classifier
        base = _base(classifier)
        self.is_decoder = isinstance(_unwrapped(getattr(base, "score", None)), nn.Linear)
        if getattr(base.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(f"{type(base).__name__} is an encoder-decoder; use a decoder or an encoder")
        self.fp32_head()

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
        """A decoder's head: [1, H] in fp32."""
        head = _unwrapped(self.base.score)
        assert isinstance(head, nn.Linear)
        return head

    @property
    def device(self) -> torch.device:
        return next(self.classifier.parameters()).device

    def fp32_head(self) -> None:
        """Put the head (for encoders: everything) into fp32. Called again after any ``.to(dtype)``."""
        if self.is_decoder:
            self.base.score.float()
        else:
            self.classifier.float()

    def forward(self, sequences: Sequence[Ids]) -> torch.Tensor:
        """Rewards, fp32 [B], of ``sequences`` (each at least one id); gradients flow where they are enabled."""
        return self.forward_padded(sequences)

    def use_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass. The embeddings' output needs a gradient for LoRA to get one."""
        self.classifier.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.classifier.enable_input_require_grads()

    def batch_tokens(self, sequences: Sequence[Ids]) -> int:
        """How many tokens one forward of these sequences computes."""
        return len(sequences) * max(map(len, sequences), default=0)

    def forward_padded(
        self, sequences: Sequence[Ids], padding_side: Literal["right", "left"] = "right"
    ) -> torch.Tensor:
        """The plain path, one row per sequence: the reference, and what models without a tree use."""
        lengths = torch.tensor([len(ids) for ids in sequences])
        num_rows, width = len(sequences), int(lengths.max())
        input_ids_BT = torch.zeros((num_rows, width), dtype=torch.long)
        mask_BT = torch.zeros((num_rows, width), dtype=torch.long)
        for row, ids in enumerate(sequences):
            at = slice(0, len(ids)) if padding_side == "right" else slice(width - len(ids), width)
            input_ids_BT[row, at] = torch.as_tensor(ids)
            mask_BT[row, at] = 1
        input_ids_BT, mask_BT = input_ids_BT.to(self.device), mask_BT.to(self.device)
        if not self.is_decoder:
            logits: torch.Tensor = self.classifier(input_ids=input_ids_BT, attention_mask=mask_BT).logits
            return logits[:, 0].float()
        position_BT = (mask_BT.cumsum(dim=1) - 1).clamp(min=0)
        hidden_BTH = self.backbone(
            input_ids=input_ids_BT, attention_mask=mask_BT, position_ids=position_BT, use_cache=False
        ).last_hidden_state
        last_B = (lengths - 1 if padding_side == "right" else torch.full((num_rows,), width - 1)).to(self.device)
        return self.project(hidden_BTH[torch.arange(num_rows, device=self.device), last_B])

    def project(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """The head on pooled hidden states [B, H]: rewards [B], fp32 even under autocast."""
        with torch.autocast(device_type=hidden_BH.device.type, enabled=False):
            rewards_B1: torch.Tensor = self.base.score(hidden_BH.float())
            return rewards_B1[:, 0]


def _base(classifier: nn.Module) -> Any:
    return classifier.get_base_model() if hasattr(classifier, "get_base_model") else classifier


def _unwrapped(module: Any) -> Any:
    """What is inside peft's ModulesToSaveWrapper: the trained copy, not the original it keeps beside it."""
    saved = getattr(module, "modules_to_save", None)
    return saved[module.active_adapters[0]] if isinstance(saved, nn.ModuleDict) else module
