"""Tiny random models and tokenizers, built on the spot: the default tests need no download and no real model."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
)
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def byte_tokenizer(
    chat_template: str | None = CHATML,
    *,
    bos: str | None = "<|im_start|>",
    eos: str = "<|im_end|>",
    pad: str | None = "<|im_end|>",
    extra: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"),
    adds_bos: bool = False,
) -> Any:
    """A tokenizer with one token per UTF-8 byte (ids 0..255) and the special tokens behind them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = [token for token in dict.fromkeys((bos, eos, pad, *extra)) if token is not None]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if adds_bos:
        assert bos is not None
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokens = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{name: token for name, token in tokens.items() if token is not None}
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    """A two-layer config of a family, with grouped heads and a window shorter than most texts where it has one."""
    from transformers import AutoConfig

    common: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "pad_token_id": 257,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    special: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": 16},
        "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
        "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 8},
        "qwen2": {"head_dim": None},
        "phi3": {"head_dim": None},
    }
    if family == "gpt2":
        common = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "pad_token_id": 257}
        common |= {"bos_token_id": 256, "eos_token_id": 257}
    if family == "gpt_neox":
        common.pop("num_key_value_heads"), common.pop("head_dim")
    merged = {**common, **special.get(family, {}), **changes}
    return AutoConfig.for_model(family, **{name: value for name, value in merged.items() if value is not None})


def save_base(directory: Path, family: str = "llama", tokenizer: Any = None, seed: int = 0, **changes: Any) -> Path:
    """Write a random causal language model with a tokenizer, the way a base model comes from a hub."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    _spread(model)
    model.save_pretrained(directory)
    (tokenizer or byte_tokenizer()).save_pretrained(directory)
    return directory


def save_classifier(
    directory: Path, family: str = "llama", tokenizer: Any = None, seed: int = 0, num_labels: int = 1, **changes: Any
) -> Path:
    """Write a random sequence classifier, the way a reward model trained elsewhere comes."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(tiny_config(family, **changes), dtype=torch.float32)
    config_labels = {index: f"LABEL_{index}" for index in range(num_labels)}
    if num_labels != model.config.num_labels:
        config = tiny_config(family, **changes)
        config.id2label, config.label2id = config_labels, {label: index for index, label in config_labels.items()}
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    _spread(model)
    model.save_pretrained(directory)
    (tokenizer or byte_tokenizer()).save_pretrained(directory)
    return directory


def _spread(model: Any) -> None:
    """Make the random weights large enough that every token matters to the score."""
    import torch

    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5 / parameter.shape[-1] ** 0.5)
            elif "norm" not in name and "ln" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte tokenizer whose pad is its eos."""
    return save_base(tmp_path_factory.mktemp("base") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """A checkpoint of ours: LoRA (with weights that matter) and head on ``tiny_base``. Copy it before changing it."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "checkpoint", tiny_base)


def make_checkpoint(directory: Path, base: Path, training_length: int = 256) -> Path:
    from rm_core.checkpoint import write_checkpoint
    from rm_core.model import RewardModel

    model = RewardModel.for_training(
        str(base), lora={"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}, seed=1, dtype="float32", device="cpu"
    )
    randomise_adapter(model)
    write_checkpoint(model, directory, training_length=training_length)
    return directory


def randomise_adapter(model: Any) -> Any:
    """Give LoRA's B matrices and the head weights that matter; returns the generator, to go on drawing from."""
    import torch

    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.network.named_parameters():
            if parameter.requires_grad and ("lora_B" in name or "score" in name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return generator


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint: Path) -> Any:
    """The checkpoint loaded in fp32."""
    from rm_core.model import RewardModel

    return RewardModel.load(str(tiny_checkpoint), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Real preference data beside the repository; tests that need it skip where it is absent."""

    def path(name: str) -> Path:
        file = SHARED_DATA / name
        if not file.is_file():
            pytest.skip(f"real preference data is absent: {file.name} is not in {SHARED_DATA}")
        return file

    return path


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Path]:
    """The bundled chat model, converted once into its cache."""
    from rm_core.smollm2 import BundledModelError, bundled_model_path

    try:
        yield bundled_model_path()
    except BundledModelError as error:
        pytest.skip(str(error))
