#include "comm/meeting.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "base/waiting.hpp"
#include "comm/loss_watch.hpp"

namespace prl::comm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kMetKey = "run/met";
constexpr std::chrono::milliseconds kConnectPerRank{20};

/// PeerLost if a rank of the group that is formed has died, as another group tells.
class Roll {
 public:
  explicit Roll(const CommOptions& options) : options_(options) {}
  void check() {
    if (!options_.gone || !death_.has_lost_a_rank(options_.gone)) return;
    const std::vector<int> gone = options_.gone();
    throw PeerLost(gone, fmt::format("[comm] group '{}', generation {}: the ranks [{}] have died or left while it was formed",
                                     options_.group, options_.generation, fmt::join(gone, ", ")));
  }

 private:
  const CommOptions& options_;
  DeathCheck death_;
};

}  // namespace

std::string await_word(const CommOptions& options, const std::string& key, std::chrono::milliseconds limit) {
  Roll roll(options);
  Waiting waiting({.who = fmt::format("rank {} of {} (group '{}')", options.rank, options.size, options.group),
                   .what = fmt::format("a rank that connects to set key '{}'", key),
                   .limit = limit});
  for (std::chrono::microseconds pause{200};; pause = std::min(pause * 2, std::chrono::microseconds(10'000))) {
    if (const auto value = options.store->get(key)) return *value;
    if (waiting.is_expired())
      fail(ErrorCode::kDeadline, "[comm] waited {:.1f} s for key '{}', which a rank that connects should have set",
           std::chrono::duration<double>(limit).count(), key);
    roll.check();
    waiting.check();
    std::this_thread::sleep_for(pause);
  }
}

std::chrono::milliseconds time_to_connect(const CommOptions& options) {
  return std::min(options.timeout, options.connect_timeout + options.size * kConnectPerRank);
}

void wait_for_all(const CommOptions& options) {
  const auto key = [&options](int rank) { return fmt::format("{}/g{}/here/{}", options.group, options.generation, rank); };
  const std::string group = fmt::format("group '{}', generation {}", options.group, options.generation);
  const std::chrono::milliseconds limit = options.awaits_start ? options.timeout : time_to_connect(options);
  const auto deadline = Clock::now() + limit;
  options.store->set(key(options.rank), "1");
  std::vector<int> missing;
  Roll roll(options);
  Waiting waiting({.who = fmt::format("rank {} of {} ({})", options.rank, options.size, group),
                   .what = "the other ranks to come",
                   .limit = limit,
                   .detail = [&missing] { return fmt::format("missing are the ranks {}", fmt::join(missing, ", ")); }});
  for (std::chrono::microseconds pause{200};; pause = std::min(pause * 2, std::chrono::microseconds(10'000))) {
    missing.clear();
    for (int r = 0; r < options.size; ++r)
      if (!options.store->get(key(r))) missing.push_back(r);
    if (missing.empty()) return;
    roll.check();
    if (Clock::now() >= deadline)
      throw PeerLost(missing,
                     fmt::format("[comm] {}: {} of {} ranks did not come within {:.1f} s, rank {} first: was it started with "
                                 "the same store and number of ranks?",
                                 group, missing.size(), options.size, std::chrono::duration<double>(limit).count(), missing.front()));
    waiting.check();
    std::this_thread::sleep_for(pause);
  }
}

bool has_met(Store& store) { return store.get(kMetKey).has_value(); }

Mesh meet(CommOptions options, MeshShape shape) {
  if (options.size == 1) return Mesh(make_communicator(std::move(options)), shape);
  Store& store = *options.store;
  const auto deadline = Clock::now() + options.timeout;
  for (;; store.advance_generation(options.generation + 1)) {
    options.generation = store.generation();
    if (has_met(store))
      throw PeerLost({options.rank},
                     fmt::format("[comm] the ranks of this store have met already, without this rank {}: a store serves one "
                                 "run, so start each with a folder or server of its own",
                                 options.rank));
    std::optional<Mesh> mesh;
    std::optional<PeerLost> lost;
    try {
      mesh.emplace(make_communicator(options), shape);
      mesh->world().barrier({.what = "the first meeting"});
    } catch (const PeerLost& error) {
      lost = error;
    }
    // Whoever is through the barrier knows that all have come that far; whoever is not may have lost one on the way.
    const std::string verdict = store.set_once(fmt::format("{}/g{}/met", options.group, options.generation), lost ? "no" : "yes");
    if (verdict == "yes" && mesh) {
      store.set(kMetKey, "1");
      return *std::move(mesh);
    }
    if (!lost) lost.emplace(std::vector<int>{}, fmt::format("[comm] generation {}: another rank lost one as they met", options.generation));
    if (verdict == "yes" || lost->gave_up() || Clock::now() >= deadline) throw PeerLost(*lost);
    log::warning("{}; meets the others once more", lost->what());
    options.connect_timeout *= 2;  // perhaps they are slow, and nobody has died
  }
}

}  // namespace prl::comm
