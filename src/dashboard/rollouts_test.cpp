#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <limits>

#include "base/error.hpp"
#include "dashboard/report.hpp"
#include "dashboard/rollout_index.hpp"
#include "dashboard/rollout_text.hpp"
#include "dashboard/run_view.hpp"
#include "dashboard/testing/run_files.hpp"
#include "dashboard/token_view.hpp"

namespace prl::dashboard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::rollout_row;
using testing::RunFiles;
namespace json = boost::json;
constexpr std::uint64_t kWhole = std::numeric_limits<std::uint64_t>::max();

std::string step_file(int step, const char* name = "train_rollouts.jsonl") { return fmt::format("rollouts/step_{}/{}", step, name); }

std::vector<std::int64_t> examples_of(const std::vector<RolloutEntry>& entries) {
  std::vector<std::int64_t> examples;
  for (const RolloutEntry& entry : entries) examples.push_back(entry.example);
  return examples;
}

TEST(RolloutIndex, FindsFiltersAndSorts) {
  const RunFiles run("index");
  run.write(step_file(1), rollout_row(1, 0.25, "one") + rollout_row(2, 1.0, "two"));
  run.write(step_file(2),
            rollout_row(3, 0.5, "three") + rollout_row(4, 0, "four", R"(,"x":1)") + "\n" +
                R"({"example_id":5,"task":"other","reward":null,"error":{"type":"ToolError","message":"m"},"is_truncated":true})"
                "\n");
  run.write(step_file(2, "eval_rollouts.jsonl"), rollout_row(6, 0.75, "six") + rollout_row(7, 0.25, "seven"));
  RolloutIndex index(run.folder() / "rollouts");
  EXPECT_FALSE(index.read(kWhole));
  EXPECT_EQ(index.size(), 7u);
  EXPECT_THAT(examples_of(index.select({.kind = RolloutKind::kTrain})), ElementsAre(3, 4, 5, 1, 2));
  EXPECT_THAT(examples_of(index.select({.reward_min = 0.5, .order = RolloutQuery::Order::kRewardDown})), ElementsAre(2, 6, 3));
  EXPECT_THAT(examples_of(index.select({.error = "*"})), ElementsAre(5));
  EXPECT_THAT(examples_of(index.select({.error = "ToolError"})), ElementsAre(5));
  EXPECT_THAT(examples_of(index.select({.step_to = 1, .error = ""})), ElementsAre(1, 2));
  EXPECT_THAT(examples_of(index.select({.env = "other"})), ElementsAre(5));
  EXPECT_THAT(examples_of(index.select({.is_truncated = true})), ElementsAre(5));
  EXPECT_THAT(examples_of(index.select({.group = 0, .order = RolloutQuery::Order::kAdvantageUp})), ElementsAre(1, 3, 2));
  EXPECT_EQ(index.find(RolloutKind::kTrain, 2, 3)->example, 5);  // rows are lines: the empty one counts
  EXPECT_FALSE(index.find(RolloutKind::kTrain, 2, 2));
  const auto points = index.eval_points();
  ASSERT_EQ(points.size(), 1u);
  EXPECT_DOUBLE_EQ(points[0].mean, 0.5);
  EXPECT_NEAR(points[0].half_width, 1.96 * 0.25, 1e-12);  // sd 0.3536 of two values, over sqrt 2
}

TEST(RolloutIndex, TheFirstOfAListAreThoseOfTheWholeList) {
  const RunFiles run("first_of_list");
  constexpr int kSteps = 30, kRows = 400;  // more than are held back while the newest are looked for
  for (int step = 1; step <= kSteps; ++step) {
    std::string rows;
    for (int row = 0; row < kRows; ++row) rows += rollout_row(kRows * step + row, ((step * 7 + row * 13) % 100) / 100.0, "text");
    run.write(step_file(step), rows);
  }
  RolloutIndex index(run.folder() / "rollouts");
  EXPECT_FALSE(index.read(kWhole));
  using Order = RolloutQuery::Order;
  for (const Order order : {Order::kNewest, Order::kOldest, Order::kRewardUp, Order::kRewardDown, Order::kLongest, Order::kAdvantageDown})
    for (const std::size_t count : {std::size_t{0}, std::size_t{50}, std::size_t{5000}, std::size_t{100'000}}) {
      const RolloutQuery query{.step_from = 2, .order = order};
      std::vector<std::int64_t> all = examples_of(index.select(query));
      ASSERT_EQ(all.size(), static_cast<std::size_t>(kRows * (kSteps - 1)));
      const RolloutIndex::Selection first = index.select_first(query, count);
      EXPECT_EQ(first.total, all.size());
      all.resize(std::min(count, all.size()));
      EXPECT_EQ(examples_of(first.entries), all) << static_cast<int>(order) << " " << count;
    }
  EXPECT_EQ(examples_of(index.select_first({}, 1).entries), std::vector<std::int64_t>{kRows * kSteps});
}

TEST(RolloutIndex, AFileThatComesLateIntoAnOldStepIsFoundToo) {
  const RunFiles run("late_rollouts");
  for (int step = 1; step <= 60; ++step) run.write(step_file(step), rollout_row(step, 1, "early"));
  RolloutIndex index(run.folder() / "rollouts");
  EXPECT_FALSE(index.read(kWhole));
  EXPECT_EQ(index.size(), 60u);
  run.write(step_file(60, "eval_rollouts.jsonl"), rollout_row(1, 1, "of a new step"));
  EXPECT_FALSE(index.read(kWhole));
  EXPECT_EQ(index.size(), 61u);
  run.write(step_file(3, "eval_rollouts.jsonl"), rollout_row(1, 1, "of an old one"));
  for (int round = 0; round < 45 && index.size() < 62; ++round) (void)index.read(kWhole);
  EXPECT_EQ(index.size(), 62u);
}

TEST(RolloutIndex, TornAndReplacedFiles) {
  const RunFiles run("torn_rollouts");
  const std::string second = rollout_row(2, 1, "two");
  run.write(step_file(1), rollout_row(1, 1, "one") + second.substr(0, 40));
  run.write(step_file(2), rollout_row(9, 1, "nine"));
  RolloutIndex index(run.folder() / "rollouts");
  EXPECT_FALSE(index.read(kWhole));
  EXPECT_EQ(index.size(), 2u);
  run.append(step_file(1), second.substr(40));
  EXPECT_FALSE(index.read(kWhole));
  EXPECT_EQ(examples_of(index.select({.step_to = 1})), (std::vector<std::int64_t>{1, 2}));
  run.replace(step_file(1), rollout_row(5, 1, "other branch"));
  EXPECT_FALSE(index.read(kWhole));
  EXPECT_EQ(examples_of(index.select({.step_to = 1})), (std::vector<std::int64_t>{5}));
  std::filesystem::remove_all(run.folder() / "rollouts" / "step_2");
  EXPECT_FALSE(index.read(kWhole));
  EXPECT_EQ(index.size(), 1u);
}

TEST(RolloutIndex, LargeAndDamagedLines) {
  const RunFiles run("damaged");
  const std::string large(10 << 20, 'x');
  run.write(step_file(1), rollout_row(1, 0.5, large) + "{\"example_id\":2,\n" + rollout_row(3, 0.5, "bad \xff\xfe utf-8") +
                              R"({"example_id":4,"reward":NaN,"completion":"half \ud800 pair"})"
                              "\n" +
                              "not json\n" + rollout_row(6, 1, "end"));
  RolloutIndex index(run.folder() / "rollouts");
  while (index.read(1 << 20)) {
  }
  const auto all = index.select({});
  ASSERT_EQ(all.size(), 6u);
  EXPECT_EQ(examples_of(index.select({.error = ""})), (std::vector<std::int64_t>{1, 3, 4, 6}));
  EXPECT_GT(all[0].num_bytes, large.size());
  json::value value = load_rollout(index.path_of(all[0]), all[0]);
  EXPECT_EQ(cut_texts(value, 1000, 5000), 1u);
  EXPECT_LT(json::serialize(value).size(), 3000u);
  EXPECT_THAT(json::serialize(value), HasSubstr("[... 10484760 more bytes]"));
  EXPECT_THROW(load_rollout(index.path_of(all[4]), all[4]), Error);
  EXPECT_THAT(json::serialize(load_rollout(index.path_of(all[3]), all[3])), HasSubstr("\xEF\xBF\xBD"));
}

TEST(RolloutIndex, HundredThousandRolloutsInBoundedMemory) {
  static_assert(sizeof(RolloutEntry) <= 104, "a million of them must fit in 100 MB");
  const RunFiles run("many");
  for (int step = 1; step <= 100; ++step) {
    std::string rows;
    for (int i = 0; i < 1000; ++i)
      rows += rollout_row(step * 1000 + i, i / 1000.0, "text", fmt::format(R"(,"task{}":1,"env_name":"env{}")", i, step * 1000 + i));
    run.write(step_file(step), rows);
  }
  RolloutIndex index(run.folder() / "rollouts");
  int rounds = 0;
  while (index.read(4 << 20)) ++rounds;
  EXPECT_GT(rounds, 2);
  EXPECT_EQ(index.size(), 100'000u);
  EXPECT_LE(index.names().size(), 4096u);  // hostile names end in one
  EXPECT_EQ(index.select({.reward_min = 0.999}).size(), 100u);
  RolloutIndex small(run.folder() / "rollouts", {.max_entries = 5000});
  while (small.read(4 << 20)) {
  }
  EXPECT_LE(small.size(), 5000u);
  EXPECT_EQ(small.select({}).front().step, 100);  // the newest stay
  EXPECT_TRUE(small.is_truncated());
}

TEST(TextSearch, FindsTextHoweverItIsEscaped) {
  const auto found = [](std::string_view wanted, std::string_view line) {
    const TextSearch search(wanted);
    return search.may_hold(line) ? search.hit_in(json::parse(json::string_view(line.data(), line.size()))) : std::string();
  };
  constexpr std::string_view kLine =
      R"({"completion":[{"role":"assistant","content":"Say \"Hi\"\nto M\u00fcller","tool_calls":[{"function":{"name":"look_up","arguments":"{}"}}]}]})";
  EXPECT_THAT(found("say \"hi\"", kLine), HasSubstr("Say \"Hi\""));
  EXPECT_THAT(found("M\xC3\xBCller", kLine), HasSubstr("ller"));
  EXPECT_THAT(found("LOOK_UP", kLine), HasSubstr("look_up"));
  EXPECT_EQ(found("assistant", kLine), "");  // a role is no text
  EXPECT_EQ(found("completion", kLine), "");
  EXPECT_EQ(found("absent", kLine), "");
}

TEST(TokenView, NumbersEqualThoseOnDisk) {
  const RunFiles run("tokens");
  run.write(step_file(3), rollout_row(1, 1, "a") + rollout_row(2, 0, "b"));
  run.write(step_file(3, "train_tokens.jsonl"),
            R"({"row":0,"sample":0,"token_ids":[1,2],"loss_mask":[0,1],"inference_logprobs":[0,-0.5]})"
            "\n"
            R"({"row":1,"sample":0,"token_ids":[7,8,9],"loss_mask":[0,1,1],"inference_logprobs":[0,-0.125,-1.75],"short":[1]})"
            "\n"
            R"({"row":10,"sample":0,"token_ids":[1]})"
            "\n");
  run.write("token_exports/step_3/rank_0.jsonl",
            R"({"schema_version":1,"token_ids":[7,8,9],"entropy":[null,0.5,0.25],"inference_logprobs":[9,9,9]})"
            "\n");
  RolloutIndex index(run.folder() / "rollouts");
  EXPECT_FALSE(index.read(kWhole));
  const auto samples = load_tokens(run.folder(), *index.find(RolloutKind::kTrain, 3, 1));
  ASSERT_EQ(samples.size(), 1u);
  const std::string text = tokens_json(samples, nullptr, 0, 100);
  EXPECT_THAT(text, HasSubstr(R"("inference_logprobs":[0,-0.125,-1.75])"));
  EXPECT_THAT(text, HasSubstr(R"("entropy":[null,0.5,0.25])"));
  EXPECT_THAT(text, Not(HasSubstr("short")));
  EXPECT_THAT(tokens_json(samples, nullptr, 2, 100), HasSubstr(R"("token_ids":[9])"));
  EXPECT_EQ(load_tokens(run.folder(), *index.find(RolloutKind::kTrain, 3, 0)).front().token_ids, (std::vector<std::int64_t>{1, 2}));
}

TEST(FindRuns, NamesWhatIsNoRun) {
  const RunFiles run("find");
  run.write("a/metrics.jsonl", "");
  run.write("b/c/run.json", "{}");
  EXPECT_THAT(find_runs({run.folder()}), ElementsAre(run.folder() / "a", run.folder() / "b" / "c"));
  EXPECT_THROW(find_runs({run.folder() / "b" / "nothing"}), Error);
}

TEST(Report, IsOneSafeFile) {
  const RunFiles run("report");
  run.write("metrics.jsonl", testing::metrics_row(1, "orchestrator", "reward/all/mean", 0.5));
  run.write(step_file(1), rollout_row(1, 1, "<script>alert(1)</script><img src=http://x>"));
  run.write("configs/rl.json", R"({"name":"</pre><script>x</script>"})");
  run.write("logs/rl.log", "20:00:00 WARNING </table><script>x</script>\n");
  const std::string html = make_report(run.folder(), 4);
  EXPECT_EQ(html.find("<script"), std::string::npos);
  EXPECT_EQ(html.find("<img"), std::string::npos);
  EXPECT_THAT(html, HasSubstr("&lt;script&gt;alert(1)"));
  EXPECT_THAT(html, HasSubstr("reward/all/mean"));
}

}  // namespace
}  // namespace prl::dashboard
