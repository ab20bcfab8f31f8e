#include "comm/communicator.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <functional>
#include <future>
#include <numeric>
#include <thread>
#include <utility>

#include "base/waiting.hpp"

namespace prl::comm {

namespace {

using Clock = std::chrono::steady_clock;

void check_view(const char* op, ConstTensorView view, const char* name) {
  if (!view.is_contiguous()) fail(ErrorCode::kShape, "[{}] {} must be contiguous", op, name);
  if (view.data == nullptr && view.shape.num_elements() > 0) fail(ErrorCode::kShape, "[{}] {} has no memory", op, name);
}

std::int64_t sum(std::span<const std::int64_t> counts) { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }

/// Elements [begin, begin + count) of a contiguous view.
template <typename View>
View part_of(View view, std::int64_t begin, std::int64_t count) {
  if (view.data != nullptr) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view.data)>>, const char, char>;
    view.data = static_cast<Byte*>(view.data) + static_cast<std::size_t>(begin) * size_of(view.dtype);
  }
  view.shape = Shape{count};
  view.row_stride = count;
  return view;
}

void check_counts(const char* op, std::span<const std::int64_t> counts, int size, std::int64_t total, const char* name) {
  if (static_cast<int>(counts.size()) != size) fail(ErrorCode::kShape, "[{}] {} counts of {} for {} ranks", op, counts.size(), name, size);
  for (const std::int64_t n : counts)
    if (n < 0) fail(ErrorCode::kShape, "[{}] a count of {} is {}", op, name, n);
  if (sum(counts) != total) fail(ErrorCode::kShape, "[{}] counts of {} add up to {}, but it has {} elements", op, name, sum(counts), total);
}

void check_same(const char* op, ConstTensorView out, ConstTensorView in) {
  check_view(op, out, "out");
  check_view(op, in, "in");
  if (out.dtype != in.dtype) fail(ErrorCode::kShape, "[{}] out is {}, in is {}", op, to_string(out.dtype), to_string(in.dtype));
  if (out.device != in.device) fail(ErrorCode::kShape, "[{}] out lies on {}, in on {}", op, to_string(out.device), to_string(in.device));
}

std::vector<std::int64_t> even_counts(const char* op, int size, std::int64_t total) {
  if (total % size != 0) fail(ErrorCode::kShape, "[{}] {} elements in {} equal parts", op, total, size);
  return std::vector<std::int64_t>(static_cast<std::size_t>(size), total / size);
}

void check_rank(const char* op, int size, int rank) {
  if (rank < 0 || rank >= size) fail(ErrorCode::kInvalidArgument, "[{}] rank {} in a group of {}", op, rank, size);
}

void check_sum(const char* op, DType dtype) {
  if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kI32 && dtype != DType::kI64)
    fail(ErrorCode::kShape, "[{}] {} cannot be summed, only F32, BF16, I32 and I64", op, to_string(dtype));
}

void check_gather(const Communicator& group, ConstTensorView out, std::span<const std::int64_t> counts, ConstTensorView in) {
  check_same("all_gather", out, in);
  check_counts("all_gather", counts, group.size(), out.shape.num_elements(), "out");
  if (in.shape.num_elements() != counts[static_cast<std::size_t>(group.rank())])
    fail(ErrorCode::kShape, "[all_gather] rank {} gives {} elements, its count is {}", group.rank(), in.shape.num_elements(),
         counts[static_cast<std::size_t>(group.rank())]);
}

}  // namespace

Communicator::Communicator(CommOptions options) : options_(std::move(options)) {
  if (options_.size < 1 || options_.rank < 0 || options_.rank >= options_.size)
    fail(ErrorCode::kInvalidArgument, "[comm] rank {} of {} ranks", options_.rank, options_.size);
  if (options_.timeout.count() <= 0) fail(ErrorCode::kInvalidArgument, "[comm] a timeout of {} ms", options_.timeout.count());
}

std::string Communicator::key(std::string_view name) const { return fmt::format("{}/g{}/{}", options_.group, options_.generation, name); }

void Communicator::all_to_all(TensorView out, ConstTensorView in, const Call& call) {
  const std::vector<std::int64_t> counts = even_counts("all_to_all", size(), in.shape.num_elements());
  all_to_all(out, counts, in, counts, call);
}

void Communicator::all_to_all(TensorView out, std::span<const std::int64_t> out_counts, ConstTensorView in,
                              std::span<const std::int64_t> in_counts, const Call& call) {
  check_same("all_to_all", out, in);
  check_counts("all_to_all", out_counts, size(), out.shape.num_elements(), "out");
  check_counts("all_to_all", in_counts, size(), in.shape.num_elements(), "in");
  const auto me = static_cast<std::size_t>(rank());
  if (out_counts[me] != in_counts[me])
    fail(ErrorCode::kShape, "[all_to_all] rank {} keeps {} elements and gets {} of its own", rank(), in_counts[me], out_counts[me]);
  std::vector<TensorView> outs;
  std::vector<ConstTensorView> ins;
  std::int64_t out_at = 0, in_at = 0;
  for (std::size_t r = 0; r < in_counts.size(); ++r) {
    outs.push_back(part_of(out, out_at, out_counts[r]));
    ins.push_back(part_of(in, in_at, in_counts[r]));
    out_at += out_counts[r];
    in_at += in_counts[r];
  }
  do_all_to_all(outs, ins, call);
}

namespace {

void check_parts(const Communicator& group, std::span<const TensorView> outs, std::span<const ConstTensorView> ins) {
  const auto n = static_cast<std::size_t>(group.size());
  if (outs.size() != n || ins.size() != n)
    fail(ErrorCode::kShape, "[all_to_all] {} tensors to send and {} to receive for {} ranks", ins.size(), outs.size(), n);
  for (std::size_t r = 0; r < n; ++r) {
    check_same("all_to_all", outs[r], ins[r]);
    check_same("all_to_all", outs[r], outs[0]);
  }
  const auto me = static_cast<std::size_t>(group.rank());
  if (outs[me].shape.num_elements() != ins[me].shape.num_elements())
    fail(ErrorCode::kShape, "[all_to_all] rank {} keeps {} elements and gets {} of its own", me, ins[me].shape.num_elements(),
         outs[me].shape.num_elements());
}

}  // namespace

void Communicator::all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins, const Call& call) {
  check_parts(*this, outs, ins);
  do_all_to_all(outs, ins, call);
}

std::unique_ptr<Started> Communicator::start_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins,
                                                        const Call& call) {
  check_parts(*this, outs, ins);
  return do_start_all_to_all(outs, ins, call);
}

namespace {

class ByThread final : public Started {
 public:
  explicit ByThread(std::shared_future<void> done) : done_(std::move(done)) {}
  ~ByThread() override {
    if (done_.valid()) done_.wait();
  }
  void join() override { std::exchange(done_, {}).get(); }

 private:
  std::shared_future<void> done_;
};

}  // namespace

std::unique_ptr<Started> Communicator::start_by_thread(std::function<void(const Call&)> work, const Call& call) {
  last_started_ = std::async(std::launch::async, [before = last_started_, work = std::move(work), what = std::string(call.what),
                                                  timeout = call.timeout]() mutable {
                    if (before.valid()) std::exchange(before, {}).wait();  // kept, it would keep all before it
                    work({.what = what, .timeout = timeout});
                  }).share();
  return std::make_unique<ByThread>(last_started_);
}

std::unique_ptr<Started> Communicator::do_start_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins,
                                                           const Call& call) {
  return start_by_thread([this, to = std::vector(outs.begin(), outs.end()),
                          from = std::vector(ins.begin(), ins.end())](const Call& own) { do_all_to_all(to, from, own); },
                         call);
}

std::unique_ptr<Started> Communicator::do_start_all_gather(TensorView out, Parts parts, ConstTensorView in, const Call& call) {
  return start_by_thread([this, out, counts = std::vector(parts.counts.begin(), parts.counts.end()),
                          in](const Call& own) { do_all_gather(out, {counts}, in, own); },
                         call);
}

void Communicator::all_gather(TensorView out, ConstTensorView in, const Call& call) {
  all_gather(out, even_counts("all_gather", size(), out.shape.num_elements()), in, call);
}

void Communicator::all_gather(TensorView out, std::span<const std::int64_t> counts, ConstTensorView in, const Call& call) {
  check_gather(*this, out, counts, in);
  do_all_gather(out, {counts}, in, call);
}

std::unique_ptr<Started> Communicator::start_all_gather(TensorView out, std::span<const std::int64_t> counts, ConstTensorView in,
                                                        const Call& call) {
  check_gather(*this, out, counts, in);
  return do_start_all_gather(out, {counts}, in, call);
}

void Communicator::broadcast(TensorView data, int root, const Call& call) {
  check_view("broadcast", data, "data");
  check_rank("broadcast", size(), root);
  do_broadcast(data, root, call);
}

void Communicator::reduce_scatter(TensorView out, ConstTensorView in, const Call& call) {
  reduce_scatter(out, in, even_counts("reduce_scatter", size(), in.shape.num_elements()), call);
}

void Communicator::reduce_scatter(TensorView out, ConstTensorView in, std::span<const std::int64_t> counts, const Call& call) {
  check_same("reduce_scatter", out, in);
  check_sum("reduce_scatter", in.dtype);
  check_counts("reduce_scatter", counts, size(), in.shape.num_elements(), "in");
  if (out.shape.num_elements() != counts[static_cast<std::size_t>(rank())])
    fail(ErrorCode::kShape, "[reduce_scatter] rank {} takes {} elements, its count is {}", rank(), out.shape.num_elements(),
         counts[static_cast<std::size_t>(rank())]);
  do_reduce_scatter(out, in, {counts}, call);
}

void Communicator::all_reduce(TensorView data, ReduceOp op, const Call& call) {
  check_view("all_reduce", data, "data");
  check_sum("all_reduce", data.dtype);
  do_all_reduce(data, op, call);
}

void Communicator::send(ConstTensorView data, int to, const Call& call) {
  check_view("send", data, "data");
  check_rank("send", size(), to);
  if (to == rank()) fail(ErrorCode::kInvalidArgument, "[send] rank {} sends to itself", to);
  do_send(data, to, call);
}

void Communicator::recv(TensorView data, int from, const Call& call) {
  check_view("recv", data, "data");
  check_rank("recv", size(), from);
  if (from == rank()) fail(ErrorCode::kInvalidArgument, "[recv] rank {} receives from itself", from);
  do_recv(data, from, call);
}

void Communicator::barrier(const Call& call) { do_barrier(call); }
void Communicator::settle(const Call& call) { do_settle(call); }

std::vector<std::string> Communicator::gather_bytes(std::string_view mine, const Call& call) {
  const auto n = static_cast<std::size_t>(size());
  const auto own = static_cast<std::int64_t>(mine.size());
  std::vector<std::int64_t> counts(n);
  all_gather(TensorView{counts.data(), {size()}, DType::kI64, {}, size()}, ConstTensorView{&own, {1}, DType::kI64, {}, 1}, call);
  const std::int64_t total = sum(counts);
  std::string all(static_cast<std::size_t>(total), '\0');
  all_gather(TensorView{all.data(), {total}, DType::kU8, {}, total}, counts, ConstTensorView{mine.data(), {own}, DType::kU8, {}, own},
             call);
  std::vector<std::string> parts;
  std::size_t at = 0;
  for (const std::int64_t count : counts) {
    parts.push_back(all.substr(at, static_cast<std::size_t>(count)));
    at += static_cast<std::size_t>(count);
  }
  return parts;
}

std::vector<double> Communicator::gather_number(double mine, const Call& call) {
  std::vector<double> all(static_cast<std::size_t>(size()));
  constexpr std::int64_t kBytes = sizeof(double);
  all_gather(TensorView{all.data(), {size() * kBytes}, DType::kU8, {}, size() * kBytes},
             ConstTensorView{&mine, {kBytes}, DType::kU8, {}, kBytes}, call);
  return all;
}

std::unique_ptr<Communicator> Communicator::subgroup(std::span<const int> members, const std::string& group, std::int64_t generation) {
  const auto me = std::find(members.begin(), members.end(), rank());
  if (me == members.end())
    fail(ErrorCode::kInvalidArgument, "[comm] rank {} is no member of the new group [{}]", rank(), fmt::join(members, ", "));
  for (const int member : members) {
    check_rank("subgroup", size(), member);
    if (std::count(members.begin(), members.end(), member) != 1)
      fail(ErrorCode::kInvalidArgument, "[comm] rank {} is named twice in the new group", member);
  }
  CommOptions next = options_;
  next.rank = static_cast<int>(me - members.begin());
  next.size = static_cast<int>(members.size());
  next.generation = generation;
  if (group == options_.group) next.awaits_start = false;
  next.connect_timeout = std::min(next.connect_timeout, group == options_.group ? kReconnectTimeout : kSubgroupTimeout);
  next.group = group;
  if (next.size == 1) return make_local_communicator(std::move(next));
  next.gone = [this, members] {
    std::vector<int> of_group;
    for (const int rank : gone())
      if (const auto found = std::find(members.begin(), members.end(), rank); found != members.end())
        of_group.push_back(static_cast<int>(found - members.begin()));
    return of_group;
  };
  try {
    std::unique_ptr<Communicator> made = make_another(std::move(next));
    made->options_.gone = {};
    return made;
  } catch (const PeerLost& lost) {
    if (group == options_.group) throw;  // in place of this one, which has ended
    // Who did not come that far may only have been on its way; who is gone is lost to this group too.
    const PeerLost told(gone(), lost.what(), lost.gave_up());
    give_up_on(told);
    throw told;
  }
}

std::unique_ptr<Communicator> make_communicator(CommOptions options) {
  if (options.size == 1) return make_local_communicator(std::move(options));
  if (options.store == nullptr) fail(ErrorCode::kInvalidArgument, "[comm] {} ranks need a store to meet", options.size);
  if (options.runtime != nullptr && options.runtime->device().kind == DeviceKind::kCuda) return make_nccl_communicator(std::move(options));
  return make_gloo_communicator(std::move(options));
}

std::vector<int> find_survivors(Communicator& group, std::int64_t generation, std::chrono::milliseconds grace,
                                std::span<const int> also_lost) {
  Store* store = group.options().store.get();
  if (store == nullptr) return {0};
  const std::string prefix = fmt::format("{}/survivors-g{}/", group.options().group, generation);
  const auto alive_key = [&](int rank) { return prefix + std::to_string(rank); };
  store->set(alive_key(group.rank()), "alive");
  std::vector<int> lost = group.lost_ranks();
  lost.insert(lost.end(), also_lost.begin(), also_lost.end());
  const auto deadline = Clock::now() + grace;
  std::vector<int> alive;
  std::optional<std::string> decided;
  Waiting waiting({.who = fmt::format("rank {} of {} (group '{}')", group.rank(), group.size(), group.options().group),
                   .what = "the ranks that are left to say so",
                   .limit = grace,
                   .detail = [&alive] { return fmt::format("alive are the ranks {}", fmt::join(alive, ", ")); }});
  for (;; waiting.check()) {
    alive.clear();
    bool is_complete = true;
    for (int r = 0; r < group.size(); ++r) {
      if (store->get(alive_key(r)))
        alive.push_back(r);
      else if (std::find(lost.begin(), lost.end(), r) == lost.end())
        is_complete = false;
    }
    decided = store->get(prefix + "members");
    if (decided || is_complete || Clock::now() >= deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  // Ranks may see different sets; the first that writes decides for all.
  if (!decided) decided = store->set_once(prefix + "members", fmt::format("{}", fmt::join(alive, " ")));
  std::vector<int> members;
  for (const char *at = decided->data(), *end = at + decided->size(); at < end;) {
    int r = 0;
    const auto parsed = std::from_chars(at, end, r);
    if (parsed.ec != std::errc()) fail(ErrorCode::kCorrupt, "[comm] '{}' is no list of ranks", *decided);
    members.push_back(r);
    at = parsed.ptr + 1;
  }
  if (std::find(members.begin(), members.end(), group.rank()) == members.end())
    throw PeerLost({group.rank()}, fmt::format("[comm] generation {} of the group has gone on without rank {}, which was taken for lost: "
                                               "members are [{}]",
                                               generation, group.rank(), fmt::join(members, ", ")));
  store->advance_generation(generation);
  return members;
}

}  // namespace prl::comm
