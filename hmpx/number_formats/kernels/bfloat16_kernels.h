/* float32 rounded to bfloat16 as torch's casts do, to nearest with ties to even. Included once. */

/* `nan` is what torch makes of every NaN. */
INLINE uint16_t to_bf16(uint32_t bits, uint16_t nan) {
  const uint16_t rounded = (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded;
}

/* The value in float32. */
INLINE float rounded_to_bf16(uint32_t bits, uint16_t nan) {
  const uint32_t is_up = 0x7FFFu + ((bits >> 16) & 1);
  const uint32_t rounded = (bits & 0x7FFFFFFFu) > 0x7F800000u ? (uint32_t)nan << 16
                                                              : (bits + is_up) & 0xFFFF0000u;
  return f32_value((int32_t)rounded);
}

/* Rounds, and leaves the values in float32. Input and output may be the same. */
API void bf16_rounded(const uint32_t *in, uint32_t *out, int64_t count, uint16_t nan, int threads) {
  (void)threads;
  PARALLEL {
    int64_t first, end;
    my_share(count, &first, &end);
    SIMD
    for (int64_t i = first; i < end; i++) out[i] = (uint32_t)to_bf16(in[i], nan) << 16;
  }
}

/* Sums that go on side by side: what hides how long an addition takes. */
#define SUMS 32

/* Rows of `x` times the transpose of a matrix, `weight` of n rows of k, whose values are rounded as they
 * are read: each of them once, whatever `rows` is, if one of its rows fits into the nearest cache.
 */
API void bf16_rows_product(const float *x, const uint32_t *weight, float *out, int64_t rows,
                           int64_t n, int64_t k, uint16_t nan, int threads) {
  (void)threads;
  PARALLEL {
    int64_t first, end;
    my_share(16 * n, &first, &end); /* no more than one row of the weight apart */
    first /= 16, end /= 16;
    for (int64_t i = first; i < end; i++) {
      for (int64_t row = 0; row < rows; row++) {
        const float *factors = x + row * k;
        const uint32_t *bits = weight + i * k;
        float sums[SUMS] = {0}, sum = 0;
        int64_t j = 0;
        for (; j + SUMS <= k; j += SUMS) {
          SIMD
          for (int s = 0; s < SUMS; s++) {
            sums[s] += factors[j + s] * rounded_to_bf16(bits[j + s], nan);
          }
        }
        for (; j < k; j++) sum += factors[j] * rounded_to_bf16(bits[j], nan);
        for (int s = 0; s < SUMS; s++) sum += sums[s];
        out[row * n + i] = sum;
      }
    }
  }
}
