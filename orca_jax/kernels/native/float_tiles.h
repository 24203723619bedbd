// Products with numbers in e4m3, some rows by a part of a block: see few_bits.c. Words have them as integers of 8 bits.

#define SMALL 8  // magnitudes below it have no leading one: they are multiples of 2^-9

// The number in the low byte of each lane.
INLINE Vector from_e4m3(Words code) {
  const Words magnitude = code & 0x7f;
  const Vector usual = (Vector)((magnitude << 20) + (120 << 23));
  const Vector small = __builtin_convertvector((Integers)magnitude, Vector) * 0x1p-9f;
  const Vector found = either((Integers)(magnitude < SMALL), small, usual);
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

#if LANES == 16 && defined(__AVX512BF16__)
#define HAS_BFLOAT16 1

// The number of each half of a lane in bfloat16, which has all of them.
INLINE Pairs bfloat16_pair(Pairs code) {
  const __m512i small =
      _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const Pairs magnitude = code & 0x7f, usual = (magnitude << 4) + (120 << 7);
  const __mmask32 is_small = _mm512_cmplt_epu16_mask((__m512i)magnitude, _mm512_set1_epi16(SMALL));
  const __m512i found = _mm512_mask_permutexvar_epi16((__m512i)usual, is_small, (__m512i)magnitude, small);
  return (Pairs)found | (code & 0x80) << 8;
}

// The numbers of a chunk in bfloat16: all rows share them in the first cache.
static void expand_bfloat16(const Chunk *chunk, Pairs (*to)[2]) {
  const Pairs *next = (const Pairs *)chunk->words;
  for (int64_t i = 0; i < chunk->size; i += 4, next += 2) {
    fetch(next);
    for (int k = 0; k < 2; k++, to++)
      for (int half = 0; half < 2; half++) to[0][half] = bfloat16_pair(next[half] >> 8 * k & 0xff);
  }
}

// `rows` of x in bfloat16 by a chunk, added to `sums` with the scale of each GROUP inputs. `rows` is a constant.
INLINE void tile_in_bfloat16(const Product *p, int64_t row, const Chunk *chunk, Vector (*sums)[2], const int rows) {
  const Pairs(*next)[2] = chunk->pairs;
  Vector parts[WIDE][2];
  for (int r = 0; r < rows; r++) parts[r][0] = sums[r][0], parts[r][1] = sums[r][1];
  for (int64_t i = chunk->first; i < chunk->first + chunk->size; i += GROUP) {
    const uint32_t *x = (const uint32_t *)p->numbers + (i / GROUP * p->rows + row) * GROUP / 2;
    Vector found[WIDE][2] = {{{0}}};
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
#define HAS_BFLOAT16 0
#endif
