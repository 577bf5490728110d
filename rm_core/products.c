/* Products in bf16 and what stands between them: all of a decoder layer but its attention, and layers with adapters.
 * See kernels.h.
 *
 * Each call lays its weights out as AMX wants the right side of a product; then each thread takes rows, as many as stay
 * in its second-level cache with what is computed from them.
 *
 * Each row's numbers depend on that row alone: not on how many there are, where it stands, or on the threads.
 */
#include "kernels.h"

#include <math.h>

int omp_get_thread_num(void);
int omp_get_num_threads(void); /* may be fewer than were asked for */

enum {
  PART = 640,      /* Inputs of a part of a product: 32 outputs' weights stay in the first-level cache, 40 KB. */
  MAX_CHUNK = 320, /* Rows of a chunk. */
};

/* weight [outputs, inputs], or the other way round where a function says so; multiples of 32. bias [outputs] or NULL. */
typedef struct {
  const bf16 *weight, *bias;
  long outputs, inputs;
} Product;

/* A thread's share of something: the `number`-th of `of` equal parts. */
typedef struct {
  int number, of;
} Part;

static inline long first_panel(const Product *p, Part part) { return p ? p->outputs / 32 * part.number / part.of : 0; }
static inline long end_of_panels(const Product *p, Part part) {
  return p ? p->outputs / 32 * (part.number + 1) / part.of : 0;
}

static inline void wait_for_others(Part part) {
  if (part.of > 1) {
#pragma omp barrier
  }
}

typedef enum { TO_ROWS, TO_ACTIVATION, TO_RESIDUAL } Target;

/* ------------------------------------------------------------------ weights */

/* 16 rows of 16 pairs: out [16 pairs, 16 rows]. stride: of the rows, in pairs. */
static inline void transpose(const uint32_t *in, long stride, uint32_t *out) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(in + i * stride);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int half = 0; half < 2; half++) {
      r[i + 2 * half] = _mm512_unpacklo_epi64(t[i + half], t[i + 2 + half]);
      r[i + 2 * half + 1] = _mm512_unpackhi_epi64(t[i + half], t[i + 2 + half]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int k = 0; k < 4; k++) {
      t[i + k] = _mm512_shuffle_i32x4(r[i + k], r[i + 4 + k], 0x88);
      t[i + 4 + k] = _mm512_shuffle_i32x4(r[i + k], r[i + 4 + k], 0xdd);
    }
  for (int k = 0; k < 8; k++) {
    _mm512_storeu_si512(out + k * 16, _mm512_shuffle_i32x4(t[k], t[8 + k], 0x88));
    _mm512_storeu_si512(out + (8 + k) * 16, _mm512_shuffle_i32x4(t[k], t[8 + k], 0xdd));
  }
}

/* The panel-th 32 outputs, for each 32 inputs two tiles [16 pairs of inputs, 16 outputs]. Of gate and up, 16 each. */
static void pack_panel(const Product *p, int is_gate_up, long panel, uint32_t *packed) {
  const long second = is_gate_up ? p->outputs / 2 + panel * 16 : panel * 32 + 16;
  const bf16 *first_rows = p->weight + panel * (is_gate_up ? 16 : 32) * p->inputs;
  const bf16 *second_rows = p->weight + second * p->inputs;
  for (long k = 0; k < p->inputs; k += 32) {
    transpose((const uint32_t *)(first_rows + k), p->inputs / 2, packed + k * 16);
    transpose((const uint32_t *)(second_rows + k), p->inputs / 2, packed + k * 16 + 256);
  }
}

/* 16 pairs of one number of each. */
static inline void put_pairs(__m256i even, __m256i odd, uint32_t *to) {
  _mm512_storeu_si512(to, _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16)));
}

/* The same of a weight [inputs, outputs]. */
static void pack_panel_of_columns(const Product *p, long panel, uint32_t *packed) {
  for (long pair = 0; pair < p->inputs / 2; pair++) {
    const bf16 *even = p->weight + 2 * pair * p->outputs + panel * 32, *odd = even + p->outputs;
    for (int half = 0; half < 2; half++)
      put_pairs(_mm256_loadu_si256((const __m256i *)(even + half * 16)),
                _mm256_loadu_si256((const __m256i *)(odd + half * 16)),
                packed + pair / 16 * 512 + half * 256 + pair % 16 * 16);
  }
}

/* ------------------------------------------------------------------ rows */

/* The left side of a product: rows in blocks of 32, for each 32 inputs [32 rows, 32 inputs]. Missing rows are zero. */
static inline bf16 *packed_row(bf16 *packed, long row, long width) {
  return packed + row / ROWS * ROWS * width + row % ROWS * 32;
}

/* `columns` of them, into packed rows of `width`. */
static void pack_rows(const bf16 *rows, long count, long columns, long width, bf16 *packed) {
  for (long row = 0; row < (count + ROWS - 1) / ROWS * ROWS; row++) {
    bf16 *to = packed_row(packed, row, width);
    for (long k = 0; k < columns; k += 32)
      _mm512_store_si512(to + k * ROWS,
                         row < count ? _mm512_loadu_si512(rows + row * columns + k) : _mm512_setzero_si512());
  }
}

static inline __m512 silu(__m512 gate) {
  const __m512 e = exp2_16(_mm512_mul_ps(gate, _mm512_set1_ps(-1.44269504088896341f)));
  return _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

/* silu(gate) * up [count, I] of [gate, up] [count, 2 I], into packed rows of `width`. */
static void pack_activation(const bf16 *gate_up, long count, long I, long width, bf16 *packed) {
  for (long row = 0; row < (count + ROWS - 1) / ROWS * ROWS; row++) {
    bf16 *to = packed_row(packed, row, width);
    const bf16 *gate = gate_up + row * 2 * I, *up = gate + I;
    for (long k = 0; k < I; k += 32) {
      __m512i both = _mm512_setzero_si512();
      if (row < count)
        both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(silu(load_bf16(gate + k + 16)), load_bf16(up + k + 16)),
                                            _mm512_mul_ps(silu(load_bf16(gate + k)), load_bf16(up + k)));
      _mm512_store_si512(to + k * ROWS, both);
    }
  }
}

/* packed = residual [count, H] / rms(residual) * weight [H]. */
static void norm_rows(const float *residual, long count, long H, const float *weight, float eps, bf16 *packed) {
  for (long row = 0; row < (count + ROWS - 1) / ROWS * ROWS; row++) {
    bf16 *to = packed_row(packed, row, H);
    if (row >= count) {
      for (long h = 0; h < H; h += 32) _mm512_store_si512(to + h * ROWS, _mm512_setzero_si512());
      continue;
    }
    const float *from = residual + row * H;
    __m512 squares = _mm512_setzero_ps(), others = _mm512_setzero_ps();
    for (long h = 0; h < H; h += 32) {
      const __m512 a = _mm512_loadu_ps(from + h), b = _mm512_loadu_ps(from + h + 16);
      squares = _mm512_fmadd_ps(a, a, squares);
      others = _mm512_fmadd_ps(b, b, others);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(_mm512_add_ps(squares, others)) / (float)H + eps));
    for (long h = 0; h < H; h += 32) {
      const __m512 a = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(from + h), scale), _mm512_loadu_ps(weight + h));
      const __m512 b = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(from + h + 16), scale), _mm512_loadu_ps(weight + h + 16));
      _mm512_store_si512(to + h * ROWS, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
  }
}

/* ------------------------------------------------------------------ products */

/* sums [32, 32] (+)= a block of packed rows times packed weights over 32 `steps` inputs. Meanwhile `lines` lines from
 * `next` on are brought into the second-level cache.
 *
 * The weights are used again for the next block and should stay in the first-level cache; the rows pass it by. */
static inline void multiply(const bf16 *rows, const uint32_t *weights, long steps, int is_sum, float *sums,
                            const char *next, long lines) {
  finish_writes();
  if (is_sum)
    load_sums(sums, 32);
  else
    zero_sums();
  for (long k = 0; k < steps; k++) {
    _tile_stream_loadd(4, rows + k * 1024, 64);
    _tile_loadd(6, weights + k * 512, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + k * 512 + 256, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stream_loadd(5, rows + k * 1024 + 512, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    for (long line = 0; line < lines; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
  }
  store_sums(sums, 32);
}

static inline void begin_with_bias(const bf16 *first, const bf16 *second, float *sums) {
  const __m512 a = load_bf16(first), b = load_bf16(second);
  for (int row = 0; row < ROWS; row++) {
    _mm512_store_ps(sums + row * 32, a);
    _mm512_store_ps(sums + row * 32 + 16, b);
  }
}

/* bf16 [count, outputs] at `out`. */
static inline void to_rows(const float *sums, long count, bf16 *out, long outputs) {
  for (long row = 0; row < count; row++)
    _mm512_storeu_si512(out + row * outputs, (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(sums + row * 32 + 16),
                                                                          _mm512_load_ps(sums + row * 32)));
}

/* silu(gate) * up, as 16 inputs of a block of packed rows. */
static inline void to_activation(const float *sums, bf16 *packed) {
  for (int row = 0; row < ROWS; row++)
    store_bf16(packed + row * 32,
               _mm512_mul_ps(silu(_mm512_load_ps(sums + row * 32)), _mm512_load_ps(sums + row * 32 + 16)));
}

static inline void to_residual(const float *sums, long count, float *residual, long H) {
  for (long row = 0; row < count; row++) {
    float *r = residual + row * H;
    _mm512_storeu_ps(r, _mm512_add_ps(_mm512_loadu_ps(r), _mm512_load_ps(sums + row * 32)));
    _mm512_storeu_ps(r + 16, _mm512_add_ps(_mm512_loadu_ps(r + 16), _mm512_load_ps(sums + row * 32 + 16)));
  }
}

/* What a product sums: packed weights times the columns of packed rows from `column` on. */
typedef struct {
  const Product *product;
  const uint32_t *packed;
  long column;
} Term;

static inline long parts_of(const Product *p) { return (p->inputs + PART - 1) / PART; }

/* Its part of a sum of one or two products of `count` packed rows of `width`. The bias is that of the first. target: bf16
 * [count, outputs], packed bf16 [count, outputs / 2], or fp32 [count, outputs]. Room for sums: [blocks, 32, 32]. */
static void product(const bf16 *rows, long count, long width, const Term *terms, int num_terms, Target kind, void *target,
                    float *sums, Part own) {
  const Product *base = terms[0].product;
  const long blocks = (count + ROWS - 1) / ROWS;
  const int is_in_parts = num_terms > 1 || parts_of(base) > 1;
  for (long panel = first_panel(base, own); panel < end_of_panels(base, own); panel++)
    for (int t = 0; t < num_terms; t++) {
      const Product *p = terms[t].product;
      const long step_of_parts = (p->inputs / 32 + parts_of(p) - 1) / parts_of(p) * 32;
      for (long first = 0; first < p->inputs; first += step_of_parts) {
        const long inputs = p->inputs - first < step_of_parts ? p->inputs - first : step_of_parts, steps = inputs / 32;
        const uint32_t *weights = terms[t].packed + (panel * p->inputs + first) * 16;
        const char *next = (const char *)(weights + inputs * 16);
        const long lines = (32 + blocks - 1) / blocks; /* of 32 in a step's weights */
        const int is_first = t == 0 && first == 0, is_last = t == num_terms - 1 && first + inputs == p->inputs;
        for (long block = 0; block < blocks; block++) {
          const long left = count - block * ROWS, used = left < ROWS ? left : ROWS;
          float *own_sums = sums + (is_in_parts ? block : block % 2) * ROWS * 32;
          if (is_first && base->bias) {
            const long at = panel * (kind == TO_ACTIVATION ? 16 : 32);
            const long second = kind == TO_ACTIVATION ? base->outputs / 2 + at : at + 16;
            begin_with_bias(base->bias + at, base->bias + second, own_sums);
          }
          bf16 *row_target = (bf16 *)target + block * ROWS * base->outputs + panel * 32;
          if (is_last && kind == TO_ROWS) /* lines that will be written: fetched while the tiles are busy */
            for (long row = 0; row < used; row++) __builtin_prefetch(row_target + row * base->outputs, 1, 2);
          const long done = block * steps * lines;
          multiply(rows + block * ROWS * width + (terms[t].column + first) * ROWS, weights, steps,
                   !is_first || base->bias, own_sums, next + done * 64, done < inputs ? lines : 0);
          if (!is_last) continue;
          if (kind == TO_ROWS) to_rows(own_sums, used, row_target, base->outputs);
          if (kind == TO_ACTIVATION)
            to_activation(own_sums,
                          (bf16 *)target + block * ROWS * (base->outputs / 2) + panel / 2 * 1024 + panel % 2 * 16);
          if (kind == TO_RESIDUAL)
            to_residual(own_sums, used, (float *)target + block * ROWS * base->outputs + panel * 32, base->outputs);
        }
      }
    }
}

/* ------------------------------------------------------------------ a layer */

/* One layer's rows. */
typedef struct {
  const Product *out, *gate_up, *down, *qkv; /* NULL: not wanted, the first three together */
  const uint32_t *packed[4];                 /* of these four */
  const float *mlp_norm, *next_norm;
  float eps, next_eps;
  long N, H;
  const bf16 *attended;
  float *residual;
  bf16 *qkv_rows;
} Rows;

/* The rows from `first` on, `chunk` at most. Threads that share them call this together, each with its part of the
 * outputs; `packed` is a thread's own, `activated` is shared. */
static void chunk_of_rows(const Rows *r, long first, long chunk, bf16 *packed, bf16 *activated, Part part) {
  float sums[MAX_CHUNK * 32] __attribute__((aligned(64)));
  const long count = r->N - first < chunk ? r->N - first : chunk;
  float *residual = r->residual + first * r->H;
  const Term out = {r->out, r->packed[0], 0}, gate_up = {r->gate_up, r->packed[1], 0};
  const Term down = {r->down, r->packed[2], 0}, qkv = {r->qkv, r->packed[3], 0};
  if (r->out) {
    const long heads = r->out->inputs;
    pack_rows(r->attended + first * heads, count, heads, heads, packed);
    product(packed, count, heads, &out, 1, TO_RESIDUAL, residual, sums, part);
    wait_for_others(part);
    norm_rows(residual, count, r->H, r->mlp_norm, r->eps, packed);
    product(packed, count, r->H, &gate_up, 1, TO_ACTIVATION, activated, sums, part);
    wait_for_others(part);
    product(activated, count, r->down->inputs, &down, 1, TO_RESIDUAL, residual, sums, part);
    wait_for_others(part);
  }
  if (r->qkv) {
    norm_rows(residual, count, r->H, r->next_norm, r->next_eps, packed);
    product(packed, count, r->H, &qkv, 1, TO_ROWS, r->qkv_rows + first * r->qkv->outputs, sums, part);
  }
}

/* From one layer's attention to the next one's, for N rows:
 *
 *   residual += out(attended); residual += down(silu(gate) * up) of its norm; qkv_rows = qkv of the next layer's norm.
 *
 * residual [N, H] fp32; attended [N, Q D], NULL before the first layer; qkv_rows [N, (Q + 2 K) D], with `qkv` NULL behind
 * the last layer. Norms [H]. Room for: packed, the four weights; chunks, for each thread `chunk` rows (a multiple of 32,
 * at most MAX_CHUNK) of the wider of H and Q D, and of I.
 */
void decoder_rows(long N, long H, const bf16 *attended, float *residual, const Product *out, const float *mlp_norm,
                  const Product *gate_up, const Product *down, float eps, const float *next_norm, float next_eps,
                  const Product *qkv, bf16 *qkv_rows, uint32_t *packed, bf16 *chunks, long chunk, int threads) {
  Rows r = {.qkv = qkv, .mlp_norm = mlp_norm, .next_norm = next_norm, .eps = eps, .next_eps = next_eps,
            .N = N, .H = H, .attended = attended, .residual = residual, .qkv_rows = qkv_rows};
  if (attended) r.out = out, r.gate_up = gate_up, r.down = down;
  const Product *const products[4] = {r.out, r.gate_up, r.down, r.qkv};
  for (int i = 0; i < 4; i++) {
    r.packed[i] = packed;
    if (products[i]) packed += products[i]->outputs * products[i]->inputs / 2;
  }
  const long width = out->inputs > H ? out->inputs : H, room = chunk * (width + down->inputs);
  const int is_shared = (N + chunk - 1) / chunk < threads; /* too few for each thread to have rows of its own */
#pragma omp parallel num_threads(threads)
  {
    const Part own = {omp_get_thread_num(), omp_get_num_threads()}, whole = {0, 1};
    for (int i = 0; i < 4; i++)
      for (long panel = first_panel(products[i], own); panel < end_of_panels(products[i], own); panel++)
        pack_panel(products[i], i == 1, panel, (uint32_t *)r.packed[i] + panel * products[i]->inputs * 16);
    bf16 *rows = chunks + own.number * room, *activated = (is_shared ? chunks : rows) + chunk * width;
    TileConfig before;
    tiles_on(&before);
#pragma omp barrier
    if (is_shared) {
      for (long first = 0; first < N; first += chunk) chunk_of_rows(&r, first, chunk, rows, activated, own);
    } else {
#pragma omp for schedule(dynamic, 1)
      for (long first = 0; first < N; first += chunk) chunk_of_rows(&r, first, chunk, rows, activated, whole);
    }
    tiles_off(&before);
  }
}

/* ------------------------------------------------------------------ a layer with an adapter */

/* out [N, outputs] = base(x) + second(inner), inner [N, ranks] = bf16 of first(x): with `is_backward` all weights are
 * [inputs, outputs], so that the same three weights give the gradient of x from that of out. `first` and `second` may be
 * NULL. With `is_gate_up`, x is [gate, up] and silu(gate) * up is what is multiplied. Room for: packed, all weights;
 * chunks, for each thread `chunk` rows (as in decoder_rows) of the base's inputs and the ranks.
 */
void adapted_rows(long N, const bf16 *x, int is_gate_up, const Product *base, const Product *first,
                  const Product *second, int is_backward, bf16 *inner, bf16 *out, uint32_t *packed, bf16 *chunks,
                  long chunk, int threads) {
  const Product *const products[3] = {base, first, second};
  uint32_t *at[3];
  for (int i = 0; i < 3; i++) {
    at[i] = packed;
    if (products[i]) packed += products[i]->outputs * products[i]->inputs / 2;
  }
  const long width = base->inputs + (second ? second->inputs : 0);
  const int is_shared = (N + chunk - 1) / chunk < threads;
#pragma omp parallel num_threads(threads)
  {
    const Part thread = {omp_get_thread_num(), omp_get_num_threads()}, part = is_shared ? thread : (Part){0, 1};
    for (int i = 0; i < 3; i++)
      for (long panel = first_panel(products[i], thread); panel < end_of_panels(products[i], thread); panel++) {
        uint32_t *to = at[i] + panel * products[i]->inputs * 16;
        if (is_backward)
          pack_panel_of_columns(products[i], panel, to);
        else
          pack_panel(products[i], 0, panel, to);
      }
    float sums[MAX_CHUNK * 32] __attribute__((aligned(64)));
    bf16 *rows = chunks + thread.number * chunk * width;
    const Term inner_term = {first, at[1], 0}, terms[2] = {{base, at[0], 0}, {second, at[2], base->inputs}};
    TileConfig before;
    tiles_on(&before);
#pragma omp barrier
    for (long number = is_shared ? 0 : thread.number; number * chunk < N; number += is_shared ? 1 : thread.of) {
      const long start = number * chunk, count = N - start < chunk ? N - start : chunk;
      if (is_gate_up)
        pack_activation(x + start * 2 * base->inputs, count, base->inputs, width, rows);
      else
        pack_rows(x + start * base->inputs, count, base->inputs, width, rows);
      if (first) {
        bf16 *inner_rows = inner + start * first->outputs;
        product(rows, count, width, &inner_term, 1, TO_ROWS, inner_rows, sums, part);
        wait_for_others(part);
        pack_rows(inner_rows, count, first->outputs, width, rows + base->inputs * ROWS);
      }
      product(rows, count, width, terms, second ? 2 : 1, TO_ROWS, out + start * base->outputs, sums, part);
    }
    tiles_off(&before);
  }
}

/* gradient [ranks, width] (fp32) = inner' x, the sum over N rows of inner [N, ranks] and x [N, width]; both widths are
 * multiples of 32. Room for packed: inner with N rounded up to 32. */
void adapter_gradient(long N, const bf16 *inner, long ranks, const bf16 *x, long width, float *gradient, bf16 *packed,
                      int threads) {
  const long steps = (N + ROWS - 1) / ROWS;
#pragma omp parallel num_threads(threads)
  {
    /* The left side: for each 32 ranks and each 32 rows, [32 ranks, 32 rows]. */
#pragma omp for schedule(static)
    for (long step = 0; step < steps; step++)
      for (long rank = 0; rank < ranks; rank++) {
        bf16 *to = packed + (rank / 32 * steps + step) * 1024 + rank % 32 * 32;
        for (long i = 0; i < 32; i++) to[i] = step * 32 + i < N ? inner[(step * 32 + i) * ranks + rank] : 0;
      }
    uint32_t pairs[512] __attribute__((aligned(64))); /* the right side: two tiles [16 pairs of rows, 16 columns] */
    TileConfig before;
    tiles_on(&before);
#pragma omp for schedule(static)
    for (long column = 0; column < width; column += 32)
      for (long rank = 0; rank < ranks; rank += 32) {
        zero_sums();
        for (long step = 0; step < steps; step++) {
          for (long pair = 0; pair < 16; pair++) {
            const long row = step * 32 + 2 * pair;
            const __m512i even = row < N ? _mm512_loadu_si512(x + row * width + column) : _mm512_setzero_si512();
            const __m512i odd = row + 1 < N ? _mm512_loadu_si512(x + (row + 1) * width + column) : _mm512_setzero_si512();
            put_pairs(_mm512_castsi512_si256(even), _mm512_castsi512_si256(odd), pairs + pair * 16);
            put_pairs(_mm512_extracti64x4_epi64(even, 1), _mm512_extracti64x4_epi64(odd, 1), pairs + 256 + pair * 16);
          }
          const bf16 *left = packed + (rank / 32 * steps + step) * 1024;
          finish_writes();
          _tile_loadd(4, left, 64);
          _tile_loadd(5, left + 512, 64);
          _tile_loadd(6, pairs, 64);
          _tile_loadd(7, pairs + 256, 64);
          add_product();
        }
        store_sums(gradient + rank * width + column, width);
      }
    tiles_off(&before);
  }
}
