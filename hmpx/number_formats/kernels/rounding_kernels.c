/* Rounding to number formats on the CPU, as the plans of their families do in torch ops, bit for bit; and
 * the extremes of tensors.
 *
 * The specs mirror those plans; integers that hold bits of a value hold them in their low half
 * for float. Input and output may be the same. Compiled without any option that changes values.
 * This file includes itself, once for float and once for double.
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

enum { NEAREST, TOWARD_ZERO, UP, DOWN, NEAREST_AWAY, STOCHASTIC };

struct float_spec {
  int64_t mode, lowest, highest, lift, lowest_power, max, beyond, negative_zero;
};
struct bits_spec {
  int64_t mode, unit, lowest_unit, max, beyond, negative_zero;
};
struct posit_spec {
  int64_t mode, bits, es, least, most, parity, last;
};
struct fixed_spec {
  int64_t mode;
  double scale, step, least, most;
};
/* For some upper bits of a number: at most one threshold, and the values on both sides of it. */
struct table_entry {
  float threshold, values[2];
};
struct table_spec {
  int64_t count, shift;
  const float *values, *thresholds;
  const struct table_entry *entries;
};
struct block_spec {
  struct float_spec element;
  int64_t max_exponent, size, length;
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

INLINE REAL NAME(round_float)(REAL x, int mode, struct float_spec s, uint32_t noise) {
  const SINT lowest = (SINT)s.lowest, highest = (SINT)s.highest, lift = (SINT)s.lift;
  const SINT lowest_power = (SINT)s.lowest_power, keep = s.negative_zero ? SIGN : 0;
  const REAL max = NAME(from_bits)((SINT)s.max), beyond = NAME(from_bits)((SINT)s.beyond);
  const SINT bits = NAME(to_bits)(x), whole = bits & MAGNITUDE, field = bits & INF;
  const SINT capped = field < highest ? field : highest;
  const REAL power = NAME(from_bits)(field < lowest ? lowest_power : capped + lift);
  const REAL magnitude = NAME(from_bits)(whole);
  REAL rounded = (magnitude + power) - power;
  REAL over = beyond;
  if (mode != NEAREST) {
    const SINT found = NAME(to_bits)(rounded);
    const REAL step = power * (IS_FLOAT ? 0x1p-23f : 0x1p-52);
    const REAL higher = rounded + step, lower = rounded - step;
    const int is_below = found < whole, is_above = found > whole;
    const REAL inward = whole == INF ? beyond : max;
    if (mode == NEAREST_AWAY) {
      rounded = magnitude - rounded == step * (REAL)0.5 ? higher : rounded;
    } else if (mode == STOCHASTIC) {
      const REAL below = is_above ? lower : rounded;
      rounded = (magnitude - below) / step >= NAME(uniform)(noise) ? below + step : below;
    } else if (mode == TOWARD_ZERO) {
      rounded = is_above ? lower : rounded;
      over = inward;
    } else {
      const int grows = mode == UP ? bits >= 0 : bits < 0;
      const REAL outward = is_below ? higher : rounded;
      rounded = is_above ? lower : rounded;
      rounded = grows ? (is_above ? NAME(from_bits)(found) : outward) : rounded;
      over = grows ? beyond : inward;
    }
  }
  rounded = rounded > max ? over : rounded;
  const SINT result = NAME(to_bits)(rounded);
  return NAME(from_bits)(result | (bits & (result ? SIGN : keep)));
}

INLINE REAL NAME(round_bits)(REAL x, int mode, struct bits_spec s, uint32_t noise) {
  const SINT bits = NAME(to_bits)(x), whole = bits & MAGNITUDE;
  const SINT max = (SINT)s.max, beyond = (SINT)s.beyond, keep = s.negative_zero ? SIGN : 0;
  const SINT unit = whole < ONE << MANTISSA ? (SINT)s.lowest_unit : (SINT)s.unit;
  const SINT half = unit >> 1;
  SINT added = 0, over = beyond;
  if (mode == NEAREST) {
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
  return NAME(from_bits)(rounded | (bits & (rounded ? SIGN : keep)));
}

INLINE REAL NAME(round_posit)(REAL x, int mode, struct posit_spec s, uint32_t noise) {
  const SINT least = (SINT)s.least, most = (SINT)s.most, parity = (SINT)s.parity;
  const SINT last = (SINT)s.last, places = MANTISSA + (SINT)s.es, bits_of_code = (SINT)s.bits;
  const SINT bits = NAME(to_bits)(x), whole = bits & MAGNITUDE;
  const SINT start = (SINT)BIAS << MANTISSA;
  SINT clamped = whole < least ? least : whole;
  clamped = clamped > most ? most : clamped;
  const SINT scaled = clamped - start;
  const SINT regime = scaled >> places;
  SINT length = regime < 0 ? ~regime : regime;
  length = length < bits_of_code - 3 ? length : bits_of_code - 3;
  const SINT shift = length + places + 3 - bits_of_code;
  const SINT unit = ONE << shift;
  const int grows = mode == UP ? bits >= 0 : mode == DOWN ? bits < 0 : 0;
  SINT added = scaled;
  if (mode == NEAREST) {
    added += (unit >> 1) - 1 + (((scaled + parity) >> shift) & 1);
  } else if (mode == NEAREST_AWAY) {
    added += unit >> 1;
  } else if (mode == UP || mode == DOWN) {
    added += grows ? unit - 1 : 0;
  }
  SINT rounded = (added & -unit) + start;
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

INLINE REAL NAME(round_fixed)(REAL x, int mode, struct fixed_spec s, uint32_t noise) {
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

#define CASE_OF(MODE, KIND)                                                                   \
  case MODE:                                                                                  \
    SIMD for (int64_t i = first; i < end; i++) {                                              \
      const uint32_t noise =                                                                  \
          MODE == STOCHASTIC ? random_bits((uint32_t)i, key0, key1) : 0;                      \
      out[i] = NAME(round_##KIND)(in[i], MODE, s, noise);                                     \
    }                                                                                         \
    break;

#define KERNEL(KIND)                                                                          \
  API void NAME(KIND)(const REAL *in, REAL *out, int64_t count,                               \
                      const struct KIND##_spec *spec, uint32_t key0, uint32_t key1,           \
                      int threads) {                                                          \
    const struct KIND##_spec s = *spec;                                                       \
    (void)threads;                                                                            \
    PARALLEL {                                                                                \
      int64_t first, end;                                                                     \
      my_share(count, &first, &end);                                                          \
      switch (s.mode) { EACH_MODE(CASE_##KIND) }                                              \
    }                                                                                         \
  }

#define CASE_float(MODE) CASE_OF(MODE, float)
#define CASE_bits(MODE) CASE_OF(MODE, bits)
#define CASE_posit(MODE) CASE_OF(MODE, posit)
#define CASE_fixed(MODE) CASE_OF(MODE, fixed)

KERNEL(float)
KERNEL(bits)
KERNEL(posit)
KERNEL(fixed)

INLINE REAL NAME(power_of_two)(SINT exponent) {
  const SINT bits = (exponent + BIAS) << MANTISSA;
  return NAME(from_bits)(IS_FLOAT && bits == 0 ? ONE << (MANTISSA - 1) : bits);
}

INLINE void NAME(round_block)(const REAL *in, REAL *out, int64_t size, int mode,
                              struct block_spec s, uint32_t index, uint32_t key0,
                              uint32_t key1) {
  SINT most = 0;
  SIMD
  for (int64_t i = 0; i < size; i++) {
    const SINT whole = NAME(to_bits)(in[i]) & MAGNITUDE;
    most = whole > most ? whole : most;
  }
  SINT exponent = (most >> MANTISSA) - BIAS - (SINT)s.max_exponent;
  exponent = exponent < -127 ? -127 : exponent > 127 ? 127 : exponent;
  const REAL inverse = NAME(power_of_two)(-exponent);
  const REAL scale = most >= INF ? NAME(from_bits)(QUIET_NAN) : NAME(power_of_two)(exponent);
  SIMD
  for (int64_t i = 0; i < size; i++) {
    const uint32_t noise = mode == STOCHASTIC ? random_bits(index + (uint32_t)i, key0, key1) : 0;
    REAL scaled = in[i] * inverse;
    if (mode == UP || mode == DOWN) {
      /* What the division made zero was not. */
      const SINT bits = NAME(to_bits)(in[i]);
      const SINT tiny = (SINT)(BIAS - 126) << MANTISSA;
      const int is_lost = (NAME(to_bits)(scaled) & MAGNITUDE) < tiny && (bits & MAGNITUDE) != 0;
      scaled = is_lost ? NAME(from_bits)((bits & SIGN) | tiny) : scaled;
    }
    out[i] = NAME(round_float)(scaled, mode, s.element, noise) * scale;
  }
}

/* Rows of s.length elements, one after the other. */
#define CASE_block(MODE)                                                                      \
  case MODE:                                                                                  \
    for (int64_t b = first; b < end; b++) {                                                   \
      const int64_t place = b / per_row * s.length + b % per_row * s.size;                    \
      const int64_t left = s.length - b % per_row * s.size;                                   \
      if (s.size == 32 && left >= 32)                                                         \
        NAME(round_block)(in + place, out + place, 32, MODE, s, (uint32_t)place, key0, key1); \
      else                                                                                    \
        NAME(round_block)(in + place, out + place, left < s.size ? left : s.size, MODE, s,    \
                          (uint32_t)place, key0, key1);                                       \
    }                                                                                         \
    break;

API void NAME(block)(const REAL *in, REAL *out, int64_t count, const struct block_spec *spec,
                     uint32_t key0, uint32_t key1, int threads) {
  const struct block_spec s = *spec;
  const int64_t per_row = (s.length + s.size - 1) / s.size;
  (void)threads;
  PARALLEL {
    int64_t first, end;
    my_share(count / s.length * per_row, &first, &end);
    switch (s.element.mode) { EACH_MODE(CASE_block) }
  }
}

#if IS_FLOAT
#define SMALL_TABLE 16

API void table_f32(const float *in, float *out, int64_t count, const struct table_spec *spec,
                   uint32_t key0, uint32_t key1, int threads) {
  const struct table_spec s = *spec;
  (void)key0, (void)key1, (void)threads;
  PARALLEL {
    int64_t first, end;
    my_share(count, &first, &end);
    if (s.count <= SMALL_TABLE) {
      float values[SMALL_TABLE], thresholds[SMALL_TABLE];
      for (int j = 0; j < SMALL_TABLE; j++) {
        values[j] = s.values[j < s.count ? j : s.count - 1];
        thresholds[j] = j < s.count - 1 ? s.thresholds[j] : INFINITY;
      }
      SIMD
      for (int64_t i = first; i < end; i++) {
        const float x = in[i];
        float found = values[0];
#pragma GCC unroll 16
        for (int j = 0; j < SMALL_TABLE - 1; j++)
          found = x > thresholds[j] ? values[j + 1] : found;
        out[i] = x != x ? x : found;
      }
    } else {
      const int shift = (int)s.shift;
#pragma GCC ivdep
      for (int64_t i = first; i < end; i++) {
        const float x = in[i];
        const struct table_entry *entry = s.entries + ((uint32_t)to_bits_f32(x) >> shift);
        const float found = entry->values[x > entry->threshold];
        out[i] = x != x ? x : found;
      }
    }
  }
}
#endif

#undef MAGNITUDE
#undef SIGN
#undef ONE
#undef INF
#undef QUIET_NAN
#undef CASE_OF
#undef KERNEL
#undef CASE_float
#undef CASE_bits
#undef CASE_posit
#undef CASE_fixed
#undef CASE_block

#endif
