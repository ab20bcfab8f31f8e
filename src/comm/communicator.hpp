#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "comm/store.hpp"
#include "tensor/tensor.hpp"

namespace prl::comm {

/// Error{kPeerLost}: ranks of the group that died, fell silent past a deadline or gave up. The message says what this rank waited for,
/// which operation, for how long, and what was last completed together.
class PeerLost : public Error {
 public:
  PeerLost(std::vector<int> ranks, const std::string& message, bool gave_up = false)
      : Error(ErrorCode::kPeerLost, message), ranks_(std::move(ranks)), gave_up_(gave_up) {}
  /// Ranks within the group that reported it; none if all that is known is that somebody of another group is lost.
  const std::vector<int>& ranks() const noexcept { return ranks_; }
  /// The rank left for an error of its own, which the message quotes: others that do the same work may well meet it too.
  bool gave_up() const noexcept { return gave_up_; }

 private:
  std::vector<int> ranks_;
  bool gave_up_ = false;
};

/// Options::connect_timeout of ranks that are there already: a run that has lost a rank does not wait for one more as long as for a rank
/// that starts.
inline constexpr std::chrono::milliseconds kReconnectTimeout{2500};
/// The same of ranks that form a group beside one that they have: a connection to one that has just died ends after it.
inline constexpr std::chrono::milliseconds kSubgroupTimeout{10'000};

enum class ReduceOp : std::uint8_t { kSum, kMax };

/// Names one operation in errors, and how long it may take.
struct Call {
  std::string_view what = {};                             ///< "gradients of layer 3"
  std::optional<std::chrono::milliseconds> timeout = {};  ///< none: the group's
};

struct CommOptions {
  int rank = 0, size = 1;
  std::shared_ptr<Store> store = {};  ///< meeting place; may be null for one rank
  std::string group = "world";        ///< of the keys in the store; groups that live at the same time differ in it
  std::int64_t generation = 0;        ///< of the group; part of the keys too
  std::chrono::milliseconds timeout{60'000};
  std::shared_ptr<DeviceRuntime> runtime = {};  ///< of tensors that do not lie in host memory; may be null
  std::string host = "127.0.0.1";               ///< where this rank can be reached (Gloo)
  int max_channels = 0;                         ///< of NCCL, each with buffers and a thread block of its own; 0: as many as it likes
  bool awaits_start = true;                     ///< ranks may still be starting; else they are there or lost
  /// For ranks that are all there to connect, and a little more for each of them.
  std::chrono::milliseconds connect_timeout{30'000};
  /// While the group is formed: ranks of it whose connections in another group are closed, which nobody need wait for. May be null.
  std::function<std::vector<int>()> gone = {};
};

/// An operation that runs beside what its caller does meanwhile. The group must outlive it.
class Started {
 public:
  /// If it was not joined: waits until it has ended, at most for its timeout, and forgets how.
  virtual ~Started() = default;
  /// In host memory: returns when the operation is done. On a device: work that is queued on runtime->stream() from now on comes after it.
  /// Once at most. Errors as the operation.
  virtual void join() = 0;
};

/// A group of ranks that run the same operations in the same order.
///
/// Shapes    views are contiguous; counts are in elements; parts lie one after another in the order of ranks. Zero elements are fine.
///           Outputs may not overlap inputs unless an operation says so.
/// DTypes    any for what moves data; F32, BF16, I32, I64 for sums and maxima.
/// Numerics  sums form x_0 + x_1 + ... in the order of ranks, in fp32 for BF16 with one rounding at the end: the same bits in every run.
///           Only the NCCL backend sums in an order of its own.
/// Device    tensors in host memory: an operation returns when it is done. Tensors of options.runtime: it is queued on runtime->stream()
///           where the backend can (NCCL), and settle() waits for it; else it returns when done. Whoever waits for the device in another
///           way is not kept: once an operation could begin it ends within its timeout, if need be because the group is taken apart.
/// Errors    Error{kShape}, {kInvalidArgument} before anything is sent. PeerLost ends the group: each later operation throws it again, and
///           only find_survivors() and subgroup() are of use. Every wait ends after its timeout.
/// Threads   one at a time, but for abort(), which any thread may call.
class Communicator {
 public:
  virtual ~Communicator() = default;

  int rank() const noexcept { return options_.rank; }
  int size() const noexcept { return options_.size; }
  std::int64_t generation() const noexcept { return options_.generation; }
  const CommOptions& options() const noexcept { return options_; }
  virtual std::string_view backend() const noexcept = 0;

  /// Part i of `in` goes to rank i; part j of `out` comes from rank j. All parts are alike.
  void all_to_all(TensorView out, ConstTensorView in, const Call& call = {});
  /// in_counts[i] elements go to rank i, out_counts[j] come from rank j.
  void all_to_all(TensorView out, std::span<const std::int64_t> out_counts, ConstTensorView in, std::span<const std::int64_t> in_counts,
                  const Call& call = {});
  /// ins[i] goes to rank i and outs[j] comes from rank j; they may lie anywhere, and those of this rank itself may be empty.
  void all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins, const Call& call = {});
  /// The same beside the caller's work: from when what was queued so far is done, on a stream of its own, or by a thread. Until it is
  /// joined `outs` are not touched, `ins` not written, and nothing else is asked of this group but to start more, which run in the order
  /// in which they were started.
  std::unique_ptr<Started> start_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins, const Call& call = {});
  /// `out` gets every rank's `in`. `in` may be this rank's part of `out`.
  void all_gather(TensorView out, ConstTensorView in, const Call& call = {});
  void all_gather(TensorView out, std::span<const std::int64_t> counts, ConstTensorView in, const Call& call = {});
  /// Beside the caller's work, as start_all_to_all().
  std::unique_ptr<Started> start_all_gather(TensorView out, std::span<const std::int64_t> counts, ConstTensorView in,
                                            const Call& call = {});
  /// `data` of `root` replaces everyone's.
  void broadcast(TensorView data, int root, const Call& call = {});
  /// `out` is part rank() of the sum of everyone's `in`.
  void reduce_scatter(TensorView out, ConstTensorView in, const Call& call = {});
  void reduce_scatter(TensorView out, ConstTensorView in, std::span<const std::int64_t> counts, const Call& call = {});
  void all_reduce(TensorView data, ReduceOp op = ReduceOp::kSum, const Call& call = {});
  /// Messages between two ranks arrive in the order they were sent. send() may return before recv() was called.
  void send(ConstTensorView data, int to, const Call& call = {});
  void recv(TensorView data, int from, const Call& call = {});
  /// Returns when every rank has come this far, and what was queued before is done.
  void barrier(const Call& call = {});
  /// Waits for operations that were queued.
  void settle(const Call& call = {});

  /// Values of any length from every rank, in the order of ranks. Host memory; for small things.
  std::vector<std::string> gather_bytes(std::string_view mine, const Call& call = {});
  /// One number of every rank, in the order of ranks.
  std::vector<double> gather_number(double mine, const Call& call = {});

  /// Ends the group for this rank: operations in flight fail, and peers that wait for this rank are told `reason`. Idempotent.
  virtual void abort(std::string_view reason) noexcept = 0;
  /// Ends the group for this rank because of a loss that was noticed in another group: each later operation throws `lost`, and peers that
  /// wait for this rank are told. `lost` names ranks as this group numbers them; none if none of them is of this group, and what the
  /// others meet then is a PeerLost that names none either. By whoever runs operations.
  virtual void give_up_on(const PeerLost& lost) noexcept = 0;
  /// Ranks known to be lost.
  virtual std::vector<int> lost_ranks() const = 0;
  /// A new group of some ranks of this one, which each of them calls alike; they are numbered in the order given. Also the way from a
  /// group that lost ranks to one of those that remain: one of the same name waits for nobody who starts. Errors: PeerLost, soon if a
  /// member dies meanwhile; under another name it ends this group too, and names those who are known to be gone as this group counts them.
  /// Error{kInvalidArgument} if this rank is not a member.
  std::unique_ptr<Communicator> subgroup(std::span<const int> members, const std::string& group, std::int64_t generation);

 protected:
  explicit Communicator(CommOptions options);
  /// Views and counts were checked.
  struct Parts {
    std::span<const std::int64_t> counts;
  };
  virtual void do_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins, const Call& call) = 0;
  /// Unless a backend knows better, by a thread.
  virtual std::unique_ptr<Started> do_start_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins,
                                                       const Call& call);
  virtual void do_all_gather(TensorView out, Parts parts, ConstTensorView in, const Call& call) = 0;
  virtual std::unique_ptr<Started> do_start_all_gather(TensorView out, Parts parts, ConstTensorView in, const Call& call);
  virtual void do_broadcast(TensorView data, int root, const Call& call) = 0;
  virtual void do_reduce_scatter(TensorView out, ConstTensorView in, Parts parts, const Call& call) = 0;
  virtual void do_all_reduce(TensorView data, ReduceOp op, const Call& call) = 0;
  virtual void do_send(ConstTensorView data, int to, const Call& call) = 0;
  virtual void do_recv(TensorView data, int from, const Call& call) = 0;
  virtual void do_barrier(const Call& call) = 0;
  virtual void do_settle(const Call&) {}
  virtual std::unique_ptr<Communicator> make_another(CommOptions options) const = 0;
  /// Ranks whose connections are closed, while this one's are not, and that did not leave for the loss of another; where a backend can
  /// tell.
  virtual std::vector<int> gone() { return {}; }

  /// `work` by a thread, once all that was started before has ended.
  std::unique_ptr<Started> start_by_thread(std::function<void(const Call&)> work, const Call& call);

  std::string key(std::string_view name) const;
  CommOptions options_;

 private:
  std::shared_future<void> last_started_;  ///< by a thread
};

/// The group of one rank: copies at most. Never fails.
std::unique_ptr<Communicator> make_local_communicator(std::shared_ptr<DeviceRuntime> runtime = nullptr);
std::unique_ptr<Communicator> make_local_communicator(CommOptions options);
/// Ranks as threads of this process; the store must be a make_memory_store() of their own.
std::unique_ptr<Communicator> make_threads_communicator(CommOptions options);
/// Ranks as processes over TCP. Error{kUnavailable} if this build has no Gloo, PeerLost if a rank does not come.
std::unique_ptr<Communicator> make_gloo_communicator(CommOptions options);
/// Ranks as processes with a GPU each; options.runtime is that GPU's. Error{kUnavailable} saying what is missing: the library, its
/// version, a GPU.
std::unique_ptr<Communicator> make_nccl_communicator(CommOptions options);
/// Why make_nccl_communicator() cannot work here; empty if it can. `version` gets "2.28.3".
std::string missing_nccl(std::string* version = nullptr);
bool has_gloo() noexcept;

/// One rank: local. Else NCCL for a GPU's runtime, Gloo for the host's.
std::unique_ptr<Communicator> make_communicator(CommOptions options);

/// After PeerLost, called by every rank that is left, with the generation of the group to come: which old ranks go on, the same answer for
/// all. Waits up to `grace` for those that are not known to be lost; it should exceed the timeout of the operation that failed, since
/// others notice later. `also_lost`: ranks of `group` that are known to be lost besides those it knows itself. Error{kPeerLost} if the
/// others have gone on without this rank.
std::vector<int> find_survivors(Communicator& group, std::int64_t generation, std::chrono::milliseconds grace,
                                std::span<const int> also_lost = {});

}  // namespace prl::comm
