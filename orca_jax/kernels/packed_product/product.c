// Products for CPUs, as custom calls of XLA. Sums are in float32, and a row's result does not depend on other rows.
//
// A packed product is out [R, O] = x [R, I] @ matrix [I, O]. The matrix is stored in blocks of WIDTH columns, in the
// order in which a product reads it:
//
//     float32    [O / WIDTH, I, WIDTH]
//     bfloat16   [O / WIDTH, I / 2, WIDTH, 2]: inputs 2i and 2i + 1 of a column are neighbours
//
// A table product is out [R, O] = x [R, I] @ table [O, I].T, with the rows of the table one after the other.
//
// Both are computed by tiles: some rows of x, and a block of columns or some rows of the table. The sums of a tile stay
// in registers. A word is four bytes of a row: one number in float32, or two neighbours in bfloat16.

#include <immintrin.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12       // of x in a tile: 24 sums, two parts of the matrix and a word of x, in 32 registers
#define TABLE_SIDE 6  // rows of x in a tile of a table: 24 sums
#define SAME(word) {word, word, word, word, word, word, word, word, word, word, word, word, word, word, word, word}
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define ROWS 6  // 12 sums, in 16 registers
#define TABLE_SIDE 3
#define SAME(word) {word, word, word, word, word, word, word, word}
#else
#error "no vector instructions that this program knows"
#endif

#define WIDTH (2 * LANES)
#define TABLE_ROWS 4
#define AHEAD 32           // rows of a block that are fetched before their use
#define SMALL (256 << 10)  // bytes of a matrix that one thread multiplies alone
#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

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

INLINE float total(Vector sums) {
#if LANES == 16
  return _mm512_reduce_add_ps((__m512)sums);
#else
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)sums), _mm256_extractf128_ps((__m256)sums, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#endif
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
  for (int r = 0; r < rows; r++)
    for (int t = 0; t < TABLE_ROWS; t++) out[r * outputs + t] = total(sums[r][t]);
}

// ---- blocks of columns, or of rows of a table ----------------------------------------------------------------------

typedef struct {
  const uint32_t *x, *matrix;
  float *out;
  int64_t rows, words, outputs;
  int is_table, is_float32;
} Product;

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

static void multiply_block(const Product *p, int64_t block) {
  if (p->is_table)
    (p->is_float32 ? table_float32 : table_bfloat16)(p, block);
  else
    (p->is_float32 ? packed_float32 : packed_bfloat16)(p, block);
}

// ---- threads -------------------------------------------------------------------------------------------------------

// A product that several threads compute. The last one to leave frees it, since some may come when all is done.
typedef struct {
  Product product;
  int64_t blocks, at_once;
  atomic_llong next, done;
  atomic_int holders;
} Shared;

static void leave(Shared *shared) {
  if (atomic_fetch_sub(&shared->holders, 1) == 1) free(shared);
}

static void take_blocks(Shared *shared) {
  for (;;) {
    const int64_t begin = atomic_fetch_add(&shared->next, shared->at_once);
    if (begin >= shared->blocks) return;
    const int64_t end = begin + shared->at_once < shared->blocks ? begin + shared->at_once : shared->blocks;
    for (int64_t block = begin; block < end; block++) multiply_block(&shared->product, block);
    atomic_fetch_add(&shared->done, end - begin);
  }
}

static void help(void *shared) {
  take_blocks(shared);
  leave(shared);
}

static void discard(const XLA_FFI_Api *api, XLA_FFI_Error *error) {
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  api->XLA_FFI_Error_Destroy(&args);
}

// The threads of XLA's pool beside this one, if all devices have as many.
static int64_t num_helpers(XLA_FFI_CallFrame *frame, int64_t devices) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx,
                                             &threads};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (error != NULL) {
    discard(frame->api, error);
    return 0;
  }
  return threads / devices - 1;
}

static void multiply(XLA_FFI_CallFrame *frame, Product product, int64_t devices) {
  const int64_t blocks = num_blocks(&product);
  int64_t helpers = product.words * product.outputs * 4 <= SMALL ? 0 : num_helpers(frame, devices);
  if (helpers > blocks - 1) helpers = blocks - 1;
  Shared *shared = helpers > 0 ? malloc(sizeof(Shared)) : NULL;
  if (shared == NULL) {
    for (int64_t block = 0; block < blocks; block++) multiply_block(&product, block);
    return;
  }
  *shared = (Shared){.product = product, .blocks = blocks, .at_once = 1 + blocks / (8 * (helpers + 1))};
  atomic_init(&shared->holders, 1 + (int)helpers);
  for (; helpers > 0; helpers--) {
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help,
                                             shared};
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (error != NULL) {
      discard(frame->api, error);
      leave(shared);
    }
  }
  take_blocks(shared);
  while (atomic_load(&shared->done) < blocks) sched_yield();  // others compute the last blocks
  leave(shared);
}

// ---- calls ---------------------------------------------------------------------------------------------------------

static XLA_FFI_Error *refuse(XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message,
                                    XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Arguments: x and the matrix. Result: out. Attribute: the number of devices that share the processors.
static XLA_FFI_Error *run(XLA_FFI_CallFrame *frame, int is_table) {
  XLA_FFI_InternalExtension *extension = frame->extension_start;
  if (extension != NULL && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return NULL;
  }
  if (frame->args.size != 2 || frame->rets.size != 1 || frame->attrs.size != 1)
    return refuse(frame, "a product has two arguments, a result and an attribute");
  const XLA_FFI_Buffer *x = frame->args.args[0], *matrix = frame->args.args[1], *out = frame->rets.rets[0];
  const int64_t devices = *(const int64_t *)((const XLA_FFI_Scalar *)frame->attrs.attrs[0])->value;
  const int is_float32 = x->dtype == XLA_FFI_DataType_F32;
  if (matrix->dtype != x->dtype) return refuse(frame, "the types of a product differ");
  if (!is_float32 && !orca_jax_has_bfloat16()) return refuse(frame, "this processor does not multiply bfloat16");
  const Product product = {
      .x = x->data,
      .matrix = matrix->data,
      .out = out->data,
      .rows = x->dims[0],
      .words = is_float32 ? x->dims[1] : x->dims[1] / 2,
      .outputs = out->dims[1],
      .is_table = is_table,
      .is_float32 = is_float32,
  };
  const int64_t size = is_table ? TABLE_ROWS : WIDTH, blocks = is_table ? matrix->dims[0] / size : matrix->dims[0];
  const int fits = is_table ? matrix->dims[1] == x->dims[1] && product.words % LANES == 0
                            : matrix->dims[1] == product.words;
  if (!fits || blocks * size != product.outputs || devices < 1)
    return refuse(frame, "the shapes of a product do not fit");
  multiply(frame, product, devices);
  return NULL;
}

XLA_FFI_Error *orca_jax_packed_product(XLA_FFI_CallFrame *frame) { return run(frame, 0); }

XLA_FFI_Error *orca_jax_table_product(XLA_FFI_CallFrame *frame) { return run(frame, 1); }
