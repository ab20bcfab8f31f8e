#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <vector>

#include "base/error.hpp"
#include "comm/transport.hpp"

namespace prl::comm {
namespace {

/// Says when each message was handed on.
class Recorder final : public Transport {
 public:
  explicit Recorder(std::vector<Clock::time_point>& sent) : sent_(sent) {}
  std::unique_ptr<Pending> start_send(int, std::uint64_t, const void*, std::size_t) override {
    sent_.push_back(Clock::now());
    return nullptr;
  }
  std::unique_ptr<Pending> start_recv(int, std::uint64_t, void*, std::size_t) override {
    struct Arrived final : Pending {
      void wait(Clock::time_point) override {}
    };
    return std::make_unique<Arrived>();
  }
  void close() noexcept override {}

 private:
  std::vector<Clock::time_point>& sent_;
};

TEST(LimitedTransport, AMessageIsHandedOnWhenTheLinkHasCarriedIt) {
  std::vector<Transport::Clock::time_point> sent;
  const auto transport = limit_bandwidth(std::make_unique<Recorder>(sent), make_slow_link(1e6));
  std::array<char, 20000> data{};
  const auto begin = Transport::Clock::now();
  for (int to = 1; to <= 3; ++to) transport->start_send(to, 0, data.data(), data.size());
  ASSERT_EQ(sent.size(), 3u);
  for (std::size_t i = 0; i < sent.size(); ++i) EXPECT_GE(sent[i] - begin, std::chrono::milliseconds(20) * static_cast<int>(i + 1));
}

TEST(LimitedTransport, MessagesFromSeveralRanksShareTheLink) {
  std::vector<Transport::Clock::time_point> sent;
  const auto transport = limit_bandwidth(std::make_unique<Recorder>(sent), make_slow_link(1e6));
  std::array<char, 20000> data{};
  const auto begin = Transport::Clock::now();
  const auto first = transport->start_recv(1, 0, data.data(), data.size()), second = transport->start_recv(2, 0, data.data(), data.size());
  first->wait({});
  EXPECT_GE(Transport::Clock::now() - begin, std::chrono::milliseconds(20));
  second->wait({});
  EXPECT_GE(Transport::Clock::now() - begin, std::chrono::milliseconds(40));
}

TEST(LimitedTransport, GroupsShareTheLinkOfTheirProcess) {
  std::vector<Transport::Clock::time_point> sent;
  const std::shared_ptr<SlowLink> link = make_slow_link(1e6);
  const auto first = limit_bandwidth(std::make_unique<Recorder>(sent), link),
             second = limit_bandwidth(std::make_unique<Recorder>(sent), link);
  std::array<char, 20000> data{};
  const auto begin = Transport::Clock::now();
  first->start_send(1, 0, data.data(), data.size());
  second->start_send(1, 0, data.data(), data.size());
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_GE(sent[1] - begin, std::chrono::milliseconds(40));
}

TEST(LimitedTransport, TheVariableIsANumberOfBytesPerSecond) {
  ::unsetenv("PRL_COMM_BANDWIDTH");
  EXPECT_FALSE(wanted_bandwidth().has_value());
  ::setenv("PRL_COMM_BANDWIDTH", "2.5e6", 1);
  EXPECT_EQ(wanted_bandwidth(), 2.5e6);
  for (const char* bad : {"fast", "10MB", "5", "nan"}) {
    ::setenv("PRL_COMM_BANDWIDTH", bad, 1);
    EXPECT_THROW(wanted_bandwidth(), Error) << bad;
  }
  ::unsetenv("PRL_COMM_BANDWIDTH");
}

}  // namespace
}  // namespace prl::comm
