#include "base/interrupts.hpp"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <thread>

namespace prl {

struct Interrupts::Impl {
  std::atomic<int> num_pending{0};
  sigset_t set{};
  sigset_t previous{};
  std::jthread watcher;
};

Interrupts::Interrupts() : impl_(std::make_unique<Impl>()) {
  sigemptyset(&impl_->set);
  sigaddset(&impl_->set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &impl_->set, &impl_->previous);
  signal(SIGPIPE, SIG_IGN);
  impl_->watcher = std::jthread([impl = impl_.get()](std::stop_token ending) {
    while (!ending.stop_requested()) {
      const timespec wait{0, 100'000'000};
      if (sigtimedwait(&impl->set, nullptr, &wait) == SIGINT && ++impl->num_pending >= 3) ::_exit(130);
    }
  });
}

Interrupts::~Interrupts() {
  impl_->watcher.request_stop();
  impl_->watcher.join();
  pthread_sigmask(SIG_SETMASK, &impl_->previous, nullptr);
}

bool Interrupts::take() noexcept { return impl_->num_pending.exchange(0) > 0; }

}  // namespace prl
