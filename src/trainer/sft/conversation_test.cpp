#include "trainer/sft/conversation.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "text/json_python.hpp"

namespace prl::trainer {
namespace {

std::string messages_of(std::string_view row) { return boost::json::serialize(parse_conversation(row).messages); }

TEST(Conversation, AllForms) {
  EXPECT_EQ(messages_of(R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})"),
            R"([{"role":"user","content":"a"},{"role":"assistant","content":"b"}])");
  EXPECT_EQ(messages_of(R"({"prompt": "a", "completion": "b"})"), R"([{"role":"user","content":"a"},{"role":"assistant","content":"b"}])");
  EXPECT_EQ(
      messages_of(
          R"({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "completion": {"role": "assistant", "content": "b"}})"),
      R"([{"role":"system","content":"s"},{"role":"user","content":"a"},{"role":"assistant","content":"b"}])");
  EXPECT_EQ(messages_of(R"({"messages": null, "prompt": "a", "completion": "b"})"), messages_of(R"({"prompt": "a", "completion": "b"})"));
  EXPECT_EQ(messages_of(R"({"messages": [{"role": "user", "content": "m"}], "prompt": "a", "completion": "b"})"),
            R"([{"role":"user","content":"m"}])")
      << "messages win";
}

TEST(Conversation, NullMembersGoAndToolArgumentsAreDecoded) {
  EXPECT_EQ(
      messages_of(
          R"({"messages": [{"role": "assistant", "content": "", "name": null, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{\"x\": null}"}}]}]})"),
      R"([{"role":"assistant","content":"","tool_calls":[{"type":"function","function":{"name":"f","arguments":{"x":null}}}]}])");
}

TEST(Conversation, ToolsInEveryForm) {
  const auto tools_of = [](std::string_view extra) {
    return boost::json::serialize(parse_conversation(fmt::format(R"({{"prompt": "a", "completion": "b", {}}})", extra)).tools);
  };
  const std::string wanted = R"([{"type":"function","function":{"name":"f","parameters":{}}}])";
  EXPECT_EQ(tools_of(R"("tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}])"), wanted);
  EXPECT_EQ(tools_of(R"("tools": "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {}}}]")"), wanted);
  EXPECT_EQ(tools_of(R"("tool_defs": [{"name": "f", "description": null, "parameters": {}}])"), wanted);
  EXPECT_EQ(tools_of(R"("tools": null)"), "[]");
}

TEST(Conversation, TemplateKwargs) {
  const auto c = parse_conversation(R"({"prompt": "a", "completion": "b", "chat_template_kwargs": {"enable_thinking": false}})");
  EXPECT_EQ(boost::json::serialize(c.template_kwargs), R"({"enable_thinking":false})");
}

TEST(Conversation, NumbersOfAnySizeKeepTheirText) {
  const auto c = parse_conversation(
      R"({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 123456789012345678901234567890}}},)"
      R"({"function": {"name": "f", "arguments": "{\"a\": 18446744073709551616}"}}]}],)"
      R"("tools": "[{\"function\": {\"name\": \"f\", \"parameters\": {\"maximum\": 99999999999999999999, \"minimum\": 1e-400}}}]",)"
      R"("chat_template_kwargs": {"k": -99999999999999999999}})");
  EXPECT_EQ(text::to_json_text(c.messages.at(0).at("tool_calls").at(0).at("function").at("arguments")),
            R"({"a":123456789012345678901234567890})");
  EXPECT_EQ(text::to_json_text(c.messages.at(0).at("tool_calls").at(1).at("function").at("arguments")), R"({"a":18446744073709551616})");
  EXPECT_EQ(text::to_json_text(c.tools.at(0).at("function").at("parameters")), R"({"maximum":99999999999999999999,"minimum":1e-400})");
  EXPECT_EQ(text::to_json_text(c.template_kwargs), R"({"k":-99999999999999999999})");
}

TEST(Conversation, ImagesOfEveryForm) {
  const auto said = [](std::string_view row) {
    std::string out;
    const Conversation c = parse_conversation(row);
    for (const RowImage& image : c.images)
      out += (image.kind == RowImage::Kind::kUri ? "uri " : image.kind == RowImage::Kind::kBytes ? "bytes " : "path ") + image.text + "; ";
    return out + boost::json::serialize(c.messages.at(0).at("content"));
  };
  const std::string parts = R"([{"type":"image"},{"type":"text","text":"a"}])";
  EXPECT_EQ(said(R"({"messages": [{"role": "user", "content": [{"type": "image", "text": null}, {"type": "text", "text": "a"}]}],
                     "images": [{"bytes": "iVBO", "path": null}]})"),
            "bytes iVBO; " + parts);
  EXPECT_EQ(said(R"({"prompt": "a", "completion": "b", "images": ["cat.png"]})"), "path cat.png; " + parts) << "as TRL places them";
  EXPECT_EQ(said(R"({"prompt": "a", "completion": "b", "image": {"path": "dogs/1.jpg"}})"), "path dogs/1.jpg; " + parts);
  EXPECT_EQ(
      said(
          R"({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}, {"type": "text", "text": "a"},
                     {"type": "image"}, {"type": "image", "image": "own.png"}]}], "images": ["2.png"]})"),
      R"(uri data:x; path 2.png; path own.png; [{"type":"image"},{"type":"text","text":"a"},{"type":"image"},{"type":"image"}])");
  const auto reason = [&](std::string_view row) -> std::string {
    try {
      said(row);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(reason(R"({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "completion": "b"})"),
              ::testing::HasSubstr("more image parts than key 'images' has pictures, 0"));
  EXPECT_THAT(reason(R"({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "completion": "b", "images": ["a", "b"]})"),
              ::testing::HasSubstr("key 'images' has 2 pictures, and 1 image parts"));
  EXPECT_THAT(reason(R"({"prompt": "a", "completion": "b", "images": [7]})"), ::testing::HasSubstr("no data: URI"));
  EXPECT_THAT(reason(R"({"prompt": [{"role": "system", "content": "a"}], "completion": "b", "images": ["a"]})"),
              ::testing::HasSubstr("no message of the user"));
}

TEST(Conversation, ErrorsNameTheKey) {
  const auto reason = [](std::string_view row) -> std::string {
    try {
      parse_conversation(row);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "accepted";
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(reason("not json"), HasSubstr("no JSON"));
  EXPECT_THAT(reason("[1]"), HasSubstr("wanted an object"));
  EXPECT_THAT(reason(R"({"prompt": "a", "text": "b"})"), ::testing::AllOf(HasSubstr("[prompt, text]"), HasSubstr("'completion'")));
  EXPECT_THAT(reason(R"({"prompt": "a", "completion": null})"), HasSubstr("[prompt, completion (null)]"));
  EXPECT_THAT(reason(R"({"prompt": 3, "completion": "b"})"), HasSubstr("'prompt'"));
  EXPECT_THAT(reason(R"({"prompt": 99999999999999999999, "completion": "b"})"), HasSubstr("'prompt'"));
  EXPECT_THAT(reason(R"({"messages": []})"), HasSubstr("no messages"));
  EXPECT_THAT(reason(R"({"prompt": "a", "completion": "b", "tools": 1})"), HasSubstr("'tools'"));
  EXPECT_THAT(reason(R"({"prompt": "a", "completion": "b", "tool_defs": [{}]})"), HasSubstr("'tool_defs'"));
  EXPECT_THAT(reason(std::string(100000, '[')), HasSubstr("no JSON"));
}

TEST(Conversation, DamagedRowsNeverCrash) {
  const std::string good =
      R"({"messages": [{"role": "user", "content": "a\u00e9"}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}], "tools": "[]"})";
  Rng rng(3);
  int num_read = 0, num_refused = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string damaged = good;
    damaged[rng.next_below(damaged.size())] = static_cast<char>(rng.next_below(256));
    try {
      num_read += parse_conversation(damaged).messages.size() == 2;
    } catch (const Error&) {
      ++num_refused;
    }
  }
  EXPECT_GT(num_read, 100) << "damage within a text is another text";
  EXPECT_GT(num_refused, 1000);
}

}  // namespace
}  // namespace prl::trainer
