// Keys and values in bfloat16 on processors that multiply pairs of such numbers (see `attention_block.h`). An
// instruction adds two products to each sum: of scores those of two channels, of values those of two tokens. Queries
// and weights are rounded to bfloat16.

#define PAIR (2 * LANES)  // tokens of a register

INLINE Vector paired(Vector sum, __m512i a, __m512i b) {
  return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

static const char none[2 * 8 * LANES];  // the channel beside the last one, if their number is odd

INLINE void narrow_queries(Work *work) {
  for (int64_t r = 0; r < work->rows; r++)
    for (int64_t d = 0; d < work->channels; d += LANES) {
      const __mmask16 exists = work->channels - d < LANES ? (1 << (work->channels - d)) - 1 : -1;
      const Vector part = (Vector)_mm512_maskz_loadu_ps(exists, work->queries[r] + d);
      *(Halves *)&work->narrow[r].queries[d] = to_bfloat16(part);
    }
}

// As `score`.
INLINE void score_pairs(Work *work, const Part *part, int64_t vector, int64_t row, const int vectors, const int rows) {
  Vector sums[SCORE_ROWS][MOST_SUMS];
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++) sums[r][v] = (Vector){0};
  const int64_t stride = 2 * work->stride, ahead = row == 0 ? 2 * vectors * LANES : 0;
  const char *keys = part->keys + 2 * vector * LANES, *values = part->values + 2 * vector * LANES;
  for (int64_t d = 0; d < work->channels; d += 2, keys += 2 * stride, values += 2 * stride) {
    const char *beside = d + 1 < work->channels ? keys + stride : none;
    fetch(values, ahead), fetch(values + stride, ahead);
    __m512i key[MOST_SUMS];
    if (vectors == 1) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)keys));
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)beside));
      key[0] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
    for (int v = 0; v + 2 <= vectors; v += 2) {
      const __m512i low = _mm512_loadu_si512(keys + 2 * v * LANES);
      const __m512i high = _mm512_loadu_si512(beside + 2 * v * LANES);
      key[v] = _mm512_unpacklo_epi16(low, high), key[v + 1] = _mm512_unpackhi_epi16(low, high);
    }
    for (int r = 0; r < rows; r++) {
      const __m512i query = _mm512_set1_epi32(*(const Pair *)&work->narrow[row + r].queries[d]);
      for (int v = 0; v < vectors; v++) sums[r][v] = paired(sums[r][v], key[v], query);
    }
  }
  // Of two registers, each has four tokens of eight.
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_or_si512(first, _mm512_set1_epi32(8));
  for (int r = 0; r < rows; r++) {
    float *scores = &work->scores[row + r][part->token + vector * LANES];
    if (vectors == 1) *(Vector *)scores = sums[r][0];
    for (int v = 0; v + 2 <= vectors; v += 2) {
      const __m512 low = (__m512)sums[r][v], high = (__m512)sums[r][v + 1];
      *(Vector *)(scores + v * LANES) = (Vector)_mm512_permutex2var_ps(low, first, high);
      *(Vector *)(scores + (v + 1) * LANES) = (Vector)_mm512_permutex2var_ps(low, second, high);
    }
  }
}

// The weights of a block; 0 for other tokens of its registers.
INLINE void narrow_weights(Work *work, const Block *block) {
  for (int64_t r = 0; r < work->rows; r++)
    for (int64_t token = block->from / PAIR * PAIR; token < block->to; token += PAIR) {
      const Vector *weights = (const Vector *)&work->scores[r][token];
      const Vector low = token < block->from ? (Vector){0} : weights[0];
      const Vector high = token + LANES < block->to ? weights[1] : (Vector){0};
      *(__m512bh *)&work->narrow[r].weights[token] = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    }
}

// As `add`. A sum belongs to two neighbours of every 32 tokens of the block, wherever a part begins.
INLINE void add_pairs(Vector (*sums)[8], const Work *work, const Part *part, int64_t row, int64_t channel,
                      const int channels, const int rows) {
  const int64_t stride = 2 * work->stride, end = part->token + part->vectors * LANES;
  const __mmask32 seen = part->is_partial ? _mm512_test_epi32_mask((__m512i)part->seen, (__m512i)part->seen) : -1;
  for (int64_t token = part->token / PAIR * PAIR; token < end; token += PAIR) {
    const char *values = part->values + channel * stride + 2 * (token - part->token);
    const __mmask32 mask = token < part->token ? seen << LANES : token + PAIR > end ? seen & 0xffff : seen;
    __m512i weighing[VALUE_ROWS];
    for (int r = 0; r < rows; r++) weighing[r] = _mm512_load_si512(&work->narrow[row + r].weights[token]);
    for (int c = 0; c < channels; c++) {
      const __m512i all = _mm512_maskz_loadu_epi16(mask, values + c * stride);  // other slots may hold NaN
      for (int r = 0; r < rows; r++) sums[r][c] = paired(sums[r][c], all, weighing[r]);
    }
  }
}
