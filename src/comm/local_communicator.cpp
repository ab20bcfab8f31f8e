#include <cstring>

#include "comm/communicator.hpp"

namespace prl::comm {

namespace {

class LocalCommunicator final : public Communicator {
 public:
  explicit LocalCommunicator(CommOptions options) : Communicator(std::move(options)) {}
  std::string_view backend() const noexcept override { return "local"; }
  void abort(std::string_view) noexcept override {}
  void give_up_on(const PeerLost&) noexcept override {}
  std::vector<int> lost_ranks() const override { return {}; }

 private:
  void copy(TensorView out, ConstTensorView in) const {
    const std::size_t bytes = static_cast<std::size_t>(in.shape.num_elements()) * size_of(in.dtype);
    if (bytes == 0 || out.data == in.data) return;
    if (in.device.kind == DeviceKind::kCpu) {
      std::memcpy(out.data, in.data, bytes);
      return;
    }
    if (options_.runtime == nullptr || options_.runtime->device() != in.device)
      fail(ErrorCode::kShape, "[comm] a tensor lies on {}, of which this group has no runtime", to_string(in.device));
    options_.runtime->copy_within(out.data, in.data, bytes);
  }
  void do_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins, const Call&) override {
    copy(outs[0], ins[0]);
  }
  void do_all_gather(TensorView out, Parts, ConstTensorView in, const Call&) override { copy(out, in); }
  void do_broadcast(TensorView, int, const Call&) override {}
  void do_reduce_scatter(TensorView out, ConstTensorView in, Parts, const Call&) override { copy(out, in); }
  void do_all_reduce(TensorView, ReduceOp, const Call&) override {}
  // Nobody else is there to send to: Communicator refuses the own rank.
  void do_send(ConstTensorView, int, const Call&) override {}
  void do_recv(TensorView, int, const Call&) override {}
  void do_barrier(const Call& call) override { do_settle(call); }
  void do_settle(const Call&) override {
    if (options_.runtime != nullptr) options_.runtime->synchronize();
  }
  std::unique_ptr<Communicator> make_another(CommOptions options) const override {
    return std::make_unique<LocalCommunicator>(std::move(options));
  }
};

}  // namespace

std::unique_ptr<Communicator> make_local_communicator(std::shared_ptr<DeviceRuntime> runtime) {
  CommOptions options;
  options.runtime = std::move(runtime);
  return make_local_communicator(std::move(options));
}

std::unique_ptr<Communicator> make_local_communicator(CommOptions options) {
  return std::make_unique<LocalCommunicator>(std::move(options));
}

}  // namespace prl::comm
