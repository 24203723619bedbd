// Products for CPUs, as custom calls of XLA. Sums are in float32, and a row's result does not depend on other rows.
//
// A product is out [R, O] = x [R, I] @ matrix [I, O]. The matrix is stored in blocks of WIDTH columns, in the order in
// which a product reads it:
//
//     float32    [O / WIDTH, I, WIDTH]
//     bfloat16   [O / WIDTH, I / 2, WIDTH, 2]: inputs 2i and 2i + 1 of a column are neighbours
//
// A stack [L, ...] of packed matrices is an argument with the place of those that are read: one, with the number of the
// first rows of x that count, or those of experts, each with its own rows. Nothing is written for others. A call
// multiplies the same x by several matrices, whose blocks the threads take as if they were those of one matrix.
//
// A tile is some rows of x by a block of columns. Its sums stay in registers. A word is four bytes of a row: one number in
// float32, or two neighbours in bfloat16. With AMX, a product in bfloat16 has its numbers in registers of 16 rows of 16
// words. A processor without products of bfloat16 multiplies them in float32, with a row of x converted before.

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
#define SPAN 128  // words with a sum of their own: fewer roundings reach an output than in one sum over all words
#define MOST 8    // matrices of a call

int orca_jax_width(void) { return WIDTH; }

// ---- tiles ---------------------------------------------------------------------------------------------------------

typedef Vector Add(Vector sums, Words x, Words y, int part);

INLINE Vector add_float32(Vector sums, Words x, Words y, int part) {
  (void)part;
  return sums + (Vector)x * (Vector)y;
}

// Both inputs of a word of x; or one after the other, and x is in float32.
#if defined(__AVX512BF16__)
#define BFLOAT16_PARTS 1
#define BFLOAT16_ROWS ROWS
INLINE Vector add_bfloat16(Vector sums, Words x, Words y, int part) {
  (void)part;
  return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)y);
}
#else
#define BFLOAT16_PARTS 2
#define BFLOAT16_ROWS (LANES == 16 ? ROWS : 4)  // 8 sums, and both parts of the matrix
INLINE Vector add_bfloat16(Vector sums, Words x, Words y, int part) {
  return add_float32(sums, x, part ? (Words)(y & 0xffff0000) : (Words)(y << 16), 0);
}
#endif

// `rows` of x by a block of columns. `rows`, `parts` and `add` are constants.
INLINE void packed_tile(const uint32_t *x, const uint32_t *block, float *out, int64_t words, int64_t outputs,
                        const int rows, const int parts, Add add) {
  Vector sums[ROWS][2];
  for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (Vector){0};
  for (int64_t begin = 0; begin < words; begin += SPAN) {
    const int64_t end = begin + SPAN < words ? begin + SPAN : words;
    Vector found[ROWS][2];
    for (int r = 0; r < rows; r++) found[r][0] = found[r][1] = (Vector){0};
    for (int64_t i = begin; i < end; i++) {
      const Words *at = (const Words *)(block + i * WIDTH);
      __builtin_prefetch(at + 2 * AHEAD);
      __builtin_prefetch(at + 2 * AHEAD + 1);
      for (int part = 0; part < parts; part++) {
        const Words first = at[0], second = at[1];
        for (int r = 0; r < rows; r++) {
          const uint32_t word = x[(r * words + i) * parts + part];
          const Words all = SAME(word);
          found[r][0] = add(found[r][0], all, first, part);
          found[r][1] = add(found[r][1], all, second, part);
        }
      }
    }
    for (int r = 0; r < rows; r++)
      for (int half = 0; half < 2; half++) sums[r][half] += found[r][half];
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

static int uses_amx(const Product *p) { return may_use_amx && !p->is_float32 && p->words % AMX_SIDE == 0; }

// ---- blocks of columns ---------------------------------------------------------------------------------------------

#define CASE(count, ...)                                                           \
  case count:                                                                      \
    packed_tile(x, columns, out, p->words, p->outputs, count, __VA_ARGS__);        \
    break;
#define UP_TO_6(...)                                                               \
  CASE(1, __VA_ARGS__) CASE(2, __VA_ARGS__) CASE(3, __VA_ARGS__)                   \
  CASE(4, __VA_ARGS__) CASE(5, __VA_ARGS__) CASE(6, __VA_ARGS__)
#if LANES == 16
#define TILES(...)                                                                 \
  UP_TO_6(__VA_ARGS__) CASE(7, __VA_ARGS__) CASE(8, __VA_ARGS__)                   \
  CASE(9, __VA_ARGS__) CASE(10, __VA_ARGS__) CASE(11, __VA_ARGS__) CASE(12, __VA_ARGS__)
#else
#define TILES UP_TO_6
#endif

// All rows of x by one block, in tiles as large as possible: only the first one waits for the memory.
#define BLOCK(name, most, parts, add)                                              \
  static void name(const Product *p, int64_t block) {                              \
    const uint32_t *columns = p->matrix + block * WIDTH * p->words;                \
    for (int64_t row = 0; row < p->rows; row += most) {                            \
      const uint32_t *x = p->x + row * p->words * parts;                           \
      float *out = p->out + row * p->outputs + block * WIDTH;                      \
      switch (p->rows - row < most ? p->rows - row : most) { TILES(parts, add) }   \
    }                                                                              \
  }

BLOCK(packed_float32, ROWS, 1, add_float32)
BLOCK(packed_bfloat16, BFLOAT16_ROWS, BFLOAT16_PARTS, add_bfloat16)

// Products with the same x. Their blocks are counted one after the other.
typedef struct {
  int64_t count;
  Place places[MOST];
  Product products[MOST];
} List;

// The product of one matrix of a stack.
static Product product_of(const Product *p, const Slice *slice) {
  Product own = *p;
  own.x += slice->row * p->words * (p->is_float32 ? 1 : BFLOAT16_PARTS);
  own.matrix += slice->index * p->outputs * p->words;
  own.out += slice->row * p->outputs;
  own.rows = slice->rows;
  return own;
}

static void multiply_blocks(const void *list, int64_t begin, int64_t end) {
  const List *all = list;
  int64_t first = 0;
  for (int64_t i = 0; i < all->count; i++)
    for (Slice slice = {-1}; first < end && next_slice(&slice, &all->places[i]);) {
      const Product own = product_of(&all->products[i], &slice);
      const int64_t blocks = own.outputs / WIDTH, last = end < first + blocks ? end : first + blocks;
      const int with_amx = begin < first + blocks && uses_amx(&own);
      if (with_amx) load_shapes(own.rows);
      for (int64_t block = begin > first ? begin : first; block < last; block++)
        (own.is_float32 ? packed_float32 : with_amx ? packed_amx : packed_bfloat16)(&own, block - first);
      if (with_amx) release_amx();
      first += blocks;
    }
}

// Numbers in bfloat16 as float32, in new memory; NULL if there is none.
static uint32_t *widened(const uint16_t *numbers, int64_t count) {
  uint32_t *wide = malloc(4 * count + 1);
  for (int64_t i = 0; wide != NULL && i < count; i++) wide[i] = (uint32_t)numbers[i] << 16;
  return wide;
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
  if (!is_float32 && x->dtype != XLA_FFI_DataType_BF16) return refuse(frame, "x is not in float32 or bfloat16");
  const int64_t each = is_float32 ? 1 : 2, words = x->dims[1] / each;
  int64_t blocks = 0, rows = 0;
  for (int64_t i = 0; i < list.count; i++) {
    const XLA_FFI_Buffer *stack = frame->args.args[1 + 2 * i], *given = frame->args.args[2 + 2 * i];
    const XLA_FFI_Buffer *out = frame->rets.rets[i];
    if (stack->rank != 4) return refuse(frame, "the packed matrices of a product are not a stack");
    if (stack->dtype != x->dtype) return refuse(frame, "the types of a product differ");
    if (x->dims[1] % each || stack->dims[2] != words || stack->dims[3] != each * WIDTH ||
        stack->dims[1] * WIDTH != out->dims[1] || devices < 1)
      return refuse(frame, "the shapes of a product do not fit");
    Place *place = &list.places[i];
    if (!read_place(place, given, stack, x->dims[0]))
      return refuse(frame, "a stack of packed matrices has no such place");
    blocks += count_slices(place) * stack->dims[1];
    rows = place->rows > rows ? place->rows : rows;
    list.products[i] = (Product){
        .x = x->data,
        .matrix = (const uint32_t *)stack->data + place->first * out->dims[1] * words,
        .out = out->data,
        .words = words,
        .outputs = out->dims[1],
        .is_float32 = is_float32,
    };
  }
  uint32_t *wide = NULL;
  if (!is_float32 && BFLOAT16_PARTS == 2) {
    if ((wide = widened(x->data, rows * x->dims[1])) == NULL) return refuse(frame, "there is no memory for a product");
    for (int64_t i = 0; i < list.count; i++) list.products[i].x = wide;
  }
  share_blocks(frame, multiply_blocks, &list, blocks, 4 * words * blocks * WIDTH, devices);
  free(wide);
  return NULL;
}
