"""The YAML of ``rm-train fit``: what it accepts, and that what it refuses is named in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rm_core.config_docs import describe_settings, markdown_reference
from rm_train.config import FitConfig, dump_resolved
from rm_train.config_file import ConfigError, load_config

MINIMAL = "run: {name: a}\nmodel: {base: b}\ndata: {train: [pairs.jsonl]}\n"


def write(directory: Path, text: str) -> Path:
    path = directory / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_minimal_config_has_defaults_for_everything_else(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert config.lora is not None
    assert config.lora.target_modules == "all-linear"
    assert config.data.train[0].path == "pairs.jsonl"


def test_null_lora_means_full_fine_tuning(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, MINIMAL + "lora: null\n")).lora is None


def test_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL + "lora: {options: {use_rslora: true}}\ntrain: {epochs: 3}\n"))
    text = dump_resolved(config)
    assert FitConfig.model_validate(json.loads(text)) == config
    assert json.loads(text)["train"]["warmup_ratio"] == 0.05


def test_scientific_notation_without_a_point_is_a_number_everywhere(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-4 as text."""
    config = load_config(write(tmp_path, MINIMAL + "lora: {options: {x: 1e-4}}\ntrain: {learning_rate: 2e-5}\n"))
    assert config.train.learning_rate == 2e-5
    assert config.lora is not None
    assert config.lora.options == {"x": 1e-4}


def test_overrides_are_typed_by_yaml_and_the_last_one_wins(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, MINIMAL),
        ["train.epochs=2", "train.epochs=3", "lora.target_modules=[q_proj, v_proj]", "data.eval=[held.jsonl]"],
    )
    assert config.train.epochs == 3
    assert config.lora is not None
    assert config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.data.eval is not None
    assert config.data.eval[0].path == "held.jsonl"


def test_override_below_a_null_section_makes_the_section(tmp_path: Path) -> None:
    lora = load_config(write(tmp_path, MINIMAL + "lora: null\n"), ["lora.r=4"]).lora
    assert lora is not None
    assert lora.r == 4


def test_short_form_of_a_source_may_name_a_split(tmp_path: Path) -> None:
    text = "run: {name: a}\nmodel: {base: b}\ndata: {train: ['org/name:test', 'C:/x/y.jsonl', {path: z, split: s}]}\n"
    sources = load_config(write(tmp_path, text)).data.train
    assert [(source.path, source.split) for source in sources] == [
        ("org/name", "test"),
        ("C:/x/y.jsonl", "train"),
        ("z", "s"),
    ]


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("train: {learning_rat: 1}", "train.learning_rat: unknown key; did you mean train.learning_rate?"),
        ("learning_rate: 1", "learning_rate: unknown key; did you mean head.learning_rate or train.learning_rate?"),
        ("trian: {}", "trian: unknown key; did you mean train?"),
        ("head: {xyz: 1}", "head.xyz: unknown key; known here: count, learning_rate, init_scale"),
        ("train: {epochs: many}", "train.epochs: must be a valid integer"),
        ("loss: {centering: -1}", "loss.centering: must be greater than or equal to 0, not -1"),
        ("train: {schedule: step}", "train.schedule: must be 'linear', 'cosine' or 'constant', not 'step'"),
        ("train: 3", "train: must be a mapping of keys to values, not 3"),
        ("lora: {target_modules: q_proj}", "lora.target_modules: must be 'all-linear' or a list of module names"),
        ("lora: {target_modules: []}", "lora.target_modules: is empty"),
        ("lora: {options: {r: 3}}", "lora.options: 'r' cannot be given here; use lora.r"),
        ("lora: {options: {lora_bias: true}}", "lora.options: 'lora_bias' cannot be given here; such an adapter"),
        ("lora: {options: {init_lora_weights: pissa_niter_4}}", "lora.options: init_lora_weights 'pissa_niter_4' is"),
        ("train: {max_tokens: 100}", "train.max_tokens: 100 cannot hold one pair of model.max_length 1024"),
        ("train: {early_stopping_patience: 1}", "train.early_stopping_patience: needs train.eval_every"),
    ],
)
def test_wrong_key_or_value_is_named_with_file_and_dotted_key(tmp_path: Path, addition: str, message: str) -> None:
    path = write(tmp_path, MINIMAL + addition + "\n")
    assert refusal(path).startswith(f"{path}: {message}")


def test_wrong_key_inside_a_source_is_named_with_its_place_in_the_list(tmp_path: Path) -> None:
    text = "run: {name: a}\nmodel: {base: b}\ndata: {train: [a, {path: b, mixweight: 2}, {path: c, columns: {promt: x}}]}\n"
    problem = refusal(write(tmp_path, text))
    assert "data.train[1].mixweight: unknown key; did you mean data.train[1].mix_weight?" in problem
    assert "data.train[2].columns: 'promt' is not one of our column names; did you mean prompt?" in problem


def test_missing_required_keys_are_named(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, "run: {name: a}\ndata: {train: [x]}\n")).endswith("model: is required")
    assert "data.train: " in refusal(write(tmp_path, "run: {name: a}\nmodel: {base: b}\ndata: {train: []}\n"))


def test_mixing_weight_of_an_evaluation_source_is_refused(tmp_path: Path) -> None:
    override = "data.eval=[{path: a, mix_weight: 2}]"
    assert "data.eval[0].mix_weight: evaluation sees every pair once" in refusal(write(tmp_path, MINIMAL), override)


def test_a_wrong_override_is_named_instead_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert refusal(path, "train.epoch=2") == "--set train.epoch=2: train.epoch: unknown key; did you mean train.epochs?"
    assert refusal(path, "train.epochs").startswith("--set train.epochs: write it as key.path=value")
    assert "data.train is a list; set it as a whole" in refusal(path, "data.train.0=x")
    assert "is not valid YAML" in refusal(path, "data.train=[a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("- a\n", "must be a mapping of sections, not a list"),
        ("run: {name: a\n", "is not valid YAML"),
        (MINIMAL + "run: {name: b}\n", ":4: is not valid YAML: the key 'run' is given twice"),
    ],
)
def test_a_file_that_is_no_config_says_why(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(write(tmp_path, text))


def test_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}")
    assert "is not UTF-8" in refusal(tmp_path / "latin.yaml")


def test_every_key_is_documented_with_type_default_and_bounds() -> None:
    settings = {setting.key: setting for section in describe_settings(FitConfig) for setting in section.settings}
    rank = settings["lora.r"]
    assert (rank.type, rank.default, rank.bounds) == ("integer", "16", "≥ 1")
    assert settings["run.name"].default == "required"
    assert settings["data.train[].mix_weight"].bounds == "> 0, ≤ 1000"
    assert settings["model.dtype"].type == "`auto`, `float32`, `bfloat16`"
    assert settings["train.max_steps"].type == "integer or null"
    assert all(setting.doc for setting in settings.values())


def test_documentation_can_carry_columns_of_its_own() -> None:
    text = markdown_reference(FitConfig, extra={"flag": lambda setting: f"--{setting.key}"})
    assert "| key | flag | type | default | bounds | what it does |" in text
    assert "| `train.epochs` | --train.epochs | integer | `1` |" in text


def test_undocumented_key_is_an_error() -> None:
    from pydantic import BaseModel

    class Bare(BaseModel):
        size: int = 3

    with pytest.raises(ValueError, match="size: the field has no docstring"):
        describe_settings(Bare)


def test_data_and_config_modules_do_not_import_torch() -> None:
    modules = "config_file, data, baselines, metrics, comparisons, doctor"
    code = (
        f"import sys; from rm_train import {modules}; "
        "sys.exit(', '.join(m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
