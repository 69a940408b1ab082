/* Tables of at most 16 values: searched in four steps, eight numbers at a time where the processor picks
 * numbers out of a register. A part of rounding_kernels.c, for float.
 */
#define SMALL_TABLE 16

struct small_table {
  float values[SMALL_TABLE + 1], thresholds[SMALL_TABLE];
};

/* Thresholds and values, the last of each repeated; `extra` thresholds are infinite. */
INLINE struct small_table small_table_of(const float *values, const float *thresholds, int64_t count) {
  struct small_table found;
  for (int j = 0; j <= SMALL_TABLE; j++) found.values[j] = values[j < count ? j : count - 1];
  for (int j = 0; j < SMALL_TABLE; j++)
    found.thresholds[j] = j < count - 1 ? thresholds[j] : INFINITY;
  return found;
}

INLINE int32_t small_index(float x, const float *thresholds) {
  int32_t found = 0;
#pragma GCC unroll 16
  for (int j = 0; j < SMALL_TABLE - 1; j++) found += (int32_t)(x > thresholds[j]);
  return found;
}

#ifdef __AVX2__
#include <immintrin.h>

/* Calls of eight for as long as there are so many, then the same one by one. */
#define LANES 8

struct small_search {
  __m256 first, second, third, fourth;
};

INLINE struct small_search small_search_of(const float *t) {
  const struct small_search found = {
      .first = _mm256_set1_ps(t[7]),
      .second = _mm256_setr_ps(t[3], t[11], 0, 0, 0, 0, 0, 0),
      .third = _mm256_setr_ps(t[1], t[5], t[9], t[13], 0, 0, 0, 0),
      .fourth = _mm256_setr_ps(t[0], t[2], t[4], t[6], t[8], t[10], t[12], t[14]),
  };
  return found;
}

/* Whether numbers are above thresholds is the next bit of their indices. */
INLINE __m256i small_step(__m256i index, __m256 x, __m256 threshold) {
  const __m256i is_above = _mm256_castps_si256(_mm256_cmp_ps(x, threshold, _CMP_GT_OQ));
  return _mm256_sub_epi32(_mm256_add_epi32(index, index), is_above);
}

INLINE __m256i small_indices(__m256 x, const struct small_search *s) {
  __m256i index = small_step(_mm256_setzero_si256(), x, s->first);
  index = small_step(index, x, _mm256_permutevar8x32_ps(s->second, index));
  index = small_step(index, x, _mm256_permutevar8x32_ps(s->third, index));
  return small_step(index, x, _mm256_permutevar8x32_ps(s->fourth, index));
}

INLINE __m256 small_values(__m256i index, const float *values) {
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), index);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values + 8), index);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}

/* The numbers themselves where they are NaN. */
INLINE __m256 or_nan(__m256 x, __m256 found) {
  return _mm256_blendv_ps(found, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

INLINE void store_bytes(uint8_t *out, __m256i numbers) {
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(numbers),
                                         _mm256_extracti128_si256(numbers, 1));
  _mm_storel_epi64((__m128i *)out, _mm_packus_epi16(halves, halves));
}

INLINE __m256i load_bytes(const uint8_t *in) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)in));
}
#endif
