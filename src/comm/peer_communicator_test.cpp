#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "comm/store.hpp"
#include "comm/transport.hpp"

namespace prl::comm {
namespace {

/// Messages are through at once, or never.
class InstantTransport final : public Transport {
 public:
  explicit InstantTransport(bool is_deaf = false) : is_deaf_(is_deaf) {}
  std::unique_ptr<Pending> start_send(int, std::uint64_t, const void*, std::size_t) override { return std::make_unique<Message>(false); }
  std::unique_ptr<Pending> start_recv(int, std::uint64_t, void*, std::size_t) override { return std::make_unique<Message>(is_deaf_); }
  void close() noexcept override {}

 private:
  struct Message final : Pending {
    explicit Message(bool never_comes) : never_comes_(never_comes) {}
    void wait(Clock::time_point) override {
      if (never_comes_) throw TransportError(true, "Timed out");
    }
    bool never_comes_;
  };
  bool is_deaf_;
};

std::atomic<int> num_refused, num_to_refuse;

std::unique_ptr<Transport> connect_after_refusals(const CommOptions& options) {
  if (options.rank == 1 && num_refused < num_to_refuse) {
    ++num_refused;
    throw TransportError(true, "Connection refused");
  }
  return std::make_unique<InstantTransport>();
}

std::unique_ptr<Transport> connect_to_others_at_first(const CommOptions& options) {
  const bool is_other = options.rank == 1 && num_refused < num_to_refuse;
  if (is_other) ++num_refused;
  return std::make_unique<InstantTransport>(is_other);
}

/// What each of three ranks got of a group, of which rank 1 was refused the connection so many times: the error, or nothing.
std::vector<std::string> form_group(int refusals, TransportFactory connect = &connect_after_refusals) {
  num_refused = 0;
  num_to_refuse = refusals;
  const std::shared_ptr<Store> store = make_memory_store();
  std::vector<std::string> errors(3);
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        (void)make_peer_communicator("test", connect, {.rank = rank, .size = 3, .store = store, .timeout = std::chrono::seconds(60)});
      } catch (const PeerLost& lost) {
        errors[static_cast<std::size_t>(rank)] = lost.what();
      }
    });
  }
  ranks.clear();
  return errors;
}

TEST(PeerCommunicator, RanksConnectAgainIfOneWasRefused) {
  EXPECT_EQ(form_group(1), std::vector<std::string>(3));
  EXPECT_EQ(num_refused, 1);
}

TEST(PeerCommunicator, RanksConnectAgainIfAConnectionCarriesNothing) {
  EXPECT_EQ(form_group(2, &connect_to_others_at_first), std::vector<std::string>(3));
  EXPECT_EQ(num_refused, 2);
  const std::vector<std::string> errors = form_group(1000, &connect_to_others_at_first);
  EXPECT_NE(errors[1].find("the connection to rank 0 carries nothing: Timed out"), std::string::npos) << errors[1];
}

TEST(PeerCommunicator, ARankThatIsRefusedEachTimeEndsTheGroupForAll) {
  const std::vector<std::string> errors = form_group(1000);
  for (const std::string& error : errors) EXPECT_NE(error.find("could not all connect"), std::string::npos) << error;
  EXPECT_NE(errors[1].find("Connection refused"), std::string::npos) << errors[1];
  EXPECT_EQ(num_refused, 3);
}

}  // namespace
}  // namespace prl::comm
