"""What the tests of exactness share: sequences of every shape, what plain transformers computes for them, and bounds.

The reference shares no code with us: ``AutoModelForSequenceClassification`` loaded from the same files, eager or sdpa
as the family prefers, one sequence a forward. Invariant: nothing here reads how the tree is laid out, so any other
implementation of it has to pass.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from rm_core.model import RewardModel
from rm_core.prefix_cache import PrefixCache
from rm_core.tree import MIN_SHARED
from tests.conftest import byte_tokenizer, save_classifier

Ids = list[int]

# Two layers each; windows shorter than most texts, odd, and hidden beside a full layer where the family mixes them.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 23},
    "gemma2": {"sliding_window": 19},
    "gemma3_text": {"sliding_window": 19, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "gpt_neox": {},
}
WINDOWED = ["mistral", "gemma2", "gemma3_text"]

# What the fused forward takes: whole vectors of heads, with 1, 2, 3 and 4 query heads for each key head, biases, norms
# of heads, windows shorter and longer than a kernel's block. And what looks like it from outside and is not.
WIDE = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDE),
    "llama with biases": ("llama", {**WIDE, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    "llama with scaled rotary embedding": (
        "llama",
        {**WIDE, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                                     "original_max_position_embeddings": 128}},
    ),
    "qwen2": ("qwen2", {**WIDE, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1}),
    "qwen2 with one windowed layer": (
        "qwen2",
        {**WIDE, "hidden_size": 192, "use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**WIDE, "head_dim": 64, "num_attention_heads": 4}),
    "mistral": ("mistral", {**WIDE, "sliding_window": 23}),
    "mistral with a long window": ("mistral", {**WIDE, "sliding_window": 150, "head_dim": 128}),
    "smollm3": ("smollm3", {**WIDE, "no_rope_layers": [1, 0], "no_rope_layer_interval": 2}),
    "ministral3": (
        "ministral3",
        {**WIDE, "rope_parameters": {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                                     "original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.3,
                                     "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "seed_oss": ("seed_oss", WIDE),
    "olmo2": ("olmo2", WIDE),
    "helium": ("helium", {**WIDE, "hidden_size": 192}),
}  # fmt: skip

TEXT = (
    "Naïve café owners in Zürich say 東京のラーメン is 😀 better than борщ; 👩‍👩‍👧 agree, ¿no? "
    "Ελληνικά, हिन्दी, ไทย and עברית follow — each “character” takes two, three or four bytes. "
)


class Item(NamedTuple):
    """A sequence and what it is there for."""

    kind: str
    ids: Ids


def corpus(count: int, seed: int = 0) -> list[Item]:
    """``count`` sequences of all the shapes that a tree can take, of 1 to 450 tokens."""
    draw = np.random.default_rng(seed)
    tokenizer = byte_tokenizer()
    text: Ids = tokenizer(TEXT)["input_ids"]
    items: list[Item] = []

    def some(low: int, high: int) -> Ids:
        return [int(i) for i in draw.integers(0, 256, draw.integers(low, high))]

    def add(kind: str, *sequences: Ids) -> None:
        items.extend(Item(kind, ids) for ids in sequences)

    while len(items) < count:
        system = some(17, 40)
        for _ in range(2):
            prompt = [*system, *some(16, 50)]
            add("group below a system prompt", *([*prompt, *some(1, 30)] for _ in range(5)))
            opening = [*prompt, *some(16, 25)]
            add("answers with one opening", *([*opening, *some(1, 20)] for _ in range(2)), opening, prompt)
        prompt = some(20, 70)
        add("pair", [*prompt, *some(2, 40)], [*prompt, *some(2, 40)])
        chain = [some(MIN_SHARED, 30)]
        for _ in range(4):
            chain.append([*chain[-1], *some(1, 30)])
        add("nested prefixes", *chain)
        answer = [*prompt, *some(10, 30)]
        add("siblings, one a prefix of the other", answer, [*answer, *some(1, 4)], [*answer, *some(16, 20)])
        for length in (MIN_SHARED - 1, MIN_SHARED, MIN_SHARED + 1, 2 * MIN_SHARED):
            start = some(length, length + 1)
            add("shared run about as long as pays", start, [*start, *some(1, 9)], [*start, *some(1, 9)])
        add("one token", some(1, 2))
        add("two tokens", some(2, 3))
        at = int(draw.integers(0, len(text) - 1))
        turned = [*text[at:], *text[:at]]  # begins and, below, ends anywhere, also inside a character
        cuts = [int(cut) for cut in draw.integers(20, len(turned), 3)]
        add("unicode cut anywhere", *(turned[:cut] for cut in cuts))
        inside = next(i for i in range(60, len(turned)) if _is_continuation(tokenizer, turned[i]))
        add(
            "unicode parted inside a character",
            turned[: inside + 1],
            [*turned[:inside], *tokenizer("é")["input_ids"][1:]],
            turned[:inside],
            turned[: inside + 40],
        )
        for length in (32, 33, 127, 128, 129):
            start = some(length, length + 1)
            add("as long as a kernel's block", start, [*start, *some(31, 34)])
        long = some(280, 450)
        add("long", long, [*long[:170], *some(5, 60)])
        copies = draw.choice(len(items), 3, replace=False)
        add("duplicate", *(list(items[index].ids) for index in copies))
    draw.shuffle(items)  # type: ignore[arg-type]
    return items[:count]


def _is_continuation(tokenizer: Any, token: int) -> bool:
    """Whether this byte stands inside a UTF-8 character."""
    return tokenizer.convert_ids_to_tokens(token) in {c for b in range(0x80, 0xC0) for c in _BYTE_TO_SYMBOL[b]}


def _byte_symbols() -> dict[int, str]:
    """The character by which byte-level tokenizers write each byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_BYTE_TO_SYMBOL = _byte_symbols()


def plain_classifier(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    classifier = AutoModelForSequenceClassification.from_pretrained(directory, dtype=dtype, num_labels=1, **options)
    classifier.config.pad_token_id = None  # one sequence a forward: the last position is the last token
    return classifier.eval()


def plain_scores(classifier: Any, sequences: Sequence[Ids]) -> tuple[np.ndarray, np.ndarray]:
    """Rewards [B] and the hidden states [B, H] they are read from, by plain transformers, each sequence alone."""
    hidden: list[torch.Tensor] = []
    handle = classifier.score.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0][0, -1].double()))
    try:
        with torch.inference_mode():
            rewards = [float(classifier(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in sequences]
    finally:
        handle.remove()
    return np.array(rewards), torch.stack(hidden).numpy()


def plain_rewards(classifier: Any, sequences: Sequence[Ids]) -> np.ndarray:
    return plain_scores(classifier, sequences)[0]


class Subject(NamedTuple):
    """A model of ours, sequences, and what plain transformers computes for them."""

    model: RewardModel
    items: list[Item]
    expected: np.ndarray
    """Rewards [B]."""
    hidden: np.ndarray
    """Hidden states [B, H] before the head."""
    directory: Path

    @property
    def sequences(self) -> list[Ids]:
        return [item.ids for item in self.items]

    @property
    def bound(self) -> float:
        return 1e-4 * max(float(self.expected.std()), 1.0)

    def check(self, found: np.ndarray, indices: Sequence[int] | np.ndarray | None = None) -> None:
        """Every reward is within the bound; otherwise say which kind of sequence is wrong, and by how much."""
        chosen = np.arange(len(self.items)) if indices is None else np.asarray(indices)
        error = np.abs(found - self.expected[chosen])
        wrong = np.flatnonzero(~(error <= self.bound))
        kinds = sorted({self.items[chosen[i]].kind for i in wrong})
        assert not len(wrong), (
            f"{len(wrong)} of {len(chosen)} rewards are off by up to {error[wrong].max():.2g} (bound {self.bound:.2g}, "
            f"spread {self.expected.std():.2g}): {', '.join(kinds)}"
        )


def vary_norms(model: Any) -> None:
    """Norm weights that are not all 1: a forward that forgets them would pass otherwise."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter += (torch.rand(parameter.shape, generator=generator) - 0.5) * 0.8


def save_varied(directory: Path, family: str, **changes: Any) -> Path:
    save_classifier(directory, family, **changes)
    classifier = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    vary_norms(classifier)
    classifier.save_pretrained(directory)
    return directory


def subject_of(family: str, count: int, directory: Path, **changes: Any) -> Subject:
    save_varied(directory, family, **(changes or FAMILIES[family]))
    model = RewardModel.load(str(directory), dtype="float32", device="cpu")
    assert model.sharing_off is None
    items = corpus(count)
    return Subject(model, items, *plain_scores(plain_classifier(directory), [item.ids for item in items]), directory)


def arrive(subject: Subject, cache: PrefixCache | None, max_tokens: int | None, seed: int) -> int:
    """Score all sequences in a random order, in requests of random size, checking each; -> tokens from the cache."""
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(subject.items))
    cuts = np.sort(draw.choice(np.arange(1, len(order)), len(order) // 12, replace=False))
    cached = 0
    for part in np.split(order, cuts):
        batch = [subject.sequences[index] for index in part]
        scored = subject.model.score_batch(batch, max_tokens=max_tokens, cache=cache)
        subject.check(scored.rewards, part)
        cached += scored.cached_tokens
    return cached


# ------------------------------------------------------------------ bf16
#
# The bound is on the error against fp32, relative to the error plain transformers makes in bf16 on the same texts. Both
# are rounding noise, so the ratio for one head is itself noisy: with 200 texts of SmolLM2 and 64 random heads it lay
# between 0.90 and 1.17, although the two noises are alike. What is compared is therefore the root mean square over the
# texts and over every direction a head may have, which is that of the difference of hidden states; there the same
# texts gave 1.004. A maximum would be noisier still.


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def hidden_of(model: RewardModel, sequences: Sequence[Ids], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and the hidden states [B, H] they came from, whatever order the head saw them in."""
    seen: dict[float, torch.Tensor] = {}

    def remember(_: Any, inputs: tuple[torch.Tensor, ...], rewards: torch.Tensor) -> None:
        seen.update(zip(rewards[:, 0].tolist(), inputs[0].double(), strict=True))

    handle = model.network.head.register_forward_hook(remember)
    try:
        rewards = model.score_batch(sequences, **options).rewards
    finally:
        handle.remove()
    return rewards, torch.stack([seen[reward] for reward in rewards.tolist()]).numpy()


def check_bfloat16(model: RewardModel, plain: Any, sequences: Sequence[Ids], exact_hidden: np.ndarray) -> None:
    allowed = 1.1 * rms(plain_scores(plain, sequences)[1] - exact_hidden)
    _, in_one_go = hidden_of(model, sequences, max_tokens=2000)
    assert rms(in_one_go - exact_hidden) <= allowed
    cache = PrefixCache(10**9)
    found = np.empty_like(exact_hidden)
    model.score_batch(sequences[::2], max_tokens=400, cache=cache)
    for part in np.array_split(np.random.default_rng(0).permutation(len(sequences)), 8):
        _, found[part] = hidden_of(model, [sequences[index] for index in part], max_tokens=400, cache=cache)
    assert model.score_batch(sequences[:50], cache=cache).cached_tokens > 0
    assert rms(found - exact_hidden) <= allowed
