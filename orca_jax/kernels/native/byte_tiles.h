// Products of few bits with activations of 8 bits, some rows by a part of a block: see few_bits.c. The words of a matrix
// become bytes, and four of them are multiplied with four of x by one instruction, or two.

typedef int16_t Half __attribute__((may_alias));

// Integers of 8 bits of GROUP inputs of a row, in the orders of the bytes of a word, and of the halves of them in two
// bytes. The total becomes those of its halves, in 16 bits.
INLINE void store_bytes(const Product *p, int64_t at, const int16_t *numbers) {
  char *to = (char *)p->numbers + at * GROUP;
  for (int half = 0; half < 2; half++, numbers += GROUP / 2, to += GROUP / 2) {
    const __m128i *from = (const __m128i *)numbers;
    const __m128i bytes = _mm_packs_epi16(_mm_loadu_si128(from), _mm_loadu_si128(from + 1));
    const __m128i of_bytes = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m128i of_halves = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    _mm_storeu_si128((__m128i *)to, _mm_shuffle_epi8(bytes, of_bytes));
    _mm_storeu_si128((__m128i *)(to + p->inputs * p->rows), _mm_shuffle_epi8(bytes, of_halves));
    int32_t total = 0;
    for (int i = 0; i < GROUP / 2; i++) total += numbers[i];
    ((Half *)(p->totals + at))[half] = total;
  }
}

// The k-th four numbers of some words, with their high bits in other ones.
INLINE Words bytes_in(Words low, Words high, int k, const int bits) {
  const int rest = bits - LOW(bits);
  Words found = low >> 4 * k & 0x0f0f0f0f;
  const uint32_t mask = ((1 << rest) - 1) * 0x10001;
  if (rest > 0) found |= (high >> k * rest & mask) << 4 | (high >> (k + 2) * rest & mask) << 12;
  return found;
}

#if LANES == 16 && defined(__AVX512VNNI__)
#define SUMS_ARE_EXACT 1
#else
#define SUMS_ARE_EXACT 0  // of two products of bytes in 16 bits: numbers of 8 bits need their signs
#endif

// Adds four products to each sum. The numbers of the matrix are from 0, but of 8 bits from -128 unless sums are exact.
INLINE Integers dot_bytes(Integers sums, Words matrix, Words x, const int bits) {
#if SUMS_ARE_EXACT
  return (Integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)matrix, (__m512i)x);
#elif LANES == 16 && defined(__AVX512BW__)
  const int has_signs = bits == 8;
  __m512i a = (__m512i)matrix, b = (__m512i)x;
  if (has_signs) b = _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b), a = _mm512_abs_epi8(a);
  return sums + (Integers)_mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1));
#elif LANES == 8
  const int has_signs = bits == 8;
  __m256i a = (__m256i)matrix, b = (__m256i)x;
  if (has_signs) b = _mm256_sign_epi8(b, a), a = _mm256_abs_epi8(a);
  return sums + (Integers)_mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
#else
  const int has_signs = bits == 8;
  for (int place = 0; place < 32; place += 8) {
    const Integers number = has_signs ? (Integers)(matrix << (24 - place)) >> 24 : (Integers)(matrix >> place & 255);
    sums += number * ((Integers)(x << (24 - place)) >> 24);
  }
  return sums;
#endif
}

// `rows` of x by a chunk of a block, as in `tile_in_16_bits`. If `is_ready`, the chunk has its numbers as bytes; 8 bits
// stand for themselves.
INLINE void tile_of_bytes(const Product *p, int64_t row, const Chunk *chunk, Vector (*sums)[2], const int rows,
                          const int bits, const int is_ready) {
  const Words *next = is_ready ? (const Words *)chunk->bytes : (const Words *)chunk->words;
  const int has_signs = bits == 8 && !SUMS_ARE_EXACT, rest = is_ready ? 0 : bits - LOW(bits), each = is_ready ? 1 : 2;
  const int lines = PART(bits) / 4 / each;
  const int32_t offset = (p->minima != NULL ? 0 : 1 << (p->bits - 1)) - (has_signs ? 128 : 0);
  const int8_t *numbers = (const int8_t *)p->numbers + (bits == 8 ? 0 : p->inputs * p->rows);
  for (int64_t i = chunk->first; i < chunk->first + chunk->size; i += PART(bits)) {
    const int64_t at = i / GROUP * p->rows + row;
    const uint32_t *x = (const uint32_t *)(numbers + at * GROUP + i % GROUP);
    Words high[2] = {{0}, {0}};
    if (rest > 0) high[0] = next[2 * lines], high[1] = next[2 * lines + 1];
    Integers found[ROWS][2];
    for (int r = 0; r < rows; r++) {
      const Half *totals = (const Half *)(p->totals + at + r);
      const int32_t total = PART(bits) == GROUP ? totals[0] + totals[1] : totals[i % GROUP != 0];
      found[r][0] = found[r][1] = (Integers){0} - total * offset;
    }
    for (int line = 0; line < lines; line++, next += 2) {
      for (int k = 0; k < each; k++, x++) {
        Words one = next[0], two = next[1];
        if (!is_ready) one = bytes_in(one, high[0], k, bits), two = bytes_in(two, high[1], k, bits);
        if (has_signs) one ^= 0x80808080, two ^= 0x80808080;
        for (int r = 0; r < rows; r++) {
          const Words four = (Words)everywhere(x + r * GROUP / 4);
          found[r][0] = dot_bytes(found[r][0], one, four, bits);
          found[r][1] = dot_bytes(found[r][1], two, four, bits);
        }
      }
      if (rest > 0) high[0] >>= 4 * rest, high[1] >>= 4 * rest;
    }
    if (rest > 0) next += 2;
    add_sums(p, at, chunk->block, i, found, sums, rows);
  }
}

INLINE void expand_to_bytes(const Chunk *chunk, Words (*to)[2], const int bits) {
  const Words *next = (const Words *)chunk->words;
  const int lines = PART(bits) / 8, rest = bits - LOW(bits);
  for (int64_t i = 0; i < chunk->size; i += PART(bits)) {
    Words high[2] = {{0}, {0}};
    if (rest > 0) high[0] = next[2 * lines], high[1] = next[2 * lines + 1];
    for (int line = 0; line < lines; line++, next += 2) {
      for (int k = 0; k < 2; k++, to++)
        for (int half = 0; half < 2; half++) to[0][half] = bytes_in(next[half], high[half], k, bits);
      if (rest > 0) high[0] >>= 4 * rest, high[1] >>= 4 * rest;
    }
    if (rest > 0) next += 2;
  }
}

// The numbers of a chunk in 4 to 6 bits as bytes: those of many rows share them in the first cache.
static const void *expand_bytes(const Chunk *chunk, void *to, int bits) {
  if (bits == 4)
    expand_to_bytes(chunk, to, 4);
  else if (bits == 5)
    expand_to_bytes(chunk, to, 5);
  else
    expand_to_bytes(chunk, to, 6);
  return to;
}
