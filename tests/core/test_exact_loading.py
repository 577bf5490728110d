"""Building by copying gives what transformers' general loader gives, or steps aside for it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rm_core import loading
from rm_core.exact_loading import build_exactly
from rm_core.loading import LoadError, Source, load_model
from tests.conftest import save_base, save_classifier

HEAD = frozenset({"score.weight"})


def both_ways(directory: Path, dtype: torch.dtype):
    source = Source("name", directory, None)
    config = loading._config(source)
    config.num_labels = 1
    return build_exactly(directory, config, dtype, HEAD), loading._from_pretrained(source, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt_neox"])
def test_it_builds_what_the_general_loader_builds(tmp_path, family, dtype):
    built, (general, general_missing) = both_ways(save_classifier(tmp_path / "model", family), dtype)
    assert built is not None, "this family needs no more than copying"
    classifier, missing = built
    assert missing == general_missing == set()
    for tensors in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(classifier, tensors)()), dict(getattr(general, tensors)())
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype, name
            assert ours[name].device == tensor.device, name
            assert torch.equal(ours[name], tensor), name
    assert not any(module.training for module in classifier.modules())
    assert classifier.config.to_dict() == general.config.to_dict()
    assert classifier.config._attn_implementation == general.config._attn_implementation


def test_a_base_without_a_head_gets_a_zero_one_that_is_named_as_missing(tmp_path):
    built, (general, general_missing) = both_ways(save_base(tmp_path / "base"), torch.float32)
    assert built is not None
    classifier, missing = built
    assert missing == general_missing == {"score.weight"}
    assert not classifier.score.weight.any()
    assert torch.equal(classifier.model.embed_tokens.weight, general.model.embed_tokens.weight)


@pytest.mark.parametrize("change", ["rename", "shape", "missing", "extra"])
def test_files_that_do_not_fit_by_name_and_shape_are_left_to_the_general_loader(tmp_path, change):
    directory = save_classifier(tmp_path / "model")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = tensors[name] if change == "extra" else tensors.pop(name)
    if change == "rename":
        tensors[name + "s"] = tensor
    elif change == "shape":
        tensors[name] = tensor[:-1].contiguous()
    elif change == "extra":
        tensors["model.layers.7.mlp.up_proj.weight"] = tensor.clone()
    save_file(tensors, file, metadata={"format": "pt"})
    source = Source("name", directory, None)
    config = loading._config(source)
    config.num_labels = 1
    assert build_exactly(directory, config, torch.float32, HEAD) is None
    if change != "extra":
        with pytest.raises(LoadError):
            load_model(source, torch.float32)
