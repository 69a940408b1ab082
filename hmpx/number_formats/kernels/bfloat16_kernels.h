/* float32 rounded to bfloat16 as torch's casts do, to nearest with ties to even, and functions of
 * bfloat16 looked up: there are only 65,536 values. Included once.
 */

/* `nan` is what torch makes of every NaN. */
INLINE uint16_t to_bf16(uint32_t bits, uint16_t nan) {
  const uint16_t rounded = (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded;
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

/* The value of a function for each element. */
API void bf16_mapped(const uint16_t *in, uint16_t *out, int64_t count, const uint16_t *values,
                     int threads) {
  (void)threads;
  PARALLEL {
    int64_t first, end;
    my_share(count, &first, &end);
    for (int64_t i = first; i < end; i++) out[i] = values[in[i]];
  }
}

/* Each factor multiplied by a function of the element beside it, in float32, and rounded. */
API void bf16_scaled(const uint16_t *in, const uint16_t *factors, uint16_t *out, int64_t count,
                     const float *values, uint16_t nan, int threads) {
  (void)threads;
  PARALLEL {
    int64_t first, end;
    my_share(count, &first, &end);
    for (int64_t i = first; i < end; i++) {
      const float product = bf16_value((int16_t)factors[i]) * values[in[i]];
      uint32_t bits;
      memcpy(&bits, &product, sizeof bits);
      out[i] = to_bf16(bits, nan);
    }
  }
}
