/* Codes of number formats: the bits in which hardware stores values, as the families make them in torch
 * ops. A part of rounding_kernels.c, which includes it once for float and once for double.
 */
#ifndef CODE_SPECS
#define CODE_SPECS

/* The first numbers are for encoding, `mask` and what follows for decoding. */
struct float_codes {
  int64_t dropped, rebias, low_limit, low_power, sign_place, infinity, nan, nan_keeps, nan_flips;
  int64_t mask, first_normal, step, infinite, last_number, nan_code;
};
struct posit_codes {
  int64_t bits, es, max_exponent;
};
struct fixed_codes {
  int64_t bits;
  double scale, step;
};
struct table_codes {
  int64_t mask;
  const void *values;
};

#define bits_codes float_codes
#define block_codes float_codes

/* Elements of a part that stays in the cache. */
#define PART 1024

#endif

/* Widths of codes in bytes: float holds no values of longer ones. */
#if IS_FLOAT
#define EACH_WIDTH(CASE) CASE(1, uint8_t) CASE(2, uint16_t) CASE(4, uint32_t)
#else
#define EACH_WIDTH(CASE) CASE(1, uint8_t) CASE(2, uint16_t) CASE(4, uint32_t) CASE(8, uint64_t)
#endif

/* A code that is not negative, which is said so that compilers narrow it, and not all that it is made of. */
INLINE SINT NAME(whole_code)(UINT code) { return (SINT)code > 0 ? (SINT)code : 0; }

#define NARROWED(WIDTH, code) (WIDTH < (int)sizeof(REAL) ? (UINT)NAME(whole_code)(code) : (code))

INLINE UINT NAME(code_float)(REAL value, struct float_codes s) {
  const SINT bits = NAME(to_bits)(value), whole = bits & MAGNITUDE;
  const REAL power = NAME(from_bits)((SINT)s.low_power);
  /* Adding a power of two leaves multiples of the smallest number in the lowest bits. */
  const SINT low = NAME(to_bits)(NAME(from_bits)(whole) + power) - (SINT)s.low_power;
  SINT code = (SINT)((UINT)(whole >> s.dropped) - (UINT)s.rebias);
  code = whole < (SINT)s.low_limit ? low : code;
  code = whole == INF ? (SINT)s.infinity : code;
  code = whole > INF ? (SINT)s.nan : code;
  const UINT sign = (UINT)bits >> WIDTH_LESS_ONE;
  const UINT of_nan = (sign & (UINT)s.nan_keeps) ^ (UINT)s.nan_flips;
  return (UINT)code | ((whole > INF ? of_nan : sign) << s.sign_place);
}

/* `is_short`: there is no infinity, and no NaN but beyond the last number. */
INLINE REAL NAME(value)(UINT code, struct float_codes s, const int is_short) {
  const SINT whole = (SINT)(code & (UINT)s.mask);
  const SINT sign = (SINT)((code >> s.sign_place) << WIDTH_LESS_ONE);
  const REAL low = (REAL)whole * NAME(from_bits)((SINT)s.step);
  SINT bits = (SINT)(((UINT)whole << s.dropped) + ((UINT)s.rebias << s.dropped));
  bits = whole < (SINT)s.first_normal ? NAME(to_bits)(low) : bits;
  if (!is_short) bits = whole == (SINT)s.infinite ? INF : bits;
  bits = whole > (SINT)s.last_number ? QUIET_NAN : bits;
  if (!is_short) bits = (whole | (sign & SIGN)) == (SINT)s.nan_code ? QUIET_NAN : bits;
  return NAME(from_bits)(bits | sign);
}

INLINE int NAME(is_short)(struct float_codes s) { return s.infinite < 0 && s.nan_code == -1; }

INLINE UINT NAME(code_posit)(REAL value, struct posit_codes s) {
  const int bits_of_code = (int)s.bits, places = MANTISSA + (int)s.es;
  const SINT bits = NAME(to_bits)(value), whole = bits & MAGNITUDE;
  const SINT most = (SINT)s.max_exponent << MANTISSA;
  SINT scaled = whole - ((SINT)BIAS << MANTISSA);
  scaled = scaled < -most ? -most : scaled;
  scaled = scaled > most ? most : scaled;
  const SINT regime = scaled >> places, is_low = regime >> WIDTH_LESS_ONE;
  SINT kept = bits_of_code - 3 - (regime ^ is_low);
  kept = kept < 0 ? 0 : kept;
  /* 1...10 above 1, 0...01 below */
  const SINT ones = ((regime + 2) & ~is_low);
  const SINT run = ((((ONE << ones) - 2) & ~is_low) | (1 & is_low)) << kept;
  SINT code = run | ((scaled & ((ONE << places) - 1)) >> (places - kept));
  code = regime == bits_of_code - 2 ? (ONE << (bits_of_code - 1)) - 1 : code;
  const SINT is_negative = bits >> WIDTH_LESS_ONE;
  UINT found = (UINT)((code ^ is_negative) - is_negative);
  found &= ((UINT)2 << (bits_of_code - 1)) - 1;
  found = whole == 0 ? 0 : found;
  return whole > INF ? (UINT)1 << (bits_of_code - 1) : found;
}

/* For up to MANTISSA + 2 bits, so that the number of a code is a value of the type. */
INLINE REAL NAME(value_posit)(UINT code, struct posit_codes s) {
  const int bits = (int)s.bits, es = (int)s.es;
  const SINT all = (ONE << (bits - 1)) - 1;
  const SINT masked = (SINT)(code & (((UINT)2 << (bits - 1)) - 1));
  const SINT is_negative = -(masked >> (bits - 1));
  const SINT whole = ((masked ^ is_negative) - is_negative) & all;
  const SINT is_above = -(whole >> (bits - 2));
  /* The run of leading bits ends at the highest bit that differs from the first. */
  const SINT differing = whole ^ (is_above & all);
  const SINT exponent_of = (NAME(to_bits)((REAL)differing) >> MANTISSA) - BIAS;
  const SINT highest = differing == 0 ? -1 : exponent_of;
  const SINT run = bits - 2 - highest;
  const SINT regime = ((run - 1) & is_above) | (-run & ~is_above);
  const SINT left = highest < 0 ? 0 : highest;
  const UINT rest = (UINT)(whole & ((ONE << left) - 1)) << (MANTISSA + es - left);
  const UINT lifted = ((UINT)regime << es) + (rest >> MANTISSA) + BIAS;
  SINT found = (SINT)((lifted << MANTISSA) | (rest & (((UINT)1 << MANTISSA) - 1)));
  found = masked == 0 ? 0 : found | (is_negative & SIGN);
  return NAME(from_bits)(masked == ONE << (bits - 1) ? QUIET_NAN : found);
}

INLINE UINT NAME(code_fixed)(REAL value, struct fixed_codes s) {
  const REAL scaled = value * (REAL)s.scale;
  const SINT code = (SINT)(value != value ? 0 : scaled);
  return (UINT)code & (((UINT)2 << (s.bits - 1)) - 1);
}

INLINE REAL NAME(value_fixed)(UINT code, struct fixed_codes s) {
  const int unused = (int)sizeof(REAL) * 8 - (int)s.bits;
  return (REAL)((SINT)(code << unused) >> unused) * (REAL)s.step;
}

/* The code of a number rounded to nearest in a format that rounds by addition: what the addition leaves
 * in the lowest bits are steps of the number's binade, below which there are others: as many as the
 * exponent says, `dropped` bits further down. `first` is what that comes to for 0.
 */
INLINE UINT NAME(direct_float)(REAL x, struct float_spec s, struct float_codes c, SINT first,
                               SINT largest, SINT beyond, SINT nan, const int is_signed) {
  const SINT lowest = (SINT)s.lowest, highest = (SINT)s.highest;
  const SINT bits = NAME(to_bits)(x), whole = bits & MAGNITUDE;
  const SINT capped = whole < highest ? whole : highest, field = capped & INF;
  const SINT power = (field > lowest ? field : lowest) + (SINT)s.lift;
  const SINT sum = NAME(to_bits)(NAME(from_bits)(capped) + NAME(from_bits)(power));
  SINT code = (SINT)((UINT)(sum + (sum >> c.dropped)) - (UINT)first) & ((ONE << MANTISSA) - 1);
  code = code > largest ? beyond : code;
  code = whole > INF ? nan : code;
  const SINT place = ONE << c.sign_place;
  const SINT turned = code ^ ((bits >> (WIDTH_LESS_ONE - c.sign_place)) & place);
  if (is_signed) return (UINT)turned;
  /* Neither zero nor a code of NaN has a sign. */
  return (UINT)((code & ~place) ? turned : code);
}

/* The same of a format with the exponents of the type. */
INLINE UINT NAME(direct_bits)(REAL x, struct bits_spec s, struct float_codes c) {
  const SINT bits = NAME(to_bits)(NAME(round_bits)(x, NEAREST, 1, s, 0));
  const UINT found = (UINT)bits >> c.dropped;
  const UINT sign = (((UINT)bits >> WIDTH_LESS_ONE) & (UINT)c.nan_keeps) ^ (UINT)c.nan_flips;
  const UINT nan = (UINT)c.nan | (sign << c.sign_place);
  return (bits & MAGNITUDE) > INF ? nan : found;
}

/* The same of a posit: codes of neighbours follow each other, also where the regime changes. */
INLINE UINT NAME(direct_posit)(REAL x, struct posit_spec s) {
  const SINT least = (SINT)s.least, most = (SINT)s.most, places = MANTISSA + (SINT)s.es;
  const SINT bits = NAME(to_bits)(x), whole = bits & MAGNITUDE, top = (SINT)s.bits - 3;
  SINT clamped = whole < least ? least : whole;
  clamped = clamped > most ? most : clamped;
  const SINT scaled = clamped - ((SINT)BIAS << MANTISSA);
  const SINT regime = scaled >> places, is_low = regime >> WIDTH_LESS_ONE;
  SINT length = regime ^ is_low;
  length = length < top ? length : top;
  const SINT kept = top - length, shift = places - kept;
  const SINT half = (ONE << shift) >> 1, is_odd = ((scaled + (SINT)s.parity) >> shift) & 1;
  const SINT rest = (scaled & ((ONE << places) - 1)) + half - 1 + is_odd;
  /* 1...10 above 1, 0...01 below */
  const SINT ones = (regime + 2) & ~is_low;
  const SINT run = ((((ONE << ones) - 2) & ~is_low) | (1 & is_low)) << kept;
  SINT code = run + (rest >> shift);
  code = code < (ONE << (top + 2)) - 1 ? code : (ONE << (top + 2)) - 1;
  const SINT is_negative = bits >> WIDTH_LESS_ONE;
  UINT found = (UINT)((code ^ is_negative) - is_negative) & (((UINT)2 << (top + 2)) - 1);
  found = whole == 0 ? 0 : found;
  return whole > (SINT)s.last ? (UINT)1 << (top + 2) : found;
}

#define DIRECT_OF(WIDTH, CODE)                                                                 \
  case WIDTH:                                                                                  \
    SIMD for (int64_t i = first; i < end; i++) ((CODE *)out)[i] =                              \
        (CODE)NARROWED(WIDTH, DIRECT(in[i]));                                                  \
    break;

/* For formats with -0 or without. */
static void NAME(directly_float)(const REAL *in, void *out, int64_t first, int64_t end,
                                 const struct float_spec *spec, const struct float_codes *codes,
                                 int width) {
  const struct float_spec s = *spec;
  const struct float_codes c = *codes;
  const UINT power = (UINT)(s.lowest + s.lift);
  const SINT base = (SINT)(power + (power >> c.dropped));
  const SINT largest = (SINT)NAME(code_float)(NAME(from_bits)((SINT)s.max), c);
  const SINT beyond = (SINT)NAME(code_float)(NAME(from_bits)((SINT)s.beyond), c);
  const SINT nan = (SINT)((UINT)c.nan | ((UINT)c.nan_flips << c.sign_place));
  if (s.negative_zero) {
#define DIRECT(x) NAME(direct_float)(x, s, c, base, largest, beyond, nan, 1)
    switch (width) { EACH_WIDTH(DIRECT_OF) }
#undef DIRECT
  } else {
#define DIRECT(x) NAME(direct_float)(x, s, c, base, largest, beyond, nan, 0)
    switch (width) { EACH_WIDTH(DIRECT_OF) }
#undef DIRECT
  }
}

static void NAME(directly_bits)(const REAL *in, void *out, int64_t first, int64_t end,
                                const struct bits_spec *spec, const struct float_codes *codes,
                                int width) {
  const struct bits_spec s = *spec;
  const struct float_codes c = *codes;
#define DIRECT(x) NAME(direct_bits)(x, s, c)
  switch (width) { EACH_WIDTH(DIRECT_OF) }
#undef DIRECT
}

static void NAME(directly_posit)(const REAL *in, void *out, int64_t first, int64_t end,
                                 const struct posit_spec *spec, int width) {
  const struct posit_spec s = *spec;
#define DIRECT(x) NAME(direct_posit)(x, s)
  switch (width) { EACH_WIDTH(DIRECT_OF) }
#undef DIRECT
}

#define STORE_OF(WIDTH, CODE)                                                                  \
  case WIDTH:                                                                                  \
    SIMD for (int64_t i = 0; i < count; i++) ((CODE *)out)[i] =                                \
        (CODE)NARROWED(WIDTH, CODE_OF(in[i], s));                                              \
    break;

#define LOAD_OF(WIDTH, CODE)                                                                   \
  case WIDTH:                                                                                  \
    SIMD for (int64_t i = 0; i < count; i++) out[i] = VALUE_OF(((const CODE *)in)[i], s);      \
    break;

#define CODER(KIND)                                                                            \
  static void NAME(store_##KIND)(const REAL *in, void *out, int64_t count,                     \
                                 const struct KIND##_codes *codes, int width) {                \
    const struct KIND##_codes s = *codes;                                                      \
    switch (width) { EACH_WIDTH(STORE_OF) }                                                    \
  }                                                                                            \
                                                                                               \
  static void NAME(load_##KIND)(const void *in, REAL *out, int64_t count,                      \
                                const struct KIND##_codes *codes, int width) {                 \
    const struct KIND##_codes s = *codes;                                                      \
    LOADED_FIRST_##KIND                                                                        \
    switch (width) { EACH_WIDTH(LOAD_OF) }                                                     \
  }

#define LOADED_FIRST_float                                                                     \
  if (width == 1 && NAME(is_short)(s)) {                                                       \
    const uint8_t *source = in;                                                                \
    SIMD for (int64_t i = 0; i < count; i++) out[i] = NAME(value)(source[i], s, 1);            \
    return;                                                                                    \
  }
#define LOADED_FIRST_posit
#define LOADED_FIRST_fixed

/* Rounds numbers to codes. */
#define ENCODER(KIND, CODED)                                                                   \
  API void NAME(encode_##KIND)(const REAL *in, char *out, int64_t count,                       \
                               const struct KIND##_spec *spec, uint32_t key0, uint32_t key1,   \
                               int threads, const struct KIND##_codes *codes, int width) {     \
    (void)threads;                                                                             \
    PARALLEL {                                                                                 \
      int64_t first, end;                                                                      \
      REAL part[PART];                                                                         \
      my_share(count, &first, &end);                                                           \
      DIRECT_##KIND                                                                            \
      for (int64_t start = first; start < end; start += PART) {                                \
        const int64_t next = start + PART < end ? start + PART : end;                          \
        NAME(KIND##_part)(in + start, part, start, next, spec, key0, key1);                    \
        NAME(store_##CODED)(part, out + start * width, next - start, codes, width);            \
      }                                                                                        \
    }                                                                                          \
  }

#define DECODER(KIND)                                                                          \
  API void NAME(decode_##KIND)(const char *in, REAL *out, int64_t count,                       \
                               const struct KIND##_codes *codes, int width, int threads) {     \
    (void)threads;                                                                             \
    PARALLEL {                                                                                 \
      int64_t first, end;                                                                      \
      my_share(count, &first, &end);                                                           \
      NAME(load_##KIND)(in + first * width, out + first, end - first, codes, width);           \
    }                                                                                          \
  }

#define CODE_OF NAME(code_float)
#define VALUE_OF(code, s) NAME(value)(code, s, 0)
CODER(float)
#undef CODE_OF
#undef VALUE_OF
#define CODE_OF NAME(code_posit)
#define VALUE_OF NAME(value_posit)
CODER(posit)
#undef CODE_OF
#undef VALUE_OF
#define CODE_OF NAME(code_fixed)
#define VALUE_OF NAME(value_fixed)
CODER(fixed)
#undef CODE_OF
#undef VALUE_OF

#define DIRECT_float                                                                           \
  if (spec->mode == NEAREST && spec->lowest_power == spec->lowest + spec->lift &&              \
      MANTISSA - codes->dropped + 1 < codes->dropped) {                                        \
    NAME(directly_float)(in, out, first, end, spec, codes, width);                             \
    first = end;                                                                               \
  }
#define DIRECT_bits                                                                            \
  if (spec->mode == NEAREST && NAME(is_plain_bits)(*spec) && !codes->low_limit) {              \
    NAME(directly_bits)(in, out, first, end, spec, codes, width);                              \
    first = end;                                                                               \
  }
#define DIRECT_posit                                                                           \
  if (spec->mode == NEAREST) {                                                                 \
    NAME(directly_posit)(in, out, first, end, spec, width);                                    \
    first = end;                                                                               \
  }
#define DIRECT_fixed
ENCODER(float, float)
ENCODER(bits, float)
ENCODER(posit, posit)
ENCODER(fixed, fixed)
DECODER(float)
DECODER(posit)
DECODER(fixed)

#if !IS_FLOAT
/* --- blocks --- */

/* Of a buffer for the elements of a strip, and thus of the largest block that is encoded. */
#ifndef STRIP_ELEMENTS
#define STRIP_ELEMENTS 2048
#endif

#define BLOCK_STORE_OF(WIDTH, CODE)                                                            \
  case WIDTH:                                                                                  \
    SIMD for (int64_t i = 0; i < count; i++)                                                   \
        ((CODE *)out)[i] = (CODE)NAME(code_float)(in[i] * INVERSE, s);                         \
    break;

/* The codes of values that share a scale, or of values that have one each. */
INLINE void NAME(store_row)(const REAL *in, void *out, int64_t count, REAL inverse,
                            const struct float_codes *codes, int width) {
  const struct float_codes s = *codes;
#define INVERSE inverse
  switch (width) { EACH_WIDTH(BLOCK_STORE_OF) }
#undef INVERSE
}

INLINE void NAME(store_column)(const REAL *in, void *out, int64_t count, const REAL *inverses,
                               const struct float_codes *codes, int width) {
  const struct float_codes s = *codes;
#define INVERSE inverses[i]
  switch (width) { EACH_WIDTH(BLOCK_STORE_OF) }
#undef INVERSE
}

/* Encodes a rounded strip: divided by their scales, values are elements again. */
static void NAME(store_strip)(const REAL *values, char *out, struct strip part,
                              const struct block_spec *spec, const struct NAME(scales) * scales,
                              const struct float_codes *codes, int width) {
  const int64_t size = spec->size;
  if (spec->inner > 1)
    for (int64_t i = 0; i < part.size; i++)
      NAME(store_column)(values + i * part.blocks, out + i * spec->inner * width, part.blocks,
                         scales->inverses, codes, width);
  else if (part.size == 32 && width == 1)
    for (int64_t b = 0; b < part.blocks; b++)
      NAME(store_row)(values + b * 32, out + b * 32, 32, scales->inverses[b], codes, 1);
  else
    for (int64_t b = 0; b < part.blocks; b++)
      NAME(store_row)(values + b * size, out + b * size * width, part.size, scales->inverses[b],
                      codes, width);
}

API void NAME(encode_block)(const REAL *in, char *out, int64_t count, const struct block_spec *spec,
                            uint32_t key0, uint32_t key1, int threads,
                            const struct float_codes *codes, int width, uint8_t *scale_codes) {
  const int64_t most = STRIP_ELEMENTS / spec->size < STRIP ? STRIP_ELEMENTS / spec->size : STRIP;
  (void)threads;
  PARALLEL {
    int64_t b, end;
    REAL values[STRIP_ELEMENTS];
    struct NAME(scales) scales;
    my_share(blocks_of(count, spec), &b, &end);
    while (b < end) {
      const struct strip part = strip_at(b, end, most, spec);
      const REAL *source = in + part.place;
      NAME(find_scales)(source, part, spec, &scales);
      for (int64_t i = 0; i < part.blocks; i++) scale_codes[b + i] = (uint8_t)(scales.exponents[i] + 127);
      const int64_t row = spec->inner == 1 ? 1 : part.blocks;
      NAME(block_part)(source, values, row, part, &scales, spec, key0, key1);
      NAME(store_strip)(values, out + part.place * width, part, spec, &scales, codes, width);
      b = part.next;
    }
  }
}

#endif

#if IS_FLOAT
/* --- tables --- */

#define TABLE_STORE_OF(WIDTH, CODE)                                                            \
  case WIDTH:                                                                                  \
    for (int64_t i = first; i < end; i++) {                                                    \
      const float x = in[i];                                                                   \
      ((CODE *)out)[i] = (CODE)(x != x ? s.nan_index : table_index(x, &s));                    \
    }                                                                                          \
    break;

/* The same of at most 16 values, whose codes are bytes. */
static void store_small_table(const float *in, uint8_t *out, int64_t first, int64_t end,
                              const struct table_spec *s) {
  const struct small_table table = small_table_of(s->values, s->thresholds, s->count);
  const int32_t nan = (int32_t)s->nan_index;
  int64_t i = first;
#ifdef LANES
  const struct small_search search = small_search_of(table.thresholds);
  for (; i + LANES <= end; i += LANES) {
    const __m256 x = _mm256_loadu_ps(in + i);
    const __m256 index = _mm256_castsi256_ps(small_indices(x, &search));
    const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256 of_nan = _mm256_castsi256_ps(_mm256_set1_epi32(nan));
    store_bytes(out + i, _mm256_castps_si256(_mm256_blendv_ps(index, of_nan, is_nan)));
  }
#endif
  for (; i < end; i++) out[i] = (uint8_t)(in[i] != in[i] ? nan : small_index(in[i], table.thresholds));
}

/* Indices of rounded values; not for stochastic rounding. */
API void encode_table_f32(const float *in, void *out, int64_t count, const struct table_spec *spec,
                          uint32_t key0, uint32_t key1, int threads,
                          const struct table_codes *codes, int width) {
  const struct table_spec s = *spec;
  (void)threads, (void)key0, (void)key1, (void)codes;
  PARALLEL {
    int64_t first, end;
    my_share(count, &first, &end);
    if (s.count <= SMALL_TABLE)
      store_small_table(in, out, first, end, &s);
    else
      switch (width) { EACH_WIDTH(TABLE_STORE_OF) }
  }
}

#endif

#define TABLE_LOAD_OF(WIDTH, CODE)                                                             \
  case WIDTH:                                                                                  \
    for (int64_t i = 0; i < count; i++) out[i] = values[((const CODE *)in)[i] & mask];         \
    break;

static void NAME(load_table)(const void *in, REAL *out, int64_t count,
                             const struct table_codes *codes, int width) {
  const REAL *values = codes->values;
  const uint64_t mask = (uint64_t)codes->mask;
#if IS_FLOAT && defined LANES
  if (width == 1 && mask < SMALL_TABLE) {
    float all[SMALL_TABLE];
    for (int j = 0; j < SMALL_TABLE; j++) all[j] = values[(uint64_t)j & mask];
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
      _mm256_storeu_ps(out + i, small_values(load_bytes((const uint8_t *)in + i), all));
    for (; i < count; i++) out[i] = values[((const uint8_t *)in)[i] & mask];
    return;
  }
#endif
  switch (width) { EACH_WIDTH(TABLE_LOAD_OF) }
}
DECODER(table)

#undef EACH_WIDTH
#undef NARROWED
#undef LOADED_FIRST_float
#undef LOADED_FIRST_posit
#undef LOADED_FIRST_fixed
#undef STORE_OF
#undef LOAD_OF
#undef CODER
#undef ENCODER
#undef DECODER
#undef BLOCK_STORE_OF
#undef TABLE_LOAD_OF
#undef DIRECT_OF
#undef DIRECT_float
#undef DIRECT_bits
#undef DIRECT_posit
#undef DIRECT_fixed
