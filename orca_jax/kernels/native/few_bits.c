// Products with matrices of 4 or 8 bits, as custom calls of XLA. A row's result does not depend on other rows, to the bit.
//
// out [R, O] = x [R, I] @ matrix [I, O], and an entry of the matrix is scale * (value - offset), with an offset of half
// of the values, or scale * value - minimum. Groups of inputs share scales and minima. The arguments are in blocks of
// WIDTH columns, and all of a vector's lanes are columns, so nothing is summed over lanes:
//
//     words           uint32   [O / WIDTH, I * bits / 32, WIDTH]: some inputs of a column
//     scales, minima  float32 or float16  [O / WIDTH, groups, WIDTH]
//
// Halves of a word have the even and the odd inputs: a shift of 16-bit lanes and a mask give two neighbours.
//
// A call multiplies the same x by several matrices, whose blocks the threads take as if they were those of one matrix.
//
// There are two forms. With 16 bits, each GROUP inputs of a row become integers of 16 bits with a scale. Their products
// are summed exactly, so neither the tile nor the instruction changes a bit; the sums of groups are added in float32.
// With float32, entries are what the matrix stands for, rounded to float32; many rows share a chunk of them in the
// first cache.

#include <math.h>
#include <string.h>

#include "threads.h"
#include "vectors.h"

#if LANES == 16
#define ROWS 12    // of x in a tile in float32: 24 sums, in 32 registers
#define NARROW 6   // of x in a tile in 16 bits: more of them are slower
#else
#define ROWS 6
#define NARROW 4
#endif

#define WIDTH (2 * LANES)
#define DIRECT 4   // most rows that read words in float32
#define GROUP 32   // inputs of a row with one scale
#define CHUNK 128  // most inputs of a chunk
#define PANEL 120  // rows with their sums in the cache
#define MOST 8     // matrices of a call

typedef uint16_t Pairs __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t Shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

typedef struct {
  const float *x;
  const void *scales, *minima;  // no minima: NULL
  const uint32_t *words;
  float *out;
  int64_t rows, inputs, outputs, groups;  // of scales
  int bits, is_float32, is_half;  // `is_half`: scales and minima are float16
  // x by groups of GROUP inputs, then by rows
  void *numbers;    // float32 or int16
  float *sizes;     // scales of x
  float *weights;   // sums of x, for minima
  int32_t *totals;  // sums of the integers
} Product;

// Products with the same x. Their blocks are counted one after the other.
typedef struct {
  int64_t count;
  Product products[MOST];
} List;

// ---- x -------------------------------------------------------------------------------------------------------------

// GROUP numbers as integers times a scale. NaN and infinity make the scale NaN.
INLINE void to_sixteen_bits(const float *x, int16_t *numbers, float *size, int32_t *total) {
  Integers most = {0}, sums = {0};
  for (int i = 0; i < GROUP; i += LANES) {
    const Integers magnitude = *(const Integers *)(x + i) & 0x7fffffff, is_larger = magnitude > most;
    most = (magnitude & is_larger) | (most & ~is_larger);
  }
  int32_t top_bits = 0;
  for (int i = 0; i < LANES; i++) top_bits = most[i] > top_bits ? most[i] : top_bits;
  float top;
  memcpy(&top, &top_bits, sizeof top);
  const int is_finite = top_bits < 0x7f800000, is_zero = top < 1e-30f;
  const float to_integer = 12582912, factor = is_finite && !is_zero ? 32767 / top : 0;  // 1.5 * 2^23 drops a fraction
  for (int i = 0; i < GROUP; i += LANES) {
    const Vector shifted = (is_finite ? *(const Vector *)(x + i) : (Vector){0}) * factor + to_integer;
    const Integers rounded = (Integers)shifted - 0x4b400000;
    *(Shorts *)(numbers + i) = __builtin_convertvector(rounded, Shorts);
    sums += rounded;
  }
  *total = 0;
  for (int i = 0; i < LANES; i++) *total += sums[i];
  *size = !is_finite ? NAN : is_zero ? 0 : top / 32767;
}

static void prepare_groups(const void *list, int64_t begin, int64_t end) {
  const Product *p = &((const List *)list)->products[0];  // they share the memory of x
  for (int64_t group = begin; group < end; group++)
    for (int64_t row = 0; row < p->rows; row++) {
      const float *x = p->x + row * p->inputs + group * GROUP;
      const int64_t at = group * p->rows + row;
      if (p->is_float32) {
        memcpy((float *)p->numbers + at * GROUP, x, sizeof(float[GROUP]));
        continue;
      }
      to_sixteen_bits(x, (int16_t *)p->numbers + at * GROUP, p->sizes + at, p->totals + at);
      p->weights[at] = p->sizes[at] * p->totals[at];
    }
}

// ---- tiles ---------------------------------------------------------------------------------------------------------

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

// Some inputs of a block, of one group.
typedef struct {
  int64_t first, size;
  const uint32_t *words;
  const Vector *scales, *minima;  // of both halves of the columns; without minima they are zeros
  int32_t offset;
  const Vector (*expanded)[2];  // entries of each input
} Chunk;

// `rows` of x by a chunk of a block. The sums of a chunk are added to `sums`: with its scales, or if these are NULL
// without. `rows` and `bits` are constants.
INLINE void tile_in_16_bits(const Product *p, int64_t row, const Chunk *chunk, Vector (*sums)[2], const int rows,
                            const int bits) {
  const Vector *scales = p->groups == 1 ? NULL : chunk->scales;  // those of a single group come last
  const Pairs *next = (const Pairs *)chunk->words, mask = (Pairs){0} + (uint16_t)((1 << bits) - 1);
  Vector parts[ROWS][2];
  for (int r = 0; r < rows; r++)
    for (int half = 0; half < 2; half++) parts[r][half] = scales == NULL ? sums[r][half] : (Vector){0};
  for (int64_t group = chunk->first / GROUP; group < (chunk->first + chunk->size) / GROUP; group++) {
    const int64_t at = group * p->rows + row;
    const uint32_t *x = (const uint32_t *)((const int16_t *)p->numbers + at * GROUP);
    Integers found[ROWS][2];
    for (int r = 0; r < rows; r++) found[r][0] = found[r][1] = (Integers){0} - p->totals[at + r] * chunk->offset;
    for (int pair = 0; pair < GROUP / 2; next += 2)
      for (int shift = 0; shift < 16; shift += bits, pair++) {
        const Pairs one = next[0] >> shift & mask, two = next[1] >> shift & mask;
        for (int r = 0; r < rows; r++) {
          const Pairs both = (Pairs)((Words){0} + x[r * GROUP / 2 + pair]);
          found[r][0] = dot(found[r][0], both, one);
          found[r][1] = dot(found[r][1], both, two);
        }
      }
    for (int r = 0; r < rows; r++)
      for (int half = 0; half < 2; half++)
        parts[r][half] += __builtin_convertvector(found[r][half], Vector) * p->sizes[at + r];
  }
  for (int r = 0; r < rows; r++)
    for (int half = 0; half < 2; half++)
      if (scales == NULL)
        sums[r][half] = parts[r][half];
      else
        sums[r][half] += parts[r][half] * scales[half];
}

// The first bit of the k-th input of a word.
INLINE int place_of(int k, const int bits) { return k % 2 * 16 + k / 2 * bits; }

// Entries of the matrix for an input, whose numbers begin at the bit `place` of the words.
INLINE Vector entries(const Chunk *chunk, Words words, int half, int place, const int bits) {
  const Integers values = (Integers)(words >> place & ((1 << bits) - 1)) - chunk->offset;
  return __builtin_convertvector(values, Vector) * chunk->scales[half] - chunk->minima[half];
}

// `rows` of x by a chunk of a block in float32, or by its expanded entries if `bits` is 32. Each sum is a single chain
// over all inputs. `rows` and `bits` are constants.
INLINE void tile_in_float32(const Product *p, int64_t row, const Chunk *chunk, Vector (*sums)[2], const int rows,
                            const int bits) {
  Vector parts[ROWS][2];
  for (int r = 0; r < rows; r++)
    for (int half = 0; half < 2; half++) parts[r][half] = sums[r][half];
  const Words *next = (const Words *)chunk->words;
  for (int64_t group = chunk->first / GROUP; group < (chunk->first + chunk->size) / GROUP; group++) {
    const float *x = (const float *)p->numbers + (group * p->rows + row) * GROUP;
    for (int i = 0; i < GROUP; next += 2)
      for (int k = 0; k < 32 / bits; k++, i++) {
        const Vector *expanded = chunk->expanded[group * GROUP - chunk->first + i];
        const Vector one = bits == 32 ? expanded[0] : entries(chunk, next[0], 0, place_of(k, bits), bits);
        const Vector two = bits == 32 ? expanded[1] : entries(chunk, next[1], 1, place_of(k, bits), bits);
        for (int r = 0; r < rows; r++) {
          parts[r][0] += x[r * GROUP + i] * one;
          parts[r][1] += x[r * GROUP + i] * two;
        }
      }
  }
  for (int r = 0; r < rows; r++)
    for (int half = 0; half < 2; half++) sums[r][half] = parts[r][half];
}

INLINE void expand(const Chunk *chunk, Vector (*to)[2], const int bits) {
  const Words *next = (const Words *)chunk->words;
  for (int64_t i = 0; i < chunk->size; next += 2)
    for (int k = 0; k < 32 / bits; k++, i++)
      for (int half = 0; half < 2; half++) to[i][half] = entries(chunk, next[half], half, place_of(k, bits), bits);
}

// ---- chunks --------------------------------------------------------------------------------------------------------

#define CASE(tile, count, bits)             \
  case count:                               \
    tile(p, row, chunk, sums, count, bits); \
    break;
#define UP_TO_4(tile, bits) CASE(tile, 1, bits) CASE(tile, 2, bits) CASE(tile, 3, bits) CASE(tile, 4, bits)
#define UP_TO_6(tile, bits) UP_TO_4(tile, bits) CASE(tile, 5, bits) CASE(tile, 6, bits)
#define UP_TO_12(tile, bits)                                                                           \
  UP_TO_6(tile, bits) CASE(tile, 7, bits) CASE(tile, 8, bits) CASE(tile, 9, bits) CASE(tile, 10, bits) \
      CASE(tile, 11, bits) CASE(tile, 12, bits)

#if LANES == 16
#define NARROW_TILES UP_TO_6
#define ALL_TILES UP_TO_12
#else
#define NARROW_TILES UP_TO_4
#define ALL_TILES UP_TO_6
#endif

typedef void Tile(const Product *p, int64_t row, const Chunk *chunk, Vector (*sums)[2], int64_t rows);

#define TILES(name, tile, cases, bits)                                                                          \
  static void name(const Product *p, int64_t row, const Chunk *chunk, Vector(*sums)[2], int64_t rows) {         \
    switch (rows) { cases(tile, bits) }                                                                         \
  }

TILES(short_tile_of_4_bits, tile_in_16_bits, NARROW_TILES, 4)
TILES(short_tile_of_8_bits, tile_in_16_bits, NARROW_TILES, 8)
TILES(float_tile_of_4_bits, tile_in_float32, UP_TO_4, 4)
TILES(float_tile_of_8_bits, tile_in_float32, UP_TO_4, 8)
TILES(float_tile, tile_in_float32, ALL_TILES, 32)

// All rows of a panel by a chunk, in tiles of about the same number of rows.
static void multiply_chunk(const Product *p, int64_t row, int64_t rows, Chunk *chunk, Vector (*sums)[2]) {
  Vector expanded[CHUNK][2];
  Tile *tile = p->bits == 4 ? short_tile_of_4_bits : short_tile_of_8_bits;
  int64_t most = NARROW;
  if (p->is_float32 && rows <= DIRECT) {
    tile = p->bits == 4 ? float_tile_of_4_bits : float_tile_of_8_bits;
    most = DIRECT;
  } else if (p->is_float32) {
    tile = float_tile;
    most = ROWS;
    if (p->bits == 4)
      expand(chunk, expanded, 4);
    else
      expand(chunk, expanded, 8);
    chunk->expanded = (const Vector(*)[2])expanded;
  }
  const int64_t tiles = (rows + most - 1) / most;
  for (int64_t i = 0; i < tiles; i++) {
    const int64_t begin = i * rows / tiles, end = (i + 1) * rows / tiles;
    tile(p, row + begin, chunk, sums + begin, end - begin);
  }
}

// Scales or minima of a half of the columns of a block.
INLINE Vector factors(const Product *p, const void *numbers, int64_t block, int64_t group, int half) {
  const int64_t at = ((block * p->groups + group) * 2 + half) * LANES;
  return p->is_half ? from_float16((const uint16_t *)numbers + at) : *(const Vector *)((const float *)numbers + at);
}

// Up to PANEL rows of x by a block.
static void multiply_panel(const Product *p, int64_t row, int64_t rows, int64_t block) {
  Vector sums[PANEL][2], scales[2], minima[2] = {{0}, {0}};
  memset(sums, 0, rows * sizeof sums[0]);
  const int64_t group = p->inputs / p->groups, most = group < CHUNK ? group : CHUNK;
  for (int64_t first = 0; first < p->inputs; first += most) {
    for (int half = 0; half < 2; half++) {
      scales[half] = factors(p, p->scales, block, first / group, half);
      if (p->minima != NULL) minima[half] = factors(p, p->minima, block, first / group, half);
    }
    Chunk chunk = {
        .first = first,
        .size = p->inputs - first < most ? p->inputs - first : most,
        .words = p->words + (block * p->inputs + first) * p->bits / 32 * WIDTH,
        .scales = scales,
        .minima = minima,
        .offset = p->minima == NULL ? 1 << (p->bits - 1) : 0,
    };
    multiply_chunk(p, row, rows, &chunk, sums);
  }
  if (p->groups == 1 && !p->is_float32)
    for (int64_t r = 0; r < rows; r++)
      for (int half = 0; half < 2; half++) sums[r][half] *= scales[half];
  if (p->minima != NULL && !p->is_float32)
    for (int64_t i = 0; i < p->inputs / GROUP; i++)
      for (int half = 0; half < 2; half++) {
        const Vector least = factors(p, p->minima, block, i * GROUP / group, half);
        for (int64_t r = 0; r < rows; r++) sums[r][half] -= least * p->weights[i * p->rows + row + r];
      }
  for (int64_t r = 0; r < rows; r++)
    for (int half = 0; half < 2; half++)
      *(Vector *)(p->out + (row + r) * p->outputs + block * WIDTH + half * LANES) = sums[r][half];
}

static void multiply_blocks(const void *list, int64_t begin, int64_t end) {
  const List *all = list;
  for (int64_t i = 0, first = 0; i < all->count; i++) {
    const Product *p = &all->products[i];
    const int64_t after = first + p->outputs / WIDTH;
    for (int64_t block = begin > first ? begin : first; block < (end < after ? end : after); block++)
      for (int64_t row = 0; row < p->rows; row += PANEL)
        multiply_panel(p, row, p->rows - row < PANEL ? p->rows - row : PANEL, block - first);
    first = after;
  }
}

// ---- the call ------------------------------------------------------------------------------------------------------

static int64_t attribute(XLA_FFI_CallFrame *frame, int index) {
  return *(const int64_t *)((const XLA_FFI_Scalar *)frame->attrs.attrs[index])->value;
}

static int has_shape(const XLA_FFI_Buffer *buffer, XLA_FFI_DataType dtype, int64_t blocks, int64_t rows) {
  const int64_t *dims = buffer->dims;
  return buffer->dtype == dtype && buffer->rank == 3 && dims[0] == blocks && dims[1] == rows && dims[2] == WIDTH;
}

// A product from its words, scales, minima and result. False if their shapes do not fit.
static int read_product(Product *p, const XLA_FFI_Buffer *const *given, const XLA_FFI_Buffer *out) {
  const XLA_FFI_Buffer *words = given[0], *scales = given[1], *minima = given[2];
  if (words->rank != 3 || scales->rank != 3 || minima->rank != 3 || p->inputs < 1 || p->inputs % GROUP) return 0;
  const int has_minima = minima->dims[0] > 0;
  p->scales = scales->data;
  p->minima = has_minima ? minima->data : NULL;
  p->words = words->data;
  p->out = out->data;
  p->outputs = out->dims[1];
  p->groups = scales->dims[1];
  p->bits = words->dims[1] * 32 / p->inputs;
  p->is_half = scales->dtype == XLA_FFI_DataType_F16;
  const XLA_FFI_DataType kind = p->is_half ? XLA_FFI_DataType_F16 : XLA_FFI_DataType_F32;
  const int64_t group = p->groups > 0 ? p->inputs / p->groups : 0, blocks = p->outputs / WIDTH;
  return (p->bits == 4 || p->bits == 8) && p->outputs % WIDTH == 0 && group * p->groups == p->inputs &&
         group % GROUP == 0 && (p->groups == 1 || group <= CHUNK) &&
         has_shape(words, XLA_FFI_DataType_U32, blocks, p->inputs * p->bits / 32) &&
         has_shape(scales, kind, blocks, p->groups) &&
         (!has_minima || has_shape(minima, kind, blocks, p->groups));
}

// Arguments: x; then for each product words, scales, and minima, which are empty if there are none. Results: those of the
// products. Attributes, by name: the number of devices that share the processors, and 1 for the form in float32.
XLA_FFI_Error *orca_jax_few_bits_products(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  List list = {.count = frame->rets.size};
  if (list.count < 1 || list.count > MOST || frame->args.size != 1 + 3 * list.count || frame->attrs.size != 2)
    return refuse(frame, "a call of products of few bits has x, three arguments and a result for each, and two attributes");
  const XLA_FFI_Buffer *x = frame->args.args[0];
  const int64_t devices = attribute(frame, 0), rows = x->dims[0], inputs = x->dims[1];
  const int is_float32 = attribute(frame, 1);
  const int64_t parts = rows * inputs / GROUP, each = is_float32 ? sizeof(float[GROUP]) : sizeof(int16_t[GROUP]);
  uint8_t *memory = malloc(parts * (each + 2 * sizeof(float) + sizeof(int32_t)) + 1);
  if (memory == NULL) return refuse(frame, "there is no memory for a product of few bits");
  float *sizes = (float *)(memory + parts * each);
  int64_t blocks = 0, bytes = 0;
  int fits = devices >= 1 && x->dtype == XLA_FFI_DataType_F32;
  for (int64_t i = 0; fits && i < list.count; i++) {
    Product *p = &list.products[i];
    *p = (Product){
        .x = x->data,
        .rows = rows,
        .inputs = inputs,
        .is_float32 = is_float32,
        .numbers = memory,
        .sizes = sizes,
        .weights = sizes + parts,
        .totals = (int32_t *)(sizes + 2 * parts),
    };
    fits = read_product(p, (const XLA_FFI_Buffer *const *)frame->args.args + 1 + 3 * i, frame->rets.rets[i]);
    blocks += p->outputs / WIDTH;
    bytes += inputs * p->outputs * p->bits / 8;
  }
  if (fits) {
    share_blocks(frame, prepare_groups, &list, inputs / GROUP, 4 * rows * inputs, devices);
    share_blocks(frame, multiply_blocks, &list, blocks, bytes, devices);
  }
  free(memory);
  return fits ? NULL : refuse(frame, "the shapes of a product of few bits do not fit");
}
