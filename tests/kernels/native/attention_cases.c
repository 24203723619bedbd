// Random attention against sums in float64, with arrays that end where the call's do. Slots that no query sees are NaN.

#include <stdio.h>

#include "attention.c"

static double uniform(double low, double high) { return low + (high - low) * rand() / RAND_MAX; }

static float *random_ones(int64_t count) {
  float *made = malloc(count * sizeof(float));
  for (int64_t i = 0; i < count; i++) made[i] = uniform(-1, 1);
  return made;
}

static double stored(const char *pool, int64_t at, float scale, int width) {
  if (width == 1) return ((const int8_t *)pool)[at] * scale;
  return width == 2 ? from_bfloat16((uint16_t[LANES]){((const uint16_t *)pool)[at]})[0] : ((const float *)pool)[at];
}

// The largest difference of a query from its attention by definition.
static double error_of(const Call *c, int64_t row, int64_t query, int64_t head) {
  const int64_t end = c->context_len[row] - c->query_len[row] + query + 1, kv_head = head / c->heads;
  const int64_t begin = end > c->window ? end - c->window : 0;
  const int64_t place = ((c->query_start[row] + query) * c->kv_heads * c->heads + head) * c->channels;
  double sums[MOST_CHANNELS] = {0}, total = c->sinks[head] > -FLT_MAX ? exp(c->sinks[head]) : 0, worst = 0;
  for (int64_t t = begin; t < end; t++) {
    const int64_t page = c->page_table[row * c->pages_per_row + t / c->page_size], slot = t % c->page_size;
    const int64_t first = (page * c->kv_heads + kv_head) * c->page_size, from = first * c->channels + slot;
    const float key_scale = c->width == 1 ? c->key_scales[first + slot] : 1;
    const float value_scale = c->width == 1 ? c->value_scales[first + slot] : 1;
    double score = 0;
    for (int64_t d = 0; d < c->channels; d++)
      score += c->queries[place + d] * stored(c->keys, from + d * c->page_size, key_scale, c->width);
    if (c->soft_cap != 0) score = c->soft_cap * tanh(score / c->soft_cap);
    total += exp(score);
    for (int64_t d = 0; d < c->channels; d++)
      sums[d] += exp(score) * stored(c->values, from + d * c->page_size, value_scale, c->width);
  }
  for (int64_t d = 0; d < c->channels; d++) {
    const double error = fabs(c->out[place + d] - sums[d] / total);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

static double run(int64_t channels, int64_t page_size, int64_t kv_heads, int64_t heads, int width) {
  enum { ROWS = 3 };
  int32_t lengths[ROWS], contexts[ROWS], starts[ROWS], tokens = 0, longest = 1;
  for (int i = 0; i < ROWS; i++) {
    lengths[i] = i == 2 && rand() % 2 ? 0 : rand() % 2 ? 1 : 1 + rand() % 60;
    contexts[i] = lengths[i] == 0 ? 0 : lengths[i] + rand() % 300, starts[i] = tokens, tokens += lengths[i];
    longest = most(longest, contexts[i]);
  }
  const int64_t per_row = (longest + page_size - 1) / page_size, num_pages = ROWS * per_row;
  const int64_t size = num_pages * kv_heads * channels * page_size;
  char *pools[2];
  float *scales[2];
  for (int i = 0; i < 2; i++) {
    memset(pools[i] = malloc(size * width), 0xff, size * width);
    memset(scales[i] = malloc(size / channels * sizeof(float)), 0xff, size / channels * sizeof(float));
  }
  int32_t *table = malloc(num_pages * sizeof(int32_t));
  for (int64_t i = 0; i < num_pages; i++) table[i] = num_pages - 1 - i;
  float *sinks = random_ones(kv_heads * heads), *queries = random_ones(tokens * kv_heads * heads * channels);
  for (int64_t i = 0; width == 2 && i < tokens * kv_heads * heads * channels; i++)
    queries[i] = from_bfloat16((uint16_t[LANES]){to_bfloat16((Vector){queries[i]})[0]})[0];
  for (int64_t i = 0; i < kv_heads * heads; i++) sinks[i] = rand() % 2 ? -FLT_MAX : sinks[i];
  Call call = {.queries = queries, .sinks = sinks, .keys = pools[0], .values = pools[1], .key_scales = scales[0],
               .value_scales = scales[1], .page_table = table,
               .query_start = starts, .query_len = contexts, .context_len = contexts, .num_rows = ROWS,
               .kv_heads = kv_heads, .heads = heads, .channels = channels, .page_size = page_size,
               .pages_per_row = per_row, .window = rand() % 2 ? INT32_MAX : 1 + rand() % 200,
               .soft_cap = rand() % 2 ? 0 : 2, .width = width};
  call.out = malloc(tokens * kv_heads * heads * channels * sizeof(float));
  // All tokens of the contexts are written as new ones; then the last ones once more, as the call does.
  int32_t from[ROWS], all = 0;
  for (int i = 0; i < ROWS; i++) from[i] = all, all += contexts[i];
  float *keys = random_ones(all * kv_heads * channels), *values = random_ones(all * kv_heads * channels);
  for (int i = 0; i < ROWS; i++)
    for (int64_t head = 0; head < kv_heads; head++)
      for (int is_value = 0; is_value < 2; is_value++) {
        call.query_start = from;
        call.new_keys = keys, call.new_values = values;
        BY_WIDTH(width, put_all, &call, is_value, i, head)
      }
  call.query_start = starts, call.query_len = lengths;
  call.new_keys = random_ones(tokens * kv_heads * channels);
  call.new_values = random_ones(tokens * kv_heads * channels);
  write_heads(&call, 0, ROWS * kv_heads);
  int64_t groups = 0;
  for (int i = 0; i < ROWS; i++) groups += num_groups(&call, i) * kv_heads;
  const int64_t half = groups / 2;
  attend_groups(&call, half, groups);
  attend_groups(&call, 0, half);
  double worst = 0;
  for (int i = 0; i < ROWS; i++)
    for (int64_t query = 0; query < lengths[i]; query++)
      for (int64_t head = 0; head < kv_heads * heads; head++) {
        const double error = error_of(&call, i, query, head);
        if (!(error <= worst)) worst = error;
      }
  void *made[] = {pools[0], pools[1], table, sinks, queries, call.out, keys, values, (void *)call.new_keys,
                  (void *)call.new_values, scales[0], scales[1]};
  for (int i = 0; i < 12; i++) free(made[i]);
  return worst;
}

int main(void) {
  const int64_t channels[] = {1, 7, 16, 30, 64, 96}, sizes[] = {16, 32, 48, 128, 192}, heads[] = {1, 2, 3, 4, 7, 50};
  double worst[2] = {0};
  for (int i = 0; i < 100; i++) {
    const int width = 1 << rand() % 3, has_pairs = HAS_PAIRS && width == 2;
    const double error = run(channels[rand() % 6], sizes[rand() % 5], 1 + rand() % 2, heads[rand() % 6], width);
    if (!(error <= worst[has_pairs])) worst[has_pairs] = error;
  }
  printf("%g %g\n", worst[0], worst[1]);
  return !(worst[0] < 1e-5 && worst[1] < 4e-3);  // weights of pairs are rounded
}
