#pragma once

#include <memory>

namespace prl {

/// Turns SIGINT into a flag that is read and cleared, for programs that go on after it (StopSignal is for those that end).
/// A third signal that nobody took ends the process at once, as does SIGTERM. Make one before other threads start, so that
/// they inherit the blocked signal mask.
class Interrupts {
 public:
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;
  /// True if a signal came since the last call.
  bool take() noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace prl
