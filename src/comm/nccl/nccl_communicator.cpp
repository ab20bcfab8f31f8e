#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "base/log.hpp"
#include "base/waiting.hpp"
#include "comm/communicator.hpp"
#include "comm/loss_watch.hpp"
#include "comm/nccl/nccl_api.hpp"

namespace prl::comm {

namespace {

using Clock = std::chrono::steady_clock;
/// How long a rank that waited in vain looks who else says that it waits: who says nothing is lost.
constexpr std::chrono::milliseconds kRollCall{2000};
/// How long the connections of the watch may take to be made.
constexpr std::chrono::milliseconds kWatchTimeout{20'000};
/// How often a rank that waits asks the watch. A rank that has finished may be gone before the others have read what it sent: the second
/// answer counts.
constexpr std::chrono::milliseconds kWatchInterval{500};
constexpr int kCudaNotReady = 600;

NcclType type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return NcclType::kFloat32;
    case DType::kBF16: return NcclType::kBfloat16;
    case DType::kI32: return NcclType::kInt32;
    case DType::kI64: return NcclType::kInt64;
    default: return NcclType::kUint8;
  }
}

/// Device memory for a tensor, which is the tensor's own unless that lies in host memory.
class OnDevice {
 public:
  OnDevice(ConstTensorView view, const std::shared_ptr<DeviceRuntime>& runtime, bool is_read)
      : view_(view), runtime_(runtime), bytes_(static_cast<std::size_t>(view.shape.num_elements()) * size_of(view.dtype)) {
    if (view.device == runtime->device()) {
      data_ = const_cast<void*>(view.data);
      return;
    }
    if (view.device.kind != DeviceKind::kCpu)
      fail(ErrorCode::kShape, "[comm] a tensor lies on {}, this group's ranks hold {}", to_string(view.device),
           to_string(runtime->device()));
    copy_ = Tensor::empty(runtime, {static_cast<std::int64_t>(bytes_)}, DType::kU8);
    data_ = copy_.data();
    if (is_read && bytes_ > 0) runtime->copy_from_host(data_, view.data, bytes_);
  }
  bool is_copy() const noexcept { return copy_.defined(); }
  std::size_t num_bytes() const noexcept { return bytes_; }
  char* at(std::int64_t element) const noexcept {
    return static_cast<char*>(data_) + static_cast<std::size_t>(element) * size_of(view_.dtype);
  }
  void write_back() const {
    if (is_copy() && bytes_ > 0) runtime_->copy_to_host(const_cast<void*>(view_.data), data_, bytes_);
  }

 private:
  ConstTensorView view_;
  std::shared_ptr<DeviceRuntime> runtime_;
  std::size_t bytes_;
  void* data_ = nullptr;
  Tensor copy_;
};

std::string join(const std::vector<int>& ranks) {
  std::string text;
  for (const int r : ranks) text += (text.empty() ? "" : ", ") + std::to_string(r);
  return text;
}

/// Whether a rank has died since a wait began, of which NCCL itself does not tell before the deadline.
class DeathCheck {
 public:
  explicit DeathCheck(LossWatch* watch) : watch_(watch) {}
  /// As often as one likes; the watch is asked every kWatchInterval.
  bool has_lost_a_rank() {
    if (watch_ == nullptr || Clock::now() - asked_ < kWatchInterval) return false;
    asked_ = Clock::now();
    const bool is_gone = !watch_->gone().empty();
    return std::exchange(was_gone_, is_gone) && is_gone;
  }

 private:
  LossWatch* watch_;
  Clock::time_point asked_ = Clock::now();
  bool was_gone_ = false;
};

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(CommOptions options) : Communicator(std::move(options)), api_(NcclApi::get()) {
    if (!api_.missing.empty()) fail(ErrorCode::kUnavailable, "[nccl] {}", api_.missing);
    if (options_.runtime == nullptr || options_.runtime->device().kind != DeviceKind::kCuda)
      fail(ErrorCode::kUnavailable, "[nccl] a rank needs a GPU of its own");
    if (api_.primary_context_retain(&context_, options_.runtime->device().index) != 0)
      fail(ErrorCode::kUnavailable, "[nccl] {} cannot be used", to_string(options_.runtime->device()));
    use_device();
    init();
  }
  ~NcclCommunicator() override {
    if (comm_ == nullptr) return;
    // A group that is whole is taken apart together; the others need not wait for a rank that failed.
    if (!is_closed_ && api_.comm_finalize(comm_) == kNcclInProgress)
      (void)poll(Clock::now() + std::chrono::seconds(5), "closing the group");
    (void)(is_closed_ ? api_.comm_abort(comm_) : api_.comm_destroy(comm_));
  }

  std::string_view backend() const noexcept override { return "nccl"; }
  std::vector<int> lost_ranks() const override { return loss_ ? loss_->ranks() : std::vector<int>{}; }
  void abort(std::string_view reason) noexcept override {
    if (is_closed_.exchange(true)) return;
    say("left", reason);
  }

 private:
  void use_device() const { (void)api_.context_set_current(context_); }
  void* stream() const noexcept { return options_.runtime->stream(); }

  void say(const char* what, std::string_view text) noexcept {
    try {
      options_.store->set(key(fmt::format("{}/{}", what, rank())), text.substr(0, 4096));
    } catch (const std::exception&) {
      // The others then take this rank for lost.
    }
  }

  void init() {
    const auto started = Clock::now();
    NcclUniqueId id{};
    if (rank() == 0) {
      check(api_.get_unique_id(&id), "get a unique id");
      options_.store->set(key("nccl-id"), {id.bytes, sizeof id.bytes});
    } else {
      std::string bytes;
      try {
        bytes = options_.store->wait(key("nccl-id"), options_.timeout, "rank 0");
      } catch (const Error& error) {
        throw PeerLost({0}, error.what());
      }
      if (bytes.size() != sizeof id.bytes) fail(ErrorCode::kCorrupt, "[nccl] an id of {} bytes", bytes.size());
      std::memcpy(id.bytes, bytes.data(), sizeof id.bytes);
    }
    NcclConfig config;
    const int result = api_.comm_init_rank_config(&comm_, size(), id, rank(), &config);
    if (result != kNcclInProgress) check(result, "connect");
    settle_result(poll(started + options_.timeout, "connecting"), "connecting", started);
    try {
      CommOptions options = options_;
      options.timeout = std::min(options.timeout, kWatchTimeout);
      watch_ = make_loss_watch(std::move(options));
    } catch (const Error& error) {
      log::warning("{}: a rank that dies is noticed at the deadline of what waits for it, {:.0f} s", error.what(),
                   std::chrono::duration<double>(options_.timeout).count());
    }
  }

  void check(int result, const char* what) const {
    if (result != kNcclSuccess) fail(ErrorCode::kInternal, "[nccl] rank {} cannot {}: {}", rank(), what, api_.get_error_string(result));
  }

  /// The state of what was started without blocking; kNcclInProgress after the deadline, or when a rank is lost.
  int poll(Clock::time_point deadline, const std::string& doing) {
    int state = kNcclInProgress;
    std::optional<Waiting> waiting;
    DeathCheck death(watch_.get());
    while (api_.comm_get_async_error(comm_, &state) == kNcclSuccess && state == kNcclInProgress && Clock::now() < deadline && !is_closed_ &&
           !death.has_lost_a_rank()) {
      report(waiting, deadline, doing);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return state;
  }

  /// Says after 10 s, and then less and less often, that this rank waits for the others. NCCL does not tell for which of them.
  void report(std::optional<Waiting>& waiting, Clock::time_point deadline, const std::string& doing) const {
    if (!waiting)
      waiting.emplace(Waiting::Options{
          .who = fmt::format("rank {} of {} (group '{}', generation {})", rank(), size(), options_.group, options_.generation),
          .what = "the others in " + doing,
          .limit = deadline - Clock::now(),
          .detail = [this] { return others(); }});
    waiting->check();
  }

  /// What the store knows of the other ranks: who left, and who waits in vain already.
  std::string others() const {
    std::string text = "over NCCL, which does not say who is late";
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      try {
        if (const auto word = options_.store->get(key(fmt::format("left/{}", r))))
          text += fmt::format("; rank {} has left: {}", r, *word);
        else if (const auto doing = options_.store->get(key(fmt::format("waits/{}", r))))
          text += fmt::format("; rank {} has given up waiting in {}", r, *doing);
      } catch (const Error& error) {
        return text + fmt::format("; the store cannot be asked: {}", error.what());
      }
    }
    return text;
  }

  void settle_result(int state, const std::string& doing, Clock::time_point started) {
    if (state == kNcclSuccess && !is_closed_) return;
    std::string reason = state == kNcclInProgress ? "nothing came" : api_.get_error_string(state);
    if (is_closed_) reason = "it was told to leave";
    say("waits", doing);
    std::vector<int> lost;
    std::string words;
    const auto deadline = Clock::now() + kRollCall;
    do {
      lost.clear();
      words.clear();
      for (int r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        try {
          if (const auto word = options_.store->get(key(fmt::format("left/{}", r)))) {
            lost.push_back(r);
            words += fmt::format("; rank {} gave up: {}", r, *word);
          } else if (!options_.store->get(key(fmt::format("waits/{}", r)))) {
            lost.push_back(r);
          }
        } catch (const Error&) {
          lost.push_back(r);
        }
      }
      // Who died will not say that it waits.
      std::vector<int> dead;
      if (watch_ != nullptr && words.empty()) std::ranges::set_intersection(lost, watch_->gone(), std::back_inserter(dead));
      if (!dead.empty()) {
        lost = dead;
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    } while (!lost.empty() && words.empty() && Clock::now() < deadline);
    loss_ = std::make_unique<PeerLost>(
        lost,
        fmt::format("[nccl] group '{}', generation {}: rank {} waited {:.2f} s in {} ({}); ranks that do not say that they wait: [{}]{}",
                    options_.group, options_.generation, rank(), std::chrono::duration<double>(Clock::now() - started).count(), doing,
                    reason, join(lost), words),
        !words.empty());
    is_closed_ = true;
    (void)api_.comm_abort(comm_);  // kernels that wait on the GPU end
    comm_ = nullptr;
    throw PeerLost(*loss_);
  }

  Clock::time_point deadline_of(const Call& call, Clock::time_point started) const {
    return started + call.timeout.value_or(options_.timeout);
  }

  /// Queues what `calls` asks of NCCL, as one group.
  void enqueue(const char* op, const Call& call, const std::function<int()>& calls) {
    if (loss_ != nullptr) throw PeerLost(*loss_);
    if (is_closed_) throw PeerLost({rank()}, fmt::format("[nccl] rank {} has left, {} cannot run", rank(), op));
    const auto started = Clock::now();
    last_ = call.what.empty() ? fmt::format("{} {}", op, ++num_operations_) : fmt::format("{} {} ({})", op, ++num_operations_, call.what);
    use_device();
    check(api_.group_start(), "start a group");
    const int asked = calls();
    const int ended = api_.group_end();
    if (asked != kNcclSuccess && asked != kNcclInProgress) check(asked, last_.c_str());
    if (ended != kNcclInProgress && ended != kNcclSuccess) check(ended, last_.c_str());
    settle_result(poll(deadline_of(call, started), last_), last_, started);
  }

  void do_settle(const Call& call) override {
    if (loss_ != nullptr) throw PeerLost(*loss_);
    const auto started = Clock::now();
    const auto deadline = deadline_of(call, started);
    use_device();
    std::optional<Waiting> waiting;
    DeathCheck death(watch_.get());
    for (;;) {
      const int state = api_.stream_query(stream());
      if (state == 0) return;
      if (state != kCudaNotReady) fail(ErrorCode::kInternal, "[nccl] the GPU's work failed (driver error {}) in {}", state, last_);
      int error = kNcclSuccess;
      (void)api_.comm_get_async_error(comm_, &error);
      if ((error != kNcclSuccess && error != kNcclInProgress) || Clock::now() >= deadline || is_closed_ || death.has_lost_a_rank())
        settle_result(error == kNcclSuccess ? kNcclInProgress : error, last_, started);
      report(waiting, deadline, last_);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  /// Tensors in host memory: done when the operation returns.
  void finish(const OnDevice& out, const Call& call) {
    if (!out.is_copy()) return;
    do_settle(call);
    out.write_back();
  }

  void do_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins, const Call& call) override {
    std::vector<OnDevice> to, from;
    for (std::size_t r = 0; r < outs.size(); ++r) {
      to.emplace_back(outs[r], options_.runtime, false);
      from.emplace_back(ins[r], options_.runtime, true);
    }
    enqueue("all_to_all", call, [&] {
      int result = kNcclSuccess;
      for (std::size_t r = 0; r < outs.size() && (result == kNcclSuccess || result == kNcclInProgress); ++r) {
        const int peer = static_cast<int>(r);
        if (from[r].num_bytes() > 0) result = api_.send(from[r].at(0), from[r].num_bytes(), NcclType::kUint8, peer, comm_, stream());
        if (to[r].num_bytes() > 0) result = api_.recv(to[r].at(0), to[r].num_bytes(), NcclType::kUint8, peer, comm_, stream());
      }
      return result;
    });
    for (const OnDevice& out : to) finish(out, call);
  }

  void do_all_gather(TensorView out, Parts parts, ConstTensorView in, const Call& call) override {
    const OnDevice to(out, options_.runtime, false), from(in, options_.runtime, true);
    const NcclType type = type_of(in.dtype);
    const std::size_t scale = type == NcclType::kUint8 ? size_of(in.dtype) : 1;
    const bool is_even = std::ranges::adjacent_find(parts.counts, std::ranges::not_equal_to()) == parts.counts.end();
    enqueue("all_gather", call, [&] {
      const auto own = static_cast<std::size_t>(in.shape.num_elements()) * scale;
      if (is_even) return own == 0 ? kNcclSuccess : api_.all_gather(from.at(0), to.at(0), own, type, comm_, stream());
      std::int64_t at = 0;
      int result = kNcclSuccess;
      for (int r = 0; r < size() && (result == kNcclSuccess || result == kNcclInProgress); ++r) {
        const std::int64_t n = parts.counts[static_cast<std::size_t>(r)];
        if (n > 0)
          result = api_.broadcast(r == rank() ? from.at(0) : to.at(at), to.at(at), static_cast<std::size_t>(n) * scale, type, r, comm_,
                                  stream());
        at += n;
      }
      return result;
    });
    finish(to, call);
  }

  void do_broadcast(TensorView data, int root, const Call& call) override {
    const OnDevice staged(data, options_.runtime, rank() == root);
    const std::size_t bytes = static_cast<std::size_t>(data.shape.num_elements()) * size_of(data.dtype);
    enqueue("broadcast", call, [&] {
      return bytes == 0 ? kNcclSuccess : api_.broadcast(staged.at(0), staged.at(0), bytes, NcclType::kUint8, root, comm_, stream());
    });
    finish(staged, call);
  }

  void do_reduce_scatter(TensorView out, ConstTensorView in, Parts parts, const Call& call) override {
    const OnDevice to(out, options_.runtime, false), from(in, options_.runtime, true);
    const bool is_even = std::ranges::adjacent_find(parts.counts, std::ranges::not_equal_to()) == parts.counts.end();
    enqueue("reduce_scatter", call, [&] {
      const auto own = static_cast<std::size_t>(out.shape.num_elements());
      if (is_even)
        return own == 0 ? kNcclSuccess : api_.reduce_scatter(from.at(0), to.at(0), own, type_of(in.dtype), NcclOp::kSum, comm_, stream());
      std::int64_t at = 0;
      int result = kNcclSuccess;
      for (int r = 0; r < size() && (result == kNcclSuccess || result == kNcclInProgress); ++r) {
        const std::int64_t n = parts.counts[static_cast<std::size_t>(r)];
        if (n > 0)
          result = api_.reduce(from.at(at), to.at(0), static_cast<std::size_t>(n), type_of(in.dtype), NcclOp::kSum, r, comm_, stream());
        at += n;
      }
      return result;
    });
    finish(to, call);
  }

  void do_all_reduce(TensorView data, ReduceOp op, const Call& call) override {
    const OnDevice staged(data, options_.runtime, true);
    const auto n = static_cast<std::size_t>(data.shape.num_elements());
    enqueue("all_reduce", call, [&] {
      const NcclOp nccl_op = op == ReduceOp::kSum ? NcclOp::kSum : NcclOp::kMax;
      return n == 0 ? kNcclSuccess : api_.all_reduce(staged.at(0), staged.at(0), n, type_of(data.dtype), nccl_op, comm_, stream());
    });
    finish(staged, call);
  }

  void do_send(ConstTensorView data, int to, const Call& call) override {
    const OnDevice staged(data, options_.runtime, true);
    const std::size_t bytes = static_cast<std::size_t>(data.shape.num_elements()) * size_of(data.dtype);
    if (bytes == 0) return;
    enqueue("send", call, [&] { return api_.send(staged.at(0), bytes, NcclType::kUint8, to, comm_, stream()); });
    if (staged.is_copy()) do_settle(call);
  }

  void do_recv(TensorView data, int from, const Call& call) override {
    const OnDevice staged(data, options_.runtime, false);
    const std::size_t bytes = static_cast<std::size_t>(data.shape.num_elements()) * size_of(data.dtype);
    if (bytes == 0) return;
    enqueue("recv", call, [&] { return api_.recv(staged.at(0), bytes, NcclType::kUint8, from, comm_, stream()); });
    finish(staged, call);
  }

  void do_barrier(const Call& call) override {
    std::int32_t one = 1;
    do_all_reduce(TensorView{&one, {1}, DType::kI32, {}, 1}, ReduceOp::kSum, call);
  }

  std::unique_ptr<Communicator> make_another(CommOptions options) const override {
    return std::make_unique<NcclCommunicator>(std::move(options));
  }

  const NcclApi& api_;
  std::unique_ptr<LossWatch> watch_;  ///< closed after the group, so that a rank that ends in order is not missed; may be null
  void* context_ = nullptr;
  NcclComm* comm_ = nullptr;
  std::unique_ptr<PeerLost> loss_;
  std::atomic<bool> is_closed_{false};
  std::uint64_t num_operations_ = 0;
  std::string last_ = "nothing";
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(CommOptions options) { return std::make_unique<NcclCommunicator>(std::move(options)); }

}  // namespace prl::comm
