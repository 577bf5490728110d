"""The model card of a checkpoint: how to score with it, and what was measured.

Invariant: every number comes from the record; the card says nothing that ``reward_model.json`` does not.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rm_core.checkpoint import CheckpointRecord

CARD_FILE = "README.md"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


def is_hub_id(name: str) -> bool:
    """Whether a base model's name can be looked up on a hub (rather than being a folder or the bundled model)."""
    return bool(_HUB_ID.match(name))


def model_card(record: "CheckpointRecord") -> str:
    """The card as Markdown with the hub's YAML head."""
    parts = [_head(record), _what(record), _how(record), _rules(record), _measured(record), _identity(record)]
    return "\n".join(part for part in parts if part)


def _head(record: "CheckpointRecord") -> str:
    lines = ["---", f"library_name: {'peft' if record.kind == 'adapter' else 'transformers'}"]
    lines.append("pipeline_tag: text-classification")
    if is_hub_id(record.base_model.name):
        lines.append(f"base_model: {record.base_model.name}")
    lines += ["tags:", "- reward-model", "- bradley-terry", "- betterthan", "---", ""]
    return "\n".join(lines)


def _what(record: "CheckpointRecord") -> str:
    what = "A LoRA adapter and a reward head" if record.kind == "adapter" else "A reward model"
    base = record.base_model.name + (f" (revision {record.base_model.revision})" if record.base_model.revision else "")
    on = f" on {base}" if record.kind == "adapter" else ""
    return (
        "# Reward model\n\n"
        f"{what}{on}, trained with the Bradley-Terry loss on pairs of answers. It reads a conversation and gives one\n"
        "number: the higher, the better the answer. Only differences between answers to one prompt mean anything.\n"
    )


def _how(record: "CheckpointRecord") -> str:
    rules = record.rules
    if rules.chat_template is not None:
        text = _CHAT
        if rules.end == "token" and rules.end_of_turn:
            text += f"end = {rules.end_of_turn!r}  # what the template prints behind the last one is left out\n"
            text += "text = text[: text.rindex(end) + len(end)]\n"
        text += 'ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")\n'
    else:
        text = _TEXT + (f"text += {rules.end_of_text!r}\n" if rules.end_of_text else "")
        text += 'ids = tokenizer(text, return_tensors="pt")\n'
    code = (_PLAIN_ADAPTER if record.kind == "adapter" else _PLAIN_MODEL) + text + _READ
    return f"## How to score\n\n{_SERVED}\n```python\n{code}```\n"


_SERVED = """\
```
rm-server CHECKPOINT
curl -s localhost:8000/score -H 'content-type: application/json' -d '{"prompt": "…", "completions": ["…", "…"]}'
```

`rm-train score CHECKPOINT FILE.jsonl` does the same without a server. In plain transformers, one at a time:
"""
_CHAT = """\
messages = [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]
text = tokenizer.apply_chat_template(messages, tokenize=False)
"""
_TEXT = """\
prompt, completion = "…", "…"
text = prompt + completion
"""
_PLAIN_MODEL = """\
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("CHECKPOINT")
model = AutoModelForSequenceClassification.from_pretrained("CHECKPOINT", dtype=torch.float32)
config = model.config
"""
_PLAIN_ADAPTER = """\
import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("CHECKPOINT")
model = AutoPeftModelForSequenceClassification.from_pretrained("CHECKPOINT", num_labels=1, dtype=torch.float32)
config = model.get_base_model().config
"""
_READ = """\
config.get_text_config().pad_token_id = None  # the reward is read at the last token, whichever that is
model.eval()
with torch.inference_mode():
    reward = model(**ids).logits[0, 0].item()  # the raw logit: no sigmoid
"""


def _rules(record: "CheckpointRecord") -> str:
    rules = record.rules
    rows = [
        ("messages", f"the chat template ({rules.chat_template})" if rules.chat_template else "not possible"),
        (
            "strings",
            "prompt and answer together" if rules.text_as == "raw" else "one user, one assistant turn",
        ),
        ("a chat ends at", f"`{rules.end_of_turn}`" if rules.end == "token" else "the end of what the template prints"),
        ("a text ends at", f"`{rules.end_of_text}`" if rules.end_of_text else "the tokenizer's own end token"),
        ("today, for templates that print it", str(rules.date)),
        ("the reward", "raw logit at the last token, float32"),
        ("longest training sequence", f"{record.training_length:,} tokens" if record.training_length else "unknown"),
    ]
    return "## Rules\n\n" + _table(rows)


def _measured(record: "CheckpointRecord") -> str:
    found: dict[str, Any] = record.metrics
    rows: list[tuple[str, str]] = []
    if "accuracy" in found:
        accuracy = found["accuracy"]
        rows += [
            ("held-out pairs", f"{found['pairs']:,}"),
            ("accuracy", f"{accuracy['value']:.3f} (95 % interval {accuracy['low']:.3f} to {accuracy['high']:.3f})"),
            ("the longer answer wins", f"{found['longer_wins']:.3f}"),
        ]
        if found.get("bag_of_words") is not None:
            rows.append(("bag of words", f"{found['bag_of_words']:.3f}"))
        rows.append(("log-loss", f"{found['log_loss']:.4f} (no preference: 0.6931)"))
        correlation = found["length"]["reward_correlation"]
        if correlation is not None:
            rows.append(("correlation of reward and length", f"{correlation:.3f}"))
    if record.num_eval:
        rows += [
            ("reward", f"mean {record.reward_mean:.4g}, standard deviation {record.reward_std:.4g}"),
            ("temperature", f"{record.temperature:.4g}: P(a better than b) = sigmoid((a − b) / temperature)"),
        ]
    if not rows:
        return ""
    return "## Measured\n\n" + _table(rows) + "".join(_groups(found))


def _groups(found: dict[str, Any]) -> Iterator[str]:
    groups = found.get("by_category") or {}
    if len(groups) > 1:
        yield "\n| category | accuracy | pairs |\n| --- | --- | --- |\n"
        for name, share in list(groups.items())[:20]:
            yield f"| {_cell(name)} | {share['accuracy']:.3f} | {share['pairs']:,} |\n"


def _identity(record: "CheckpointRecord") -> str:
    rows = [("reward_id", f"`{record.reward_id}`"), ("written", f"{record.created:%Y-%m-%d}")]
    if "train_pairs" in record.data:
        rows.append(("training pairs", f"{record.data['train_pairs']:,}"))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())))
    return "## Identity\n\n" + _table(rows)


def _table(rows: list[tuple[str, str]]) -> str:
    body = "".join(f"| {_cell(name)} | {_cell(value)} |\n" for name, value in rows)
    return f"| | |\n| --- | --- |\n{body}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
