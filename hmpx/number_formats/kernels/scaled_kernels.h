/* Elements that share scales by their largest magnitude, as ScaledPlan rounds them in torch ops. A part of
 * rounding_kernels.c, for float.
 */
enum { FLOAT_ELEMENTS, FIXED_ELEMENTS, TABLE_ELEMENTS };
enum { SCALES_FLOAT32, SCALES_E8M0, SCALES_E4M3 };

/* With `is_given` the scale of the tensor, or of the whole, is `given`. Matrices of `rows` rows of `length` elements in tiles of `height` times `size`; a size of 0: the whole. */
struct scaled_spec {
  struct float_spec element, e4m3;
  struct fixed_spec fixed;
  int64_t kind, scale_format, has_tensor_scale, max_exponent, carry;
  int64_t size, height, length, rows, is_given;
  float largest, tensor_largest, least_scale, most_scale, given;
  float values[SMALL_TABLE], thresholds[SMALL_TABLE];
};

INLINE float within(float x, float least, float most) {
  x = x < least ? least : x;
  return x > most ? most : x;
}

/* NaN for infinity and NaN. */
INLINE float amax_of(int32_t most) { return from_bits_f32(most >= INF ? QUIET_NAN : most); }

INLINE float e4m3_of(float scale, const struct scaled_spec *s) {
  return round_float_f32(within(scale, 0x1p-6f, 448.0f), NEAREST, 1, s->e4m3, 0);
}

/* Scales of blocks; or the tensor's, if there is one. */
INLINE float scale_for(int32_t most, const struct scaled_spec *s) {
  const float amax = amax_of(most);
  if (s->has_tensor_scale) return within(amax / s->tensor_largest, s->least_scale, s->most_scale);
  if (s->scale_format == SCALES_E8M0) {
    const int32_t carried = (int32_t)((uint32_t)most + (uint32_t)s->carry);
    int32_t field = (carried >> 23) - (int32_t)s->max_exponent;
    field = field < 1 ? 1 : field > 254 ? 254 : field;
    const float power = within(from_bits_f32(field << 23), s->least_scale, s->most_scale);
    return most >= INF ? amax : power;
  }
  const float scale = within(amax / s->largest, s->least_scale, s->most_scale);
  return s->scale_format == SCALES_E4M3 ? e4m3_of(scale, s) : scale;
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

/* What values are divided by, or multiplied with if `by_product`, and what elements are multiplied with. */
struct shared {
  float by, scale;
};

INLINE struct shared shared_of(float block, float tensor, const struct scaled_spec *s) {
  struct shared found = {block, block};
  if (s->scale_format == SCALES_E4M3) found.by = 1.0f / block;
  if (s->has_tensor_scale) found.by = 1.0f / tensor / block, found.scale = tensor * block;
  return found;
}

INLINE float table_element(float x, const struct scaled_spec *s) {
  float found = s->values[0];
#pragma GCC unroll 16
  for (int j = 0; j < SMALL_TABLE - 1; j++) found = x > s->thresholds[j] ? s->values[j + 1] : found;
  return x != x ? x : found;
}

#define SCALED_LOOP(MODE, QUOTIENT, ELEMENT)                                                   \
  SIMD for (int64_t i = 0; i < count; i++) {                                                   \
    const uint32_t noise =                                                                     \
        MODE == STOCHASTIC ? random_bits(index + (uint32_t)i, key0, key1) : 0;                 \
    const float x = in[i];                                                                     \
    float quotient = QUOTIENT;                                                                 \
    if (MODE == UP || MODE == DOWN) {                                                          \
      /* What the division made zero was not. */                                               \
      const int32_t bits = to_bits_f32(x), tiny = ONE << 23;                                   \
      const int is_lost = (to_bits_f32(quotient) & MAGNITUDE) < tiny && (bits & MAGNITUDE);    \
      quotient = is_lost ? from_bits_f32((bits & SIGN) | tiny) : quotient;                     \
    }                                                                                          \
    (void)noise;                                                                               \
    out[i] = (ELEMENT) * shared.scale;                                                         \
  }

#define EITHER (s->scale_format != SCALES_E4M3 ? x / shared.by : x * shared.by)

#define CASE_scaled(MODE)                                                                      \
  case MODE:                                                                                   \
    if (s->kind == FIXED_ELEMENTS) {                                                           \
      SCALED_LOOP(MODE, EITHER, round_fixed_f32(quotient, MODE, 0, fixed, noise))              \
    } else {                                                                                   \
      SCALED_LOOP(MODE, EITHER, round_float_f32(quotient, MODE, 0, element, noise))            \
    }                                                                                          \
    break;

/* Rounds neighbours that share a scale. */
static void scaled_part(const float *in, float *out, int64_t count, struct shared shared,
                        const struct scaled_spec *s, uint32_t index, uint32_t key0,
                        uint32_t key1) {
  const struct float_spec element = s->element;
  const struct fixed_spec fixed = s->fixed;
  if (s->kind == TABLE_ELEMENTS) {
    const struct scaled_spec copy = *s;
    SCALED_LOOP(NEAREST, EITHER, table_element(quotient, &copy))
  } else if (element.mode != NEAREST) {
    switch (element.mode) { EACH_MODE(CASE_scaled) }
  } else if (s->scale_format != SCALES_E4M3 && s->kind == FIXED_ELEMENTS) {
    SCALED_LOOP(NEAREST, x / shared.by, round_fixed_f32(quotient, NEAREST, 0, fixed, noise))
  } else if (s->kind == FIXED_ELEMENTS) {
    SCALED_LOOP(NEAREST, x * shared.by, round_fixed_f32(quotient, NEAREST, 0, fixed, noise))
  } else if (!is_plain_float_f32(element)) {
    SCALED_LOOP(NEAREST, EITHER, round_float_f32(quotient, NEAREST, 0, element, noise))
  } else if (s->scale_format != SCALES_E4M3) {
    SCALED_LOOP(NEAREST, x / shared.by, round_float_f32(quotient, NEAREST, 1, element, noise))
  } else {
    SCALED_LOOP(NEAREST, x * shared.by, round_float_f32(quotient, NEAREST, 1, element, noise))
  }
}

static void scaled_whole(const float *in, float *out, int64_t count, struct shared shared,
                         const struct scaled_spec *s, uint32_t key0, uint32_t key1, int threads) {
  (void)threads;
  PARALLEL {
    int64_t first, end;
    my_share(count, &first, &end);
    scaled_part(in + first, out + first, end - first, shared, s, (uint32_t)first, key0, key1);
  }
}

#define TILES 64

/* Tiles of 16 neighbours, of floats rounded to nearest. */
static void scaled_sixteens(const float *in, float *out, int64_t tiles, const float *by,
                            const float *scales, const struct scaled_spec *s) {
  const struct float_spec element = s->element;
  for (int64_t t = 0; t < tiles; t++) {
    const float factor = by[t], scale = scales[t];
    SIMD for (int64_t i = t * 16; i < t * 16 + 16; i++)
      out[i] = round_float_f32(in[i] * factor, NEAREST, 1, element, 0) * scale;
  }
}

/* The same as shared_of, of many tiles in a tensor that has a scale. */
static void shared_of_tiles(const int32_t *mosts, int64_t tiles, float tensor, float *by,
                            float *scales, const struct scaled_spec *s) {
  const struct float_spec e4m3 = s->e4m3;
  const float largest = s->largest, inverse = 1.0f / tensor;
  SIMD for (int64_t t = 0; t < tiles; t++) {
    const float scale = within(amax_of(mosts[t]) / largest / tensor, 0x1p-6f, 448.0f);
    const float block = round_float_f32(scale, NEAREST, 1, e4m3, 0);
    by[t] = inverse / block;
    scales[t] = tensor * block;
  }
}

static void scaled_tiles(const float *in, float *out, int64_t count, float tensor,
                         const struct scaled_spec *s, uint32_t key0, uint32_t key1, int threads) {
  const int64_t size = s->size, length = s->length;
  const int is_simple = size == 16 && s->height == 1 && s->scale_format == SCALES_E4M3 &&
                        s->kind == FLOAT_ELEMENTS && s->element.mode == NEAREST &&
                        is_plain_float_f32(s->element);
  const int64_t across = (length + size - 1) / size, down = (s->rows + s->height - 1) / s->height;
  (void)threads;
  PARALLEL {
    int64_t b, end;
    my_share(count / length / s->rows * down * across, &b, &end);
    while (b < end) {
      const int64_t column = b % across, row = b / across % down, matrix = b / across / down;
      const int64_t left = s->rows - row * s->height, height = left < s->height ? left : s->height;
      const int64_t place = (matrix * s->rows + row * s->height) * length + column * size;
      int64_t tiles = across - column < TILES ? across - column : TILES;
      tiles = end - b < tiles ? end - b : tiles;
      const int64_t last = length - (column + tiles - 1) * size;
      int32_t mosts[TILES] = {0};
      float by[TILES], scales[TILES];
      for (int64_t r = 0; r < height; r++)
        for (int64_t t = 0; t < tiles; t++) {
          const float *source = in + place + r * length + t * size;
          const int64_t width = t == tiles - 1 && last < size ? last : size;
          const int32_t most = width == 16 ? most_of(source, 16) : most_of(source, width);
          mosts[t] = most > mosts[t] ? most : mosts[t];
        }
      if (s->has_tensor_scale) {
        shared_of_tiles(mosts, tiles, tensor, by, scales, s);
      } else {
        for (int64_t t = 0; t < tiles; t++) {
          const struct shared found = shared_of(scale_for(mosts[t], s), tensor, s);
          by[t] = found.by, scales[t] = found.scale;
        }
      }
      if (is_simple && last >= size) {
        scaled_sixteens(in + place, out + place, tiles, by, scales, s);
        b += tiles;
        continue;
      }
      for (int64_t r = 0; r < height; r++)
        for (int64_t t = 0; t < tiles; t++) {
          const int64_t start = place + r * length + t * size;
          const int64_t width = t == tiles - 1 && last < size ? last : size;
          const struct shared shared = {by[t], scales[t]};
          scaled_part(in + start, out + start, width, shared, s, (uint32_t)start, key0, key1);
        }
      b += tiles;
    }
  }
}

API void scaled_f32(const float *in, float *out, int64_t count, const struct scaled_spec *s,
                    uint32_t key0, uint32_t key1, int threads) {
  float tensor = 1.0f;
  threads = threads < MOST_THREADS ? threads : MOST_THREADS;
  if (s->has_tensor_scale || !s->size) {
    const int is_read = !s->is_given || (s->has_tensor_scale && !s->size);
    const int32_t most = is_read ? most_of_all(in, count, threads) : 0;
    tensor = s->is_given ? within(s->given, s->least_scale, s->most_scale) : scale_for(most, s);
    if (!s->size) {
      const float block =
          s->has_tensor_scale ? e4m3_of(amax_of(most) / s->largest / tensor, s) : tensor;
      scaled_whole(in, out, count, shared_of(block, tensor, s), s, key0, key1, threads);
      return;
    }
  }
  scaled_tiles(in, out, count, tensor, s, key0, key1, threads);
}
