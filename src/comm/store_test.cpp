#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/testing/eventually.hpp"
#include "base/testing/temp_folder.hpp"
#include "comm/store.hpp"

namespace prl::comm {
namespace {

using prl::testing::TempFolder;

/// Two holders of the same store.
struct Pair {
  std::shared_ptr<Store> a, b;
};

class StoreTest : public ::testing::TestWithParam<const char*> {
 protected:
  Pair make() {
    const std::string kind = GetParam();
    if (kind == "memory") {
      const auto store = make_memory_store();
      return {store, store};
    }
    if (kind == "file") {
      const std::string address = "file:" + (folder_.path() / "store").string();
      return {make_store(address), make_store(address)};
    }
    server_ = std::make_unique<StoreServer>();
    return {make_store(server_->address()), make_store(server_->address())};
  }
  TempFolder folder_;
  std::unique_ptr<StoreServer> server_;
};

TEST_P(StoreTest, ValuesOfOneAreSeenByTheOther) {
  const Pair store = make();
  EXPECT_EQ(store.b->get("g0/a/b"), std::nullopt);
  std::string bytes = "zero \0 and newline\n";
  bytes.resize(100'000, '\xff');
  store.a->set("g0/a/b", bytes);
  EXPECT_EQ(store.b->get("g0/a/b"), bytes);
  store.b->set("g0/a/b", "");
  EXPECT_EQ(store.a->get("g0/a/b"), "");
  EXPECT_EQ(store.a->get("g0/a_b"), std::nullopt);
}

TEST_P(StoreTest, CompareAndSetIsOneStep) {
  const Pair store = make();
  EXPECT_EQ(store.a->compare_and_set("k", "x", "y"), "");
  EXPECT_EQ(store.a->set_once("k", "first"), "first");
  EXPECT_EQ(store.b->set_once("k", "second"), "first");
  EXPECT_EQ(store.b->compare_and_set("k", "other", "third"), "first");
  EXPECT_EQ(store.b->compare_and_set("k", "first", "third"), "third");
  // Counting with it from several threads loses nothing.
  store.a->set("n", "0");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      Store& mine = t % 2 == 0 ? *store.a : *store.b;
      for (int i = 0; i < 25; ++i)
        for (;;) {
          const std::string old = *mine.get("n"), next = std::to_string(std::stoi(old) + 1) + "." + std::to_string(t);
          if (mine.compare_and_set("n", old, next) == next) break;
        }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::stoi(*store.a->get("n")), 100);
}

TEST_P(StoreTest, WaitEndsWithTheValueOrTheDeadline) {
  const Pair store = make();
  std::jthread setter([&] { store.a->set("late", "here"); });
  EXPECT_EQ(store.b->wait("late", std::chrono::seconds(60)), "here");
  try {
    (void)store.b->wait("never", std::chrono::milliseconds(20), "rank 3");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeadline);
    EXPECT_NE(std::string(error.what()).find("'never', which rank 3"), std::string::npos) << error.what();
  }
}

TEST_P(StoreTest, GenerationsNeverGoBack) {
  const Pair store = make();
  EXPECT_EQ(store.a->generation(), 0);
  store.a->advance_generation(2);
  store.b->advance_generation(1);
  EXPECT_EQ(store.b->generation(), 2);
}

TEST_P(StoreTest, LimitsAreErrors) {
  const Pair store = make();
  for (const std::string& key : {std::string(), std::string("a b"), std::string(Store::kMaxKeyBytes + 1, 'k'), std::string("\n")})
    EXPECT_THROW((void)store.a->get(key), Error) << key;
  EXPECT_THROW(store.a->set("k", std::string(Store::kMaxValueBytes + 1, 'v')), Error);
  store.a->set(std::string(Store::kMaxKeyBytes, '/'), "v");
  EXPECT_EQ(store.b->get(std::string(Store::kMaxKeyBytes, '/')), "v");
}

INSTANTIATE_TEST_SUITE_P(All, StoreTest, ::testing::Values("memory", "file", "tcp"), [](const auto& param) { return param.param; });

TEST(TcpStore, ALostServerIsAnErrorThatNamesIt) {
  auto server = std::make_unique<StoreServer>();
  const int port = server->port();
  const auto store = make_tcp_store("127.0.0.1", port, std::chrono::milliseconds(200));
  store->set("k", "v");
  server.reset();
  try {
    (void)store->get("k");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_NE(std::string(error.what()).find(std::to_string(port)), std::string::npos) << error.what();
  }
  // A server that comes back on the same port serves the same client.
  const StoreServer again("127.0.0.1", port);
  EXPECT_EQ(store->get("k"), std::nullopt);
}

TEST(TcpStore, AServerThatIsGoneIsNotWaitedForAtEachCall) {
  auto server = std::make_unique<StoreServer>();
  const int port = server->port();
  const auto store = make_tcp_store("127.0.0.1", port, std::chrono::seconds(20));
  store->set("k", "v");
  server.reset();
  std::atomic<int> num_ended{0};
  std::jthread asks([&] {
    for (int i = 0; i < 10; ++i) {
      EXPECT_THROW((void)store->get("k"), Error);
      ++num_ended;
    }
  });
  EXPECT_TRUE(prl::testing::eventually([&] { return num_ended == 10; })) << num_ended;
  asks.join();
  const StoreServer again("127.0.0.1", port);
  EXPECT_EQ(store->get("k"), std::nullopt) << "one that comes back serves it";
}

TEST(TcpStore, WaitsForAServerThatComesLater) {
  int port = 0;
  {
    const StoreServer probe;
    port = probe.port();
  }
  std::shared_ptr<Store> store;
  std::jthread client([&] { store = make_tcp_store("127.0.0.1", port, std::chrono::seconds(60)); });
  const StoreServer server("127.0.0.1", port);
  client.join();
  store->set("a", "b");
  EXPECT_EQ(store->get("a"), "b");
}

TEST(TcpStore, WhatAnswersWithoutBeingAStoreIsLost) {
  const Fd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const auto store = make_tcp_store("127.0.0.1", ntohs(address.sin_port), std::chrono::seconds(20));
  std::jthread echo([&] {
    const Fd client(::accept(listener.get(), nullptr, nullptr));
    char bytes[64];
    const ssize_t n = ::recv(client.get(), bytes, sizeof bytes, 0);
    EXPECT_EQ(::send(client.get(), bytes, static_cast<std::size_t>(n), MSG_NOSIGNAL), n);
  });
  try {
    (void)store->get("k");
    FAIL() << "a request is no answer";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable) << error.what();
  }
}

TEST(Store, AddressesThatAreNotUnderstoodAreNamed) {
  for (const char* address : {"", "file:", "tcp://", "tcp://host", "tcp://host:0", "tcp://host:70000", "tcp://host:12x", "redis://a:1"}) {
    try {
      (void)make_store(address, std::chrono::milliseconds(1));
      FAIL() << address;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    }
  }
}

}  // namespace
}  // namespace prl::comm
