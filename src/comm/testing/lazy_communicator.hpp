#pragma once

#include <cstring>
#include <functional>

#include "comm/communicator.hpp"

namespace prl::comm::testing {

/// A group whose started operations run when they are joined and not before, out of whatever lies in the inputs then; until then the
/// outputs are spoilt. Whoever adds what has not come, or overwrites what was not sent, computes with the wrong values. In host memory.
class LazyCommunicator final : public Communicator {
 public:
  explicit LazyCommunicator(std::unique_ptr<Communicator> inner) : Communicator(inner->options()), inner_(std::move(inner)) {}
  std::string_view backend() const noexcept override { return "lazy"; }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }
  void give_up_on(const PeerLost& lost) noexcept override { inner_->give_up_on(lost); }
  std::vector<int> lost_ranks() const override { return inner_->lost_ranks(); }
  int num_started() const noexcept { return num_started_; }

 private:
  class Later final : public Started {
   public:
    explicit Later(std::function<void()> work) : work_(std::move(work)) {}
    void join() override { work_(); }

   private:
    std::function<void()> work_;
  };
  std::unique_ptr<Started> do_start_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins,
                                               const Call& call) override {
    ++num_started_;
    for (const TensorView& out : outs)
      if (out.data != nullptr) std::memset(out.data, 0x7f, static_cast<std::size_t>(out.shape.num_elements()) * size_of(out.dtype));
    return std::make_unique<Later>([this, to = std::vector(outs.begin(), outs.end()), from = std::vector(ins.begin(), ins.end()),
                                    what = std::string(call.what)] { inner_->all_to_all(to, from, {.what = what}); });
  }
  void do_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins, const Call& call) override {
    inner_->all_to_all(outs, ins, call);
  }
  void do_all_gather(TensorView out, Parts parts, ConstTensorView in, const Call& call) override {
    inner_->all_gather(out, parts.counts, in, call);
  }
  std::unique_ptr<Started> do_start_all_gather(TensorView out, Parts parts, ConstTensorView in, const Call& call) override {
    ++num_started_;
    const std::size_t scale = size_of(out.dtype);
    const std::vector<char> own(static_cast<const char*>(in.data),
                                static_cast<const char*>(in.data) + static_cast<std::size_t>(in.shape.num_elements()) * scale);
    if (out.data != nullptr) std::memset(out.data, 0x7f, static_cast<std::size_t>(out.shape.num_elements()) * scale);
    if (!own.empty()) std::memcpy(const_cast<void*>(in.data), own.data(), own.size());  // it may be a part of `out`
    return std::make_unique<Later>([this, out, counts = std::vector(parts.counts.begin(), parts.counts.end()), in,
                                    what = std::string(call.what)] { inner_->all_gather(out, counts, in, {.what = what}); });
  }
  void do_broadcast(TensorView data, int root, const Call& call) override { inner_->broadcast(data, root, call); }
  void do_reduce_scatter(TensorView out, ConstTensorView in, Parts parts, const Call& call) override {
    inner_->reduce_scatter(out, in, parts.counts, call);
  }
  void do_all_reduce(TensorView data, ReduceOp op, const Call& call) override { inner_->all_reduce(data, op, call); }
  void do_send(ConstTensorView data, int to, const Call& call) override { inner_->send(data, to, call); }
  void do_recv(TensorView data, int from, const Call& call) override { inner_->recv(data, from, call); }
  void do_barrier(const Call& call) override { inner_->barrier(call); }
  std::unique_ptr<Communicator> make_another(CommOptions options) const override {
    return std::make_unique<LazyCommunicator>(make_threads_communicator(std::move(options)));
  }

  std::unique_ptr<Communicator> inner_;
  int num_started_ = 0;
};

}  // namespace prl::comm::testing
