#include "dashboard/page_server.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "base/error.hpp"
#include "base/testing/eventually.hpp"
#include "base/utf8.hpp"
#include "dashboard/assets.hpp"
#include "dashboard/span_view.hpp"
#include "dashboard/testing/run_files.hpp"
#include "net/test_support.hpp"

namespace prl::dashboard {
namespace {

using ::testing::HasSubstr;
using testing::metrics_row;
using ::testing::Not;
using testing::rollout_row;
using testing::RunFiles;
namespace json = boost::json;

/// The whole reply to a request with these header lines.
std::string request(int port, const std::string& path, const std::string& header = "Host: 127.0.0.1\r\n",
                    const std::string& method = "GET") {
  net::testing::RawClient client(port);
  client.send(fmt::format("{} {} HTTP/1.1\r\n{}Connection: close\r\n\r\n", method, path, header));
  return client.read();
}
json::value get(int port, const std::string& path) {
  const std::string reply = request(port, path);
  EXPECT_TRUE(reply.starts_with("HTTP/1.1 200")) << path << "\n" << reply.substr(0, 500);
  return json::parse(reply.substr(reply.find("\r\n\r\n") + 4));
}

class PageServerTest : public ::testing::Test {
 protected:
  PageServerTest() : run_("server") {
    run_.write("metrics.jsonl", metrics_row(1, "trainer", "loss/mean", 2) + metrics_row(2, "trainer", "loss/mean", 1));
    run_.write("rollouts/step_2/train_rollouts.jsonl", rollout_row(1, 1, "find me") + rollout_row(2, 0, "<script>alert(1)</script>"));
    run_.write("configs/rl.json", R"({"max_steps": 7, "k": "</script>"})");
    run_.write("logs/rl.log", "20:00:00    INFO hello\n");
    run_.write(
        "spans/rl.jsonl",
        "{\"lane\":\"environment/slow\",\"name\":\"runs its own code\",\"begin\":1,\"end\":2,\"own\":1.5}\n{\"begin\":3}\n{\"lane\":\"to");
    server_ = std::make_unique<PageServer>(PageServer::Options{.runs = {run_.folder()}});
    server_->start();
  }
  int port() const { return server_->port(); }
  RunFiles run_;
  std::unique_ptr<PageServer> server_;
};

TEST_F(PageServerTest, AnswersWhatTheFilesHold) {
  const json::object runs = get(port(), "/api/runs").as_object();
  const json::object& run = runs.at("runs").as_array().at(0).as_object();
  EXPECT_EQ(run.at("last_step"), 2);
  EXPECT_EQ(run.at("max_steps"), 7);
  EXPECT_EQ(run.at("rollouts"), 2);
  const json::value metrics = get(port(), "/api/metrics?run=0&s=trainer:loss/mean");
  EXPECT_EQ(json::serialize(metrics.at("series").at(0).at("steps")), "[1,2]");
  EXPECT_EQ(get(port(), "/api/rollouts?q=FIND+me").at("rollouts").as_array().size(), 1u);
  EXPECT_EQ(get(port(), "/api/rollout?kind=train&step=2&row=0").at("rollout").at("example_id"), 1);
  EXPECT_EQ(get(port(), "/api/config").at("rl").at("k"), "</script>");
  EXPECT_EQ(get(port(), "/api/logs").at("lines").as_array().size(), 1u);
  EXPECT_TRUE(get(port(), "/api/proofs").at("proofs").as_array().empty());
  EXPECT_TRUE(get(port(), "/api/tokens?kind=train&step=2&row=0").at("samples").as_array().empty());
  run_.write("memory/rl.json", R"({"process": "rl", "total": 5, "parts": []})");
  run_.write("memory/torn.json", "{");
  const json::value plans = get(port(), "/api/memory");
  ASSERT_EQ(plans.as_array().size(), 1u);
  EXPECT_EQ(plans.at(0).at("total"), 5);
  const json::value timeline = get(port(), "/api/timeline");
  EXPECT_TRUE(timeline.at("rows").as_array().empty());
  EXPECT_EQ(timeline.at("lanes").at(0).at("lane"), "environment/slow");
  EXPECT_EQ(timeline.at("lanes").at(0).at("spans").at(0).at("name"), "runs its own code");
  EXPECT_EQ(timeline.at("lanes").as_array().size(), 1u) << "a torn line and one without a lane";
}

TEST(SpanView, HasBoundsOfProcessesBytesAndSpans) {
  const testing::RunFiles run("span_bounds");
  const auto span = [](int process, double begin, double end) {
    return fmt::format(R"({{"lane":"l{}","name":"works","begin":{},"end":{}}})", process, begin, end) + "\n";
  };
  constexpr int kProcesses = 70, kSpans = 10;
  for (int process = 0; process < kProcesses; ++process) {
    std::string lines;
    for (int i = 0; i < kSpans; ++i) lines += span(process, 100 + i, 100 + i + 0.01 * (process + 1));
    run.write(fmt::format("spans/p{:02}.jsonl", process), lines);
  }
  const auto spans_of = [&](const char* folder, SpanQuery query) {
    std::vector<double> lengths;
    std::set<std::string> processes;
    const json::value answer = json::parse(spans_json(run.folder() / folder, query));
    for (const json::value& lane : answer.as_array()) {
      processes.emplace(lane.at("process").as_string());
      for (const json::value& one : lane.at("spans").as_array())
        lengths.push_back(one.at("end").to_number<double>() - one.at("begin").to_number<double>());
    }
    return std::pair(processes.size(), lengths);
  };
  const auto [num_processes, all] = spans_of("spans", {.from = 0, .to = 1000});
  EXPECT_EQ(num_processes, 64u);
  EXPECT_EQ(all.size(), 64u * kSpans);
  auto [few_processes, few] = spans_of("spans", {.from = 0, .to = 1000, .max_spans = 25});
  ASSERT_EQ(few.size(), 25u);
  std::vector<double> longest = all;
  std::ranges::sort(longest, std::greater{});
  EXPECT_GE(*std::ranges::min_element(few) + 1e-9, longest[24]) << "the shortest are left out";
  // Five megabytes of one process, of which the last four are looked at.
  std::string long_file;
  std::size_t num_lines = 0;
  for (; long_file.size() < (std::size_t{5} << 20); ++num_lines) long_file += span(0, 100, 101);
  run.write("long/p.jsonl", long_file);
  const std::size_t found = spans_of("long", {.from = 0, .to = 1000, .max_spans = 1'000'000}).second.size();
  const double line_bytes = static_cast<double>(long_file.size()) / static_cast<double>(num_lines);
  EXPECT_NEAR(static_cast<double>(found) * line_bytes, 4 << 20, 2 * line_bytes);
}

TEST_F(PageServerTest, TheTimelineIsOfTheLastStepsAndReadsNoFurtherBack) {
  std::string rows, spans;
  constexpr int kSteps = 4000;
  for (int step = 1; step <= kSteps; ++step) {
    rows += metrics_row(step, "trainer", "time/step", 1);  // ends at 1000 + step
    // The second is written when the next step has long begun.
    spans += fmt::format(R"({{"lane":"trainer","name":"works","begin":{}.5,"end":{},"step":{}}})", 999 + step, 1000 + step, step) + "\n";
    if (step > 2)
      spans +=
          fmt::format(R"({{"lane":"late","name":"works","begin":{}.1,"end":{}.2,"step":{}}})", 997 + step, 997 + step, step - 3) + "\n";
  }
  ASSERT_GT(spans.size(), 4 * std::size_t{65536}) << "several blocks";
  run_.replace("metrics.jsonl", rows);
  run_.replace("spans/rl.jsonl", spans);
  const auto steps_of_lane = [&](const json::value& answer, std::string_view lane) {
    std::vector<std::int64_t> steps;
    for (const json::value& one : answer.at("lanes").as_array())
      if (one.at("lane").as_string() == lane)
        for (const json::value& span : one.at("spans").as_array()) steps.push_back(span.at("step").as_int64());
    return steps;
  };
  get(port(), "/api/runs");
  const json::value last = get(port(), "/api/timeline?steps=3");
  EXPECT_EQ(last.at("rows").as_array().size(), 3u);
  EXPECT_THAT(steps_of_lane(last, "trainer"), ::testing::ElementsAre(kSteps - 3, kSteps - 2, kSteps - 1, kSteps))
      << "from the moment when the first of three began";
  EXPECT_THAT(steps_of_lane(last, "late"), ::testing::ElementsAre(kSteps - 3));
  const json::value early = get(port(), "/api/timeline?from=5&to=6");
  EXPECT_THAT(steps_of_lane(early, "trainer"), ::testing::ElementsAre(4, 5, 6));
  EXPECT_THAT(steps_of_lane(early, "late"), ::testing::ElementsAre(4, 5)) << "in other blocks of the file";
  EXPECT_EQ(steps_of_lane(get(port(), "/api/timeline?from=0&to=4000"), "trainer").size(), 502u);
}

TEST(PageServer, ItsThreadsGiveWayToTheRun) {
  const RunFiles run("priority");
  PageServer server({.runs = {run.folder()}, .niceness = 10});
  server.start();
  get(server.port(), "/api/runs");
  const int wanted = std::min(19, ::getpriority(PRIO_PROCESS, 0) + 10);
  // A thread of its pool may not have begun yet.
  EXPECT_TRUE(prl::testing::eventually([&] {
    int num_threads = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::ifstream(task.path() / "comm") >> name;
      num_threads += name == "page" && ::getpriority(PRIO_PROCESS, static_cast<id_t>(std::stoi(task.path().filename()))) == wanted ? 1 : 0;
    }
    return num_threads == 4;
  })) << "network, files and two that answer";
}

TEST_F(PageServerTest, OrdersNeedTheKey) {
  EXPECT_EQ(get(port(), "/api/control").at("is_enabled"), false);
  EXPECT_THAT(request(port(), "/api/control/stop", "Host: 127.0.0.1\r\nContent-Length: 0\r\n", "POST"), HasSubstr("404")) << "read-only";
  bool is_paused = false;
  int num_stops = 0;
  PageServer server({.runs = {run_.folder()},
                     .control = PageServer::Control{.key = "secret",
                                                    .is_paused = [&] { return is_paused; },
                                                    .set_paused = [&](bool paused) { is_paused = paused; },
                                                    .save = [] { fail(ErrorCode::kInvalidArgument, "checkpoints are off"); },
                                                    .stop = [&] { ++num_stops; }}});
  server.start();
  const auto order = [&](const char* name, const char* key) {
    const std::string headers = fmt::format("Host: 127.0.0.1\r\nAuthorization: Bearer {}\r\nContent-Length: 0\r\n", key);
    return request(server.port(), fmt::format("/api/control/{}", name), headers, "POST");
  };
  for (const char* const name : {"pause", "resume", "checkpoint", "stop"}) EXPECT_THAT(order(name, "Secret"), HasSubstr("401")) << name;
  EXPECT_FALSE(is_paused);
  EXPECT_THAT(order("pause", "secret"), HasSubstr("200 OK"));
  EXPECT_TRUE(is_paused);
  EXPECT_EQ(get(server.port(), "/api/control").at("is_paused"), true);
  EXPECT_THAT(order("resume", "secret"), HasSubstr("200 OK"));
  EXPECT_FALSE(is_paused);
  EXPECT_THAT(order("checkpoint", "secret"), HasSubstr("checkpoints are off"));
  EXPECT_THAT(order("stop", "secret"), HasSubstr("200 OK"));
  EXPECT_EQ(num_stops, 1);
  server.stop();
}

TEST_F(PageServerTest, PagesThatAskTheSameShareAnAnswerUntilTheRunChanges) {
  const auto log = [&] { return request(port(), "/api/logs?run=0"); };
  const auto say = [&](const std::string& line) { run_.append("logs/rl.log", fmt::format("20:00:01    INFO {}\n", line)); };
  get(port(), "/api/runs");  // waits for the first round
  // An answer is kept for half a second: on a machine that is too busy to ask twice in that time another try comes.
  bool has_shared = false;
  for (int i = 0; i < 50 && !has_shared; ++i) {
    log();
    say(fmt::format("line {}", i));
    has_shared = log().find(fmt::format("line {}\"", i)) == std::string::npos;
  }
  EXPECT_TRUE(has_shared);
  say("the last line");
  run_.append("metrics.jsonl", metrics_row(3, "trainer", "loss/mean", 0.5));
  EXPECT_TRUE(prl::testing::eventually([&] { return request(port(), "/api/series?run=0").find("\"step\":3") != std::string::npos; }));
  EXPECT_THAT(log(), HasSubstr("the last line")) << "the run has changed: what was kept is not answered";
}

TEST_F(PageServerTest, RefusesWhatIsNotMeantForIt) {
  EXPECT_THAT(request(port(), "/api/runs", "Host: 127.0.0.1\r\nOrigin: http://evil.example\r\n"), HasSubstr("403"));
  EXPECT_THAT(request(port(), "/api/runs", "Host: evil.example\r\n"), HasSubstr("403"));
  EXPECT_THAT(request(port(), "/api/runs", "Host: 127.0.0.1\r\nSec-Fetch-Site: cross-site\r\n"), HasSubstr("403"));
  EXPECT_THAT(request(port(), "/api/runs", "Host: 127.0.0.1\r\nContent-Length: 0\r\n", "POST"), HasSubstr("405"));
  EXPECT_THAT(request(port(), "/../../etc/passwd"), Not(HasSubstr("200 OK")));
  EXPECT_THAT(request(port(), "/api/logs?file=../configs/rl.json"), HasSubstr("400"));
  EXPECT_THAT(request(port(), "/api/logs?file=/etc/passwd"), HasSubstr("400"));
  for (const char* const path :
       {"/api/series?run=1", "/api/series?run=-1", "/api/metrics?s=nocolon", "/api/metrics?points=100000000", "/api/rollouts?limit=100000",
        "/api/rollouts?order=x", "/api/rollouts?reward_min=abc", "/api/rollout?kind=train&step=2", "/api/logs?level=loud"})
    EXPECT_THAT(request(port(), path), HasSubstr("HTTP/1.1 400")) << path;
  EXPECT_THAT(request(port(), "/api/rollout?kind=train&step=2&row=99"), HasSubstr("HTTP/1.1 404"));
}

TEST_F(PageServerTest, ErrorsSayWhatWasFound) {
  EXPECT_THAT(request(port(), "/api/series?run=-1"), HasSubstr(R"(run must be a whole number from 0 to 0, found \"-1\")"));
  EXPECT_THAT(request(port(), "/api/rollouts?reward_min=a%22b"), HasSubstr(R"(reward_min must be a number, found \"a\\\"b\")"));
  EXPECT_THAT(request(port(), "/api/rollouts?truncated=yes"), HasSubstr(R"(truncated must be 0 or 1, found \"yes\")"));
  EXPECT_THAT(request(port(), "/api/rollouts?kind=x"), HasSubstr(R"(kind must be train or eval, found \"x\")"));
  EXPECT_THAT(request(port(), "/api/rollouts?order=x"), HasSubstr(R"(advantage_down, found \"x\")"));
  EXPECT_THAT(request(port(), "/api/logs?level=loud"), HasSubstr(R"(warning or error, found \"loud\")"));
  EXPECT_THAT(request(port(), "/api/logs?file=/etc/passwd"), HasSubstr(R"(one of `files`, found \"/etc/passwd\")"));
  EXPECT_THAT(request(port(), "/api/metrics?s=nocolon"), HasSubstr(R"(ROLE:KEY, found \"nocolon\")"));
  const std::string many = request(port(), "/api/metrics?s=" + std::string(1500, 'a'));
  EXPECT_THAT(many, HasSubstr("found one of 1500 bytes"));
}

/// A run folder that somebody else made may hold links to what only the reader of the page may read.
TEST(PageServer, LinksOutOfTheRunAreNotFollowed) {
  namespace fs = std::filesystem;
  const RunFiles elsewhere("elsewhere"), run("links");
  elsewhere.write("secret.jsonl", metrics_row(1, "trainer", "secret/mean", 2));
  elsewhere.write("rollouts.jsonl", rollout_row(1, 1, "secret"));
  elsewhere.write("tokens.jsonl", R"({"row":0,"sample":0,"token_ids":[4242],"secret":[1]})"
                                  "\n");
  elsewhere.write("secret.json", R"({"max_steps":4242,"secret":1})");
  elsewhere.write("spans.jsonl", "{\"lane\":\"secret\",\"name\":\"secret\",\"begin\":1,\"end\":2}\n");
  elsewhere.write("logs/secret.log", "20:00:00    INFO secret\n");
  elsewhere.write("step_9/train_rollouts.jsonl", rollout_row(9, 1, "secret"));
  run.write("own/metrics.jsonl", metrics_row(7, "trainer", "loss/mean", 2));
  run.write("rollouts/step_2/train_rollouts.jsonl", rollout_row(1, 1, "own"));
  for (const char* const folder : {"rollouts/step_1", "configs", "spans", "memory", "evals/e/one", "logs"})
    fs::create_directories(run.folder() / folder);
  const auto link = [&](const char* name, const char* to) { fs::create_symlink(elsewhere.folder() / to, run.folder() / name); };
  fs::create_symlink("own/metrics.jsonl", run.folder() / "metrics.jsonl");  // within the run: followed
  link("rollouts/step_1/train_rollouts.jsonl", "rollouts.jsonl");
  link("rollouts/step_9", "step_9");
  link("rollouts/step_2/train_tokens.jsonl", "tokens.jsonl");
  link("configs/rl.json", "secret.json");
  link("spans/rl.jsonl", "spans.jsonl");
  link("memory/rl.json", "secret.json");
  link("evals/e/one/metadata.json", "secret.json");
  link("logs/weight_proofs.jsonl", "secret.json");
  link("logs/rl.log", "logs/secret.log");
  link("logs/deep", "logs");
  PageServer server(PageServer::Options{.runs = {run.folder()}});
  server.start();
  const json::value runs = get(server.port(), "/api/runs");
  EXPECT_EQ(runs.at("runs").at(0).at("last_step"), 7);
  EXPECT_EQ(runs.at("runs").at(0).at("max_steps"), 0);
  EXPECT_TRUE(prl::testing::eventually([&] { return request(server.port(), "/api/rollouts").find("\"total\":1,") != std::string::npos; }));
  for (const char* const path :
       {"series", "metrics?s=trainer:secret/mean", "timeline", "rollouts", "rollouts?q=secret", "rollout?kind=train&step=1&row=0",
        "rollout?kind=train&step=9&row=0", "raw?kind=train&step=1&row=0", "tokens?kind=train&step=2&row=0", "evals", "config", "logs",
        "logs?file=rl.log", "logs?file=deep/secret.log", "memory", "proofs"}) {
    const std::string reply = request(server.port(), std::string("/api/") + path);
    const std::string body = reply.substr(std::min(reply.find("\r\n\r\n"), reply.size()));
    const bool repeats_the_question = body.find("one of `files`") != std::string::npos;
    EXPECT_TRUE(repeats_the_question || body.find("secret") == std::string::npos) << path << "\n" << body;
    EXPECT_THAT(body, Not(HasSubstr("4242"))) << path;
  }
}

TEST(PageServer, FoldersAndNamesThatLeadOutAreNotFollowedEither) {
  namespace fs = std::filesystem;
  const RunFiles elsewhere("elsewhere2"), run("links2");
  elsewhere.write("secret.jsonl", metrics_row(1, "trainer", "secret/mean", 2));
  elsewhere.write("rollouts/step_1/train_rollouts.jsonl", rollout_row(1, 1, "secret"));
  elsewhere.write("logs/rl.log", "20:00:00    INFO secret\n");
  run.write("metrics.jsonl", metrics_row(7, "trainer", "loss/mean", 2));
  for (const std::string& name :
       {(elsewhere.folder() / "secret.jsonl").string(), "../" + elsewhere.folder().filename().string() + "/secret.jsonl"}) {
    run.write("run.json", json::serialize(json::object{{"metrics", name}}));
    PageServer server(PageServer::Options{.runs = {run.folder()}});
    server.start();
    EXPECT_EQ(get(server.port(), "/api/runs").at("runs").at(0).at("last_step"), 7) << name;
  }
  for (const char* const name : {"rollouts", "logs"}) fs::create_directory_symlink(elsewhere.folder() / name, run.folder() / name);
  PageServer server(PageServer::Options{.runs = {run.folder()}});
  server.start();
  (void)get(server.port(), "/api/runs");
  EXPECT_EQ(get(server.port(), "/api/rollouts").at("total"), 0);
  EXPECT_TRUE(get(server.port(), "/api/logs").at("files").as_array().empty());
}

TEST_F(PageServerTest, ThePageHoldsNoScriptOfOthers) {
  const std::string page = request(port(), "/");
  EXPECT_THAT(page, HasSubstr("Content-Security-Policy: default-src 'none'; script-src 'self'"));
  EXPECT_THAT(page, HasSubstr("X-Content-Type-Options: nosniff"));
  for (const Asset& asset : assets()) {
    EXPECT_THAT(request(port(), std::string(asset.path)), HasSubstr("HTTP/1.1 200")) << asset.path;
    std::string text(asset.bytes);
    for (std::size_t at; (at = text.find("http://www.w3.org/2000/svg")) != std::string::npos;) text.erase(at, 26);
    for (const char* const banned : {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "https://", "http://"})
      EXPECT_EQ(text.find(banned), std::string::npos) << asset.path << " has " << banned;
  }
}

TEST_F(PageServerTest, RawRolloutsAreDownloads) {
  const std::string reply = request(port(), "/api/raw?kind=train&step=2&row=1");
  // The index is filled by the first request that waits for it.
  if (reply.starts_with("HTTP/1.1 404")) (void)get(port(), "/api/runs");
  const std::string again = request(port(), "/api/raw?kind=train&step=2&row=1");
  EXPECT_THAT(again, HasSubstr("Content-Type: application/octet-stream"));
  EXPECT_THAT(again, HasSubstr("attachment"));
  EXPECT_THAT(again, HasSubstr("<script>alert(1)</script>"));
}

TEST_F(PageServerTest, AnswersAreUtf8AndSayWhenARolloutIsGone) {
  run_.write("rollouts/step_3/train_rollouts.jsonl", rollout_row(3, 1, "bad \xff\xfe bytes"));
  (void)get(port(), "/api/runs");
  const std::string reply = request(port(), "/api/rollout?kind=train&step=3&row=0");
  EXPECT_THAT(reply, HasSubstr("HTTP/1.1 200"));
  EXPECT_TRUE(is_valid_utf8(reply));
  EXPECT_THAT(reply, HasSubstr("bad \xEF\xBF\xBD"));
  std::filesystem::remove_all(run_.folder() / "rollouts" / "step_3");
  EXPECT_THAT(request(port(), "/api/raw?kind=train&step=3&row=0"), HasSubstr("HTTP/1.1 404"));
}

TEST_F(PageServerTest, EventsTellNewRowsAndRewrittenFiles) {
  (void)get(port(), "/api/runs");
  net::testing::RawClient client(port());
  client.send("GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
  EXPECT_THAT(client.read("hello"), HasSubstr("text/event-stream"));
  run_.append("metrics.jsonl", metrics_row(3, "trainer", "loss/mean", 0.5));
  const std::string rows = client.read("\"loss/mean\"");
  EXPECT_THAT(rows, HasSubstr("\"step\": 3"));
  run_.replace("metrics.jsonl", metrics_row(1, "trainer", "loss/mean", 9));
  EXPECT_THAT(client.read("\"reset\":true"), HasSubstr("\"reset\":true"));
}

TEST_F(PageServerTest, RowsThatComeTogetherAreOneMessageForAllPages) {
  (void)get(port(), "/api/runs");
  std::vector<std::unique_ptr<net::testing::RawClient>> pages;
  for (int i = 0; i < 3; ++i) {
    pages.push_back(std::make_unique<net::testing::RawClient>(port()));
    pages.back()->send("GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    EXPECT_THAT(pages.back()->read("hello"), HasSubstr("text/event-stream"));
  }
  std::string rows;
  for (int step = 3; step < 13; ++step) rows += metrics_row(step, "trainer", "loss/mean", step);
  run_.append("metrics.jsonl", rows);
  for (const auto& page : pages) {
    const std::string news = page->read("\"step\": 12");
    EXPECT_THAT(news, HasSubstr("\"step\": 3,"));
    EXPECT_EQ(news.find("data: "), news.rfind("data: ")) << news;
  }
}

TEST(PageServer, ATakenPortIsAnError) {
  const RunFiles run("taken");
  PageServer first(PageServer::Options{.runs = {run.folder()}});
  first.start();
  PageServer second(PageServer::Options{.port = first.port(), .runs = {run.folder()}});
  EXPECT_THROW(second.start(), Error);
}

}  // namespace
}  // namespace prl::dashboard
