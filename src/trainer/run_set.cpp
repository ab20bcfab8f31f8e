#include "trainer/run_set.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "base/log.hpp"
#include "trainer/agreement.hpp"

namespace prl::trainer {

namespace {

/// Rank 0 speaks to ranks that wait for it at least this often.
constexpr std::chrono::milliseconds kSignOfLife{200};

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
  Member(SharedRun given, bool is_on_ranks)
      : parts(with_ranks(std::move(given), is_on_ranks)),
        channel(parts),
        run(parts.options, *parts.policy, parts.make_receiver, parts.channel != nullptr ? &channel : nullptr, *parts.monitor) {}

  static SharedRun with_ranks(SharedRun run, bool is_on_ranks) {
    run.options.outlives_errors = is_on_ranks;
    return run;
  }

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

RunSet::RunSet(std::int64_t num_slots, comm::Communicator* ranks)
    : num_slots_(num_slots), slots_(static_cast<std::size_t>(num_slots)), ranks_(ranks != nullptr && ranks->size() > 1 ? ranks : nullptr) {
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

template <typename Work>
auto RunSet::among_ranks(const Work& work) {
  try {
    return work();
  } catch (const comm::PeerLost& lost) {
    for (const auto& member : slots_)
      if (member != nullptr) member->run.give_up_on(lost);
    throw;
  }
}

void RunSet::tell(Order order, std::int64_t slot, bool saves, std::string_view text) {
  if (ranks_ == nullptr) return;
  PRL_CHECK(ranks_->rank() == 0, "rank {} follows rank 0", ranks_->rank());
  const std::string spoken = fmt::format("{} {} {} {}", static_cast<int>(order), slot, saves ? 1 : 0, text);
  const std::vector<std::string> said = among_ranks([&] { return ranks_->gather_bytes(spoken, {.what = "what rank 0 does next"}); });
  told_ = std::chrono::steady_clock::now();
  is_stop_wanted_ = is_stop_wanted_ || std::any_of(said.begin() + 1, said.end(), [](const std::string& word) { return !word.empty(); });
}

std::optional<Error> RunSet::error_of_all(const std::function<void()>& work) {
  if (ranks_ == nullptr) return error_of(work);
  try {
    among_ranks(work);
    return std::nullopt;
  } catch (const comm::PeerLost&) {
    throw;
  } catch (const SharedError& error) {
    if (error.code() == ErrorCode::kInternal) throw;
    return error;
  } catch (const std::exception& error) {  // the others may have gone on
    ranks_->abort(error.what());
    throw;
  }
}

std::int64_t RunSet::admit(const std::function<SharedRun()>& make) {
  const auto free = std::ranges::find_if(slots_, [](const auto& member) { return member == nullptr; });
  PRL_CHECK(free != slots_.end(), "no slot is free for another run");
  std::unique_ptr<Member> member;
  const auto make_member = [&] {
    member = std::make_unique<Member>(make(), ranks_ != nullptr);
    member->slot = free - slots_.begin();
  };
  if (ranks_ != nullptr)
    agree(*ranks_, make_member);
  else
    make_member();
  const RoleScope scope(member->parts.name);
  member->run.begin();
  member->run.forgive_waiting();
  *free = std::move(member);
  return free - slots_.begin();
}

std::int64_t RunSet::add(SharedRun run, std::string_view description) {
  PRL_CHECK(!has(run.name), "run '{}' is in a slot already", run.name);
  tell(Order::kAdd, 0, false, description);
  if (ranks_ == nullptr) return admit([&] { return std::move(run); });
  std::int64_t slot = 0;
  if (const auto error = error_of_all([&] { slot = admit([&] { return std::move(run); }); })) throw Error(*error);
  return slot;
}

bool RunSet::follow(const MakeRun& make, bool wants_stop) {
  PRL_CHECK(ranks_ != nullptr && ranks_->rank() != 0, "nobody to follow");
  const std::string told = ranks_->gather_bytes(wants_stop ? "stop" : "", {.what = "what rank 0 does next"}).front();
  int order = 0, saves = 0, length = 0;
  long long slot = 0;
  if (std::sscanf(told.c_str(), "%d %lld %d %n", &order, &slot, &saves, &length) != 3 || slot < 0 || slot >= num_slots_)
    fail(ErrorCode::kCorrupt, "[runs] rank 0 tells '{}'", told.substr(0, 80));
  Member* const member = slots_[static_cast<std::size_t>(slot)].get();
  std::optional<Error> error;
  switch (static_cast<Order>(order)) {
    case Order::kWait: return true;
    case Order::kDismiss: return false;
    case Order::kAdd: error = error_of_all([&] { admit([&] { return make(std::string_view(told).substr(length)); }); }); break;
    case Order::kStep: {
      const RoleScope scope(member->parts.name);
      error = error_of_all([&] { member->run.step(); });
      break;
    }
    case Order::kLeave: {
      const RoleScope scope(member->parts.name);
      TrainRunResult ignored;
      error = finish(*member, saves != 0, ignored);
      break;
    }
  }
  if (error) log::warning("{}", error->what());  // rank 0 says what becomes of the run
  return true;
}

void RunSet::dismiss() { tell(Order::kDismiss); }

std::optional<Error> RunSet::finish(Member& member, bool saves, TrainRunResult& result) {
  std::optional<Error> error;
  if (saves) error = error_of_all([&] { result = member.run.finish(); });
  slots_[static_cast<std::size_t>(member.slot)].reset();
  return error;
}

RunSet::Stepped RunSet::leave(Member& member, std::optional<Error> error, bool saves) {
  Stepped out{.name = member.parts.name, .end = RunEnd{.result = {}, .error = std::move(error), .is_gone = !member.is_there()}};
  RunEnd& end = *out.end;
  end.result.last_step = member.run.progress().step;
  if (end.is_gone) end.error.reset();
  // A step that failed has changed nothing: the one before it is worth saving all the same.
  saves = saves && !end.is_gone;
  tell(Order::kLeave, member.slot, saves);
  auto failure = finish(member, saves, end.result);
  if (!end.error) end.error = std::move(failure);
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
  if (member == nullptr) {
    if (std::chrono::steady_clock::now() - told_ > kSignOfLife) tell(Order::kWait);
    return std::nullopt;
  }
  const RoleScope scope(member->parts.name);
  if (member->run.is_at_end()) return leave(*member, std::nullopt);
  const std::int64_t before = member->run.progress().total_tokens;
  virtual_time_ = member->share;
  member->was_ready = false;
  bool goes_on = false;
  tell(Order::kStep, member->slot);
  std::optional<Error> error = error_of_all([&] { goes_on = member->run.step() && !member->run.is_done(); });
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
