// A CUDA backend for PyTorch's CPU build: one device and one stream, on which nothing is computed. This is enough for
// fake tensors, which have a device, a shape and strides, but no memory.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct FakeHooks : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  at::DeviceIndex deviceCount() const override { return 1; }
};

const c10::Device gpu(c10::DeviceType::CUDA, 0);
const c10::Stream stream(c10::Stream::DEFAULT, gpu);

struct FakeGuard : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return gpu.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return gpu; }
  c10::Device getDevice() const override { return gpu; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream; }
  c10::Stream getDefaultStream(c10::Device) const override { return stream; }
  c10::Stream getNewStream(c10::Device, int) const override { return stream; }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream; }
  c10::Stream exchangeStream(c10::Stream previous) const noexcept override { return previous; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// The kernel that scaled_dot_product_attention selects on a GPU (an at::SDPBackend): flash attention in 16 bits without
// a mask; memory-efficient attention if queries and keys have the same number of heads; else all scores in memory.
int64_t select_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
  const bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  if (half && !mask.has_value() && q.size(-1) <= 256) return 1;
  return q.size(-3) == k.size(-3) ? 2 : 0;
}

const c10::impl::DeviceGuardImplRegistrar registered_guard(c10::DeviceType::CUDA, new FakeGuard());
const at::native::RegisterCUDADispatch<decltype(at::native::_fused_sdp_choice_stub)> registered_attention(
    at::native::_fused_sdp_choice_stub, &select_attention);

}  // namespace

namespace at {
using CUDAHooks = FakeHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
