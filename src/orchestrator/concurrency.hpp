#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "net/asio.hpp"

namespace prl::orchestrator {

namespace asio = boost::asio;

/// What the engines say of their load at one moment, all together.
struct EnginePressure {
  double num_cache_tokens = 0;  ///< room of the key-value caches; 0: not known
  double max_model_len = 0;     ///< longest sequence; 0: not known
  double kv_usage = 0;          ///< of the fullest engine's cache, 1 is all
  double num_running = 0;
  double num_waiting = 0;                              ///< requests that no engine has room for
  double num_preemptions = 0;                          ///< since the engines started, as those below
  double num_prefix_queries = 0, num_prefix_hits = 0;  ///< tokens of prompts that were looked up in the caches, and found
  double num_generation_tokens = 0;
  double num_draft_tokens = 0, num_accepted_tokens = 0;  ///< guesses of speculative decoding, and those of them that came true
};

/// Where the pressure is read. One caller at a time.
class PressureSource {
 public:
  virtual ~PressureSource() = default;
  /// Nullopt when no engine answered before `deadline`.
  virtual asio::awaitable<std::optional<EnginePressure>> read(net::TimePoint deadline) = 0;
};

/// Load of the engines: at kSoft the cap stops growing, at kHard it shrinks.
enum class PressureSignal { kClear = 0, kSoft = 1, kHard = 2 };

/// The cap on rollouts in flight: it grows while engines have room and shrinks when they preempt or queue (spec 3.12). Rollouts above the
/// cap run to their end, unless a KV cache is almost full: then the excess is to be cancelled. Plain data in, a number out; no thread.
/// Polled every kPollSeconds.
class ConcurrencyController {
 public:
  struct Options {
    std::optional<std::int64_t> initial;  ///< none: min until the first poll, then what the caches hold at full length
    std::int64_t min = 1;
    std::int64_t max = 1024;
  };
  static constexpr int kPollSeconds = 5;

  explicit ConcurrencyController(Options options);
  void on_poll(const EnginePressure& pressure, std::int64_t num_inflight, net::TimePoint now);
  /// A rollout has ended that cost tokens; `num_inflight` others go on.
  void on_completion(std::int64_t num_inflight, net::TimePoint now);
  std::int64_t cap() const noexcept;
  /// Rollouts to cancel after the last poll, those in flight above the cap while a cache is all but full; once.
  std::int64_t take_num_to_cancel() noexcept { return std::exchange(num_to_cancel_, 0); }
  /// For metrics: rollouts that ended since the last call, per second; 0 at first.
  double take_turnover(net::TimePoint now) noexcept;
  /// For metrics: sequences of full length that the caches hold; 0: not known.
  double capacity() const noexcept { return capacity_; }
  PressureSignal signal() const noexcept { return signal_; }

 private:
  void set_cap(double cap);
  bool has_long_queue(const EnginePressure& pressure) const { return pressure.num_waiting > 0.5 * pressure.num_running; }
  void cut(double cap);

  Options options_;
  double cap_ = 1;
  bool has_polled_ = false;
  bool is_draining_ = false;  ///< cut, and more than the cap are still in flight
  bool has_empty_queue_ = true;
  PressureSignal signal_ = PressureSignal::kClear;
  double num_preemptions_ = 0;
  double capacity_ = 0;
  std::int64_t num_to_cancel_ = 0;
  std::int64_t num_completed_ = 0;
  std::optional<net::TimePoint> turnover_since_;
  net::TimePoint last_poll_{};
  // Polls since something happened, or in a row.
  int num_waiting_polls_ = 0, num_queue_polls_ = 0;
  int since_trim_ = 1000, since_drain_ = 1000;
};

}  // namespace prl::orchestrator
