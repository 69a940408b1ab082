/* Elements that share scales by their largest magnitude, as ScaledPlan rounds them in torch ops: values,
 * codes, and values of codes. A part of rounding_kernels.c, for float.
 *
 * A tensor is [outer, rows, mid, columns]. Tiles of `height` rows times `width` columns share a scale, and
 * scales are [outer, rows of tiles, mid, columns of tiles]. Tiles of a width of 1 are rounded side by side.
 */
enum { FLOAT_ELEMENTS, FIXED_ELEMENTS, TABLE_ELEMENTS };
enum { SCALES_FLOAT32, SCALES_E8M0, SCALES_E4M3, SCALES_MX };

/* A float rounded to nearest that is plain and saturates, which takes the fewest instructions. */
enum { PLAIN = TABLE_ELEMENTS + 1 };

/* With `is_given` the scale of the tensor, or of the whole, is `given`. An element's noise depends on its
 * place: outer, row, mid and column times the numbers in `places`.
 */
struct scaled_spec {
  struct float_spec element, e4m3;
  struct fixed_spec fixed;
  int64_t kind, scale_format, has_tensor_scale, max_exponent, carry, nan_index;
  int64_t rows, mid, columns, height, width, is_whole, places[4], is_given;
  float largest, tensor_largest, least_scale, most_scale, given;
  float values[SMALL_TABLE], thresholds[SMALL_TABLE];
};

/* How elements are coded; for tables `codes` is not used. */
struct element_codes {
  const void *codes;
  int width;
  uint8_t nan;
};

INLINE float within(float x, float least, float most) {
  x = x < least ? least : x;
  return x > most ? most : x;
}

/* NaN for infinity and NaN. */
INLINE float amax_of(int32_t most) { return from_bits_f32(most >= INF ? QUIET_NAN : most); }

INLINE float e4m3_of(float scale, const struct float_spec e4m3) {
  return round_float_f32(within(scale, 0x1p-6f, 448.0f), NEAREST, 1, e4m3, 0);
}

INLINE int32_t most_of(const float *in, int64_t count) {
  int32_t most = 0;
  _Pragma("omp simd reduction(max : most)") for (int64_t i = 0; i < count; i++) {
    const int32_t whole = to_bits_f32(in[i]) & MAGNITUDE;
    most = whole > most ? whole : most;
  }
  return most;
}

static int32_t most_of_all(const float *in, int64_t count, int threads) {
  int32_t mosts[MOST_THREADS] = {0};
  PARALLEL {
    int64_t first, end;
    my_share(count, &first, &end);
    mosts[THIS_THREAD] = most_of(in + first, end - first);
  }
  for (int i = 1; i < threads; i++) mosts[0] = mosts[i] > mosts[0] ? mosts[i] : mosts[0];
  return mosts[0];
}

/* --- scales --- */

/* Tiles that are worked on together, and how many elements if they are more than one. */
#define TILES 1024
#define TILE_ELEMENTS 8192
#define TILE_COLUMNS 1024

/* Of tiles: their scales, what values are divided by or multiplied with, what elements are multiplied with. */
struct shares {
  int32_t mosts[TILES];
  float blocks[TILES], by[TILES], scales[TILES];
  int is_product;
};

/* The scale of the whole tensor, or of what it is if that is one tile. */
static float whole_scale(int32_t most, const struct scaled_spec *s);

static void find_shares(struct shares *found, int64_t tiles, float tensor,
                        const struct scaled_spec *s) {
  const int32_t *mosts = found->mosts;
  float *blocks = found->blocks, *by = found->by, *scales = found->scales;
  const float largest = s->largest, least = s->least_scale, most = s->most_scale;
  found->is_product = 1;
  if (s->scale_format == SCALES_FLOAT32) {
    found->is_product = 0;
    SIMD for (int64_t t = 0; t < tiles; t++)
      blocks[t] = by[t] = scales[t] = within(amax_of(mosts[t]) / largest, least, most);
  } else if (s->scale_format == SCALES_E8M0) {
    const int32_t carry = (int32_t)s->carry, max_exponent = (int32_t)s->max_exponent;
    int32_t is_huge = 0;
    _Pragma("omp simd reduction(| : is_huge)") for (int64_t t = 0; t < tiles; t++) {
      const int32_t carried = (int32_t)((uint32_t)mosts[t] + (uint32_t)carry);
      int32_t field = (carried >> 23) - max_exponent;
      field = field < 1 ? 1 : field > 254 ? 254 : field;
      const float power = within(from_bits_f32(field << 23), least, most);
      is_huge |= power > 0x1p126f;
      blocks[t] = scales[t] = mosts[t] >= INF ? amax_of(mosts[t]) : power;
      by[t] = 1.0f / scales[t];
    }
    /* The inverse of 2**127 is no normal number. */
    if (is_huge) memcpy(by, scales, (size_t)tiles * sizeof *by), found->is_product = 0;
  } else if (s->scale_format == SCALES_MX) {
    const int32_t carry = (int32_t)s->carry, max_exponent = (int32_t)s->max_exponent;
    SIMD for (int64_t t = 0; t < tiles; t++) {
      const int32_t exponent = shared_exponent_f32(mosts[t], carry, max_exponent);
      by[t] = power_of_two_f32(-exponent);
      blocks[t] = scales[t] =
          mosts[t] >= INF ? from_bits_f32(QUIET_NAN) : power_of_two_f32(exponent);
    }
  } else if (s->has_tensor_scale) {
    const struct float_spec e4m3 = s->e4m3;
    const float inverse = 1.0f / tensor;
    SIMD for (int64_t t = 0; t < tiles; t++) {
      const float block = e4m3_of(amax_of(mosts[t]) / largest / tensor, e4m3);
      blocks[t] = block;
      by[t] = inverse / block;
      scales[t] = tensor * block;
    }
  } else {
    const struct float_spec e4m3 = s->e4m3;
    SIMD for (int64_t t = 0; t < tiles; t++) {
      const float block = e4m3_of(within(amax_of(mosts[t]) / largest, least, most), e4m3);
      blocks[t] = scales[t] = block;
      by[t] = 1.0f / block;
    }
  }
}

static float whole_scale(int32_t most, const struct scaled_spec *s) {
  struct shares found;
  if (s->has_tensor_scale)
    return within(amax_of(most) / s->tensor_largest, s->least_scale, s->most_scale);
  found.mosts[0] = most;
  find_shares(&found, 1, 1.0f, s);
  return found.blocks[0];
}

/* As Scaled and Block store them. */
static void store_scales(char *out, const float *blocks, int64_t first, int64_t count,
                         const struct scaled_spec *s) {
  if (s->scale_format == SCALES_FLOAT32) {
    memcpy((float *)out + first, blocks, (size_t)count * sizeof *blocks);
    return;
  }
  uint8_t *codes = (uint8_t *)out + first;
  if (s->scale_format == SCALES_E4M3) {
    SIMD for (int64_t t = 0; t < count; t++) {
      const int32_t bits = to_bits_f32(blocks[t]);
      codes[t] = (uint8_t)(bits > INF ? 0x7F : (bits >> 20) - ((BIAS - 7) << 3));
    }
    return;
  }
  SIMD for (int64_t t = 0; t < count; t++) codes[t] = (uint8_t)(to_bits_f32(blocks[t]) >> 23);
}

static void load_scales(const char *in, float *scales, int64_t first, int64_t count, float tensor,
                        int64_t scale_format) {
  const uint8_t *codes = (const uint8_t *)in + first;
  if (scale_format == SCALES_FLOAT32) {
    memcpy(scales, (const float *)in + first, (size_t)count * sizeof *scales);
  } else if (scale_format == SCALES_E4M3) {
    SIMD for (int64_t t = 0; t < count; t++) {
      const int32_t code = codes[t], whole = code & 0x7F;
      const float low = (float)whole * 0x1p-9f;
      int32_t bits = (whole << 20) + ((BIAS - 7) << 23);
      bits = whole < 8 ? to_bits_f32(low) : bits;
      bits = whole == 0x7F ? QUIET_NAN : bits;
      scales[t] = from_bits_f32(bits | (int32_t)((uint32_t)(code >> 7) << 31)) * tensor;
    }
  } else {
    const int32_t of_zero = scale_format == SCALES_MX ? 1 << 22 : 0;
    SIMD for (int64_t t = 0; t < count; t++) {
      const int32_t code = codes[t];
      scales[t] = from_bits_f32(code == 255 ? QUIET_NAN : code == 0 ? of_zero : code << 23);
    }
  }
}

/* --- elements --- */

/* The same as round_float where it saturates and numbers that decide are normal: NaN stays NaN. */
INLINE float plain_element(float x, int mode, struct float_spec s, uint32_t noise) {
  const float max = from_bits_f32((int32_t)s.max);
  const int32_t sign = to_bits_f32(x) & SIGN;
  float magnitude = from_bits_f32(to_bits_f32(x) & MAGNITUDE);
  magnitude = max < magnitude ? max : magnitude;
  const int32_t field = to_bits_f32(magnitude) & INF, lowest = (int32_t)s.lowest;
  const int32_t power_bits = (field > lowest ? field : lowest) + (int32_t)s.lift;
  const float power = from_bits_f32(power_bits);
  float rounded = (magnitude + power) - power;
  const int32_t step_bits = power_bits - (23 << 23);
  const float step = from_bits_f32(step_bits);
  if (mode == NEAREST_AWAY) {
    rounded = magnitude - rounded == step * 0.5f ? rounded + step : rounded;
  } else if (mode == TOWARD_ZERO) {
    rounded = rounded > magnitude ? rounded - step : rounded;
  } else if (mode == UP || mode == DOWN) {
    const float exact = from_bits_f32(to_bits_f32(magnitude) | sign);
    rounded = from_bits_f32(to_bits_f32(rounded) | sign);
    if (mode == UP) rounded = rounded < exact ? rounded + step : rounded;
    if (mode == DOWN) rounded = rounded > exact ? rounded - step : rounded;
    /* What was made zero keeps its sign. */
    rounded = from_bits_f32(to_bits_f32(rounded) & MAGNITUDE);
  } else if (mode == STOCHASTIC) {
    /* In units of 2**-24 of a step. */
    const float inverse = from_bits_f32(((2 * BIAS + 24) << 23) - step_bits);
    const float below = rounded > magnitude ? rounded - step : rounded;
    const float drawn = (float)((int32_t)(noise >> 8) + 1);
    rounded = (magnitude - below) * inverse >= drawn ? below + step : below;
  }
  return from_bits_f32(to_bits_f32(rounded) | sign);
}

/* As direct_float; bits above those of the code are any. */
INLINE int32_t plain_code(float x, struct float_spec s, int32_t base, int dropped, int sign_place) {
  const int32_t bits = to_bits_f32(x), most = (int32_t)s.max, lowest = (int32_t)s.lowest;
  int32_t whole = bits & MAGNITUDE;
  whole = whole < most ? whole : most;
  const int32_t field = whole & INF, power = (field > lowest ? field : lowest) + (int32_t)s.lift;
  const int32_t sum = to_bits_f32(from_bits_f32(whole) + from_bits_f32(power));
  const int32_t code = sum + (sum >> dropped) - base;
  return code | ((bits >> (31 - sign_place)) & (1 << sign_place));
}

INLINE int32_t fixed_code(float x, struct fixed_spec s, int32_t mask) {
  float whole = __builtin_nearbyintf(x * (float)s.scale);
  whole = whole < (float)s.least ? (float)s.least : whole;
  whole = whole > (float)s.most ? (float)s.most : whole;
  return (int32_t)whole & mask;
}

/* What is the same for all elements, in variables of its own: `out` may not be what the spec lies in. */
struct fixture {
  struct float_spec element;
  struct fixed_spec fixed;
  uint32_t step, key0, key1;
  int dropped, sign_place;
  int32_t base, mask, nan;
};

INLINE struct fixture fixture_of(const struct scaled_spec *s, const struct element_codes *coded,
                                 uint32_t key0, uint32_t key1, int kind, int to_codes) {
  struct fixture found = {.element = s->element, .fixed = s->fixed, .step = (uint32_t)s->places[3],
                          .key0 = key0, .key1 = key1};
  if (to_codes) {
    const struct float_codes *floats = coded->codes;
    const struct fixed_codes *fixeds = coded->codes;
    found.nan = coded->nan;
    if (kind == PLAIN)
      found.dropped = (int)floats->dropped, found.sign_place = (int)floats->sign_place;
    const int32_t power = (int32_t)(s->element.lowest + s->element.lift);
    found.base = power + (power >> found.dropped);
    if (kind == FIXED_ELEMENTS) found.mask = (int32_t)(((uint32_t)2 << (fixeds->bits - 1)) - 1);
  }
  return found;
}

/* The same as round_run of tables. */
INLINE void table_run(const float *in, void *out, int64_t count, const float *by,
                      const float *scales, const struct scaled_spec *s, int32_t nan,
                      const int is_column, const int is_product, const int to_codes) {
  const float *values = s->values, *thresholds = s->thresholds, one_by = by[0], one_scale = scales[0];
  int64_t i = 0;
#ifdef LANES
  const struct small_search search = small_search_of(thresholds);
  const __m256 of_nan = _mm256_castsi256_ps(_mm256_set1_epi32(nan));
  for (; i + LANES <= count; i += LANES) {
    const __m256 x = _mm256_loadu_ps(in + i);
    const __m256 own = is_column ? _mm256_loadu_ps(by + i) : _mm256_set1_ps(one_by);
    const __m256 scale = is_column ? _mm256_loadu_ps(scales + i) : _mm256_set1_ps(one_scale);
    const __m256 quotient = is_product ? _mm256_mul_ps(x, own) : _mm256_div_ps(x, own);
    const __m256i index = small_indices(quotient, &search);
    if (to_codes) {
      const __m256 is_nan = _mm256_cmp_ps(scale, scale, _CMP_UNORD_Q);
      const __m256 code = _mm256_blendv_ps(_mm256_castsi256_ps(index), of_nan, is_nan);
      store_bytes((uint8_t *)out + i, _mm256_castps_si256(code));
    } else {
      const __m256 found = or_nan(quotient, small_values(index, values));
      _mm256_storeu_ps((float *)out + i, _mm256_mul_ps(found, scale));
    }
  }
#endif
  for (; i < count; i++) {
    const float scale = is_column ? scales[i] : one_scale, own = is_column ? by[i] : one_by;
    const float quotient = is_product ? in[i] * own : in[i] / own;
    const int32_t index = small_index(quotient, thresholds);
    if (to_codes)
      ((uint8_t *)out)[i] = (uint8_t)(scale != scale ? nan : index);
    else
      ((float *)out)[i] = (quotient != quotient ? quotient : values[index]) * scale;
  }
}

/* Rounds elements that lie beside each other to codes of one byte. */
INLINE void code_run(const float *in, uint8_t *out, int64_t count, const float *by,
                     const float *scales, const struct fixture f, const int is_column,
                     const int kind, const int is_product) {
  const float one_by = by[0], one_scale = scales[0];
  if (!is_column && one_scale != one_scale) {
    memset(out, f.nan, (size_t)count);
    return;
  }
  SIMD for (int64_t i = 0; i < count; i++) {
    const float x = in[i], scale = is_column ? scales[i] : one_scale;
    const float own = is_column ? by[i] : one_by;
    float quotient = is_product ? x * own : x / own;
    if (is_column && kind == FIXED_ELEMENTS) quotient = scale != scale ? 0.0f : quotient;
    const int32_t code = kind == PLAIN ? plain_code(quotient, f.element, f.base, f.dropped, f.sign_place)
                                       : fixed_code(quotient, f.fixed, f.mask);
    out[i] = (uint8_t)whole_code_f32((uint32_t)(is_column && scale != scale ? f.nan : code));
  }
}

/* Rounds elements that lie beside each other: with a scale of their own if `is_column`, else all with one. */
INLINE void round_run(const float *in, float *out, int64_t count, const float *by,
                      const float *scales, uint32_t index, const struct fixture f,
                      const int is_column, const int kind, const int mode, const int is_product) {
  const float one_by = by[0], one_scale = scales[0];
  SIMD for (int64_t i = 0; i < count; i++) {
    const uint32_t noise =
        mode == STOCHASTIC ? random_bits(index + (uint32_t)i * f.step, f.key0, f.key1) : 0;
    const float x = in[i];
    const float scale = is_column ? scales[i] : one_scale, own = is_column ? by[i] : one_by;
    float quotient = is_product ? x * own : x / own;
    if (mode == UP || mode == DOWN) {
      /* What the division made zero was not. */
      const int32_t bits = to_bits_f32(x), tiny = ONE << 23;
      const int is_lost = ((to_bits_f32(quotient) & MAGNITUDE) < tiny) & ((bits & MAGNITUDE) != 0);
      quotient = is_lost ? from_bits_f32((bits & SIGN) | tiny) : quotient;
    }
    (void)noise;
    const float found = kind == PLAIN            ? plain_element(quotient, mode, f.element, noise)
                        : kind == FIXED_ELEMENTS ? round_fixed_f32(quotient, mode, 0, f.fixed, noise)
                                                 : round_float_f32(quotient, mode, 0, f.element, noise);
    out[i] = found * scale;
  }
}

/* Rounds a row of tiles, the last of which has `last` columns. */
#define ROW_ARGUMENTS                                                                            \
  const float *in, void *out, int64_t tiles, int64_t width, int64_t last, const float *by,       \
      const float *scales, uint32_t index, const struct scaled_spec *s,                          \
      const struct element_codes *coded, uint32_t key0, uint32_t key1

typedef void row_function(ROW_ARGUMENTS);

INLINE void round_row(ROW_ARGUMENTS, const int constant_width, const int kind, const int mode,
                      const int is_product, const int to_codes) {
  const struct fixture f = fixture_of(s, coded, key0, key1, kind, to_codes);
  const int is_column = constant_width == 1;
  if (constant_width > 1) width = constant_width;
  const int64_t whole = is_column ? 1 : last < width ? tiles - 1 : tiles;
  for (int64_t t = 0; t < whole; t++) {
    const int64_t count = is_column ? tiles : width, start = is_column ? 0 : t * width;
    if (kind == TABLE_ELEMENTS)
      table_run(in + start, (char *)out + start * (to_codes ? 1 : 4), count, by + t, scales + t, s,
                f.nan, is_column, is_product, to_codes);
    else if (to_codes)
      code_run(in + start, (uint8_t *)out + start, count, by + t, scales + t, f, is_column, kind,
               is_product);
    else
      round_run(in + start, (float *)out + start, count, by + t, scales + t,
                index + (uint32_t)start * f.step, f, is_column, kind, mode, is_product);
  }
  if (is_column || whole == tiles) return;
  const int64_t start = whole * width;
  in += start, by += whole, scales += whole;
  if (kind == TABLE_ELEMENTS)
    table_run(in, (char *)out + start * (to_codes ? 1 : 4), last, by, scales, s, f.nan, 0,
              is_product, to_codes);
  else if (to_codes)
    code_run(in, (uint8_t *)out + start, last, by, scales, f, 0, kind, is_product);
  else
    round_run(in, (float *)out + start, last, by, scales, index + (uint32_t)start * f.step, f, 0,
              kind, mode, is_product);
}

#define ROW(NAME, WIDTH, KIND, MODE, IS_PRODUCT, TO_CODES)                                       \
  static void NAME(ROW_ARGUMENTS) {                                                              \
    round_row(in, out, tiles, width, last, by, scales, index, s, coded, key0, key1, WIDTH, KIND, \
              MODE, IS_PRODUCT, TO_CODES);                                                       \
  }

#define ROWS_OF_CODES(KIND, NAME, TO_CODES)                                                      \
  ROW(NAME##_1, 1, KIND, NEAREST, 0, TO_CODES)                                                   \
  ROW(NAME##_n, 0, KIND, NEAREST, 0, TO_CODES)                                                   \
  ROW(NAME##_1_product, 1, KIND, NEAREST, 1, TO_CODES)                                           \
  ROW(NAME##_n_product, 0, KIND, NEAREST, 1, TO_CODES)

ROWS_OF_CODES(PLAIN, PLAIN_codes, 1)
ROWS_OF_CODES(FIXED_ELEMENTS, FIXED_ELEMENTS_codes, 1)
ROWS_OF_CODES(TABLE_ELEMENTS, TABLE_ELEMENTS_codes, 1)
ROWS_OF_CODES(TABLE_ELEMENTS, TABLE_ELEMENTS_values, 0)
ROW(plain_16_values, 16, PLAIN, NEAREST, 1, 0)
ROW(plain_16_codes, 16, PLAIN, NEAREST, 1, 1)
ROW(plain_32_values, 32, PLAIN, NEAREST, 1, 0)
ROW(plain_32_codes, 32, PLAIN, NEAREST, 1, 1)
ROW(plain_16_stochastic, 16, PLAIN, STOCHASTIC, 1, 0)
ROW(plain_32_stochastic, 32, PLAIN, STOCHASTIC, 1, 0)
ROW(fixed_32_values, 32, FIXED_ELEMENTS, NEAREST, 1, 0)
ROW(fixed_32_codes, 32, FIXED_ELEMENTS, NEAREST, 1, 1)

#define ROWS_OF_KIND(MODE, KIND, NAME)                                                    \
  ROW(MODE##_##NAME##_1, 1, KIND, MODE, 0, 0)                                                    \
  ROW(MODE##_##NAME##_n, 0, KIND, MODE, 0, 0)                                                    \
  ROW(MODE##_##NAME##_1_product, 1, KIND, MODE, 1, 0)                                            \
  ROW(MODE##_##NAME##_n_product, 0, KIND, MODE, 1, 0)
#define ROWS_OF_MODE(MODE)                                                                       \
  ROWS_OF_KIND(MODE, FLOAT_ELEMENTS, float)                                                   \
  ROWS_OF_KIND(MODE, FIXED_ELEMENTS, fixed)                                                   \
  ROWS_OF_KIND(MODE, PLAIN, plain)
EACH_MODE(ROWS_OF_MODE)

#define CHOICE(NAME)                                                                             \
  width == 1 ? (is_product ? NAME##_1_product : NAME##_1)                                        \
             : (is_product ? NAME##_n_product : NAME##_n)

#define CASE_row(MODE)                                                                           \
  case MODE:                                                                                     \
    if (s->kind == FIXED_ELEMENTS) return CHOICE(MODE##_fixed);                                  \
    if (is_plain) return CHOICE(MODE##_plain);                                                   \
    return CHOICE(MODE##_float);

/* Whether plain_element rounds as round_float does. */
INLINE int is_plain_element(const struct scaled_spec *s) {
  return is_plain_float_f32(s->element) && s->element.max == s->element.beyond &&
         s->element.lowest >= (int64_t)64 << 23;
}

/* Whether there are functions of their own for codes. */
INLINE int is_direct(const struct scaled_spec *s) {
  if (s->kind == TABLE_ELEMENTS) return 1;
  if (s->element.mode != NEAREST) return 0;
  return s->kind == FIXED_ELEMENTS || is_plain_element(s);
}

static row_function *row_of(const struct scaled_spec *s, int64_t width, int is_product,
                            int to_codes) {
  const int is_plain = s->kind == FLOAT_ELEMENTS && is_plain_element(s);
  if (s->kind == TABLE_ELEMENTS) {
    if (to_codes) return CHOICE(TABLE_ELEMENTS_codes);
    return CHOICE(TABLE_ELEMENTS_values);
  }
  if (to_codes && s->kind == FIXED_ELEMENTS) {
    if (width == 32 && is_product) return fixed_32_codes;
    return CHOICE(FIXED_ELEMENTS_codes);
  }
  if (to_codes) {
    if (width == 16 && is_product) return plain_16_codes;
    if (width == 32 && is_product) return plain_32_codes;
    return CHOICE(PLAIN_codes);
  }
  if (is_plain && s->element.mode == NEAREST && is_product) {
    if (width == 16) return plain_16_values;
    if (width == 32) return plain_32_values;
  }
  if (is_plain && s->element.mode == STOCHASTIC && is_product) {
    if (width == 16) return plain_16_stochastic;
    if (width == 32) return plain_32_stochastic;
  }
  if (s->kind == FIXED_ELEMENTS && s->element.mode == NEAREST && width == 32 && is_product)
    return fixed_32_values;
  switch (s->element.mode) { EACH_MODE(CASE_row) }
  return NEAREST_float_n;
}

/* Codes of rounded elements. */
static void store_elements(const float *in, void *out, int64_t count, const struct scaled_spec *s,
                           const struct element_codes *coded) {
  if (s->kind == FIXED_ELEMENTS)
    store_fixed_f32(in, out, count, coded->codes, coded->width);
  else
    store_float_f32(in, out, count, coded->codes, coded->width);
}

/* The same as a row_function to codes, where there is none: by way of elements. */
static void coded_row(ROW_ARGUMENTS) {
  float units[TILES], elements[TILES];
  const int is_product = by != scales;
  row_function *row = row_of(s, width, is_product, 0);
  for (int64_t t = 0; t < tiles; t++) units[t] = scales[t] != scales[t] ? scales[t] : 1.0f;
  const int64_t total = width == 1 ? tiles : (tiles - 1) * width + last;
  for (int64_t start = 0; start < total;) {
    const int64_t tile = width == 1 ? start : start / width;
    int64_t end = width == 1 ? total : (tile + 1) * width;
    end = end < total ? end : total;
    end = end < start + TILES ? end : start + TILES;
    const int64_t count = end - start;
    const int64_t columns = width == 1 ? count : 1;
    row(in + start, elements, columns, width == 1 ? 1 : count, width == 1 ? 1 : count, by + tile,
        units + tile, index + (uint32_t)start * (uint32_t)s->places[3], s, coded, key0, key1);
    store_elements(elements, (char *)out + start * coded->width, count, s, coded);
    start = end;
  }
}

/* --- tensors --- */

/* Tiles beside each other, in all of their rows. */
struct part {
  int64_t place, tiles, height, last, first;
  uint32_t index;
};

struct grid {
  int64_t across, down, most, parts, total, row;
};

static struct grid grid_of(int64_t count, const struct scaled_spec *s) {
  struct grid g;
  g.across = (s->columns + s->width - 1) / s->width;
  g.down = (s->rows + s->height - 1) / s->height;
  g.most = TILE_ELEMENTS / s->width / s->height;
  g.most = g.most * s->width < TILE_COLUMNS ? TILE_COLUMNS / s->width : g.most;
  g.most = g.most < 1 ? 1 : g.most > TILES ? TILES : g.most;
  g.parts = (g.across + g.most - 1) / g.most;
  g.row = s->mid * s->columns;
  g.total = count / s->rows / g.row * g.down * s->mid * g.parts;
  return g;
}

static struct part part_at(int64_t number, const struct grid *g, const struct scaled_spec *s) {
  const int64_t tile = number % g->parts * g->most, rest = number / g->parts;
  const int64_t mid = rest % s->mid, down = rest / s->mid % g->down, outer = rest / s->mid / g->down;
  const int64_t row = down * s->height, column = tile * s->width;
  const int64_t tiles = g->across - tile < g->most ? g->across - tile : g->most;
  const int64_t left = s->columns - (tile + tiles - 1) * s->width, below = s->rows - row;
  const struct part found = {
      .place = ((outer * s->rows + row) * s->mid + mid) * s->columns + column,
      .tiles = tiles,
      .height = below < s->height ? below : s->height,
      .last = left < s->width ? left : s->width,
      .first = rest * g->across + tile,
      .index = (uint32_t)(outer * s->places[0] + row * s->places[1] + mid * s->places[2] +
                          column * s->places[3]),
  };
  return found;
}

/* The share of some parts that this thread has. */
INLINE void my_parts(int64_t count, int64_t *first, int64_t *end) {
  *first = 0;
  *end = count;
#ifdef _OPENMP
  const int64_t threads = omp_get_num_threads(), self = omp_get_thread_num();
  *first = count * self / threads;
  *end = count * (self + 1) / threads;
#endif
}

INLINE void tiles_most(const float *in, int64_t tiles, int64_t width, int32_t *mosts) {
  for (int64_t t = 0; t < tiles; t++) mosts[t] = most_of(in + t * width, width);
}

INLINE int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

INLINE int32_t whole_of(float x) { return to_bits_f32(x) & MAGNITUDE; }

static void find_mosts(const float *in, const struct part *p, int64_t row, int64_t width,
                       int32_t *mosts) {
  const int64_t tiles = p->tiles;
  if (width > 1 && p->height == 1 && p->last == width) {
    if (width == 16)
      tiles_most(in, tiles, 16, mosts);
    else if (width == 32)
      tiles_most(in, tiles, 32, mosts);
    else
      tiles_most(in, tiles, width, mosts);
    return;
  }
  memset(mosts, 0, (size_t)tiles * sizeof *mosts);
  int64_t r = 0;
  if (width == 1) {
    for (; r + 4 <= p->height; r += 4) {
      const float *a = in + r * row, *b = a + row, *c = b + row, *d = c + row;
      SIMD for (int64_t t = 0; t < tiles; t++)
        mosts[t] = larger(larger(larger(whole_of(a[t]), whole_of(b[t])),
                                 larger(whole_of(c[t]), whole_of(d[t]))),
                          mosts[t]);
    }
    for (; r < p->height; r++)
      SIMD for (int64_t t = 0; t < tiles; t++) mosts[t] = larger(whole_of(in[r * row + t]), mosts[t]);
    return;
  }
  for (; r < p->height; r++)
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t count = t == tiles - 1 ? p->last : width;
      mosts[t] = larger(most_of(in + r * row + t * width, count), mosts[t]);
    }
}

/* Rounds to values, or with `coded` to codes, whose scales' codes go to `scale_codes`. */
static void scaled_tiles(const float *in, void *out, int64_t count, float tensor,
                         const struct scaled_spec *s, uint32_t key0, uint32_t key1, int threads,
                         const struct element_codes *coded, char *scale_codes) {
  const struct grid g = grid_of(count, s);
  const int64_t width = s->width, bytes = coded ? coded->width : (int64_t)sizeof(float);
  (void)threads;
  PARALLEL {
    int64_t number, end;
    struct shares shares;
    my_parts(g.total, &number, &end);
    for (; number < end; number++) {
      const struct part p = part_at(number, &g, s);
      find_mosts(in + p.place, &p, g.row, width, shares.mosts);
      find_shares(&shares, p.tiles, tensor, s);
      if (coded) store_scales(scale_codes, shares.blocks, p.first, p.tiles, s);
      const float *by = shares.is_product ? shares.by : shares.scales;
      row_function *row = row_of(s, width, shares.is_product, coded != 0);
      if (coded && (coded->width > 1 || !is_direct(s))) row = coded_row;
      for (int64_t r = 0; r < p.height; r++)
        row(in + p.place + r * g.row, (char *)out + (p.place + r * g.row) * bytes, p.tiles, width,
            p.last, by, shares.scales, p.index + (uint32_t)(r * s->places[1]), s, coded, key0,
            key1);
    }
  }
}

/* The same where all share one scale. */
static void scaled_whole(const float *in, void *out, int64_t count, float tensor, int32_t most,
                         const struct scaled_spec *s, uint32_t key0, uint32_t key1, int threads,
                         const struct element_codes *coded, char *scale_codes) {
  struct shares shares;
  const int64_t bytes = coded ? coded->width : (int64_t)sizeof(float);
  shares.mosts[0] = most;
  if (s->is_given && !s->has_tensor_scale) {
    shares.blocks[0] = shares.by[0] = shares.scales[0] = tensor;
    shares.is_product = s->scale_format == SCALES_E4M3;
    if (shares.is_product) shares.by[0] = 1.0f / tensor;
  } else {
    find_shares(&shares, 1, tensor, s);
  }
  if (coded) store_scales(scale_codes, shares.blocks, 0, 1, s);
  const float *by = shares.is_product ? shares.by : shares.scales;
  row_function *row = row_of(s, count, shares.is_product, coded != 0);
  if (coded && (coded->width > 1 || !is_direct(s))) row = coded_row;
  (void)threads;
  PARALLEL {
    int64_t first, end;
    my_share(count, &first, &end);
    if (first < end)
      row(in + first, (char *)out + first * bytes, 1, end - first, end - first, by, shares.scales,
          (uint32_t)first, s, coded, key0, key1);
  }
}

/* Rows of whole tiles that follow each other are one. */
static struct scaled_spec joined(int64_t count, const struct scaled_spec *s) {
  struct scaled_spec found = *s;
  if (s->height == 1 && s->width > 1 && s->columns % s->width == 0 && s->places[3] == 1)
    found.columns = count, found.rows = found.mid = 1;
  return found;
}

static void scaled(const float *in, void *out, int64_t count, const struct scaled_spec *spec,
                   uint32_t key0, uint32_t key1, int threads, const struct element_codes *coded,
                   char *scale_codes, float *tensor_scale) {
  const struct scaled_spec own = joined(count, spec), *s = &own;
  float tensor = 1.0f;
  int32_t most = 0;
  threads = threads < MOST_THREADS ? threads : MOST_THREADS;
  if (s->has_tensor_scale || s->is_whole) {
    const int is_read = !s->is_given || (s->has_tensor_scale && s->is_whole);
    most = is_read ? most_of_all(in, count, threads) : 0;
    tensor = s->is_given ? within(s->given, s->least_scale, s->most_scale) : whole_scale(most, s);
  }
  if (tensor_scale) *tensor_scale = tensor;
  if (s->is_whole)
    scaled_whole(in, out, count, tensor, most, s, key0, key1, threads, coded, scale_codes);
  else
    scaled_tiles(in, out, count, tensor, s, key0, key1, threads, coded, scale_codes);
}

API void scaled_f32(const float *in, float *out, int64_t count, const struct scaled_spec *s,
                    uint32_t key0, uint32_t key1, int threads) {
  scaled(in, out, count, s, key0, key1, threads, 0, 0, 0);
}

API void encode_scaled_f32(const float *in, char *out, int64_t count, const struct scaled_spec *s,
                           uint32_t key0, uint32_t key1, int threads, const void *codes, int width,
                           char *scale_codes, float *tensor_scale) {
  struct element_codes coded = {.codes = codes, .width = width};
  if (s->kind == TABLE_ELEMENTS)
    coded.nan = (uint8_t)s->nan_index;
  else if (s->kind == FLOAT_ELEMENTS)
    coded.nan = (uint8_t)code_float_f32(NAN, *(const struct float_codes *)codes);
  scaled(in, out, count, s, key0, key1, threads, &coded, scale_codes, tensor_scale);
}

/* --- values of codes --- */

/* Values of elements that lie beside each other; with at most 16 of them `small` has them all. */
INLINE void load_run(const uint8_t *in, float *out, int64_t count, const float *scales,
                     const struct float_codes floats, const struct fixed_codes fixed,
                     const float *small, const int kind, const int is_column, const int is_short) {
  const float one_scale = scales[0];
  int64_t i = 0;
#ifdef LANES
  if (small) {
    const __m256 low = _mm256_loadu_ps(small), high = _mm256_loadu_ps(small + 8);
    for (; i + LANES <= count; i += LANES) {
      const __m256i code = load_bytes(in + i);
      const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
      const __m256 found = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code),
                                            _mm256_permutevar8x32_ps(high, code), is_high);
      const __m256 scale = is_column ? _mm256_loadu_ps(scales + i) : _mm256_set1_ps(one_scale);
      _mm256_storeu_ps(out + i, _mm256_mul_ps(found, scale));
    }
  }
#endif
  if (small) {
    for (; i < count; i++) out[i] = small[in[i] & 15] * (is_column ? scales[i] : one_scale);
    return;
  }
  SIMD for (i = 0; i < count; i++) {
    const uint32_t code = in[i];
    const float found =
        kind == FIXED_ELEMENTS ? value_fixed_f32(code, fixed) : value_f32(code, floats, is_short);
    out[i] = found * (is_column ? scales[i] : one_scale);
  }
}

static void load_elements(const void *in, float *out, int64_t count, int64_t kind,
                          const void *codes, int width) {
  if (kind == FIXED_ELEMENTS)
    load_fixed_f32(in, out, count, codes, width);
  else if (kind == TABLE_ELEMENTS)
    load_table_f32(in, out, count, codes, width);
  else
    load_float_f32(in, out, count, codes, width);
}

/* Of codes of bytes, in rows of tiles. */
#define LOAD_ROW(KIND, FLOATS, FIXED, SMALL, IS_SHORT)                                           \
  if (s->width == 1)                                                                             \
    load_run(in, out, p->tiles, scales, FLOATS, FIXED, SMALL, KIND, 1, IS_SHORT);                \
  else if (s->width == 32 && p->last == 32)                                                      \
    for (int64_t t = 0; t < p->tiles; t++)                                                       \
      load_run(in + t * 32, out + t * 32, 32, scales + t, FLOATS, FIXED, SMALL, KIND, 0,         \
               IS_SHORT);                                                                        \
  else                                                                                           \
    for (int64_t t = 0; t < p->tiles; t++)                                                       \
      load_run(in + t * s->width, out + t * s->width, t < p->tiles - 1 ? s->width : p->last,     \
               scales + t, FLOATS, FIXED, SMALL, KIND, 0, IS_SHORT);

static void load_row(const uint8_t *in, float *out, const struct part *p, const float *scales,
                     const struct scaled_spec *s, const void *codes, const float *small) {
  const struct float_codes no_float = {0};
  const struct fixed_codes no_fixed = {0};
  if (small) {
    LOAD_ROW(FLOAT_ELEMENTS, no_float, no_fixed, small, 0)
  } else if (s->kind == FIXED_ELEMENTS) {
    const struct fixed_codes fixed = *(const struct fixed_codes *)codes;
    LOAD_ROW(FIXED_ELEMENTS, no_float, fixed, 0, 0)
  } else {
    const struct float_codes floats = *(const struct float_codes *)codes;
    if (is_short_f32(floats)) {
      LOAD_ROW(FLOAT_ELEMENTS, floats, no_fixed, 0, 1)
    } else {
      LOAD_ROW(FLOAT_ELEMENTS, floats, no_fixed, 0, 0)
    }
  }
}

/* How many bits the codes have. */
static int bits_of_codes(const struct scaled_spec *s, const void *codes) {
  if (s->kind == FIXED_ELEMENTS) return (int)((const struct fixed_codes *)codes)->bits;
  if (s->kind == FLOAT_ELEMENTS) return (int)((const struct float_codes *)codes)->sign_place + 1;
  return ((const struct table_codes *)codes)->mask < SMALL_TABLE ? 4 : 16;
}

/* `tensor` is the tensor's scale, or 1. */
API void decode_scaled_f32(const char *in, const char *scale_codes, float *out, int64_t count,
                           const struct scaled_spec *spec, const void *codes, int width, int threads,
                           float tensor) {
  struct scaled_spec own = joined(count, spec), *s = &own;
  if (s->is_whole) own.width = 4096, own.rows = own.mid = own.height = 1, own.columns = count;
  const struct grid g = grid_of(count, s);
  const int is_small = width == 1 && bits_of_codes(s, codes) <= 4;
  uint8_t every[SMALL_TABLE];
  float small[SMALL_TABLE];
  for (int j = 0; j < SMALL_TABLE; j++) every[j] = (uint8_t)j;
  if (is_small) load_elements(every, small, SMALL_TABLE, s->kind, codes, 1);
  (void)threads;
  PARALLEL {
    int64_t number, end;
    float scales[TILES];
    my_parts(g.total, &number, &end);
    for (; number < end; number++) {
      const struct part p = part_at(number, &g, s);
      if (s->is_whole)
        for (int64_t t = 0; t < p.tiles; t++) load_scales(scale_codes, scales + t, 0, 1, tensor, s->scale_format);
      else
        load_scales(scale_codes, scales, p.first, p.tiles, tensor, s->scale_format);
      for (int64_t r = 0; r < p.height; r++) {
        const int64_t place = p.place + r * g.row;
        load_row((const uint8_t *)in + place, out + place, &p, scales, s, codes,
                 is_small ? small : 0);
      }
    }
  }
}
