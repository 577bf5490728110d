"""A reward computed over a token tree is the one plain transformers gives the sequence alone, however it is computed.

The reference shares no code with us: ``AutoModelForSequenceClassification`` (and plain ``peft``) loaded from the same
files, eager or sdpa as the family prefers, one sequence a forward, fp32. The default run covers 250 sequences for each
family, 2,000 in all; the slow one 2,000 for each. Invariant: nothing here reads how the tree is laid out, so any other
implementation of it has to pass.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rm_core.model import RewardModel
from rm_core.prefix_cache import PrefixCache
from rm_core.tree import MIN_SHARED, build_tree
from tests.conftest import byte_tokenizer, save_base, save_classifier

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


@pytest.fixture(scope="module", params=list(FAMILIES))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    return subject_of(request.param, 250, tmp_path_factory.mktemp("classifier") / request.param)


# ------------------------------------------------------------------ can these tests fail?


def test_the_corpus_has_every_shape_and_cuts_characters() -> None:
    items = corpus(250)
    assert len({item.kind for item in items}) == 13
    lengths = [len(item.ids) for item in items]
    assert min(lengths) == 1
    assert max(lengths) > 300
    assert len({tuple(item.ids) for item in items}) < len(items)
    tokenizer = byte_tokenizer()
    cut = [i for i in items if i.kind == "unicode parted inside a character" and "�" in tokenizer.decode(i.ids[-3:])]
    assert len(cut) > 4
    # sharing more than halves the tokens, so most of what is scored is scored through ancestors
    assert build_tree([item.ids for item in items]).num_tokens < 0.5 * sum(lengths)


def test_the_weights_make_every_token_matter(subject: Subject) -> None:
    """A first token that is another one moves rewards far beyond the bound, wherever the layers can see it."""
    assert subject.expected.std() > 0.3
    reach = 2 * 17  # two windowed layers carry the first token so far; beyond it, only a full layer does
    short = [ids for ids in subject.sequences if 2 < len(ids) <= reach][:40]
    classifier = plain_classifier(subject.directory)
    moved = np.abs(
        plain_rewards(classifier, short) - plain_rewards(classifier, [[ids[0] ^ 1, *ids[1:]] for ids in short])
    )
    assert np.mean(moved > 10 * subject.bound) > 0.9


@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_that_is_off_by_one_would_show(family: str, tmp_path: Path) -> None:
    save_varied(tmp_path, family, **FAMILIES[family])
    sequences = [item.ids for item in corpus(60) if len(item.ids) > 40]
    right = plain_rewards(plain_classifier(tmp_path), sequences)
    wider = plain_rewards(plain_classifier(tmp_path, sliding_window=FAMILIES[family]["sliding_window"] + 1), sequences)
    assert np.mean(np.abs(right - wider) > 1e-3) > 0.95


# ------------------------------------------------------------------ rewards, fp32


def test_one_tree_gives_the_rewards_of_plain_transformers(subject: Subject) -> None:
    scored = subject.model.score_batch(subject.sequences)
    assert scored.computed_tokens.sum() < 0.5 * sum(map(len, subject.sequences))
    subject.check(scored.rewards)


def test_each_sequence_alone_has_the_same_reward(subject: Subject) -> None:
    indices = range(0, len(subject.items), 5)
    subject.check(np.array([subject.model.score_ids([subject.sequences[i]])[0] for i in indices]), indices)


@pytest.mark.parametrize("max_tokens", [MIN_SHARED, 100])
def test_groups_and_long_sequences_split_by_the_budget_keep_their_rewards(subject: Subject, max_tokens: int) -> None:
    """100 tokens split every group and cut the long sequences into five pieces; 16, which is slow, leave nothing whole."""
    indices = range(0, len(subject.items), 1 if max_tokens > MIN_SHARED else 4)
    found = subject.model.score_batch([subject.sequences[index] for index in indices], max_tokens=max_tokens)
    subject.check(found.rewards, indices)


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


def test_arrival_order_does_not_change_rewards(subject: Subject) -> None:
    assert arrive(subject, None, None, seed=1) == 0


def test_cache_hits_do_not_change_rewards(subject: Subject) -> None:
    cache = PrefixCache(10**9)
    first = arrive(subject, cache, None, seed=2)
    again = arrive(subject, cache, 500, seed=3)
    assert 0 < first < again
    subject.check(subject.model.score_batch(subject.sequences, cache=cache).rewards)


def test_evicted_prefixes_do_not_change_rewards(subject: Subject) -> None:
    """The cache holds about 300 tokens: prefixes go while their siblings are still to come."""
    whole = PrefixCache(10**9)
    subject.model.score_batch([list(range(64))], cache=whole)
    cache = PrefixCache(300 * whole.num_bytes // 64)
    known: set[int] = set()
    gone = 0
    for seed, max_tokens in ((4, None), (5, 100)):
        assert arrive(subject, cache, max_tokens, seed) > 0
        found = {i for i, ids in enumerate(subject.sequences) if cache.find(tuple(ids)) is not None}
        gone += len(known - found)
        known = found
    assert gone > 0
    assert 0 < cache.num_bytes <= cache.max_bytes


def test_a_cached_prefix_serves_every_kind_of_follower(subject: Subject) -> None:
    """After a prompt alone: itself, longer and shorter ones, ones that part inside it, and ones that share too little."""
    draw = np.random.default_rng(6)
    prompt = draw.integers(0, 256, 70).tolist()
    tail, other = draw.integers(0, 256, 30).tolist(), draw.integers(0, 256, 30).tolist()
    followers = [
        prompt,
        prompt[:-1],
        [*prompt, *tail],
        [*prompt[:40], *other],
        prompt[:17],
        prompt[:16],
        [*prompt[:9], 3],
    ]
    followers += [[*prompt, *tail[:20], *other], [*prompt, tail[0]]]
    expected = plain_rewards(plain_classifier(subject.directory), followers)
    for batch_size in (1, len(followers)):
        cache = PrefixCache(10**9)
        subject.model.score_batch([prompt], cache=cache)
        found = [
            subject.model.score_batch(followers[at : at + batch_size], cache=cache).rewards
            for at in range(0, len(followers), batch_size)
        ]
        np.testing.assert_allclose(np.concatenate(found), expected, atol=subject.bound, rtol=0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", list(FAMILIES))
def test_2000_sequences_keep_their_rewards_in_every_way_of_computing_them(family: str, tmp_path: Path) -> None:
    subject = subject_of(family, 2000, tmp_path / family)
    subject.check(subject.model.score_batch(subject.sequences, max_tokens=8192).rewards)
    subject.check(subject.model.score_batch(subject.sequences, max_tokens=200).rewards)
    for max_bytes in (10**9, 10**5):
        cache = PrefixCache(max_bytes)
        for seed in (7, 8):
            arrive(subject, cache, 1500, seed)


# ------------------------------------------------------------------ gradients, fp32


def trainable_gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


class Trainable(NamedTuple):
    model: RewardModel
    sequences: list[Ids]
    weights: torch.Tensor
    expected: dict[str, torch.Tensor]

    def check(self, cuts: Sequence[int] = ()) -> None:
        """The gradient of Σ weight · reward, computed over one tree for each part, is the reference's."""
        self.model.network.zero_grad()
        for part in np.split(np.arange(len(self.sequences)), cuts):
            rewards = self.model.network([self.sequences[index] for index in part])
            (rewards * self.weights[torch.from_numpy(part)].to(rewards.device)).sum().backward()
        found = trainable_gradients(self.model.network.classifier)
        self.model.network.zero_grad()
        assert found.keys() == self.expected.keys()
        off = {
            name: float((found[name] - gradient).norm() / gradient.norm()) for name, gradient in self.expected.items()
        }
        worst = max(off, key=lambda name: off[name])
        assert off[worst] <= 1e-4, f"{worst} and {sum(x > 1e-4 for x in off.values()) - 1} others: {off[worst]:.2g}"


def trainable_of(family: str, folder: Path, changes: dict[str, Any], device: str = "cpu") -> Trainable:
    """LoRA on all linear layers, with B matrices that matter, and what plain peft gives its gradient."""
    from peft import PeftModel

    base = save_base(folder / family, family, **changes)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    model = RewardModel.for_training(str(base), lora=options, seed=1, dtype="float32", device=device)
    assert model.sharing_off is None
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.network.named_parameters():
            if parameter.requires_grad and ("lora_B" in name or "score" in name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_weights(folder / "adapter")
    plain = PeftModel.from_pretrained(plain_classifier(base), folder / "adapter", is_trainable=True).eval()
    sequences = [item.ids for item in corpus(45, seed=9)]
    weights = torch.randn(len(sequences), generator=generator)
    for ids, weight in zip(sequences, weights, strict=True):
        (plain(input_ids=torch.tensor([ids])).logits[0, 0] * weight).backward()
    expected = trainable_gradients(plain)
    assert all(gradient.norm() > 0 for gradient in expected.values())
    assert sum("lora_A" in name for name in expected) == sum("lora_B" in name for name in expected) >= 8
    assert sum("score" in name for name in expected) == 1
    return Trainable(model, sequences, weights, expected)


@pytest.fixture(scope="module", params=list(FAMILIES))
def trainable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trainable:
    return trainable_of(request.param, tmp_path_factory.mktemp("trainable"), FAMILIES[request.param])


def test_gradients_over_one_tree_are_those_of_plain_peft(trainable: Trainable) -> None:
    trainable.check()


def test_gradients_do_not_depend_on_how_a_step_is_cut(trainable: Trainable) -> None:
    trainable.check(cuts=[1, 7, 8, 30])


def test_gradients_with_recomputed_activations_are_the_same(trainable: Trainable) -> None:
    network = trainable.model.network
    network.train().use_gradient_checkpointing()
    try:
        trainable.check()
    finally:
        network.base.activation_checkpointing_disable()
        network.eval()


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


def test_bfloat16_is_as_close_to_fp32_as_plain_transformers_in_bfloat16(subject: Subject) -> None:
    model = RewardModel.load(str(subject.directory), dtype="bfloat16", device="cpu")
    plain = plain_classifier(subject.directory, torch.bfloat16)
    check_bfloat16(model, plain, subject.sequences, subject.hidden)


# What the fused forward takes: whole vectors of heads, with 1, 2, 3 and 4 query heads for each key head, biases, norms
# of heads, windows shorter and longer than a kernel's block. And what looks like it from outside and is not.
WIDE = {"hidden_size": 96, "intermediate_size": 176, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
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


FEW = ["llama", "qwen2 with one windowed layer", "qwen3", "mistral with a long window", "ministral3"]


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long]) for name in FUSED]
)
def test_bfloat16_by_compiled_kernels_is_as_close_to_fp32(name: str, tmp_path: Path) -> None:
    """Two threads too: rows are divided among them."""
    family, changes = FUSED[name]
    subject = subject_of(family, 130, tmp_path / "model", **changes)
    model = RewardModel.load(str(subject.directory), dtype="bfloat16", device="cpu")
    if family in ("llama", "qwen2", "qwen3", "mistral", "seed_oss") and kernels_are_there():
        assert model.network.fused_off is None
    plain = plain_classifier(subject.directory, torch.bfloat16)
    check_bfloat16(model, plain, subject.sequences, subject.hidden)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _, found = hidden_of(model, subject.sequences, max_tokens=700)
    finally:
        torch.set_num_threads(threads)
    assert rms(found - subject.hidden) <= 1.1 * rms(plain_scores(plain, subject.sequences)[1] - subject.hidden)


def kernels_are_there() -> bool:
    from rm_core import kernels

    try:
        kernels.load()
    except kernels.NoKernelsError:
        return False
    return True


def test_bfloat16_rounds_weights_and_not_rotary_frequencies(subject: Subject) -> None:
    """Frequencies in bf16 are off by up to 0.2 %, which turns the 500th token by half a radian."""
    model = RewardModel.load(str(subject.directory), dtype="bfloat16", device="cpu")
    plain = dict(plain_classifier(subject.directory, torch.bfloat16).base_model.named_buffers())
    ours = dict(model.network.backbone.named_buffers())
    frequencies = [name for name in plain if "inv_freq" in name]
    assert frequencies
    for name in frequencies:
        assert torch.equal(ours[name], plain[name]), name
    model.to_dtype("float32")
    assert model.network.fused_off is not None
    assert all(torch.equal(buffer, plain[name]) for name, buffer in model.network.backbone.named_buffers())


# ------------------------------------------------------------------ gradients, bf16


def check_bfloat16_gradients(family: str, changes: dict[str, Any], folder: Path, device: str) -> None:
    """LoRA's and the head's gradients, computed as the trainer does, are as close to fp32 as those of plain peft.

    What is compared is the relative error of each tensor, as a root mean square over the tensors.
    """
    from peft import PeftModel
    from peft.helpers import disable_input_dtype_casting

    base = save_base(folder / "base", family, **changes)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    model = RewardModel.for_training(str(base), lora=options, seed=1, dtype="bfloat16", device=device)
    assert model.sharing_off is None
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.network.named_parameters():
            if parameter.requires_grad and ("lora_B" in name or "score" in name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_weights(folder / "adapter")
    sequences = [item.ids for item in corpus(60, seed=9)]
    weights = torch.randn(len(sequences), generator=generator)

    def plain(dtype: torch.dtype, place: str) -> dict[str, torch.Tensor]:
        tuned = PeftModel.from_pretrained(plain_classifier(base, dtype), folder / "adapter", is_trainable=True)
        tuned.to(place).eval()
        classifier = tuned.get_base_model()
        for ids, weight in zip(sequences, weights.tolist(), strict=True):
            with torch.autocast(place, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                states = classifier.base_model(input_ids=torch.tensor([ids], device=place)).last_hidden_state
            head = classifier.score.modules_to_save["default"].weight.float()
            ((states[0, -1].float() @ head[0]) * weight).backward()
        return {name: gradient.double().cpu() for name, gradient in trainable_gradients(tuned).items()}

    exact = plain(torch.float32, "cpu")

    def error(gradients: dict[str, torch.Tensor]) -> float:
        assert gradients.keys() == exact.keys()
        return rms(np.array([float((gradients[name] - g).norm() / g.norm()) for name, g in exact.items()]))

    model.network.train()
    with torch.autocast(device, dtype=torch.bfloat16), disable_input_dtype_casting(model.network.classifier):
        rewards = model.network(sequences)
        (rewards * weights.to(device)).sum().backward()
    found = {name: g.double().cpu() for name, g in trainable_gradients(model.network.classifier).items()}
    assert error(found) <= 1.1 * error(plain(torch.bfloat16, device))


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen2",
        "mistral",
        *(
            pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long])
            for name in ("llama with biases", "qwen3", "smollm3", "seed_oss")
        ),
    ],
)
def test_bfloat16_gradients_are_as_close_to_fp32_as_those_of_plain_peft(name: str, tmp_path: Path) -> None:
    check_bfloat16_gradients(*FUSED[name], tmp_path, "cpu")


@pytest.mark.slow
@pytest.mark.long
def test_200_real_answers_of_smollm2_keep_their_rewards(
    smollm2: Path, shared_data: Callable[[str], Path], tmp_path: Path
) -> None:
    """Short questions with several answers, and chats of several turns, in fp32 and bf16."""
    from transformers import AutoTokenizer

    from rm_core.chat import Renderer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    renderer = Renderer.for_tokenizer(tokenizer)
    sequences: list[Ids] = []
    for name, count, longest in (("truthfulqa.jsonl", 150, 100), ("eval_hh_harmless.jsonl", 200, 180)):
        for line in shared_data(name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            chosen, rejected, _ = renderer.render_pair(row["prompt"], row["chosen"], row["rejected"], max_length=1024)
            if len(sequences) < count and max(len(chosen), len(rejected)) < longest:
                sequences += [chosen, rejected]
    assert len(sequences) == 200
    classifier = plain_classifier(smollm2)
    torch.nn.init.normal_(classifier.score.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    classifier.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected, hidden = plain_scores(classifier, sequences)
    model = RewardModel.load(str(tmp_path), dtype="float32", device="cpu")
    assert model.sharing_off is None
    real = Subject(model, [Item("real", ids) for ids in sequences], expected, hidden, tmp_path)
    real.check(model.score_batch(sequences, max_tokens=1500).rewards)
    assert arrive(real, PrefixCache(10**9), 1500, seed=0) > 0
    rounded = RewardModel.load(str(tmp_path), dtype="bfloat16", device="cpu")
    check_bfloat16(rounded, plain_classifier(tmp_path, torch.bfloat16), sequences, hidden)
