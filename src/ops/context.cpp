#include "ops/context.hpp"

#include "ops/cpu/table.hpp"
#include "ops/cuda_table.hpp"
#include "ops/op_table.hpp"

namespace prl::ops {

Workspace::~Workspace() {
  if (data_ != nullptr) runtime_->deallocate(data_, capacity_);
}

void* Workspace::require(std::size_t bytes) {
  if (bytes > capacity_) {
    if (data_ != nullptr) runtime_->deallocate(data_, capacity_);
    data_ = nullptr;
    capacity_ = 0;
    data_ = runtime_->allocate(bytes);
    capacity_ = bytes;
    ++generation_;
  }
  return data_;
}

std::string kernels_of(const DeviceRuntime& runtime) {
  if (runtime.device().kind == DeviceKind::kCpu) return fmt::format("the {} kernels of a CPU", cpu::to_string(cpu::chosen_kind()));
  for (const CudaDeviceInfo& device : list_cuda_devices().devices)
    if (device.index == runtime.device().index) return fmt::format("the kernels of an {}", device.name);
  return "the kernels of a GPU";
}

OpSession::OpSession(std::shared_ptr<DeviceRuntime> runtime, int num_threads) {
  const bool is_cpu = runtime->device().kind == DeviceKind::kCpu;
  const OpTable* table = is_cpu ? &cpu::op_table(cpu::chosen_kind()) : cuda_op_table();
  if (table == nullptr)
    fail(ErrorCode::kNotImplemented, "[ops] this build has no kernels for {}; build with CUDA or choose the CPU",
         to_string(runtime->device()));
  pool_ = std::make_unique<ThreadPool>(num_threads);
  workspace_ = std::make_unique<Workspace>(runtime);
  if (table->make_library != nullptr) library_ = table->make_library(runtime);
  context_.library = library_.get();
  context_.stream = runtime->stream();
  context_.runtime = std::move(runtime);
  context_.pool = pool_.get();
  context_.workspace = workspace_.get();
  context_.table = table;
}

OpSession::~OpSession() = default;

}  // namespace prl::ops
