#include "device/cuda/cuda_runtime.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <future>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "device/cuda/check.hpp"
#include "device/cuda/device_heap.hpp"
#include "device/cuda_build.hpp"

namespace prl::cuda {
namespace {

constexpr std::size_t kHalfSlot = std::size_t{2} << 20;
/// Copies up to this size go through the ring, where they wait for nothing that was queued a moment ago.
constexpr std::size_t kRingCopy = std::size_t{512} << 10;
constexpr std::size_t kRingQuarter = std::size_t{4} << 20;
constexpr std::size_t kStageAlignment = 64;
/// Staged arrays that are compared with a new one.
constexpr std::size_t kMaxCompared = 64;

/// The calling thread's current device as far as this file set it; nobody else in the program sets one.
thread_local int active_device = -1;

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

/// As nvidia-smi and CUDA_VISIBLE_DEVICES write it.
std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

/// Why this process sees no GPU, in words; empty if it sees one.
std::string missing_text(cudaError_t status, int count, int driver) {
  if (status == cudaSuccess && count > 0) return "";
  if (driver == 0) return "no NVIDIA driver is loaded (libcuda.so.1 was not found)";
  if (status == cudaErrorInsufficientDriver) {
    int runtime = 0;
    (void)cudaRuntimeGetVersion(&runtime);
    return fmt::format("the NVIDIA driver knows CUDA {}, this build wants {}: update the driver", version_text(driver),
                       version_text(runtime));
  }
  if (status == cudaSuccess || status == cudaErrorNoDevice) return "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES?)";
  return cudaGetErrorString(status);
}

struct Visible {
  int count = 0, driver = 0;
  std::string missing;
  Visible() {
    (void)cudaDriverGetVersion(&driver);
    const cudaError_t status = cudaGetDeviceCount(&count);
    missing = missing_text(status, count, driver);
    if (!missing.empty()) count = 0;
    (void)cudaGetLastError();
  }
};

/// A copy of so many bytes is shared by threads, as one alone moves a sixth of what the link does between page-locked and other memory;
/// they leave one of the slots to others.
constexpr std::size_t kSharedCopy = std::size_t{64} << 20, kMaxStrands = 3;

/// strand(first, num_strands): of the copy's pieces those of numbers first, first + num_strands, ...
template <typename Strand>
void run_strands(std::size_t bytes, const Strand& strand) {
  const std::size_t num = bytes < kSharedCopy ? 1 : std::min<std::size_t>(kMaxStrands, std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::future<void>> others;
  for (std::size_t first = 1; first < num; ++first) others.push_back(std::async(std::launch::async, [&, first] { strand(first, num); }));
  strand(0, num);
  for (std::future<void>& other : others) other.get();
}

}  // namespace

void call_failed(const char* call, const char* file, int line, cudaError_t status) {
  (void)cudaGetLastError();
  const ErrorCode code = status == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kUnavailable;
  fail(code, "[cuda] {} failed at {}:{}: {} ({})", call, file, line, cudaGetErrorString(status), cudaGetErrorName(status));
}

CudaRuntime::CudaRuntime(int index, bool has_memory) : index_(index) {
  const Visible visible;
  if (!visible.missing.empty()) fail(ErrorCode::kUnavailable, "[cuda:{}] {}", index, visible.missing);
  if (index < 0 || index >= visible.count)
    fail(ErrorCode::kUnavailable, "[cuda:{}] there is no such GPU: this process sees {}, counted from 0", index, visible.count);
  activate();
  PRL_CUDA_CHECK(cudaGetDeviceProperties(&properties_, index));
  for (cudaStream_t* stream : {&stream_, &upload_stream_}) PRL_CUDA_CHECK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
  void* word = nullptr;
  PRL_CUDA_CHECK(cudaHostAlloc(&word, sizeof(std::uint64_t), cudaHostAllocMapped | cudaHostAllocPortable));
  fault_ = static_cast<FaultWord*>(word);
  *fault_ = 0;
  if (!has_memory) return;
  heap_ = DeviceHeap::of(index);
  heap_->add_stream(stream_);
}

CudaRuntime::~CudaRuntime() {
  if (cudaSetDevice(index_) != cudaSuccess) return;  // the process ends and the driver is gone
  active_device = index_;
  (void)cudaStreamSynchronize(stream_);
  for (Slot& slot : slots_) {
    if (slot.memory != nullptr) (void)cudaFreeHost(slot.memory);
    for (const cudaEvent_t event : slot.done)
      if (event != nullptr) (void)cudaEventDestroy(event);
  }
  free_ring();
  (void)cudaFreeHost(const_cast<std::uint64_t*>(fault_));
  if (heap_ != nullptr) heap_->remove_stream(stream_);
  (void)cudaStreamDestroy(upload_stream_);
  (void)cudaStreamDestroy(stream_);
}

void CudaRuntime::activate() const {
  if (active_device == index_) return;
  PRL_CUDA_CHECK(cudaSetDevice(index_));
  active_device = index_;
}

void* CudaRuntime::allocate(std::size_t bytes) {
  PRL_CHECK(heap_ != nullptr, "{} bytes wanted of a stream that has no memory", bytes);
  activate();
  void* pointer =
      bytes <= std::numeric_limits<std::size_t>::max() / 4 ? heap_->allocate(std::max<std::size_t>(bytes, 1), stream_) : nullptr;
  if (pointer == nullptr)
    fail(ErrorCode::kOutOfMemory,
         "[{} memory] wanted {} bytes, {} bytes are in use here and {} of {} bytes are free; use a smaller model, batch or cache",
         to_string(device()), bytes, bytes_in_use(), bytes_available(), properties_.totalGlobalMem);
  const std::size_t now = in_use_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  std::size_t peak = peak_.load(std::memory_order_relaxed);
  while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
  return pointer;
}

void CudaRuntime::deallocate(void* pointer, std::size_t bytes) noexcept {
  if (pointer == nullptr) return;
  in_use_.fetch_sub(bytes, std::memory_order_relaxed);
  if (active_device != index_) {
    if (cudaSetDevice(index_) != cudaSuccess) return;  // the process ends and the driver is gone
    active_device = index_;
  }
  heap_->deallocate(pointer, stream_);
}

/// A slot while one copy uses it.
class CudaRuntime::Lease {
 public:
  explicit Lease(CudaRuntime& runtime) : runtime_(&runtime) {
    std::unique_lock lock(runtime.slot_mutex_);
    runtime.slot_free_.wait(lock, [&] {  // ends when one of four copies ends
      for (Slot& s : runtime.slots_)
        if (!s.is_taken) slot_ = &s;
      return slot_ != nullptr;
    });
    if (slot_->memory == nullptr) {
      void* memory = nullptr;
      for (cudaEvent_t& event : slot_->done) PRL_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      PRL_CUDA_CHECK(cudaMallocHost(&memory, 2 * kHalfSlot));
      slot_->memory = static_cast<char*>(memory);
    }
    slot_->is_taken = true;
  }
  ~Lease() {
    {
      std::lock_guard lock(runtime_->slot_mutex_);
      slot_->is_taken = false;
    }
    runtime_->slot_free_.notify_one();
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  Slot* operator->() const { return slot_; }

 private:
  CudaRuntime* runtime_;
  Slot* slot_ = nullptr;
};

void CudaRuntime::copy_from_host(void* destination, const void* host, std::size_t bytes) {
  if (bytes == 0) return;
  activate();
  if (bytes <= kRingCopy) {
    std::lock_guard lock(ring_mutex_);
    const std::size_t offset = reserve_in_ring(bytes);
    char* pinned = ring_host_ + offset;
    std::memcpy(pinned, host, bytes);
    PRL_CUDA_CHECK(cudaMemcpyAsync(destination, pinned, bytes, cudaMemcpyHostToDevice, stream_));
    return;
  }
  run_strands(bytes, [&](std::size_t first, std::size_t num_strands) {
    activate();
    const Lease slot(*this);
    for (std::size_t at = first * kHalfSlot, half = 0; at < bytes; at += num_strands * kHalfSlot, half = 1 - half) {
      const std::size_t count = std::min(kHalfSlot, bytes - at);
      char* pinned = slot->memory + half * kHalfSlot;
      PRL_CUDA_CHECK(cudaEventSynchronize(slot->done[half]));  // a new event counts as passed
      std::memcpy(pinned, static_cast<const char*>(host) + at, count);
      PRL_CUDA_CHECK(cudaMemcpyAsync(static_cast<char*>(destination) + at, pinned, count, cudaMemcpyHostToDevice, stream_));
      PRL_CUDA_CHECK(cudaEventRecord(slot->done[half], stream_));
    }
  });
}

void CudaRuntime::copy_to_host(void* host, const void* source, std::size_t bytes) {
  if (bytes == 0) return;
  run_strands(bytes, [&](std::size_t first, std::size_t num_strands) {
    activate();
    const Lease slot(*this);
    const auto count_at = [&](std::size_t at) { return std::min(kHalfSlot, bytes - at); };
    const auto start = [&](std::size_t at, std::size_t half) {
      PRL_CUDA_CHECK(cudaMemcpyAsync(slot->memory + half * kHalfSlot, static_cast<const char*>(source) + at, count_at(at),
                                     cudaMemcpyDeviceToHost, stream_));
      PRL_CUDA_CHECK(cudaEventRecord(slot->done[half], stream_));
    };
    const std::size_t step = num_strands * kHalfSlot;
    if (first * kHalfSlot < bytes) start(first * kHalfSlot, 0);
    for (std::size_t at = first * kHalfSlot, half = 0; at < bytes; at += step, half = 1 - half) {
      if (at + step < bytes) start(at + step, 1 - half);  // runs while this half is read
      PRL_CUDA_CHECK(cudaEventSynchronize(slot->done[half]));
      std::memcpy(static_cast<char*>(host) + at, slot->memory + half * kHalfSlot, count_at(at));
    }
  });
  throw_fault();
}

class CudaRuntime::EventStopwatch final : public Stopwatch {
 public:
  explicit EventStopwatch(CudaRuntime& runtime) : runtime_(runtime) {
    runtime_.activate();
    for (cudaEvent_t& event : events_) PRL_CUDA_CHECK(cudaEventCreate(&event));
  }
  ~EventStopwatch() override {
    for (const cudaEvent_t event : events_) (void)cudaEventDestroy(event);
  }
  EventStopwatch(const EventStopwatch&) = delete;
  EventStopwatch& operator=(const EventStopwatch&) = delete;
  std::uint64_t mark() override {
    runtime_.activate();
    PRL_CUDA_CHECK(cudaEventRecord(events_[num_marks_ % kNumKept], runtime_.stream_));
    return num_marks_++;
  }
  double seconds(std::uint64_t from, std::uint64_t to) override {
    runtime_.activate();
    float milliseconds = 0;
    PRL_CUDA_CHECK(cudaEventSynchronize(events_[to % kNumKept]));
    PRL_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, events_[from % kNumKept], events_[to % kNumKept]));
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  CudaRuntime& runtime_;
  std::array<cudaEvent_t, kNumKept> events_{};
  std::uint64_t num_marks_ = 0;
};

std::unique_ptr<Stopwatch> CudaRuntime::make_stopwatch() { return std::make_unique<EventStopwatch>(*this); }

void CudaRuntime::copy_within(void* destination, const void* source, std::size_t bytes) {
  activate();
  if (bytes != 0) PRL_CUDA_CHECK(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDeviceToDevice, stream_));
}

void CudaRuntime::copy_from_device(void* destination, const DeviceRuntime& other, const void* source, std::size_t bytes) {
  PRL_CHECK(other.device().kind == DeviceKind::kCuda, "a copy from {} to {}", to_string(other.device()), to_string(device()));
  if (other.device().index == index_) return copy_within(destination, source, bytes);
  activate();
  if (bytes != 0) PRL_CUDA_CHECK(cudaMemcpyPeerAsync(destination, index_, source, other.device().index, bytes, stream_));
}

void CudaRuntime::zero(void* destination, std::size_t bytes) {
  activate();
  if (bytes != 0) PRL_CUDA_CHECK(cudaMemsetAsync(destination, 0, bytes, stream_));
}

void CudaRuntime::synchronize() {
  activate();
  PRL_CUDA_CHECK(cudaStreamSynchronize(stream_));
  throw_fault();
}

void CudaRuntime::throw_fault() {
  const std::uint64_t word = *fault_;
  if (word == 0) return;
  *fault_ = 0;
  const auto entry = static_cast<std::uint32_t>(word);
  const char* what = "an unknown op";
  switch (static_cast<Fault>(word >> 32)) {
    case Fault::kNone: break;
    case Fault::kEmbeddingId: what = "[embedding] id"; break;
    case Fault::kEmbeddingBackwardId: what = "[embedding_backward] id"; break;
    case Fault::kRopePosition: what = "[rope] position"; break;
    case Fault::kMissingPeer:
      fail(ErrorCode::kUnavailable, "[gather] rank {} of the GPUs that share layers did not send its part within 30 s (seen on {})", entry,
           to_string(device()));
  }
  fail(ErrorCode::kInvalidArgument, "{} {} lies outside its table (seen on {})", what, entry, to_string(device()));
}

std::size_t CudaRuntime::bytes_available() const {
  if (heap_ == nullptr) return 0;
  activate();
  return heap_->bytes_available();
}

void CudaRuntime::free_ring() noexcept {
  if (ring_host_ != nullptr) (void)cudaFreeHost(ring_host_);
  CudaRuntime::deallocate(ring_device_, 4 * quarter_bytes_);
  for (cudaEvent_t& event : ring_done_)
    if (event != nullptr) (void)cudaEventDestroy(std::exchange(event, nullptr));
  ring_host_ = ring_device_ = nullptr;
}

void CudaRuntime::make_ring(std::size_t quarter_bytes) {
  PRL_CUDA_CHECK(cudaStreamSynchronize(stream_));
  free_ring();
  staged_.clear();
  quarter_bytes_ = quarter_bytes;
  quarter_ = quarter_at_ = 0;
  void* memory = nullptr;
  PRL_CUDA_CHECK(cudaMallocHost(&memory, 4 * quarter_bytes));
  ring_host_ = static_cast<char*>(memory);
  ring_device_ = static_cast<char*>(CudaRuntime::allocate(4 * quarter_bytes));
  for (cudaEvent_t& event : ring_done_) PRL_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
}

std::size_t CudaRuntime::reserve_in_ring(std::size_t bytes) {
  if (4 * bytes > quarter_bytes_) make_ring(std::max(kRingQuarter, 4 * bytes));
  if (quarter_at_ + bytes > quarter_bytes_) {
    PRL_CUDA_CHECK(cudaEventRecord(ring_done_[quarter_], stream_));
    // Arrays found again must outlive what the same op stages after them, so only the quarter just left is kept.
    std::erase_if(staged_, [&](const Staged& s) { return s.offset / quarter_bytes_ != quarter_; });
    quarter_ = (quarter_ + 1) % ring_done_.size();
    quarter_at_ = 0;
    PRL_CUDA_CHECK(cudaEventSynchronize(ring_done_[quarter_]));
  }
  const std::size_t offset = quarter_ * quarter_bytes_ + quarter_at_;
  quarter_at_ += (bytes + kStageAlignment - 1) / kStageAlignment * kStageAlignment;
  return offset;
}

void CudaRuntime::upload(void* destination, const void* host, std::size_t bytes, cudaEvent_t after, cudaEvent_t done) {
  if (bytes > kRingCopy) return copy_from_host(destination, host, bytes);  // in the stream itself, where nothing need be waited for
  activate();
  std::lock_guard lock(ring_mutex_);
  const std::size_t offset = reserve_in_ring(bytes);
  char* const pinned = ring_host_ + offset;
  std::memcpy(pinned, host, bytes);
  PRL_CUDA_CHECK(cudaStreamWaitEvent(upload_stream_, after, 0));
  PRL_CUDA_CHECK(cudaMemcpyAsync(destination, pinned, bytes, cudaMemcpyHostToDevice, upload_stream_));
  PRL_CUDA_CHECK(cudaEventRecord(done, upload_stream_));
  // Before the ring's lock is released: what says that a part of the ring is free again is recorded in this stream.
  PRL_CUDA_CHECK(cudaStreamWaitEvent(stream_, done, 0));
}

const void* CudaRuntime::stage(const void* host, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  activate();
  std::lock_guard lock(ring_mutex_);
  std::size_t compared = 0;
  for (auto it = staged_.rbegin(); it != staged_.rend() && compared < kMaxCompared; ++it, ++compared)
    if (it->bytes == bytes && std::memcmp(ring_host_ + it->offset, host, bytes) == 0) return ring_device_ + it->offset;
  const std::size_t offset = reserve_in_ring(bytes);
  std::memcpy(ring_host_ + offset, host, bytes);
  PRL_CUDA_CHECK(cudaMemcpyAsync(ring_device_ + offset, ring_host_ + offset, bytes, cudaMemcpyHostToDevice, stream_));
  staged_.push_back({offset, bytes});
  return ring_device_ + offset;
}

namespace {

class RecordedGraph final : public RecordedWork {
 public:
  RecordedGraph(CudaRuntime& runtime, cudaStream_t stream, cudaGraph_t graph) : runtime_(runtime), stream_(stream) {
    for (cudaEvent_t* event : {&uploaded_, &ended_}) PRL_CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    PRL_CUDA_CHECK(cudaEventRecord(ended_, stream_));
    PRL_CUDA_CHECK(cudaGraphInstantiate(&executable_, graph, 0));
  }
  ~RecordedGraph() override {
    (void)cudaGraphExecDestroy(executable_);
    for (cudaEvent_t event : {uploaded_, ended_}) (void)cudaEventDestroy(event);
  }
  RecordedGraph(const RecordedGraph&) = delete;
  RecordedGraph& operator=(const RecordedGraph&) = delete;
  void upload(void* destination, const void* host, std::size_t bytes) override {
    runtime_.upload(destination, host, bytes, ended_, uploaded_);
  }
  void run() override {
    runtime_.activate();
    PRL_CUDA_CHECK(cudaGraphLaunch(executable_, stream_));
    PRL_CUDA_CHECK(cudaEventRecord(ended_, stream_));
  }

 private:
  CudaRuntime& runtime_;
  cudaStream_t stream_;
  cudaEvent_t uploaded_ = nullptr, ended_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

std::unique_ptr<RecordedWork> CudaRuntime::record(const std::function<void()>& work) {
  activate();
  PRL_CHECK(heap_ != nullptr, "work is recorded with the memory that it uses");
  const auto hold = heap_->hold();
  cudaGraph_t graph = nullptr;
  PRL_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  try {
    work();
  } catch (...) {
    (void)cudaStreamEndCapture(stream_, &graph);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    throw;
  }
  PRL_CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
  const std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, cudaError_t (*)(cudaGraph_t)> owner(graph, cudaGraphDestroy);
  return std::make_unique<RecordedGraph>(*this, stream_, graph);
}

CudaRuntime& runtime_of(DeviceRuntime& runtime) {
  PRL_CHECK(runtime.device().kind == DeviceKind::kCuda, "CUDA work on {}", to_string(runtime.device()));
  return static_cast<CudaRuntime&>(runtime);
}

}  // namespace prl::cuda

namespace prl {

std::shared_ptr<DeviceRuntime> make_cuda_runtime(int index) { return std::make_shared<cuda::CudaRuntime>(index); }
std::shared_ptr<DeviceRuntime> make_cuda_stream(int index) { return std::make_shared<cuda::CudaRuntime>(index, /*has_memory=*/false); }

bool has_cuda_build() noexcept { return true; }

CudaDevices list_cuda_devices() {
  const cuda::Visible visible;
  CudaDevices out{.devices = {}, .missing = visible.missing, .versions = ""};
  int runtime = 0;
  (void)cudaRuntimeGetVersion(&runtime);
  out.versions = fmt::format("driver {}, built with CUDA {} for {}", cuda::version_text(visible.driver), cuda::version_text(runtime),
                             PRL_CUDA_ARCH_TEXT);
  for (int i = 0; i < visible.count; ++i) {
    cudaDeviceProp p{};
    CudaDeviceInfo info;
    if (cudaGetDeviceProperties(&p, i) != cudaSuccess) continue;
    info.index = i;
    info.name = p.name;
    info.uuid = cuda::uuid_text(p.uuid);
    info.compute_major = p.major;
    info.compute_minor = p.minor;
    info.num_multiprocessors = p.multiProcessorCount;
    info.total_bytes = p.totalGlobalMem;
    info.l2_bytes = static_cast<std::size_t>(p.l2CacheSize);
    out.devices.push_back(std::move(info));
  }
  return out;
}

}  // namespace prl
