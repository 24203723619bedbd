// Attention of increments on CPUs, as a custom call of XLA: one query for each request, over the pages of its context.
// If there are new keys and values, the call also writes those of all requests.
//
//     keys, values   [N, K, D, S] in float32 or bfloat16: the S tokens of a channel are neighbours
//     queries, out   [T, K, M, D] in float32: the M query heads of each KV head
//     sinks              [K, M] in float32: scores that join the softmax of a head and have no values
//     new keys, values   [B, K, D] in float32
//
// Each page is read once for up to MOST_HEADS query heads, and the next one is fetched meanwhile. A score is a sum over
// channels in their order. A value has a sum for each lane, of every LANES-th token; they are added up at the end.

#include <float.h>
#include <math.h>
#include <string.h>

#include "ffi.h"
#include "vectors.h"

#define MOST_HEADS 4
#define MOST_PARTS (LANES / 2)  // vectors of tokens of which the sums stay in registers, for up to two heads
#define MOST_CHANNELS 512
#define MOST_TOKENS 1024  // of a page
#define LINE 64  // bytes

int orca_jax_most_channels(void) { return MOST_CHANNELS; }

int orca_jax_most_tokens(void) { return MOST_TOKENS; }

typedef struct {
  const float *queries, *sinks, *new_keys, *new_values;  // the new ones are NULL if there are none
  char *keys, *values;
  const int32_t *page_table, *query_start, *query_len, *context_len;
  float *out;
  int64_t kv_heads, heads, channels, page_size, pages_per_row;
  int64_t window;
  float soft_cap;  // 0: none
  int is_bfloat16;
} Call;

INLINE Vector numbers(const char *from, int64_t index, const int is_bfloat16) {
  return is_bfloat16 ? from_bfloat16(from + 2 * index) : *(const Vector *)(from + 4 * index);
}

INLINE int64_t bytes_of(int64_t count, const int is_bfloat16) { return is_bfloat16 ? 2 * count : 4 * count; }

// Bytes of a page that are needed next: `size` in each of its rows, which are `stride` apart.
typedef struct {
  const char *from;
  int64_t stride, size;
} Ahead;

INLINE void fetch_row(Ahead ahead, int64_t row) {
  for (int64_t byte = 0; byte < ahead.size; byte += LINE) __builtin_prefetch(ahead.from + row * ahead.stride + byte);
}

INLINE Vector capped(Vector scores, float cap) {  // cap * tanh(scores / cap)
  const Vector small = exponential(larger(scores, -scores) * (-2 / cap)), result = cap * (1 - small) / (1 + small);
  return either(scores < 0, -result, result);
}

// ---- one page ------------------------------------------------------------------------------------------------------

typedef struct {
  int64_t channels, page_size;
  float top[MOST_HEADS], sum[MOST_HEADS];  // the largest score, and the sum of weights
  float scores[MOST_HEADS][MOST_TOKENS];   // of a page, then its weights
  Vector values[MOST_HEADS][MOST_CHANNELS];
} Work;

// Scores of `parts` vectors of tokens from `token` on. The last three arguments are constants here and below.
INLINE void add_keys(Work *work, const float *queries, const char *keys, int64_t token, Ahead ahead, const int heads,
                     const int is_bfloat16, const int parts) {
  Vector sums[MOST_HEADS][MOST_PARTS];
  for (int h = 0; h < heads; h++)
    for (int p = 0; p < parts; p++) sums[h][p] = (Vector){0};
  for (int64_t d = 0; d < work->channels; d++) {
    fetch_row(ahead, d);
    for (int p = 0; p < parts; p++) {
      const Vector part = numbers(keys, d * work->page_size + token + p * LANES, is_bfloat16);
      for (int h = 0; h < heads; h++) sums[h][p] += part * queries[h * work->channels + d];
    }
  }
  for (int h = 0; h < heads; h++)
    for (int p = 0; p < parts; p++) *(Vector *)&work->scores[h][token + p * LANES] = sums[h][p];
}

// Weighted values of `parts` vectors of tokens from `token` on. If it is one, only the lanes of `seen` count.
INLINE void add_values(Work *work, const char *values, int64_t token, Ahead ahead, Integers seen, const int heads,
                       const int is_bfloat16, const int parts) {
  Vector weights[MOST_HEADS][MOST_PARTS];
  for (int h = 0; h < heads; h++)
    for (int p = 0; p < parts; p++) weights[h][p] = *(Vector *)&work->scores[h][token + p * LANES];
  for (int64_t d = 0; d < work->channels; d++) {
    Vector sums[MOST_HEADS][2];
    fetch_row(ahead, d);
    for (int h = 0; h < heads; h++) sums[h][0] = work->values[h][d], sums[h][1] = (Vector){0};
    for (int p = 0; p < parts; p++) {
      Vector part = numbers(values, d * work->page_size + token + p * LANES, is_bfloat16);
      if (parts == 1) part = (Vector)((Integers)part & seen);  // other slots may hold NaN
      for (int h = 0; h < heads; h++) sums[h][p % 2] += part * weights[h][p];
    }
    for (int h = 0; h < heads; h++) work->values[h][d] = sums[h][0] + sums[h][1];
  }
}

// Calls a function with the constant that equals `parts`, from `num_parts`.
#define BY_PARTS(function, ...)                                \
  if (parts == MOST_PARTS && heads <= 2)                       \
    function(__VA_ARGS__, MOST_PARTS);                         \
  else if (parts == MOST_PARTS / 2)                            \
    function(__VA_ARGS__, MOST_PARTS / 2);                     \
  else if (parts == MOST_PARTS / 4)                            \
    function(__VA_ARGS__, MOST_PARTS / 4);                     \
  else                                                         \
    function(__VA_ARGS__, 1)

// The largest number of vectors at once, up to `count`.
INLINE int64_t num_parts(int64_t count, const int heads) {
  int64_t parts = heads <= 2 ? MOST_PARTS : MOST_PARTS / 2;
  while (parts > 1 && parts > count) parts /= 2;
  return parts;
}

// Scores of the tokens of a page from the vector of `passed` to `seen`. The same part of its values is fetched.
INLINE void read_keys(Work *work, const float *queries, const char *keys, const char *values, int64_t passed,
                      int64_t seen, const int heads, const int is_bfloat16) {
  for (int64_t token = passed / LANES * LANES, parts; token < seen; token += parts * LANES) {
    parts = num_parts((seen - token + LANES - 1) / LANES, heads);
    const Ahead ahead = {values + bytes_of(token, is_bfloat16), bytes_of(work->page_size, is_bfloat16),
                         bytes_of(parts * LANES, is_bfloat16)};
    BY_PARTS(add_keys, work, queries, keys, token, ahead, heads, is_bfloat16);
  }
}

// Weighted values of the tokens of a page from `passed` to `seen`.
INLINE void read_values(Work *work, const char *values, int64_t passed, int64_t seen, Ahead ahead, Integers lane,
                        const int heads, const int is_bfloat16) {
  for (int64_t token = passed / LANES * LANES, parts; token < seen; token += parts * LANES) {
    parts = token < passed ? 1 : num_parts((seen - token) / LANES, heads);
    const Integers counts = (lane < (int32_t)(seen - token)) & (lane >= (int32_t)(passed - token));
    BY_PARTS(add_values, work, values, token, ahead, counts, heads, is_bfloat16);
    ahead.size = 0;
  }
}

// Online softmax: scores of the tokens of a page from `passed` to `seen` become weights. The maximum passes over NaN, of
// which the weights are NaN, and so are the sums of all channels.
INLINE void weigh(Work *work, int64_t passed, int64_t seen, float soft_cap, Integers lane, const int heads) {
  const int64_t from = passed / LANES * LANES;
  for (int h = 0; h < heads; h++) {
    Vector most = (Vector){0} + work->top[h], sums = {0};
    for (int64_t token = from; token < seen; token += LANES) {
      Vector *scores = (Vector *)&work->scores[h][token];
      if (soft_cap != 0) *scores = capped(*scores, soft_cap);
      if (token < passed || token + LANES > seen) {
        const Integers is_visible = (lane < (int32_t)(seen - token)) & (lane >= (int32_t)(passed - token));
        *scores = either(is_visible, *scores, (Vector){0} - INFINITY);
      }
      most = larger(*scores, most);
    }
    const float top = largest(most), shrink = exponential((Vector){0} + (work->top[h] - top))[0];
    for (int64_t token = from; token < seen; token += LANES) {
      Vector *scores = (Vector *)&work->scores[h][token];
      sums += *scores = exponential(*scores - top);
    }
    work->sum[h] = work->sum[h] * shrink + total(sums);
    if (top > work->top[h])
      for (int64_t d = 0; d < work->channels; d++) work->values[h][d] *= shrink;
    work->top[h] = top;
  }
}

// ---- new tokens ----------------------------------------------------------------------------------------------------

INLINE char *page_of(const Call *call, char *pool, int64_t row, int64_t index, int64_t head) {
  const int64_t page = call->page_table[row * call->pages_per_row + index];
  return pool + bytes_of((page * call->kv_heads + head) * call->channels * call->page_size, call->is_bfloat16);
}

INLINE void store(char *to, Vector numbers, const int count, const int is_bfloat16) {
  const Halves halves = to_bfloat16(numbers);
  for (int i = 0; i < count; i++) {
    if (is_bfloat16)
      ((uint16_t *)to)[i] = halves[i];
    else
      ((float *)to)[i] = numbers[i];
  }
}

// The channels of `count` new tokens, from `slot` of a page on. `count` is a constant.
INLINE void put(const Call *call, char *page, int64_t slot, const float *tokens, int64_t token, int64_t head,
                const int count, const int is_bfloat16) {
  const int64_t stride = call->kv_heads * call->channels;
  const float *from = tokens + token * stride + head * call->channels;
  for (int64_t d = 0; d < call->channels; d++) {
    Vector numbers = {0};
    for (int i = 0; i < count; i++) numbers[i] = from[i * stride + d];
    store(page + bytes_of(d * call->page_size + slot, is_bfloat16), numbers, count, is_bfloat16);
  }
}

INLINE void put_chunk(const Call *call, char *pool, const float *tokens, int64_t row, int64_t head,
                      const int is_bfloat16) {
  const int64_t size = call->page_size, end = call->context_len[row], first = end - call->query_len[row];
  for (int64_t position = first; position < end;) {
    const int64_t token = call->query_start[row] + position - first, slot = position % size;
    char *page = page_of(call, pool, row, position / size, head);
    if (slot % LANES == 0 && end - position >= LANES) {
      put(call, page, slot, tokens, token, head, LANES, is_bfloat16);
      position += LANES;
    } else {
      put(call, page, slot, tokens, token, head, 1, is_bfloat16);
      position++;
    }
  }
}

INLINE void put_chunks(const Call *call, int64_t num_rows, const int is_bfloat16) {
  for (int64_t row = 0; row < num_rows; row++)
    for (int64_t head = 0; call->query_len[row] > 1 && head < call->kv_heads; head++) {
      put_chunk(call, call->keys, call->new_keys, row, head, is_bfloat16);
      put_chunk(call, call->values, call->new_values, row, head, is_bfloat16);
    }
}

// ---- one request ---------------------------------------------------------------------------------------------------

// Query heads `first` to `first + heads` of a KV head.
INLINE void attend(const Call *call, int64_t row, int64_t head, int64_t first, const int heads, const int is_bfloat16) {
  Work work;
  work.channels = call->channels, work.page_size = call->page_size;
  for (int h = 0; h < heads; h++) {  // -FLT_MAX if there is no sink, and not -inf: -inf - -inf is NaN
    const float sink = call->sinks[head * call->heads + first + h];
    work.top[h] = sink, work.sum[h] = sink > -FLT_MAX;
  }
  memset(work.values, 0, heads * sizeof work.values[0]);
  Integers lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  const int64_t size = call->page_size, stride = bytes_of(size, is_bfloat16), end = call->context_len[row];
  const int64_t begin = end > call->window ? end - call->window : 0;
  const int64_t place = ((call->query_start[row] * call->kv_heads + head) * call->heads + first) * call->channels;
  const int is_written = call->new_keys != NULL && first == 0;
  char *keys = page_of(call, call->keys, row, begin / size, head), *of_next_head = keys + stride * call->channels;

  for (int64_t index = begin / size; index * size < end; index++) {
    const int64_t start = index * size, seen = end - start < size ? end - start : size, left = end - start - seen;
    const int64_t passed = begin > start ? begin - start : 0;  // tokens before the window
    char *values = page_of(call, call->values, row, index, head);
    const int has_new = is_written && left == 0;  // its memory is fetched already
    if (has_new) put(call, keys, seen - 1, call->new_keys, call->query_start[row], head, 1, is_bfloat16);
    read_keys(&work, call->queries + place, keys, values, passed, seen, heads, is_bfloat16);
    weigh(&work, passed, seen, call->soft_cap, lane, heads);
    keys = left > 0 ? page_of(call, call->keys, row, index + 1, head) : of_next_head;
    const int64_t next = left > 0 ? left : head + 1 < call->kv_heads ? end - begin / size * size : 0;
    const Ahead ahead = {keys, stride, bytes_of(next < size ? next : size, is_bfloat16)};
    if (has_new) put(call, values, seen - 1, call->new_values, call->query_start[row], head, 1, is_bfloat16);
    read_values(&work, values, passed, seen, ahead, lane, heads, is_bfloat16);
  }
  for (int h = 0; h < heads; h++) {
    float totals[MOST_CHANNELS], *out = call->out + place + h * work.channels;
    for (int64_t d = 0; d < work.channels; d += 4) store_totals(work.values[h] + d, totals + d);
    for (int64_t d = 0; d < work.channels; d++) out[d] = totals[d] / work.sum[h];
  }
}

#define FORM(heads)                                                                                             \
  static void attend_##heads(const Call *call, int64_t row, int64_t head, int64_t first) {                      \
    call->is_bfloat16 ? attend(call, row, head, first, heads, 1) : attend(call, row, head, first, heads, 0); \
  }
FORM(1)
FORM(2)
FORM(3)
FORM(4)

// ---- calls ---------------------------------------------------------------------------------------------------------

// Arguments: queries, keys, values, the page table [R, P], the first query and the context of each request [R], the
// number of requests that have one query, which come first, the window, and the sinks; then, if there are new tokens, the
// number of each request [R], their keys and their values. Attribute: the soft cap. Results: out, which is 0 for all other
// queries; and with new tokens the keys and values, in the memory of the arguments.
XLA_FFI_Error *orca_jax_increments(XLA_FFI_CallFrame *frame) {
  static void (*const forms[])(const Call *, int64_t, int64_t, int64_t) = {attend_1, attend_2, attend_3, attend_4};
  if (is_query(frame)) return NULL;
  const int has_new = frame->args.size == 12;
  if (!(has_new || frame->args.size == 9) || frame->rets.size != (has_new ? 3 : 1) || frame->attrs.size != 1)
    return refuse(frame, "increments have 9 arguments and a result, or 12 and 3, and an attribute");
  const XLA_FFI_Buffer *const *given = (const XLA_FFI_Buffer *const *)frame->args.args;
  const XLA_FFI_Buffer *const *results = (const XLA_FFI_Buffer *const *)frame->rets.rets;
  const XLA_FFI_Buffer *queries = given[0], *keys = given[1], *out = results[0];
  if (has_new && (results[1]->data != keys->data || results[2]->data != given[2]->data))
    return refuse(frame, "the pages of increments are not written in place");
  const Call call = {
      .queries = queries->data,
      .keys = keys->data,
      .values = given[2]->data,
      .page_table = given[3]->data,
      .query_start = given[4]->data,
      .context_len = given[5]->data,
      .query_len = has_new ? given[9]->data : NULL,
      .sinks = given[8]->data,
      .new_keys = has_new ? given[10]->data : NULL,
      .new_values = has_new ? given[11]->data : NULL,
      .out = out->data,
      .kv_heads = keys->dims[1],
      .heads = queries->dims[2],
      .channels = keys->dims[2],
      .page_size = keys->dims[3],
      .pages_per_row = given[3]->dims[1],
      .window = *(const int32_t *)given[7]->data,
      .soft_cap = *(const float *)((const XLA_FFI_Scalar *)frame->attrs.attrs[0])->value,
      .is_bfloat16 = keys->dtype == XLA_FFI_DataType_BF16,
  };
  const int fits = queries->dims[1] == call.kv_heads && queries->dims[3] == call.channels &&
                   call.channels <= MOST_CHANNELS && call.page_size <= MOST_TOKENS && call.page_size % LANES == 0 &&
                   given[8]->dims[0] == call.kv_heads * call.heads &&
                   (!has_new || (given[10]->dims[1] == call.kv_heads && given[10]->dims[2] == call.channels));
  if (!fits) return refuse(frame, "the shapes of increments do not fit");
  memset(call.out, 0, sizeof(float) * queries->dims[0] * call.kv_heads * call.heads * call.channels);
  const int32_t count = *(const int32_t *)given[6]->data;
  if (has_new) call.is_bfloat16 ? put_chunks(&call, given[3]->dims[0], 1) : put_chunks(&call, given[3]->dims[0], 0);
  for (int64_t row = 0; row < count; row++)
    for (int64_t head = 0; head < call.kv_heads; head++)
      for (int64_t first = 0; first < call.heads; first += MOST_HEADS) {
        const int64_t left = call.heads - first;
        forms[(left < MOST_HEADS ? left : MOST_HEADS) - 1](&call, row, head, first);
      }
  return NULL;
}
