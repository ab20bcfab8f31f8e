#include "trainer/peer_snapshot.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <limits>
#include <sstream>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "device/host_link.hpp"

namespace prl::trainer {

namespace {

constexpr std::size_t kMaxArrays = std::size_t{1} << 22;

TensorView bytes_view(void* data, std::size_t num_bytes, Device device) {
  const auto n = static_cast<std::int64_t>(num_bytes);
  return {data, {n}, DType::kU8, device, n};
}

/// Copies what lies in both ranges; `bytes`, on `runtime`'s device, are those of `from`. Whatever memory `to` lies in; host memory has it
/// when this returns.
void copy_shared(DeviceRuntime& runtime, const Tensor& to, ElementRange to_range, TensorView bytes, ElementRange from) {
  const ElementRange both = intersection(to_range, from);
  if (both.count() == 0) return;
  const std::size_t element = static_cast<std::size_t>(bytes.shape.num_elements()) / static_cast<std::size_t>(from.count());
  if (element * static_cast<std::size_t>(to_range.count()) != to.num_bytes())
    fail(ErrorCode::kCorrupt, "[healing] a neighbour's copy has elements of {} bytes", element);
  auto* target = static_cast<char*>(to.data()) + element * static_cast<std::size_t>(both.begin - to_range.begin);
  const char* source = bytes.as<char>() + element * static_cast<std::size_t>(both.begin - from.begin);
  const std::size_t count = element * static_cast<std::size_t>(both.count());
  if (to.runtime()->device() == runtime.device())
    runtime.copy_within(target, source, count);
  else
    runtime.copy_to_host(target, source, count);
}

std::size_t total_of(const std::vector<Tensor>& tensors) {
  std::size_t sum = 0;
  for (const Tensor& tensor : tensors) sum += tensor.num_bytes();
  return sum;
}

}  // namespace

std::string PeerSnapshots::text_of(const std::vector<Array>& arrays) {
  // Never empty: a rank that owns nothing has a copy, too.
  std::string text = fmt::format("{}\n", arrays.size());
  for (const Array& array : arrays) text += fmt::format("{} {} {} {}\n", array.range.begin, array.range.end, array.num_bytes, array.name);
  return text;
}

std::vector<PeerSnapshots::Array> PeerSnapshots::arrays_of(std::string_view text) {
  std::vector<Array> arrays;
  std::istringstream lines{std::string(text)};
  std::string line;
  std::size_t num_arrays = 0;
  if (!(lines >> num_arrays) || num_arrays > kMaxArrays || !std::getline(lines, line))
    fail(ErrorCode::kCorrupt, "[healing] the list of a neighbour's copy begins with '{}'", text.substr(0, 200));
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    Array array;
    words >> array.range.begin >> array.range.end >> array.num_bytes;
    if (!words || words.get() != ' ' || array.range.begin < 0 || array.range.end < array.range.begin || arrays.size() == num_arrays)
      fail(ErrorCode::kCorrupt, "[healing] the list of a neighbour's copy holds '{}'", line.substr(0, 200));
    std::getline(words, array.name);
    arrays.push_back(std::move(array));
  }
  if (arrays.size() != num_arrays)
    fail(ErrorCode::kCorrupt, "[healing] the list of a neighbour's copy ends after {} of {} arrays", arrays.size(), num_arrays);
  return arrays;
}

std::size_t PeerSnapshots::num_bytes() const noexcept {
  std::size_t sum = 0;
  for (const Snapshot& snapshot : kept_)
    for (const auto& [owner, part] : snapshot.parts) sum += part.memory.num_bytes;
  return sum;
}

void PeerSnapshots::drop_oldest() {
  for (auto& [owner, part] : kept_.front().parts) spare_.push_back(std::move(part.memory));
  kept_.pop_front();
}

/// Bytes on their way between tensors, host memory and other ranks: a list of tensors, one after the other, to a neighbour and to host
/// memory; and back. Pieces lie in two pairs of places on the device that take turns: while one pair is copied to or from the host, the
/// other one is filled and sent.
class PeerSnapshots::Passage {
 public:
  Passage(const std::shared_ptr<DeviceRuntime>& runtime, std::size_t piece_bytes)
      : runtime_(runtime), link_(make_host_link(runtime, true)) {
    for (Place& place : places_)
      for (Tensor* piece : {&place.own, &place.theirs})
        *piece = Tensor::empty(runtime_, {static_cast<std::int64_t>(piece_bytes)}, DType::kU8);
  }
  std::shared_ptr<void> allocate(std::size_t num_bytes) {
    try {
      return link_->allocate(num_bytes);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kOutOfMemory || runtime_->device().kind == DeviceKind::kCpu) throw;
      std::shared_ptr<void> plain = make_host_link(runtime_, false)->allocate(num_bytes);
      log::warning("[healing] {}; copies go to plain memory, which takes some five times as long", error.what());
      return plain;
    }
  }
  /// Own bytes [begin, begin + count) of `tensors`, whatever memory those lie in.
  TensorView fill(const std::vector<Tensor>& tensors, std::size_t begin, std::size_t count) {
    auto* const to = static_cast<char*>(place().own.data());
    std::size_t first = 0;
    for (const Tensor& tensor : tensors) {
      const std::size_t from = std::max(begin, first), end = std::min(begin + count, first + tensor.num_bytes());
      if (from < end) {
        const char* const source = static_cast<const char*>(tensor.data()) + (from - first);
        if (tensor.runtime()->device() == runtime_->device())
          runtime_->copy_within(to + (from - begin), source, end - from);
        else
          runtime_->copy_from_host(to + (from - begin), source, end - from);
      }
      first += tensor.num_bytes();
    }
    return own(count);
  }
  TensorView own(std::size_t count) { return bytes_view(place().own.data(), count, runtime_->device()); }
  /// Where a neighbour's bytes come to.
  TensorView theirs(std::size_t count) { return bytes_view(place().theirs.data(), count, runtime_->device()); }
  void keep_own(char* host, std::size_t count) { keep(place().own, host, count); }
  void keep_theirs(char* host, std::size_t count) { keep(place().theirs, host, count); }
  /// The other places from now on: work that is enqueued comes after the copies from and to them.
  void turn() {
    at_ = (at_ + 1) % places_.size();
    link_->hold_work(place().copied);
  }
  /// Waits for all copies.
  void finish() {
    for (Place& place : places_) link_->wait(std::exchange(place.copied, 0));
    link_->wait(std::exchange(last_forgotten_, 0));
    forgotten_.clear();
  }
  /// Own bytes come from host memory, before what is enqueued from now on.
  void raise(const char* host, std::size_t count) {
    place().copied = link_->to_device(place().own.data(), host, count, 0);
    link_->hold_work(place().copied);
  }
  /// After an error: copies that are under way are not waited for, as work of the device may wait for a rank that is gone. The memory that
  /// they go to is kept until they are over.
  void forget(std::vector<std::shared_ptr<void>> memory) {
    for (Place& place : places_) last_forgotten_ = std::max(last_forgotten_, std::exchange(place.copied, 0));
    std::ranges::move(memory, std::back_inserter(forgotten_));
  }

 private:
  struct Place {
    Tensor own, theirs;
    HostLink::Ticket copied = 0;
  };
  Place& place() { return places_[at_]; }
  void keep(const Tensor& piece, char* host, std::size_t count) {
    if (count > 0) place().copied = link_->to_host(host, piece.data(), count);
  }

  std::shared_ptr<DeviceRuntime> runtime_;
  std::vector<std::shared_ptr<void>> forgotten_;  ///< outlives the link, which ends its copies
  HostLink::Ticket last_forgotten_ = 0;
  std::shared_ptr<HostLink> link_;
  std::array<Place, 2> places_;
  std::size_t at_ = 0;
};

PeerSnapshots::PeerSnapshots(Policy& policy, bool is_newcomer, std::size_t piece_bytes)
    : policy_(policy), is_newcomer_(is_newcomer), piece_bytes_(piece_bytes) {}
PeerSnapshots::~PeerSnapshots() = default;

PeerSnapshots::Passage& PeerSnapshots::passage() {
  if (passage_ == nullptr) passage_ = std::make_unique<Passage>(policy_.context().runtime, piece_bytes_);
  return *passage_;
}

PeerSnapshots::HostMemory PeerSnapshots::take_memory(std::size_t num_bytes) {
  const auto found = std::ranges::find(spare_, num_bytes, &HostMemory::num_bytes);
  if (found != spare_.end()) {
    HostMemory memory = std::move(*found);
    spare_.erase(found);
    return memory;
  }
  spare_.clear();  // of other sizes: the ranks own other parts now
  return {passage().allocate(num_bytes), num_bytes};
}

void PeerSnapshots::commit(const TrainProgress& progress, const GradientStep& gradient_step) {
  comm::Communicator& group = gradient_step.ranks();
  Snapshot made;
  made.generation = group.generation();
  made.step = progress.step;
  made.num_owners = group.size();
  TrainProgress counters = progress;
  counters.num_optimizer_steps = gradient_step.optimizer().num_steps();
  counters.num_scheduled = gradient_step.num_scheduled();
  counters.optimizer_type = std::string(gradient_step.optimizer().type_name());
  made.progress = to_json(counters);

  std::vector<Array> arrays;
  std::vector<Tensor> tensors;
  const auto add = [&](std::string name, ElementRange range, const Tensor& tensor) {
    arrays.push_back({std::move(name), range, tensor.num_bytes()});
    tensors.push_back(tensor);
  };
  for (const ElementRange held : policy_.parameters().held().ranges()) add("", held, policy_.parameters().values_in(held));
  for (const Optimizer::StatePart& state : gradient_step.optimizer().state_parts()) add(state.name, state.range, state.tensor);

  const comm::Call call{.what = "a copy for the neighbour"};
  const int size = group.size(), next = (group.rank() + 1) % size, previous = (group.rank() + size - 1) % size;
  const std::vector<std::string> lists = group.gather_bytes(text_of(arrays), call);
  const std::vector<double> sizes = group.gather_number(static_cast<double>(total_of(tensors)), call);
  const auto bytes_of = [&](int rank) { return static_cast<std::size_t>(sizes[static_cast<std::size_t>(rank)]); };
  for (const int owner : {group.rank(), previous})
    if (!made.parts.contains(owner)) made.parts[owner] = {lists[static_cast<std::size_t>(owner)], take_memory(bytes_of(owner))};
  const std::size_t num_own = bytes_of(group.rank()), num_theirs = bytes_of(previous);
  char *const own = made.parts[group.rank()].memory.bytes(), *const theirs = made.parts[previous].memory.bytes();

  const auto most = static_cast<std::size_t>(*std::ranges::max_element(sizes));
  const std::size_t step = std::min(piece_bytes_, std::max<std::size_t>(most, 1));  // the same at every rank
  Passage& way = passage();
  const auto left_of = [&](std::size_t total, std::size_t at) { return std::min(step, total - std::min(at, total)); };
  try {
    for (std::size_t at = 0; at < most; at += step, way.turn()) {
      const TensorView mine = way.fill(tensors, at, left_of(num_own, at));
      if (size > 1) {
        const TensorView of_previous = way.theirs(left_of(num_theirs, at));
        std::vector<TensorView> outs(static_cast<std::size_t>(size), way.theirs(0));
        std::vector<ConstTensorView> ins(outs.begin(), outs.end());
        outs[static_cast<std::size_t>(previous)] = of_previous;
        ins[static_cast<std::size_t>(next)] = mine;
        group.all_to_all(outs, ins, call);
        way.keep_theirs(theirs + at, left_of(num_theirs, at));
      }
      way.keep_own(own + at, left_of(num_own, at));
      group.settle(call);  // at most one piece is under way when a rank is gone
    }
    way.finish();
  } catch (...) {
    std::vector<std::shared_ptr<void>> targets;
    for (auto& [owner, part] : made.parts) targets.push_back(std::move(part.memory.data));
    way.forget(std::move(targets));
    throw;
  }
  kept_.push_back(std::move(made));
  // Whoever passes the barrier knows that all have come to it, with the new copies in hand.
  group.barrier({.what = "copies for the neighbours"});
  while (kept_.size() > 1) drop_oldest();
  is_newcomer_ = false;
}

std::pair<std::int64_t, std::int64_t> PeerSnapshots::find_common(comm::Communicator& group) const {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  const bool has_nothing = is_newcomer_ && kept_.empty();
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  const std::vector<double> limits =
      group.gather_number(has_nothing && joined_ ? static_cast<double>(*joined_) : kNoLimit, {.what = "who has joined"});
  const double limit = *std::ranges::min_element(limits);
  std::pair<std::int64_t, std::int64_t> newest{-1, -1};
  if (has_nothing) newest = {kAny, kAny};
  for (const Snapshot& snapshot : kept_)
    if (static_cast<double>(snapshot.generation) < limit) newest = {snapshot.generation, snapshot.step};
  const std::array<std::int64_t, 2> mine{newest.first, newest.second};
  for (const std::string& bytes :
       group.gather_bytes({reinterpret_cast<const char*>(mine.data()), sizeof mine}, {.what = "the newest copies"})) {
    std::array<std::int64_t, 2> theirs{};
    if (bytes.size() != sizeof theirs) fail(ErrorCode::kCorrupt, "[healing] {} bytes name the newest copies", bytes.size());
    std::memcpy(theirs.data(), bytes.data(), sizeof theirs);
    newest = std::min(newest, std::pair(theirs[0], theirs[1]));
  }
  if (newest.first == kAny) fail(ErrorCode::kUnavailable, "[healing] only newcomers are left; resume from the last checkpoint");
  return newest;
}

void PeerSnapshots::hand_out(const Array& array, const char* mine, int from, GradientStep& gradient_step) {
  if (array.range.count() == 0) return;
  const std::size_t element = array.num_bytes / static_cast<std::size_t>(array.range.count());
  if (element == 0 || element * static_cast<std::size_t>(array.range.count()) != array.num_bytes)
    fail(ErrorCode::kCorrupt, "[healing] {} bytes of a neighbour's copy hold {} elements", array.num_bytes, array.range.count());
  comm::Communicator& group = gradient_step.ranks();
  const std::int64_t step = static_cast<std::int64_t>(std::max<std::size_t>(piece_bytes_ / element, 1));
  const comm::Call call{.what = "what a rank owned"};
  DeviceRuntime& runtime = *policy_.context().runtime;
  std::vector<std::pair<Tensor, ElementRange>> targets;
  if (array.name.empty()) {
    for (const ElementRange held : policy_.parameters().held().ranges()) targets.emplace_back(policy_.parameters().values_in(held), held);
  } else {
    for (const Optimizer::StatePart& state : gradient_step.optimizer().state_parts())
      if (state.name == array.name) targets.emplace_back(state.tensor, state.range);
  }
  Passage& way = passage();
  for (ElementRange range{array.range.begin, 0}; range.begin < array.range.end; range.begin += step, way.turn()) {
    range.end = std::min(range.begin + step, array.range.end);
    const std::size_t count = element * static_cast<std::size_t>(range.count());
    if (mine != nullptr) way.raise(mine + element * static_cast<std::size_t>(range.begin - array.range.begin), count);
    const TensorView piece = way.own(count);
    if (group.size() > 1) group.broadcast(piece, from, call);
    group.settle(call);  // copies to host memory wait without a deadline
    for (const auto& [tensor, held] : targets) copy_shared(runtime, tensor, held, piece, range);
  }
}

std::optional<TrainProgress> PeerSnapshots::restore(GradientStep& gradient_step) {
  comm::Communicator& group = gradient_step.ranks();
  const auto [generation, step] = find_common(group);
  if (is_newcomer_ && !joined_) joined_ = group.generation();
  if (generation < 0) return std::nullopt;
  const auto found = std::ranges::find_if(
      kept_, [of = generation, at = step](const Snapshot& snapshot) { return snapshot.generation == of && snapshot.step == at; });
  const Snapshot* snapshot = found != kept_.end() ? &*found : nullptr;
  PRL_CHECK(snapshot != nullptr || is_newcomer_, "no copies of step {} of generation {}, which another rank has", step, generation);
  int num_owners = 0;
  for (const double n : group.gather_number(snapshot != nullptr ? snapshot->num_owners : 0, {.what = "owners"}))
    num_owners = std::max(num_owners, static_cast<int>(n));
  std::string progress;
  for (const std::string& text : group.gather_bytes(snapshot != nullptr ? snapshot->progress : std::string(), {.what = "progress"}))
    if (progress.empty()) progress = text;
  for (int owner = 0; owner < num_owners; ++owner) {
    const Part* const part = snapshot != nullptr && snapshot->parts.contains(owner) ? &snapshot->parts.at(owner) : nullptr;
    const std::vector<std::string> lists = group.gather_bytes(part != nullptr ? part->list : std::string(), {.what = "who has a copy"});
    const auto holder = std::ranges::find_if(lists, [](const std::string& list) { return !list.empty(); });
    if (holder == lists.end())
      fail(ErrorCode::kUnavailable,
           "[healing] what rank {} of {} owned is lost: that rank and the one after it, which kept a copy, are both gone; resume from the "
           "last checkpoint",
           owner, num_owners);
    const int from = static_cast<int>(holder - lists.begin());
    const char* mine = from == group.rank() ? part->memory.bytes() : nullptr;
    for (const Array& array : arrays_of(*holder)) {
      hand_out(array, mine, from, gradient_step);
      if (mine != nullptr) mine += array.num_bytes;
    }
  }
  const TrainProgress restored = parse_progress(progress, "the neighbours' copies");
  gradient_step.optimizer().restore_num_steps(restored.num_optimizer_steps);
  gradient_step.restore_num_scheduled(restored.num_scheduled);
  gradient_step.refresh_weights(PolicyVersion{restored.step});
  return restored;
}

}  // namespace prl::trainer
