// Products with matrices of 4, 5, 6 or 8 bits, as custom calls of XLA. A row's result does not depend on other rows, to
// the bit.
//
// out [R, O] = x [R, I] @ matrix [I, O], and an entry of the matrix is scale * (value - offset), with an offset of half
// of the values, or scale * value - minimum. Groups of inputs share scales and minima. The arguments are in blocks of
// WIDTH columns, and all of a vector's lanes are columns, so nothing is summed over lanes. They are stacks of L matrices:
//
//     words           uint32   [L, O / WIDTH, I * bits / 32, WIDTH]: some inputs of a column
//     scales, minima  float32 or float16  [L, O / WIDTH, groups, WIDTH], or integers of 8 bits times units
//     units           float16  [L, O / WIDTH, units of a column, WIDTH], or 2 WIDTH: those of minima come last
//
// Halves of a word have the even and the odd inputs: a shift of 16-bit lanes and a mask give two neighbours. With 5 and
// 6 bits, words of the low 4 bits of 32 and 16 inputs come before one with the high bits of all of them.
//
// A call multiplies the same x by several matrices, whose blocks the threads take as if they were those of one matrix.
// A product reads one matrix of its stacks, or those of experts, each for its own rows of x.
//
// Numbers may be floats of 8 bits, e4m3, in the place of integers (`float_tiles.h`): an entry is scale * number. x is
// then in float16 or bfloat16 where the processor multiplies it, else in float32.
//
// There are three forms of integers. With 16 bits, each GROUP inputs of a row become integers of 16 bits with a scale. Their products
// are summed exactly, so neither the tile nor the instruction changes a bit; the sums of groups are added in float32.
// With 8 bits it is the same with fewer products, and less precise (`byte_tiles.h`).
// With float32, entries are what the matrix stands for, rounded to float32; many rows share a chunk of them in the
// first cache.

#include <math.h>
#include <string.h>

#include "bits_tiles.h"
#include "byte_tiles.h"
#include "float_tiles.h"

#define PANEL 120  // rows with their sums in the cache
#define MOST 8     // matrices of a call

typedef int16_t Shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

// Products with the same x. Their blocks are counted one after the other.
typedef struct {
  int64_t count;
  Product products[MOST];
} List;

// ---- x -------------------------------------------------------------------------------------------------------------

// GROUP numbers as integers up to `limit` times a scale. NaN and infinity make the scale NaN.
INLINE void to_integers(const float *x, int16_t *numbers, float *size, int32_t *total, const float limit) {
  const int32_t top_bits = largest_magnitude(x);
  Integers sums = {0};
  float top;
  memcpy(&top, &top_bits, sizeof top);
  const int is_finite = top_bits < 0x7f800000, is_zero = top < 1e-30f;
  const float to_integer = 12582912, factor = is_finite && !is_zero ? limit / top : 0;  // 1.5 * 2^23 drops a fraction
  for (int i = 0; i < GROUP; i += LANES) {
    const Vector shifted = (is_finite ? *(const Vector *)(x + i) : (Vector){0}) * factor + to_integer;
    const Integers rounded = (Integers)shifted - 0x4b400000;
    *(Shorts *)(numbers + i) = __builtin_convertvector(rounded, Shorts);
    sums += rounded;
  }
  *total = 0;
  for (int i = 0; i < LANES; i++) *total += sums[i];
  *size = !is_finite ? NAN : is_zero ? 0 : top / limit;
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
      if (p->is_e4m3) {
#if HAS_SHORT_FLOATS
        to_short_floats(x, (uint16_t *)p->numbers + at * GROUP, p->sizes + at);
#endif
        continue;
      }
      int16_t *numbers = (int16_t *)p->numbers + at * GROUP, narrow[GROUP];
      to_integers(x, p->is_short ? narrow : numbers, p->sizes + at, p->totals + at, p->is_short ? 127 : 32767);
      p->weights[at] = p->sizes[at] * p->totals[at];
      if (p->is_short) store_bytes(p, at, narrow);
    }
}

// ---- chunks --------------------------------------------------------------------------------------------------------

#define CASE(tile, count, ...)                     \
  case count:                                      \
    tile(p, row, chunk, sums, count, ##__VA_ARGS__); \
    break;
#define UP_TO_4(tile, ...)                                                             \
  CASE(tile, 1, ##__VA_ARGS__) CASE(tile, 2, ##__VA_ARGS__) CASE(tile, 3, ##__VA_ARGS__) \
      CASE(tile, 4, ##__VA_ARGS__)
#define UP_TO_6(tile, ...) UP_TO_4(tile, ##__VA_ARGS__) CASE(tile, 5, ##__VA_ARGS__) CASE(tile, 6, ##__VA_ARGS__)
#define UP_TO_12(tile) \
  UP_TO_6(tile) CASE(tile, 7) CASE(tile, 8) CASE(tile, 9) CASE(tile, 10) CASE(tile, 11) CASE(tile, 12)

#if LANES == 16
#define NARROW_TILES UP_TO_6
#define ALL_TILES UP_TO_12
#else
#define NARROW_TILES UP_TO_4
#define ALL_TILES UP_TO_6
#endif

typedef void Tile(const Product *p, int64_t row, const Chunk *chunk, Vector (*sums)[2], int64_t rows);
typedef void ExpandPairs(const Product *p, const Chunk *chunk, Pairs (*to)[2]);
typedef void Expand(const Product *p, const Chunk *chunk, Vector (*to)[2]);

#define TILES(name, tile, cases, ...)                                                                           \
  static void name(const Product *p, int64_t row, const Chunk *chunk, Vector(*sums)[2], int64_t rows) {         \
    switch (rows) { cases(tile, ##__VA_ARGS__) }                                                                \
  }
#define FORMS(bits)                                                               \
  TILES(short_tile_of_##bits##_bits, tile_in_16_bits, NARROW_TILES, bits)         \
  static void pairs_of_##bits##_bits(const Product *p, const Chunk *chunk, Pairs(*to)[2]) {                        \
    expand_pairs(p, chunk, to, bits);                                                                              \
  }                                                                                                                \
  static void expand_##bits##_bits(const Product *p, const Chunk *chunk, Vector(*to)[2]) { expand(p, chunk, to, bits); }

FORMS(4)
FORMS(5)
FORMS(6)
FORMS(8)
TILES(tile_of_32, tile_of_pairs, UP_TO_6, 32)
TILES(tile_of_16, tile_of_pairs, UP_TO_6, 16)
TILES(float_tile, tile_in_float32, ALL_TILES)
TILES(tile_of_words_of_4_bits, tile_of_bytes, UP_TO_4, 4, 0)
TILES(tile_of_words_of_5_bits, tile_of_bytes, UP_TO_4, 5, 0)
TILES(tile_of_words_of_6_bits, tile_of_bytes, UP_TO_4, 6, 0)
TILES(byte_tile_of_32, tile_of_bytes, NARROW_TILES, 4, 1)
TILES(byte_tile_of_16, tile_of_bytes, NARROW_TILES, 6, 1)
TILES(byte_tile_of_8_bits, tile_of_bytes, NARROW_TILES, 8, 1)
#if HAS_SHORT_FLOATS
TILES(short_float_tile, tile_in_short_floats, SHORT_FLOAT_TILES)
#endif

#define ALL_FORMS(name) {name##4_bits, name##5_bits, name##6_bits, NULL, name##8_bits}  // from 4 bits on
static Tile *const short_tiles[] = ALL_FORMS(short_tile_of_);
static ExpandPairs *const pair_expansions[] = ALL_FORMS(pairs_of_);
static Expand *const expansions[] = ALL_FORMS(expand_);
static Tile *const tiles_of_words[] = {tile_of_words_of_4_bits, tile_of_words_of_5_bits, tile_of_words_of_6_bits};
static Tile *const byte_tiles[] = {byte_tile_of_32, byte_tile_of_32, byte_tile_of_16, NULL, byte_tile_of_8_bits};

// All rows of a panel by a chunk, in tiles of about the same number of rows.
static void multiply_chunk(const Product *p, int64_t row, int64_t rows, Chunk *chunk, Vector (*sums)[2]) {
  Vector expanded[CHUNK][2];
  Pairs pairs[CHUNK / 2][2];
  Tile *tile = short_tiles[p->bits - 4];
  int64_t most = NARROW;
  if (p->is_float32) {
    (p->is_e4m3 ? expand_e4m3 : expansions[p->bits - 4])(p, chunk, expanded);
    chunk->expanded = (const Vector(*)[2])expanded;
    tile = float_tile, most = ROWS;
#if HAS_SHORT_FLOATS
  } else if (p->is_e4m3) {
    expand_short_floats(chunk, pairs);
    chunk->pairs = (const Pairs(*)[2])pairs;
    tile = short_float_tile, most = SHORT_FLOAT_ROWS;
#endif
  } else if (p->is_short) {
    const int is_wide = p->bits == 8 || rows > 4;
    if (is_wide) chunk->bytes = p->bits == 8 ? (const void *)chunk->words : expand_bytes(chunk, pairs, p->bits);
    tile = is_wide ? byte_tiles[p->bits - 4] : tiles_of_words[p->bits - 4], most = is_wide ? NARROW : 4;
  } else if (LANES == 8 && rows > NARROW) {  // with AVX-512 it is slower
    pair_expansions[p->bits - 4](p, chunk, pairs);
    chunk->pairs = (const Pairs(*)[2])pairs;
    tile = PART(p->bits) == 16 ? tile_of_16 : tile_of_32, most = WIDE;
  }
  const int64_t tiles = (rows + most - 1) / most;
  for (int64_t i = 0; i < tiles; i++) {
    const int64_t begin = i * rows / tiles, end = (i + 1) * rows / tiles;
    tile(p, row + begin, chunk, sums + begin, end - begin);
  }
}

// Up to PANEL rows of x by a block.
static void multiply_panel(const Product *p, int64_t row, int64_t rows, int64_t block) {
  Vector sums[PANEL][2];
  memset(sums, 0, rows * sizeof sums[0]);
  for (int64_t first = 0; first < p->inputs; first += CHUNK) {
    Chunk chunk = {
        .block = block,
        .first = first,
        .size = p->inputs - first < CHUNK ? p->inputs - first : CHUNK,
        .words = p->words + (block * p->inputs + first) * p->bits / 32 * WIDTH,
    };
    multiply_chunk(p, row, rows, &chunk, sums);
  }
  for (int64_t r = 0; r < rows; r++)
    for (int half = 0; half < 2; half++)
      *(Vector *)(p->out + (row + r) * p->outputs + block * WIDTH + half * LANES) = sums[r][half];
}

// Bytes of a scale or a minimum.
static int64_t scale_bytes(const Product *p) { return p->units != NULL ? 1 : p->is_half ? 2 : 4; }

// Moves the arrays of a product to another matrix of its stacks.
static void move_to(Product *p, int64_t index) {
  const int64_t scales = index * p->groups * p->outputs * scale_bytes(p), kinds = p->minima == NULL ? 1 : 2;
  p->words += index * p->inputs * p->bits / 32 * p->outputs;
  p->scales = (const uint8_t *)p->scales + scales;
  if (p->minima != NULL) p->minima = (const uint8_t *)p->minima + scales;
  if (p->units != NULL) p->units += index * p->num_units * kinds * p->outputs;
}

static void multiply_blocks(const void *list, int64_t begin, int64_t end) {
  const List *all = list;
  int64_t first = 0;
  for (int64_t i = 0; i < all->count; i++)
    for (Slice slice = {-1}; first < end && next_slice(&slice, &all->products[i].place);) {
      Product own = all->products[i];
      move_to(&own, slice.index);
      const int64_t blocks = own.outputs / WIDTH, last = end < first + blocks ? end : first + blocks;
      for (int64_t block = begin > first ? begin : first; block < last; block++)
        for (int64_t row = 0; row < slice.rows; row += PANEL)
          multiply_panel(&own, slice.row + row, slice.rows - row < PANEL ? slice.rows - row : PANEL, block - first);
      first += blocks;
    }
}

// ---- the call ------------------------------------------------------------------------------------------------------

static int64_t attribute(XLA_FFI_CallFrame *frame, int index) {
  return *(const int64_t *)((const XLA_FFI_Scalar *)frame->attrs.attrs[index])->value;
}

static int has_shape(const XLA_FFI_Buffer *buffer, XLA_FFI_DataType dtype, int64_t layers, int64_t blocks, int64_t rows,
                     int64_t width) {
  const int64_t *dims = buffer->dims;
  return buffer->dtype == dtype && dims[0] == layers && dims[1] == blocks && dims[2] == rows && dims[3] == width;
}

// The least fraction that counts whole groups of `size` inputs by a product and a shift.
static int64_t inverse(int64_t size) { return size > 0 ? (((int64_t)1 << INVERSE) + size - 1) / size : 0; }

// A product from its words, scales, minima, units, index and result. False if their shapes do not fit.
static int read_product(Product *p, const XLA_FFI_Buffer *const *given, const XLA_FFI_Buffer *out) {
  const XLA_FFI_Buffer *words = given[0], *scales = given[1], *minima = given[2], *units = given[3];
  if (words->rank != 4 || scales->rank != 4 || minima->rank != 4 || units->rank != 4) return 0;
  if (!read_place(&p->place, given[4], words, p->rows)) return 0;
  if (p->inputs < 1 || p->inputs % GROUP || p->inputs >= 1 << (INVERSE / 2)) return 0;
  const int has_minima = minima->dims[0] > 0, has_units = units->dims[0] > 0, kinds = has_minima ? 2 : 1;
  p->is_half = scales->dtype == XLA_FFI_DataType_F16;
  const int64_t layers = words->dims[0];
  p->rows = p->place.rows;
  p->scales = scales->data;
  p->minima = has_minima ? minima->data : NULL;
  p->units = has_units ? units->data : NULL;
  p->words = words->data;
  p->out = out->data;
  p->outputs = out->dims[1];
  p->groups = scales->dims[2];
  p->num_units = units->dims[2];
  p->bits = words->dims[2] * 32 / p->inputs;
  const XLA_FFI_DataType type = has_units     ? XLA_FFI_DataType_S8
                                : p->is_half ? XLA_FFI_DataType_F16
                                             : XLA_FFI_DataType_F32;
  const int64_t blocks = p->outputs / WIDTH;
  const int64_t group = p->groups > 0 ? p->inputs / p->groups : 0;
  const int64_t unit = p->num_units > 0 ? p->inputs / p->num_units : 0;
  const int fits = group * p->groups == p->inputs && group % PART(p->bits) == 0 &&
                   (!has_units || (unit * p->num_units == p->inputs && unit % group == 0));
  p->by_group = inverse(group);
  p->by_unit = inverse(unit);
  move_to(p, p->place.first);
  return fits && p->bits >= 4 && p->bits <= 8 && p->bits != 7 && p->outputs % WIDTH == 0 &&
         (p->bits != 6 || !has_minima) && (!p->is_e4m3 || (p->bits == 8 && !has_minima)) &&
         has_shape(words, XLA_FFI_DataType_U32, layers, blocks, p->inputs * p->bits / 32, WIDTH) &&
         has_shape(scales, type, layers, blocks, p->groups, WIDTH) &&
         (!has_minima || has_shape(minima, type, layers, blocks, p->groups, WIDTH)) &&
         (!has_units || has_shape(units, XLA_FFI_DataType_F16, layers, blocks, p->num_units, kinds * WIDTH));
}

// Arguments: x; then for each product words, scales, minima and units, the last two empty if there are none, and the
// place of its matrix in the stacks. Results: those of the products. Attributes, by name: the number of devices that
// share the processors, and the form: of integers 0 with 16 bits, 1 in float32 and 2 with 8 bits; of e4m3 3 in float16
// or bfloat16 if the processor multiplies it, and 4 in float32.
XLA_FFI_Error *orca_jax_few_bits_products(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  List list = {.count = frame->rets.size};
  if (list.count < 1 || list.count > MOST || frame->args.size != 1 + 5 * list.count || frame->attrs.size != 2)
    return refuse(frame, "products of few bits have x, five arguments and a result for each, and two attributes");
  const XLA_FFI_Buffer *x = frame->args.args[0];
  const int64_t devices = attribute(frame, 0), rows = x->dims[0], inputs = x->dims[1];
  const int form = attribute(frame, 1), is_float32 = form == 1 || form == 4 || (form == 3 && !HAS_SHORT_FLOATS);
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
        .is_short = form == 2,
        .is_e4m3 = form >= 3,
        .numbers = memory,
        .sizes = sizes,
        .weights = sizes + parts,
        .totals = (int32_t *)(sizes + 2 * parts),
    };
    fits = read_product(p, (const XLA_FFI_Buffer *const *)frame->args.args + 1 + 5 * i, frame->rets.rets[i]);
    fits = fits && p->rows == list.products[0].rows;
    const int64_t slices = count_slices(&p->place);
    blocks += slices * p->outputs / WIDTH;
    bytes += slices * inputs * p->outputs * p->bits / 8;
  }
  if (fits) {
    share_blocks(frame, prepare_groups, &list, inputs / GROUP, 4 * rows * inputs, devices);
    share_blocks(frame, multiply_blocks, &list, blocks, bytes, devices);
  }
  free(memory);
  return fits ? NULL : refuse(frame, "the shapes of a product of few bits do not fit");
}
