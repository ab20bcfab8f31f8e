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

  /// Who is lost, after a wait in vain since `started`, which ended for `reason`. Takes kRollCall at most.
  PeerLost call_the_roll(const std::string& reason, const std::string& doing, Clock::time_point started) {
    say("waits", doing);
    std::vector<int> lost;
    std::string words;
    const auto deadline = Clock::now() + kRollCall;
    do {
      lost.clear();
      words.clear();
      for (int r = 0; r < options_.size; ++r) {
        if (r == options_.rank) continue;
        try {
          if (const auto word = options_.store->get(key("left", r))) {
            lost.push_back(r);
            words += fmt::format("; rank {} gave up: {}", r, *word);
          } else if (!options_.store->get(key("waits", r))) {
            lost.push_back(r);
          }
        } catch (const Error&) {
          lost.push_back(r);
        }
      }
      // Who died will not say that it waits.
      std::vector<int> dead;
      if (words.empty()) std::ranges::set_intersection(lost, gone(), std::back_inserter(dead));
      if (!dead.empty()) {
        lost = dead;
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    } while (!lost.empty() && words.empty() && Clock::now() < deadline);
    return PeerLost(
        lost,
        fmt::format("[nccl] group '{}', generation {}: rank {} waited {:.2f} s in {} ({}); ranks that do not say that they wait: [{}]{}",
                    options_.group, options_.generation, options_.rank, std::chrono::duration<double>(Clock::now() - started).count(),
                    doing, reason, join(lost), words),
        !words.empty());
  }

 private:
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
