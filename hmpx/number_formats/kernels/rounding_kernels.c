/* Rounding to number formats on the CPU, as the plans of their families do in torch ops, bit for bit;
 * their codes, in code_kernels.h; the extremes of tensors; and functions of bfloat16, in
 * bfloat16_kernels.h.
 *
 * The specs mirror those plans; integers that hold bits of a value hold them in their low half
 * for float. Input and output may be the same. Compiled without any option that changes values.
 * This file includes itself, once for float and once for double. Conditions are masks of bits where
 * compilers would otherwise not make vectors of a loop.
 */
#ifndef REAL

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);
#endif

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* What the library was compiled from. */
#ifdef SOURCE_DIGEST
API const char *const source_digest = SOURCE_DIGEST;
#endif

enum { NEAREST, TOWARD_ZERO, UP, DOWN, NEAREST_AWAY, STOCHASTIC };

struct float_spec {
  int64_t mode, lowest, highest, lift, lowest_power, max, beyond, negative_zero;
};
struct bits_spec {
  int64_t mode, unit, lowest_unit, max, beyond, negative_zero, shift;
};
struct posit_spec {
  int64_t mode, bits, es, least, most, parity, last;
};
struct takum_spec {
  int64_t mode, bits, least, most, last;
};
struct fixed_spec {
  int64_t mode;
  double scale, step, least, most;
};
/* For some upper bits of a number: at most one threshold, and the index of the value below it. */
struct table_entry {
  float threshold;
  int32_t index;
};
struct table_spec {
  int64_t mode, count, shift, nan_index;
  const float *values, *thresholds;
  const struct table_entry *entries;
};
/* Tensors of [outer, length, inner] elements, of which `size` that lie `inner` apart are a block. */
struct block_spec {
  struct float_spec element;
  int64_t max_exponent, carry, size, length, inner;
};

/* random_bits of noise.py */
INLINE uint32_t random_bits(uint32_t index, uint32_t key0, uint32_t key1) {
  uint32_t mixed = index ^ key0;
  mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352Du;
  mixed ^= key1;
  mixed = (mixed ^ (mixed >> 15)) * 0x846CA68Bu;
  return mixed ^ (mixed >> 16);
}

/* The share of `count` items that this thread has, in multiples of 16. */
INLINE void my_share(int64_t count, int64_t *first, int64_t *end) {
  *first = 0;
  *end = count;
#ifdef _OPENMP
  int64_t threads = omp_get_num_threads(), self = omp_get_thread_num();
  int64_t share = (count + threads - 1) / threads;
  share = (share + 15) / 16 * 16;
  *first = self * share < count ? self * share : count;
  *end = *first + share < count ? *first + share : count;
#endif
}

#ifdef _OPENMP
#define PARALLEL _Pragma("omp parallel num_threads(threads) if (threads > 1)")
#else
#define PARALLEL
#endif
#define SIMD _Pragma("omp simd")

#define EACH_MODE(CASE) \
  CASE(NEAREST) CASE(TOWARD_ZERO) CASE(UP) CASE(DOWN) CASE(NEAREST_AWAY) CASE(STOCHASTIC)

/* The smallest and the largest of `count` numbers, at least one: as integers, which are in the order of
 * these once those of negative numbers are turned round. NaNs are beyond the infinities; any makes both
 * ends NaN. There are at most MOST_THREADS threads.
 */
#define MOST_THREADS 64
#define EXTREMES(type, INTEGER, LARGEST, INFINITE)                                             \
  API void extremes_##type(const INTEGER *in, int64_t count, float *out, int threads) {        \
    INTEGER lows[MOST_THREADS], highs[MOST_THREADS];                                           \
    for (int i = 0; i < threads; i++) lows[i] = (LARGEST), highs[i] = -(LARGEST)-1;            \
    PARALLEL {                                                                                 \
      int64_t first, end;                                                                      \
      INTEGER low = (LARGEST), high = -(LARGEST)-1;                                            \
      my_share(count, &first, &end);                                                           \
      _Pragma("omp simd reduction(min : low) reduction(max : high)")                           \
      for (int64_t i = first; i < end; i++) {                                                  \
        const INTEGER bits = in[i];                                                            \
        const INTEGER value = bits ^ ((bits >> (8 * sizeof bits - 1)) & (LARGEST));            \
        low = value < low ? value : low;                                                       \
        high = value > high ? value : high;                                                    \
      }                                                                                        \
      lows[THIS_THREAD] = low;                                                                 \
      highs[THIS_THREAD] = high;                                                               \
    }                                                                                          \
    for (int i = 1; i < threads; i++) {                                                        \
      lows[0] = lows[i] < lows[0] ? lows[i] : lows[0];                                         \
      highs[0] = highs[i] > highs[0] ? highs[i] : highs[0];                                    \
    }                                                                                          \
    const int has_nan = highs[0] > (INFINITE) || lows[0] < -(INFINITE)-1;                      \
    out[0] = has_nan ? NAN : type##_value(lows[0] < 0 ? lows[0] ^ (LARGEST) : lows[0]);        \
    out[1] = has_nan ? NAN : type##_value(highs[0] < 0 ? highs[0] ^ (LARGEST) : highs[0]);     \
  }
#ifdef _OPENMP
#define THIS_THREAD omp_get_thread_num()
#else
#define THIS_THREAD 0
#endif

INLINE float f32_value(int32_t bits) {
  float found;
  memcpy(&found, &bits, sizeof found);
  return found;
}

INLINE float bf16_value(int16_t bits) { return f32_value((int32_t)((uint32_t)bits << 16)); }

INLINE float f16_value(int16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  float found = ldexpf((float)fraction, -24);
  if (exponent) found = ldexpf((float)(1024 + fraction), exponent - 25);
  if (exponent == 31) found = INFINITY;
  return bits < 0 ? -found : found;
}

EXTREMES(f32, int32_t, 0x7FFFFFFF, 0x7F800000)
EXTREMES(bf16, int16_t, 0x7FFF, 0x7F80)
EXTREMES(f16, int16_t, 0x7FFF, 0x7C00)

#include "bfloat16_kernels.h"

#define REAL float
#define SINT int32_t
#define UINT uint32_t
#define MANTISSA 23
#define BIAS 127
#define NAME(name) name##_f32
#define IS_FLOAT 1
#include "rounding_kernels.c"
#undef REAL
#undef SINT
#undef UINT
#undef MANTISSA
#undef BIAS
#undef NAME
#undef IS_FLOAT

#define REAL double
#define SINT int64_t
#define UINT uint64_t
#define MANTISSA 52
#define BIAS 1023
#define NAME(name) name##_f64
#define IS_FLOAT 0
#include "rounding_kernels.c"

#else /* the body, for one type */

#define MAGNITUDE ((SINT)((UINT)-1 >> 1))
#define SIGN ((SINT)((UINT)1 << (sizeof(REAL) * 8 - 1)))
#define ONE ((SINT)1)
#define WIDTH_LESS_ONE ((int)sizeof(REAL) * 8 - 1)
#define INF (MAGNITUDE & -(ONE << MANTISSA))
#define QUIET_NAN (INF | (ONE << (MANTISSA - 1)))

INLINE SINT NAME(to_bits)(REAL value) {
  SINT found;
  memcpy(&found, &value, sizeof found);
  return found;
}

INLINE REAL NAME(from_bits)(SINT value) {
  REAL found;
  memcpy(&found, &value, sizeof found);
  return found;
}

/* Above 0 and up to 1. */
INLINE REAL NAME(uniform)(uint32_t noise) {
#if IS_FLOAT
  return (float)((int32_t)(noise >> 8) + 1) * 0x1p-24f;
#else
  return (double)((int64_t)noise + 1) * 0x1p-32;
#endif
}

/* `is_plain`: below the smallest normal number are subnormal ones, and -0 is a value. */
INLINE REAL NAME(round_float)(REAL x, int mode, int is_plain, struct float_spec s, uint32_t noise) {
  const SINT lowest = (SINT)s.lowest, highest = (SINT)s.highest, lift = (SINT)s.lift;
  const SINT lowest_power = (SINT)s.lowest_power, keep = s.negative_zero ? SIGN : 0;
  const REAL max = NAME(from_bits)((SINT)s.max), beyond = NAME(from_bits)((SINT)s.beyond);
  const SINT bits = NAME(to_bits)(x), whole = bits & MAGNITUDE, field = bits & INF;
  const SINT capped = field < highest ? field : highest;
  const SINT raised = (capped > lowest ? capped : lowest) + lift;
  const SINT power_bits = is_plain || field >= lowest ? raised : lowest_power;
  const REAL power = NAME(from_bits)(power_bits);
  const REAL magnitude = NAME(from_bits)(whole);
  REAL rounded = (magnitude + power) - power;
  REAL over = beyond;
  if (mode != NEAREST) {
    const SINT found = NAME(to_bits)(rounded);
    const SINT step_bits = power_bits - ((SINT)MANTISSA << MANTISSA);
    const REAL step = NAME(from_bits)(step_bits);
    const SINT is_below = -(SINT)(found < whole), is_above = -(SINT)(found > whole);
    const SINT grows = mode == UP ? ~(bits >> WIDTH_LESS_ONE) : mode == DOWN ? bits >> WIDTH_LESS_ONE : 0;
    const REAL inward = whole == INF ? beyond : max;
    if (mode == NEAREST_AWAY) {
      const SINT is_tie = -(SINT)(magnitude - rounded == step * (REAL)0.5);
      rounded += NAME(from_bits)(step_bits & is_tie);
    } else if (mode == STOCHASTIC) {
      /* The step is a power of two, by whose inverse is multiplied as exactly as it divides. */
      const REAL inverse = NAME(from_bits)(((SINT)(2 * BIAS) << MANTISSA) - step_bits);
      const REAL below = rounded - NAME(from_bits)(step_bits & is_above);
      const SINT is_drawn = -(SINT)((magnitude - below) * inverse >= NAME(uniform)(noise));
      rounded = below + NAME(from_bits)(step_bits & is_drawn);
    } else {
      const SINT moves = (grows & is_below) | (~grows & is_above);
      rounded += NAME(from_bits)(moves & (step_bits | (~grows & SIGN)));
      over = NAME(from_bits)((grows & NAME(to_bits)(beyond)) | (~grows & NAME(to_bits)(inward)));
    }
  }
  rounded = rounded > max ? over : rounded;
  const SINT result = NAME(to_bits)(rounded);
  return NAME(from_bits)(result | (bits & (is_plain || result ? SIGN : keep)));
}

INLINE REAL NAME(round_bits)(REAL x, int mode, int is_plain, struct bits_spec s, uint32_t noise) {
  const SINT bits = NAME(to_bits)(x), whole = bits & MAGNITUDE;
  const SINT max = (SINT)s.max, beyond = (SINT)s.beyond, keep = s.negative_zero ? SIGN : 0;
  const SINT unit =
      is_plain || whole >= ONE << MANTISSA ? (SINT)s.unit : (SINT)s.lowest_unit;
  const SINT half = unit >> 1;
  SINT added = 0, over = beyond;
  if (mode == NEAREST && is_plain) {
    const SINT is_cut = half != 0;
    added = half - is_cut + ((whole >> s.shift) & is_cut);
  } else if (mode == NEAREST) {
    added = half - (half != 0) + ((whole & unit) != 0 && half != 0);
  } else if (mode == NEAREST_AWAY) {
    added = half;
  } else if (mode == STOCHASTIC) {
    added = (SINT)((UINT)noise * (UINT)0x100000001u) & (unit - 1);
  } else {
    const SINT inward = whole == INF ? beyond : max;
    const int grows = mode == UP ? bits >= 0 : mode == DOWN ? bits < 0 : 0;
    added = grows ? unit - 1 : 0;
    over = grows ? beyond : inward;
  }
  SINT rounded = (SINT)((UINT)whole + (UINT)added) & -unit;
  rounded = rounded > max ? over : rounded;
  rounded = whole > INF ? whole : rounded;
  return NAME(from_bits)(rounded | (bits & (is_plain || rounded ? SIGN : keep)));
}

/* Formats whose precision tapers off, as tapered.py has it: `scaled` are the bits of x within the range, less
 * those of 1, of which `shift` are cut.
 */
INLINE REAL NAME(round_tapered)(REAL x, int mode, SINT scaled, SINT shift, SINT parity, SINT least,
                                SINT most, SINT last, uint32_t noise) {
  const SINT bits = NAME(to_bits)(x), whole = bits & MAGNITUDE, unit = ONE << shift;
  const int grows = mode == UP ? bits >= 0 : mode == DOWN ? bits < 0 : 0;
  SINT added = scaled;
  if (mode == NEAREST) {
    added += (unit >> 1) - 1 + (((scaled + parity) >> shift) & 1);
  } else if (mode == NEAREST_AWAY) {
    added += unit >> 1;
  } else if (mode == UP || mode == DOWN) {
    added += grows ? unit - 1 : 0;
  }
  SINT rounded = (added & -unit) + ((SINT)BIAS << MANTISSA);
  rounded = rounded > most ? most : rounded;
  if (mode == STOCHASTIC) {
    const SINT below = whole < least ? 0 : rounded;
    const SINT above = whole < least ? least : rounded + unit;
    const REAL low = NAME(from_bits)(below), high = NAME(from_bits)(above);
    const REAL magnitude = NAME(from_bits)(whole > most ? most : whole);
    rounded = (magnitude - low) / (high - low) >= NAME(uniform)(noise) ? above : below;
  } else if (mode != NEAREST && mode != NEAREST_AWAY) {
    rounded = whole < least && !grows ? 0 : rounded;
  }
  rounded = whole == 0 ? 0 : rounded;
  rounded = whole > last ? QUIET_NAN : rounded;
  return NAME(from_bits)(rounded | (rounded ? bits & SIGN : 0));
}

/* The bits of a magnitude, within a range, less those of 1. */
INLINE SINT NAME(scaled_bits)(REAL x, SINT least, SINT most) {
  const SINT whole = NAME(to_bits)(x) & MAGNITUDE;
  const SINT raised = whole < least ? least : whole;
  return (raised > most ? most : raised) - ((SINT)BIAS << MANTISSA);
}

INLINE REAL NAME(round_posit)(REAL x, int mode, int is_plain, struct posit_spec s, uint32_t noise) {
  (void)is_plain;
  const SINT least = (SINT)s.least, most = (SINT)s.most, most_length = (SINT)s.bits - 3;
  const SINT places = MANTISSA + (SINT)s.es, scaled = NAME(scaled_bits)(x, least, most);
  const SINT regime = scaled >> places;
  SINT length = regime < 0 ? ~regime : regime;
  length = length < most_length ? length : most_length;
  return NAME(round_tapered)(x, mode, scaled, length + places - most_length, (SINT)s.parity, least, most,
                             (SINT)s.last, noise);
}

#if !IS_FLOAT
INLINE REAL NAME(round_takum)(REAL x, int mode, int is_plain, struct takum_spec s, uint32_t noise) {
  (void)is_plain;
  const SINT scaled = NAME(scaled_bits)(x, s.least, s.most), exponent = scaled >> MANTISSA;
  const SINT near = (exponent < 0 ? ~exponent : exponent) + 1;
  /* Exponents beside 0 take no bits of a code, those furthest from it 7. */
  SINT shift = MANTISSA + 5 - s.bits;
  for (int power = 1; power <= 7; power++) shift += near >> power != 0;
  return NAME(round_tapered)(x, mode, scaled, shift, ONE << MANTISSA, s.least, s.most, s.last, noise);
}
#endif

INLINE REAL NAME(round_fixed)(REAL x, int mode, int is_plain, struct fixed_spec s, uint32_t noise) {
  (void)is_plain;
  const REAL scaled = x * (REAL)s.scale;
  const REAL least = (REAL)s.least, most = (REAL)s.most;
#if IS_FLOAT
#define ROUND(name) __builtin_##name##f
#else
#define ROUND(name) __builtin_##name
#endif
  REAL whole;
  if (mode == NEAREST) {
    whole = ROUND(nearbyint)(scaled);
  } else if (mode == UP) {
    whole = ROUND(ceil)(scaled);
  } else if (mode == DOWN) {
    whole = ROUND(floor)(scaled);
  } else if (mode == STOCHASTIC) {
    const REAL below = ROUND(floor)(scaled);
    whole = scaled - below >= NAME(uniform)(noise) ? below + 1 : below;
  } else {
    whole = ROUND(trunc)(scaled);
    if (mode == NEAREST_AWAY) {
      const REAL away = whole + (scaled < 0 ? (REAL)-1 : (REAL)1);
      whole = ROUND(fabs)(scaled - whole) >= (REAL)0.5 ? away : whole;
    }
  }
#undef ROUND
  whole = whole < least ? least : whole;
  whole = whole > most ? most : whole;
  const REAL result = whole * (REAL)s.step;
  return result == 0 ? 0 : result;
}

/* Where a tensor's elements `first` to `end` are rounded. The noise of an element depends on its place. */
#define CASE_OF(MODE, KIND, IS_PLAIN)                                                         \
  SIMD for (int64_t i = first; i < end; i++) {                                                \
    const uint32_t noise = MODE == STOCHASTIC ? random_bits((uint32_t)i, key0, key1) : 0;     \
    out[i - first] = NAME(round_##KIND)(in[i - first], MODE, IS_PLAIN, s, noise);             \
  }

#define CASE_BOTH(MODE, KIND)                                                                 \
  case MODE:                                                                                  \
    if (NAME(is_plain_##KIND)(s)) {                                                           \
      CASE_OF(MODE, KIND, 1)                                                                  \
    } else {                                                                                  \
      CASE_OF(MODE, KIND, 0)                                                                  \
    }                                                                                         \
    break;

#define CASE_ONE(MODE, KIND)                                                                  \
  case MODE:                                                                                  \
    CASE_OF(MODE, KIND, 0)                                                                    \
    break;

INLINE int NAME(is_plain_float)(struct float_spec s) {
  return s.negative_zero && s.lowest_power == s.lowest + s.lift;
}

INLINE int NAME(is_plain_bits)(struct bits_spec s) {
  return s.negative_zero && s.lowest_unit == s.unit;
}

#define KERNEL(KIND)                                                                          \
  static void NAME(KIND##_part)(const REAL *in, REAL *out, int64_t first, int64_t end,        \
                                const struct KIND##_spec *spec, uint32_t key0,                \
                                uint32_t key1) {                                              \
    const struct KIND##_spec s = *spec;                                                       \
    switch (s.mode) { EACH_MODE(CASE_##KIND) }                                                \
  }                                                                                           \
                                                                                              \
  API void NAME(KIND)(const REAL *in, REAL *out, int64_t count,                               \
                      const struct KIND##_spec *spec, uint32_t key0, uint32_t key1,           \
                      int threads) {                                                          \
    (void)threads;                                                                            \
    PARALLEL {                                                                                \
      int64_t first, end;                                                                     \
      my_share(count, &first, &end);                                                          \
      NAME(KIND##_part)(in + first, out + first, first, end, spec, key0, key1);               \
    }                                                                                         \
  }

#define CASE_float(MODE) CASE_BOTH(MODE, float)
#define CASE_bits(MODE) CASE_BOTH(MODE, bits)
#define CASE_posit(MODE) CASE_ONE(MODE, posit)
#define CASE_takum(MODE) CASE_ONE(MODE, takum)
#define CASE_fixed(MODE) CASE_ONE(MODE, fixed)

KERNEL(float)
KERNEL(bits)
KERNEL(posit)
#if !IS_FLOAT
KERNEL(takum)
#endif
KERNEL(fixed)

/* --- blocks, in float by scaled_kernels.h --- */

INLINE REAL NAME(power_of_two)(SINT exponent) {
  const SINT bits = (exponent + BIAS) << MANTISSA;
  return NAME(from_bits)(IS_FLOAT && bits == 0 ? ONE << (MANTISSA - 1) : bits);
}

/* The exponent that a block shares, given the bits of its largest magnitude. */
INLINE SINT NAME(shared_exponent)(SINT most, SINT carry, SINT max_exponent) {
  const SINT carried = (SINT)((UINT)most + (UINT)carry), highest = 127 - max_exponent;
  const SINT exponent = (carried >> MANTISSA) - BIAS - max_exponent;
  const SINT raised = exponent < -127 ? -127 : exponent;
  return raised > highest ? highest : raised;
}

#if !IS_FLOAT
/* Blocks that are worked on together. */
#define STRIP 64

/* An element divided by its block's scale. */
INLINE REAL NAME(unscaled)(REAL x, REAL inverse, int mode) {
  const REAL scaled = x * inverse;
  if (mode != UP && mode != DOWN) return scaled;
  /* What the division made zero was not. */
  const SINT bits = NAME(to_bits)(x), tiny = (SINT)(BIAS - 126) << MANTISSA;
  const SINT is_lost = -(SINT)((NAME(to_bits)(scaled) & MAGNITUDE) < tiny);
  const SINT is_other = -(SINT)((bits & MAGNITUDE) != 0), chosen = is_lost & is_other;
  return NAME(from_bits)((NAME(to_bits)(scaled) & ~chosen) | (((bits & SIGN) | tiny) & chosen));
}

/* The bits of the largest magnitudes of blocks. The elements of a block lie `inner` apart, `each` is
 * the distance of blocks.
 */
INLINE void NAME(largest)(const REAL *in, int64_t blocks, int64_t size, int64_t inner, int64_t each,
                          SINT *most) {
  if (inner == 1) {
    for (int64_t b = 0; b < blocks; b++) {
      SINT found = 0;
      SIMD for (int64_t i = 0; i < size; i++) {
        const SINT whole = NAME(to_bits)(in[b * each + i]) & MAGNITUDE;
        found = whole > found ? whole : found;
      }
      most[b] = found;
    }
    return;
  }
  for (int64_t b = 0; b < blocks; b++) most[b] = 0;
  for (int64_t i = 0; i < size; i++)
    SIMD for (int64_t b = 0; b < blocks; b++) {
      const SINT whole = NAME(to_bits)(in[i * inner + b]) & MAGNITUDE;
      most[b] = whole > most[b] ? whole : most[b];
    }
}

/* Some blocks of a tensor that lie beside each other. */
#ifndef STRIPS
#define STRIPS
struct strip {
  int64_t place, blocks, size, next;
  uint32_t index;
};

/* The strip of at most `most` blocks that begins with block `b`; `end` is beyond the last. Blocks are
 * counted in the order of their scales, [outer, blocks of a row, inner].
 */
INLINE struct strip strip_at(int64_t b, int64_t end, int64_t most, const struct block_spec *s) {
  const int64_t per_row = (s->length + s->size - 1) / s->size;
  const int64_t column = b % s->inner, row = b / s->inner % per_row, outer = b / s->inner / per_row;
  const int64_t left = s->length - row * s->size;
  int64_t blocks = s->inner - column;
  if (s->inner == 1) blocks = left / s->size ? left / s->size : 1;
  blocks = blocks < most ? blocks : most;
  blocks = blocks < end - b ? blocks : end - b;
  const struct strip found = {
      .place = (outer * s->length + row * s->size) * s->inner + column,
      .blocks = blocks,
      .size = left < s->size ? left : s->size,
      .next = b + blocks,
      .index = (uint32_t)((outer * s->inner + column) * s->length + row * s->size),
  };
  return found;
}

/* How many blocks there are among `count` elements. */
INLINE int64_t blocks_of(int64_t count, const struct block_spec *s) {
  return count / s->length * ((s->length + s->size - 1) / s->size);
}
#endif

struct NAME(scales) {
  SINT exponents[STRIP];
  REAL inverses[STRIP], scales[STRIP];
};

INLINE void NAME(find_scales)(const REAL *in, struct strip part, const struct block_spec *s,
                              struct NAME(scales) * found) {
  SINT most[STRIP];
  if (s->inner == 1 && part.size == 32)
    NAME(largest)(in, part.blocks, 32, 1, 32, most);
  else
    NAME(largest)(in, part.blocks, part.size, s->inner, s->size, most);
  SIMD for (int64_t b = 0; b < part.blocks; b++) {
    const SINT exponent = NAME(shared_exponent)(most[b], (SINT)s->carry, (SINT)s->max_exponent);
    found->exponents[b] = most[b] >= INF ? 128 : exponent;
    found->inverses[b] = NAME(power_of_two)(-exponent);
    found->scales[b] = most[b] >= INF ? NAME(from_bits)(QUIET_NAN) : NAME(power_of_two)(exponent);
  }
}

/* Rounds a strip: neighbours in a row if `inner` is 1, else side by side, with a row of elements
 * `out_inner` after the one before it.
 */
INLINE void NAME(round_strip)(const REAL *in, REAL *out, struct strip part, int64_t size, int mode,
                              int is_plain, const struct block_spec *spec, int64_t inner,
                              int64_t out_inner, const struct NAME(scales) * found,
                              uint32_t key0, uint32_t key1) {
  const struct float_spec s = spec->element;
  if (inner == 1) {
    for (int64_t b = 0; b < part.blocks; b++) {
      const REAL inverse = found->inverses[b], scale = found->scales[b];
      const int64_t start = b * spec->size;
      SIMD for (int64_t i = 0; i < size; i++) {
        const uint32_t place = part.index + (uint32_t)(start + i);
        const uint32_t noise = mode == STOCHASTIC ? random_bits(place, key0, key1) : 0;
        const REAL scaled = NAME(unscaled)(in[start + i], inverse, mode);
        out[start + i] = NAME(round_float)(scaled, mode, is_plain, s, noise) * scale;
      }
    }
    return;
  }
  const uint32_t length = (uint32_t)spec->length;
  const REAL *inverses = found->inverses, *scales = found->scales;
  for (int64_t i = 0; i < size; i++) {
    const REAL *row = in + i * inner;
    REAL *target = out + i * out_inner;
    SIMD for (int64_t b = 0; b < part.blocks; b++) {
      const uint32_t place = part.index + (uint32_t)i + (uint32_t)b * length;
      const uint32_t noise = mode == STOCHASTIC ? random_bits(place, key0, key1) : 0;
      const REAL scaled = NAME(unscaled)(row[b], inverses[b], mode);
      target[b] = NAME(round_float)(scaled, mode, is_plain, s, noise) * scales[b];
    }
  }
}

#define STRIP_BY(MODE, IS_PLAIN, SIZE, INNER)                                                 \
  NAME(round_strip)(in, out, part, SIZE, MODE, IS_PLAIN, s, INNER, out_inner, scales, key0, key1)

#define CASE_block(MODE)                                                                      \
  case MODE:                                                                                  \
    if (!is_plain)                                                                            \
      STRIP_BY(MODE, 0, part.size, s->inner);                                                 \
    else if (s->inner > 1)                                                                    \
      STRIP_BY(MODE, 1, part.size, s->inner);                                                 \
    else if (part.size == 32)                                                                 \
      STRIP_BY(MODE, 1, 32, 1);                                                               \
    else                                                                                      \
      STRIP_BY(MODE, 1, part.size, 1);                                                        \
    break;

/* Rounds one strip; both addresses are those of its first element. */
static void NAME(block_part)(const REAL *in, REAL *out, int64_t out_inner, struct strip part,
                             const struct NAME(scales) * scales, const struct block_spec *s,
                             uint32_t key0, uint32_t key1) {
  const int is_plain = NAME(is_plain_float)(s->element);
  switch (s->element.mode) { EACH_MODE(CASE_block) }
}

API void NAME(block)(const REAL *in, REAL *out, int64_t count, const struct block_spec *spec,
                     uint32_t key0, uint32_t key1, int threads) {
  (void)threads;
  PARALLEL {
    int64_t b, end;
    struct NAME(scales) scales;
    my_share(blocks_of(count, spec), &b, &end);
    while (b < end) {
      const struct strip part = strip_at(b, end, STRIP, spec);
      const REAL *source = in + part.place;
      NAME(find_scales)(source, part, spec, &scales);
      NAME(block_part)(source, out + part.place, spec->inner, part, &scales, spec, key0, key1);
      b = part.next;
    }
  }
}
#endif

#if IS_FLOAT
/* --- tables --- */

#include "small_tables.h"

/* One of the two values beside x, or a NaN. */
INLINE float table_pick(float x, float low, float high, int mode, uint32_t noise) {
  if (mode == STOCHASTIC) low = (x - low) / (high - low) >= uniform_f32(noise) ? high : low;
  return x != x ? x : low;
}

INLINE void table_small(const float *in, float *out, int64_t first, int64_t end,
                        const struct table_spec *s, int mode, uint32_t key0, uint32_t key1) {
  const struct small_table table = small_table_of(s->values, s->thresholds, s->count);
  int64_t i = first;
#ifdef LANES
  const struct small_search search = small_search_of(table.thresholds);
  for (; i + LANES <= end; i += LANES) {
    const __m256 x = _mm256_loadu_ps(in + i - first);
    const __m256i index = small_indices(x, &search);
    const __m256 low = small_values(index, table.values);
    if (mode != STOCHASTIC) {
      _mm256_storeu_ps(out + i - first, or_nan(x, low));
      continue;
    }
    float xs[LANES], lows[LANES], highs[LANES];
    _mm256_storeu_ps(xs, x);
    _mm256_storeu_ps(lows, low);
    _mm256_storeu_ps(highs, small_values(index, table.values + 1));
    SIMD for (int j = 0; j < LANES; j++) {
      const uint32_t noise = random_bits((uint32_t)(i + j), key0, key1);
      out[i - first + j] = table_pick(xs[j], lows[j], highs[j], mode, noise);
    }
  }
#endif
  for (; i < end; i++) {
    const float x = in[i - first];
    const int32_t index = small_index(x, table.thresholds);
    const uint32_t noise = mode == STOCHASTIC ? random_bits((uint32_t)i, key0, key1) : 0;
    out[i - first] = table_pick(x, table.values[index], table.values[index + 1], mode, noise);
  }
}

/* The index of the rounded value, the lower one if the mode is stochastic; of a NaN any. */
INLINE int32_t table_index(float x, const struct table_spec *s) {
  const struct table_entry entry = s->entries[(uint32_t)to_bits_f32(x) >> s->shift];
  return entry.index + (x > entry.threshold);
}

INLINE void table_large(const float *in, float *out, int64_t first, int64_t end,
                        const struct table_spec *s, int mode, uint32_t key0, uint32_t key1) {
  for (int64_t i = first; i < end; i++) {
    const float x = in[i - first];
    const int32_t index = table_index(x, s);
    const uint32_t noise = mode == STOCHASTIC ? random_bits((uint32_t)i, key0, key1) : 0;
    const float high = mode == STOCHASTIC ? s->values[index + 1] : 0;
    out[i - first] = table_pick(x, s->values[index], high, mode, noise);
  }
}

API void table_f32(const float *in, float *out, int64_t count, const struct table_spec *spec,
                   uint32_t key0, uint32_t key1, int threads) {
  const struct table_spec s = *spec;
  const int is_small = s.count <= SMALL_TABLE;
  (void)threads;
  PARALLEL {
    int64_t first, end;
    my_share(count, &first, &end);
    if (is_small && s.mode == STOCHASTIC)
      table_small(in + first, out + first, first, end, &s, STOCHASTIC, key0, key1);
    else if (is_small)
      table_small(in + first, out + first, first, end, &s, NEAREST, key0, key1);
    else if (s.mode == STOCHASTIC)
      table_large(in + first, out + first, first, end, &s, STOCHASTIC, key0, key1);
    else
      table_large(in + first, out + first, first, end, &s, NEAREST, key0, key1);
  }
}
#endif

#include "code_kernels.h"
#if IS_FLOAT
#include "scaled_kernels.h"
#endif

#undef MAGNITUDE
#undef SIGN
#undef ONE
#undef INF
#undef QUIET_NAN
#undef WIDTH_LESS_ONE
#undef CASE_OF
#undef CASE_BOTH
#undef CASE_ONE
#undef KERNEL
#undef CASE_float
#undef CASE_bits
#undef CASE_posit
#undef CASE_takum
#undef CASE_fixed
#undef CASE_block
#undef STRIP_BY
#undef STRIP

#endif
