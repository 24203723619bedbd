// Products for CPUs, as custom calls of XLA. Sums are in float32, and a row's result does not depend on other rows.
//
// A packed product is out [R, O] = x [R, I] @ matrix [I, O]. The matrix is stored in blocks of WIDTH columns, in the
// order in which a product reads it:
//
//     float32    [O / WIDTH, I, WIDTH]
//     bfloat16   [O / WIDTH, I / 2, WIDTH, 2]: inputs 2i and 2i + 1 of a column are neighbours
//
// A stack [L, ...] of packed matrices is an argument with the index of the one that is read.
//
// A table product is out [R, O] = x [R, I] @ table [O, I].T, with the rows of the table one after the other.
//
// Both are computed by tiles: some rows of x, and a block of columns or some rows of the table. The sums of a tile stay
// in registers. A word is four bytes of a row: one number in float32, or two neighbours in bfloat16. With AMX, a packed
// product in bfloat16 has its numbers in registers of 16 rows of 16 words.

#include <sys/syscall.h>
#include <unistd.h>

#include "threads.h"
#include "vectors.h"

#if LANES == 16
#define ROWS 12       // of x in a tile: 24 sums, two parts of the matrix and a word of x, in 32 registers
#define TABLE_SIDE 6  // rows of x in a tile of a table: 24 sums
#define SAME(word) {word, word, word, word, word, word, word, word, word, word, word, word, word, word, word, word}
#else
#define ROWS 6  // 12 sums, in 16 registers
#define TABLE_SIDE 3
#define SAME(word) {word, word, word, word, word, word, word, word}
#endif

#define WIDTH (2 * LANES)
#define TABLE_ROWS 4  // of which `store_totals` adds up the sums
#define AHEAD 32      // rows of a block that are fetched before their use

int orca_jax_width(void) { return WIDTH; }

int orca_jax_lanes(void) { return LANES; }

int orca_jax_table_rows(void) { return TABLE_ROWS; }

int orca_jax_has_bfloat16(void) {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

// ---- tiles ---------------------------------------------------------------------------------------------------------

typedef Vector Add(Vector sums, Words x, Words y);

INLINE Vector add_float32(Vector sums, Words x, Words y) { return sums + (Vector)x * (Vector)y; }

#if defined(__AVX512BF16__)
INLINE Vector add_bfloat16(Vector sums, Words x, Words y) {
  return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)y);
}
#endif

// `rows` of x by a block of columns. `rows` and `add` are constants.
INLINE void packed_tile(const uint32_t *x, const uint32_t *block, float *out, int64_t words, int64_t outputs,
                        const int rows, Add add) {
  Vector sums[ROWS][2];
  for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (Vector){0};
  for (int64_t i = 0; i < words; i++) {
    const Words *part = (const Words *)(block + i * WIDTH);
    const Words first = part[0], second = part[1];
    __builtin_prefetch(part + 2 * AHEAD);
    __builtin_prefetch(part + 2 * AHEAD + 1);
    for (int r = 0; r < rows; r++) {
      const uint32_t word = x[r * words + i];
      const Words all = SAME(word);
      sums[r][0] = add(sums[r][0], all, first);
      sums[r][1] = add(sums[r][1], all, second);
    }
  }
  for (int r = 0; r < rows; r++) {
    Vector *to = (Vector *)(out + r * outputs);
    to[0] = sums[r][0];
    to[1] = sums[r][1];
  }
}

// `rows` of x by TABLE_ROWS of a table. `rows` and `add` are constants.
INLINE void table_tile(const uint32_t *x, const uint32_t *table, float *out, int64_t words, int64_t outputs,
                       const int rows, Add add) {
  Vector sums[TABLE_SIDE][TABLE_ROWS];
  for (int r = 0; r < rows; r++)
    for (int t = 0; t < TABLE_ROWS; t++) sums[r][t] = (Vector){0};
  for (int64_t i = 0; i < words; i += LANES) {
    Words parts[TABLE_ROWS];
    for (int t = 0; t < TABLE_ROWS; t++) {
      parts[t] = *(const Words *)(table + t * words + i);
      __builtin_prefetch(table + (TABLE_ROWS + t) * words + i);  // the next block
    }
    for (int r = 0; r < rows; r++) {
      const Words some = *(const Words *)(x + r * words + i);
      for (int t = 0; t < TABLE_ROWS; t++) sums[r][t] = add(sums[r][t], some, parts[t]);
    }
  }
  for (int r = 0; r < rows; r++) store_totals(sums[r], out + r * outputs);
}

// ---- tiles of AMX --------------------------------------------------------------------------------------------------

typedef struct {
  const uint32_t *x, *matrix;
  float *out;
  int64_t rows, words, outputs;
  int is_table, is_float32;
} Product;

static int may_use_amx = 0;

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define AMX_SIDE 16  // rows of a register, and words of a row

// Linux saves the registers for processes that ask for it. The numbers are ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA.
int orca_jax_ask_for_amx(void) { return may_use_amx = syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];  // of a row of each register
  uint8_t rows[16];
} Shapes;

// Registers 0 to 3: sums. 4 and 5: rows of x. 6 and 7: columns of the matrix, one pair of inputs in each row.
static void load_shapes(int64_t rows) {
  Shapes shapes = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    shapes.bytes[i] = 4 * AMX_SIDE;
    shapes.rows[i] = i < 6 && rows < AMX_SIDE ? rows : AMX_SIDE;
  }
  _tile_loadconfig(&shapes);
}

static void release_amx(void) { _tile_release(); }

// One or two groups of AMX_SIDE rows of x by a block of columns. `groups` is a constant.
INLINE void amx_tile(const uint32_t *x, const uint32_t *second_x, const uint32_t *block, float *out, float *second_out,
                     int64_t words, int64_t outputs, const int groups) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < words; i += AMX_SIDE) {
    const uint32_t *part = block + i * WIDTH;
    for (int line = 0; line < WIDTH; line++) __builtin_prefetch(part + AHEAD * WIDTH + line * AMX_SIDE);
    _tile_loadd(6, part, 4 * WIDTH);
    _tile_loadd(7, part + AMX_SIDE, 4 * WIDTH);
    _tile_loadd(4, x + i, 4 * words);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (groups == 1) continue;
    _tile_loadd(5, second_x + i, 4 * words);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 4 * outputs);
  _tile_stored(1, out + AMX_SIDE, 4 * outputs);
  if (groups == 1) return;
  _tile_stored(2, second_out, 4 * outputs);
  _tile_stored(3, second_out + AMX_SIDE, 4 * outputs);
}

// All rows of x by one block. The last group begins AMX_SIDE rows before the end: some rows may be computed twice.
static void packed_amx(const Product *p, int64_t block) {
  const uint32_t *columns = p->matrix + block * WIDTH * p->words;
  const int64_t last = p->rows > AMX_SIDE ? p->rows - AMX_SIDE : 0;
  for (int64_t row = 0; row < p->rows; row += 2 * AMX_SIDE) {
    const int64_t first = row < last ? row : last, second = row + AMX_SIDE < last ? row + AMX_SIDE : last;
    const uint32_t *x = p->x + first * p->words, *second_x = p->x + second * p->words;
    float *const out = p->out + block * WIDTH, *to = out + first * p->outputs, *second_to = out + second * p->outputs;
    if (first == second)
      amx_tile(x, x, columns, to, to, p->words, p->outputs, 1);
    else
      amx_tile(x, second_x, columns, to, second_to, p->words, p->outputs, 2);
  }
}
#else
#define AMX_SIDE 1
#define packed_amx NULL  // never called: see `uses_amx`
int orca_jax_ask_for_amx(void) { return 0; }
static void load_shapes(int64_t rows) { (void)rows; }
static void release_amx(void) {}
#endif

// A register of 0 rows is a fault of the processor.
static int uses_amx(const Product *p) {
  return may_use_amx && !p->is_table && !p->is_float32 && p->words % AMX_SIDE == 0 && p->rows > 0;
}

// ---- blocks of columns, or of rows of a table ----------------------------------------------------------------------

#define CASE(tile, count, add)                                         \
  case count:                                                          \
    tile(x, columns, out, p->words, p->outputs, count, add);           \
    break;
#define UP_TO_3(tile, add) CASE(tile, 1, add) CASE(tile, 2, add) CASE(tile, 3, add)
#define UP_TO_6(tile, add) UP_TO_3(tile, add) CASE(tile, 4, add) CASE(tile, 5, add) CASE(tile, 6, add)
#define UP_TO_12(tile, add)                                                                       \
  UP_TO_6(tile, add) CASE(tile, 7, add) CASE(tile, 8, add) CASE(tile, 9, add) CASE(tile, 10, add) \
      CASE(tile, 11, add) CASE(tile, 12, add)

#if LANES == 16
#define PACKED_TILES UP_TO_12
#define TABLE_TILES UP_TO_6
#else
#define PACKED_TILES UP_TO_6
#define TABLE_TILES UP_TO_3
#endif

// All rows of x by one block, in tiles as large as possible: only the first one waits for the memory.
#define BLOCK(name, side, size, tiles, tile, add)                                \
  static void name(const Product *p, int64_t block) {                            \
    const uint32_t *columns = p->matrix + block * (size) * p->words;             \
    for (int64_t row = 0; row < p->rows; row += side) {                          \
      const uint32_t *x = p->x + row * p->words;                                 \
      float *out = p->out + row * p->outputs + block * (size);                   \
      switch (p->rows - row < side ? p->rows - row : side) { tiles(tile, add) }  \
    }                                                                            \
  }

BLOCK(packed_float32, ROWS, WIDTH, PACKED_TILES, packed_tile, add_float32)
BLOCK(table_float32, TABLE_SIDE, TABLE_ROWS, TABLE_TILES, table_tile, add_float32)
#if defined(__AVX512BF16__)
BLOCK(packed_bfloat16, ROWS, WIDTH, PACKED_TILES, packed_tile, add_bfloat16)
BLOCK(table_bfloat16, TABLE_SIDE, TABLE_ROWS, TABLE_TILES, table_tile, add_bfloat16)
#else
#define packed_bfloat16 packed_float32  // never called: see `run`
#define table_bfloat16 table_float32
#endif

static int64_t num_blocks(const Product *p) { return p->outputs / (p->is_table ? TABLE_ROWS : WIDTH); }

static void multiply_blocks(const void *product, int64_t begin, int64_t end) {
  const Product *p = product;
  const int with_amx = uses_amx(p);
  if (with_amx) load_shapes(p->rows);
  for (int64_t block = begin; block < end; block++) {
    if (p->is_table)
      (p->is_float32 ? table_float32 : table_bfloat16)(p, block);
    else
      (p->is_float32 ? packed_float32 : with_amx ? packed_amx : packed_bfloat16)(p, block);
  }
  if (with_amx) release_amx();
}

// ---- calls ---------------------------------------------------------------------------------------------------------

// Arguments: x and a table; or x, a stack of packed matrices, and the index of one. Result: out. Attribute: the number
// of devices that share the processors.
static XLA_FFI_Error *run(XLA_FFI_CallFrame *frame, int is_table) {
  if (is_query(frame)) return NULL;
  if (frame->args.size != (is_table ? 2 : 3) || frame->rets.size != 1 || frame->attrs.size != 1)
    return refuse(frame, "a product has two or three arguments, a result and an attribute");
  const XLA_FFI_Buffer *x = frame->args.args[0], *matrix = frame->args.args[1], *out = frame->rets.rets[0];
  const int64_t devices = *(const int64_t *)((const XLA_FFI_Scalar *)frame->attrs.attrs[0])->value;
  const int is_float32 = x->dtype == XLA_FFI_DataType_F32;
  if (!is_table && matrix->rank != 4) return refuse(frame, "the packed matrices of a product are not a stack");
  if (matrix->dtype != x->dtype) return refuse(frame, "the types of a product differ");
  if (!is_float32 && !orca_jax_has_bfloat16()) return refuse(frame, "this processor does not multiply bfloat16");
  const int64_t *dims = matrix->dims + (is_table ? 0 : 1);  // of a single matrix
  Product product = {
      .x = x->data,
      .matrix = matrix->data,
      .out = out->data,
      .rows = x->dims[0],
      .words = is_float32 ? x->dims[1] : x->dims[1] / 2,
      .outputs = out->dims[1],
      .is_table = is_table,
      .is_float32 = is_float32,
  };
  const int64_t size = is_table ? TABLE_ROWS : WIDTH, blocks = is_table ? dims[0] / size : dims[0];
  const int fits = is_table ? dims[1] == x->dims[1] && product.words % LANES == 0 : dims[1] == product.words;
  if (!fits || blocks * size != product.outputs || devices < 1)
    return refuse(frame, "the shapes of a product do not fit");
  if (!is_table) {
    const int32_t index = *(const int32_t *)((const XLA_FFI_Buffer *)frame->args.args[2])->data;
    if (index < 0 || index >= matrix->dims[0]) return refuse(frame, "a stack of packed matrices has no such index");
    product.matrix += index * blocks * WIDTH * product.words;
  }
  share_blocks(frame, multiply_blocks, &product, num_blocks(&product), 4 * product.words * product.outputs, devices);
  return NULL;
}

XLA_FFI_Error *orca_jax_packed_product(XLA_FFI_CallFrame *frame) { return run(frame, 0); }

XLA_FFI_Error *orca_jax_table_product(XLA_FFI_CallFrame *frame) { return run(frame, 1); }
