"""From a checkpoint's name to a model that may be served, and what that takes in memory. Imports torch when called.

Invariant: the settings that the server was started with hold for every checkpoint that it loads later.
"""

import logging
import os

from rm_server.imports import collector_paused, import_transformers, weight_folders
from rm_server.memory import MIB, Need, bound_device_memory, device_memory, host_memory
from rm_server.scorer import ServedModel
from rm_server.settings import ServerSettings, SettingsError

logger = logging.getLogger("rm_server")


def load_model(settings: ServerSettings, checkpoint: str | None = None) -> ServedModel:
    """Load and verify a checkpoint, the settings' own where none is given.

    Call it on the thread that will run the model: torch's thread count belongs to a thread. Raises CheckpointError, and
    SettingsError for a prefix cache that is larger than the memory.
    """
    from rm_core.weights import begin_hashing

    checkpoint = checkpoint or settings.checkpoint
    assert checkpoint is not None, "this is a bug: a server without a checkpoint loads no model"
    for folder in weight_folders(checkpoint):
        begin_hashing(folder)  # beside the imports, which leave the other cores idle
    with collector_paused():
        import torch

        import_transformers(checkpoint)
        from rm_core.model import RewardModel

    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    bound_device_memory(_device(settings), settings.memory_fraction)
    _check_cache(settings)
    model = RewardModel.load(checkpoint, dtype=settings.dtype, device=settings.device)
    logger.info(
        "loaded %s: %s on %s (%s), %d CPU threads (%s), %d tokens a batch (%s), sequences up to %d tokens, %s, %s",
        model.reward_id,
        model.dtype,
        model.device,
        model.dtype_reason,
        torch.get_num_threads(),
        _why_threads(settings),
        settings.max_batch_tokens,
        "as set" if "max_batch_tokens" in settings.model_fields_set else "the default",
        settings.max_length or model.max_length,
        "prefixes shared" if model.sharing_off is None else f"no prefix sharing: {model.sharing_off}",
        "each sequence alone (exact)" if settings.exact else f"{settings.prefix_cache_mb} MiB of prefix cache",
    )
    return model


def measure_model(settings: ServerSettings, checkpoint: str) -> Need:
    """What loading a checkpoint takes, from the headers of its files. Raises CheckpointError for what is not there."""
    import torch

    from rm_core.hardware import choose_compute
    from rm_core.model import count_weights

    num_weights, kind = count_weights(checkpoint)
    compute = choose_compute(settings.dtype, settings.device)
    served = num_weights * compute.dtype.itemsize
    # An adapter is merged in fp32, which is then rounded.
    highest = num_weights * 4 if kind == "adapter" else served
    if compute.device.type != "cpu":
        return Need(host=highest, device=served)
    packed = served if compute.dtype == torch.bfloat16 else 0  # a second copy, in the order the matrix units read
    return Need(host=max(highest, packed), device=served)


def _why_threads(settings: ServerSettings) -> str:
    if settings.num_threads:
        return "num_threads"
    return "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "torch's choice for this machine"


def _check_cache(settings: ServerSettings) -> None:
    device = _device(settings)
    memory = device_memory(device) or host_memory()
    if memory is not None and not settings.exact and settings.prefix_cache_mb * MIB > memory.total:
        raise SettingsError(
            f"prefix_cache_mb ({settings.prefix_cache_mb}) is over the memory of {memory.total // MIB} MiB ({device}); "
            "the cache could never be filled"
        )


def _device(settings: ServerSettings) -> str:
    import torch

    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"
