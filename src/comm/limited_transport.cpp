#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "base/error.hpp"
#include "comm/transport.hpp"

namespace prl::comm {

/// On which messages follow each other in each direction. Any thread.
class SlowLink {
 public:
  explicit SlowLink(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}
  enum class Way { kOut, kIn };
  /// Waits until the link has carried so many bytes more, the first of them not before `begin`.
  void carry(Way way, std::size_t bytes, Transport::Clock::time_point begin) {
    const std::chrono::duration<double> on_the_wire(static_cast<double>(bytes) / bytes_per_s_);
    Transport::Clock::time_point done;
    {
      const std::lock_guard lock(mutex_);
      Transport::Clock::time_point& free_at = way == Way::kOut ? out_free_at_ : in_free_at_;
      done = free_at = std::max(free_at, begin) + std::chrono::duration_cast<Transport::Clock::duration>(on_the_wire);
    }
    std::this_thread::sleep_until(done);
  }

 private:
  double bytes_per_s_;
  std::mutex mutex_;
  Transport::Clock::time_point out_free_at_{}, in_free_at_{};
};

namespace {

class LimitedTransport final : public Transport {
 public:
  LimitedTransport(std::unique_ptr<Transport> inner, std::shared_ptr<SlowLink> link) : inner_(std::move(inner)), link_(std::move(link)) {}

  std::unique_ptr<Pending> start_send(int to, std::uint64_t tag, const void* data, std::size_t bytes) override {
    link_->carry(SlowLink::Way::kOut, bytes, Clock::now());
    return inner_->start_send(to, tag, data, bytes);
  }
  std::unique_ptr<Pending> start_recv(int from, std::uint64_t tag, void* data, std::size_t bytes) override {
    return std::make_unique<Arriving>(inner_->start_recv(from, tag, data, bytes), *link_, bytes);
  }
  void wake_lost() noexcept override { inner_->wake_lost(); }
  std::vector<int> gone() override { return inner_->gone(); }
  void close() noexcept override { inner_->close(); }

 private:
  class Arriving final : public Pending {
   public:
    Arriving(std::unique_ptr<Pending> inner, SlowLink& link, std::size_t bytes) : inner_(std::move(inner)), link_(link), bytes_(bytes) {}
    void wait(Clock::time_point deadline) override {
      inner_->wait(deadline);
      link_.carry(SlowLink::Way::kIn, bytes_, began_);
    }

   private:
    std::unique_ptr<Pending> inner_;
    SlowLink& link_;
    std::size_t bytes_;
    Clock::time_point began_ = Clock::now();
  };

  std::unique_ptr<Transport> inner_;
  std::shared_ptr<SlowLink> link_;
};

}  // namespace

std::shared_ptr<SlowLink> make_slow_link(double bytes_per_s) { return std::make_shared<SlowLink>(bytes_per_s); }

std::shared_ptr<SlowLink> link_of_this_process() {
  static const std::shared_ptr<SlowLink> link = [] {
    const std::optional<double> wanted = wanted_bandwidth();
    return wanted ? make_slow_link(*wanted) : nullptr;
  }();
  return link;
}

std::unique_ptr<Transport> limit_bandwidth(std::unique_ptr<Transport> inner, std::shared_ptr<SlowLink> link) {
  return std::make_unique<LimitedTransport>(std::move(inner), std::move(link));
}

std::optional<double> wanted_bandwidth() {
  const char* text = std::getenv("PRL_COMM_BANDWIDTH");
  if (text == nullptr || *text == '\0') return std::nullopt;
  char* end = nullptr;
  const double bytes_per_s = std::strtod(text, &end);
  // Messages of a few hundred MiB must still end within what an operation may take.
  constexpr double kLeast = 1e5;
  if (*end != '\0' || !(bytes_per_s >= kLeast))
    fail(ErrorCode::kInvalidArgument, "PRL_COMM_BANDWIDTH is '{}', wanted bytes per second, {:.0f} at least", text, kLeast);
  return bytes_per_s;
}

}  // namespace prl::comm
