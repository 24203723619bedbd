// Products with numbers in e4m3, some rows by a part of a block: see few_bits.c. Words have them as integers of 8 bits.

#define LEADING 8  // the least magnitude with a leading one: those below it are multiples of 2^-9

// The number in the low byte of each lane.
INLINE Vector from_e4m3(Words code) {
  const Words magnitude = code & 0x7f;
  const Vector usual = (Vector)((magnitude << 20) + (120 << 23));
  const Vector small = __builtin_convertvector((Integers)magnitude, Vector) * 0x1p-9f;
  const Vector found = either((Integers)(magnitude < LEADING), small, usual);
  return (Vector)((Words)found | (code & 0x80) << 24);
}

// Entries of the matrix for the inputs of a chunk.
static void expand_e4m3(const Product *p, const Chunk *chunk, Vector (*to)[2]) {
  const Words *next = (const Words *)chunk->words;
  for (int64_t first = 0; first < chunk->size; first += GROUP) {
    const Factors factor = factors(p, chunk->block, chunk->first + first);
    for (int line = 0; line < GROUP / 4; line++, next += 2) {
      fetch((const Pairs *)next);
      for (int k = 0; k < 4; k++, to++)
        for (int half = 0; half < 2; half++)
          to[0][half] = from_e4m3(next[half] >> (k % 2 * 16 + k / 2 * 8) & 0xff) * factor.scales[half];
    }
  }
}

#if LANES == 16 && defined(__AVX512FP16__)
#define HAS_SHORT_FLOATS 1
#define SHORT_FLOAT_ROWS ROWS  // of x in a tile
#define CODE_UNIT 256  // a number of e4m3 by the one in float16 with the same bits
#define HALF_UNIT 0x1p56f  // the root of a number in float16 by the one in float32 with the same bits

typedef int16_t SignedPairs __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// x of a group in float16. The largest magnitude is from 2^9 to 2^10: so a sum of GROUP products fits, and few are too
// small for float16. `size` is what their products by codes are to be multiplied by, beside HALF_UNIT and a scale.
static void to_short_floats(const float *x, uint16_t *numbers, float *size) {
  Integers most = {0};
  for (int i = 0; i < GROUP; i += LANES) {
    const Integers magnitude = *(const Integers *)(x + i) & 0x7fffffff, is_larger = magnitude > most;
    most = (magnitude & is_larger) | (most & ~is_larger);
  }
  const int32_t top = _mm512_reduce_max_epi32((__m512i)most), exponents = 0x7f800000, nine = 9 << 23;
  const int is_finite = top < exponents, is_zero = top < 0x0da00000;  // 1e-30
  const int32_t bits = (top & exponents) - nine, inverse_bits = 0x7f000000 - bits;
  float power, factor;
  memcpy(&power, &bits, sizeof power);
  memcpy(&factor, &inverse_bits, sizeof factor);
  if (!is_finite || is_zero) factor = 0;
  for (int i = 0; i < GROUP; i += LANES) {
    const Vector scaled = (is_finite ? *(const Vector *)(x + i) : (Vector){0}) * factor;
    _mm256_storeu_si256((__m256i *)(numbers + i), _mm512_cvtps_ph((__m512)scaled, _MM_FROUND_TO_NEAREST_INT));
  }
  *size = !is_finite ? NAN : is_zero ? 0 : power * CODE_UNIT * HALF_UNIT;
}

// The numbers of a chunk in float16, divided by CODE_UNIT: all rows share them in the first cache.
static void expand_short_floats(const Chunk *chunk, Pairs (*to)[2]) {
  const Pairs *next = (const Pairs *)chunk->words;
  for (int64_t i = 0; i < chunk->size; i += 4, next += 2, to += 2) {
    fetch(next);
    for (int half = 0; half < 2; half++) {
      const SignedPairs codes = (SignedPairs)next[half];
      to[0][half] = (Pairs)((codes << 8) >> 1) & 0xbf80;
      to[1][half] = (Pairs)(codes >> 1) & 0xbf80;
    }
  }
}

// The sums of both numbers of each lane as float32 with the same bits, so divided by the square of HALF_UNIT.
INLINE Vector sums_of_lanes(__m512h sums) {
  const __m512h both = _mm512_add_ph(sums, (__m512h)_mm512_slli_epi32((__m512i)sums, 16));
  return (Vector)((Integers)both >> 3 & (int32_t)0x8fffe000);
}

// `rows` of x in float16 by a chunk, added to `sums` with both scales of each GROUP inputs. `rows` is a constant. A sum
// in float16 has GROUP / 2 products.
INLINE void tile_in_short_floats(const Product *p, int64_t row, const Chunk *chunk, Vector (*sums)[2], const int rows) {
  const Pairs(*next)[2] = chunk->pairs;
  Vector parts[SHORT_FLOAT_ROWS][2];
  for (int r = 0; r < rows; r++) parts[r][0] = sums[r][0], parts[r][1] = sums[r][1];
  for (int64_t i = chunk->first; i < chunk->first + chunk->size; i += GROUP) {
    const int64_t at = i / GROUP * p->rows + row;
    const uint32_t *x = (const uint32_t *)p->numbers + at * GROUP / 2;
    __m512h found[SHORT_FLOAT_ROWS][2];
    for (int r = 0; r < rows; r++) found[r][0] = found[r][1] = _mm512_setzero_ph();
    for (int pair = 0; pair < GROUP / 2; pair++, next++)
      for (int r = 0; r < rows; r++) {
        const __m512h both = (__m512h)everywhere(x + r * GROUP / 2 + pair);
        found[r][0] = _mm512_fmadd_ph(both, (__m512h)next[0][0], found[r][0]);
        found[r][1] = _mm512_fmadd_ph(both, (__m512h)next[0][1], found[r][1]);
      }
    const Factors factor = factors(p, chunk->block, i);
    for (int half = 0; half < 2; half++) {
      const Vector scales = factor.scales[half] * HALF_UNIT;
      for (int r = 0; r < rows; r++) parts[r][half] += sums_of_lanes(found[r][half]) * scales * p->sizes[at + r];
    }
  }
  for (int r = 0; r < rows; r++) sums[r][0] = parts[r][0], sums[r][1] = parts[r][1];
}
#elif LANES == 16 && defined(__AVX512BF16__)
#define HAS_SHORT_FLOATS 1
#define SHORT_FLOAT_ROWS WIDE

// x of a group in bfloat16.
static void to_short_floats(const float *x, uint16_t *numbers, float *size) {
  for (int i = 0; i < GROUP; i += LANES) *(Halves *)(numbers + i) = to_bfloat16(*(const Vector *)(x + i));
  *size = 1;
}

// The number of each half of a lane in bfloat16, which has all of them.
INLINE Pairs bfloat16_pair(Pairs code) {
  const __m512i small =
      _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const Pairs magnitude = code & 0x7f, usual = (magnitude << 4) + (120 << 7);
  const __mmask32 is_small = _mm512_cmplt_epu16_mask((__m512i)magnitude, _mm512_set1_epi16(LEADING));
  const __m512i found = _mm512_mask_permutexvar_epi16((__m512i)usual, is_small, (__m512i)magnitude, small);
  return (Pairs)found | (code & 0x80) << 8;
}

// The numbers of a chunk in bfloat16: all rows share them in the first cache.
static void expand_short_floats(const Chunk *chunk, Pairs (*to)[2]) {
  const Pairs *next = (const Pairs *)chunk->words;
  for (int64_t i = 0; i < chunk->size; i += 4, next += 2) {
    fetch(next);
    for (int k = 0; k < 2; k++, to++)
      for (int half = 0; half < 2; half++) to[0][half] = bfloat16_pair(next[half] >> 8 * k & 0xff);
  }
}

// `rows` of x in bfloat16 by a chunk, added to `sums` with the scale of each GROUP inputs. `rows` is a constant.
INLINE void tile_in_short_floats(const Product *p, int64_t row, const Chunk *chunk, Vector (*sums)[2], const int rows) {
  const Pairs(*next)[2] = chunk->pairs;
  Vector parts[SHORT_FLOAT_ROWS][2];
  for (int r = 0; r < rows; r++) parts[r][0] = sums[r][0], parts[r][1] = sums[r][1];
  for (int64_t i = chunk->first; i < chunk->first + chunk->size; i += GROUP) {
    const uint32_t *x = (const uint32_t *)p->numbers + (i / GROUP * p->rows + row) * GROUP / 2;
    Vector found[SHORT_FLOAT_ROWS][2] = {{{0}}};
    for (int pair = 0; pair < GROUP / 2; pair++, next++)
      for (int r = 0; r < rows; r++) {
        const __m512bh both = (__m512bh)everywhere(x + r * GROUP / 2 + pair);
        found[r][0] = (Vector)_mm512_dpbf16_ps((__m512)found[r][0], both, (__m512bh)next[0][0]);
        found[r][1] = (Vector)_mm512_dpbf16_ps((__m512)found[r][1], both, (__m512bh)next[0][1]);
      }
    const Factors factor = factors(p, chunk->block, i);
    for (int r = 0; r < rows; r++)
      for (int half = 0; half < 2; half++) parts[r][half] += found[r][half] * factor.scales[half];
  }
  for (int r = 0; r < rows; r++) sums[r][0] = parts[r][0], sums[r][1] = parts[r][1];
}
#else
#define HAS_SHORT_FLOATS 0
#endif
