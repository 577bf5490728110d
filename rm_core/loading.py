"""Build the network from folders: a base to train on, a full sequence classifier, or a base with a peft adapter.

Invariant: nothing that is served has a weight that was missing from its files or freshly initialised.
"""

import importlib.util
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rm_core.exact_loading import build_exactly
from rm_core.network import RewardNetwork, UnsupportedModelError
from rm_core.smollm2 import resolve_model_name
from rm_core.weights import WeightsError, read_tensor, tensor_names, weight_files

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


class LoadError(ValueError):
    """A model that cannot be loaded, or must not be served. One line that says what to do."""


class Source(NamedTuple):
    """A model folder on this disk, the name it was asked for by, and its hub revision where it came from a hub."""

    name: str
    directory: Path
    revision: str | None


def locate(name: str, revision: str | None = None) -> Source:
    """Find a model folder: a local directory, the bundled model's name, or a hub id (downloaded, or from its cache)."""
    resolved = resolve_model_name(name)
    directory = Path(resolved)
    if directory.is_dir():
        return Source(name, directory, None)
    if directory.exists() or resolved.startswith((".", "/", "~")) or resolved.count("/") != 1:
        raise LoadError(f"{name}: no such folder (and not a hub id of the form owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(resolved, revision=revision, allow_patterns=_HUB_FILES))
    except LocalEntryNotFoundError:
        raise LoadError(f"{name}: no such folder, and the model hub cannot be reached and has no cached copy") from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise LoadError(f"{name}: no such folder, and not on the model hub: {_first_line(error)}") from None
    return Source(name, path, path.name)


def kind_of(source: Source) -> Literal["adapter", "model"]:
    """Whether the folder holds a peft adapter or a full model; LoadError where it holds neither."""
    if (source.directory / "adapter_config.json").is_file():
        return "adapter"
    if (source.directory / "config.json").is_file():
        return "model"
    raise LoadError(f"{source.name}: the folder has neither config.json nor adapter_config.json, so it holds no model")


def load_tokenizer(directory: Path) -> Any:
    """The folder's tokenizer; a missing one is an error, never a guess."""
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise LoadError(f"{directory} has no tokenizer (tokenizer.json)")
    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # any reader of a broken tokenizer file may raise anything; it is translated, not hidden
        raise LoadError(f"{directory}: the tokenizer cannot be read: {_first_line(error)}") from error


def load_model(source: Source, dtype: torch.dtype) -> RewardNetwork:
    """A full one-label sequence classifier, complete in its files, with its head in the precision it was stored in."""
    config = _config(source)
    architectures = getattr(config, "architectures", None) or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise LoadError(
            f"{source.name}: is {', '.join(architectures) or 'of unknown architecture'}, which has no reward head; "
            "train one on it with `rm-train fit`"
        )
    if config.num_labels != 1:
        raise LoadError(f"{source.name}: has {config.num_labels} labels; a reward model has exactly one")
    classifier, missing = _build(source, dtype)
    _refuse_missing(source, missing, "it would be random")
    network = RewardNetwork(classifier)
    if network.is_decoder:
        _restore_fp32_head(network, source.directory)
    elif dtype != torch.float32:
        # Encoders are computed in fp32 as a whole: read the weights again, unrounded.
        return load_model(source, torch.float32)
    return network


def load_adapter(source: Source, base: Source) -> RewardNetwork:
    """A base with a peft adapter merged into it in fp32. The adapter file must hold every weight that it trained."""
    from peft import PeftModel, get_peft_model_state_dict
    from peft.tuners import tuners_utils

    if getattr(tuners_utils, "_torch_supports_distributed", True) and torch.distributed.is_available():
        importlib.import_module("torch.distributed.tensor")  # peft names it without importing it
    stored = tensor_names(source.directory)
    classifier, fresh = _build(base, torch.float32)
    _refuse_missing(
        source, {name for name in fresh if not _stored_by_adapter(name, stored)}, "neither in base nor adapter"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns about what is checked, and refused, below
        try:
            model = PeftModel.from_pretrained(classifier, str(source.directory))
        except (ValueError, RuntimeError, KeyError) as error:
            raise LoadError(f"{source.name}: the adapter does not fit {base.name}: {_first_line(error)}") from error
    expected = set(get_peft_model_state_dict(model))
    _refuse_missing(source, expected - stored, "the adapter's config asks for it")
    if unknown := sorted(stored - expected):
        raise LoadError(f"{source.name}: tensor {unknown[0]!r} has no place in the model (of {len(unknown)} such)")
    return RewardNetwork(model.merge_and_unload(safe_merge=True))


def build_for_training(
    base: Source,
    *,
    lora: Mapping[str, Any] | None,
    dtype: torch.dtype,
    seed: int,
    head_init_scale: float,
    start: Source | None = None,
    quantize: Literal["4bit", "8bit"] | None = None,
    device: torch.device | None = None,
    num_heads: int = 1,
) -> RewardNetwork:
    """A base with a new head, and LoRA (options of ``peft.LoraConfig``) or all weights trainable.

    The new layer that gives the reward starts normal with std ``head_init_scale`` / sqrt(H): small, so that the first
    loss is ln 2; other new layers (an encoder's pooler and norms) start as their architecture has it. Full fine-tuning
    keeps fp32 weights. The base's own dropout is off: it would compare the two answers of a pair under different noise.
    A base that is a reward model keeps its head. ``start`` is an adapter on this base
    to go on from; without ``lora`` it is merged. ``quantize`` stores the base's linear layers in so many bits, the head
    left out; it needs CUDA. ``num_heads`` heads are trained beside each other, each from its own start. Raises
    LoadError.
    """
    if start is not None and num_heads > 1:
        raise LoadError(f"{start.name}: has a head to go on with; head.count {num_heads} needs a base without one")
    if start is not None and lora is None:
        network = load_adapter(start, base)
        switch_dropout_off(network)
        network.requires_grad_(True)
        return network
    quantization = {} if quantize is None else _quantization(quantize, dtype, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # transformers draws the new layers from the global generator
        classifier, fresh = _from_pretrained(base, dtype if lora is not None else torch.float32, **quantization)
    switch_dropout_off(classifier)
    classifier.config.pad_token_id = classifier.config.pad_token_id or 0
    generator = torch.Generator().manual_seed(seed)
    modules = sorted({name.rpartition(".")[0] for name in fresh})
    for name in modules:
        module = classifier.get_submodule(name)
        if isinstance(module, torch.nn.Linear) and module.out_features == classifier.config.num_labels:
            with torch.no_grad():
                noise = torch.randn(module.weight.shape, generator=generator)
                module.weight.copy_(noise * head_init_scale / module.in_features**0.5)
                if module.bias is not None:
                    module.bias.zero_()
    if num_heads > 1:
        _widen_head(classifier, base, "score.weight" in fresh, num_heads, head_init_scale, generator)
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        options = LoraConfig(task_type="SEQ_CLS", modules_to_save=_head_modules(classifier, modules), **lora)
        with warnings.catch_warnings():
            # peft 0.21 reads an attribute that transformers 5.24 renamed
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            # GPT-2 keeps its weights transposed; peft sees that, and sets the option as it must be
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
            classifier = get_peft_model(classifier, options)
        if start is not None:
            _continue_adapter(classifier, start)
    return RewardNetwork(classifier)


def switch_dropout_off(module: torch.nn.Module) -> None:
    """In every layer, whether dropout is a module there or a rate that a layer keeps under such a name."""
    for layer in module.modules():
        rates = ["p"] if isinstance(layer, torch.nn.modules.dropout._DropoutNd) else []
        rates += [name for name in vars(layer) if "dropout" in name or name.endswith("pdrop")]
        for name in rates:
            if isinstance(getattr(layer, name), float):
                setattr(layer, name, 0.0)


def _widen_head(
    classifier: Any, base: Source, is_fresh: bool, num_heads: int, scale: float, generator: torch.Generator
) -> None:
    """Give a decoder's new head so many rows, each drawn for itself."""
    head = getattr(classifier, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise LoadError(f"{base.name}: head.count {num_heads} needs a decoder (a model whose head is one linear layer)")
    if not is_fresh:
        raise LoadError(f"{base.name}: has a head to go on with; head.count {num_heads} needs a base without one")
    rows = torch.randn((num_heads, head.in_features), generator=generator) * scale / head.in_features**0.5
    head.weight = torch.nn.Parameter(rows.to(head.weight.dtype))
    head.out_features = num_heads


def _continue_adapter(classifier: Any, start: Source) -> None:
    """Put the weights of an adapter, its head among them, into a fresh one that is built the same way."""
    from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict

    old, new = PeftConfig.from_pretrained(str(start.directory)), classifier.active_peft_config
    for name in ("r", "lora_alpha", "use_rslora", "use_dora"):
        if getattr(old, name) != getattr(new, name):
            raise LoadError(
                f"{start.name}: was trained with {name} {getattr(old, name)}, the lora section says "
                f"{getattr(new, name)}; training goes on with the same adapter only"
            )
    found = {name: read_tensor(start.directory, name) for name in tensor_names(start.directory)}
    stored = {name: tensor for name, tensor in found.items() if tensor is not None}
    expected = get_peft_model_state_dict(classifier)
    if odd := sorted(set(stored) ^ set(expected)):
        where = "only the lora section asks for" if odd[0] in expected else "the lora section does not ask for"
        raise LoadError(f"{start.name}: {where} {odd[0]!r}; training goes on with the same lora.target_modules only")
    for name, tensor in expected.items():
        if stored[name].shape != tensor.shape:
            raise LoadError(f"{start.name}: {name!r} has another shape than the lora section gives")
    set_peft_model_state_dict(classifier, stored)


def _quantization(quantize: str, dtype: torch.dtype, device: torch.device | None) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a quantised base. Raises LoadError where that cannot work."""
    if device is None or device.type != "cuda":
        raise LoadError(f"model.quantize: {quantize} needs a CUDA device, and there is none here; set it to null")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise LoadError("model.quantize: needs the package bitsandbytes (pip install bitsandbytes)")
    from transformers import BitsAndBytesConfig

    # the one-row head would be rounded to nothing (all scores 0.0), so it and its like stay as they are
    skip = ["score", "classifier", "pooler", "head"]
    config = (
        BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=skip,
        )
        if quantize == "4bit"
        else BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
    )
    return {"quantization_config": config, "device_map": {"": device}}


def adapter_base(source: Source) -> str:
    """The base model that an adapter folder names."""
    config = json.loads((source.directory / "adapter_config.json").read_text())
    name = config.get("base_model_name_or_path")
    if not name:
        raise LoadError(f"{source.name}: adapter_config.json names no base model (base_model_name_or_path)")
    return str(name)


def head_tensor_names(names: Iterable[str]) -> set[str]:
    """Which stored tensors are the reward head: `score`, `classifier`, pooler or head layers."""
    tops = {"score", "classifier", "pooler", "head"}
    return {name for name in names if tops & set(name.split(".")[:4])}


def _head_modules(classifier: Any, fresh: list[str]) -> list[str]:
    own = [name for name, _ in classifier.named_children() if name != classifier.base_model_prefix]
    parts = {name.split(".")[0] for name in fresh} | set(own)
    # peft adds these two itself for SEQ_CLS; layers without weights (dropout) have nothing to train or save.
    return sorted(
        name
        for name in parts - {"score", "classifier"}
        if any(True for _ in classifier.get_submodule(name).parameters())
    )


def _config(source: Source) -> Any:
    try:
        return AutoConfig.from_pretrained(source.directory)
    except (ValueError, OSError, KeyError) as error:
        raise LoadError(f"{source.name}: config.json cannot be read: {_first_line(error)}") from error


def _build(source: Source, dtype: torch.dtype) -> tuple[Any, set[str]]:
    """A classifier to serve and the names of its weights that were in no file: by copying, where that is enough."""
    config = _config(source)
    config.num_labels = 1
    head = frozenset(f"{name}.weight" for name in ("score", "classifier"))
    try:
        built = build_exactly(source.directory, config, dtype, may_miss=head)
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{source.name}: the weights cannot be read: {_first_line(error)}") from error
    return built or _from_pretrained(source, dtype)


def _from_pretrained(source: Source, dtype: torch.dtype, **options: Any) -> tuple[Any, set[str]]:
    """The classifier and the names of its weights that were in no file; ``options`` go to ``from_pretrained``."""
    weight_files(source.directory)
    config = _config(source)
    config.num_labels = 1
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns about a fresh head, which the caller either refuses or initialises
    bar = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS")
    logging.disable_progress_bar()
    try:
        classifier, info = AutoModelForSequenceClassification.from_pretrained(
            source.directory, config=config, dtype=dtype, output_loading_info=True, use_safetensors=True, **options
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise LoadError(f"{source.name}: cannot be loaded as a sequence classifier: {_first_line(error)}") from error
    finally:
        logging.set_verbosity(level)
        if bar is None:
            logging.enable_progress_bar()
    mismatched = {str(key[0]) if isinstance(key, tuple) else str(key) for key in info.get("mismatched_keys", ())}
    return classifier, set(info["missing_keys"]) | mismatched


def _stored_by_adapter(name: str, stored: set[str]) -> bool:
    return any(other.endswith(name) for other in stored)


def _refuse_missing(source: Source, missing: set[str], why: str) -> None:
    if missing:
        first = sorted(missing, key=lambda name: (not head_tensor_names([name]), name))[0]
        what = "the reward head is" if head_tensor_names([first]) else "weights are"
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise LoadError(f"{source.name}: {what} missing: {first!r}{more} is in no file; {why}")


def _restore_fp32_head(network: RewardNetwork, directory: Path) -> None:
    """from_pretrained rounds the head to the model's dtype; put back what the file holds."""
    for name, parameter in network.head.named_parameters():
        stored = read_tensor(directory, f"score.{name}")
        if stored is not None:
            with torch.no_grad():
                parameter.copy_(stored)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


__all__ = [
    "LoadError",
    "Source",
    "UnsupportedModelError",
    "WeightsError",
    "adapter_base",
    "build_for_training",
    "head_tensor_names",
    "kind_of",
    "load_adapter",
    "load_model",
    "load_tokenizer",
    "locate",
]
