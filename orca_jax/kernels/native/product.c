// Products for CPUs, as custom calls of XLA. Sums are in float32, and a row's result does not depend on other rows.
//
// A product is out [R, O] = x [R, I] @ matrix [I, O]. The matrix is stored in blocks of WIDTH columns, in the order in
// which a product reads it:
//
//     float32    [O / WIDTH, I, WIDTH]
//     bfloat16   [O / WIDTH, I / 2, WIDTH, 2]: inputs 2i and 2i + 1 of a column are neighbours
//
// A stack [L, ...] of packed matrices is an argument with the index of the one that is read, and the number of the first
// rows of x that count: nothing is written for others. A call multiplies the same x
// by several matrices, whose blocks the threads take as if they were those of one matrix.
//
// A tile is some rows of x by a block of columns. Its sums stay in registers. A word is four bytes of a row: one number in
// float32, or two neighbours in bfloat16. With AMX, a product in bfloat16 has its numbers in registers of 16 rows of 16
// words.

#include <sys/syscall.h>
#include <unistd.h>

#include "threads.h"
#include "vectors.h"

#if LANES == 16
#define ROWS 12  // of x in a tile: 24 sums, two parts of the matrix and a word of x, in 32 registers
#define SAME(word) {word, word, word, word, word, word, word, word, word, word, word, word, word, word, word, word}
#else
#define ROWS 6  // 12 sums, in 16 registers
#define SAME(word) {word, word, word, word, word, word, word, word}
#endif

#define WIDTH (2 * LANES)
#define AHEAD 32  // rows of a block that are fetched before their use
#define MOST 8    // matrices of a call

int orca_jax_width(void) { return WIDTH; }

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

// ---- tiles of AMX --------------------------------------------------------------------------------------------------

typedef struct {
  const uint32_t *x, *matrix;
  float *out;
  int64_t rows, words, outputs;
  int is_float32;
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
  return may_use_amx && !p->is_float32 && p->words % AMX_SIDE == 0 && p->rows > 0;
}

// ---- blocks of columns ---------------------------------------------------------------------------------------------

#define CASE(count, add)                                                \
  case count:                                                           \
    packed_tile(x, columns, out, p->words, p->outputs, count, add);     \
    break;
#define UP_TO_6(add) CASE(1, add) CASE(2, add) CASE(3, add) CASE(4, add) CASE(5, add) CASE(6, add)
#if LANES == 16
#define TILES(add) UP_TO_6(add) CASE(7, add) CASE(8, add) CASE(9, add) CASE(10, add) CASE(11, add) CASE(12, add)
#else
#define TILES UP_TO_6
#endif

// All rows of x by one block, in tiles as large as possible: only the first one waits for the memory.
#define BLOCK(name, add)                                                  \
  static void name(const Product *p, int64_t block) {                     \
    const uint32_t *columns = p->matrix + block * WIDTH * p->words;       \
    for (int64_t row = 0; row < p->rows; row += ROWS) {                   \
      const uint32_t *x = p->x + row * p->words;                          \
      float *out = p->out + row * p->outputs + block * WIDTH;             \
      switch (p->rows - row < ROWS ? p->rows - row : ROWS) { TILES(add) } \
    }                                                                     \
  }

BLOCK(packed_float32, add_float32)
#if defined(__AVX512BF16__)
BLOCK(packed_bfloat16, add_bfloat16)
#else
#define packed_bfloat16 packed_float32  // never called: see the call
#endif

// Products with the same x. Their blocks are counted one after the other.
typedef struct {
  int64_t count, blocks[MOST];
  Product products[MOST];
} List;

static void multiply_blocks(const void *list, int64_t begin, int64_t end) {
  const List *all = list;
  const int with_amx = uses_amx(&all->products[0]);
  if (with_amx) load_shapes(all->products[0].rows);
  for (int64_t i = 0, first = 0; i < all->count; first += all->blocks[i++]) {
    const Product *p = &all->products[i];
    const int64_t last = end < first + all->blocks[i] ? end : first + all->blocks[i];
    for (int64_t block = begin > first ? begin : first; block < last; block++)
      (p->is_float32 ? packed_float32 : with_amx ? packed_amx : packed_bfloat16)(p, block - first);
  }
  if (with_amx) release_amx();
}

// ---- the call ------------------------------------------------------------------------------------------------------

// Arguments: x; then for each product a stack of packed matrices and its place. Results: those of the products.
// Attribute: the number of devices that share the processors.
XLA_FFI_Error *orca_jax_packed_products(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  List list = {.count = frame->rets.size};
  if (list.count < 1 || list.count > MOST || frame->args.size != 1 + 2 * list.count || frame->attrs.size != 1)
    return refuse(frame, "a call of products has x, two arguments and a result for each, and an attribute");
  const XLA_FFI_Buffer *x = frame->args.args[0];
  const int64_t devices = *(const int64_t *)((const XLA_FFI_Scalar *)frame->attrs.attrs[0])->value;
  const int is_float32 = x->dtype == XLA_FFI_DataType_F32;
  if (!is_float32 && (x->dtype != XLA_FFI_DataType_BF16 || !orca_jax_has_bfloat16()))
    return refuse(frame, "this processor does not multiply bfloat16");
  const int64_t each = is_float32 ? 1 : 2, words = x->dims[1] / each;
  int64_t blocks = 0;
  for (int64_t i = 0; i < list.count; i++) {
    const XLA_FFI_Buffer *stack = frame->args.args[1 + 2 * i], *given = frame->args.args[2 + 2 * i];
    const XLA_FFI_Buffer *out = frame->rets.rets[i];
    if (stack->rank != 4) return refuse(frame, "the packed matrices of a product are not a stack");
    if (stack->dtype != x->dtype) return refuse(frame, "the types of a product differ");
    if (x->dims[1] % each || stack->dims[2] != words || stack->dims[3] != each * WIDTH ||
        stack->dims[1] * WIDTH != out->dims[1] || devices < 1)
      return refuse(frame, "the shapes of a product do not fit");
    Place place;
    if (!read_place(&place, given, stack, x->dims[0]))
      return refuse(frame, "a stack of packed matrices has no such place");
    blocks += list.blocks[i] = stack->dims[1];
    list.products[i] = (Product){
        .x = x->data,
        .matrix = (const uint32_t *)stack->data + place.layer * list.blocks[i] * WIDTH * words,
        .out = out->data,
        .rows = place.rows,
        .words = words,
        .outputs = out->dims[1],
        .is_float32 = is_float32,
    };
  }
  share_blocks(frame, multiply_blocks, &list, blocks, 4 * words * blocks * WIDTH, devices);
  return NULL;
}
