#include "env/token_chat_client.hpp"

#include <gtest/gtest.h>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_future.hpp>

#include <deque>
#include <limits>
#include <map>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/testing/source_dir.hpp"

namespace prl::env {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;

/// One token per byte; turn ends with 256. Bridges unless told not to.
class ByteRenderer final : public text::Renderer {
 public:
  explicit ByteRenderer(bool can_bridge) : can_bridge_(can_bridge) {}
  std::string_view name() const noexcept override { return "bytes"; }
  text::RenderedConversation render(const json::array& messages, const json::array&, bool) const override {
    text::RenderedConversation out;
    for (std::size_t i = 0; i < messages.size(); ++i) {
      append(out.ids, messages[i]);
      out.message_indices.resize(out.ids.size(), static_cast<std::int32_t>(i));
    }
    out.is_content.assign(out.ids.size(), 0);
    return out;
  }
  std::optional<text::RenderedConversation> bridge_to_next_turn(std::span<const std::int32_t> prompt,
                                                                std::span<const std::int32_t> completion, const json::array& messages,
                                                                const json::array&) const override {
    if (!can_bridge_) return std::nullopt;
    text::RenderedConversation out;
    out.ids.assign(prompt.begin(), prompt.end());
    out.ids.insert(out.ids.end(), completion.begin(), completion.end());
    out.message_indices.assign(out.ids.size(), -1);
    for (std::size_t i = 0; i < messages.size(); ++i) {
      append(out.ids, messages[i]);
      out.message_indices.resize(out.ids.size(), static_cast<std::int32_t>(i));
    }
    out.is_content.assign(out.ids.size(), 0);
    return out;
  }
  std::vector<std::int32_t> stop_token_ids() const override { return {256}; }
  text::ParsedResponse parse_response(std::span<const std::int32_t> ids, const json::array&, std::span<const std::int32_t>) const override {
    text::ParsedResponse out;
    for (const std::int32_t id : ids)
      if (id < 256) out.content += static_cast<char>(id);
    return out;
  }

 private:
  static void append(std::vector<std::int32_t>& ids, const json::value& message) {
    for (const char c : message.at("content").as_string()) ids.push_back(static_cast<unsigned char>(c));
    ids.push_back(256);
  }
  bool can_bridge_;
};

class ScriptedGenerate final : public GenerateClient {
 public:
  asio::awaitable<wire::GenerateOutput> generate(wire::GenerateRequest request, net::TimePoint) override {
    requests.push_back(std::move(request));
    wire::GenerateOutput output = std::move(outputs.front());
    outputs.pop_front();
    co_return output;
  }
  asio::awaitable<void> check_health(net::TimePoint) override { co_return; }
  std::string describe() const override { return "script"; }
  std::deque<wire::GenerateOutput> outputs;
  std::vector<wire::GenerateRequest> requests;
};

wire::GenerateOutput output_of(std::vector<std::int32_t> ids) {
  wire::GenerateOutput output;
  output.logprobs.assign(ids.size(), -0.5f);
  output.versions.assign(ids.size(), 4);
  output.token_ids = std::move(ids);
  output.finish_reason = wire::FinishReason::kStop;
  return output;
}

json::object message(const std::string& role, const std::string& content) { return json::object{{"role", role}, {"content", content}}; }

ChatTurn ask(ChatClient& client, json::array messages) {
  asio::io_context context;
  ChatRequest request;
  request.messages = std::move(messages);
  request.deadline = net::Clock::now() + 5s;
  auto asking = client.complete(request);
  auto future = asio::co_spawn(context, std::move(asking), asio::use_future);
  context.run();
  return future.get();
}

struct Fixture {
  explicit Fixture(bool can_bridge)
      : generate(std::make_shared<ScriptedGenerate>()),
        factory(std::make_shared<ByteRenderer>(can_bridge), generate),
        client(factory.open({.session_id = "s-1", .cache_salt = "v3", .headers = {{"X-Task", "words"}}})) {}
  std::shared_ptr<ScriptedGenerate> generate;
  TokenChatClientFactory factory;
  std::unique_ptr<ChatClient> client;
};

TEST(TokenChatClient, TheNextTurnBeginsWithTheLastOnesIds) {
  Fixture f(true);
  f.generate->outputs = {output_of({'h', 'i', 255, 256}), output_of({'y', 256})};
  const ChatTurn first = ask(*f.client, {message("user", "ab")});
  EXPECT_EQ(first.tokens.prompt_ids, (std::vector<std::int32_t>{'a', 'b', 256}));
  EXPECT_EQ(first.tokens.completion_ids, (std::vector<std::int32_t>{'h', 'i', 255, 256}));
  EXPECT_EQ(first.version_start.value, 4);
  const ChatTurn second = ask(*f.client, {message("user", "ab"), first.message, message("user", "c")});
  EXPECT_TRUE(second.is_bridged);
  EXPECT_EQ(second.tokens.prompt_ids, (std::vector<std::int32_t>{'a', 'b', 256, 'h', 'i', 255, 256, 'c', 256}));
  ASSERT_EQ(f.generate->requests.size(), 2u);
  EXPECT_EQ(f.generate->requests[1].session_id, "s-1");
  EXPECT_EQ(f.generate->requests[1].headers.at("X-Task"), "words");
  EXPECT_EQ(f.generate->requests[1].cache_salt, "v3");
  EXPECT_EQ(f.generate->requests[1].sampling.stop_token_ids, (std::vector<std::int32_t>{256}));
  EXPECT_EQ(f.generate->requests[1].sampling.logprobs, 1);
}

TEST(TokenChatClient, AToolLoopOfGptOssKeepsItsTokens) {
  const auto tokenizer = std::make_shared<const text::Tokenizer>(
      text::Tokenizer::parse(read_file(test_source_dir() / "tests/fixtures/text/harmony.tokenizer.json")));
  text::RendererOptions options{.name = "gpt-oss"};
  options.template_kwargs["conversation_start_date"] = "2025-06-28";
  const auto generate = std::make_shared<ScriptedGenerate>();
  TokenChatClientFactory factory(text::make_renderer(options, tokenizer, nullptr), generate);
  const auto client = factory.open({});
  const std::vector<std::int32_t> call = tokenizer->encode(
      "I ask<|end|><|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{\"zone\": \"UTC\"}<|call|>");
  const std::vector<std::int32_t> answer =
      tokenizer->encode("Now<|end|><|start|>assistant<|channel|>final<|message|>It is noon.<|return|>");
  generate->outputs = {output_of(call), output_of(answer)};
  const ChatTurn first = ask(*client, {message("user", "What time is it?")});
  const json::array& calls = first.message.at("tool_calls").as_array();
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0].at("function").at("name").as_string(), "clock");
  EXPECT_EQ(first.message.at("reasoning_content").as_string(), "I ask");
  json::object result = message("tool", "12:00");
  result["tool_call_id"] = calls[0].at("id");
  const ChatTurn second = ask(*client, {message("user", "What time is it?"), first.message, result});
  EXPECT_TRUE(second.is_bridged);
  EXPECT_EQ(second.message.at("content").as_string(), "It is noon.");
  std::vector<std::int32_t> want = first.tokens.prompt_ids;
  want.insert(want.end(), call.begin(), call.end());
  const std::vector<std::int32_t> tail = tokenizer->encode(
      "<|start|>functions.clock to=assistant<|channel|>commentary<|message|>12:00<|end|><|start|>assistant<|channel|>analysis<|message|>");
  want.insert(want.end(), tail.begin(), tail.end());
  EXPECT_EQ(second.tokens.prompt_ids, want) << tokenizer->decode(second.tokens.prompt_ids, false);
}

TEST(TokenChatClient, ABridgedTurnAsksForTheExpertsThatAreNotKnown) {
  Fixture f(true);
  f.generate->outputs = {output_of({'h', 256}), output_of({'y', 256}), output_of({'z', 256})};
  f.generate->outputs[0].routed_experts = {.start = 0, .num_layers = 1, .top_k = 2, .ids = {1, 2, 3, 4, 5, 6, 7, 8}};
  const ChatTurn first = ask(*f.client, {message("user", "ab")});
  EXPECT_EQ(first.tokens.routed_experts.num_tokens(), 4);
  const ChatTurn second = ask(*f.client, {message("user", "ab"), first.message, message("user", "c")});
  ask(*f.client, {message("user", "ab"), first.message, message("user", "c"), second.message, message("user", "d")});
  ASSERT_EQ(f.generate->requests.size(), 3u);
  EXPECT_FALSE(f.generate->requests[0].sampling.routed_experts_start.has_value());
  EXPECT_EQ(f.generate->requests[1].sampling.routed_experts_start, 4) << "all but the last of 'ab', its end and the reply";
  EXPECT_FALSE(f.generate->requests[2].sampling.routed_experts_start.has_value()) << "the answer before told nothing";
}

TEST(TokenChatClient, TellsWhoWroteTheTokensOfAPrompt) {
  using enum PromptRole;
  for (const bool can_bridge : {true, false}) {
    Fixture f(can_bridge);
    f.client = f.factory.open({.session_id = "s-1", .cache_salt = "", .wants_roles = true});
    f.generate->outputs = {output_of({'h', 256}), output_of({'y', 256})};
    const ChatTurn first = ask(*f.client, {message("system", "s"), message("user", "a")});
    EXPECT_EQ(first.tokens.prompt_roles, (std::vector<PromptRole>{kSystem, kSystem, kUser, kUser}));
    const ChatTurn second =
        ask(*f.client, {message("system", "s"), message("user", "a"), first.message, message("tool", "t"), message("user", "u")});
    ASSERT_EQ(second.tokens.prompt_roles.size(), second.tokens.prompt_ids.size());
    const std::vector<PromptRole> tail(second.tokens.prompt_roles.end() - 4, second.tokens.prompt_roles.end());
    EXPECT_EQ(tail, (std::vector<PromptRole>{kTool, kTool, kUser, kUser}));
    EXPECT_EQ(second.tokens.prompt_roles.front(), can_bridge ? kNone : kSystem);
  }
  Fixture f(true);
  f.generate->outputs = {output_of({'h', 256})};
  EXPECT_TRUE(ask(*f.client, {message("user", "a")}).tokens.prompt_roles.empty()) << "nobody asked";
}

TEST(TokenChatClient, ARewrittenHistoryIsRenderedAnew) {
  Fixture f(true);
  f.generate->outputs = {output_of({'h', 256}), output_of({'y', 256})};
  static_cast<void>(ask(*f.client, {message("user", "ab")}));
  const ChatTurn second = ask(*f.client, {message("user", "ab"), message("assistant", "other"), message("user", "c")});
  EXPECT_FALSE(second.is_bridged);
  Fixture g(false);
  g.generate->outputs = {output_of({'h', 256}), output_of({'y', 256})};
  const ChatTurn first = ask(*g.client, {message("user", "ab")});
  EXPECT_FALSE(ask(*g.client, {message("user", "ab"), first.message, message("user", "c")}).is_bridged);
}

TEST(TokenChatClient, BrokenRepliesAreErrors) {
  Fixture f(true);
  wire::GenerateOutput short_logprobs = output_of({'h', 256});
  short_logprobs.logprobs.pop_back();
  wire::GenerateOutput infinite = output_of({'h', 256});
  infinite.logprobs[0] = -std::numeric_limits<float>::infinity();
  wire::GenerateOutput failed = output_of({'h'});
  failed.finish_reason = wire::FinishReason::kError;
  failed.error = "out of blocks";
  f.generate->outputs = {short_logprobs, infinite, output_of({}), failed};
  const auto code = [&] {
    try {
      static_cast<void>(ask(*f.client, {message("user", "ab")}));
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  EXPECT_EQ(code(), ErrorCode::kCorrupt);
  EXPECT_EQ(code(), ErrorCode::kNonFinite);
  EXPECT_EQ(code(), ErrorCode::kCorrupt);
  EXPECT_EQ(code(), ErrorCode::kUnavailable);
}

}  // namespace
}  // namespace prl::env
