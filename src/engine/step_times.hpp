#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

namespace prl::engine {

/// Where the time of steps goes, by timestamps in the device's stream. Any thread.
class StepTimes {
 public:
  /// Sums over steps, in seconds.
  struct Parts {
    std::int64_t num_steps = 0;
    double wait_s = 0;    ///< the stream was empty: the device waited for the host, or there was nothing to do
    double layers_s = 0;  ///< from the upload of indices to the last norm, and log-probabilities of prompts
    double head_s = 0;    ///< logits; with a fused head, logits and the draw
    double draw_s = 0;

    Parts& operator+=(const Parts& other) noexcept {
      num_steps += other.num_steps;
      wait_s += other.wait_s;
      layers_s += other.layers_s;
      head_s += other.head_s;
      draw_s += other.draw_s;
      return *this;
    }
  };
  struct Kinds {
    Parts decode;  ///< steps of one token per sequence
    Parts prompt;  ///< all others
  };
  /// From the next step on; a GPU's marks take about a microsecond each.
  void start() noexcept { is_on_.store(true); }
  bool is_on() const noexcept { return is_on_.load(); }
  void add(bool is_decode, const Parts& parts) {
    std::lock_guard lock(mutex_);
    (is_decode ? sums_.decode : sums_.prompt) += parts;
  }
  /// What was added since the last call. Stops.
  Kinds take() {
    is_on_.store(false);
    std::lock_guard lock(mutex_);
    return std::exchange(sums_, {});
  }

 private:
  std::atomic<bool> is_on_{false};
  std::mutex mutex_;
  Kinds sums_;  ///< guarded
};

}  // namespace prl::engine
