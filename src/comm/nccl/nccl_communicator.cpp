#include "comm/nccl/nccl_group.hpp"

#include <numeric>

#include "comm/communicator.hpp"

namespace prl::comm {

namespace {

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

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(CommOptions options) : Communicator(std::move(options)), group_(options_), api_(group_.api()) {}
  std::string_view backend() const noexcept override { return "nccl"; }
  std::vector<int> lost_ranks() const override { return group_.lost_ranks(); }
  std::vector<int> gone() override { return group_.gone(); }
  void abort(std::string_view reason) noexcept override { group_.abort(reason); }
  void give_up_on(const PeerLost& lost) noexcept override { group_.give_up_on(lost); }

 private:
  void* stream() const noexcept { return group_.stream(); }
  void enqueue(const char* op, const Call& call, const std::function<int()>& calls) { (void)group_.enqueue(op, call, stream(), calls); }
  void do_settle(const Call& call) override { group_.settle(call); }

  /// Tensors in host memory: done when the operation returns.
  void finish(const OnDevice& out, const Call& call) {
    if (!out.is_copy()) return;
    do_settle(call);
    out.write_back();
  }

  /// Messages to and from every rank.
  int exchange(std::span<const OnDevice> to, std::span<const OnDevice> from, void* on) {
    int result = kNcclSuccess;
    for (std::size_t r = 0; r < to.size() && (result == kNcclSuccess || result == kNcclInProgress); ++r) {
      const int peer = static_cast<int>(r);
      if (from[r].num_bytes() > 0) result = api_.send(from[r].at(0), from[r].num_bytes(), NcclType::kUint8, peer, group_.comm(), on);
      if (to[r].num_bytes() > 0) result = api_.recv(to[r].at(0), to[r].num_bytes(), NcclType::kUint8, peer, group_.comm(), on);
    }
    return result;
  }

  void do_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins, const Call& call) override {
    std::vector<OnDevice> to, from;
    for (std::size_t r = 0; r < outs.size(); ++r) {
      to.emplace_back(outs[r], options_.runtime, false);
      from.emplace_back(ins[r], options_.runtime, true);
    }
    enqueue("all_to_all", call, [&] { return exchange(to, from, stream()); });
    for (const OnDevice& out : to) finish(out, call);
  }

  std::unique_ptr<Started> do_start_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins,
                                               const Call& call) override {
    // Copies of what lies in host memory would have to live as long.
    const auto is_elsewhere = [this](ConstTensorView view) { return view.device != options_.runtime->device(); };
    if (std::ranges::any_of(outs, is_elsewhere)) return Communicator::do_start_all_to_all(outs, ins, call);
    std::vector<OnDevice> to, from;
    for (std::size_t r = 0; r < outs.size(); ++r) {
      to.emplace_back(outs[r], options_.runtime, false);
      from.emplace_back(ins[r], options_.runtime, true);
    }
    void* const side = group_.begin_beside();
    return group_.started(group_.enqueue("all_to_all", call, side, [&] { return exchange(to, from, side); }));
  }

  int gather(const OnDevice& to, const OnDevice& from, Parts parts, ConstTensorView in, void* on) {
    const NcclType type = type_of(in.dtype);
    const std::size_t scale = type == NcclType::kUint8 ? size_of(in.dtype) : 1;
    const bool is_even = std::ranges::adjacent_find(parts.counts, std::ranges::not_equal_to()) == parts.counts.end();
    const auto own = static_cast<std::size_t>(in.shape.num_elements()) * scale;
    if (is_even) return own == 0 ? kNcclSuccess : api_.all_gather(from.at(0), to.at(0), own, type, group_.comm(), on);
    std::int64_t at = 0;
    int result = kNcclSuccess;
    for (int r = 0; r < size() && (result == kNcclSuccess || result == kNcclInProgress); ++r) {
      const std::int64_t n = parts.counts[static_cast<std::size_t>(r)];
      if (n > 0)
        result = api_.broadcast(r == rank() ? from.at(0) : to.at(at), to.at(at), static_cast<std::size_t>(n) * scale, type, r,
                                group_.comm(), on);
      at += n;
    }
    return result;
  }

  void do_all_gather(TensorView out, Parts parts, ConstTensorView in, const Call& call) override {
    const OnDevice to(out, options_.runtime, false), from(in, options_.runtime, true);
    enqueue("all_gather", call, [&] { return gather(to, from, parts, in, stream()); });
    finish(to, call);
  }

  std::unique_ptr<Started> do_start_all_gather(TensorView out, Parts parts, ConstTensorView in, const Call& call) override {
    if (out.device != options_.runtime->device()) return Communicator::do_start_all_gather(out, parts, in, call);
    const OnDevice to(out, options_.runtime, false), from(in, options_.runtime, true);
    void* const side = group_.begin_beside();
    return group_.started(group_.enqueue("all_gather", call, side, [&] { return gather(to, from, parts, in, side); }));
  }

  void do_broadcast(TensorView data, int root, const Call& call) override {
    const OnDevice staged(data, options_.runtime, rank() == root);
    const std::size_t bytes = static_cast<std::size_t>(data.shape.num_elements()) * size_of(data.dtype);
    enqueue("broadcast", call, [&] {
      return bytes == 0 ? kNcclSuccess : api_.broadcast(staged.at(0), staged.at(0), bytes, NcclType::kUint8, root, group_.comm(), stream());
    });
    finish(staged, call);
  }

  void do_reduce_scatter(TensorView out, ConstTensorView in, Parts parts, const Call& call) override {
    const OnDevice to(out, options_.runtime, false), from(in, options_.runtime, true);
    const bool is_even = std::ranges::adjacent_find(parts.counts, std::ranges::not_equal_to()) == parts.counts.end();
    enqueue("reduce_scatter", call, [&] {
      const auto own = static_cast<std::size_t>(out.shape.num_elements());
      if (is_even)
        return own == 0 ? kNcclSuccess
                        : api_.reduce_scatter(from.at(0), to.at(0), own, type_of(in.dtype), NcclOp::kSum, group_.comm(), stream());
      std::int64_t at = 0;
      int result = kNcclSuccess;
      for (int r = 0; r < size() && (result == kNcclSuccess || result == kNcclInProgress); ++r) {
        const std::int64_t n = parts.counts[static_cast<std::size_t>(r)];
        if (n > 0)
          result =
              api_.reduce(from.at(at), to.at(0), static_cast<std::size_t>(n), type_of(in.dtype), NcclOp::kSum, r, group_.comm(), stream());
        at += n;
      }
      return result;
    });
    finish(to, call);
  }

  void do_all_reduce(TensorView data, ReduceOp op, const Call& call) override { reduce("all_reduce", data, op, call); }
  void reduce(const char* name, TensorView data, ReduceOp op, const Call& call) {
    const OnDevice staged(data, options_.runtime, true);
    const auto n = static_cast<std::size_t>(data.shape.num_elements());
    enqueue(name, call, [&] {
      const NcclOp nccl_op = op == ReduceOp::kSum ? NcclOp::kSum : NcclOp::kMax;
      return n == 0 ? kNcclSuccess : api_.all_reduce(staged.at(0), staged.at(0), n, type_of(data.dtype), nccl_op, group_.comm(), stream());
    });
    finish(staged, call);
  }

  void do_send(ConstTensorView data, int to, const Call& call) override {
    const OnDevice staged(data, options_.runtime, true);
    const std::size_t bytes = static_cast<std::size_t>(data.shape.num_elements()) * size_of(data.dtype);
    if (bytes == 0) return;
    enqueue("send", call, [&] { return api_.send(staged.at(0), bytes, NcclType::kUint8, to, group_.comm(), stream()); });
    if (staged.is_copy()) do_settle(call);
  }

  void do_recv(TensorView data, int from, const Call& call) override {
    const OnDevice staged(data, options_.runtime, false);
    const std::size_t bytes = static_cast<std::size_t>(data.shape.num_elements()) * size_of(data.dtype);
    if (bytes == 0) return;
    enqueue("recv", call, [&] { return api_.recv(staged.at(0), bytes, NcclType::kUint8, from, group_.comm(), stream()); });
    finish(staged, call);
  }

  void do_barrier(const Call& call) override {
    std::int32_t one = 1;
    reduce("barrier", TensorView{&one, {1}, DType::kI32, {}, 1}, ReduceOp::kSum, call);
  }

  std::unique_ptr<Communicator> make_another(CommOptions options) const override {
    return std::make_unique<NcclCommunicator>(std::move(options));
  }

  NcclGroup group_;
  const NcclApi& api_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(CommOptions options) { return std::make_unique<NcclCommunicator>(std::move(options)); }

}  // namespace prl::comm
