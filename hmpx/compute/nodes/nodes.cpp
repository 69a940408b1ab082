// Autograd nodes of ops with the casts of their inputs, which are fewer than torch's.
//
// - A linear layer is one node, instead of View, T, Addmm, View and three of ToCopy.
// - A legalized linear layer and legalized attention on CPUs are one, which computes in fp32 memory that is reused.
// - Casts of another op's inputs are one node and one launch.
//
// `linear`, `attention` and `casts` return None for unusual calls, which the caller leaves to torch and to
// `casting/legalized.py`. Outputs and gradients have the same bits: the kernels are the same, and gradients are summed,
// rounded and cast at the same places.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <mutex>
#include <span>

#include "kernels.h"

namespace {

using namespace torch::autograd;

using Tensors = c10::SmallVector<Tensor, 3>;
using Numbers = std::vector<int64_t>;

// What a node's numbers are after the dtypes of its three inputs; fp32 inputs may be rounded before they are read.
enum { LOW = 3, ROUNDS_INPUTS, OWN };

at::ScalarType dtype_in(const Numbers& numbers, size_t place) {
  return static_cast<at::ScalarType>(numbers[place]);
}

PyTypeObject* parameter_class = nullptr;

// Makes a node, held by the pointers of this torch: `shared_ptr` of older ones.
template <typename T>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<T>();
  } else {
    return std::shared_ptr<T>(new T(), [](auto* node) { deleteNode(node); });
  }
}

// --- what is usual -------------------------------------------------------------------------------

// Modes and transforms, and tensors that belong to them.
const c10::DispatchKeySet& unusual_keys() {
  using K = c10::DispatchKey;
  static const c10::DispatchKeySet keys({
      K::Python, K::PythonTLSSnapshot, K::PythonDispatcher, K::PreDispatch, K::Functionalize, K::FuncTorchBatched,
      K::FuncTorchGradWrapper, K::FuncTorchVmapMode, K::Batched, K::FuncTorchDynamicLayerFrontMode,
      K::FuncTorchDynamicLayerBackMode, K::Negative, K::Conjugate, K::ZeroTensor, K::TESTING_ONLY_GenericMode,
  });
  return keys;
}

bool is_usual_here() {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  return !keys.included_.has_any(unusual_keys()) &&
      // Nothing is cast below the dispatcher.
      !keys.excluded_.has(c10::DispatchKey::PythonTLSSnapshot) &&
      !torch::jit::tracer::isTracing() && !at::impl::torch_function_mode_enabled() &&
      // Checkpoints compare what a forward and its recomputation save: both take torch's way.
      !at::SavedTensorDefaultHooks::get_hooks(false).has_value();
}

bool is_usual(const Tensor& tensor, c10::Device device) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  // Nested tensors, whose layout is strided too, have no dense kernels.
  return tensor.device() == device && impl->key_set().has(c10::DispatchKey::Dense) &&
      !impl->key_set().has_any(unusual_keys()) && impl->layout() == at::kStrided &&
      !impl->has_symbolic_sizes_strides() && impl->numel() > 0 && !tensor._fw_grad(/*level=*/0).defined();
}

// Whether it stands for a missing argument: the class of that name in casting/source.py.
bool is_missing(PyObject* value) {
  return PyType_Check(value) && std::strcmp(reinterpret_cast<PyTypeObject*>(value)->tp_name, "missing") == 0;
}

bool is_plain(PyObject* value) {
  return reinterpret_cast<PyObject*>(Py_TYPE(value)) == THPVariableClass || Py_TYPE(value) == parameter_class;
}

// Whether tensors there are cast; `devices` has bits of their types.
bool is_cast_on(c10::Device device, int64_t devices) {
  const auto type = device.type();
  return devices >> static_cast<int>(type) & 1 && !device.is_meta() &&
      !(at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type));
}

// --- memory --------------------------------------------------------------------------------------

// The fp32 tensors of one call, in memory that the thread keeps for its next one.
class Scratch {
 public:
  ~Scratch() {
    if (used_ <= 1 << 26 && (!memory_.defined() || memory_.numel() < used_)) {
      const c10::InferenceMode off(false);
      memory_ = at::empty({used_}, kFloat);
    }
    kept_ = std::move(memory_);
  }

  Tensor take(at::IntArrayRef sizes) {
    const auto start = used_;
    used_ += (c10::multiply_integers(sizes) + 15) / 16 * 16;  // cache lines
    if (!memory_.defined() || used_ > memory_.numel()) {
      return at::empty(sizes, kFloat);
    }
    Tensor taken = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(memory_.storage()), memory_.key_set(), memory_.dtype());
    taken.unsafeGetTensorImpl()->set_storage_offset(start);
    taken.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return taken;
  }

  // The fp32 values that a product reads.
  Tensor raised(const Tensor& tensor, bool rounds) {
    const bool is_wide = !tensor.defined() || tensor.scalar_type() == kFloat;
    if (is_wide && !(rounds && tensor.defined())) {
      return tensor;
    }
    const Tensor wide = take(tensor.sizes());
    is_wide ? round_to(wide, tensor) : static_cast<void>(wide.copy_(tensor));
    return wide;
  }

  // Heads [b, h, t, e] in fp32, dense in the order of their strides.
  Tensor raised_heads(const Tensor& low) {
    return low.stride(1) < low.stride(2) ? raised(low.transpose(1, 2), false).transpose(1, 2) : raised(low, false);
  }

 private:
  static inline thread_local Tensor kept_;
  Tensor memory_ = std::move(kept_);
  int64_t used_ = 0;
};

// --- nodes ---------------------------------------------------------------------------------------

// Whether ops on these are dispatched as in torch's nodes: they are recorded, or a transform's rules apply.
bool are_dispatched(const variable_list& gradients) {
  return at::GradMode::is_enabled() || c10::impl::tls_local_dispatch_key_set().included_.has_any(unusual_keys()) ||
      std::any_of(gradients.begin(), gradients.end(), [](const Tensor& each) {
           return each.defined() && each.key_set().has_any(unusual_keys());
         });
}

Tensor with_dtype(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && tensor.scalar_type() != dtype ? tensor.to(dtype) : tensor;
}

// Casts the tensors that are wanted, and drops others; together, unless the casts are recorded.
void cast_all(std::span<Tensor> tensors, const Numbers& dtypes, int64_t wanted, bool is_recorded) {
  Tensors to, from;
  for (size_t i = 0; i < tensors.size(); i++) {
    auto& tensor = tensors[i];
    const auto dtype = dtype_in(dtypes, i);
    if (!tensor.defined() || !(wanted >> i & 1)) {
      tensor = Tensor();
    } else if (is_recorded) {
      tensor = tensor.to(dtype);
    } else if (tensor.scalar_type() != dtype) {
      from.push_back(tensor);
      tensor = at::empty_like(tensor, tensor.options().dtype(dtype));
      to.push_back(tensor);
    }
  }
  if (to.size() > 1 && !to[0].is_cpu()) {
    at::_foreach_copy_(to, from);  // one launch
    return;
  }
  for (size_t i = 0; i < to.size(); i++) {
    to[i].copy_(from[i]);
  }
}

// An op of three inputs and their casts. It keeps tensors, the one at `output` being its result.
//
// `T::products` computes gradients in the dtype that the op computed in, from what `T::read` makes of the kept tensors;
// `fast` all gradients, where ops are not recorded.
//
// A backward that is recorded makes the inputs, as the op read them, further outputs of this node. Their gradients in
// a double backward are added to those of the op before they are rounded, as torch adds them.
template <typename T, size_t count, size_t output = count>
struct OpNode : public Node {
  std::array<SavedVariable, count> kept;
  Numbers numbers;
  Numbers further;  // which input each further output is
  bool is_needed = false;  // after a backward of further outputs alone

  static variable_list read(const variable_list& kept, const Numbers&) {
    return kept;
  }

  // Whether the op read this input itself.
  static bool is_source(size_t, const Numbers&) {
    return false;
  }

  void take(at::ArrayRef<Tensor> inputs, at::ScalarType low, bool rounds) {
    for (const auto& each : inputs) {
      add_next_edge(each.defined() ? impl::gradient_edge(each) : Edge());
      numbers.push_back(static_cast<int64_t>(each.defined() ? each.scalar_type() : low));
    }
    numbers.insert(numbers.end(), {static_cast<int64_t>(low), rounds});
  }

  static variable_list by_ops(
      const variable_list& gradients, const variable_list& read, const Numbers& numbers, const Numbers& further,
      int64_t wanted) {
    auto results = gradients[0].defined() ? T::products(gradients[0], read, numbers, wanted) : variable_list(3);
    for (size_t i = 1; i < gradients.size(); i++) {
      auto& result = results[further[i - 1]];
      if (gradients[i].defined()) {
        result = result.defined() ? result + gradients[i] : gradients[i];
      }
    }
    for (size_t i = 0; i < 3; i++) {
      results[i] = numbers[ROUNDS_INPUTS] ? with_dtype(results[i], dtype_in(numbers, LOW)) : results[i];
    }
    cast_all(results, numbers, wanted, are_dispatched(results));
    return results;
  }

  variable_list fast(const variable_list& gradients, const variable_list& kept, int64_t wanted) {
    return T::by_ops(gradients, T::read(kept, numbers), numbers, further, wanted);
  }

  variable_list apply(variable_list&& gradients) override {
    std::lock_guard<std::mutex> lock(mutex_);  // another thread may release the graph
    is_needed = !gradients[0].defined();
    const auto tensors = is_needed ? variable_list() : unpacked();
    if (are_dispatched(gradients)) {
      auto read = is_needed ? tensors : T::read(tensors, numbers);
      link(read);
      return T::by_ops(gradients, read, numbers, further, wanted());
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    if (is_needed || gradients.size() > 1) {
      return T::by_ops(gradients, is_needed ? tensors : T::read(tensors, numbers), numbers, further, wanted());
    }
    return static_cast<T&>(*this).fast(gradients, tensors, wanted());
  }

  // Which gradients are wanted, as bits.
  int64_t wanted() const {
    int64_t wanted = 0;
    for (size_t i = 0; i < num_outputs(); i++) {
      wanted |= static_cast<int64_t>(task_should_compute_output(i)) << i;
    }
    return wanted;
  }

  // Makes what the op read further outputs, if the backward is recorded.
  void link(variable_list& read) {
    for (size_t i = 0; i < std::min<size_t>(read.size(), num_outputs()) && at::GradMode::is_enabled(); i++) {
      if (!read[i].defined() || !next_edge(i).is_valid() || T::is_source(i, numbers)) {
        continue;
      }
      read[i] = read[i].detach();
      const auto known = std::find(further.begin(), further.end(), i);
      uint32_t number = known - further.begin() + 1;
      if (known == further.end()) {
        further.push_back(i);
        number = add_input_metadata(read[i]);
      }
      impl::set_gradient_edge(read[i], {getptr(), number});
    }
  }

  variable_list unpacked() {
    variable_list tensors;
    for (auto& each : kept) {
      tensors.push_back(each.unpack(getptr()));
    }
    return tensors;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < count && !is_needed; i++) {
      kept[i].reset_data();
    }
    is_needed = false;
  }

  std::string name() const override {
    return T::shown;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    for (size_t i = 0; i < count; i++) {
      args.collect(kept[i], /*is_output=*/i == output);
    }
    args.collect(numbers);
    args.collect(further);
  }

  // Puts a call of `by_ops` into the graph that compiled autograd traces.
  variable_list apply_with_saved(const variable_list& inputs, SwapSavedVariables& saved) override {
    using namespace torch::dynamo::autograd;
    for (auto& each : kept) {
      saved.before(each);
    }
    std::vector<at::TypePtr> types{at::ListType::ofInts(), at::ListType::ofInts(), at::IntType::get()};
    types.resize(3 + count, at::TensorType::get());
    static const auto bound = getPyCompilerInterface()->bind_function(
        saved.get_py_compiler(), T::traced_as,
        [](const variable_list& gradients, const std::vector<at::IValue>& given) {
          variable_list tensors;
          for (size_t i = 3; i < given.size(); i++) {
            tensors.push_back(given[i].toTensor());
          }
          const auto numbers = given[0].toIntVector();
          const auto read = gradients[0].defined() ? T::read(tensors, numbers) : tensors;
          return T::by_ops(gradients, read, numbers, given[1].toIntVector(), given[2].toInt());
        }, types);
    ivalue_list values{numbers, further, wanted()};
    for (const auto& each : unpacked()) {
      values.emplace_back(each);
    }
    const auto edges = IValuePacker<std::vector<std::optional<InputMetadata>>>::pack(
        get_input_metadata(next_edges()));
    auto results = getPyCompilerInterface()->call_function(
        saved.get_py_compiler(), "apply_functional", bound, inputs, values, edges);
    for (auto& each : kept) {
      saved.after(each);
    }
    return results;
  }
};

bool learns(at::ArrayRef<Tensor> inputs) {
  const auto needs_gradient = [](const Tensor& each) { return each.defined() && each.requires_grad(); };
  return at::GradMode::is_enabled() && std::any_of(inputs.begin(), inputs.end(), needs_gradient);
}

// Computes without the GIL.
template <typename F>
PyObject* wrapped(const F& compute) {
  Tensor result;
  {
    pybind11::gil_scoped_release without_gil;
    result = compute();
  }
  return THPVariable_Wrap(std::move(result));
}

// Its numbers are the dtypes of what was cast.
struct CastsBackward : public OpNode<CastsBackward, 0> {
  static constexpr const char *shown = "ToCopyBackward0", *traced_as = "HmpxCastsBackward";

  static variable_list by_ops(
      variable_list gradients, const variable_list&, const Numbers& dtypes, const Numbers&, int64_t wanted) {
    cast_all(gradients, dtypes, wanted, are_dispatched(gradients));
    return gradients;
  }
};

// Keeps x in the low dtype, if the weight learns; the weight, if x does.
struct LinearBackward : public OpNode<LinearBackward, 2> {
  static constexpr const char *shown = "LinearBackward0", *traced_as = "HmpxLinearBackward";
  enum { COMPUTED = OWN, READS_X };  // the product's dtype; whether torch has neither a cast nor a view of x before it

  static variable_list read(const variable_list& kept, const Numbers& numbers) {
    const auto low = dtype_in(numbers, LOW), dtype = dtype_in(numbers, COMPUTED);
    return {with_dtype(kept[0], dtype), with_dtype(numbers[ROUNDS_INPUTS] ? with_dtype(kept[1], low) : kept[1], dtype)};
  }

  static bool is_source(size_t input, const Numbers& numbers) {
    return input == 0 && numbers[READS_X];
  }

  // In torch's order, which a double backward adds in.
  static variable_list products(
      const Tensor& given, const variable_list& read, const Numbers& numbers, int64_t wanted) {
    variable_list results(3);
    const Tensor gradient = with_dtype(given, dtype_in(numbers, COMPUTED)), flat = flattened(gradient);
    if (wanted & 1) {
      results[0] = flat.mm(read[1]);
      if (gradient.dim() != 2) {
        auto sizes = c10::SymDimVector(gradient.sym_sizes());
        sizes.back() = read[1].sym_size(1);
        results[0] = results[0].view_symint(sizes);
      }
    }
    if (wanted & 2) {
      results[1] = flat.t().mm(flattened(read[0]));
    }
    if (wanted & 4) {
      results[2] = flat.sum(0);
    }
    return results;
  }

  static Tensor flattened(const Tensor& tensor) {
    return tensor.dim() == 2 ? tensor : tensor.reshape_symint({-1, tensor.sym_size(-1)});
  }

  variable_list fast(const variable_list& gradients, const variable_list& kept, int64_t wanted) {
    const auto low = dtype_in(numbers, LOW);
    if (dtype_in(numbers, COMPUTED) == low) {
      return OpNode::fast(gradients, kept, wanted);
    }
    Scratch scratch;
    const bool rounds = numbers[ROUNDS_INPUTS];
    const Tensor gradient = scratch.raised(gradients[0], false);
    const variable_list read{scratch.raised(kept[0], rounds), scratch.raised(kept[1], rounds)};
    variable_list results(3);
    for (size_t i = 0; i < 3; i++) {
      if (wanted >> i & 1) {
        results[i] = products(gradient, read, numbers, 1 << i)[i];
        if (dtype_in(numbers, i) == low) {
          results[i] = results[i].to(low);
        } else if (rounds) {
          round_to(results[i], results[i]);
        }
      }
    }
    return results;
  }
};

// Keeps q, k and v, the result, what is missing in it, and the logarithms of sums.
struct AttentionBackward : public OpNode<AttentionBackward, 6, 3> {
  static constexpr const char* shown = "ScaledDotProductFlashAttentionForCpuBackward0";
  static constexpr const char* traced_as = "HmpxAttentionBackward";
  enum { IS_CAUSAL = OWN, HAS_SCALE, SCALE };

  static variable_list read(const variable_list& kept, const Numbers&) {
    const Tensor result = (kept[3].to(kFloat).view(at::kInt) + kept[4]).view(kFloat);
    return {kept[0].to(kFloat), kept[1].to(kFloat), kept[2].to(kFloat), result, kept[5]};
  }

  static variable_list products(
      const Tensor& gradient, const variable_list& read, const Numbers& numbers, int64_t) {
    const auto scale = numbers[HAS_SCALE] ? std::optional(std::bit_cast<double>(numbers[SCALE])) : std::nullopt;
    const auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        with_dtype(gradient, kFloat), read[0], read[1], read[2], read[3], read[4], 0.0, numbers[IS_CAUSAL], {}, scale);
    return {q, k, v};
  }

  variable_list fast(const variable_list& gradients, const variable_list& kept, int64_t wanted) {
    Scratch scratch;
    variable_list read;
    for (size_t i = 0; i < 3; i++) {
      read.push_back(scratch.raised_heads(kept[i]));
    }
    const Tensor gradient = gradients[0].stride(3) == 1 ? gradients[0] : gradients[0].contiguous();
    const Tensor wide = scratch.raised_heads(gradient);
    read.push_back(scratch.take({kept[3].numel()}).as_strided(kept[3].sizes(), kept[3].strides()));
    join(read[3], kept[3], kept[4]);
    read.push_back(kept[5]);
    return by_ops({wide}, read, numbers, further, wanted);
  }
};

// --- the functions -------------------------------------------------------------------------------

// How a linear layer is computed, as bits.
enum { LEGALIZED = 1, ROUNDS = 2, ANY_SIZE = 4, CASTS_AGAIN = 8, CHOOSES = 16 };

// Whether to cast the weight again in the backward takes little time: as `pays` of compute/saved_tensors.py.
bool pays(const Tensor& weight, const Tensor& x) {
  const auto size = weight.numel();
  return weight.is_cpu() && size >= 1 << 14 && 32 * size >= x.numel() && x.numel() >= 256 * x.size(-1);
}

// In fp32, in memory that is reused.
Tensor legalized_linear(std::array<Tensor, 3> inputs, at::ScalarType low, bool rounds) {
  Scratch scratch;
  for (auto& each : inputs) {
    each = scratch.raised(each, rounds);
  }
  const auto& [x, weight, bias] = inputs;
  auto sizes = at::DimVector(x.sizes());
  sizes.back() = weight.size(0);
  const Tensor flat = x.view({-1, x.size(-1)});
  Tensor product = scratch.take({flat.size(0), weight.size(0)});
  bias.defined() ? at::addmm_out(product, bias, flat, weight.t()) : at::mm_out(product, flat, weight.t());
  return product.view(sizes).to(low);
}

Tensor linear_of(const std::array<Tensor, 3>& inputs, at::ScalarType low, int64_t how) {
  const auto& [x, weight, bias] = inputs;
  const bool is_legalized = how & LEGALIZED, rounds = how & ROUNDS || !is_legalized;
  at::AutoDispatchBelowADInplaceOrView guard;
  auto read = inputs;
  Tensor result;
  if (is_legalized) {
    result = legalized_linear(inputs, low, rounds);
  } else {
    cast_all(read, Numbers(3, static_cast<int64_t>(low)), /*wanted=*/-1, /*is_recorded=*/false);
    result = bias.defined() ? at::linear(read[0], read[1], read[2]) : at::linear(read[0], read[1]);
  }
  if (!learns(inputs)) {
    return result;
  }
  auto node = make_node<LinearBackward>();
  node->take(inputs, low, rounds);
  const bool reads_x = !is_legalized && x.dim() == 2 && x.scalar_type() == low;
  node->numbers.insert(node->numbers.end(), {static_cast<int64_t>(is_legalized ? kFloat : low), reads_x});
  if (weight.requires_grad()) {
    node->kept[0] = SavedVariable(with_dtype(read[0], low), /*is_output=*/false);
  }
  if (x.requires_grad()) {
    const bool casts_again = how & CASTS_AGAIN && (!(how & CHOOSES) || pays(weight, x));
    node->kept[1] = SavedVariable(casts_again ? weight : read[1], /*is_output=*/false);
  }
  set_history(result, node);
  return result;
}

// Returns nothing if another kernel than flash attention is chosen.
Tensor attention_of(const std::array<Tensor, 3>& inputs, bool is_causal, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const Tensor q = inputs[0].to(kBFloat16), k = inputs[1].to(kBFloat16), v = inputs[2].to(kBFloat16);
  if (at::_fused_sdp_choice(q, k, v, {}, 0.0, is_causal, scale) != 1) {
    return Tensor();
  }
  Scratch scratch;
  const auto [exact, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      scratch.raised_heads(q), scratch.raised_heads(k), scratch.raised_heads(v), 0.0, is_causal, {}, scale);
  const Tensor result = at::empty_like(exact, exact.options().dtype(kBFloat16));
  const Tensor rest = at::empty_like(exact, exact.options().dtype(at::kShort));
  split(exact, result, rest);
  if (learns(inputs)) {
    auto node = make_node<AttentionBackward>();
    node->take(inputs, kBFloat16, /*rounds=*/true);
    const auto bits = std::bit_cast<int64_t>(scale.value_or(0));
    node->numbers.insert(node->numbers.end(), {is_causal, scale.has_value(), bits});
    set_history(result, node);
    node->kept = {SavedVariable(q, false), SavedVariable(k, false), SavedVariable(v, false),
                  SavedVariable(result, /*is_output=*/true), SavedVariable(rest, false), SavedVariable(sums, false)};
  }
  return result;
}

// device_bit(device) -> the bit of its type, of which `linear` takes the sum
PyObject* device_bit(PyObject*, PyObject* device) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(THPDevice_Check(device), "a torch.device is needed");
  const auto type = reinterpret_cast<THPDevice*>(device)->device.type();
  return PyLong_FromLongLong(1LL << static_cast<int>(type));
  END_HANDLE_TH_ERRORS
}

// linear(low, devices, how, input, weight, bias) -> the result in the dtype `low`, or None; a class stands for what is
// missing, or given by name
PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count >= 3 && THPDtype_Check(args[0]) && PyLong_Check(args[1]) && PyLong_Check(args[2]),
                   "linear takes a dtype, two ints and three tensors");
  const auto low = reinterpret_cast<THPDtype*>(args[0])->scalar_type;
  const auto devices = PyLong_AsLongLong(args[1]), how = PyLong_AsLongLong(args[2]);
  if (count != 6) {
    Py_RETURN_NONE;
  }
  std::array<PyObject*, 3> given{args[3], args[4], args[5]};
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); i++) {
    constexpr std::array known{"input", "weight", "bias"};
    size_t place = 0;
    while (place < 3 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), known[place]) != 0) {
      place++;
    }
    if (place == 3 || !is_missing(given[place])) {
      Py_RETURN_NONE;
    }
    given[place] = args[count + i];
  }
  if (!is_plain(given[0]) || !is_usual_here() || !is_cast_on(THPVariable_Unpack(given[0]).device(), devices)) {
    Py_RETURN_NONE;
  }
  std::array<Tensor, 3> tensors;
  const auto& [x, weight, bias] = tensors;
  bool is_cast = how & LEGALIZED;
  for (size_t i = 0; i < tensors.size(); i++) {
    if (i == 2 && (given[i] == Py_None || is_missing(given[i]))) {  // no bias, given or not
      continue;
    }
    if (!is_plain(given[i])) {
      Py_RETURN_NONE;
    }
    tensors[i] = THPVariable_Unpack(given[i]);
    const auto dtype = tensors[i].scalar_type();
    is_cast |= dtype != low;
    // The cast of what isn't a parameter is kept; autograd keeps no inference tensors, but casts of them.
    const bool is_source = (how & LEGALIZED && i > 0) || (how & CASTS_AGAIN && i == 1);
    const bool is_leaf = Py_TYPE(given[i]) == parameter_class && !(tensors[i].is_inference() && at::GradMode::is_enabled());
    if ((dtype != low && dtype != kFloat) || !is_usual(tensors[i], x.device()) || !tensors[i].is_contiguous() ||
        (is_source && !is_leaf)) {
      Py_RETURN_NONE;
    }
  }
  const bool fits = is_cast && x.dim() >= 2 && weight.dim() == 2 && x.size(-1) == weight.size(1) &&
      (!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)));
  // As `Legalization` decides, and without kernels of few rows.
  if (!fits || (how & LEGALIZED && !(has_kernels && x.is_cpu() && x.numel() > 2 * x.size(-1) &&
                                     (how & ANY_SIZE || x.numel() * weight.size(0) > 8192)))) {
    Py_RETURN_NONE;
  }
  return wrapped([&] { return linear_of(tensors, low, how); });
  END_HANDLE_TH_ERRORS
}

// attention(rounds, is_causal, scale, query, key, value) -> the result in bfloat16, or None
PyObject* attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6 && (args[2] == Py_None || PyFloat_Check(args[2])),
                   "attention takes two bools, a float or None, and three tensors");
  const auto scale = args[2] == Py_None ? std::nullopt : std::optional(PyFloat_AS_DOUBLE(args[2]));
  const bool rounds = args[0] == Py_True, is_causal = args[1] == Py_True;
  std::array<Tensor, 3> tensors;
  for (size_t i = 0; i < 3; i++) {
    if (!is_plain(args[3 + i])) {
      Py_RETURN_NONE;
    }
    tensors[i] = THPVariable_Unpack(args[3 + i]);
    const auto dtype = tensors[i].scalar_type();
    if (!(dtype == kBFloat16 || (dtype == kFloat && rounds)) || !is_usual(tensors[i], at::kCPU) ||
        tensors[i].dim() != 4 || tensors[i].stride(3) != 1) {
      Py_RETURN_NONE;
    }
  }
  if (!has_kernels || !is_usual_here() || !is_cast_on(at::kCPU, -1)) {
    Py_RETURN_NONE;
  }
  return wrapped([&] { return attention_of(tensors, is_causal, scale); });
  END_HANDLE_TH_ERRORS
}

// Replaces tensors by their casts, which share a node.
void cast_together(Tensors& tensors, at::ScalarType to) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto given = tensors;
  cast_all(tensors, Numbers(tensors.size(), static_cast<int64_t>(to)), /*wanted=*/-1, /*is_recorded=*/false);
  if (!learns(given)) {
    return;
  }
  auto node = make_node<CastsBackward>();
  for (size_t i = 0; i < given.size(); i++) {
    if (given[i].requires_grad()) {
      node->add_next_edge(impl::gradient_edge(given[i]));
      node->numbers.push_back(static_cast<int64_t>(given[i].scalar_type()));
      set_history(tensors[i], node);
    }
  }
}

// casts(dtype, devices, masks, tensors...) -> these tensors, or None if less than two are cast
//
// `masks` are the positions, as bits, of what may be a mask: such a tensor is cast only if it is a parameter.
PyObject* casts(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count > 4 && THPDtype_Check(args[0]) && PyLong_Check(args[1]) && PyLong_Check(args[2]),
                   "casts takes a dtype, two ints and tensors");
  const auto to = reinterpret_cast<THPDtype*>(args[0])->scalar_type;
  const auto devices = PyLong_AsLongLong(args[1]), masks = PyLong_AsLongLong(args[2]);
  args += 3;
  count -= 3;
  Tensors tensors;
  c10::SmallVector<Py_ssize_t, 3> places;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (args[i] == Py_None) {
      continue;
    }
    if (!is_plain(args[i])) {
      Py_RETURN_NONE;
    }
    const Tensor& tensor = THPVariable_Unpack(args[i]);
    const auto dtype = tensor.scalar_type();
    if (dtype == to || !(at::isFloatingType(dtype) || at::isComplexType(dtype))) {
      continue;
    }
    const bool is_eligible = dtype == kFloat || dtype == at::kHalf || dtype == kBFloat16;
    const bool is_mask = masks >> i & 1 && Py_TYPE(args[i]) != parameter_class;
    const auto device = places.empty() ? tensor.device() : tensors[0].device();
    if (!is_eligible || is_mask || !is_usual(tensor, device) ||
        !tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense()) {
      Py_RETURN_NONE;
    }
    for (const auto& other : tensors) {
      // The gradients of one tensor are summed in the order of its nodes.
      if (other.is_same(tensor) || other.scalar_type() != dtype) {
        Py_RETURN_NONE;
      }
    }
    tensors.push_back(tensor);
    places.push_back(i);
  }
  if (places.size() < 2 || !is_cast_on(tensors[0].device(), devices) || !is_usual_here()) {
    Py_RETURN_NONE;
  }
  {
    pybind11::gil_scoped_release without_gil;
    cast_together(tensors, to);
  }
  pybind11::tuple result(count);
  size_t next = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    const bool is_cast = next < places.size() && places[next] == i;
    PyObject* value = is_cast ? THPVariable_Wrap(std::move(tensors[next++])) : Py_NewRef(args[i]);
    PyTuple_SET_ITEM(result.ptr(), i, value);
  }
  return result.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"casts", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(casts)), METH_FASTCALL,
     "casts(dtype, devices, masks, *tensors) -> tuple | None"},
    {"linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(linear)), METH_FASTCALL | METH_KEYWORDS,
     "linear(low, devices, how, input, weight, bias) -> Tensor | None"},
    {"attention", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attention)), METH_FASTCALL,
     "attention(rounds, is_causal, scale, query, key, value) -> Tensor | None"},
    {"device_bit", device_bit, METH_O, "device_bit(device) -> int"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "nodes", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_nodes() {
  HANDLE_TH_ERRORS
  const auto owned = [](PyObject* value) {
    return value == nullptr ? throw python_error() : pybind11::reinterpret_steal<pybind11::object>(value);
  };
  const pybind11::object parameter = pybind11::module_::import("torch.nn").attr("Parameter");
  parameter_class = reinterpret_cast<PyTypeObject*>(parameter.inc_ref().ptr());
  const auto module = owned(PyModule_Create(&definition));
  // A byte that Python writes: whether GELU is looked up. None where another library computes it.
  module.attr("looks_up") = !register_gelu() ? pybind11::none().cast<pybind11::object>() :
      owned(PyMemoryView_FromMemory(reinterpret_cast<char*>(&looks_up), 1, PyBUF_WRITE));
  if (has_kernels) {
    module.attr("sketch") = pybind11::cpp_function(sketch, pybind11::call_guard<pybind11::gil_scoped_release>());
    module.attr("count") = pybind11::cpp_function(count, pybind11::call_guard<pybind11::gil_scoped_release>());
  }
  // The class of all nodes that torch has no class for.
  const auto node = owned(functionToPyObject(make_node<LinearBackward>()));
  module.attr("Node") = pybind11::type::of(node);
  return module.inc_ref().ptr();
  END_HANDLE_TH_ERRORS
}
