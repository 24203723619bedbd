// Vectors of float32 and of words, for the largest registers of this processor.

#include <immintrin.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANES 8
#else
#error "no vector instructions that this program knows"
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE float total(Vector sums) {
#if LANES == 16
  return _mm512_reduce_add_ps((__m512)sums);
#else
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)sums), _mm256_extractf128_ps((__m256)sums, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#endif
}

// The totals of four vectors. The order of the additions is the same for each of them.
INLINE void store_totals(const Vector *sums, float *out) {
#if LANES == 16
  const __m512 a = (__m512)sums[0], b = (__m512)sums[1], c = (__m512)sums[2], d = (__m512)sums[3];
  const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
  const __m512 parts = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                                     _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));  // four times the four
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(parts),
                                     _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(parts), 1)));
#else
  const __m256 a = (__m256)sums[0], b = (__m256)sums[1], c = (__m256)sums[2], d = (__m256)sums[3];
  const __m256d ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
  const __m256d cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
  const __m256 eight = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)),
                                     _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
#endif
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)));
}

// LANES numbers in bfloat16, as float32.
INLINE Vector from_bfloat16(const void *numbers) {
#if LANES == 16
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)numbers)), 16);
#else
  return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)numbers)), 16);
#endif
}

// LANES numbers in float16, as float32.
INLINE Vector from_float16(const void *numbers) {
#if LANES == 16
  return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)numbers));
#else
  return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)numbers));
#endif
}

// LANES integers of 8 bits, as float32.
INLINE Vector from_int8(const void *numbers) {
#if LANES == 16
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)numbers)));
#else
  return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)numbers)));
#endif
}

// Numbers in bfloat16: the nearest ones, and of two the even one.
INLINE Halves to_bfloat16(Vector numbers) {
  const Words bits = (Words)numbers, nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words is_number = (Words)(numbers == numbers);
  return __builtin_convertvector((nearest & is_number) | ((bits >> 16 | 0x40) & ~is_number), Halves);
}

// The larger ones; b where a or b is not a number, as the instruction has it.
INLINE Vector larger(Vector a, Vector b) {
#if LANES == 16
  return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}

INLINE Vector either(Integers condition, Vector a, Vector b) {
  return (Vector)(((Integers)a & condition) | ((Integers)b & ~condition));
}

INLINE float largest(Vector numbers) {
  float found = numbers[0];
  for (int i = 1; i < LANES; i++) found = numbers[i] > found ? numbers[i] : found;
  return found;
}

// e^x to the last bits of float32, for x up to 0. Below -87 it is 0, and NaN stays NaN.
INLINE Vector exponential(Vector x) {
  const float to_integer = 12582912;  // 1.5 * 2^23: a number added to it loses its fraction
  const Integers is_zero = x < -87.0f;
  x = larger((Vector){0} - 87.0f, x);
  const Vector shifted = x * 1.44269504f + to_integer, power = shifted - to_integer;
  const Vector rest = x - power * 0.693359375f + power * 2.12194440e-4f;  // x - power * ln 2, in two steps
  Vector sum = (Vector){0} + 1.0f / 5040;
  const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
  for (int i = 0; i < 7; i++) sum = sum * rest + terms[i];
  const Vector result = sum * (Vector)((__builtin_convertvector(power, Integers) + 127) << 23);
  return (Vector)((Integers)result & ~is_zero);
}
