// Random products of few bits against sums in float64, with arrays that end where the product's do.

#include <stdio.h>

#include "few_bits.c"

static double worst[2];  // in 16 bits, and in float32

static float *numbers(int64_t count, double low, double high) {
  float *made = malloc(count * sizeof(float));
  for (int64_t i = 0; i < count; i++) made[i] = low + (high - low) * rand() / RAND_MAX;
  return made;
}

// Numbers in float16, which replace the given ones by their rounded values.
static uint16_t *halves(float *given, int64_t count) {
  uint16_t *made = malloc(count * sizeof(uint16_t));
  for (int64_t i = 0; i < count; i++) {
    made[i] = _cvtss_sh(given[i], 0);
    given[i] = _cvtsh_ss(made[i]);
  }
  return made;
}

static void run(int64_t rows, int64_t groups, int64_t group, int64_t blocks, int bits, int has_minima, int is_float32,
                int is_half) {
  const int64_t inputs = groups * group, outputs = blocks * WIDTH, each = 32 / bits, lines = inputs / each;
  const int64_t parts = rows * inputs / GROUP;
  float *x = numbers(rows * inputs, -3, 3), *scales = numbers(groups * outputs, 0.001, 0.1);
  float *minima = has_minima ? numbers(groups * outputs, -1, 1) : NULL, *out = numbers(rows * outputs, 0, 1);
  uint32_t *words = malloc(lines * outputs * sizeof(uint32_t));
  for (int64_t i = 0; i < lines * outputs; i++) words[i] = (uint32_t)rand() * 2654435761u;
  uint16_t *narrow[2] = {NULL, NULL};
  if (is_half) narrow[0] = halves(scales, groups * outputs);
  if (is_half && has_minima) narrow[1] = halves(minima, groups * outputs);
  const void *const given[2] = {is_half ? (void *)narrow[0] : scales, is_half ? (void *)narrow[1] : minima};
  Product p = {.x = x, .scales = given[0], .minima = given[1], .words = words, .out = out, .rows = rows, .inputs = inputs,
               .outputs = outputs, .groups = groups, .bits = bits, .is_float32 = is_float32,
               .is_half = is_half};
  p.numbers = malloc(parts * GROUP * (is_float32 ? sizeof(float) : sizeof(int16_t)));
  p.sizes = malloc(parts * sizeof(float));
  p.weights = malloc(parts * sizeof(float));
  p.totals = malloc(parts * sizeof(int32_t));
  const List list = {.count = 1, .products = {p}};
  prepare_groups(&list, 0, inputs / GROUP);
  multiply_blocks(&list, 0, blocks);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < outputs; o++) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < inputs; i++) {
        const int64_t block = o / WIDTH, column = o % WIDTH, k = i % each, at = (block * groups + i / group) * WIDTH + column;
        const uint32_t word = words[(block * lines + i / each) * WIDTH + column];
        const double value = word >> (k % 2 * 16 + k / 2 * bits) & ((1u << bits) - 1);
        const double entry = has_minima ? scales[at] * value - minima[at] : scales[at] * (value - (1 << (bits - 1)));
        sum += entry * x[r * inputs + i];
        size += fabs(entry * x[r * inputs + i]);
      }
      const double error = fabs(out[r * outputs + o] - sum) / size;
      if (!(error <= worst[is_float32])) worst[is_float32] = error;
    }
  void *made[] = {x, scales, minima, out, words, p.numbers, p.sizes, p.weights, p.totals, narrow[0], narrow[1]};
  for (int i = 0; i < 11; i++) free(made[i]);
}

int main(void) {
  for (int i = 0; i < 300; i++) {
    const int64_t single = rand() % 3 == 0, group = GROUP * (single ? 1 + rand() % 9 : 1 + rand() % 4);
    run(1 + rand() % (i % 9 ? 20 : 300), single ? 1 : 1 + rand() % 4, group, 1 + rand() % 3, 4 << rand() % 2, rand() % 2,
        rand() % 2, rand() % 2);
  }
  printf("%g %g\n", worst[0], worst[1]);
  return !(worst[0] < 4e-5 && worst[1] < 1e-6);
}
