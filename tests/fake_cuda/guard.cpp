// Has torch take CUDA (XPU, if FAKE_XPU is defined) for a device that is there, once, whose kernels and
// streams do nothing.
//
// A build of torch for CPUs refuses fake tensors on other devices, since nobody is registered who could
// switch between devices and streams. To be loaded before torch is imported.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#ifdef FAKE_XPU
constexpr auto DEVICE = c10::DeviceType::XPU;
#else
constexpr auto DEVICE = c10::DeviceType::CUDA;
#endif

namespace {

struct Guard final : public c10::impl::NoOpDeviceGuardImpl<DEVICE> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}

 private:
  static c10::Device device() { return c10::Device(DEVICE, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }
};

}  // namespace

namespace at {

template <typename Interface>
struct Hooks : public Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
};

#ifdef FAKE_XPU
struct FakeHooks final : public Hooks<XPUHooksInterface> {
  FakeHooks() = default;
  FakeHooks(XPUHooksArgs) {}
  bool hasXPU() const override { return true; }
  DeviceIndex getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
};
C10_REGISTER_CLASS(XPUHooksRegistry, XPUHooks, FakeHooks)
#else
struct FakeHooks final : public Hooks<CUDAHooksInterface> {
  FakeHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)
#endif

}  // namespace at

namespace c10::impl {
#ifdef FAKE_XPU
C10_REGISTER_GUARD_IMPL(XPU, Guard);
#else
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
#endif
}  // namespace c10::impl
