#include "base/spans.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json.hpp>
#include <fstream>
#include <map>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::spans {
namespace {
namespace fs = std::filesystem;
namespace json = boost::json;
using namespace std::chrono_literals;

class SpansTest : public ::testing::Test {
 protected:
  SpansTest() : folder_(fs::temp_directory_path() / ("spans_" + std::to_string(::getpid()))) { fs::remove_all(folder_); }
  ~SpansTest() override {
    setup({});
    fs::remove_all(folder_);
  }
  std::vector<json::object> lines(const fs::path& path) const {
    std::vector<json::object> out;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) out.push_back(json::parse(line).as_object());
    return out;
  }
  fs::path folder_;
};

TEST_F(SpansTest, NothingIsKeptUnlessAsked) {
  EXPECT_FALSE(is_on(Detail::kCoarse));
  { const Scope scope(Detail::kCoarse, "lane", "name"); }
  setup({.process = "p", .run_folder = folder_});
  EXPECT_TRUE(is_on(Detail::kCoarse));
  EXPECT_FALSE(is_on(Detail::kFine)) << "the run folder has room for the coarse ones alone";
  { const Scope fine(Detail::kFine, "lane", "fine"); }
  { const Scope coarse(Detail::kCoarse, "lane", "coarse", 7); }
  Phases phases("lane");
  phases.go_to("first");
  phases.go_to("first");
  phases.go_to("second");
  phases.end();
  finish();
  EXPECT_FALSE(is_on(Detail::kCoarse));
  const auto found = lines(folder_ / "spans/p.jsonl");
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0].at("name"), "coarse");
  EXPECT_EQ(found[0].at("step"), 7);
  EXPECT_EQ(found[1].at("name"), "first");
  EXPECT_LE(found[1].at("end").to_number<double>(), found[2].at("begin").to_number<double>());
  EXPECT_FALSE(fs::exists(folder_ / "trace.json"));
}

TEST_F(SpansTest, TheRunFolderIsBounded) {
  setup({.process = "p", .run_folder = folder_});
  const std::string long_name(100'000, 'x');
  for (int i = 0; i < 250; ++i) add(Detail::kCoarse, {.lane = "lane", .name = long_name, .begin = Clock::now(), .end = Clock::now()});
  EXPECT_LE(fs::file_size(folder_ / "spans/p.jsonl"), 8u << 20);
  EXPECT_LE(fs::file_size(folder_ / "spans/p.old.jsonl"), 8u << 20);
  EXPECT_GE(lines(folder_ / "spans/p.jsonl").size() + lines(folder_ / "spans/p.old.jsonl").size(), 80u);
}

/// What Chrome's description of the format asks of a trace: known phases, numbers where numbers belong, asynchronous spans that are closed,
/// and on each thread spans that are nested or apart.
void check_format(const json::object& trace) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::pair<double, double>>> threads;
  std::map<std::string, int> open;
  for (const json::value& value : trace.at("traceEvents").as_array()) {
    const json::object& event = value.as_object();
    const std::string phase(event.at("ph").as_string());
    const std::pair thread{event.at("pid").as_int64(), event.at("tid").as_int64()};
    if (phase == "M") {
      EXPECT_TRUE(event.at("args").as_object().at("name").is_string());
      continue;
    }
    const double begin = event.at("ts").to_number<double>();
    EXPECT_GE(begin, -1e-3) << "the first span begins at zero";
    if (phase == "X") threads[thread].emplace_back(begin, begin + event.at("dur").to_number<double>());
    const std::string id =
        phase == "X" ? "" : json::serialize(event.at("id2").as_object().at("local")) + std::string(event.at("cat").as_string());
    if (phase == "b") {
      EXPECT_EQ(open[id]++, 0);
    } else if (phase == "e") {
      EXPECT_EQ(open[id]--, 1);
    }
    EXPECT_TRUE(phase == "X" || phase == "b" || phase == "e") << phase;
  }
  for (const auto& [id, count] : open) EXPECT_EQ(count, 0) << id;
  for (auto& [thread, list] : threads) {
    std::sort(list.begin(), list.end(),
              [](const auto& a, const auto& b) { return a.first < b.first || (a.first == b.first && a.second > b.second); });
    std::vector<double> ends;
    for (const auto& [begin, end] : list) {
      while (!ends.empty() && ends.back() <= begin + 0.002) ends.pop_back();
      EXPECT_TRUE(ends.empty() || end <= ends.back() + 0.002);
      ends.push_back(end);
    }
  }
}

TEST_F(SpansTest, ATraceOfTwoProcessesHasOneClock) {
  const Clock::time_point start = Clock::now();
  setup({.process = "first", .trace_folder = folder_});
  EXPECT_TRUE(is_on(Detail::kFine));
  add(Detail::kCoarse, {.lane = "trainer", .name = "outer", .begin = start, .end = start + 10ms, .step = 3, .note = R"("rows":4)"});
  add(Detail::kFine, {.lane = "trainer", .name = "inner", .begin = start + 2ms, .end = start + 3ms});
  for (int i = 0; i < 2; ++i)
    add(Detail::kFine, {.lane = "env", .name = "rollout", .begin = start + i * 1ms, .end = start + 5ms + i * 1ms, .may_overlap = true});
  finish();
  setup({.process = "second", .trace_folder = folder_});
  add(Detail::kFine, {.lane = "engine", .name = "step \"quoted\"", .begin = start + 20ms, .end = start + 21ms});
  finish();
  std::ofstream(folder_ / "parts/killed.1.jsonl")
      << "{\"process\":\"killed\",\"pid\":1,\"boot_id\":\"another\",\"unix_minus_steady\":5}\n{\"lane\":\"x\",\"na";
  merge_trace(folder_);
  const json::object trace = json::parse(read_file(folder_ / "trace.json")).as_object();
  check_format(trace);
  std::map<std::string, double> begins;
  for (const json::value& event : trace.at("traceEvents").as_array())
    if (event.at("ph") == "X") begins[std::string(event.at("name").as_string())] = event.at("ts").to_number<double>();
  EXPECT_NEAR(begins.at("inner") - begins.at("outer"), 2000, 1);
  EXPECT_NEAR(begins.at("step \"quoted\"") - begins.at("outer"), 20000, 1) << "of another process";
  std::ofstream(folder_ / "parts/mine.jsonl") << "{\"text\": \"not of a trace\"}\n";
  clear_trace(folder_);
  EXPECT_FALSE(fs::exists(folder_ / "trace.json"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "parts"), fs::directory_iterator()), 1) << "parts/mine.jsonl stays";
  fs::remove(folder_ / "parts/mine.jsonl");
  clear_trace(folder_);
  EXPECT_FALSE(fs::exists(folder_ / "parts"));
  std::ofstream(folder_ / "trace.json") << "{\"traceEvents\": [\"mine\"]}";
  EXPECT_THROW(clear_trace(folder_), Error);
  EXPECT_TRUE(fs::exists(folder_ / "trace.json"));
}

}  // namespace
}  // namespace prl::spans
