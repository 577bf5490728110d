"""Fresh texts, the reward model that every server loads, and what plain transformers says that it scores.

Invariant: no text is ever sent twice to the same server, so neither a cache nor de-duplication can win for free.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class FreshTexts:
    """English-looking texts of an exact token count, new at every call: words that are one token each with their space.

    The vocabulary keeps a text's count the same wherever it is cut or joined, since each word starts at a space.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.random = random.Random(seed)
        self.end = tokenizer.eos_token
        candidates = [t[1:] for t in tokenizer.get_vocab() if t[:1] == "\u0120" and t[1:].isascii() and len(t) > 3]
        words = sorted(word for word in candidates if word.isalpha() and word.islower())
        ids = tokenizer([f" {word}" for word in words], add_special_tokens=False).input_ids
        self.words = [word for word, own in zip(words, ids, strict=True) if len(own) == 1]
        probe = self.text(500)
        if len(self.words) < 2000 or len(tokenizer(probe, add_special_tokens=False).input_ids) != 500:
            raise SystemExit(
                "this tokenizer does not spell a word and its leading space as one token; use another model"
            )

    def text(self, num_tokens: int) -> str:
        return "".join(f" {word}" for word in self.random.choices(self.words, k=num_tokens))


@dataclass(frozen=True)
class Group:
    """One prompt with its answers; an answer of n tokens is n - 1 words and the end token that every side adds."""

    prompt: str
    completions: list[str]

    def texts(self, end: str) -> list[str]:
        return [f"{self.prompt}{completion}{end}" for completion in self.completions]


def fresh_groups(texts: FreshTexts, num_groups: int, prompt: int, answer: int, group: int = 8) -> list[Group]:
    return [Group(texts.text(prompt), [texts.text(answer - 1) for _ in range(group)]) for _ in range(num_groups)]


def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def prepare_model(directory: Path | None) -> Path:
    """A plain one-label sequence classifier (bf16 safetensors) of the bundled SmolLM2 with a fixed head.

    The head's values are bf16, so that a server which keeps it in fp32 and one which keeps it in bf16 hold the same.
    """
    if directory is not None and (directory / "config.json").is_file():
        return directory
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from rm_core.smollm2 import bundled_model_path, cache_directory

    target = directory or cache_directory() / "benchmark-reward-model"
    if (target / "config.json").is_file():
        return target
    quiet_transformers()
    base = bundled_model_path()
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.bfloat16)
    hidden = model.config.hidden_size
    head = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)) * hidden**-0.5
    model.score.weight.data = head.to(torch.bfloat16)
    staging = Path(tempfile.mkdtemp(dir=target.parent))
    model.save_pretrained(staging)
    AutoTokenizer.from_pretrained(base).save_pretrained(staging)
    staging.rename(target)
    return target


def agreement(ours: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """How far two lists of scores are apart, in units of the spread of the scores."""
    deviation = statistics.pstdev(ours) or 1.0
    differences = [abs(a - b) for a, b in zip(ours, peer, strict=True)]
    return {
        "num_scores": len(differences),
        "spread": round(deviation, 4),
        "rms": round(rms_error(ours, peer), 4),
        "max_over_spread": round(max(differences) / deviation, 4),
        "correlation": round(statistics.correlation(ours, peer), 5),
    }


def demand_agreement(found: dict[str, float], names: str, noise: float) -> None:
    """Two bf16 forwards may each be as far from the truth as plain transformers in bf16, ``noise`` (rms), is; three
    times that apart is a wrong answer."""
    if found["rms"] > 3 * noise:
        raise SystemExit(f"{names} do not score alike (bf16 noise is {noise:.4f}), so no speed is reported: {found}")


def reference_scores(model: Path, texts: Sequence[str], dtype: str) -> list[float]:
    """Plain transformers, one text at a time, in a dtype of choice: what the scores should be."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    quiet_transformers()
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForSequenceClassification.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    scores = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([tokenizer(text).input_ids])
            # Not the class's own pooling: with pad == eos it reads another token.
            hidden = network.model(ids).last_hidden_state[0, -1].float()
            scores.append(float(hidden @ network.score.weight[0].float()))
    return scores


def rms_error(scores: Sequence[float], reference: Sequence[float]) -> float:
    return (sum((a - b) ** 2 for a, b in zip(scores, reference, strict=True)) / len(reference)) ** 0.5


def bfloat16_noise(model: Path, texts: FreshTexts, count: int) -> float:
    """Root mean square error of plain transformers in bf16 against itself in fp32."""
    whole = [texts.text(199) + texts.end for _ in range(count)]
    return rms_error(*(reference_scores(model, whole, dtype) for dtype in ("bfloat16", "float32")))
