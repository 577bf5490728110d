"""Import transformers without what no server uses: a third of the time from the command to the first answer.

At module level, transformers loads torch's compiler front end (``torch._dynamo``, which loads sympy) for a few
decorators and one class, and distributed tensors for loading in shards. While it is imported here, both are absent.

Invariant: nothing is absent afterwards. What needs the compiler (FlexAttention on a GPU) imports it then, in full. Only
peft keeps in mind that it saw no distributed tensors, of which a server has none.
"""

import gc
import importlib
import json
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger("rm_server")

_COMPILER = "torch._dynamo"
_WRAPPER = "torch._dynamo._trace_wrapped_higher_order_op"
_MODULES = (
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Import under this: half a million objects that stay, which the garbage collector would visit again and again.

    A fifth of the time to the first answer. Does nothing once torch is imported, so a server at work is not affected.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_transformers(checkpoint: str) -> None:
    """Import what loading this checkpoint needs, as far as that can be told from its folder.

    Call it before anything else imports transformers; later it does nothing.
    """
    if "transformers.modeling_utils" in sys.modules or _COMPILER in sys.modules:
        return
    model_type = _model_type(checkpoint)
    try:
        with _without_compiler(), _without_distributed():
            for name in _MODULES:
                importlib.import_module(name)
            if model_type is not None:
                name = _module_of(model_type)
                with suppress(ModuleNotFoundError):
                    importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            if any((folder / "adapter_config.json").is_file() for folder in weight_folders(checkpoint)):
                importlib.import_module("peft")
    except Exception as error:  # another version of them may need more of torch: then it gets it
        logger.debug("transformers is imported in full (%s)", type(error).__name__)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("transformers", "peft")]:
            del sys.modules[name]


def weight_folders(checkpoint: str) -> list[Path]:
    """The folders on this disk that hold a checkpoint's weights, as far as its files say; its own is the first."""
    from rm_core.smollm2 import BundledModelError, resolve_model_name

    folders: list[Path] = []
    try:
        folder = Path(resolve_model_name(checkpoint))
        folders.append(folder)
        record = folder / "reward_model.json"
        if not (folder / "config.json").is_file() and record.is_file():
            folders.append(Path(resolve_model_name(json.loads(record.read_text())["base_model"]["name"])))
    except (OSError, ValueError, KeyError, TypeError, BundledModelError):
        pass  # whatever is wrong with it, loading says so in its own words
    return [folder for folder in folders if folder.is_dir()]


def _model_type(checkpoint: str) -> str | None:
    """The architecture that the checkpoint's config, or that of its base, names; None where it is not on this disk."""
    for folder in weight_folders(checkpoint):
        try:
            model_type = json.loads((folder / "config.json").read_text())["model_type"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(model_type, str) and model_type.isidentifier():
            return model_type
    return None


def _module_of(model_type: str) -> str:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    return str(model_type_to_module_name(model_type))


@contextmanager
def _without_compiler() -> Iterator[None]:
    import torch

    compiler: Any = types.ModuleType(_COMPILER)
    compiler.__path__ = []
    compiler.disable = compiler.allow_in_graph = compiler.assume_constant_result = _unchanged
    wrapper: Any = types.ModuleType(_WRAPPER)
    wrapper.TransformGetItemToIndex = _TransformGetItemToIndex
    stand_ins = {_COMPILER: compiler, _WRAPPER: wrapper}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        if vars(torch).get("_dynamo") is compiler:
            del torch._dynamo


@contextmanager
def _without_distributed() -> Iterator[None]:
    import torch.distributed

    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    return function if function is not None else _unchanged


class _TransformGetItemToIndex:
    """Becomes the real one when it is made: masks of an unusual form are built under it."""

    def __new__(cls) -> Any:
        return importlib.import_module(_WRAPPER).TransformGetItemToIndex()
