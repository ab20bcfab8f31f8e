#include "trainer/run_set.hpp"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/log.hpp"

namespace prl::trainer {

namespace {

/// Publishes nothing for a run whose folder is gone, and so does not make it again.
class GuardedChannel final : public weights::WeightChannel {
 public:
  explicit GuardedChannel(const SharedRun& run) : run_(run) {}
  void publish(weights::Publication publication) override {
    if (run_.is_there && !run_.is_there()) fail(ErrorCode::kNotFound, "the folder of run '{}' was taken away", run_.name);
    run_.channel->publish(std::move(publication));
  }
  std::optional<weights::PublishedWeights> latest() override { return run_.channel->latest(); }
  std::shared_ptr<weights::VersionFeed> follow() override { return run_.channel->follow(); }
  std::string describe() const override { return run_.channel->describe(); }

 private:
  const SharedRun& run_;
};

/// Lines that are written meanwhile are the run's.
class RoleScope {
 public:
  explicit RoleScope(const std::string& name) { log::set_thread_role(name); }
  ~RoleScope() { log::set_thread_role(""); }
  RoleScope(const RoleScope&) = delete;
  RoleScope& operator=(const RoleScope&) = delete;
};

/// What `body` throws, if it concerns one run alone.
template <typename Body>
std::optional<Error> error_of(Body body) {
  try {
    body();
    return std::nullopt;
  } catch (const comm::PeerLost&) {
    throw;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInternal) throw;  // of the device, perhaps: nobody can go on
    return error;
  } catch (const std::filesystem::filesystem_error& error) {
    return Error(ErrorCode::kIo, error.what());
  }
}

}  // namespace

struct RunSet::Member {
  explicit Member(SharedRun given)
      : parts(std::move(given)),
        channel(parts),
        run(parts.options, *parts.policy, parts.make_receiver, parts.channel != nullptr ? &channel : nullptr, *parts.monitor) {}

  bool is_there() const { return !parts.is_there || parts.is_there(); }

  RunView view() const {
    return {.name = parts.name,
            .slot = slot,
            .step = run.progress().step,
            .total_tokens = run.progress().total_tokens,
            .weight = parts.weight,
            .is_paused = is_paused};
  }

  SharedRun parts;
  GuardedChannel channel;
  RlRun run;
  std::int64_t slot = 0;
  double share = 0;        ///< virtual time at which its next step begins: its own time passes with trained tokens over weight
  bool was_ready = false;  ///< at the last look
  bool is_paused = false;
};

RunSet::RunSet(std::int64_t num_slots) : num_slots_(num_slots), slots_(static_cast<std::size_t>(num_slots)) {
  PRL_CHECK(num_slots > 0, "a set of runs without slots");
}
RunSet::~RunSet() = default;

std::int64_t RunSet::num_runs() const noexcept {
  return std::ranges::count_if(slots_, [](const auto& member) { return member != nullptr; });
}

bool RunSet::has(const std::string& name) const noexcept {
  return std::ranges::any_of(slots_, [&](const auto& member) { return member != nullptr && member->parts.name == name; });
}

RunSet::Member& RunSet::find(const std::string& name) const {
  for (const auto& member : slots_)
    if (member != nullptr && member->parts.name == name) return *member;
  fail(ErrorCode::kNotFound, "there is no run '{}' in a slot", name);
}

std::int64_t RunSet::add(SharedRun run) {
  PRL_CHECK(!has(run.name), "run '{}' is in a slot already", run.name);
  const auto free = std::ranges::find_if(slots_, [](const auto& member) { return member == nullptr; });
  PRL_CHECK(free != slots_.end(), "no slot is free for run '{}'", run.name);
  const RoleScope scope(run.name);
  auto member = std::make_unique<Member>(std::move(run));
  member->slot = free - slots_.begin();
  member->run.begin();
  member->run.forgive_waiting();
  *free = std::move(member);
  return free - slots_.begin();
}

RunSet::Stepped RunSet::leave(Member& member, std::optional<Error> error, bool saves) {
  Stepped out{.name = member.parts.name, .end = RunEnd{.result = {}, .error = std::move(error), .is_gone = !member.is_there()}};
  RunEnd& end = *out.end;
  end.result.last_step = member.run.progress().step;
  if (end.is_gone) {
    end.error.reset();
  } else if (saves) {
    // A step that failed has changed nothing: the one before it is worth saving all the same.
    auto failure = error_of([&] { end.result = member.run.finish(); });
    if (!end.error) end.error = std::move(failure);
  }
  slots_[static_cast<std::size_t>(member.slot)].reset();
  return out;
}

RunSet::Member* RunSet::next_ready(std::optional<Stepped>& left) {
  Member* best = nullptr;
  for (const auto& member : slots_) {
    if (member == nullptr) continue;
    bool is_ready = false;
    std::optional<Error> error;
    if (member->is_paused)
      member->run.forgive_waiting();
    else
      error = error_of([&] { is_ready = member->run.is_ready(); });
    if (error || !member->is_there()) {
      left = leave(*member, std::move(error));
      return nullptr;
    }
    // Time without samples is not saved up: who had none begins where the others are.
    if (is_ready && !member->was_ready) member->share = std::max(member->share, virtual_time_);
    member->was_ready = is_ready;
    if (is_ready && (best == nullptr || member->share < best->share)) best = member.get();
  }
  return best;
}

std::optional<RunSet::Stepped> RunSet::step() {
  std::optional<Stepped> left;
  Member* const member = next_ready(left);
  if (left) return left;
  if (member == nullptr) return std::nullopt;
  const RoleScope scope(member->parts.name);
  const std::int64_t before = member->run.progress().total_tokens;
  virtual_time_ = member->share;
  member->was_ready = false;
  bool goes_on = false;
  std::optional<Error> error = error_of([&] { goes_on = member->run.step() && !member->run.is_done(); });
  member->share += static_cast<double>(member->run.progress().total_tokens - before) / member->parts.weight;
  if (goes_on) return Stepped{.name = member->parts.name, .end = std::nullopt};
  return leave(*member, std::move(error));
}

void RunSet::set_weight(const std::string& name, double weight) {
  PRL_CHECK(weight > 0, "the weight of a run is above 0");
  find(name).parts.weight = weight;
}

void RunSet::set_paused(const std::string& name, bool is_paused) { find(name).is_paused = is_paused; }

RunEnd RunSet::end(const std::string& name, bool saves) {
  Member& member = find(name);
  const RoleScope scope(name);
  return *leave(member, std::nullopt, saves).end;
}

RunView RunSet::view_of(const std::string& name) const { return find(name).view(); }

std::vector<RunView> RunSet::views() const {
  std::vector<RunView> out;
  for (const auto& member : slots_)
    if (member != nullptr) out.push_back(member->view());
  return out;
}

}  // namespace prl::trainer
