"""From a config to a model that can be trained, and the refusal of options that others would ignore.

Invariant: an option that has no effect is an error that names it.
"""

import dataclasses
import difflib
import warnings
from typing import Any

import peft
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from rm_core.model import RewardModel
from rm_train.config import FitConfig
from rm_train.config_file import ConfigError
from rm_train.rows import first_line


def build_model(config: FitConfig, device: str) -> RewardModel:
    """The base with its new head and adapter. Raises CheckpointError or ConfigError."""
    try:
        with warnings.catch_warnings():
            # peft only warns of target_parameters that are found nowhere
            warnings.filterwarnings("error", message="target_parameters=.* no parameter was matched")
            model = RewardModel.for_training(
                config.model.base,
                revision=config.model.revision,
                lora=_lora_options(config),
                seed=config.run.seed,
                head_init_scale=config.head.init_scale,
                dtype=config.model.dtype,
                device=device,
                text_as=config.model.text_as,
                quantize=config.model.quantize,
                num_heads=config.head.count,
            )
    except (ValueError, TypeError, ImportError, RuntimeWarning) as error:
        if config.lora is None or type(error).__module__.startswith("rm_"):
            raise
        if not isinstance(error, ValueError) and not config.lora.options:
            raise
        # peft's own refusals of a set of options
        options = f", options: {', '.join(config.lora.options)}" if config.lora.options else ""
        raise ConfigError(
            f"lora (target_modules: {config.lora.target_modules}{options}): {first_line(error)}"
        ) from error
    if config.lora is not None and isinstance(config.lora.target_modules, list):
        names = [name for name, _ in model.network.base.named_modules()]
        for target in config.lora.target_modules:
            # peft says nothing where one of several is found nowhere
            if not any(name == target or name.endswith(f".{target}") for name in names):
                last = {
                    name.rpartition(".")[2]
                    for name, module in model.network.base.named_modules()
                    if hasattr(module, "lora_A")
                }
                raise ConfigError(
                    f"lora.target_modules: no layer is called {target!r}; adapted are {', '.join(sorted(last))}"
                )
    return model


def _lora_options(config: FitConfig) -> dict[str, Any] | None:
    lora = config.lora
    if lora is None:
        return None
    known = [field.name for field in dataclasses.fields(peft.LoraConfig)]
    for name in lora.options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"lora.options: peft.LoraConfig has no argument {name!r}{hint}")
    own = {
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": lora.target_modules,
    }
    return {**own, **lora.options}


def check_trackers(names: list[str]) -> None:
    """accelerate leaves a tracker whose package is missing out without a word."""
    available = [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(f"train.report_to: {name!r} is no tracker; known: {', '.join(LOGGER_TYPE_TO_CLASS)}")
        if name not in available:
            raise ConfigError(f"train.report_to: the package of {name!r} is not installed (pip install {name})")
