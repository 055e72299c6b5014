// A CUDA device made of host memory, for a build of torch without CUDA.
//
// Tensors on it are computed by the CPU's kernels on the same memory, while dispatch, device guards, pinned memory and autograd's
// threads per device are those of a real one. What it cannot show: speed, numerics of cuDNN and cuBLAS, streams, memory limits.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::IntArrayRef;

constexpr auto kCuda = c10::DeviceType::CUDA;
constexpr size_t kAlignment = 64;
thread_local DeviceIndex current = 0;

DeviceIndex device_count() {
  const char* given = std::getenv("PRETEND_CUDA_DEVICES");
  return given ? static_cast<DeviceIndex>(std::atoi(given)) : 2;
}

void select_device(Device device) {
  if (device.index() >= 0) current = device.index();
}

Device device_or_current(std::optional<Device> given) {
  return Device(kCuda, given && given->has_index() ? given->index() : current);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    select_device(device);
    return before;
  }
  Device getDevice() const override { return Device(kCuda, current); }
  void setDevice(Device device) const override { select_device(device); }
  void uncheckedSetDevice(Device device) const noexcept override { select_device(device); }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

void* aligned_memory(size_t bytes) { return std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment); }

// Memory of the current device.
struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = aligned_memory(bytes);
    return {data, data, &std::free, Device(kCuda, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceMemory device_memory;

// Host memory that is remembered as pinned, so that Tensor.is_pinned tells the truth.
struct PinnedMemory final : c10::Allocator {
  static inline std::mutex lock;
  static inline std::unordered_map<const void*, size_t> blocks;
  static void drop(void* data) {
    const std::lock_guard guard(lock);
    blocks.erase(data);
    std::free(data);
  }
  static bool owns(const void* data) {
    const std::lock_guard guard(lock);
    for (const auto& [start, bytes] : blocks)
      if (data >= start && data < static_cast<const char*>(start) + bytes) return true;
    return false;
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = aligned_memory(bytes);
    const std::lock_guard guard(lock);
    blocks[data] = bytes + 1;
    return {data, data, &drop, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

// A random stream of the device. Seeded alike it draws what the CPU's generator draws, so that runs can be compared.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index) {
    device_ = Device(kCuda, index);
    key_set_ = c10::DispatchKeySet(DispatchKey::CUDA);
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static const auto all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < device_count(); ++i) made.push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return all.at(index < 0 ? current : index);
}

// While it lives, the CPU's default generator draws from the device's stream.
class DrawsFrom {
 public:
  explicit DrawsFrom(const at::Generator& generator)
      : device_(static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl())),
        host_(at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator())) {
    exchange();
  }
  ~DrawsFrom() { exchange(); }
  DrawsFrom(const DrawsFrom&) = delete;
  DrawsFrom& operator=(const DrawsFrom&) = delete;

 private:
  void exchange() {
    const auto engine = host_->engine();
    host_->set_engine(device_->engine());
    device_->set_engine(engine);
    const auto single = host_->next_float_normal_sample();
    host_->set_next_float_normal_sample(device_->next_float_normal_sample());
    device_->set_next_float_normal_sample(single);
    const auto twice = host_->next_double_normal_sample();
    host_->set_next_double_normal_sample(device_->next_double_normal_sample());
    device_->set_next_double_normal_sample(twice);
  }

  at::CPUGeneratorImpl* device_;
  at::CPUGeneratorImpl* host_;
};

bool hands_out_defaults = false;

}  // namespace

// While it is on, torch.Generator("cuda:i") gives the default generator of device i, which Python has no other way to reach.
extern "C" void pretend_cuda_hand_out_defaults(int on) { hands_out_defaults = on != 0; }

namespace at {
struct PretendHooks final : CUDAHooksInterface {
  PretendHooks(CUDAHooksArgs = {}) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { select_device(Device(kCuda, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex before = current;
    setCurrentDevice(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  Device getDeviceFromPtr(void*) const override { return Device(kCuda, current); }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::owns(data); }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  Generator getNewGenerator(DeviceIndex index) const override {
    return hands_out_defaults ? default_generator(index) : make_generator<DeviceGenerator>(index < 0 ? current : index);
  }
  void deviceSynchronize(DeviceIndex) const override {}
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendHooks)
}  // namespace at

namespace {

// The same memory seen from another device; it keeps the owner of the memory alive.
Tensor seen_from(const Tensor& tensor, Device device, DispatchKey key) {
  auto* memory = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  auto* owner = new c10::Storage(tensor.storage());
  c10::DataPtr data(memory->mutable_data(), owner, [](void* held) { delete static_cast<c10::Storage*>(held); }, device);
  c10::Allocator* allocator = device.is_cpu() ? c10::GetCPUAllocator() : &device_memory;
  c10::Storage storage(c10::Storage::use_byte_size_t(), memory->nbytes(), std::move(data), allocator, /*resizable=*/true);
  auto seen = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = seen.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return seen;
}

Tensor on_host(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? seen_from(tensor, Device(c10::kCPU), DispatchKey::CPU) : tensor;
}

Tensor on_device(const Tensor& tensor, Device device) {
  return tensor.defined() && tensor.is_cpu() ? seen_from(tensor, device, DispatchKey::CUDA) : tensor;
}

// One call of an operator: its arguments on the device, as the host sees them, and the way back for its results.
class Call {
 public:
  Tensor to_host(const Tensor& tensor) {
    auto host = on_host(tensor);
    if (tensor.defined() && tensor.is_cuda()) {
      if (pairs_.empty()) device_ = tensor.device();
      pairs_.emplace_back(tensor, host);
    }
    return host;
  }

  void ask_for(Device device) {
    if (!device_) device_ = device_or_current(device);
  }

  DeviceIndex index() const { return device_ ? device_->index() : current; }

  Tensor to_device(const Tensor& result) const {
    if (!result.defined() || !result.is_cpu() || !device_) return result;
    for (const auto& [device, host] : pairs_)
      if (host.is_same(result)) return resized(device, host);
    for (const auto& [device, host] : pairs_)
      if (result.numel() && result.storage().data() == device.storage().data()) return view_of(device, result);
    return on_device(result, *device_);
  }

 private:
  // An argument that is also the result; out= may have grown.
  static Tensor resized(const Tensor& device, const Tensor& host) {
    if (host.sizes() != device.sizes() || host.strides() != device.strides()) {
      device.unsafeGetTensorImpl()->set_storage_keep_dtype(on_device(host, device.device()).storage());
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    }
    return device;
  }

  static Tensor view_of(const Tensor& device, const Tensor& host) {
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(device.storage()), device.key_set(), host.dtype());
    view.unsafeGetTensorImpl()->set_storage_offset(host.storage_offset());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    return view;
  }

  std::vector<std::pair<Tensor, Tensor>> pairs_;
  std::optional<Device> device_;
};

// Every operator without an entry of its own below: the CPU's kernel on the device's memory.
void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call;
  std::optional<at::Generator> generator;
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.to_host(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.to_host(tensor));
      value = c10::IValue(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<Tensor>(call.to_host(*tensor)) : std::nullopt);
      value = c10::IValue(list);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      call.ask_for(value.toDevice());
      value = c10::IValue(Device(c10::kCPU));
    } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      generator = value.toGenerator();
      value = c10::IValue(at::detail::getDefaultCPUGenerator());
    }
  }
  if (generator || op.hasTag(at::Tag::nondeterministic_seeded)) {
    const DrawsFrom drawing(generator ? *generator : default_generator(call.index()));
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  }
  const size_t results = op.schema().returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.to_device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.to_device(tensor));
      value = c10::IValue(list);
    }
  }
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}

Tensor view(const Tensor& self, IntArrayRef size) { return at::cpu::view(self, size); }
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::_reshape_alias(self, size, stride);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  on_host(self).copy_(on_host(source));
  return self;
}
Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Scalar item(const Tensor& self) { return at::_local_scalar_dense(on_host(self)); }

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto fresh = at::empty(size, self.options());
  const auto kept = std::min(self.numel(), fresh.numel());
  if (kept) on_host(fresh).view(-1).narrow(0, 0, kept).copy_(on_host(self).reshape(-1).narrow(0, 0, kept));
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(fresh.sizes(), fresh.strides());
  return self;
}

Tensor& set_sized(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  impl->set_sizes_contiguous(size);
  if (!stride.empty()) impl->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_whole(Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_sized(self, std::move(source), 0, {count}, {1});
}

Tensor& set_as(Tensor& self, const Tensor& source) {
  return set_sized(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

const struct Allocators {
  Allocators() { c10::SetAllocator(kCuda, &device_memory, 100); }
} allocators;

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", item);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_sized);
  library.impl("set_.source_Storage", set_whole);
  library.impl("set_.source_Tensor", set_as);
  // These have a composite kernel that would look for cuDNN.
  for (const auto* name : {"convolution", "convolution_backward", "native_batch_norm", "native_batch_norm_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}
