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
#define SHORT_FLOAT_TILES ALL_TILES
#define CODE_UNIT 256  // a number of e4m3 by the one in float16 with the same bits
#define HALF_UNIT 0x1p56f  // the root of a number in float16 by the one in float32 with the same bits

typedef int16_t SignedPairs __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// x of a group in float16. The largest magnitude is from 2^9 to 2^10: so a sum of GROUP products fits, and few are too
// small for float16. `size` is what their products by codes are to be multiplied by, beside HALF_UNIT and a scale.
static void to_short_floats(const float *x, uint16_t *numbers, float *size) {
  const int32_t top = largest_magnitude(x), exponents = 0x7f800000, nine = 9 << 23;
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

// The numbers of a word's codes in float16, divided by CODE_UNIT.
INLINE void short_floats_of(Pairs codes, Pairs *first, Pairs *second) {
  const SignedPairs both = (SignedPairs)codes;
  *first = (Pairs)((both << 8) >> 1) & 0xbf80;
  *second = (Pairs)(both >> 1) & 0xbf80;
}

typedef __m512h ShortSums;  // two of each lane

INLINE ShortSums add_products(ShortSums sums, Pairs x, Pairs numbers) {
  return _mm512_fmadd_ph((__m512h)x, (__m512h)numbers, sums);
}

// Both sums of each lane in float32 come with the same bits, so divided by the square of HALF_UNIT.
INLINE Vector add_scaled(Vector to, ShortSums sums, Vector scales, float size) {
  const __m512h both = _mm512_add_ph(sums, (__m512h)_mm512_slli_epi32((__m512i)sums, 16));
  const Vector total = (Vector)((Integers)both >> 3 & (int32_t)0x8fffe000);
  return to + total * (scales * HALF_UNIT) * size;
}
#elif LANES == 16 && defined(__AVX512BF16__)
#define HAS_SHORT_FLOATS 1
#define SHORT_FLOAT_ROWS WIDE
#define SHORT_FLOAT_TILES UP_TO_6

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

INLINE void short_floats_of(Pairs codes, Pairs *first, Pairs *second) {
  *first = bfloat16_pair(codes & 0xff);
  *second = bfloat16_pair(codes >> 8 & 0xff);
}

typedef Vector ShortSums;

INLINE ShortSums add_products(ShortSums sums, Pairs x, Pairs numbers) {
  return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)numbers);
}

INLINE Vector add_scaled(Vector to, ShortSums sums, Vector scales, float size) { return to + sums * scales; }
#else
#define HAS_SHORT_FLOATS 0
#endif

#if HAS_SHORT_FLOATS
// The numbers of a chunk with 16 bits: all rows share them in the first cache.
static void expand_short_floats(const Chunk *chunk, Pairs (*to)[2]) {
  const Pairs *next = (const Pairs *)chunk->words;
  for (int64_t i = 0; i < chunk->size; i += 4, next += 2, to += 2) {
    fetch(next);
    for (int half = 0; half < 2; half++) short_floats_of(next[half], &to[0][half], &to[1][half]);
  }
}

// `rows` of x with 16 bits by a chunk, added to `sums` with both scales of each GROUP inputs. `rows` is a constant. A
// sum of a lane has GROUP / 2 products.
INLINE void tile_in_short_floats(const Product *p, int64_t row, const Chunk *chunk, Vector (*sums)[2], const int rows) {
  const Pairs(*next)[2] = chunk->pairs;
  Vector parts[SHORT_FLOAT_ROWS][2];
  for (int r = 0; r < rows; r++) parts[r][0] = sums[r][0], parts[r][1] = sums[r][1];
  for (int64_t i = chunk->first; i < chunk->first + chunk->size; i += GROUP) {
    const int64_t at = i / GROUP * p->rows + row;
    const uint32_t *x = (const uint32_t *)p->numbers + at * GROUP / 2;
    ShortSums found[SHORT_FLOAT_ROWS][2];
    for (int r = 0; r < rows; r++) found[r][0] = found[r][1] = (ShortSums){0};
    for (int pair = 0; pair < GROUP / 2; pair++, next++)
      for (int r = 0; r < rows; r++) {
        const Pairs both = everywhere(x + r * GROUP / 2 + pair);
        for (int half = 0; half < 2; half++) found[r][half] = add_products(found[r][half], both, next[0][half]);
      }
    const Factors factor = factors(p, chunk->block, i);
    for (int half = 0; half < 2; half++)
      for (int r = 0; r < rows; r++)
        parts[r][half] = add_scaled(parts[r][half], found[r][half], factor.scales[half], p->sizes[at + r]);
  }
  for (int r = 0; r < rows; r++) sums[r][0] = parts[r][0], sums[r][1] = parts[r][1];
}
#endif
