#include "tools/chat.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "base/error.hpp"
#include "base/testing/source_dir.hpp"

namespace prl::tools {
namespace {
namespace json = boost::json;
using ::testing::HasSubstr;

/// Answers "echo N: <last message>" in three pieces and remembers what it was asked.
class EchoBackend final : public ChatBackend {
 public:
  ChatReply reply(const json::array& messages, const ChatTextSink& sink, const std::function<bool()>& is_interrupted) override {
    asked.push_back(messages);
    const json::value& said = messages.back().at("content");
    const std::string text(said.is_array() ? said.as_array().back().at("text").as_string() : said.as_string());
    if (text == "fail") fail(ErrorCode::kOverlong, "the prompt is too long");
    ChatReply result;
    std::string content;
    if (text == "think") sink("hm", true);
    for (const std::string& piece : {std::string("echo "), std::to_string(messages.size()) + ": ", text}) {
      if (is_interrupted()) {
        result.finish_reason = "interrupted";
        break;
      }
      sink(piece, false);
      content += piece;
      ++result.num_completion_tokens;
    }
    if (result.finish_reason.empty()) result.finish_reason = "stop";
    result.message = json::object{{"role", "assistant"}, {"content", content}};
    result.seconds = 0.5;
    return result;
  }
  std::string describe() const override { return "echo"; }
  std::vector<json::array> asked;
};

struct Outcome {
  int status = 0;
  std::string shown;
  std::vector<json::array> asked;
};

Outcome run(std::deque<std::string> lines, ChatOptions options = {}, bool shows_hints = false, int interrupt_after = -1) {
  Outcome result;
  EchoBackend backend;
  ChatTerminal terminal;
  terminal.has_color = shows_hints;
  terminal.shows_hints = shows_hints;
  terminal.write = [&](std::string_view text) { result.shown += text; };
  terminal.read_line = [&](std::string_view) -> std::optional<std::string> {
    if (lines.empty()) return std::nullopt;
    std::string line = lines.front();
    lines.pop_front();
    return line;
  };
  terminal.is_interrupted = [&] { return interrupt_after-- == 0; };
  result.status = run_chat_loop(backend, options, terminal);
  result.asked = backend.asked;
  return result;
}

std::string roles(const json::array& messages) {
  std::string all;
  for (const json::value& message : messages) all += std::string(message.at("role").as_string()).substr(0, 1);
  return all;
}

TEST(ChatLoop, KeepsTheConversationUntilReset) {
  const Outcome r = run({"one", "", "two", "/reset", "three", "/exit", "never"}, {.system_prompt = "be brief", .prompt = {}});
  ASSERT_EQ(r.asked.size(), 3u);
  EXPECT_EQ(roles(r.asked[0]), "su");
  EXPECT_EQ(roles(r.asked[1]), "suau");
  EXPECT_EQ(r.asked[1][2].at("content").as_string(), "echo 2: one");
  EXPECT_EQ(roles(r.asked[2]), "su");
  EXPECT_EQ(r.asked[2][0].at("content").as_string(), "be brief");
  EXPECT_EQ(r.shown, "echo 2: one\necho 4: two\n[forgotten]\necho 2: three\n");
  EXPECT_EQ(r.status, 0);
}

TEST(ChatLoop, SystemUndoHelpAndUnknownCommands) {
  const Outcome r = run({"/system speak Greek", "one", "/undo", "/undo", "two", "/system", "three", "/help", "/nonsense", " /etc"});
  ASSERT_EQ(r.asked.size(), 4u);
  EXPECT_EQ(r.asked[0][0].at("content").as_string(), "speak Greek");
  EXPECT_EQ(roles(r.asked[1]), "su") << "the first exchange was taken back";
  EXPECT_EQ(roles(r.asked[2]), "u");
  EXPECT_EQ(roles(r.asked[3]), "uau");
  EXPECT_THAT(r.shown, HasSubstr("nothing to take back"));
  EXPECT_THAT(r.shown, HasSubstr("/reset"));
  EXPECT_THAT(r.shown, HasSubstr("/nonsense is no command"));
}

TEST(ChatLoop, ImagesGoWithTheNextMessage) {
  const std::string picture = (test_source_dir() / "tests" / "golden" / "vision" / "photo.jpg").string();
  const Outcome r = run({"/image " + picture, "/image /nowhere.png", "what is it?", "and now?"});
  ASSERT_EQ(r.asked.size(), 2u);
  const json::array& parts = r.asked[0][0].at("content").as_array();
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_THAT(std::string(parts[0].at("image_url").at("url").as_string()), ::testing::StartsWith("data:image/jpeg;base64,/9j/"));
  EXPECT_EQ(parts[1].at("text"), "what is it?");
  EXPECT_EQ(r.asked[1].back().at("content"), "and now?");
  EXPECT_THAT(r.shown, HasSubstr("[no image: "));
}

TEST(ChatLoop, LinesThatGoOnFailuresAndOneMessage) {
  Outcome r = run({"a\\", "b\\", "c", "fail", "d"});
  ASSERT_EQ(r.asked.size(), 3u);
  EXPECT_EQ(r.asked[0][0].at("content").as_string(), "a\nb\nc");
  EXPECT_THAT(r.shown, HasSubstr("no reply: the prompt is too long"));
  EXPECT_EQ(roles(r.asked[2]), "uau") << "a message that got no reply is taken back";
  r = run({}, {.system_prompt = {}, .prompt = "hello"});
  EXPECT_EQ(r.shown, "echo 1: hello\n");
  EXPECT_EQ(r.status, 0);
  EXPECT_EQ(run({}, {.system_prompt = {}, .prompt = "fail"}).status, 1);
}

TEST(ChatLoop, InterruptionKeepsWhatWasSaidAndHintsAreDim) {
  const Outcome r = run({"one", "two"}, {}, true, 2);
  ASSERT_EQ(r.asked.size(), 2u);
  EXPECT_EQ(r.asked[1][1].at("content").as_string(), "echo 1: ");
  EXPECT_THAT(r.shown, HasSubstr("interrupted"));
  EXPECT_THAT(r.shown, HasSubstr("6.0 per second"));
  const Outcome thinking = run({"think"}, {}, true);
  EXPECT_THAT(thinking.shown, HasSubstr("\x1b[2mhm\x1b[0m\necho"));
}

}  // namespace
}  // namespace prl::tools
