// Tensors on the device that guard.cpp has torch take for real: plain ones, with memory that nobody reads or writes.
//
// An op finds the shapes of its results by torch's functions for meta tensors. `start` and `stop` log the ops, below
// modes, autograd and autocast; so a program runs as on a device, and with hmpx's compiled nodes.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstdlib>
#include <set>
#include <sstream>

#include "guard.cpp"  // not compiled by itself: most of the time goes into torch's headers

// WITH_KERNELS: the names of the ops that have kernels of their own on CUDA. `build` makes it of torch's headers.
#include "with_kernels.h"

namespace {

#ifdef FAKE_XPU
constexpr auto KEY = c10::DispatchKey::XPU;
#define BACKEND XPU
#else
constexpr auto KEY = c10::DispatchKey::CUDA;
#define BACKEND CUDA
#endif

// --- memory and views ----------------------------------------------------------------------------

struct Memory final : public c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::malloc(size) : nullptr;
    return {data, data, &std::free, c10::Device(DEVICE, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void*, const void*, std::size_t) const override {}
};

Memory memory;

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(KEY), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, c10::DispatchKeySet(KEY),
      c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (self.storage().nbytes() < needed) {
    self.storage().set_data_ptr_noswap(memory.allocate(needed));
    self.storage().set_nbytes(needed);
  }
  return self;
}

at::Tensor& set_(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

// --- the log -------------------------------------------------------------------------------------

using Tensors = std::vector<at::Tensor>;

bool is_logging = false;
std::ostringstream lines;

void write(const Tensors& tensors) {
  lines << '[';
  const char* separator = "";
  for (const auto& each : tensors) {
    if (!each.defined()) {
      continue;
    }
    const auto* storage = each.has_storage() ? each.storage().unsafeGetStorageImpl() : nullptr;
    lines << separator << "[\"" << c10::toString(each.scalar_type()) << "\"," << each.numel() * each.element_size()
          << ',' << reinterpret_cast<uintptr_t>(storage) << ",\"" << c10::DeviceTypeName(each.device().type(), true)
          << "\"," << each.dim() << ']';
    separator = ",";
  }
  lines << ']';
}

// A line of JSON: the name, and of each input and output the dtype, bytes, storage, device type and dimensions.
void log(const std::string& name, const Tensors& inputs, const Tensors& outputs) {
  if (is_logging) {
    lines << "[\"" << name << "\",";
    write(inputs);
    lines << ',';
    write(outputs);
    lines << "]\n";
  }
}

// --- ops -----------------------------------------------------------------------------------------

void collect(Tensors& found, const c10::IValue& value) {
  if (value.isTensor()) {
    found.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) {
      collect(found, each);
    }
  }
}

at::Tensor on_meta(const at::Tensor& tensor) {
  // Numbers are tensors of the CPU.
  const bool stays = !tensor.defined() || (tensor.device().is_cpu() && !tensor.dim());
  return stays ? tensor : at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

at::Tensor on_device(const at::Tensor& tensor) {
  const bool stays = !tensor.defined() || !tensor.device().is_meta();
  return stays
      ? tensor
      : at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::Device(DEVICE, 0)));
}

template <typename F>
c10::IValue mapped(const c10::IValue& value, F function) {
  if (value.isTensor()) {
    return function(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> result;
    for (const at::Tensor& each : value.toTensorList()) {
      result.push_back(function(each));
    }
    return result;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> result;
    for (const c10::IValue& each : value.toListRef()) {
      result.push_back(each.isNone() ? std::optional<at::Tensor>() : function(each.toTensor()));
    }
    return result;
  }
  return value.isDevice() ? c10::IValue(c10::Device(at::kMeta)) : value;
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.name().substr(sizeof("aten::") - 1);
  const size_t count = schema.arguments().size(), returned = schema.returns().size();
  const std::vector<c10::IValue> given(stack->end() - count, stack->end());
  static const std::set<std::string> only_write = {"copy_", "_foreach_copy_", "fill_", "zero_"};
  Tensors inputs, written;
  std::vector<c10::IValue> targets;
  bool has_out = false;
  for (size_t i = 0; i < count; i++) {
    const auto& argument = schema.arguments()[i];
    const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    const bool is_out = is_written && argument.is_out();
    has_out |= is_out;
    if (is_written) {
      collect(written, given[i]);
      targets.push_back(given[i]);
    }
    if (!is_out && !(is_written && only_write.count(name))) {
      collect(inputs, given[i]);
    }
  }
  if (has_out || targets.empty()) {
    for (size_t i = 0; i < count; i++) {
      (*stack)[stack->size() - count + i] = mapped(given[i], on_meta);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  } else {  // in place
    torch::jit::drop(*stack, count);
    stack->insert(stack->end(), targets.begin(), targets.begin() + returned);
  }
  Tensors outputs;
  for (size_t i = 0; i < returned; i++) {
    auto& result = (*stack)[stack->size() - returned + i];
    if (has_out) {
      const at::Tensor& target = targets[i].toTensor();
      if (target.sizes() != result.toTensor().sizes()) {
        target.resize_(result.toTensor().sizes());
      }
      result = target;
    } else {
      result = mapped(result, on_device);
    }
    collect(outputs, result);
  }
  log(name, inputs, returned ? outputs : written);
}

at::Scalar read(const at::Tensor& self) {
  log("_local_scalar_dense", {self}, {});
  return c10::isFloatingType(self.scalar_type()) ? at::Scalar(1.0) : at::Scalar(1);
}

bool are_equal(const at::Tensor& self, const at::Tensor& other) {
  log("equal", {self, other}, {});
  return true;
}

TORCH_LIBRARY_IMPL(aten, BACKEND, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_local_scalar_dense", &read);
  m.impl("equal", &are_equal);
}

TORCH_LIBRARY_IMPL(_, BACKEND, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

// Composite functions would take these apart.
const auto registered = [] {
  std::vector<c10::RegistrationHandleRAII> handles;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& op : dispatcher.getAllOpNames()) {
    if (op.name.rfind("aten::", 0) == 0 && WITH_KERNELS.count(op.name.substr(sizeof("aten::") - 1))) {
      auto kernel = c10::KernelFunction::makeFromBoxedFunction<&run>();
      handles.push_back(dispatcher.registerImpl(op, KEY, std::move(kernel), std::nullopt, nullptr, "fake device"));
    }
  }
  return handles;
}();

}  // namespace

extern "C" void start() {
  lines.str("");
  is_logging = true;
}

extern "C" const char* stop() {
  static std::string text;
  is_logging = false;
  text = lines.str();
  return text.c_str();
}
