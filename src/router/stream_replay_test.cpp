#include "router/stream_replay.hpp"

#include <gtest/gtest.h>

#include <boost/json.hpp>

#include "base/error.hpp"

namespace prl::router {
namespace {

namespace json = boost::json;

std::string chunk(const std::string& text, const std::string& ids, const char* finish = "null") {
  return R"({"id":"c1","choices":[{"index":0,"delta":{"content":")" + text + R"("},"token_ids":)" + ids + R"(,"finish_reason":)" + finish +
         "}]}";
}

/// Joined text and ids of what was sent.
struct Joined {
  std::string text;
  json::array ids;
  int num_ends = 0;
  void add(const std::optional<std::string>& data) {
    if (!data) return;
    const json::value event = json::parse(*data);
    const json::object& choice = event.at("choices").at(0).as_object();
    text += std::string(choice.at("delta").at("content").as_string());
    for (const json::value& id : choice.at("token_ids").as_array()) ids.push_back(id);
    if (choice.at("finish_reason").is_string()) ++num_ends;
  }
};

TEST(StreamReplay, ARepetitionGoesOnWhereTheFirstStreamBrokeOffHoweverItIsCut) {
  StreamReplay replay;
  Joined joined;
  joined.add(replay.take(chunk("He", "[1]")));
  joined.add(replay.take(chunk("llo ", "[2,3]")));
  replay.restart();
  EXPECT_FALSE(replay.take(chunk("Hel", "[1]")).has_value());
  joined.add(replay.take(chunk("lo wo", "[2,3,4]")));
  EXPECT_EQ(joined.text, "Hello wo");
  replay.restart();
  EXPECT_FALSE(replay.take(chunk("Hello wo", "[1,2,3,4]")).has_value());
  joined.add(replay.take(chunk("rld", "[5]", R"("stop")")));
  EXPECT_EQ(joined.text, "Hello world");
  EXPECT_EQ(json::serialize(joined.ids), "[1,2,3,4,5]");
  EXPECT_EQ(joined.num_ends, 1);
  EXPECT_EQ(*replay.take("[DONE]"), "[DONE]");
}

TEST(StreamReplay, AnUndisturbedStreamKeepsItsBytes) {
  StreamReplay replay;
  const std::string odd = R"({ "choices" : [ {"index":0, "text":"a"} ] })";
  EXPECT_FALSE(replay.has_delivered());
  EXPECT_EQ(*replay.take(odd), odd);
  EXPECT_TRUE(replay.has_delivered());
  EXPECT_EQ(*replay.take(R"({"error":{"message":"x"}})"), R"({"error":{"message":"x"}})");
}

TEST(StreamReplay, OtherTokensEndTheReply) {
  StreamReplay replay;
  replay.take(chunk("Hello", "[1,2]"));
  replay.restart();
  EXPECT_THROW(replay.take(chunk("Help", "[1,9]")), Error);
}

TEST(StreamReplay, ChoicesAndToolCallsAreFollowedEachByItself) {
  StreamReplay replay;
  const auto call = [](int choice, int index, const char* id, const char* arguments) {
    return R"({"choices":[{"index":)" + std::to_string(choice) + R"(,"delta":{"tool_calls":[{"index":)" + std::to_string(index) +
           R"(,"id":")" + id + R"(","function":{"arguments":")" + arguments + R"("}}]},"finish_reason":null}]})";
  };
  replay.take(call(0, 0, "call_a", "{x"));
  replay.take(call(0, 1, "call_b", "{y"));
  replay.take(call(1, 0, "call_c", "{z"));
  replay.restart();
  EXPECT_FALSE(replay.take(call(1, 0, "call_9", "{z")).has_value()) << "an id that was made up anew is no difference";
  EXPECT_FALSE(replay.take(call(0, 0, "call_8", "{x")).has_value());
  const auto rest = replay.take(call(0, 1, "call_7", "{y}"));
  ASSERT_TRUE(rest.has_value());
  const json::value event = json::parse(*rest);
  EXPECT_EQ(event.at("choices").at(0).at("delta").at("tool_calls").at(0).at("function").at("arguments").as_string(), "}");
}

TEST(StreamReplay, TheEndOfAChoiceIsSentOnce) {
  StreamReplay replay;
  replay.take(chunk("a", "[1]", R"("stop")"));
  replay.restart();
  EXPECT_FALSE(replay.take(chunk("a", "[1]", R"("stop")")).has_value());
  const std::string usage = R"({"choices":[],"usage":{"total_tokens":3}})";
  EXPECT_TRUE(replay.take(usage).has_value());
}

}  // namespace
}  // namespace prl::router
