"""Build a sequence classifier from files that hold its weights under their own names: most models, most of the time.

transformers' general loader builds a model without memory first, for which torch loads its compiler and sympy: seconds
of imports at the start of a server. Here the model is built in memory that is not filled, and the files are copied in.

Invariant: every weight of the model gets the tensor of its own name and shape, or the general loader does it all.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification

from rm_core.weights import weight_files

_NO_PART_OF_IT = "lm_head."
"""A language model's output layer, which a classifier on top of it does not have."""


def build_exactly(
    directory: Path, config: Any, dtype: torch.dtype, may_miss: frozenset[str] = frozenset()
) -> tuple[Any, set[str]] | None:
    """The classifier in ``dtype`` and the names of its weights that were in no file, which are zero.

    None where that takes more than copying: another name or shape, a weight missing that is not in ``may_miss``, tied,
    converted, quantised or mixed-precision weights, an architecture that transformers does not know by itself.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.initialization import no_init_weights

    if getattr(config, "quantization_config", None) is not None or getattr(config, "auto_map", None):
        return None
    try:
        with no_init_weights():
            classifier = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    except (ValueError, KeyError, ImportError):
        return None  # the general loader says what is wrong
    fp32_modules = [getattr(classifier, f"_keep_in_fp32_modules{kind}", None) for kind in ("", "_strict")]
    if any(fp32_modules) or getattr(classifier, "_tied_weights_keys", None):
        return None
    if get_model_conversion_mapping(classifier, add_legacy=False):
        return None
    own: dict[str, torch.Tensor] = classifier.state_dict()
    files = {
        name: file for file in weight_files(directory) for name in _names(file) if not name.startswith(_NO_PART_OF_IT)
    }
    missing = set(own) - set(files)
    if set(files) - set(own) or missing - may_miss:
        return None
    with torch.no_grad():
        for file in sorted(set(files.values())):
            with safe_open(str(file), framework="pt") as opened:
                for name in (name for name, where in files.items() if where == file):
                    stored = opened.get_tensor(name)
                    if stored.shape != own[name].shape or not stored.is_floating_point():
                        return None
                    own[name].copy_(stored)
        for name in missing:
            own[name].zero_()
    return classifier.eval(), missing


def _names(file: Path) -> list[str]:
    with safe_open(str(file), framework="pt") as opened:
        return list(opened.keys())
