#include "trainer/peer_snapshot.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "base/error.hpp"

namespace prl::trainer {

namespace {

/// One array of a part: of `name` (empty: the masters), elements [begin, begin + count) of all values.
struct ArrayHead {
  std::int64_t name_bytes = 0, begin = 0, count = 0, num_bytes = 0;
};

void append(std::string& out, std::string_view name, ElementRange range, const Tensor& tensor) {
  const ArrayHead head{static_cast<std::int64_t>(name.size()), range.begin, range.count(), static_cast<std::int64_t>(tensor.num_bytes())};
  out.append(reinterpret_cast<const char*>(&head), sizeof head);
  out.append(name);
  const std::size_t at = out.size();
  out.resize(at + tensor.num_bytes());
  if (tensor.num_bytes() > 0) tensor.runtime()->copy_to_host(out.data() + at, tensor.data(), tensor.num_bytes());
}

/// Copies what lies in both ranges; `bytes` are those of `from`.
void copy_shared(const Tensor& to, ElementRange to_range, std::string_view bytes, ElementRange from) {
  const ElementRange both = intersection(to_range, from);
  if (both.count() == 0) return;
  const std::size_t element = bytes.size() / static_cast<std::size_t>(from.count());
  if (element * static_cast<std::size_t>(to_range.count()) != to.num_bytes())
    fail(ErrorCode::kCorrupt, "[healing] a neighbour's copy has elements of {} bytes", element);
  auto* target = static_cast<char*>(to.data()) + element * static_cast<std::size_t>(both.begin - to_range.begin);
  to.runtime()->copy_from_host(target, bytes.data() + element * static_cast<std::size_t>(both.begin - from.begin),
                               element * static_cast<std::size_t>(both.count()));
}

TensorView bytes_view(std::string& bytes) {
  const auto n = static_cast<std::int64_t>(bytes.size());
  return {bytes.data(), {n}, DType::kU8, {}, n};
}

}  // namespace

std::size_t PeerSnapshots::num_bytes() const noexcept {
  std::size_t sum = 0;
  for (const Snapshot& snapshot : kept_)
    for (const auto& [owner, part] : snapshot.parts) sum += part.size();
  return sum;
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
  std::string& part = made.parts[group.rank()];
  for (const ElementRange held : policy_.parameters().held().ranges()) append(part, "", held, policy_.parameters().values_in(held));
  for (const Optimizer::StatePart& state : gradient_step.optimizer().state_parts()) append(part, state.name, state.range, state.tensor);
  if (group.size() > 1) {
    const int next = (group.rank() + 1) % group.size(), previous = (group.rank() + group.size() - 1) % group.size();
    const comm::Call call{.what = "a copy for the neighbour"};
    const std::vector<double> sizes = group.gather_number(static_cast<double>(part.size()), call);
    std::string& theirs = made.parts[previous];
    theirs.resize(static_cast<std::size_t>(sizes[static_cast<std::size_t>(previous)]));
    std::string nothing;
    std::vector<TensorView> outs(static_cast<std::size_t>(group.size()), bytes_view(nothing));
    std::vector<ConstTensorView> ins(outs.begin(), outs.end());
    outs[static_cast<std::size_t>(previous)] = bytes_view(theirs);
    ins[static_cast<std::size_t>(next)] = bytes_view(made.parts[group.rank()]);
    group.all_to_all(outs, ins, call);
  }
  kept_.push_back(std::move(made));
  // Whoever passes the barrier knows that all have come to it, with the new copies in hand.
  group.barrier({.what = "copies for the neighbours"});
  while (kept_.size() > 1) kept_.pop_front();
  is_newcomer_ = false;
}

std::pair<std::int64_t, std::int64_t> PeerSnapshots::find_common(comm::Communicator& group) const {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  std::pair<std::int64_t, std::int64_t> newest{-1, -1};
  if (is_newcomer_) newest = {kAny, kAny};
  if (!kept_.empty()) newest = {kept_.back().generation, kept_.back().step};
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

void PeerSnapshots::take(std::string_view part, GradientStep& gradient_step) const {
  const std::vector<Optimizer::StatePart> own = gradient_step.optimizer().state_parts();
  while (!part.empty()) {
    ArrayHead head;
    if (part.size() < sizeof head) fail(ErrorCode::kCorrupt, "[healing] a neighbour's copy ends too early");
    std::memcpy(&head, part.data(), sizeof head);
    part.remove_prefix(sizeof head);
    const std::int64_t left = static_cast<std::int64_t>(part.size());
    if (head.name_bytes < 0 || head.num_bytes < 0 || head.count < 0 || head.name_bytes > left || head.num_bytes > left - head.name_bytes)
      fail(ErrorCode::kCorrupt, "[healing] a neighbour's copy names {} + {} bytes where {} are left", head.name_bytes, head.num_bytes,
           left);
    const std::string_view name = part.substr(0, static_cast<std::size_t>(head.name_bytes));
    const std::string_view bytes = part.substr(name.size(), static_cast<std::size_t>(head.num_bytes));
    part.remove_prefix(name.size() + bytes.size());
    const ElementRange range{head.begin, head.begin + head.count};
    if (range.count() == 0) continue;
    if (name.empty()) {
      for (const ElementRange held : policy_.parameters().held().ranges())
        copy_shared(policy_.parameters().values_in(held), held, bytes, range);
      continue;
    }
    for (const Optimizer::StatePart& mine : own)
      if (mine.name == name) copy_shared(mine.tensor, mine.range, bytes, range);
  }
}

std::optional<TrainProgress> PeerSnapshots::restore(GradientStep& gradient_step) {
  comm::Communicator& group = gradient_step.ranks();
  const auto [generation, step] = find_common(group);
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
    const bool has_it = snapshot != nullptr && snapshot->parts.contains(owner);
    const std::vector<double> sizes =
        group.gather_number(has_it ? static_cast<double>(snapshot->parts.at(owner).size()) : -1, {.what = "who has a copy"});
    const auto holder = std::ranges::find_if(sizes, [](double size) { return size >= 0; });
    if (holder == sizes.end())
      fail(ErrorCode::kUnavailable,
           "[healing] what rank {} of {} owned is lost: that rank and the one after it, which kept a copy, are both gone; resume from the "
           "last checkpoint",
           owner, num_owners);
    const int from = static_cast<int>(holder - sizes.begin());
    std::string copy;
    if (from == group.rank())
      copy = snapshot->parts.at(owner);
    else
      copy.resize(static_cast<std::size_t>(*holder));
    group.broadcast(bytes_view(copy), from, {.what = "what a rank owned"});
    take(copy, gradient_step);
  }
  const TrainProgress restored = parse_progress(progress, "the neighbours' copies");
  gradient_step.optimizer().restore_num_steps(restored.num_optimizer_steps);
  gradient_step.restore_num_scheduled(restored.num_scheduled);
  gradient_step.refresh_weights(PolicyVersion{restored.step});
  return restored;
}

}  // namespace prl::trainer
