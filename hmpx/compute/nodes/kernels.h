// Kernels for bfloat16 on CPUs: rounding of fp32, and GELU looked up in tables of torch's own values.
#pragma once

#include <ATen/CPUFunctions.h>
#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cfloat>
#include <cmath>
#include <mutex>
#include <optional>
#include <string>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

using at::kBFloat16, at::kFloat, at::Tensor;

#if defined(__x86_64__)
const bool has_kernels = __builtin_cpu_supports("avx2");
#pragma GCC push_options
#pragma GCC target("avx2")
#else
constexpr bool has_kernels = true;
#endif

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <typename F>
void each(int64_t n, const F& run) {
  constexpr int64_t grain = 1 << 15;
  const auto range = [&run](int64_t a, int64_t e) {
#pragma omp simd
    for (int64_t i = a; i < e; i++) {
      run(i);
    }
  };
  n <= 2 * grain ? range(0, n) : at::parallel_for(0, n, grain, range);
}

uint32_t rounded(uint32_t bits, uint32_t nan) {
  const uint32_t result = (bits + 0x7FFFu + ((bits >> 16) & 1)) & 0xFFFF0000u;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : result;
}

// torch's, which depends on the instructions that it uses.
uint32_t nan() {
  static const uint32_t bits = *data<uint32_t>(at::full({1}, NAN, kFloat).to(kBFloat16).to(kFloat));
  return bits;
}

// Rounds `from` to bfloat16; `wide` may be the same.
void round_to(const Tensor& wide, const Tensor& from) {
  each(from.numel(), [in = data<uint32_t>(from), out = data<uint32_t>(wide), nan = nan()](int64_t i) {
    out[i] = rounded(in[i], nan);
  });
}

// Splits `wide` into the rounded `low` and what to add to its bits.
void split(const Tensor& wide, const Tensor& low, const Tensor& rest) {
  auto *out = data<uint16_t>(low), *gaps = data<uint16_t>(rest);
  each(wide.numel(), [=, in = data<uint32_t>(wide), nan = nan()](int64_t i) {
    const uint32_t near = rounded(in[i], nan);
    const auto gap = static_cast<int32_t>(in[i] - near);
    out[i] = near >> 16;
    gaps[i] = gap < -0x8000 ? -0x8000 : gap > 0x7FFF ? 0x7FFF : gap;
  });
}

void join(const Tensor& wide, const Tensor& low, const Tensor& rest) {
  const auto *in = data<uint16_t>(low), *gaps = data<uint16_t>(rest);
  each(low.numel(), [=, out = data<uint32_t>(wide)](int64_t i) {
    out[i] = (static_cast<uint32_t>(in[i]) << 16) + static_cast<int16_t>(gaps[i]);
  });
}

// --- GELU ----------------------------------------------------------------------------------------

std::atomic<char> looks_up{0};
static_assert(sizeof(looks_up) == 1);

// GELU of each bfloat16, and its derivative in fp32, as torch computes them.
struct Gelu {
  Tensor values, slopes;
  bool has_slopes;  // whether torch's gradients are products with them: for "none" oneDNN's, on some CPUs, are not

  explicit Gelu(c10::string_view approximate) {
    const c10::InferenceMode off(false);
    const Tensor all = at::arange(1 << 16, at::kInt).to(at::kShort).view(kBFloat16), gradient = all.roll(12345);
    // Rows with gaps between them: oneDNN doesn't compute these.
    const Tensor wide = at::empty({256, 512}, kFloat).narrow(1, 0, 256).copy_(all.view({256, 256}));
    values = at::cpu::gelu(all, approximate);
    slopes = at::cpu::gelu_backward(at::ones_like(wide), wide, approximate).flatten();
    const Tensor products = gradient.to(kFloat).mul_(slopes).to(kBFloat16);
    has_slopes = at::cpu::gelu_backward(gradient, all, approximate).view(at::kShort).equal(products.view(at::kShort));
  }
};

// Whether arithmetic in this thread flushes subnormal numbers, which tables would keep.
bool flushes() {
#if defined(__x86_64__)
  return (_mm_getcsr() & 0x8040) != 0;
#else
  return false;
#endif
}

// None for calls that torch's kernel computes. It computes the last ones of many, less than a vector, by itself; each
// thread does.
const Gelu* gelu_for(const Tensor& x, c10::string_view approximate) {
  constexpr int64_t least = 1 << 12, vectors = 64, grain = 1 << 15;
  const int64_t n = x.numel(), threads = std::min<int64_t>(at::get_num_threads(), (n + grain - 1) / grain);
  if (!looks_up || !has_kernels || x.scalar_type() != kBFloat16 || n < least || !x.is_contiguous() ||
      n % vectors != 0 || (n + threads - 1) / threads % vectors != 0 ||
      !(approximate == "none" || approximate == "tanh")) {
    return nullptr;
  }
  // Torch's values depend on these settings.
  const size_t number = (approximate == "none") + 2 * at::globalContext().userEnabledMkldnn() + 4 * flushes();
  static std::array<std::once_flag, 8> made;
  static std::array<std::optional<Gelu>, 8> tables;
  std::call_once(made[number], [&] { tables[number].emplace(approximate); });
  return &*tables[number];
}

Tensor gelu(const Tensor& x, c10::string_view approximate) {
  const auto* table = gelu_for(x, approximate);
  if (table == nullptr) {
    return at::cpu::gelu(x, approximate);
  }
  const Tensor result = at::empty(x.sizes(), x.options());
  const auto *in = static_cast<const uint16_t*>(x.const_data_ptr()), *values = data<uint16_t>(table->values);
  each(x.numel(), [=, out = data<uint16_t>(result)](int64_t i) { out[i] = values[in[i]]; });
  return result;
}

Tensor gelu_backward(const Tensor& gradient, const Tensor& x, c10::string_view approximate) {
  const bool fits = gradient.scalar_type() == kBFloat16 && gradient.is_contiguous() && gradient.sizes() == x.sizes();
  const auto* table = fits ? gelu_for(x, approximate) : nullptr;
  if (table == nullptr || !table->has_slopes) {
    return at::cpu::gelu_backward(gradient, x, approximate);
  }
  const Tensor result = at::empty(x.sizes(), x.options());
  const auto* in = static_cast<const uint16_t*>(x.const_data_ptr());
  const auto* gradients = static_cast<const uint16_t*>(gradient.const_data_ptr());
  const auto* slopes = data<float>(table->slopes);
  each(x.numel(), [=, out = data<uint16_t>(result), nan = nan()](int64_t i) {
    const float product = std::bit_cast<float>(static_cast<uint32_t>(gradients[i]) << 16) * slopes[in[i]];
    out[i] = rounded(std::bit_cast<uint32_t>(product), nan) >> 16;
  });
  return result;
}

// --- sketches: as hmpx/tracing/sketches.py makes them ---------------------------------------------

constexpr int64_t columns = 1021, part_rows = 264, projections = 40;

template <typename T>
void digest(const char* row, const uint64_t* weights, int64_t n, uint64_t row_weight, int64_t* found) {
  uint64_t sum = 0, all = 0;
#pragma omp simd reduction(+ : sum) reduction(| : all)
  for (int64_t i = 0; i < n; i++) {
    const T value = reinterpret_cast<const T*>(row)[i], mixed = sizeof(T) < 4 ? value : value ^ value >> 15;
    all |= value;
    sum += static_cast<uint64_t>(mixed) * weights[i];
  }
  found[0] += sum * row_weight, found[1] |= all;
}

// `found` gets the sum of the squares, the least and the largest value; `sums` those of the columns, with signs.
template <typename T>
void add(const T* values, const T* signs, double* sums, int64_t n, double* found) {
  double square = found[0], least = found[1], largest = found[2];
#pragma omp simd reduction(+ : square) reduction(min : least) reduction(max : largest)
  for (int64_t i = 0; i < n; i++) {
    const double value = values[i];
    sums[i] += value * signs[i];
    square += value * value;
    least = value < least ? value : least;
    largest = value > largest ? value : largest;
  }
  found[0] = square, found[1] = std::isnan(square) ? NAN : least, found[2] = largest;
}

// Of values, the same with arithmetic and the tables; for each part, digest and union of bits, and all numbers.
void sketch(const Tensor& values, const Tensor& wide, const Tensor& weights, const Tensor& row_weights,
            const Tensor& signs, const Tensor& order, const Tensor& part_signs, const Tensor& bits,
            const Tensor& numbers) {
  const int64_t n = values.numel(), size = values.element_size(), runs = std::max<int64_t>(1, size / 4);
  const auto* bytes = static_cast<const char*>(values.const_data_ptr());
  const auto run = size == 1 ? digest<uint8_t> : size == 2 ? digest<int16_t> : digest<int32_t>;
  const auto *weight = data<uint64_t>(weights), *row_weight = data<uint64_t>(row_weights);
  at::parallel_for(0, bits.size(0), 1, [&](int64_t part, int64_t end) {
    for (; part < end; part++) {
      double sums[columns] = {}, *found = data<double>(numbers) + part * (3 + projections);
      found[1] = INFINITY, found[2] = -INFINITY;
      for (int64_t row = 0, at = part * part_rows * columns; row < part_rows && at < n; row++, at += columns) {
        const auto length = std::min(columns, n - at), first = row * columns;
        run(bytes + at * size, weight, length * runs, row_weight[row], data<int64_t>(bits) + 2 * part);
        if (wide.scalar_type() == kFloat) {
          add(data<float>(wide) + at, data<float>(signs) + first, sums, length, found);
        } else if (wide.scalar_type() == at::kDouble) {
          add(data<double>(wide) + at, data<double>(signs) + first, sums, length, found);
        }
      }
      for (int64_t i = 0; i < columns; i++) {
        const int64_t place = data<int64_t>(order)[i];
        found[3 + i % projections] += sums[place] * data<double>(part_signs)[part * columns + place];
      }
    }
  });
}

// --- counts of a tensor: those of hmpx/monitoring/figures.py, in that order -------------------------

float widened(float value) { return value; }
float widened(c10::BFloat16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.x) << 16); }
float widened(c10::Half value) { return c10::detail::fp16_ieee_to_fp32_value(value.x); }

// A binary format that values are rounded to: its largest number, its smallest normal one, its epsilon, how many bits
// of a float it drops, and whether larger values become the largest one.
struct Rounding {
  float most, least, epsilon;
  uint32_t drop;
  bool saturates;
};

// Adds a row; `rounds` is whether values are rounded first.
template <typename T, bool rounds>
void count_row(const T* values, int64_t n, const Rounding& to, double* found) {
  const auto [most, least, epsilon, drop, saturates] = to;
  const float quarter = most / 4, magic = least * epsilon * (3 << 22);  // its unit in the last place: the least number
  const uint32_t half = (1u << drop >> 1) - 1, kept = ~((1u << drop) - 1);
  int32_t nonfinite = 0, zeros = 0, near = 0, largest = 0, lost = 0, overflown = 0, subnormal = 0;
  float amin = INFINITY, amax = 0;
  double error = 0, sum = 0, square = 0;
#pragma omp simd reduction(+ : nonfinite, zeros, near, largest, lost, overflown, subnormal, error, sum, square) \
    reduction(min : amin) reduction(max : amax)
  for (int64_t i = 0; i < n; i++) {
    const float given = widened(values[i]);
    const bool is_finite = std::abs(given) <= FLT_MAX;
    const float value = is_finite ? given : 0, size = std::abs(value);
    nonfinite += !is_finite, zeros += size == 0, near += size > quarter, largest += size >= most;
    amin = size > 0 && size < amin ? size : amin, amax = size > amax ? size : amax;
    sum += value, square += static_cast<double>(value) * value;
    float after = size;
    if constexpr (rounds) {
      const auto bits = std::bit_cast<uint32_t>(size);
      const float normal = std::bit_cast<float>((bits + half + (bits >> drop & 1)) & kept);
      const float low = size < least ? (size + magic) - magic : normal;
      const bool is_held = low <= most;
      after = is_held ? low : saturates ? most : size;
      overflown += !is_held & !saturates, lost += (after == 0) & (size > 0);
      error += static_cast<double>(after - size) * (after - size);
    }
    subnormal += (after > 0) & (after < least);
  }
  const double counts[] = {static_cast<double>(n), static_cast<double>(nonfinite), static_cast<double>(zeros - nonfinite),
                           static_cast<double>(near - largest), static_cast<double>(largest), static_cast<double>(lost),
                           static_cast<double>(overflown), static_cast<double>(subnormal), error, error, square,
                           std::max(0.0, square - sum * sum / static_cast<double>(n))};
  for (size_t i = 0; i < std::size(counts); i++) {
    found[i] += counts[i];
  }
  found[14] = std::min<double>(found[14], amin), found[15] = std::max<double>(found[15], amax);
}

// Of values in rows; without `rounds`, `to` is their own type.
Tensor count(const Tensor& values, int64_t row, bool rounds, double most, double least, double epsilon, bool saturates) {
  const Rounding to{static_cast<float>(most), static_cast<float>(least), static_cast<float>(epsilon),
                    rounds ? static_cast<uint32_t>(23 + std::ilogb(epsilon)) : 0, saturates};
  const Tensor result = at::zeros({16}, at::kDouble);
  auto* found = data<double>(result);
  found[14] = INFINITY;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, kBFloat16, values.scalar_type(), "count", [&] {
    if constexpr (!std::is_same_v<scalar_t, double>) {
      const auto* start = values.const_data_ptr<scalar_t>();
      for (int64_t at = 0; at < values.numel(); at += row) {
        rounds ? count_row<scalar_t, true>(start + at, row, to, found) : count_row<scalar_t, false>(start + at, row, to, found);
      }
    }
  });
  if (!rounds && values.element_size() < 4) {
    found[9] = found[10] * epsilon * epsilon / 16;
  }
  return result;
}

#if defined(__x86_64__)
#pragma GCC pop_options
#endif

// Puts both in torch's place, which says so, once. Returns whether they were torch's, not another library's.
bool register_gelu() {
  for (const auto* name : {"aten::gelu", "aten::gelu_backward"}) {
    const auto kernels = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").dumpState();
    if (kernels.find("CPU (inactive)") != std::string::npos || kernels.find("RegisterCPU") == std::string::npos) {
      return false;
    }
  }
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  library.impl("gelu", gelu);
  library.impl("gelu_backward", gelu_backward);
  return true;
}

}  // namespace
