// The instructions of AMX that `product.c` uses, in plain C, for processors without them. Included before its text.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#undef __AMX_TILE__
#undef __AMX_BF16__
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
#define syscall(...) 0  // Linux permits the registers

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} EmulatedShapes;

static __thread EmulatedShapes emulated;
static __thread uint8_t emulated_register[8][16][64];

static inline void emulated_loadconfig(const void *shapes) {
  memcpy(&emulated, shapes, sizeof emulated);
  memset(emulated_register, 0, sizeof emulated_register);
  for (int i = 0; i < 8; i++)
    if (emulated.palette != 1 || emulated.rows[i] < 1 || emulated.rows[i] > 16 || emulated.bytes[i] > 64) __builtin_trap();
}

static inline void emulated_release(void) { memset(&emulated, 0, sizeof emulated); }

static inline void emulated_zero(int i) {
  if (emulated.palette != 1) __builtin_trap();
  memset(emulated_register[i], 0, sizeof emulated_register[i]);
}

static inline void emulated_loadd(int i, const void *from, int64_t stride) {
  emulated_zero(i);
  for (int row = 0; row < emulated.rows[i]; row++)
    memcpy(emulated_register[i][row], (const uint8_t *)from + row * stride, emulated.bytes[i]);
}

static inline void emulated_stored(int i, void *to, int64_t stride) {
  for (int row = 0; row < emulated.rows[i]; row++)
    memcpy((uint8_t *)to + row * stride, emulated_register[i][row], emulated.bytes[i]);
}

static inline float emulated_number(int i, int row, int place) {
  uint32_t bits = 0;
  memcpy((uint8_t *)&bits + 2, emulated_register[i][row] + 2 * place, 2);
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

// sums [M, N] += x [M, 2 K] @ y [K, N, 2]
static inline void emulated_dpbf16ps(int sums, int x, int y) {
  if (emulated.rows[sums] != emulated.rows[x] || emulated.bytes[sums] != emulated.bytes[y]) __builtin_trap();
  if (4 * emulated.rows[y] != emulated.bytes[x]) __builtin_trap();
  for (int row = 0; row < emulated.rows[sums]; row++)
    for (int column = 0; column < emulated.bytes[sums] / 4; column++) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < emulated.rows[y]; k++) {
        even += emulated_number(x, row, 2 * k) * emulated_number(y, k, 2 * column);
        odd += emulated_number(x, row, 2 * k + 1) * emulated_number(y, k, 2 * column + 1);
      }
      memcpy(&sum, emulated_register[sums][row] + 4 * column, 4);
      sum += even + odd;
      memcpy(emulated_register[sums][row] + 4 * column, &sum, 4);
    }
}
