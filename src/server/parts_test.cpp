#include <gtest/gtest.h>

#include <boost/json/parse.hpp>

#include <cmath>
#include <future>
#include <memory>
#include <thread>

#include "base/rng.hpp"
#include "net/http_message.hpp"
#include "net/io_runtime.hpp"
#include "net/worker_pool.hpp"
#include "server/json_fields.hpp"
#include "server/json_writer.hpp"
#include "server/server_metrics.hpp"
#include "server/stream_splitter.hpp"

namespace prl::server {
namespace {

StreamSplitter::Piece split(StreamSplitter& splitter, std::string_view text, std::size_t cut) {
  StreamSplitter::Piece all;
  const auto add = [&](const StreamSplitter::Piece& piece) {
    all.reasoning += piece.reasoning;
    all.content += piece.content;
  };
  for (std::size_t i = 0; i < text.size(); i += cut) add(splitter.push(text.substr(i, cut)));
  add(splitter.finish());
  return all;
}

TEST(StreamSplitter, EveryCutGivesTheSamePieces) {
  const std::string text = "\n<think>\nhm </thin> x\n</think>\n\nThe <b>answer</b> <tool_call>\n{\"name\": 1}\n</tool_call>";
  for (std::size_t cut = 1; cut <= text.size(); ++cut) {
    StreamSplitter splitter({.reasoning = true, .starts_in_reasoning = false, .tool_mark = "<tool_call>"});
    const auto piece = split(splitter, text, cut);
    EXPECT_EQ(piece.reasoning, "hm </thin> x\n") << cut;
    EXPECT_EQ(piece.content, "The <b>answer</b> ") << cut;
    EXPECT_EQ(splitter.withheld(), "<tool_call>\n{\"name\": 1}\n</tool_call>") << cut;
  }
}

TEST(StreamSplitter, WithholdsFromTheMarkThatItIsGiven) {
  const std::string text = "a <tool_call> b <\xEF\xBD\x9Ctool\xEF\xBD\x9C>c";
  for (std::size_t cut = 1; cut <= text.size(); ++cut) {
    StreamSplitter splitter({.reasoning = false, .starts_in_reasoning = false, .tool_mark = "<\xEF\xBD\x9Ctool\xEF\xBD\x9C>"});
    EXPECT_EQ(split(splitter, text, cut).content, "a <tool_call> b ") << cut;
    EXPECT_EQ(splitter.withheld(), "<\xEF\xBD\x9Ctool\xEF\xBD\x9C>c") << cut;
  }
}

TEST(StreamSplitter, PlainTextPassesAndUnfinishedMarkersComeOut) {
  StreamSplitter plain({});
  EXPECT_EQ(split(plain, "<think>a</think><tool_call>", 3).content, "<think>a</think><tool_call>");
  StreamSplitter none({.reasoning = true, .starts_in_reasoning = false, .tool_mark = "<tool_call>"});
  EXPECT_EQ(split(none, "<thin", 1).content, "<thin");
  StreamSplitter tail({.reasoning = false, .starts_in_reasoning = false, .tool_mark = "<tool_call>"});
  EXPECT_EQ(split(tail, "x <tool_ca", 2).content, "x <tool_ca");
  StreamSplitter open({.reasoning = true, .starts_in_reasoning = true, .tool_mark = {}});
  const auto piece = split(open, "thought</think>answer", 4);
  EXPECT_EQ(piece.reasoning, "thought");
  EXPECT_EQ(piece.content, "answer");
  StreamSplitter cut({.reasoning = true, .starts_in_reasoning = true, .tool_mark = {}});
  EXPECT_EQ(split(cut, "never ends</thi", 4).reasoning, "never ends</thi");
}

TEST(JsonWriter, FloatsReadBackExactly) {
  Rng rng(3);
  for (int i = 0; i < 20'000; ++i) {
    const auto bits = rng.next_u32();
    float value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    if (!std::isfinite(value)) continue;
    JsonWriter out;
    const std::string text = out.number(value).take();
    EXPECT_EQ(static_cast<float>(std::strtod(text.c_str(), nullptr)), value) << text;
    boost::system::error_code error;
    boost::json::parse(text, error);
    EXPECT_FALSE(error) << text;
  }
  JsonWriter out;
  out.begin_object()
      .key("a\"b")
      .begin_array()
      .integer(1)
      .number(0)
      .null()
      .end_array()
      .key("c")
      .string("\n")
      .key("d")
      .begin_object()
      .end_object()
      .end_object();
  EXPECT_EQ(out.take(), R"({"a\"b":[1,0.0,null],"c":"\n","d":{}})");
}

TEST(JsonFields, TakesWhatClientsSend) {
  const auto object = parse_body(R"({"i":3.0,"n":null,"s":"x","extra_body":{"i":4,"e":true}})");
  const JsonFields fields(object);
  EXPECT_EQ(fields.integer("i", 0, 10), 3);
  EXPECT_FALSE(fields.has("n"));
  EXPECT_EQ(fields.boolean("e"), true);
  EXPECT_THROW(fields.integer("s", 0, 10), net::HttpError);
  EXPECT_THROW(fields.integer("i", 4, 10), net::HttpError);
  EXPECT_THROW(fields.boolean("i"), net::HttpError);
  EXPECT_THROW(parse_body(std::string(100'000, '[')), net::HttpError);
  EXPECT_THROW(parse_body("{\"a\":NaN}"), net::HttpError);
}

TEST(Histogram, CumulatesBuckets) {
  Histogram histogram({1, 2.5});
  for (const double value : {0.5, 1.0, 2.0, 100.0}) histogram.observe(value);
  std::string out;
  histogram.write(out, "h", "m=\"x\"");
  EXPECT_EQ(out,
            "h_bucket{m=\"x\",le=\"1\"} 2\nh_bucket{m=\"x\",le=\"2.5\"} 3\nh_bucket{m=\"x\",le=\"+Inf\"} 4\nh_sum{m=\"x\"} "
            "103.5\nh_count{m=\"x\"} 4\n");
}

net::asio::awaitable<void> run_for_a_moment(std::shared_ptr<net::WorkerPool> pool, std::function<void()> job) {
  auto running = pool->run(std::move(job), std::chrono::milliseconds(1), "a job that takes its time");
  co_await std::move(running);
}

/// As when a request's work is done a moment after the server that it belongs to is gone.
TEST(WorkerPool, MayEndInTheJobThatHoldsItLast) {
  using namespace std::chrono_literals;
  net::IoRuntime io(1);
  auto pool = std::make_shared<net::WorkerPool>(net::WorkerPool::Options{2, 4, "test"});
  const std::weak_ptr<net::WorkerPool> seen = pool;
  std::promise<void> may_end;
  const auto gate = may_end.get_future().share();
  std::function<void()> job = [pool, gate] { gate.wait_for(30s); };
  EXPECT_THROW(io.run_blocking(run_for_a_moment(pool, std::move(job)), 10s), Error);
  pool.reset();
  io.stop(10s);  // nothing that waits for the job is left
  EXPECT_FALSE(seen.expired());
  may_end.set_value();
  for (const auto end = net::Clock::now() + 30s; !seen.expired() && net::Clock::now() < end;) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(seen.expired());
}

TEST(WorkerPool, StopsAfterWhatIsQueued) {
  using namespace std::chrono_literals;
  net::IoRuntime io(1);
  const auto pool = std::make_shared<net::WorkerPool>(net::WorkerPool::Options{1, 4, "test"});
  std::promise<void> may_end;
  const auto gate = may_end.get_future().share();
  int done = 0;
  for (int i = 0; i < 3; ++i) {
    std::function<void()> job = [&done, gate] {
      gate.wait_for(30s);
      ++done;
    };
    EXPECT_THROW(io.run_blocking(run_for_a_moment(pool, std::move(job)), 10s), Error);
  }
  may_end.set_value();
  pool->stop();
  EXPECT_EQ(done, 3);
  pool->stop();
  EXPECT_THROW(io.run_blocking(run_for_a_moment(pool, [] {}), 10s), Error);
}

}  // namespace
}  // namespace prl::server
