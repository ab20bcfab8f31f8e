#include <algorithm>
#include <cstdlib>
#include <thread>

#include "base/error.hpp"
#include "comm/transport.hpp"

namespace prl::comm {
namespace {

/// One direction of a rank's link, on which messages follow each other.
class Lane {
 public:
  explicit Lane(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}
  /// Waits until the link has carried so many bytes more, the first of them not before `begin`.
  void carry(std::size_t bytes, Transport::Clock::time_point begin) {
    const std::chrono::duration<double> on_the_wire(static_cast<double>(bytes) / bytes_per_s_);
    free_at_ = std::max(free_at_, begin) + std::chrono::duration_cast<Transport::Clock::duration>(on_the_wire);
    std::this_thread::sleep_until(free_at_);
  }

 private:
  double bytes_per_s_;
  Transport::Clock::time_point free_at_{};
};

class LimitedTransport final : public Transport {
 public:
  LimitedTransport(std::unique_ptr<Transport> inner, double bytes_per_s) : inner_(std::move(inner)), out_(bytes_per_s), in_(bytes_per_s) {}

  std::unique_ptr<Pending> start_send(int to, std::uint64_t tag, const void* data, std::size_t bytes) override {
    out_.carry(bytes, Clock::now());
    return inner_->start_send(to, tag, data, bytes);
  }
  std::unique_ptr<Pending> start_recv(int from, std::uint64_t tag, void* data, std::size_t bytes) override {
    return std::make_unique<Arriving>(inner_->start_recv(from, tag, data, bytes), in_, bytes);
  }
  void wake_lost() noexcept override { inner_->wake_lost(); }
  std::vector<int> gone() override { return inner_->gone(); }
  void close() noexcept override { inner_->close(); }

 private:
  class Arriving final : public Pending {
   public:
    Arriving(std::unique_ptr<Pending> inner, Lane& lane, std::size_t bytes) : inner_(std::move(inner)), lane_(lane), bytes_(bytes) {}
    void wait(Clock::time_point deadline) override {
      inner_->wait(deadline);
      lane_.carry(bytes_, began_);
    }

   private:
    std::unique_ptr<Pending> inner_;
    Lane& lane_;
    std::size_t bytes_;
    Clock::time_point began_ = Clock::now();
  };

  std::unique_ptr<Transport> inner_;
  Lane out_, in_;
};

}  // namespace

std::unique_ptr<Transport> limit_bandwidth(std::unique_ptr<Transport> inner, double bytes_per_s) {
  return std::make_unique<LimitedTransport>(std::move(inner), bytes_per_s);
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
