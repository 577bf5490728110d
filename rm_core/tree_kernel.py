"""The attention kernel's view of a token tree: its arrays, laid out once for all layers of a forward.

Invariant: the same attention as ``rm_core.attention``, whose definition of a tree it shares.

Shapes: N packed tokens, Q query heads, K key/value heads, D head size.
"""

import ctypes
from typing import NamedTuple

import numpy as np
import torch

from rm_core.attention import LayerKV, TreePlan
from rm_core.llama_layers import Layer

_ROWS = 32
"""Rows of a block and keys of a group in ``kernels.c``."""


class Heads(NamedTuple):
    """How many query and key/value heads, and their size D."""

    queries: int
    keys: int
    size: int


class TreeAttention:
    """What the attention kernel needs to know of a tree, laid out once for all layers."""

    def __init__(
        self, library: ctypes.CDLL, plan: TreePlan, heads: Heads, cosine: torch.Tensor, sine: torch.Tensor
    ) -> None:
        """``cosine`` and ``sine``: fp32 [N, D], of which the second half repeats the first."""
        self._kernels, self._plan, self._heads = library, plan, heads
        half = heads.size // 2
        self._cosine, self._sine = cosine[:, :half].contiguous(), sine[:, :half].contiguous()
        self._num_tokens = len(cosine)
        segments = plan.segments
        self._start = np.array([s.start for s in segments])
        self._length = np.array([s.length for s in segments])
        self._position = np.array([s.position for s in segments])
        self._parent = np.array([s.parent for s in segments])
        self._end_of_descendants = np.array([s.end_of_descendants for s in segments])
        self._prefix = np.full(len(segments), -1)
        for index, prefix in enumerate(plan.prefixes):
            self._prefix[(self._start >= prefix.start) & (self._start < prefix.end)] = index
        self._prefix_length = np.array([p.length for p in plan.prefixes], dtype=np.int64)
        lengths = np.concatenate([self._prefix_length, self._length])
        self._group_run, self._group_first = _cut(lengths)
        self._blocks = _cut(self._length)
        self._runs = torch.empty(len(lengths) * 6, dtype=torch.int64)
        shape = (len(self._group_run), 2, heads.keys, _ROWS, heads.size)
        self._packed = torch.empty(shape, dtype=torch.bfloat16)
        self._rotated = torch.empty((self._num_tokens, heads.keys, heads.size), dtype=torch.bfloat16)
        self._scratch: tuple[torch.Tensor, ...] | None = None
        self._known_runs: dict[int, list[tuple[int, int]]] = {}

    def forward(
        self,
        qkv: torch.Tensor,
        layer: Layer,
        index: int,
        out: torch.Tensor,
        *,
        rows: torch.Tensor | None = None,
        normaliser: torch.Tensor | None = None,
    ) -> None:
        """Fill ``out`` [N, Q D] for ``qkv`` [N, (Q + 2K) D] of the ``index``-th layer, all bf16 in one piece.

        ``rows``: only these of ``out`` are wanted. ``normaliser``, fp32 [N, Q], is filled with what ``backward`` needs.
        """
        heads = self._heads
        blocks = self._blocks if rows is None else self._blocks_of(rows.numpy())
        layers = [prefix.layers[index] for prefix in self._plan.prefixes]
        assert all(x.is_contiguous() for kv in layers for x in kv), "this is a bug: cached keys lie in one piece"
        keys, values = (np.array([kv[i].data_ptr() for kv in layers], dtype=np.int64) for i in (0, 1))
        tree = (self._start, self._length, self._position, self._parent, self._prefix)
        self._kernels.tree_attention(
            qkv.data_ptr(), self._rotated.data_ptr(), out.data_ptr(), self._cosine.data_ptr(), self._sine.data_ptr(),
            _pointer(layer.query_norm), _pointer(layer.key_norm), layer.head_eps,
            self._num_tokens, heads.queries, heads.keys, heads.size, layer.scaling, layer.window or 2**62,
            len(self._start), *(array.ctypes.data for array in tree),
            len(layers), self._prefix_length.ctypes.data, keys.ctypes.data, values.ctypes.data,
            len(blocks[0]), *(array.ctypes.data for array in blocks), self._runs.data_ptr(),
            self._packed.data_ptr(), len(self._group_run), self._group_run.ctypes.data, self._group_first.ctypes.data,
            _pointer(normaliser), torch.get_num_threads(),
        )  # fmt: skip

    def backward(
        self, qkv: torch.Tensor, layer: Layer, out: torch.Tensor, grad_out: torch.Tensor, normaliser: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of ``qkv``, bf16 [N, (Q + 2K) D], of a tree without prefixes, norms of heads and window."""
        heads = self._heads
        group_segment, group_first = self._blocks
        num_groups = len(group_segment)
        segment_group = np.searchsorted(group_segment, np.arange(len(self._start)))
        behind = np.searchsorted(self._start, self._end_of_descendants)  # first segment that is no descendant
        reach = np.append(segment_group, num_groups)[behind]
        if self._scratch is None:  # the same for all layers
            q, k, padded = heads.queries, heads.keys, num_groups * _ROWS
            self._scratch = (
                torch.empty((2 * (q + k), padded, heads.size), dtype=torch.bfloat16),
                torch.empty((4 * q + 3 * k, padded, heads.size), dtype=torch.bfloat16),
                torch.empty((2 * q, padded), dtype=torch.float32),
            )
        grad_qkv = torch.empty_like(qkv)
        tree = (self._start, self._length, self._parent, segment_group, reach)
        self._kernels.tree_attention_backward(
            qkv.data_ptr(), self._cosine.data_ptr(), self._sine.data_ptr(), out.data_ptr(), grad_out.data_ptr(),
            normaliser.data_ptr(), grad_qkv.data_ptr(), heads.queries, heads.keys, heads.size, layer.scaling,
            *(array.ctypes.data for array in tree), num_groups, group_segment.ctypes.data, group_first.ctypes.data,
            *(tensor.data_ptr() for tensor in self._scratch), torch.get_num_threads(),
        )  # fmt: skip
        return grad_qkv

    def new_normaliser(self) -> torch.Tensor:
        return torch.empty((self._num_tokens, self._heads.queries), dtype=torch.float32)

    def keys_and_values(self, qkv: torch.Tensor, rows: torch.Tensor) -> LayerKV:
        """Keys and values of the layer just computed, at ``rows`` (int64 [S])."""
        values = qkv.view(self._num_tokens, -1, self._heads.size)[:, self._heads.queries + self._heads.keys :]
        runs = self._runs_of(rows)
        return LayerKV(
            torch.cat([self._rotated[start:end] for start, end in runs]),
            torch.cat([values[start:end] for start, end in runs]),
        )

    def _runs_of(self, rows: torch.Tensor) -> list[tuple[int, int]]:
        """The same rows as runs without gaps; a path through a tree has few, and whole runs are copied much faster."""
        if id(rows) not in self._known_runs:
            array = rows.numpy()
            cuts = np.flatnonzero(np.diff(array) != 1) + 1
            parts = np.split(array, cuts) if len(array) else []
            self._known_runs[id(rows)] = [(int(part[0]), int(part[-1]) + 1) for part in parts]
        return self._known_runs[id(rows)]

    def _blocks_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        segment = np.searchsorted(self._start, rows, side="right") - 1
        first = (rows - self._start[segment]) // _ROWS * _ROWS
        pairs = np.unique(np.stack([segment, first]), axis=1)
        return np.ascontiguousarray(pairs[0]), np.ascontiguousarray(pairs[1])


def _cut(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut runs of tokens into pieces of at most 32: each piece's run, and its first token in it."""
    counts = -(-lengths // _ROWS)
    ends = np.cumsum(counts)
    return np.repeat(np.arange(len(lengths)), counts), (
        np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    ) * _ROWS


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
