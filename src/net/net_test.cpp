#include <gtest/gtest.h>

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <map>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "base/testing/eventually.hpp"
#include "net/async_result.hpp"
#include "net/deadline.hpp"
#include "net/http_message.hpp"
#include "net/io_runtime.hpp"
#include "net/percent.hpp"
#include "net/route_table.hpp"
#include "net/sse.hpp"
#include "net/task_group.hpp"
#include "net/worker_pool.hpp"

namespace prl::net {
namespace {

using namespace std::chrono_literals;

ErrorCode code_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "no error was thrown";
  return ErrorCode::kInternal;
}

asio::awaitable<int> forty_two() { co_return 42; }
asio::awaitable<int> throws_not_found() {
  fail(ErrorCode::kNotFound, "no such thing");
  co_return 0;
}
asio::awaitable<int> slow() {
  co_await sleep_for(30s);
  co_return 1;
}
template <typename T>
asio::awaitable<T> bounded(asio::awaitable<T> task, std::chrono::milliseconds time) {
  auto operation = with_deadline(std::move(task), Clock::now() + time, "the test");
  co_return co_await std::move(operation);
}

TEST(Deadline, PassesValuesAndErrorsAndExpires) {
  IoRuntime runtime(2);
  EXPECT_EQ(runtime.run_blocking(bounded(forty_two(), 5s), 5s), 42);
  EXPECT_EQ(code_of([&] { runtime.run_blocking(bounded(throws_not_found(), 5s), 5s); }), ErrorCode::kNotFound);
  const TimePoint began = Clock::now();
  EXPECT_EQ(code_of([&] { runtime.run_blocking(bounded(slow(), 20ms), 5s); }), ErrorCode::kDeadline);
  EXPECT_LT(Clock::now() - began, 3s);
}

TEST(Signal, ManyHandoversFromThreadsLoseNothing) {
  IoRuntime runtime(2);
  AsyncQueue<int> queue(64);
  constexpr int kPerThread = 5000;
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t)
    threads.emplace_back([queue] {
      for (int i = 1; i <= kPerThread; ++i) {
        int value = i;
        if (!prl::testing::eventually([&] { return queue.try_push(value); })) return;  // the consumer says which item did not come
      }
    });
  struct Consumer {
    static asio::awaitable<std::int64_t> sum(AsyncQueue<int> from) {
      std::int64_t total = 0;
      for (int i = 0; i < 2 * kPerThread; ++i) {
        auto popping = from.pop(Clock::now() + 10s);
        const std::optional<int> item = co_await std::move(popping);
        if (!item) fail(ErrorCode::kDeadline, "item {} did not come", i);
        total += *item;
      }
      co_return total;
    }
  };
  EXPECT_EQ(runtime.run_blocking(Consumer::sum(queue), 20s), std::int64_t{kPerThread} * (kPerThread + 1));
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(queue.size(), 0u);
}

TEST(AsyncQueue, IsBoundedAndDrainsAfterClose) {
  IoRuntime runtime(1);
  AsyncQueue<std::unique_ptr<int>> queue(1);
  auto first = std::make_unique<int>(1);
  auto second = std::make_unique<int>(2);
  EXPECT_TRUE(queue.try_push(first));
  EXPECT_FALSE(queue.try_push(second));
  EXPECT_NE(second, nullptr);
  queue.close();
  EXPECT_EQ(**runtime.run_blocking(queue.pop(Clock::now() + 1s), 5s), 1);
  EXPECT_FALSE(runtime.run_blocking(queue.pop(Clock::now() + 1s), 5s).has_value());
}

TEST(AsyncResult, FirstSettlementWinsAndDeadlineNamesTheThing) {
  IoRuntime runtime(1);
  AsyncResult<int> result;
  std::thread setter([result] {
    result.set_value(7);
    EXPECT_FALSE(result.set_error(Error(ErrorCode::kInternal, "late")));
  });
  EXPECT_EQ(runtime.run_blocking(result.wait(Clock::now() + 5s, "seven"), 10s), 7);
  setter.join();
  AsyncResult<int> never;
  try {
    runtime.run_blocking(never.wait(Clock::now() + 10ms, "the weather"), 5s);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeadline);
    EXPECT_NE(std::string(error.what()).find("the weather"), std::string::npos);
  }
}

asio::awaitable<void> sleeper() { co_await sleep_for(60s); }
asio::awaitable<void> failer() {
  fail(ErrorCode::kCorrupt, "expected by the test");
  co_return;
}
asio::awaitable<void> signal_waiter(Signal signal) {
  const bool notified = co_await signal.wait_until(Clock::now() + 60s);
  if (notified) fail(ErrorCode::kInternal, "nobody notified");
}

TEST(TaskGroup, CountsFailuresAndCancels) {
  IoRuntime runtime(2);
  std::atomic<int> num_errors{0};
  TaskGroup group(runtime.executor(), "test", [&](const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    ++num_errors;
  });
  for (int i = 0; i < 50; ++i) group.spawn("sleeper", sleeper());
  for (int i = 0; i < 50; ++i) group.spawn("waiter", signal_waiter(Signal()));
  group.spawn("failer", failer());
  EXPECT_FALSE(group.join_blocking(10ms));
  group.cancel();
  EXPECT_TRUE(group.join_blocking(5s));
  EXPECT_EQ(num_errors, 1);
  EXPECT_EQ(group.stats().num_cancelled, 100);
  EXPECT_EQ(group.stats().num_failed, 1);
  group.spawn("too late", sleeper());
  EXPECT_EQ(group.stats().num_running, 0);
}

TEST(Sse, AnyCutGivesTheSameEvents) {
  const std::string text = "\xEF\xBB\xBF: hello\ndata: one\r\ndata: two\r\revent: x\nid:5\ndata:{\"a\": 1}\n\n\ndata\n\nunfinished: 1\n";
  std::vector<std::size_t> cuts{1, 2, 3, 7, text.size()};
  for (const std::size_t cut : cuts) {
    SseParser parser;
    for (std::size_t i = 0; i < text.size(); i += cut) parser.feed(std::string_view(text).substr(i, cut));
    auto first = parser.next();
    ASSERT_TRUE(first) << cut;
    EXPECT_EQ(first->data, "one\ntwo") << cut;
    auto second = parser.next();
    ASSERT_TRUE(second);
    EXPECT_EQ(second->event, "x");
    EXPECT_EQ(second->id, "5");
    EXPECT_EQ(second->data, "{\"a\": 1}");
    auto third = parser.next();
    ASSERT_TRUE(third);
    EXPECT_EQ(third->data, "");
    EXPECT_FALSE(parser.next());
  }
  EXPECT_EQ(format_sse("a\nb"), "data: a\ndata: b\n\n");
  SseParser small(8);
  EXPECT_EQ(code_of([&] { small.feed("data: 0123456789\n"); }), ErrorCode::kCorrupt);
}

TEST(RouteTable, TheNearestFolderTakesWhatHasNoRouteOfItsOwn) {
  const std::map<std::string, int> routes{{"/v1/models", 1}, {"/v1/models/*", 2}, {"/v1/models/own", 3}, {"/v1/models/org/*", 4}};
  const auto found = [&](std::string_view path) {
    const int* const value = find_route(routes, path);
    return value != nullptr ? *value : 0;
  };
  EXPECT_EQ(found("/v1/models"), 1);
  EXPECT_EQ(found("/v1/models/own"), 3);
  EXPECT_EQ(found("/v1/models/a"), 2);
  EXPECT_EQ(found("/v1/models/other/a/b"), 2);
  EXPECT_EQ(found("/v1/models/org/a"), 4);
  EXPECT_EQ(found("/v1/models/"), 0) << "nothing is below it";
  for (const char* path : {"", "/", "*", "/v1", "/v1/modelsX", "v1/models/a"}) EXPECT_EQ(found(path), 0) << path;
}

TEST(HttpMessage, DecodesAndBuildsErrors) {
  EXPECT_EQ(percent_decode("a%20b+c", true), "a b c");
  EXPECT_EQ(percent_decode("%zz", true), std::nullopt);
  EXPECT_EQ(percent_decode("%4", true), std::nullopt);
  EXPECT_EQ(percent_encode("a b/c?d=é~_.-9"), "a%20b%2Fc%3Fd%3D%C3%A9~_.-9");
  EXPECT_EQ(percent_encode("a/b%", true), "a/b%25");
  const Fields query = parse_query("mode=keep&clear_cache=false&x&=&y=1%2B1");
  EXPECT_EQ(query.get("mode"), "keep");
  EXPECT_EQ(query.get("Y"), "1+1");
  HttpRequest request;
  request.headers.add("authorization", "bearer abc");
  EXPECT_EQ(request.bearer(), "abc");
  const auto exception = std::make_exception_ptr(Error(ErrorCode::kOverlong, "too \"long\""));
  const HttpResponse overlong = error_response(exception);
  EXPECT_EQ(overlong.status, 400);
  EXPECT_EQ(overlong.body, R"({"error":{"message":"too \"long\"","type":"BadRequestError","param":"input_tokens","code":400}})");
  // A message may quote what was cut within a character, or no text at all.
  EXPECT_EQ(error_response(400, "found '\xC3'", "a\xFF").body,
            "{\"error\":{\"message\":\"found '\xEF\xBF\xBD'\",\"type\":\"BadRequestError\",\"param\":\"a\xEF\xBF\xBD\",\"code\":400}}");
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
/// For a few threads' stacks only.
void limit_address_space() {
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const auto bytes = static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE) + (64 << 20));
  const rlimit limit{bytes, bytes};
  if (::setrlimit(RLIMIT_AS, &limit) != 0) ::_exit(1);
}
template <typename Start>
void expect_system_error_of(const Start& start) {
  const auto child = [&] {
    limit_address_space();
    try {
      start();
    } catch (const std::system_error&) {
      ::_exit(7);
    }
    ::_exit(2);
  };
  EXPECT_EXIT(child(), ::testing::ExitedWithCode(7), "");
}

/// Those that were started are ended, and the error is an error.
TEST(ThreadLimit, TooFewThreadsDoNotEndTheProcess) {
  expect_system_error_of([] { const IoRuntime runtime(500, "many"); });
  expect_system_error_of([] { const WorkerPool pool({.num_threads = 500, .max_queued = 1, .name = "many"}); });
}
#endif

TEST(FdLimit, NeverExceedsTheHardLimit) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_LE(raise_fd_limit(1 << 30), limit.rlim_max);
  EXPECT_GE(raise_fd_limit(16), 16u);
}

}  // namespace
}  // namespace prl::net
