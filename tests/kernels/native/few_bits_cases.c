// Random products of few bits against sums in float64, with arrays that end where the product's do.

#include <stdio.h>

#include "few_bits.c"

static double worst[4];  // in 16 bits, in float32, in 8 bits, and of e4m3 in 16 bits

static float *numbers(int64_t count, double low, double high) {
  float *made = malloc(count * sizeof(float));
  for (int64_t i = 0; i < count; i++) made[i] = low + (high - low) * rand() / RAND_MAX;
  return made;
}

static uint16_t *halves(int64_t count, double low, double high) {
  uint16_t *made = malloc(count * sizeof(uint16_t));
  for (int64_t i = 0; i < count; i++) made[i] = _cvtss_sh(low + (high - low) * rand() / RAND_MAX, 0);
  return made;
}

static void *factors_of(int form, int64_t count, double low, double high) {
  if (form == 0) return numbers(count, low, high);
  if (form == 1) return halves(count, low, high);
  int8_t *made = malloc(count);
  for (int64_t i = 0; i < count; i++) made[i] = rand() % 64;
  return made;
}

static double factor_of(const void *numbers, int form, int64_t at) {
  return form == 0 ? ((const float *)numbers)[at]
         : form == 1 ? _cvtsh_ss(((const uint16_t *)numbers)[at])
                     : ((const int8_t *)numbers)[at];
}

// The input i of a part, whose words are `stride` words apart.
static int number_of(const uint32_t *part, int i, int64_t stride, int bits) {
  const int low = bits == 8 ? 8 : 4, each = 32 / low, k = i % each, rest = bits - low, lines = PART(bits) / each;
  const uint32_t word = part[i / each * stride], last = rest > 0 ? part[lines * stride] : 0;
  const int found = word >> (k % 2 * 16 + k / 2 * low) & ((1u << low) - 1);
  return found | (rest > 0 ? (last >> (i % 2 * 16 + i / 2 * rest) & ((1u << rest) - 1)) << low : 0);
}

static double of_e4m3(int code) {
  const int power = code >> 3 & 15, rest = code & 7;
  const double found = power ? ldexp(8 + rest, power - 10) : ldexp(rest, -9);
  return code & 0x80 ? -found : found;
}

// Factors have one of three forms: float32, float16, and integers times units, each of the units of all groups. Some
// matrices multiply the rows one after the other.
static void run(int64_t rows, int64_t matrices, int64_t groups, int64_t group, int64_t blocks, int bits, int has_minima, int kind,
                int form, int is_e4m3) {
  const int64_t inputs = groups * group, outputs = blocks * WIDTH, lines = inputs * bits / 32;
  const int64_t parts = rows * inputs / GROUP, kinds = has_minima ? 2 : 1, all = matrices * outputs;
  int32_t sizes[4] = {0};
  for (int64_t left = rows, i = 0; i < matrices; left -= sizes[i++]) sizes[i] = i == matrices - 1 ? left : rand() % (left + 1);
  float *x = numbers(rows * inputs, -3, 3), *out = numbers(rows * outputs, 0, 1);
  void *scales = factors_of(form, groups * all, 0.001, 0.1);
  void *minima = has_minima ? factors_of(form, groups * all, -1, 1) : NULL;
  uint16_t *units = form == 2 ? halves(kinds * all, 0.001, 0.1) : NULL;
  uint32_t *words = malloc(lines * all * sizeof(uint32_t));
  for (int64_t i = 0; i < lines * all; i++) {
    words[i] = (uint32_t)rand() * 2654435761u;
    for (int byte = 0; is_e4m3 && byte < 32; byte += 8)  // without NaN
      if ((words[i] >> byte & 0x7f) == 0x7f) words[i] ^= 1u << byte;
  }
  Product p = {.x = x, .scales = scales, .minima = minima, .units = units, .words = words, .out = out, .rows = rows,
               .inputs = inputs, .outputs = outputs, .groups = groups, .num_units = form == 2 ? 1 : 0,
               .by_group = inverse(group), .by_unit = inverse(inputs), .bits = bits,
               .is_float32 = kind == 1 || (kind == 3 && !HAS_SHORT_FLOATS), .is_short = kind == 2, .is_e4m3 = is_e4m3, .is_half = form == 1, .place = {0, matrices, rows, sizes}};
  p.numbers = malloc(parts * GROUP * (p.is_float32 ? sizeof(float) : sizeof(int16_t)));
  p.sizes = malloc(parts * sizeof(float));
  p.weights = malloc(parts * sizeof(float));
  p.totals = malloc(parts * sizeof(int32_t));
  const List list = {.count = 1, .products = {p}};
  prepare_groups(&list, 0, inputs / GROUP);
  const int64_t total = count_slices(&p.place) * blocks, half = rand() % (total + 1);
  multiply_blocks(&list, 0, half);
  multiply_blocks(&list, half, total);
  for (int64_t r = 0, m = 0, last = sizes[0]; r < rows; r++) {
    while (r >= last) last += sizes[++m];
    for (int64_t o = 0; o < outputs; o++) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < inputs; i++) {
        const int64_t block = m * blocks + o / WIDTH, column = o % WIDTH, at = (block * groups + i / group) * WIDTH + column;
        const uint32_t *part = words + (block * lines + i / PART(bits) * PART(bits) * bits / 32) * WIDTH + column;
        const double value = number_of(part, i % PART(bits), WIDTH, bits);
        const uint16_t *unit = units + block * kinds * WIDTH + column;
        const double scale = factor_of(scales, form, at) * (form == 2 ? _cvtsh_ss(unit[0]) : 1);
        const double least = has_minima ? factor_of(minima, form, at) * (form == 2 ? _cvtsh_ss(unit[WIDTH]) : 1) : 0;
        const double entry = is_e4m3      ? scale * of_e4m3(value)
                             : has_minima ? scale * value - least
                                          : scale * (value - (1 << (bits - 1)));
        sum += entry * x[r * inputs + i];
        size += fabs(entry * x[r * inputs + i]);
      }
      const double error = fabs(out[r * outputs + o] - sum) / (size + 1e-30);
      if (!(error <= worst[kind])) worst[kind] = error;
    }
  }
  void *made[] = {x, scales, minima, out, words, p.numbers, p.sizes, p.weights, p.totals, units};
  for (int i = 0; i < 10; i++) free(made[i]);
}

int main(void) {
  const int all_bits[] = {4, 5, 6, 8};
  for (int i = 0; i < 300; i++) {
    const int is_e4m3 = rand() % 5 == 0, bits = is_e4m3 ? 8 : all_bits[rand() % 4], halved = bits == 6 && rand() % 2;  // groups of half of GROUP
    const int64_t groups = rand() % 3 == 0 ? 1 : 1 + rand() % 4;
    const int64_t group = halved ? 16 : GROUP * (groups == 1 ? 1 + rand() % 9 : 1 + rand() % 4);
    run(1 + rand() % (i % 9 ? 20 : 300), 1 + rand() % 4, halved ? 2 * groups : groups, group, 1 + rand() % 3, bits,
        !is_e4m3 && bits != 6 && rand() % 2, is_e4m3 ? 1 + rand() % 2 * 2 : rand() % 3, rand() % 3, is_e4m3);
  }
  printf("%g %g %g %g\n", worst[0], worst[1], worst[2], worst[3]);
  return !(worst[0] < 4e-5 && worst[1] < 1e-6 && worst[2] < 8e-3 && worst[3] < 4e-3);
}
