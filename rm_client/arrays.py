"""Which kind of array an argument is. torch is looked up, never imported: where it is not loaded, nothing is a tensor.

Invariant: the same kind comes out as went in.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch


def is_tensor(value: Any) -> "TypeGuard[torch.Tensor]":
    """Whether ``value`` is a torch tensor."""
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(value, torch_module.Tensor)
