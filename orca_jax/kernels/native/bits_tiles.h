// Products of few bits, some rows by a part of a block: see few_bits.c.

#include "threads.h"
#include "vectors.h"

#if LANES == 16
#define ROWS 12    // of x in a tile in float32: 24 sums, in 32 registers
#define NARROW 6   // of x in a tile in 16 bits: more of them are slower
#else
#define ROWS 6
#define NARROW 4
#endif
#define WIDE 6  // of x in a tile of expanded numbers

#define WIDTH (2 * LANES)
#define GROUP 32    // inputs of a row with one scale
#define CHUNK 128   // most inputs of a chunk
#define AHEAD 4096  // bytes of words between a fetch and its use
#define INVERSE 40  // bits of a fraction: exact for less than 2^20 inputs

typedef uint16_t Pairs __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
  const float *x;
  const void *scales, *minima;  // no minima: NULL
  const uint16_t *units;        // none: NULL
  const uint32_t *words;
  float *out;
  Place place;
  int64_t rows, inputs, outputs, groups, num_units;  // groups of scales, and units of a column
  int64_t by_group, by_unit;                         // input i is in the group i * by_group >> INVERSE
  int bits, is_float32, is_half;                     // `is_half`: scales and minima are float16
  int is_short;                                      // x has 8 bits
  int is_e4m3;                                       // numbers are floats of 8 bits
  // x by groups of GROUP inputs, then by rows
  void *numbers;    // float32, int16, int8 or bfloat16
  float *sizes;     // scales of x
  float *weights;   // sums of x, for minima
  int32_t *totals;  // sums of the integers
} Product;

// Adds two products of 16-bit integers to each sum.
INLINE Integers dot(Integers sums, Pairs x, Pairs y) {
#if LANES == 16 && defined(__AVX512VNNI__)
  return (Integers)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)x, (__m512i)y);
#elif LANES == 16 && defined(__AVX512BW__)
  return sums + (Integers)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#elif LANES == 8
  return sums + (Integers)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#else
  return sums + ((Integers)x << 16 >> 16) * ((Integers)y << 16 >> 16) + ((Integers)x >> 16) * ((Integers)y >> 16);
#endif
}

// Inputs of a block from `first` on, in whole parts. A part has the inputs whose words are together.
typedef struct {
  int64_t block, first, size;
  const uint32_t *words;
  const Vector (*expanded)[2];  // entries of each input
  const Pairs (*pairs)[2];      // numbers of each two inputs
  const Words (*bytes)[2];      // numbers of each four inputs
} Chunk;

#define PART(bits) ((bits) == 6 ? 16 : 32)  // inputs
#define LOW(bits) ((bits) == 8 ? 8 : 4)     // bits in the first words of a part

typedef struct {
  Vector scales[2], minima[2];  // of both halves of the columns; without minima they are zeros
} Factors;

// The bits of the largest magnitude of GROUP numbers. Those of NaN are above those of infinity.
INLINE int32_t largest_magnitude(const float *x) {
  Integers most = {0};
  for (int i = 0; i < GROUP; i += LANES) {
    const Integers magnitude = *(const Integers *)(x + i) & 0x7fffffff, is_larger = magnitude > most;
    most = (magnitude & is_larger) | (most & ~is_larger);
  }
  int32_t top = 0;
  for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
  return top;
}

INLINE Vector numbers_of(const void *numbers, int64_t at, int is_half) {
  return is_half ? from_float16((const uint16_t *)numbers + at) : *(const Vector *)((const float *)numbers + at);
}

// Those of the input `first` of a block.
INLINE Factors factors(const Product *p, int64_t block, int64_t first) {
  Factors found = {0};
  const int64_t at = (block * p->groups + (first * p->by_group >> INVERSE)) * WIDTH, kinds = p->minima == NULL ? 1 : 2;
  const int64_t unit = p->units == NULL ? 0 : (block * p->num_units + (first * p->by_unit >> INVERSE)) * kinds * WIDTH;
  for (int half = 0; half < 2; half++) {
    const int64_t here = at + half * LANES;
    if (p->units == NULL) {
      found.scales[half] = numbers_of(p->scales, here, p->is_half);
      if (p->minima != NULL) found.minima[half] = numbers_of(p->minima, here, p->is_half);
      continue;
    }
    const uint16_t *units = p->units + unit + half * LANES;
    found.scales[half] = from_int8((const int8_t *)p->scales + here) * from_float16(units);
    if (p->minima != NULL)
      found.minima[half] = from_int8((const int8_t *)p->minima + here) * from_float16(units + WIDTH);
  }
  return found;
}

// Ask for two vectors of words before their use. A processor does it by itself within a page alone.
INLINE void fetch(const Pairs *next) {
  __builtin_prefetch((const char *)next + AHEAD);
  if (LANES == 16) __builtin_prefetch((const char *)(next + 1) + AHEAD);
}

// The k-th pair of numbers of some words, with their high bits in other ones.
INLINE Pairs pair_of(Pairs low, Pairs high, int k, const int bits) {
  const int each = LOW(bits), rest = bits - each;
  Pairs found = low >> k * each & (uint16_t)((1 << each) - 1);
  if (rest > 0) {
    const int right = k * rest - each;  // the high bits come next to the low ones by one shift
    found |= (right > 0 ? high >> right : high << -right) & (uint16_t)(((1 << rest) - 1) << each);
  }
  if (bits == 6) found -= 32;
  return found;
}

// The sums of a part in integers, added to those in float32 with its scales and minima.
INLINE void add_sums(const Product *p, int64_t at, int64_t block, int64_t first, Integers (*found)[2],
                     Vector (*sums)[2], const int rows) {
  const Factors factor = factors(p, block, first);
  const float *sizes = p->sizes + at, *weights = p->weights + at;
  for (int r = 0; r < rows; r++)
    for (int half = 0; half < 2; half++)
      sums[r][half] += __builtin_convertvector(found[r][half], Vector) * sizes[r] * factor.scales[half];
  if (p->minima != NULL)
    for (int r = 0; r < rows; r++)
      for (int half = 0; half < 2; half++) sums[r][half] -= weights[r] * factor.minima[half];
}

// A word in all lanes.
INLINE Pairs everywhere(const uint32_t *word) {
#if LANES == 8
  return (Pairs)_mm256_broadcast_ss((const float *)word);
#else
  return (Pairs)((Words){0} + *word);
#endif
}

// `rows` of x by a chunk of a block, added to `sums` with the scales of each part. `rows` and `bits` are constants.
INLINE void tile_in_16_bits(const Product *p, int64_t row, const Chunk *chunk, Vector (*sums)[2], const int rows,
                            const int bits) {
  const Pairs *next = (const Pairs *)chunk->words;
  const int32_t offset = p->minima != NULL || bits == 6 ? 0 : 1 << (bits - 1);
  const int each = 16 / LOW(bits), lines = PART(bits) / 2 / each;
  Vector parts[ROWS][2];
  for (int r = 0; r < rows; r++) parts[r][0] = sums[r][0], parts[r][1] = sums[r][1];
  for (int64_t i = chunk->first; i < chunk->first + chunk->size; i += PART(bits)) {
    const int64_t at = i / GROUP * p->rows + row;
    const uint32_t *x = (const uint32_t *)((const int16_t *)p->numbers + at * GROUP + i % GROUP);
    Pairs high[2] = {{0}, {0}};
    if (bits > LOW(bits)) high[0] = next[2 * lines], high[1] = next[2 * lines + 1];
    Integers found[ROWS][2];
    for (int r = 0; r < rows; r++) found[r][0] = found[r][1] = (Integers){0} - p->totals[at + r] * offset;
    for (int pair = 0; pair < PART(bits) / 2; next += 2) {
      fetch(next);
      for (int k = 0; k < each; k++, pair++) {
        const Pairs one = pair_of(next[0], high[0], k, bits), two = pair_of(next[1], high[1], k, bits);
        for (int r = 0; r < rows; r++) {
          const Pairs both = everywhere(x + r * GROUP / 2 + pair);
          found[r][0] = dot(found[r][0], both, one);
          found[r][1] = dot(found[r][1], both, two);
        }
      }
      if (bits > LOW(bits)) high[0] >>= each * (bits - LOW(bits)), high[1] >>= each * (bits - LOW(bits));
    }
    if (bits > LOW(bits)) {
      fetch(next);
      next += 2;
    }
    add_sums(p, at, chunk->block, i, found, parts, rows);
  }
  for (int r = 0; r < rows; r++) sums[r][0] = parts[r][0], sums[r][1] = parts[r][1];
}

// The numbers of a chunk in 16 bits: those of many rows share them in the first cache.
INLINE void expand_pairs(const Product *p, const Chunk *chunk, Pairs (*to)[2], const int bits) {
  const Pairs *next = (const Pairs *)chunk->words;
  const uint16_t offset = p->minima != NULL || bits == 6 ? 0 : 1 << (bits - 1);
  const int each = 16 / LOW(bits), lines = PART(bits) / 2 / each;
  for (int64_t i = 0; i < chunk->size; i += PART(bits)) {
    Pairs high[2] = {{0}, {0}};
    if (bits > LOW(bits)) high[0] = next[2 * lines], high[1] = next[2 * lines + 1];
    for (int line = 0; line < lines; line++, next += 2) {
      for (int k = 0; k < each; k++, to++)
        for (int half = 0; half < 2; half++) to[0][half] = pair_of(next[half], high[half], k, bits) - offset;
      if (bits > LOW(bits)) high[0] >>= each * (bits - LOW(bits)), high[1] >>= each * (bits - LOW(bits));
    }
    if (bits > LOW(bits)) next += 2;
  }
}

// The sums of `tile_in_16_bits` from expanded numbers. `rows` and `part`, the inputs of a scale, are constants.
INLINE void tile_of_pairs(const Product *p, int64_t row, const Chunk *chunk, Vector (*sums)[2], const int rows,
                          const int part) {
  const Pairs(*next)[2] = chunk->pairs;
  Vector parts[ROWS][2];
  for (int r = 0; r < rows; r++) parts[r][0] = sums[r][0], parts[r][1] = sums[r][1];
  for (int64_t i = chunk->first; i < chunk->first + chunk->size; i += part) {
    const int64_t at = i / GROUP * p->rows + row;
    const uint32_t *x = (const uint32_t *)((const int16_t *)p->numbers + at * GROUP + i % GROUP);
    Integers found[ROWS][2] = {{{0}}};
    for (int pair = 0; pair < part / 2; pair++, next++) {
      Pairs one = next[0][0], two = next[0][1];
      __asm__("" : "+v"(one), "+v"(two));  // in registers: a load for each row would take longer
      for (int r = 0; r < rows; r++) {
        const Pairs both = everywhere(x + r * GROUP / 2 + pair);
        found[r][0] = dot(found[r][0], both, one);
        found[r][1] = dot(found[r][1], both, two);
      }
    }
    add_sums(p, at, chunk->block, i, found, parts, rows);
  }
  for (int r = 0; r < rows; r++) sums[r][0] = parts[r][0], sums[r][1] = parts[r][1];
}

// Entries of the matrix for the k-th input of some words, with their high bits in other ones.
INLINE Vector entries(const Factors *factor, Words low, Words high, int half, int k, const int bits, int32_t offset) {
  const int each = LOW(bits), rest = bits - each;
  Words found = low >> (k % 2 * 16 + k / 2 * each) & ((1 << each) - 1);
  if (rest > 0) found |= (high >> (k % 2 * 16 + k / 2 * rest) & ((1 << rest) - 1)) << each;
  const Vector values = __builtin_convertvector((Integers)found - offset, Vector);
  return values * factor->scales[half] - factor->minima[half];
}

INLINE void expand(const Product *p, const Chunk *chunk, Vector (*to)[2], const int bits) {
  const Words *next = (const Words *)chunk->words;
  const int32_t offset = p->minima != NULL ? 0 : 1 << (bits - 1);
  const int each = 32 / LOW(bits), lines = PART(bits) / each, rest = bits - LOW(bits);
  for (int64_t i = 0; i < chunk->size;) {
    const Factors factor = factors(p, chunk->block, chunk->first + i);
    Words high[2] = {{0}, {0}};
    if (rest > 0) high[0] = next[2 * lines], high[1] = next[2 * lines + 1];
    for (int line = 0; line < lines; line++, next += 2) {
      for (int k = 0; k < each; k++, i++)
        for (int half = 0; half < 2; half++)
          to[i][half] = entries(&factor, next[half], high[half], half, k, bits, offset);
      if (rest > 0) high[0] >>= each / 2 * rest, high[1] >>= each / 2 * rest;
    }
    if (rest > 0) next += 2;
  }
}

// `rows` of x by the entries of a chunk. Each sum is a single chain over all inputs. `rows` is a constant.
INLINE void tile_in_float32(const Product *p, int64_t row, const Chunk *chunk, Vector (*sums)[2], const int rows) {
  Vector parts[ROWS][2];  // sums of a chunk alone: fewer roundings reach an output than in one sum over all inputs
  for (int r = 0; r < rows; r++) parts[r][0] = parts[r][1] = (Vector){0};
  const Vector(*next)[2] = chunk->expanded;
  for (int64_t i = chunk->first; i < chunk->first + chunk->size; i += GROUP) {
    const float *x = (const float *)p->numbers + (i / GROUP * p->rows + row) * GROUP;
    for (int k = 0; k < GROUP; k++, next++)
      for (int r = 0; r < rows; r++) {
        parts[r][0] += x[r * GROUP + k] * (*next)[0];
        parts[r][1] += x[r * GROUP + k] * (*next)[1];
      }
  }
  for (int r = 0; r < rows; r++)
    for (int half = 0; half < 2; half++) sums[r][half] += parts[r][half];
}
