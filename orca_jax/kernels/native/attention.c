// Attention on CPUs, as a custom call of XLA: all queries of all requests over the pages of their contexts. If there
// are new keys and values, the call also writes them.
//
//     keys, values   [N, K, D, S] in float32, bfloat16 or int8: the S tokens of a channel are neighbours
//     their scales       [N, K, S] in float32, of int8
//     queries, out   [T, K, M, D] in float32: the M query heads of each KV head
//     sinks              [K, M] in float32: scores that join the softmax of a head and have no values
//     new keys, values   [T, K, D] in float32
//
// A row is a query and one of the M heads. Up to MOST_ROWS rows of a request read its context together, BLOCK tokens at
// once. A row's sums have one order, however many rows are read together: a score is a sum over channels in their
// order; a value has a sum for each lane, of every LANES-th token of a block, and the totals of the blocks are added
// up. Tokens that a row does not see add zeros. So the bits of a query do not depend on the queries beside it, nor on
// the page size.

#include "attention_block.h"

// ---- new tokens ----------------------------------------------------------------------------------------------------

INLINE void store(char *to, Vector numbers, const int count, const int width) {
  const Halves halves = to_bfloat16(numbers);
  const Integers rounded = (Integers)(numbers + 12582912) - 0x4b400000;  // 1.5 * 2^23 drops a fraction
  for (int i = 0; i < count; i++) {
    if (width == 1)
      to[i] = rounded[i];
    else if (width == 2)
      ((uint16_t *)to)[i] = halves[i];
    else
      ((float *)to)[i] = numbers[i];
  }
}

// The channels of `count` new tokens, from `slot` of a page on. `count` and `width` are constants.
INLINE void put(const Call *call, int is_value, int64_t row, int64_t position, int64_t token, int64_t head,
                const int count, const int width) {
  const int64_t index = position / call->page_size, slot = position % call->page_size;
  const int64_t stride = call->kv_heads * call->channels;
  const float *from = (is_value ? call->new_values : call->new_keys) + token * stride + head * call->channels;
  char *page = page_of(call, is_value ? call->values : call->keys, row, index, head);
  Vector scales = {0};
  if (width == 1) {
    for (int64_t d = 0; d < call->channels; d++)
      for (int i = 0; i < count; i++) {
        const float size = fabsf(from[i * stride + d]);
        scales[i] = size > scales[i] || size != size ? size : scales[i];
      }
    scales *= 1 / 127.0f;  // as XLA divides
    scales = either(scales < 1e-30f, (Vector){0} + 1e-30f, scales);
    float *to = (is_value ? call->value_scales : call->key_scales) + place_of(call, row, index, head) + slot;
    for (int i = 0; i < count; i++) to[i] = scales[i];
  }
  for (int64_t d = 0; d < call->channels; d++) {
    Vector numbers = {0};
    for (int i = 0; i < count; i++) numbers[i] = from[i * stride + d];
    if (width == 1) numbers /= scales;
    store(page + (d * call->page_size + slot) * width, numbers, count, width);
  }
}

INLINE void put_all(const Call *call, int is_value, int64_t row, int64_t head, const int width) {
  const int64_t end = call->context_len[row], first = end - call->query_len[row];
  for (int64_t position = first, count; position < end; position += count) {
    const int64_t token = call->query_start[row] + position - first;
    count = position % LANES == 0 && end - position >= LANES ? LANES : 1;
    if (count == LANES)
      put(call, is_value, row, position, token, head, LANES, width);
    else
      put(call, is_value, row, position, token, head, 1, width);
  }
}

// True if the new token of a request is written when its page is read. A single group of rows reads it then.
INLINE int is_written_later(const Call *call, int64_t row) {
  return call->query_len[row] == 1 && call->heads <= MOST_ROWS;
}

// The new tokens of all requests but those; `begin` and `end` count the KV heads of all requests.
static void write_heads(const void *of_call, int64_t begin, int64_t end) {
  const Call *call = of_call;
  for (int64_t i = begin; i < end; i++) {
    const int64_t row = i / call->kv_heads, head = i % call->kv_heads;
    if (is_written_later(call, row)) continue;
    for (int is_value = 0; is_value < 2; is_value++) BY_WIDTH(call->width, put_all, call, is_value, row, head)
  }
}

// ---- one group of rows ---------------------------------------------------------------------------------------------

INLINE int64_t num_groups(const Call *call, int64_t row) {
  return (call->query_len[row] * call->heads + MOST_ROWS - 1) / MOST_ROWS;
}

// A group of the rows of a request and a KV head.
INLINE void attend(const Call *call, int64_t row, int64_t head, int64_t group, const int width) {
  Work work;
  Block blocks[2];
  float *out[MOST_ROWS];
  Integers lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  const int64_t first = group * MOST_ROWS, old = call->context_len[row] - call->query_len[row];
  work.rows = least(MOST_ROWS, call->query_len[row] * call->heads - first);
  work.channels = call->channels, work.stride = call->page_size;
  memset(work.values, 0, sizeof(float) * work.rows * work.channels);
  for (int64_t r = 0; r < work.rows; r++) {
    const int64_t query = (first + r) / call->heads, h = head * call->heads + (first + r) % call->heads;
    const int64_t token = call->query_start[row] + query;
    const int64_t place = (token * call->kv_heads * call->heads + h) * call->channels;
    work.queries[r] = call->queries + place, out[r] = call->out + place;
    work.end[r] = old + query + 1;
    // -FLT_MAX if there is no sink, and not -inf: -inf - -inf is NaN
    work.top[r] = call->sinks[h], work.sum[r] = call->sinks[h] > -FLT_MAX;
  }
#if HAS_PAIRS
  if (width == 2) narrow_queries(&work);
#endif
  const int64_t begin = most(work.end[0] - call->window, 0), end = work.end[work.rows - 1];
  const int is_writer = call->new_keys != NULL && is_written_later(call, row);
  find(call, &blocks[0], row, head, begin / BLOCK * BLOCK, begin, end, lane, width);
  for (int at = 0; blocks[at].start < end; at = 1 - at) {
    Block *block = &blocks[at], *next = &blocks[1 - at];
    const int is_last = block->start + BLOCK >= end, has_new = is_writer && is_last;
    if (has_new) put(call, 0, row, end - 1, call->query_start[row], head, 1, width);
    read_keys(&work, block, width);
    weigh(&work, block, call->window, call->soft_cap, lane);
    if (has_new) put(call, 1, row, end - 1, call->query_start[row], head, 1, width);  // its memory is fetched already
    if (width == 1) scale_weights(&work, block);
#if HAS_PAIRS
    if (width == 2) narrow_weights(&work, block);
#endif
    const int64_t start = block->start + BLOCK;
    if (!is_last)
      find(call, next, row, head, start, begin, end, lane, width);
    else if (head + 1 < call->kv_heads)
      find(call, next, row, head + 1, begin / BLOCK * BLOCK, begin, end, lane, width);
    else
      next->count = 0;
    read_values(&work, block, next, width);
    if (is_last) break;
  }
  for (int64_t r = 0; r < work.rows; r++)
    for (int64_t d = 0; d < work.channels; d++) out[r][d] = work.values[r * work.channels + d] / work.sum[r];
}

// Groups of rows of all KV heads and requests, in their order; of a KV head the last group, which sees most, comes
// first.
static void attend_groups(const void *of_call, int64_t begin, int64_t end) {
  const Call *call = of_call;
  for (int64_t row = 0, first = 0, next; row < call->num_rows && first < end; first = next, row++) {
    const int64_t groups = num_groups(call, row);
    next = first + groups * call->kv_heads;
    for (int64_t i = most(begin, first); i < least(end, next); i++) {
      const int64_t head = (i - first) / groups, group = groups - 1 - (i - first) % groups;
      BY_WIDTH(call->width, attend, call, row, head, group)
    }
  }
}

// ---- the call ------------------------------------------------------------------------------------------------------

// Arguments: queries, keys, values, the page table [R, P], the first query, the number of queries and the context of
// each request [R], the window, and the sinks; then the scales of keys and values in int8; then, if there are new
// tokens, their keys and their values. Attributes: the number of devices that share the processors, and the soft cap.
// Results: out, which is 0 for padding; and with new tokens the keys and values, and their scales, in the memory of the
// arguments.
XLA_FFI_Error *orca_jax_attention(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  const int has_new = frame->rets.size > 1;
  const XLA_FFI_Buffer *const *given = (const XLA_FFI_Buffer *const *)frame->args.args;
  const XLA_FFI_Buffer *const *results = (const XLA_FFI_Buffer *const *)frame->rets.rets;
  const XLA_FFI_Buffer *queries = given[0], *keys = given[1], *out = results[0];
  const int width = keys->dtype == XLA_FFI_DataType_S8 ? 1 : keys->dtype == XLA_FFI_DataType_BF16 ? 2 : 4;
  const int num_scales = width == 1 ? 2 : 0, arguments = 9 + num_scales + 2 * has_new;
  if (frame->args.size != arguments || frame->rets.size != 1 + has_new * (2 + num_scales) || frame->attrs.size != 2)
    return refuse(frame, "attention has other arguments, results or attributes");
  const XLA_FFI_Buffer *const *scales = given + 9, *const *fresh = scales + num_scales;
  for (int i = 1; i < frame->rets.size; i++)
    if (results[i]->data != (i < 3 ? given[i] : scales[i - 3])->data)
      return refuse(frame, "the pages of attention are not written in place");
  const int64_t devices = *(const int64_t *)((const XLA_FFI_Scalar *)frame->attrs.attrs[0])->value;
  const Call call = {
      .queries = queries->data,
      .keys = keys->data,
      .values = given[2]->data,
      .page_table = given[3]->data,
      .query_start = given[4]->data,
      .query_len = given[5]->data,
      .context_len = given[6]->data,
      .sinks = given[8]->data,
      .key_scales = width == 1 ? scales[0]->data : NULL,
      .value_scales = width == 1 ? scales[1]->data : NULL,
      .new_keys = has_new ? fresh[0]->data : NULL,
      .new_values = has_new ? fresh[1]->data : NULL,
      .out = out->data,
      .num_rows = given[3]->dims[0],
      .kv_heads = keys->dims[1],
      .heads = queries->dims[2],
      .channels = keys->dims[2],
      .page_size = keys->dims[3],
      .pages_per_row = given[3]->dims[1],
      .window = *(const int32_t *)given[7]->data,
      .soft_cap = *(const float *)((const XLA_FFI_Scalar *)frame->attrs.attrs[1])->value,
      .width = width,
  };
  const int64_t of_token = call.kv_heads * call.channels;
  const int fits = queries->dims[1] == call.kv_heads && queries->dims[3] == call.channels && devices > 0 &&
                   call.channels <= MOST_CHANNELS && call.page_size % LANES == 0 &&
                   given[8]->dims[0] == call.kv_heads * call.heads &&
                   (!has_new || (fresh[0]->dims[1] == call.kv_heads && fresh[0]->dims[2] == call.channels));
  if (!fits) return refuse(frame, "the shapes of attention do not fit");
  memset(call.out, 0, sizeof(float) * queries->dims[0] * of_token * call.heads);
  int64_t groups = 0, read = 0, written = 0;  // tokens
  for (int64_t row = 0; row < call.num_rows; row++) {
    groups += num_groups(&call, row) * call.kv_heads;
    read += num_groups(&call, row) * least(call.context_len[row], call.window + call.query_len[row]);
    if (!is_written_later(&call, row)) written += call.query_len[row];
  }
  const int64_t each = 2 * of_token * width;
  if (has_new && written > 0)
    share_blocks(frame, write_heads, &call, call.num_rows * call.kv_heads, written * each, devices);
  share_blocks(frame, attend_groups, &call, groups, read * each, devices);
  return NULL;
}
