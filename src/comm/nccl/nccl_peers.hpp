#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "comm/communicator.hpp"
#include "comm/loss_watch.hpp"

namespace prl::comm {

/// How long a rank that waited in vain looks who else says that it waits: who says nothing is lost.
inline constexpr std::chrono::milliseconds kRollCall{2000};
/// How long the connections of the watch may take to be made.
inline constexpr std::chrono::milliseconds kWatchTimeout{20'000};
/// What a rank of a group over NCCL knows of the others: from the store, and from a watch of connections, since NCCL itself says nothing.
/// Any thread.
class NcclPeers {
 public:
  using Clock = std::chrono::steady_clock;
  /// Borrows the group's options.
  explicit NcclPeers(const CommOptions& options) : options_(options) {}

  /// Every rank calls it.
  void connect_watch() {
    try {
      CommOptions options = options_;
      options.timeout = std::min(options.timeout, kWatchTimeout);
      watch_ = make_loss_watch(std::move(options));
    } catch (const Error& error) {
      log::warning("{}: a rank that dies is noticed at the deadline of what waits for it, {:.0f} s", error.what(),
                   std::chrono::duration<double>(options_.timeout).count());
    }
  }

  void say(const char* what, std::string_view text) noexcept {
    try {
      options_.store->set(key(what, options_.rank), text.substr(0, 4096));
    } catch (const std::exception&) {
      // The others then take this rank for lost.
    }
  }

  /// What the store knows of the other ranks: who left, and who waits in vain already.
  std::string others() const {
    std::string text = "over NCCL, which does not say who is late";
    for (int r = 0; r < options_.size; ++r) {
      if (r == options_.rank) continue;
      try {
        if (const auto word = options_.store->get(key("left", r)))
          text += fmt::format("; rank {} has left: {}", r, *word);
        else if (const auto doing = options_.store->get(key("waits", r)))
          text += fmt::format("; rank {} has given up waiting in {}", r, *doing);
      } catch (const Error& error) {
        return text + fmt::format("; the store cannot be asked: {}", error.what());
      }
    }
    return text;
  }

  /// Another rank has left the group, or waits in vain.
  bool has_word_of_others() {
    for (int r = 0; r < options_.size; ++r)
      for (const char* word : {"left", "waits"})
        if (r != options_.rank && options_.store->get(key(word, r))) return true;
    return false;
  }

  /// Those of gone() that did not say that they wait for another.
  std::vector<int> dead() {
    std::vector<int> ranks = gone();
    std::erase_if(ranks, [this](int r) { return options_.store->get(key("waits", r)).has_value(); });
    return ranks;
  }

  /// Those that the watch misses.
  std::vector<int> gone() {
    const std::lock_guard lock(watch_mutex_);
    return watch_ != nullptr ? watch_->gone() : std::vector<int>{};
  }

  /// Who is lost, after a wait in vain for `doing` since `started`, which ended for `reason`; `completed` is what ended last before it.
  /// Takes kRollCall at most.
  PeerLost call_the_roll(const std::string& reason, const std::string& doing, const std::string& completed, Clock::time_point started) {
    say("waits", doing);
    Roll roll;
    const auto deadline = Clock::now() + kRollCall;
    for (;;) {
      roll = ask_all();
      // Who died will not say that it waits. Those who are silent beside one that gave up have only not come to say that they wait.
      if (!roll.quitters.empty() || roll.silent.empty()) break;
      std::vector<int> dead;
      std::ranges::set_intersection(roll.silent, gone(), std::back_inserter(dead));
      if (!dead.empty()) roll.silent = dead;
      if (!dead.empty() || Clock::now() >= deadline) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    const bool gave_up = !roll.quitters.empty();
    const std::vector<int>& lost = gave_up ? roll.quitters : roll.silent;
    return PeerLost(
        lost,
        fmt::format("[nccl] group '{}', generation {}: rank {} waited {:.2f} s in {} ({}); last completed: {}; {}", options_.group,
                    options_.generation, options_.rank, std::chrono::duration<double>(Clock::now() - started).count(), doing, reason,
                    completed, gave_up ? roll.words : fmt::format("ranks that do not say that they wait: [{}]", join(lost))),
        gave_up);
  }

 private:
  /// The other ranks: who left of its own accord, and why; who says nothing.
  struct Roll {
    std::vector<int> quitters, silent;
    std::string words;
  };
  Roll ask_all() const {
    Roll roll;
    for (int r = 0; r < options_.size; ++r) {
      if (r == options_.rank) continue;
      try {
        if (const auto word = options_.store->get(key("left", r))) {
          roll.quitters.push_back(r);
          roll.words += fmt::format("{}rank {} gave up: {}", roll.words.empty() ? "" : "; ", r, *word);
        } else if (!options_.store->get(key("waits", r))) {
          roll.silent.push_back(r);
        }
      } catch (const Error&) {
        roll.silent.push_back(r);
      }
    }
    return roll;
  }
  std::string key(const char* word, int of) const { return fmt::format("{}/g{}/{}/{}", options_.group, options_.generation, word, of); }
  static std::string join(const std::vector<int>& ranks) {
    std::string text;
    for (const int r : ranks) text += (text.empty() ? "" : ", ") + std::to_string(r);
    return text;
  }

  const CommOptions& options_;
  std::mutex watch_mutex_;
  std::unique_ptr<LossWatch> watch_;  ///< may be null
};

}  // namespace prl::comm
