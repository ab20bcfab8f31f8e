#include "env/trace_json.hpp"

#include <gtest/gtest.h>

#include "env/testing/scripted_chat.hpp"

namespace prl::env {
namespace {

using namespace testing;

TEST(TraceJson, HashesAsPythonDoes) {
  // hashlib.sha256(json.dumps({"b": 1.5, "a": "\u00e4", "c": [True, None]}, sort_keys=True).encode()).hexdigest()
  const json::object data = text::parse_json(R"({"b": 1.5, "a": "ä", "c": [true, null], "d": null})").as_object();
  EXPECT_EQ(task_hash(data), "5102b134abf7203668a4070fba88e83f1b40cbcd32518a01cb9e4a63cd9b7581");
}

TEST(TraceJson, NodesAreMessagesAndCallsAreTurns) {
  const auto environment = make("wordle", R"({"max_guesses": 3})");
  Task task = environment->task(Split::kTrain, 0);
  task.answer = "crate";
  ScriptedChat chat({says("<guess>crane</guess>"), says("<guess>crate</guess>", "length")});
  const Episode episode = play(*environment, task, chat);
  const json::object row = to_trace_json(episode, {.run_id = "r1", .model = "org/m", .rollout_idx = 2});
  EXPECT_EQ(row.at("version").as_int64(), 1);
  EXPECT_EQ(row.at("env").at("id").as_string(), "wordle");
  EXPECT_EQ(row.at("task").at("hash").as_string().size(), 64u);
  EXPECT_TRUE(row.at("ok").as_bool());
  const json::object& trace = row.at("traces").as_array().at(0).as_object();
  const json::array& nodes = trace.at("nodes").as_array();
  ASSERT_EQ(nodes.size(), task.prompt.size() + 3);
  EXPECT_FALSE(nodes[0].as_object().contains("parent"));
  for (std::size_t i = 1; i < nodes.size(); ++i) EXPECT_EQ(nodes[i].at("parent").as_int64(), static_cast<std::int64_t>(i) - 1);
  const json::array& calls_of = trace.at("calls").as_array();
  ASSERT_EQ(calls_of.size(), 2u);
  EXPECT_EQ(calls_of[0].at("node").as_int64(), static_cast<std::int64_t>(task.prompt.size()));
  EXPECT_TRUE(nodes[static_cast<std::size_t>(calls_of[1].at("node").as_int64())].at("sampled").as_bool());
  EXPECT_EQ(calls_of[1].at("finish_reason").as_string(), "length");
  EXPECT_DOUBLE_EQ(trace.at("rewards").at("reward").at("score").as_double(), episode.reward);
  EXPECT_EQ(trace.at("metrics").at("correct_answer").as_double(), 1);
  EXPECT_EQ(trace.at("stop_condition").as_string(), "solved");

  ScriptedChat silent({});
  const Episode failed = play(*environment, task, silent);
  ASSERT_TRUE(failed.error);
  EXPECT_TRUE(failed.error->is_transient) << "a service that is not there may come back";
  const json::object bad = to_trace_json(failed, {});
  EXPECT_FALSE(bad.at("ok").as_bool());
  EXPECT_EQ(bad.at("errors").as_array().at(0).at("type").as_string(), "ModelError");
  EXPECT_EQ(bad.at("traces").as_array().at(0).at("stop_condition").as_string(), "error");
}

}  // namespace
}  // namespace prl::env
