// A linear layer with its casts as one autograd node, instead of View, T, Addmm, View and three of ToCopy; and
// casts of another call's inputs as one node and one launch.
//
// `linear` and `casts` return None for whatever is unusual, and the caller then takes torch's way. Outputs and
// gradients have torch's bits: the kernels are the same, and gradients are summed and cast at the same places.

#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
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
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <span>

namespace {

using at::Tensor;
using torch::autograd::CompiledNodeArgs;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::SwapSavedVariables;
using torch::autograd::variable_list;

template <typename T>
using Few = c10::SmallVector<T, 3>;

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
      K::Python, K::PythonTLSSnapshot, K::PythonDispatcher, K::PreDispatch, K::Functionalize,
      K::FuncTorchBatched, K::FuncTorchGradWrapper, K::FuncTorchVmapMode, K::Batched,
      K::FuncTorchDynamicLayerFrontMode, K::FuncTorchDynamicLayerBackMode,
      K::Negative, K::Conjugate, K::ZeroTensor, K::TESTING_ONLY_GenericMode,
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

bool is_plain(PyObject* value) {
  return reinterpret_cast<PyObject*>(Py_TYPE(value)) == THPVariableClass ||
      Py_TYPE(value) == parameter_class;
}

// --- nodes ---------------------------------------------------------------------------------------

// Whether ops on it are dispatched as torch's nodes have them: they are recorded, or a transform's rules apply.
bool is_dispatched(const Tensor& gradient) {
  return at::GradMode::is_enabled() || gradient.key_set().has_any(unusual_keys()) ||
      c10::impl::tls_local_dispatch_key_set().included_.has_any(unusual_keys());
}

Tensor with_dtype(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

// Casts several tensors by one launch, where the device has such a kernel.
void copy_all(at::TensorList to, at::TensorList from) {
  if (to.size() > 1 && !to[0].is_cpu()) {
    at::_foreach_copy_(to, from);
    return;
  }
  for (size_t i = 0; i < to.size(); i++) {
    to[i].copy_(from[i]);
  }
}

// Which of a node's gradients are wanted, as bits.
int64_t wanted_by(const Node& node, size_t count) {
  int64_t wanted = 0;
  for (size_t i = 0; i < count; i++) {
    wanted |= static_cast<int64_t>(node.task_should_compute_output(i)) << i;
  }
  return wanted;
}

// Puts a call of the function bound as `name` into the graph that compiled autograd traces.
variable_list traced(
    const Node& node,
    SwapSavedVariables& saved,
    const std::string& name,
    const variable_list& gradients,
    const torch::dynamo::autograd::ivalue_list& arguments) {
  using torch::dynamo::autograd::IValuePacker;
  const auto metadata = torch::dynamo::autograd::get_input_metadata(node.next_edges());
  return torch::dynamo::autograd::getPyCompilerInterface()->call_function(
      saved.get_py_compiler(), "apply_functional", name, gradients, arguments,
      IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(metadata));
}

struct CastsBackward : public Node {
  std::vector<int64_t> dtypes;

  static variable_list compute(
      const variable_list& gradients, const std::vector<int64_t>& dtypes, int64_t wanted) {
    variable_list results(gradients.size());
    Few<Tensor> to, from;
    for (size_t i = 0; i < gradients.size(); i++) {
      const auto dtype = static_cast<at::ScalarType>(dtypes[i]);
      if (!gradients[i].defined() || !(wanted >> i & 1)) {
        continue;
      }
      if (gradients[i].scalar_type() == dtype || is_dispatched(gradients[i])) {
        results[i] = gradients[i].to(dtype);
        continue;
      }
      at::AutoDispatchBelowADInplaceOrView guard;
      results[i] = at::empty_like(gradients[i], gradients[i].options().dtype(dtype));
      to.push_back(results[i]);
      from.push_back(gradients[i]);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    copy_all(to, from);
    return results;
  }

  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK(gradients.size() == dtypes.size(), name(), " takes ", dtypes.size(), " gradients");
    return compute(gradients, dtypes, wanted_by(*this, dtypes.size()));
  }

  std::string name() const override {
    return "ToCopyBackward0";
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(dtypes);
  }

  variable_list apply_with_saved(const variable_list& inputs, SwapSavedVariables& saved) override {
    static const auto bound = torch::dynamo::autograd::getPyCompilerInterface()->bind_function(
        saved.get_py_compiler(), "HmpxCastsBackward",
        [](const variable_list& gradients, const std::vector<at::IValue>& given) {
          return compute(gradients, given[0].toIntVector(), given[1].toInt());
        },
        {at::ListType::ofInts(), at::IntType::get()});
    return traced(*this, saved, bound, inputs, {dtypes, wanted_by(*this, dtypes.size())});
  }
};

// A linear layer and the casts of its inputs.
//
// A backward that is recorded makes x and the weight, as the product read them, further outputs of this node. Their
// gradients in a double backward are added to those of the product before the cast, as torch adds them.
struct LinearBackward : public Node {
  SavedVariable x, weight;  // x as the product read it; the weight so, or to be cast again
  std::vector<int64_t> dtypes;  // of x, the weight and the bias
  std::vector<int64_t> bias_sizes;  // none without a bias
  std::vector<int64_t> further;  // which input each further output is, 0 or 1
  bool is_matrix = false;  // x is one, and was not cast
  bool is_needed = false;  // after a backward of further outputs alone

  static variable_list compute(
      const variable_list& gradients, const Tensor& x, const Tensor& given_weight,
      const std::vector<int64_t>& dtypes, const std::vector<int64_t>& bias_sizes,
      const std::vector<int64_t>& further, int64_t wanted) {
    variable_list results(dtypes.size());
    if (const Tensor& gradient = gradients[0]; gradient.defined()) {
      // In torch's order, which a double backward adds in.
      const Tensor flat = flattened(gradient);
      if (wanted & 1) {
        const Tensor weight = with_dtype(given_weight, gradient.scalar_type());
        results[0] = flat.mm(weight);
        if (gradient.dim() != 2) {
          auto sizes = c10::SymDimVector(gradient.sym_sizes());
          sizes.back() = weight.sym_size(1);
          results[0] = results[0].view_symint(sizes);
        }
      }
      if (wanted & 2) {
        results[1] = flat.t().mm(flattened(x));
      }
      if (wanted & 4) {
        results[2] = at::sum_to(flat, bias_sizes);
      }
    }
    for (size_t i = 1; i < gradients.size(); i++) {
      auto& result = results[further[i - 1]];
      if (gradients[i].defined()) {
        result = result.defined() ? result + gradients[i] : gradients[i];
      }
    }
    return CastsBackward::compute(results, dtypes, wanted);
  }

  variable_list apply(variable_list&& gradients) override {
    // Another thread may release the graph.
    std::lock_guard<std::mutex> lock(mutex_);
    is_needed = !gradients[0].defined();
    const auto wanted = is_needed ? 0 : wanted_by(*this, num_outputs());
    const Tensor w = wanted & 1 ? read(weight, 1) : Tensor();
    const Tensor input = wanted & 2 ? is_matrix ? x.unpack(getptr()) : read(x, 0) : Tensor();
    std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
    if (!is_dispatched(gradients[0])) {
      guard.emplace();
    }
    return compute(gradients, input, w, dtypes, bias_sizes, further, wanted_by(*this, num_outputs()));
  }

  // Returns what the product read as the input of that number; a further output if the backward is recorded.
  Tensor read(const SavedVariable& saved, int64_t input) {
    Tensor found = saved.unpack(getptr());
    if (!at::GradMode::is_enabled() || !next_edge(input).is_valid()) {
      return found;
    }
    found = with_dtype(found.detach(), input_metadata(0).dtype().toScalarType());
    const auto known = std::find(further.begin(), further.end(), input);
    uint32_t number = known - further.begin() + 1;
    if (known == further.end()) {
      further.push_back(input);
      number = add_input_metadata(found);
    }
    torch::autograd::impl::set_gradient_edge(found, {getptr(), number});
    return found;
  }

  static Tensor flattened(const Tensor& tensor) {
    return tensor.dim() == 2 ? tensor : tensor.reshape_symint({-1, tensor.sym_size(-1)});
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!std::exchange(is_needed, false)) {
      x.reset_data();
      weight.reset_data();
    }
  }

  std::string name() const override {
    return "LinearBackward0";
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(x, /*is_output=*/false);
    args.collect(weight, /*is_output=*/false);
    args.collect(dtypes);
    args.collect(bias_sizes);
    args.collect(further);
  }

  variable_list apply_with_saved(const variable_list& inputs, SwapSavedVariables& saved) override {
    saved.before(x);
    saved.before(weight);
    const auto wanted = wanted_by(*this, num_outputs());
    static const auto bound = torch::dynamo::autograd::getPyCompilerInterface()->bind_function(
        saved.get_py_compiler(), "HmpxLinearBackward",
        [](const variable_list& gradients, const std::vector<at::IValue>& given) {
          return compute(
              gradients, given[0].toTensor(), given[1].toTensor(), given[2].toIntVector(),
              given[3].toIntVector(), given[4].toIntVector(), given[5].toInt());
        },
        {at::TensorType::get(), at::TensorType::get(), at::ListType::ofInts(),
         at::ListType::ofInts(), at::ListType::ofInts(), at::IntType::get()});
    const Tensor w = wanted & 1 ? weight.unpack(getptr()) : Tensor();
    const Tensor input = wanted & 2 ? x.unpack(getptr()) : Tensor();
    auto results = traced(*this, saved, bound, inputs, {input, w, dtypes, bias_sizes, further, wanted});
    saved.after(x);
    saved.after(weight);
    return results;
  }
};

// --- the function --------------------------------------------------------------------------------

// Replaces tensors of other dtypes by their casts, which share a node.
void cast_all(std::span<Tensor> tensors, at::ScalarType dtype, bool learns) {
  Few<Tensor> to, from;
  Few<size_t> places;
  for (size_t i = 0; i < tensors.size(); i++) {
    if (tensors[i].defined() && tensors[i].scalar_type() != dtype) {
      places.push_back(i);
      from.push_back(tensors[i]);
    }
  }
  if (places.empty()) {
    return;
  }
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    for (const auto& each : from) {
      to.push_back(at::empty_like(each, each.options().dtype(dtype)));
    }
    copy_all(to, from);
  }
  decltype(make_node<CastsBackward>()) node;
  for (size_t i = 0; i < places.size(); i++) {
    if (learns && from[i].requires_grad()) {
      if (!node) {
        node = make_node<CastsBackward>();
      }
      node->add_next_edge(torch::autograd::impl::gradient_edge(from[i]));
      node->dtypes.push_back(static_cast<int64_t>(from[i].scalar_type()));
      torch::autograd::set_history(to[i], node);
    }
    tensors[places[i]] = std::move(to[i]);
  }
}

Tensor low_linear(const std::array<Tensor, 3>& tensors, at::ScalarType low) {
  const auto& [x, weight, bias] = tensors;
  const bool learns = at::GradMode::is_enabled() &&
      (x.requires_grad() || weight.requires_grad() || (bias.defined() && bias.requires_grad()));
  auto read = tensors;
  cast_all(read, low, /*learns=*/false);
  Tensor result;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    result = bias.defined() ? at::linear(read[0], read[1], read[2]) : at::linear(read[0], read[1]);
  }
  if (learns) {
    auto node = make_node<LinearBackward>();
    for (const auto& each : tensors) {
      if (each.defined()) {
        node->add_next_edge(torch::autograd::impl::gradient_edge(each));
        node->dtypes.push_back(static_cast<int64_t>(each.scalar_type()));
      }
    }
    if (bias.defined()) {
      node->bias_sizes = bias.sizes().vec();
    }
    node->is_matrix = x.dim() == 2 && x.scalar_type() == low;
    if (weight.requires_grad()) {
      node->x = SavedVariable(read[0], /*is_output=*/false);
    }
    if (x.requires_grad()) {
      node->weight = SavedVariable(read[1], /*is_output=*/false);
    }
    torch::autograd::set_history(result, node);
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

bool is_in_autocast(c10::DeviceType type) {
  return at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type);
}

// linear(low, devices, x, weight, bias) -> the result in the dtype `low`, or None
PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 5 && THPDtype_Check(args[0]) && PyLong_Check(args[1]),
                   "linear takes a dtype, an int and three tensors");
  if (!is_plain(args[2]) || !is_usual_here()) {
    Py_RETURN_NONE;
  }
  const auto low = reinterpret_cast<THPDtype*>(args[0])->scalar_type;
  const auto devices = PyLong_AsLongLong(args[1]);
  args += 2;
  const Tensor& x = THPVariable_Unpack(args[0]);
  const auto device = x.device();
  if (!(devices >> static_cast<int>(device.type()) & 1) || device.is_meta()) {
    Py_RETURN_NONE;
  }
  std::array<Tensor, 3> tensors;
  for (size_t i = 0; i < tensors.size(); i++) {
    if (i == 2 && args[i] == Py_None) {
      continue;
    }
    if (!is_plain(args[i])) {
      Py_RETURN_NONE;
    }
    tensors[i] = THPVariable_Unpack(args[i]);
    const auto dtype = tensors[i].scalar_type();
    if ((dtype != low && dtype != at::kFloat) || !is_usual(tensors[i], device) || !tensors[i].is_contiguous()) {
      Py_RETURN_NONE;
    }
  }
  const bool fits = x.dim() >= 2 && tensors[1].dim() == 2 &&
      (!tensors[2].defined() || tensors[2].dim() == 1);
  if (!fits || is_in_autocast(device.type())) {
    Py_RETURN_NONE;
  }
  Tensor result;
  {
    pybind11::gil_scoped_release without_gil;
    result = low_linear(tensors, low);
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
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
  Few<Tensor> tensors;
  Few<Py_ssize_t> places;
  bool learns = false;
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
    const bool is_eligible = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
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
    learns |= tensor.requires_grad();
  }
  if (places.size() < 2) {
    Py_RETURN_NONE;
  }
  const auto device = tensors[0].device();
  if (!(devices >> static_cast<int>(device.type()) & 1) || device.is_meta() || !is_usual_here() ||
      is_in_autocast(device.type())) {
    Py_RETURN_NONE;
  }
  {
    pybind11::gil_scoped_release without_gil;
    cast_all(tensors, to, learns && at::GradMode::is_enabled());
  }
  THPObjectPtr result(PyTuple_New(count));
  if (!result) {
    throw python_error();
  }
  size_t next = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    const bool is_cast = next < places.size() && places[next] == i;
    PyObject* value = is_cast ? THPVariable_Wrap(std::move(tensors[next++])) : Py_NewRef(args[i]);
    PyTuple_SET_ITEM(result.get(), i, value);
  }
  return result.release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"casts", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(casts)), METH_FASTCALL,
     "casts(dtype, devices, masks, *tensors) -> tuple | None"},
    {"linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(linear)), METH_FASTCALL,
     "linear(low, devices, x, weight, bias) -> Tensor | None"},
    {"device_bit", device_bit, METH_O, "device_bit(device) -> int"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "nodes", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_nodes() {
  PyObject* torch_nn = PyImport_ImportModule("torch.nn");
  if (torch_nn == nullptr) {
    return nullptr;
  }
  parameter_class = reinterpret_cast<PyTypeObject*>(PyObject_GetAttrString(torch_nn, "Parameter"));
  Py_DECREF(torch_nn);
  PyObject* module = parameter_class == nullptr ? nullptr : PyModule_Create(&definition);
  if (module == nullptr) {
    return nullptr;
  }
  // The class of all nodes that torch has no class for.
  PyObject* node = torch::autograd::functionToPyObject(make_node<LinearBackward>());
  if (node == nullptr || PyModule_AddObjectRef(module, "Node", reinterpret_cast<PyObject*>(Py_TYPE(node))) < 0) {
    Py_XDECREF(node);
    Py_DECREF(module);
    return nullptr;
  }
  Py_DECREF(node);
  return module;
}
