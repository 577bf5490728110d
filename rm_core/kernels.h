/* What kernels.c and products.c share: vectors of 16 numbers, and AMX tiles. For x86-64 with AVX512-BF16 and AMX.
 *
 * Plain C on raw pointers: no torch headers, so it compiles in a second or two and does not depend on torch's ABI.
 * It is linked without an OpenMP library: torch has loaded its own, and one pool of threads must do all the work.
 *
 * Matrices are row-major. bf16 values are uint16_t. N packed tokens, Q query heads, K key/value heads, D head size,
 * H hidden size, I intermediate size.
 */
#ifndef RM_CORE_KERNELS_H
#define RM_CORE_KERNELS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

enum { ROWS = 32 }; /* of a block: two tiles */

/* ------------------------------------------------------------------ vectors of 16 */

static inline __m512 load_bf16(const bf16 *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

static inline void store_bf16(bf16 *p, __m512 x) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x)); }

/* 2^x: 2^floor(x) times a polynomial of the rest, fitted to a relative error of 3e-6, far below bf16's. NaN stays NaN. */
static inline __m512 exp2_16(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x - floor(x) */
  __m512 p = _mm512_set1_ps(0.013426688f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.052242465f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24128021f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69304484f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}

/* ------------------------------------------------------------------ tiles */

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
} __attribute__((aligned(64))) TileConfig;

/* gcc does not know that its tile loads read memory, and might put off what was to be written there: before each of them
 * stands this. */
static inline void finish_writes(void) { __asm__ volatile("" ::: "memory"); }

/* All eight tiles are 16 rows of 64 bytes. What oneDNN had configured on this thread is kept and put back, since it
 * may count on finding it. */
static void tiles_on(TileConfig *before) {
  TileConfig config;
  _tile_storeconfig(before);
  finish_writes();
  memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int t = 0; t < 8; t++) {
    config.rows[t] = 16;
    config.bytes_per_row[t] = 64;
  }
  finish_writes();
  _tile_loadconfig(&config);
}

/* Tiles 0 to 3 hold sums [32, 32] (fp32), 16 by 16 each; in memory their rows are `stride` apart. */
static inline void zero_sums(void) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

static inline void load_sums(const float *sums, long stride) {
  finish_writes();
  _tile_loadd(0, sums, stride * 4);
  _tile_loadd(1, sums + 16, stride * 4);
  _tile_loadd(2, sums + 16 * stride, stride * 4);
  _tile_loadd(3, sums + 16 * stride + 16, stride * 4);
}

static inline void store_sums(float *sums, long stride) {
  _tile_stored(0, sums, stride * 4);
  _tile_stored(1, sums + 16, stride * 4);
  _tile_stored(2, sums + 16 * stride, stride * 4);
  _tile_stored(3, sums + 16 * stride + 16, stride * 4);
}

/* sums += tiles 4 and 5, 16 rows each, times tiles 6 and 7, 16 columns each. */
static inline void add_product(void) {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

static void tiles_off(const TileConfig *before) {
  finish_writes();
  if (before->palette)
    _tile_loadconfig(before);
  else
    _tile_release();
}

#endif
