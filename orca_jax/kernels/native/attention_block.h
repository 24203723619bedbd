// Blocks of tokens that some rows of a request attend (see `attention.c`).

#include <float.h>
#include <math.h>
#include <string.h>

#include "threads.h"
#include "vectors.h"

#define BLOCK 128  // tokens
#define MOST_ROWS 48
#define MOST_CHANNELS 512
#define LINE 64  // bytes
// Sums in registers: of scores, and of values for VALUE_ROWS rows and four channels.
#if LANES == 16
#define MOST_SUMS 24
#define VALUE_ROWS 4
#else
#define MOST_SUMS 12
#define VALUE_ROWS 2
#endif
#define SCORE_ROWS 6

typedef struct {
  const float *queries, *sinks, *new_keys, *new_values;  // the new ones are NULL if there are none
  char *keys, *values;
  float *key_scales, *value_scales;  // of integers
  const int32_t *page_table, *query_start, *query_len, *context_len;
  float *out;
  int64_t num_rows, kv_heads, heads, channels, page_size, pages_per_row;
  int64_t window;
  float soft_cap;  // 0: none
  int width;  // bytes of a stored number: 4 for float32, 2 for bfloat16, 1 for integers with scales
} Call;

// sum + a * b, rounded once: a compiler may choose either for each of several forms.
INLINE Vector fused(Vector sum, Vector a, Vector b) {
#if LANES == 16
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#endif
}

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

// The same vector, in a register: compilers load one that is used several times for each use otherwise.
INLINE Vector held(Vector vector) {
  __asm__("" : "+v"(vector));
  return vector;
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE Vector numbers(const char *from, int64_t index, const int width) {
  from += width * index;
  return width == 1 ? from_int8(from) : width == 2 ? from_bfloat16(from) : *(const Vector *)from;
}

// The place of a head in the pages of a request, for each channel of a token in it.
INLINE int64_t place_of(const Call *call, int64_t row, int64_t index, int64_t head) {
  const int64_t page = call->page_table[row * call->pages_per_row + index];
  return (page * call->kv_heads + head) * call->page_size;
}

INLINE char *page_of(const Call *call, char *pool, int64_t row, int64_t index, int64_t head) {
  return pool + place_of(call, row, index, head) * call->channels * call->width;
}

INLINE Vector capped(Vector scores, float cap) {  // cap * tanh(scores / cap)
  const Vector small = exponential(larger(scores, -scores) * (-2 / cap)), result = cap * (1 - small) / (1 + small);
  return either(scores < 0, -result, result);
}

// ---- blocks of tokens ----------------------------------------------------------------------------------------------

// Vectors of tokens in one page.
typedef struct {
  const char *keys, *values;
  const float *key_scales, *value_scales;  // of integers
  int64_t token, vectors;  // the first token, counted from that of the block
  Integers seen;           // of the only vector, if some of its tokens are not seen
  int is_partial;
} Part;

typedef struct {
  int64_t start, from, to;  // the first token, and those that are seen, in whole vectors
  int64_t count;
  Part parts[BLOCK / LANES];
} Block;

// The tokens from `begin` to `end` of a request, as far as they are in the block that starts at `start`.
INLINE void find(const Call *call, Block *block, int64_t row, int64_t head, int64_t start, int64_t begin, int64_t end,
                 Integers lane, const int width) {
  const int64_t size = call->page_size, first = most(begin, start), last = least(end, start + BLOCK);
  int64_t token = first / LANES * LANES;
  block->start = start, block->from = token - start, block->count = 0;
  for (int64_t vectors; token < last; token += vectors * LANES) {
    Part *part = &block->parts[block->count++];
    const int64_t slot = token % size, index = token / size;
    part->is_partial = token < first || token + LANES > last;
    part->seen = (lane < (int32_t)(last - token)) & (lane >= (int32_t)(first - token));
    part->keys = page_of(call, call->keys, row, index, head) + slot * width;
    part->values = page_of(call, call->values, row, index, head) + slot * width;
    if (width == 1) {
      const int64_t place = place_of(call, row, index, head) + slot;
      part->key_scales = call->key_scales + place, part->value_scales = call->value_scales + place;
    }
    part->token = token - start;
    part->vectors = vectors = part->is_partial ? 1 : least(size - slot, last - token) / LANES;
  }
  block->to = token - start;
}

INLINE void fetch(const char *from, int64_t size) {
  for (int64_t byte = 0; byte < size; byte += LINE) __builtin_prefetch(from + byte);
}

#ifdef __AVX512BF16__
#define HAS_PAIRS 1  // numbers in bfloat16 are multiplied in pairs
#else
#define HAS_PAIRS 0
#endif

typedef uint32_t Pair __attribute__((aligned(2), may_alias));

typedef struct {
  int64_t rows, channels, stride;  // the stride is the number of tokens of a page
  const float *queries[MOST_ROWS];
  int32_t end[MOST_ROWS];                // a row sees the tokens before
  float top[MOST_ROWS], sum[MOST_ROWS];  // the largest score, and the sum of weights
  _Alignas(LINE) float scores[MOST_ROWS][BLOCK];  // then the weights
  _Alignas(LINE) float values[MOST_ROWS * MOST_CHANNELS];
#if HAS_PAIRS
  struct {
    _Alignas(LINE) uint16_t weights[BLOCK], queries[MOST_CHANNELS];
  } narrow[MOST_ROWS];
#endif
} Work;

#if HAS_PAIRS
#include "attention_pairs.h"
#endif

// Rows at once, so that all are done in as few steps of up to `most` as possible, which are as large as each other.
INLINE int64_t share_of(int64_t rows, const int64_t most) {
  const int64_t steps = (rows + most - 1) / most;
  return (rows + steps - 1) / steps;
}

// Scores of some vectors of a part, for some rows. The last three arguments are constants.
INLINE void score(Work *work, const Part *part, int64_t vector, int64_t row, const int width, const int vectors,
                  const int rows) {
  if (rows * vectors > MOST_SUMS) __builtin_unreachable();
#if HAS_PAIRS
  if (width == 2) {
    score_pairs(work, part, vector, row, vectors, rows);
    return;
  }
#endif
  Vector sums[SCORE_ROWS][MOST_SUMS];
  const float *queries[SCORE_ROWS];
  for (int r = 0; r < rows; r++) {
    queries[r] = work->queries[row + r];
    for (int v = 0; v < vectors; v++) sums[r][v] = (Vector){0};
  }
  const int64_t stride = work->stride * width, place = vector * LANES * width;
  const int64_t ahead = row == 0 ? vectors * LANES * width : 0;
  const char *keys = part->keys + place, *values = part->values + place;
  for (int64_t d = 0; d < work->channels; d++, keys += stride, values += stride) {
    fetch(values, ahead);
    Vector key[MOST_SUMS];
    for (int v = 0; v < vectors; v++) key[v] = numbers(keys, v * LANES, width);
    if (rows > vectors)  // else more registers would be needed
      for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = fused(sums[r][v], key[v], (Vector){0} + queries[r][d]);
    else
      for (int v = 0; v < vectors; v++)
        for (int r = 0; r < rows; r++) sums[r][v] = fused(sums[r][v], key[v], (Vector){0} + queries[r][d]);
  }
  if (width == 1)
    for (int v = 0; v < vectors; v++) {
      const Vector scales = *(const Vector *)(part->key_scales + (vector + v) * LANES);
      for (int r = 0; r < rows; r++) sums[r][v] *= scales;
    }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++)
      *(Vector *)&work->scores[row + r][part->token + (vector + v) * LANES] = sums[r][v];
}

#define CASE(function, rows, ...)   \
  case rows:                        \
    function(__VA_ARGS__, rows);    \
    break;
#define BY_ROWS(function, ...)                                                                                 \
  switch (rows) {                                                                                              \
    CASE(function, 1, __VA_ARGS__) CASE(function, 2, __VA_ARGS__) CASE(function, 3, __VA_ARGS__)               \
    CASE(function, 4, __VA_ARGS__) CASE(function, 5, __VA_ARGS__) CASE(function, 6, __VA_ARGS__)               \
  }

INLINE void score_rows(Work *work, const Part *part, int64_t vector, const int vectors, const int width) {
  for (int64_t row = 0, rows; row < work->rows; row += rows) {
    rows = share_of(work->rows - row, SCORE_ROWS);
    BY_ROWS(score, work, part, vector, row, width, vectors)
  }
}

#define BY_WIDTH(width, function, ...) \
  (width) == 1 ? function(__VA_ARGS__, 1) : (width) == 2 ? function(__VA_ARGS__, 2) : function(__VA_ARGS__, 4);

// Functions of their own: one large function takes longer to compile.
#define SCORES(vectors)                                                                                    \
  static __attribute__((noinline)) void score_##vectors(Work *work, const Part *part, int64_t vector,      \
                                                        int width) {                                       \
    BY_WIDTH(width, score_rows, work, part, vector, vectors)                                               \
  }
SCORES(1)
SCORES(2)
SCORES(4)
SCORES(8)

// Scores of a block.
INLINE void read_keys(Work *work, const Block *block, const int width) {
  const int64_t at_once = least(MOST_SUMS / share_of(work->rows, SCORE_ROWS), 8);
  for (int64_t i = 0; i < block->count; i++) {
    const Part *part = &block->parts[i];
    for (int64_t vector = 0; vector < part->vectors;) {
      const int64_t left = least(part->vectors - vector, at_once);
      if (left >= 8)
        score_8(work, part, vector, width), vector += 8;
      else if (left >= 4)
        score_4(work, part, vector, width), vector += 4;
      else if (left >= 2)
        score_2(work, part, vector, width), vector += 2;
      else
        score_1(work, part, vector, width), vector += 1;
    }
  }
}

// Online softmax: scores of a block become weights. The maximum passes over NaN, of which the weights are NaN, and so
// are the sums of all channels.
static void weigh(Work *work, const Block *block, int64_t window, float soft_cap, Integers lane) {
  for (int64_t r = 0; r < work->rows; r++) {
    const int64_t seen = work->end[r] - block->start, passed = most(seen - window, -block->start);
    Vector largest_ones = (Vector){0} + work->top[r], sums = {0};
    for (int64_t token = block->from; token < block->to; token += LANES) {
      Vector *scores = (Vector *)&work->scores[r][token];
      if (soft_cap != 0) *scores = capped(*scores, soft_cap);
      if (token < passed || token + LANES > seen) {
        const Integers is_visible = (lane < (int32_t)(seen - token)) & (lane >= (int32_t)(passed - token));
        *scores = either(is_visible, *scores, (Vector){0} - INFINITY);
      }
      largest_ones = larger(*scores, largest_ones);
    }
    const float top = largest(largest_ones), shrink = exponential((Vector){0} + (work->top[r] - top))[0];
    for (int64_t token = block->from; token < block->to; token += LANES) {
      Vector *scores = (Vector *)&work->scores[r][token];
      sums += *scores = exponential(*scores - top);
    }
    work->sum[r] = work->sum[r] * shrink + total(sums);
    if (top > work->top[r])
      for (int64_t d = 0; d < work->channels; d++) work->values[r * work->channels + d] *= shrink;
    work->top[r] = top;
  }
}

// Weights become factors of stored integers.
static void scale_weights(Work *work, const Block *block) {
  for (int64_t i = 0; i < block->count; i++) {
    const Part *part = &block->parts[i];
    for (int64_t vector = 0; vector < part->vectors; vector++) {
      Vector scales = *(const Vector *)(part->value_scales + vector * LANES);
      if (part->is_partial) scales = (Vector)((Integers)scales & part->seen);
      for (int64_t r = 0; r < work->rows; r++) *(Vector *)&work->scores[r][part->token + vector * LANES] *= scales;
    }
  }
}

// Adds the weighted values of some vectors of a part. The last four arguments are constants.
INLINE void add(Vector (*sums)[8], const Work *work, const Part *part, int64_t row, int64_t channel,
                const int is_partial, const int width, const int channels, const int rows) {
  const int64_t stride = work->stride * width;
  const char *values = part->values + channel * stride;
  const float *weights = &work->scores[row][part->token];
  for (int64_t vector = 0; vector < part->vectors; vector++) {
    Vector weighing[VALUE_ROWS];
    for (int r = 0; r < rows; r++) weighing[r] = held(*(const Vector *)(weights + r * BLOCK));
    for (int c = 0; c < channels; c++) {
      Vector all = numbers(values + c * stride, 0, width);
      if (is_partial) all = (Vector)((Integers)all & part->seen);  // other slots may hold NaN
      all = held(all);
      for (int r = 0; r < rows; r++) sums[r][c] = fused(sums[r][c], all, weighing[r]);
    }
    values += LANES * width, weights += LANES;
  }
}

// Weighted values of a block, for some rows and channels. The last three arguments are constants.
INLINE void value(Work *work, const Block *block, int64_t row, int64_t channel, const int width,
                  const int channels, const int rows) {
  if (rows > VALUE_ROWS) __builtin_unreachable();
  Vector sums[SCORE_ROWS][8];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < channels; c++) sums[r][c] = (Vector){0};
  for (int64_t i = 0; i < block->count; i++) {
    const Part *part = &block->parts[i];
#if HAS_PAIRS
    if (width == 2) {
      add_pairs(sums, work, part, row, channel, channels, rows);
      continue;
    }
#endif
    if (part->is_partial)
      add(sums, work, part, row, channel, 1, width, channels, rows);
    else
      add(sums, work, part, row, channel, 0, width, channels, rows);
  }
  for (int r = 0; r < rows; r++) {
    float totals[4], *to = &work->values[(row + r) * work->channels + channel];
    if (channels == 1) *to += total(sums[r][0]);
    for (int c = 0; c + 4 <= channels; c += 4) {
      store_totals(sums[r] + c, totals);
      *(Four *)(to + c) += *(Four *)totals;
    }
  }
}

// Weighted values of a block. The keys of the next one are fetched.
INLINE void read_values(Work *work, const Block *block, const Block *next, const int width) {
  for (int64_t channel = 0, channels; channel < work->channels; channel += channels) {
    const int64_t left = work->channels - channel;
    channels = left < 4 ? 1 : work->rows == 1 && left >= 8 ? 8 : 4;
    for (int64_t i = 0; i < next->count; i++)
      for (int64_t c = 0; c < channels; c++)
        fetch(next->parts[i].keys + (channel + c) * work->stride * width,
              next->parts[i].vectors * LANES * width);
    if (channels == 8) {
      value(work, block, 0, channel, width, 8, 1);
      continue;
    }
    for (int64_t row = 0, rows; row < work->rows; row += rows) {
      rows = share_of(work->rows - row, VALUE_ROWS);
      if (channels == 4)
        BY_ROWS(value, work, block, row, channel, width, 4)
      else
        BY_ROWS(value, work, block, row, channel, width, 1)
    }
  }
}
