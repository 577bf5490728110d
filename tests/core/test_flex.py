"""The CUDA path's FlexAttention, as far as a CPU can run it: the forward, uncompiled and compiled, against the CPU's own.

FlexAttention has no backward on a CPU; tests/gpu has the rest.
"""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rm_core import attention
from rm_core.attention import LayerKV, Prefix, TreePlan
from rm_core.prefix_cache import PrefixCache
from rm_core.tree import build_tree
from tests.core.exactness import arrive, corpus, subject_of


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex without the compiler, whose absence it warns about."""
    from torch.nn.attention.flex_attention import flex_attention

    def flex(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention(*args, **kwargs)

    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex)


def tree_with_prefixes(seed: int, count: int, lengths: tuple[int, ...] = (48, 130)) -> tuple[TreePlan, int]:
    """A plan of about ``count`` sequences whose first two roots stand behind prefixes; -> it and its rows."""
    tree = build_tree([item.ids for item in corpus(count, seed)])
    roots = [segment for segment in tree.segments if segment.parent < 0]
    generator = torch.Generator().manual_seed(seed)

    def some(length: int) -> LayerKV:
        return LayerKV(*(torch.randn((length + 5, 2, 16), generator=generator) for _ in range(2)))

    prefixes = [
        Prefix(root.start, root.end_of_descendants, length, [some(length)])
        for root, length in zip(roots[1:], lengths, strict=False)
    ]
    longest = int(tree.positions.max()) + 1 + max(lengths, default=0)
    return TreePlan(tree.segments, longest, prefixes), tree.num_tokens


def random_heads(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    return tuple(torch.randn((1, heads, num_tokens, 16), generator=generator) * 1.5 for heads in (6, 2, 2))  # type: ignore[return-value]


@pytest.mark.parametrize("lengths", [(), (48, 130)], ids=["no prefix", "two prefixes"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 23, 140])
@torch.inference_mode()
def test_flex_gives_what_the_masked_attention_gives(
    window: int | None, softcap: float | None, lengths: tuple[int, ...], uncompiled: None
) -> None:
    plan, num_tokens = tree_with_prefixes(1, 40, lengths)
    heads = random_heads(num_tokens)
    expected = attention._by_segment(*heads, plan, 0, 0.3, window, softcap)
    found = attention._flex(*heads, plan, 0, 0.3, window, softcap)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert list(plan.block_mask) == [window]  # one mask a forward for each window


@pytest.mark.parametrize("family", ["gemma2", pytest.param("mistral", marks=pytest.mark.slow)])
def test_a_whole_model_through_flex_keeps_its_rewards(
    family: str, tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These families' layers go through the masked attention on a CPU, whose place Flex takes here."""
    subject = subject_of(family, 48, tmp_path / family)
    calls = 0

    def flex(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return attention._flex(*args)

    monkeypatch.setattr(attention, "_by_segment", flex)
    subject.check(subject.model.score_batch(subject.sequences, max_tokens=1000).rewards)
    subject.check(subject.model.score_batch(subject.sequences, max_tokens=100).rewards)
    assert arrive(subject, PrefixCache(10**9), 400, seed=1) > 0
    assert calls > 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, at the first compilation
@torch.inference_mode()
def test_compiled_flex_is_right_and_does_not_recompile_for_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of different lengths, with and without prefixes, take a handful of graphs."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    monkeypatch.setattr(attention, "_flex_function", None)
    draw = random.Random(0)
    graphs = []
    for number in range(16):
        lengths = () if number % 2 else (16 * draw.randint(1, 9), 16 * draw.randint(1, 9))
        plan, num_tokens = tree_with_prefixes(number, draw.randint(2, 40), lengths)
        heads = random_heads(num_tokens)
        found = attention._flex(*heads, plan, 0, 0.3, None, None)
        expected = attention._by_segment(*heads, plan, 0, 0.3, None, None)
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=2e-5, rtol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] - graphs[0] <= 3, graphs
    assert graphs[-1] == graphs[7], graphs
