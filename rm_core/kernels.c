/* The CPU's element-wise work and tree attention in bf16. See kernels.h and kernels.py. */
#include "kernels.h"

#include <math.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { KEYS = 128, MAX_D = 256 };
/* A hidden key's score. Finite, so that a block that hides everything from a row gives no NaN; a power of two, so that
 * it minus itself is zero whatever both were multiplied with. */
static const float MASKED = -0x1p100f;

/* Linux gives a process the AMX tiles only after it asks for them. 0 where it may use them. */
int allow_amx(void) { return (int)syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */); }

/* How many threads the calling thread's parallel loops and torch's get, from now on; of no other thread. */
void omp_set_num_threads(int threads);
void use_threads(int threads) { omp_set_num_threads(threads); }

/* ------------------------------------------------------------------ element-wise */

/* sum [N, H] (fp32; may be x itself) = x + delta [N, H] (bf16, may be NULL); out [N, H] (bf16) = sum / rms(sum) * weight
 * [H] (fp32). */
void add_rms_norm(const float *x, const bf16 *delta, const float *weight, float eps, float *sum, bf16 *out, long N,
                  long H, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long row = 0; row < N; row++) {
    float *s = sum + row * H;
    __m512 squares = _mm512_setzero_ps();
    for (long h = 0; h < H; h += 16) {
      __m512 v = _mm512_loadu_ps(x + row * H + h);
      if (delta) v = _mm512_add_ps(v, load_bf16(delta + row * H + h));
      if (delta || sum != x) _mm512_storeu_ps(s + h, v);
      squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)H + eps));
    for (long h = 0; h < H; h += 16)
      store_bf16(out + row * H + h,
                 _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(s + h), scale), _mm512_loadu_ps(weight + h)));
  }
}

/* Backward of add_rms_norm for a frozen weight: grad_x [N, H] (fp32) and its copy grad_delta [N, H] (bf16), from what was
 * normalised, sum [N, H], its own gradient grad_sum [N, H] (fp32) and its norm's, grad_out [N, H] (bf16). */
void rms_norm_backward(const float *sum, const float *weight, float eps, const float *grad_sum, const bf16 *grad_out,
                       float *grad_x, bf16 *grad_delta, long N, long H, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long row = 0; row < N; row++) {
    const float *s = sum + row * H;
    const bf16 *g = grad_out + row * H;
    __m512 squares = _mm512_setzero_ps(), products = _mm512_setzero_ps();
    for (long h = 0; h < H; h += 16) {
      const __m512 v = _mm512_loadu_ps(s + h);
      squares = _mm512_fmadd_ps(v, v, squares);
      products = _mm512_fmadd_ps(v, _mm512_mul_ps(load_bf16(g + h), _mm512_loadu_ps(weight + h)), products);
    }
    const float inverse = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)H + eps);
    const __m512 scale = _mm512_set1_ps(inverse);
    const __m512 along = _mm512_set1_ps(_mm512_reduce_add_ps(products) / (float)H * inverse * inverse * inverse);
    for (long h = 0; h < H; h += 16) {
      const __m512 through = _mm512_mul_ps(_mm512_mul_ps(load_bf16(g + h), _mm512_loadu_ps(weight + h)), scale);
      const __m512 total = _mm512_add_ps(_mm512_loadu_ps(grad_sum + row * H + h),
                                         _mm512_fnmadd_ps(_mm512_loadu_ps(s + h), along, through));
      _mm512_storeu_ps(grad_x + row * H + h, total);
      store_bf16(grad_delta + row * H + h, total);
    }
  }
}

/* Backward of out [N, I] = silu(gate) * up, where gate_up [N, 2 I] holds both side by side: grad_gate_up [N, 2 I] from
 * grad_out [N, I]; out is computed again. */
void silu_mul_backward(const bf16 *gate_up, const bf16 *grad_out, bf16 *grad_gate_up, bf16 *out, long N, long I,
                       int threads) {
  const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long row = 0; row < N; row++) {
    const bf16 *gate = gate_up + row * 2 * I, *up = gate + I;
    bf16 *grad_gate = grad_gate_up + row * 2 * I, *grad_up = grad_gate + I;
    for (long i = 0; i < I; i += 16) {
      const __m512 g = load_bf16(gate + i), u = load_bf16(up + i), d = load_bf16(grad_out + row * I + i);
      const __m512 e = exp2_16(_mm512_mul_ps(g, _mm512_set1_ps(-1.44269504088896341f)));
      const __m512 sigmoid = _mm512_div_ps(one, _mm512_add_ps(one, e)), silu = _mm512_mul_ps(g, sigmoid);
      /* silu' = sigmoid (1 + g - silu) */
      const __m512 slope = _mm512_mul_ps(sigmoid, _mm512_add_ps(one, _mm512_sub_ps(g, silu)));
      store_bf16(out + row * I + i, _mm512_mul_ps(silu, u));
      store_bf16(grad_up + i, _mm512_mul_ps(d, silu));
      store_bf16(grad_gate + i, _mm512_mul_ps(_mm512_mul_ps(d, u), slope));
    }
  }
}

/* ------------------------------------------------------------------ tree attention */

/* One head's query or key: optional RMS norm with weight [D], then rotary embedding (first half with second half). */
static inline void norm_and_rotate(const bf16 *in, bf16 *out, const float *cosine, const float *sine,
                                   const float *norm, float eps, int D) {
  const int half = D / 2;
  __m512 scale = _mm512_set1_ps(1.0f);
  if (norm) {
    __m512 squares = _mm512_setzero_ps();
    for (int d = 0; d < D; d += 16) {
      const __m512 v = load_bf16(in + d);
      squares = _mm512_fmadd_ps(v, v, squares);
    }
    scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)D + eps));
  }
  for (int d = 0; d < half; d += 16) {
    __m512 a = load_bf16(in + d), b = load_bf16(in + half + d);
    if (norm) {
      a = _mm512_mul_ps(_mm512_mul_ps(a, scale), _mm512_loadu_ps(norm + d));
      b = _mm512_mul_ps(_mm512_mul_ps(b, scale), _mm512_loadu_ps(norm + half + d));
    }
    const __m512 c = _mm512_loadu_ps(cosine + d), s = _mm512_loadu_ps(sine + d);
    store_bf16(out + d, _mm512_fnmadd_ps(b, s, _mm512_mul_ps(a, c)));
    store_bf16(out + half + d, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, c)));
  }
}

/* A run of keys that come one behind the other: a segment of the tree, or a prefix from an earlier forward. */
typedef struct {
  const bf16 *keys, *values; /* of the run's first token; heads are D apart */
  long key_stride, value_stride, length, group; /* group: index of its first 32 packed keys */
} Run;

/* 32 rows [count, D] as the right side of a product over D: for each 16 rows, for each 32 of D, a tile
 * [16 pairs of D, 16 rows]. Missing rows are zero. */
static void pack_across(const bf16 *rows, long stride, long count, int D, uint32_t *packed) {
  for (int row = 0; row < 32; row++) {
    uint32_t *tile = packed + (row / 16) * (D / 32) * 256 + row % 16;
    uint32_t pairs[MAX_D / 2];
    if (row < count)
      memcpy(pairs, rows + row * stride, D * sizeof(bf16));
    else
      memset(pairs, 0, D * sizeof(bf16));
    for (int pair = 0; pair < D / 2; pair++) tile[(pair / 16) * 256 + (pair % 16) * 16] = pairs[pair];
  }
}

/* 32 rows [count, D] as the right side of a product over rows: for each 16 of D a tile [16 pairs of rows, 16 of D]. */
static void pack_pairs(const bf16 *rows, long stride, long count, int D, uint32_t *packed) {
  const __m256i none = _mm256_setzero_si256();
  for (int pair = 0; pair < 16; pair++) {
    const bf16 *even = rows + 2 * pair * stride, *odd = even + stride;
    for (int d = 0; d < D; d += 16) {
      const __m256i a = 2 * pair < count ? _mm256_loadu_si256((const __m256i *)(even + d)) : none;
      const __m256i b = 2 * pair + 1 < count ? _mm256_loadu_si256((const __m256i *)(odd + d)) : none;
      const __m512i both = _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
      _mm512_storeu_si512(packed + (d / 16) * 256 + pair * 16, both);
    }
  }
}

/* scores [ROWS, KEYS] = query [ROWS, D] times `groups` times 32 packed keys. */
static inline void multiply_keys(const bf16 *query, const uint32_t *keys, int groups, int D, float *scores) {
  const int steps = D / 32;
  finish_writes();
  for (int group = 0; group < groups; group++) {
    const uint32_t *tiles = keys + (long)group * D * 16;
    zero_sums();
    for (int k = 0; k < steps; k++) {
      _tile_stream_loadd(4, query + k * 32, D * 2);
      _tile_stream_loadd(5, query + 16 * D + k * 32, D * 2);
      _tile_stream_loadd(6, tiles + k * 256, 64);
      _tile_stream_loadd(7, tiles + (steps + k) * 256, 64);
      add_product();
    }
    store_sums(scores + group * 32, KEYS);
  }
}

/* sums [ROWS, D] += weights [ROWS, KEYS] times `groups` times 32 packed values. */
static inline void add_values(const bf16 *weights, const uint32_t *values, int groups, int D, float *sums) {
  finish_writes();
  for (int d = 0; d < D; d += 32) {
    load_sums(sums + d, D);
    for (int group = 0; group < groups; group++) {
      const uint32_t *tiles = values + (long)group * D * 16 + (d / 16) * 256;
      _tile_stream_loadd(4, weights + group * 32, KEYS * 2);
      _tile_stream_loadd(5, weights + 16 * KEYS + group * 32, KEYS * 2);
      _tile_stream_loadd(6, tiles, 64);
      _tile_stream_loadd(7, tiles + 256, 64);
      add_product();
    }
    store_sums(sums + d, D);
  }
}

typedef struct {
  float scores[ROWS * KEYS], sums[ROWS * MAX_D], totals[ROWS * 16];
  float largest[ROWS], shrink[ROWS]; /* largest: so far, in powers of two */
  bf16 weights[ROWS * KEYS], query[ROWS * MAX_D];
} __attribute__((aligned(64))) Block;

/* Hide keys before `low` and from `high` on (at least 0) from one row. */
static inline void mask_row(float *scores, int count, long low, long high) {
  if (low < 0) low = 0; /* there may be no window at all: 2^62 */
  const __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int k = 0; k < count; k += 16) {
    if (k >= low && k + 16 <= high) continue;
    const __m512i at = _mm512_add_epi32(index, _mm512_set1_epi32(k));
    const __mmask16 hidden = _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32((int)(low > KEYS ? KEYS : low))) |
                             _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32((int)high));
    _mm512_mask_storeu_ps(scores + k, hidden, _mm512_set1_ps(MASKED));
  }
}

/* weights = 2^(scores * factor - largest so far); what was summed so far is rescaled to a new largest. */
static inline void softmax(Block *b, int rows, int count, float factor, int D) {
  const __m512 scale = _mm512_set1_ps(factor);
  float tops[ROWS];
  for (int row = 0; row < rows; row++) {
    const float *scores = b->scores + row * KEYS;
    __m512 top = _mm512_loadu_ps(scores), other = _mm512_loadu_ps(scores + 16);
    for (int k = 32; k < count; k += 32) {
      top = _mm512_max_ps(top, _mm512_loadu_ps(scores + k));
      other = _mm512_max_ps(other, _mm512_loadu_ps(scores + k + 16));
    }
    tops[row] = _mm512_reduce_max_ps(_mm512_max_ps(top, other));
  }
  for (int row = rows; row < ROWS; row++) tops[row] = MASKED;
  for (int row = 0; row < ROWS; row += 16) {
    const __m512 old = _mm512_load_ps(b->largest + row);
    const __m512 new = _mm512_max_ps(_mm512_mul_ps(_mm512_loadu_ps(tops + row), scale), old);
    _mm512_store_ps(b->shrink + row, exp2_16(_mm512_sub_ps(old, new)));
    _mm512_store_ps(b->largest + row, new);
  }
  for (int row = 0; row < rows; row++) {
    const float *scores = b->scores + row * KEYS;
    bf16 *weights = b->weights + row * KEYS;
    const __m512 shift = _mm512_set1_ps(b->largest[row]);
    __m512 total = _mm512_mul_ps(_mm512_load_ps(b->totals + row * 16), _mm512_set1_ps(b->shrink[row]));
    for (int k = 0; k < count; k += 32) {
      const __m512 e = exp2_16(_mm512_fmsub_ps(_mm512_load_ps(scores + k), scale, shift));
      const __m512 f = exp2_16(_mm512_fmsub_ps(_mm512_load_ps(scores + k + 16), scale, shift));
      total = _mm512_add_ps(total, _mm512_add_ps(e, f));
      _mm512_store_si512(weights + k, (__m512i)_mm512_cvtne2ps_pbh(f, e));
    }
    _mm512_store_ps(b->totals + row * 16, total);
    if (b->shrink[row] != 1.0f) {
      const __m512 shrink = _mm512_set1_ps(b->shrink[row]);
      float *sums = b->sums + row * D;
      for (int d = 0; d < D; d += 16) _mm512_store_ps(sums + d, _mm512_mul_ps(_mm512_load_ps(sums + d), shrink));
    }
  }
}

/* The block's rows, whose first has position `position`, attend to a run whose first key has position `start`.
 * A key is seen when it is not behind the row and less than `window` before it. */
static void attend(Block *b, int rows, long position, long start, long length, long window, float factor,
                   const uint32_t *keys, const uint32_t *values, int D) {
  for (long first = 0; first < length; first += KEYS) {
    const long at = start + first, seen = position + rows - at; /* keys from here that the last row sees */
    if (seen <= 0) break;
    const long left = length - first < KEYS ? length - first : KEYS, count = left < seen ? left : seen;
    if (position - (at + count - 1) >= window) continue;
    const int groups = (int)((count + 31) / 32);
    multiply_keys(b->query, keys + first * D / 2, groups, D, b->scores);
    if (count < groups * 32 || at + count - 1 > position || position + rows - at > window)
      for (int row = 0; row < rows; row++) {
        const long own = position + row + 1 - at;
        mask_row(b->scores + row * KEYS, groups * 32, own - window, own < 0 ? 0 : own < count ? own : count);
      }
    softmax(b, rows, groups * 32, factor, D);
    add_values(b->weights, values + first * D / 2, groups, D, b->sums);
  }
}

/* Attention of a packed row: out [N, Q, D].
 *
 * qkv [N, (Q + 2 K) D] before norm and rotation; cosine, sine [N, D/2]; query_norm, key_norm [D] or NULL.
 * rotated [N, K, D] receives the rotated keys. A segment s has start, length, position (of its first token, counted
 * from its prefix's end), parent (-1 for a root) and prefix (-1 for none). Prefixes: length and rotated keys, values
 * [>= length, K, D]. Blocks of at most 32 rows of a segment are what is computed: a row in none of them is left as it
 * is. Groups of 32 keys, of all prefixes and then of all segments, in order: run and first key.
 * Room for: runs [prefixes + segments], packed [groups, 2 K, 32, D] bf16. normaliser [N, Q] (NULL: not wanted) receives
 * the logarithm to base 2 of each softmax's sum.
 */
void tree_attention(const bf16 *qkv, bf16 *rotated, bf16 *out, const float *cosine, const float *sine,
                    const float *query_norm, const float *key_norm, float eps, long N, int Q, int K, int D,
                    float scale, long window, long num_segments, const long *start, const long *length,
                    const long *position, const long *parent, const long *prefix, long num_prefixes,
                    const long *prefix_length, const bf16 *const *prefix_keys, const bf16 *const *prefix_values,
                    long num_blocks, const long *block_segment, const long *block_first, Run *runs,
                    uint32_t *packed, long num_groups, const long *group_run, const long *group_first, float *normaliser,
                    int threads) {
  const long width = (long)(Q + 2 * K) * D;
  const long head_size = num_groups * 16 * D; /* packed keys (or values) of one head, in pairs */
  uint32_t *packed_keys = packed, *packed_values = packed + K * head_size;
  const int share = Q / K;
  const float factor = scale * 1.44269504088896341f; /* of 2^x */
  long group = 0;
  for (long p = 0; p < num_prefixes; p++) {
    runs[p] = (Run){prefix_keys[p], prefix_values[p], K * D, K * D, prefix_length[p], group};
    group += (prefix_length[p] + 31) / 32;
  }
  for (long s = 0; s < num_segments; s++) {
    runs[num_prefixes + s] = (Run){rotated + start[s] * K * D, qkv + start[s] * width + (Q + K) * D, K * D, width,
                                   length[s], group};
    group += (length[s] + 31) / 32;
  }
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (long row = 0; row < N; row++)
      for (int head = 0; head < K; head++)
        norm_and_rotate(qkv + row * width + (Q + head) * D, rotated + (row * K + head) * D, cosine + row * D / 2,
                        sine + row * D / 2, key_norm, eps, D);
#pragma omp for schedule(static)
    for (long g = 0; g < num_groups; g++) {
      const Run *run = runs + group_run[g];
      const long first = group_first[g], count = run->length - first < 32 ? run->length - first : 32;
      for (int head = 0; head < K; head++) {
        const long at = head * head_size + g * 16 * D;
        pack_across(run->keys + first * run->key_stride + head * D, run->key_stride, count, D, packed_keys + at);
        pack_pairs(run->values + first * run->value_stride + head * D, run->value_stride, count, D, packed_values + at);
      }
    }
    TileConfig before;
    Block block;
    tiles_on(&before);
#pragma omp for schedule(dynamic, 1)
    for (long task = 0; task < num_blocks * K; task++) {
      const long b = task / K, s = block_segment[b], first = block_first[b];
      const int head = (int)(task % K);
      const int rows = (int)(length[s] - first < ROWS ? length[s] - first : ROWS);
      const uint32_t *keys = packed_keys + head * head_size, *values = packed_values + head * head_size;
      long root = s;
      while (parent[root] >= 0) root = parent[root];
      const long before_root = prefix[root] >= 0 ? prefix_length[prefix[root]] : 0;
      const long at = before_root + position[s] + first;
      for (int q = head * share; q < (head + 1) * share; q++) {
        memset(block.sums, 0, sizeof(float) * ROWS * D);
        memset(block.totals, 0, sizeof block.totals);
        memset(block.query, 0, sizeof(bf16) * ROWS * D);
        for (long row = 0; row < ROWS; row++) {
          block.largest[row] = MASKED;
        }
        for (long row = 0; row < rows; row++) {
          const long n = start[s] + first + row;
          norm_and_rotate(qkv + n * width + q * D, block.query + row * D, cosine + n * D / 2, sine + n * D / 2,
                          query_norm, eps, D);
        }
        if (prefix[root] >= 0) {
          const Run *run = runs + prefix[root];
          attend(&block, rows, at, 0, run->length, window, factor, keys + run->group * 16 * D,
                 values + run->group * 16 * D, D);
        }
        for (long run_segment = s; run_segment >= 0; run_segment = parent[run_segment]) {
          const Run *run = runs + num_prefixes + run_segment;
          attend(&block, rows, at, before_root + position[run_segment], run->length, window, factor,
                 keys + run->group * 16 * D, values + run->group * 16 * D, D);
        }
        for (long row = 0; row < rows; row++) {
          const float total = _mm512_reduce_add_ps(_mm512_load_ps(block.totals + row * 16));
          const __m512 share_of = _mm512_set1_ps(1.0f / total);
          if (normaliser) normaliser[(start[s] + first + row) * Q + q] = block.largest[row] + log2f(total);
          bf16 *o = out + ((start[s] + first + row) * Q + q) * D;
          for (int d = 0; d < D; d += 16)
            store_bf16(o + d, _mm512_mul_ps(_mm512_loadu_ps(block.sums + row * D + d), share_of));
        }
      }
    }
    tiles_off(&before);
  }
}

/* ------------------------------------------------------------------ its gradient */

/* Turn back what norm_and_rotate turned: out = scale * R^T in. */
static inline void rotate_back(const float *in, bf16 *out, const float *cosine, const float *sine, float scale, int D) {
  const int half = D / 2;
  const __m512 factor = _mm512_set1_ps(scale);
  for (int d = 0; d < half; d += 16) {
    const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(in + d), factor);
    const __m512 b = _mm512_mul_ps(_mm512_loadu_ps(in + half + d), factor);
    const __m512 c = _mm512_loadu_ps(cosine + d), s = _mm512_loadu_ps(sine + d);
    store_bf16(out + d, _mm512_fmadd_ps(b, s, _mm512_mul_ps(a, c)));
    store_bf16(out + half + d, _mm512_fnmadd_ps(a, s, _mm512_mul_ps(b, c)));
  }
}

typedef struct {
  float scores[ROWS * KEYS], slopes[ROWS * KEYS], first_sums[ROWS * MAX_D], second_sums[ROWS * MAX_D];
  bf16 weights[ROWS * KEYS], grad_scores[ROWS * KEYS];
} __attribute__((aligned(64))) GradBlock;

/* Gradient of tree_attention without prefixes, windows or norms of heads: grad_qkv [N, (Q + 2 K) D].
 *
 * With P = 2^(factor QK' - normaliser): dV = P' dO, dP = dO V', dS = P (dP - rowsum(dO O)), dQ = scale dS K,
 * dK = scale dS' Q. Queries' gradients are summed block of rows by block of rows, keys' and values' block of keys by
 * block of keys: those who see a segment's keys are the rest of it and its descendants, which stand behind it.
 *
 * Rows are laid out in groups of 32 of one segment each, padded with zeros: group_segment, group_first [groups];
 * segment_group [segments] a segment's first group, reach [segments] the group behind its last descendant's.
 * Room for: rows [2 (Q + K), groups 32, D] bf16; packed [4 Q + 3 K, groups 32, D] bf16; tables [2 Q, groups 32] fp32.
 */
void tree_attention_backward(const bf16 *qkv, const float *cosine, const float *sine, const bf16 *out,
                             const bf16 *grad_out, const float *normaliser, bf16 *grad_qkv, int Q, int K, int D,
                             float scale, const long *start, const long *length, const long *parent,
                             const long *segment_group, const long *reach, long num_groups, const long *group_segment,
                             const long *group_first, bf16 *rows, uint32_t *packed, float *tables, int threads) {
  const long width = (long)(Q + 2 * K) * D, padded = num_groups * 32, half = num_groups * 16 * D;
  const int share = Q / K;
  const float factor = scale * 1.44269504088896341f;
  bf16 *query_rows = rows, *grad_rows = query_rows + Q * padded * D, *key_rows = grad_rows + Q * padded * D;
  bf16 *value_rows = key_rows + K * padded * D;
  uint32_t *query_across = packed, *query_pairs = query_across + Q * half, *grad_across = query_pairs + Q * half;
  uint32_t *grad_pairs = grad_across + Q * half, *key_across = grad_pairs + Q * half, *key_pairs = key_across + K * half;
  uint32_t *value_across = key_pairs + K * half;
  float *norms = tables, *deltas = tables + Q * padded;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (long g = 0; g < num_groups; g++) {
      const long s = group_segment[g], at = start[s] + group_first[g];
      const long left = length[s] - group_first[g], count = left < 32 ? left : 32;
      for (int head = 0; head < Q + K; head++) {
        const int is_query = head < Q, own = is_query ? head : head - Q;
        const long offset = ((long)own * padded + g * 32) * D;
        bf16 *turned = (is_query ? query_rows : key_rows) + offset, *plain = (is_query ? grad_rows : value_rows) + offset;
        for (long i = 0; i < 32; i++) {
          const long n = at + i, p = own * padded + g * 32 + i;
          if (i >= count) {
            memset(turned + i * D, 0, D * sizeof(bf16));
            memset(plain + i * D, 0, D * sizeof(bf16));
            if (is_query) {
              norms[p] = -MASKED; /* its weights are zero */
              deltas[p] = 0;
            }
            continue;
          }
          norm_and_rotate(qkv + n * width + head * D, turned + i * D, cosine + n * D / 2, sine + n * D / 2, 0, 0, D);
          if (!is_query) {
            memcpy(plain + i * D, qkv + n * width + (Q + K + own) * D, D * sizeof(bf16));
            continue;
          }
          const bf16 *o = out + (n * Q + own) * D, *go = grad_out + (n * Q + own) * D;
          memcpy(plain + i * D, go, D * sizeof(bf16));
          __m512 delta = _mm512_setzero_ps();
          for (int d = 0; d < D; d += 16) delta = _mm512_fmadd_ps(load_bf16(o + d), load_bf16(go + d), delta);
          deltas[p] = _mm512_reduce_add_ps(delta);
          norms[p] = normaliser[n * Q + own];
        }
        const long tiles = own * half + g * 16 * D;
        pack_across(turned, D, 32, D, (is_query ? query_across : key_across) + tiles);
        pack_pairs(turned, D, 32, D, (is_query ? query_pairs : key_pairs) + tiles);
        pack_across(plain, D, 32, D, (is_query ? grad_across : value_across) + tiles);
        if (is_query) pack_pairs(plain, D, 32, D, grad_pairs + tiles);
      }
    }
    TileConfig before;
    GradBlock b;
    tiles_on(&before);
#pragma omp for schedule(dynamic, 1)
    for (long task = 0; task < num_groups * K; task++) {
      const long g = num_groups - 1 - task / K, s = group_segment[g], at = start[s] + group_first[g];
      const int head = (int)(task % K);
      const long left = length[s] - group_first[g];
      const int count = (int)(left < 32 ? left : 32);
      const __m512 by = _mm512_set1_ps(factor);
      /* ---- these rows' queries, over all keys they see */
      for (int q = head * share; q < (head + 1) * share; q++) {
        const long offset = ((long)q * padded + g * 32) * D;
        const float *norm = norms + q * padded + g * 32, *delta = deltas + q * padded + g * 32;
        memset(b.first_sums, 0, sizeof(float) * ROWS * D);
        for (long run = s; run >= 0; run = parent[run]) {
          const long behind = run == s ? g + 1 : segment_group[run] + (length[run] + 31) / 32;
          for (long first = segment_group[run]; first < behind; first += KEYS / 32) {
            const int groups = (int)(behind - first < KEYS / 32 ? behind - first : KEYS / 32);
            const long tiles = head * half + first * 16 * D;
            const long keys = length[run] - (first - segment_group[run]) * 32; /* of the run, from here on */
            multiply_keys(query_rows + offset, key_across + tiles, groups, D, b.scores);
            multiply_keys(grad_rows + offset, value_across + tiles, groups, D, b.slopes);
            for (int row = 0; row < count; row++) {
              const long own = run == s ? (g - first) * 32 + row + 1 : keys;
              if (own < groups * 32 || keys < groups * 32)
                mask_row(b.scores + row * KEYS, groups * 32, 0, own < keys ? own : keys);
              const __m512 n = _mm512_set1_ps(norm[row]), d = _mm512_set1_ps(delta[row]);
              for (int k = 0; k < groups * 32; k += 16) {
                const __m512 p = exp2_16(_mm512_fmsub_ps(_mm512_load_ps(b.scores + row * KEYS + k), by, n));
                store_bf16(b.grad_scores + row * KEYS + k,
                           _mm512_mul_ps(p, _mm512_sub_ps(_mm512_load_ps(b.slopes + row * KEYS + k), d)));
              }
            }
            add_values(b.grad_scores, key_pairs + tiles, groups, D, b.first_sums);
          }
        }
        for (int row = 0; row < count; row++)
          rotate_back(b.first_sums + row * D, grad_qkv + (at + row) * width + q * D, cosine + (at + row) * D / 2,
                      sine + (at + row) * D / 2, scale, D);
      }
      /* ---- these rows' keys and values, over all queries that see them */
      const long offset = ((long)head * padded + g * 32) * D;
      memset(b.first_sums, 0, sizeof(float) * ROWS * D);
      memset(b.second_sums, 0, sizeof(float) * ROWS * D);
      for (int q = head * share; q < (head + 1) * share; q++)
        for (long first = g; first < reach[s]; first += KEYS / 32) {
          const int groups = (int)(reach[s] - first < KEYS / 32 ? reach[s] - first : KEYS / 32);
          const long tiles = q * half + first * 16 * D;
          const float *norm = norms + q * padded + first * 32, *delta = deltas + q * padded + first * 32;
          multiply_keys(key_rows + offset, query_across + tiles, groups, D, b.scores);
          multiply_keys(value_rows + offset, grad_across + tiles, groups, D, b.slopes);
          for (int row = 0; row < count; row++) {
            if (first == g) mask_row(b.scores + row * KEYS, 32, row, 32); /* queries before this key */
            for (int k = 0; k < groups * 32; k += 16) {
              const __m512 p = exp2_16(_mm512_fmsub_ps(_mm512_load_ps(b.scores + row * KEYS + k), by,
                                                       _mm512_loadu_ps(norm + k)));
              store_bf16(b.weights + row * KEYS + k, p);
              store_bf16(b.grad_scores + row * KEYS + k,
                         _mm512_mul_ps(p, _mm512_sub_ps(_mm512_load_ps(b.slopes + row * KEYS + k),
                                                        _mm512_loadu_ps(delta + k))));
            }
          }
          add_values(b.grad_scores, query_pairs + tiles, groups, D, b.first_sums);
          add_values(b.weights, grad_pairs + tiles, groups, D, b.second_sums);
        }
      for (int row = 0; row < count; row++) {
        bf16 *grad = grad_qkv + (at + row) * width;
        rotate_back(b.first_sums + row * D, grad + (Q + head) * D, cosine + (at + row) * D / 2,
                    sine + (at + row) * D / 2, scale, D);
        for (int d = 0; d < D; d += 16)
          store_bf16(grad + (Q + K + head) * D + d, _mm512_load_ps(b.second_sums + row * D + d));
      }
    }
    tiles_off(&before);
  }
}
