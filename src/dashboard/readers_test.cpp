#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <zlib.h>

#include <cmath>
#include <limits>

#include "base/error.hpp"
#include "dashboard/line_reader.hpp"
#include "dashboard/log_view.hpp"
#include "dashboard/member_scanner.hpp"
#include "dashboard/plot.hpp"
#include "dashboard/png_chart.hpp"
#include "dashboard/series_store.hpp"
#include "dashboard/svg_chart.hpp"
#include "dashboard/testing/run_files.hpp"

namespace prl::dashboard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::metrics_row;
using testing::RunFiles;
constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();

std::vector<std::int64_t> steps_of(const Series* series) {
  return series ? std::vector(series->steps().begin(), series->steps().end()) : std::vector<std::int64_t>();
}
std::vector<double> values_of(const Series* series) {
  return series ? std::vector(series->values().begin(), series->values().end()) : std::vector<double>();
}

TEST(LineReader, TornLineWaitsForItsEnd) {
  const RunFiles run("torn");
  run.write("a", "one\ntw");
  std::string current;
  std::vector<std::string> lines;
  int restarts = 0;
  LineReader reader(run.folder() / "a");
  const LineReader::Sink sink{[&] { ++restarts; }, [&](std::string_view piece) { current += piece; },
                              [&](std::uint64_t offset, std::uint64_t size) {
                                EXPECT_EQ(size, current.size());
                                lines.push_back(fmt::format("{}@{}", current, offset));
                                current.clear();
                              }};
  EXPECT_FALSE(reader.read(sink, kAll));
  EXPECT_THAT(lines, ElementsAre("one@0"));
  run.append("a", "o\nthree\n");
  EXPECT_FALSE(reader.read(sink, kAll));
  EXPECT_THAT(lines, ElementsAre("one@0", "two@4", "three@8"));
  EXPECT_EQ(restarts, 0);
}

TEST(LineReader, ATornLineIsNotReadAgainBeforeItsFileGrows) {
  const RunFiles run("torn_again");
  run.write("a", "one\ntw");
  std::string pieces;
  LineReader reader(run.folder() / "a");
  const LineReader::Sink sink{[] {}, [&](std::string_view piece) { pieces += piece; }, [](std::uint64_t, std::uint64_t) {}};
  for (int round = 0; round < 3; ++round) {
    EXPECT_FALSE(reader.read(sink, kAll));
    reader.rewind_line();
  }
  EXPECT_EQ(pieces, "onetw");
  run.append("a", "o\n");
  EXPECT_FALSE(reader.read(sink, kAll));
  EXPECT_EQ(pieces, "onetwtwo");
}

TEST(LineReader, RewrittenFilesAreReadFromTheirStart) {
  const RunFiles run("rewritten");
  int restarts = 0, lines = 0;
  LineReader reader(run.folder() / "a");
  const LineReader::Sink sink{[&] { ++restarts, lines = 0; }, [](std::string_view) {}, [&](std::uint64_t, std::uint64_t) { ++lines; }};
  EXPECT_FALSE(reader.read(sink, kAll));  // not there yet
  run.write("a", "1\n2\n3\n");
  EXPECT_FALSE(reader.read(sink, kAll));
  EXPECT_EQ(lines, 3);
  run.replace("a", "1\n2\n");
  EXPECT_FALSE(reader.read(sink, kAll));
  EXPECT_EQ(restarts, 1);
  EXPECT_EQ(lines, 2);
  run.write("a", "x\ny\nlonger than before\n");  // the same file, other bytes
  EXPECT_FALSE(reader.read(sink, kAll));
  EXPECT_EQ(restarts, 2);
  EXPECT_EQ(lines, 3);
  std::filesystem::remove(run.folder() / "a");
  EXPECT_FALSE(reader.read(sink, kAll));
  EXPECT_EQ(lines, 0);
}

TEST(LineReader, PipesAreNotOpened) {
  const RunFiles run("pipe");
  ASSERT_EQ(::mkfifo((run.folder() / "a").c_str(), 0600), 0);
  LineReader reader(run.folder() / "a");
  const LineReader::Sink sink{[] {}, [](std::string_view) { FAIL(); }, [](std::uint64_t, std::uint64_t) { FAIL(); }};
  EXPECT_FALSE(reader.read(sink, kAll));
  EXPECT_ANY_THROW(read_range(run.folder() / "a", 0, 10));
}

/// "section.key=value " of each member that is told.
std::string scan(std::string_view text, std::size_t piece_bytes, bool* is_whole) {
  std::string seen;
  MemberScanner scanner([&](std::string_view section, std::string_view key, const Scalar& value) {
    seen += fmt::format("{}.{}={} ", section, key,
                        value.kind == Scalar::Kind::kText ? std::string(value.text) : fmt::format("{}", value.number));
  });
  scanner.begin();
  for (std::size_t at = 0; at < text.size(); at += piece_bytes) (void)scanner.feed(text.substr(at, piece_bytes));
  *is_whole = scanner.end();
  return seen;
}

TEST(MemberScanner, AnyCutGivesTheSameMembers) {
  constexpr std::string_view kText =
      R"({"a": 1.5, "list": [1, {"a": 2}, "x"], "b": {"c": "te\u0041xt", "d": {"e": 3}, "f": true}, "g": null, "h": "\"q\""})";
  for (const std::size_t piece : {1UL, 2UL, 7UL, 1000UL}) {
    bool is_whole = false;
    EXPECT_EQ(scan(kText, piece, &is_whole), ".a=1.5 b.c=teAxt b.f=1 .g=0 .h=\"q\" ") << piece;
    EXPECT_TRUE(is_whole);
  }
}

TEST(MemberScanner, RefusesWhatIsNoWholeObject) {
  for (const std::string text : {"", "{", R"({"a": 1)", "[1]", "1", R"({"a": 1} {"b": 2})", R"({"a": NaN})", "{\"a\": \"\x01\"}"}) {
    bool is_whole = true;
    scan(text, 3, &is_whole);
    EXPECT_FALSE(is_whole) << text;
  }
  bool is_whole = true;
  scan("{\"a\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}", 1000, &is_whole);
  EXPECT_FALSE(is_whole);
}

TEST(MemberScanner, RepairsWhatOtherProgramsWrite) {
  EXPECT_EQ(repair_json(R"({"a": NaN, "b": [-Infinity, Infinity], "c": "NaN \ud83d\ude00 \ud83d x \ude00\\"})"),
            R"({"a": null, "b": [null, null], "c": "NaN \ud83d\ude00 \uFFFD x \uFFFD\\"})");
}

TEST(SeriesStore, RowsBecomeSeriesByRole) {
  const RunFiles run("series");
  run.write("m", metrics_row(1, "trainer", "loss/mean", 3) + metrics_row(1, "orchestrator", "reward/all/mean", 0.5) + "\n{broken\n[1]\n" +
                     metrics_row(2, "trainer", "loss/mean", 2) + R"({"step": 3, "role": "trainer", "ti)");
  SeriesStore store(run.folder() / "m");
  EXPECT_FALSE(store.read(kAll));
  EXPECT_THAT(values_of(store.find("trainer", "loss/mean")), ElementsAre(3, 2));
  EXPECT_THAT(values_of(store.find("orchestrator", "reward/all/mean")), ElementsAre(0.5));
  EXPECT_EQ(store.num_rows(), 3u);
  EXPECT_EQ(store.num_damaged(), 2u);
  EXPECT_EQ(store.last_step(), 2);
  run.append("m", R"(me": 9, "loss/mean": 1})"
                  "\n");
  EXPECT_FALSE(store.read(kAll));
  EXPECT_THAT(values_of(store.find("trainer", "loss/mean")), ElementsAre(3, 2, 1));
  EXPECT_EQ(store.kept_rows().back().number, 4u);
}

TEST(SeriesStore, ResumedRunsCountEachStepOnce) {
  const RunFiles run("resumed");
  std::string rows;
  for (int step = 1; step <= 5; ++step) rows += metrics_row(step, "trainer", "k", step);
  run.write("m", rows + metrics_row(3, "trainer", "k", 30) + metrics_row(4, "trainer", "k", 40));  // not trimmed
  SeriesStore store(run.folder() / "m");
  EXPECT_FALSE(store.read(kAll));
  EXPECT_THAT(steps_of(store.find("trainer", "k")), ElementsAre(1, 2, 3, 4, 5));
  EXPECT_THAT(values_of(store.find("trainer", "k")), ElementsAre(1, 2, 30, 40, 5));
  const auto before = store.generation();
  run.replace("m", metrics_row(1, "trainer", "k", 1) + metrics_row(2, "trainer", "k", 7));
  EXPECT_FALSE(store.read(kAll));
  EXPECT_THAT(values_of(store.find("trainer", "k")), ElementsAre(1, 7));
  EXPECT_GT(store.generation(), before);
}

TEST(SeriesStore, MemoryIsBounded) {
  const RunFiles run("bounded");
  std::string rows;
  for (int step = 1; step <= 1000; ++step) rows += metrics_row(step, "trainer", "k", step);
  for (int key = 0; key < 50; ++key) rows += metrics_row(1000, "trainer", "key" + std::to_string(key), 1);
  run.write("m", rows);
  SeriesStore store(run.folder() / "m", {.max_points = 100, .max_series = 10, .max_row_bytes = 1000, .max_kept_rows = 4});
  EXPECT_FALSE(store.read(kAll));
  EXPECT_LE(store.num_points(), 100u);
  EXPECT_LE(store.all().size(), 10u);
  EXPECT_EQ(store.kept_rows().size(), 4u);
  EXPECT_TRUE(store.is_thinned());
  EXPECT_TRUE(store.has_too_many_keys());
  EXPECT_EQ(store.find("trainer", "k")->steps().back(), 1000);  // the newest point stays
  run.append("m", "{\"step\": 1001, \"x\": \"" + std::string(5000, 'x') + "\", \"k\": 5}\n");
  EXPECT_FALSE(store.read(kAll));
  EXPECT_EQ(store.num_damaged(), 1u);
}

TEST(SeriesStore, CurvesKeepExtremes) {
  Series series;
  for (int i = 0; i < 1000; ++i) series.add(i, i == 500 ? 100 : 1);
  const Curve curve = sample_curve(series, 0, 999, 10);
  ASSERT_EQ(curve.steps.size(), 10u);
  EXPECT_EQ(curve.steps.back(), 999);
  EXPECT_EQ(*std::max_element(curve.max.begin(), curve.max.end()), 100);
  EXPECT_DOUBLE_EQ(curve.mean[5], (99.0 + 100.0) / 100.0);
  EXPECT_EQ(sample_curve(series, 10, 14, 100).steps.size(), 5u);
  EXPECT_TRUE(sample_curve(series, 2000, 3000, 100).steps.empty());
}

TEST(LogView, LinesOfTextAndJson) {
  const LogLine text = parse_log_line("\x1b[2m20:25:58\x1b[0m SUCCESS [trainer] Step 1 | Loss: 0.1");
  EXPECT_EQ(text.time, "20:25:58");
  EXPECT_EQ(text.level, 2);
  EXPECT_EQ(text.role, "trainer");
  EXPECT_EQ(text.text, "Step 1 | Loss: 0.1");
  const LogLine json = parse_log_line(R"({"timestamp": 1700000000.25, "level": "WARNING", "message": "m", "tag": "orchestrator"})");
  EXPECT_THAT(json.time, ::testing::MatchesRegex("[0-9][0-9]:[0-9][0-9]:20")) << "in the local time zone";
  EXPECT_EQ(json.level, 3);
  EXPECT_EQ(json.text, "m");
  EXPECT_EQ(json.role, "orchestrator");
  EXPECT_EQ(parse_log_line("  what(): x").text, "  what(): x");
}

TEST(LogView, PagesBackwardsThroughLargeFiles) {
  const RunFiles run("logs");
  std::string bytes;
  for (int i = 0; i < 40'000; ++i)
    bytes += fmt::format("20:00:00 {:>7} [trainer] line {} with some more text to make it long\n", i % 100 == 0 ? "WARNING" : "INFO", i);
  run.write("logs/a.log", bytes);
  LogQuery query;
  query.max_lines = 7;
  LogPage page = read_log(run.folder() / "logs/a.log", query);
  ASSERT_EQ(page.lines.size(), 7u);
  EXPECT_THAT(page.lines.back().text, HasSubstr("line 39999 "));
  query.before = page.next;
  page = read_log(run.folder() / "logs/a.log", query);
  EXPECT_THAT(page.lines.back().text, HasSubstr("line 39992 "));
  query = {.min_level = 3, .max_lines = 1000};
  page = read_log(run.folder() / "logs/a.log", query);
  EXPECT_EQ(page.lines.size(), 400u);
  EXPECT_EQ(page.next, 0u);
  query.contains = "LINE 39900 ";
  EXPECT_EQ(read_log(run.folder() / "logs/a.log", query).lines.size(), 1u);
  run.write("logs/trainer/rank_1.log", "20:00:00    INFO no tag\n20:00:00    INFO [other] a tag\n");
  query = {.role = "rank_1"};
  page = read_log(run.folder() / "logs/trainer/rank_1.log", query);
  ASSERT_EQ(page.lines.size(), 1u) << "a role's own log names it in the file's name";
  EXPECT_EQ(page.lines[0].text, "no tag");
  std::filesystem::remove_all(run.folder() / "logs/trainer");
  std::filesystem::create_symlink("/etc/hostname", run.folder() / "logs/link.log");
  EXPECT_THAT(list_logs(run.folder() / "logs"), ElementsAre("a.log"));
}

TEST(LogView, TheNewestAttemptComesFirst) {
  const RunFiles run("attempts");
  for (const char* file : {"attempt_2/rl.log", "attempt_10/rl.log", "attempt_10/trainer.log", "slurm/attempt_0/node_1.log", "old.log"})
    run.write(fmt::format("logs/{}", file), "20:00:00    INFO hello\n");
  std::filesystem::create_symlink("attempt_10", run.folder() / "logs/latest");
  const std::filesystem::path logs = run.folder() / "logs";
  EXPECT_THAT(list_logs(logs),
              ElementsAre("attempt_10/rl.log", "attempt_10/trainer.log", "attempt_2/rl.log", "old.log", "slurm/attempt_0/node_1.log"));
  EXPECT_THAT(list_newest_logs(logs), ElementsAre("attempt_10/rl.log", "attempt_10/trainer.log", "old.log", "slurm/attempt_0/node_1.log"));
  EXPECT_EQ(list_logs(logs, 2).size(), 2u);
}

TEST(SvgChart, EverythingIsEscaped) {
  const std::string evil = "<script>alert('1')</script>&\"\x01\xff";
  EXPECT_EQ(escape_markup(evil), "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&amp;&quot;\xEF\xBF\xBD\xEF\xBF\xBD");
  Chart chart{.title = evil};
  chart.lines = {{evil, {1, 2, 3}, {1, std::numeric_limits<double>::quiet_NaN(), 3}}, {"flat", {1, 2}, {0, 0}}, {"empty", {}, {}}};
  const std::string svg = svg_file({chart, Chart{.title = "empty"}});
  EXPECT_EQ(svg.find("<script"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

/// The rows of a PNG file without filters, as the format's description has it.
std::string pixels_of(const std::string& png, std::uint32_t& width, std::uint32_t& height) {
  const auto u32 = [&](std::size_t at) {
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<unsigned char>(png.at(at + i));
    return value;
  };
  EXPECT_EQ(png.substr(0, 8), std::string("\x89PNG\r\n\x1a\n"));
  std::string packed;
  for (std::size_t at = 8; at < png.size();) {
    const std::uint32_t size = u32(at);
    const std::string type = png.substr(at + 4, 4), data = png.substr(at + 8, size);
    const std::string body = type + data;
    EXPECT_EQ(u32(at + 8 + size), ::crc32(0, reinterpret_cast<const Bytef*>(body.data()), static_cast<uInt>(body.size()))) << type;
    if (type == "IHDR") {
      width = u32(at + 8);
      height = u32(at + 12);
    }
    if (type == "IDAT") packed += data;
    at += 12 + size;
  }
  std::string rows((std::size_t{width} * 3 + 1) * height, '\0');
  uLongf size = rows.size();
  EXPECT_EQ(::uncompress(reinterpret_cast<Bytef*>(rows.data()), &size, reinterpret_cast<const Bytef*>(packed.data()), packed.size()), Z_OK);
  EXPECT_EQ(size, rows.size());
  return rows;
}

TEST(PngChart, DrawsEachLineInItsColor) {
  Chart chart{.title = "reward", .width = 300, .height = 200};
  chart.lines = {{"a", {0, 10}, {0, 1}}, {"b", {0, 5, 10}, {1, std::nan(""), 1}}};
  std::uint32_t width = 0, height = 0;
  const std::string rows = pixels_of(to_png(draw_picture({chart, chart})), width, height);
  EXPECT_EQ(width, 300u);
  EXPECT_EQ(height, 400u);
  const auto count = [&](unsigned color) {
    int found = 0;
    for (std::uint32_t y = 0; y < height; ++y)
      for (std::uint32_t x = 0; x < width; ++x) {
        const std::size_t at = y * (std::size_t{width} * 3 + 1) + 1 + std::size_t{x} * 3;
        const auto channel = [&](std::size_t i) { return static_cast<unsigned>(static_cast<unsigned char>(rows[at + i])); };
        found += (channel(0) << 16 | channel(1) << 8 | channel(2)) == color;
      }
    return found;
  };
  EXPECT_GT(count(0x0072b2), 300) << "the first line, in both charts";
  EXPECT_GT(count(0xd55e00), 10) << "two dots and a piece of the legend";
  EXPECT_LT(count(0xd55e00), 400) << "nothing is drawn over a value that is no number";
  EXPECT_GT(count(0xffffff), 70'000);
  EXPECT_GT(count(0x111111), 50) << "the title";
}

TEST(SvgChart, TicksAndMeans) {
  EXPECT_THAT(nice_ticks(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_TRUE(nice_ticks(1, 1, 5).empty());
  EXPECT_THAT(smooth({2, 4}, 0.5), ElementsAre(2, 5.0 / 1.5));
}

TEST(Plot, ShortNamesAndUnknownOnes) {
  const RunFiles run("plot");
  run.write("metrics.jsonl",
            metrics_row(1, "orchestrator", "reward/all/mean", 0.5) + metrics_row(2, "orchestrator", "reward/all/mean", 0.75));
  PlotOptions options;
  options.metrics = {"reward"};
  EXPECT_THAT(plot_runs({run.folder()}, options), HasSubstr("reward/all/mean"));
  options.metrics = {"rewart"};
  const auto refusal = [&](const RunFiles& of) {
    try {
      plot_runs({of.folder()}, options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("an unknown metric was drawn");
  };
  EXPECT_THAT(refusal(run), HasSubstr("there are, among others: reward/all/mean"));
  const RunFiles tuned("plot-sft"), fresh("plot-fresh");
  tuned.write("metrics.jsonl", metrics_row(1, "trainer", "loss/mean", 0.5));
  EXPECT_THAT(refusal(tuned), HasSubstr("there are, among others: loss/mean"));
  fresh.write("run.json", "{}");
  EXPECT_THAT(refusal(fresh), HasSubstr("there are no steps yet"));
}

}  // namespace
}  // namespace prl::dashboard
