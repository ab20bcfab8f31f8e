#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/testing/temp_folder.hpp"
#include "text/json_python.hpp"
#include "text/renderer.hpp"
#include "text/test_support.hpp"
#include "text/tokenizer_builder.hpp"

// What the parity tests of renderer_test.cpp do not reach: prompts that go on, texts that spell markers, parsers and templates by name.
namespace prl::text {
namespace {

namespace json = boost::json;
using test::str;
using ::testing::HasSubstr;

json::array list_of(std::string_view text) { return parse_json(text).as_array(); }

struct ToldFamily {
  const char* renderer;
  const char* tokenizer;
  const char* marker;  ///< that text must not become
  const char* kwargs = "{}";
};

constexpr ToldFamily kToldFamilies[] = {
    {"glm-4.5", "glm", "<|user|>"},
    {"glm-4.5", "glm", "<|assistant|>", R"({"enable_thinking": false})"},
    {"minimax-m2", "minimax", "]~b]"},
    {"deepseek-v3", "deepseek", "<｜User｜>"},
    {"deepseek-r1", "deepseek", "<｜tool▁outputs▁begin｜>"},
    {"qwen3.5", "qwen2", "<|im_start|>"},
    {"qwen3.5", "qwen2", "<|im_end|>", R"({"enable_thinking": false})"},
    {"kimi-k2", "kimi", "<|tool_calls_section_begin|>"},
    {"qwen3.6", "qwen2", "<|im_end|>"},
    {"qwen3.8", "qwen2", "<|im_start|>"},
    {"gpt-oss", "harmony", "<|start|>"},
    {"gpt-oss", "harmony", "<|message|>", R"({"conversation_start_date": "2025-06-28", "auto_drop_analysis": false})"},
};

class FamilyRenderers : public ::testing::TestWithParam<ToldFamily> {
 protected:
  static std::unique_ptr<Renderer> make(std::shared_ptr<const Tokenizer> tokenizer) {
    RendererOptions options;
    options.name = GetParam().renderer;
    options.template_kwargs = parse_json(GetParam().kwargs).as_object();
    return make_renderer(options, std::move(tokenizer), nullptr);
  }
  const std::shared_ptr<const Tokenizer> tokenizer_ = std::make_shared<const Tokenizer>(test::fixture_tokenizer(GetParam().tokenizer));
  const std::unique_ptr<Renderer> renderer_ = make(tokenizer_);
};

TEST_P(FamilyRenderers, AToolLoopGoesOnFromWhatWasSampled) {
  if (std::string_view(GetParam().renderer) == "deepseek-r1") GTEST_SKIP() << "its template drops the reasoning of every turn";
  json::array messages = list_of(R"([{"role": "system", "content": "S"}, {"role": "user", "content": "Weather in Zürich?"}])");
  const json::array tools = list_of(
      R"([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}])");
  const std::vector<std::int32_t> prompt = renderer_->render_ids(messages, tools, true);
  json::object answer = parse_json(R"({"role": "assistant", "content": "I ask", "tool_calls": [{"id": "functions.f:0", "type": "function",
      "function": {"name": "f", "arguments": {"city": "Zürich", "days": 3}}}]})")
                            .as_object();
  // Families with an own place for reasoning sample it in front.
  const bool is_harmony = std::string_view(GetParam().renderer) == "gpt-oss";
  const bool has_reasoning = (is_harmony || std::string_view(GetParam().kwargs) == "{}") &&
                             GetParam().renderer != std::string_view("kimi-k2") && GetParam().renderer != std::string_view("deepseek-v3");
  if (has_reasoning) answer["reasoning_content"] = "a tool knows";
  messages.push_back(answer);
  const json::array result = list_of(R"([{"role": "tool", "tool_call_id": "functions.f:0", "name": "f", "content": "12 °C"}])");
  messages.push_back(result[0]);
  const RenderedConversation whole = renderer_->render(messages, tools, true);
  ASSERT_TRUE(std::equal(prompt.begin(), prompt.end(), whole.ids.begin())) << tokenizer_->decode(whole.ids, false);
  // What the model samples is one run behind the prompt, up to the token that ends its turn.
  const auto last = std::find(whole.sampled_mask.rbegin(), whole.sampled_mask.rend(), 1);
  const auto end = static_cast<std::size_t>(whole.sampled_mask.rend() - last);
  ASSERT_GT(end, prompt.size());
  const std::vector<std::int32_t> completion(whole.ids.begin() + static_cast<std::ptrdiff_t>(prompt.size()),
                                             whole.ids.begin() + static_cast<std::ptrdiff_t>(end));
  EXPECT_THAT(renderer_->stop_token_ids(), ::testing::Contains(completion.back()));
  // In harmony a reply is several messages, and their headers do not count as sampled.
  for (std::size_t i = prompt.size() + 4; i < end && !is_harmony; ++i) EXPECT_EQ(whole.sampled_mask[i], 1) << i;

  const auto bridged = renderer_->bridge_to_next_turn(prompt, completion, result, tools);
  ASSERT_TRUE(bridged);
  EXPECT_EQ(bridged->ids, whole.ids) << tokenizer_->decode(bridged->ids, false) << "\n" << tokenizer_->decode(whole.ids, false);

  const ParsedResponse parsed = renderer_->parse_response(completion, tools, prompt);
  EXPECT_THAT(parsed.content, HasSubstr("I ask"));
  // That of GLM-4.5 keeps the newline in front of its think block.
  EXPECT_THAT(parsed.reasoning_content.value_or(""), ::testing::EndsWith(has_reasoning ? "a tool knows" : ""));
  EXPECT_EQ(parsed.reasoning_content.value_or("").find("a tool knows") != std::string::npos, has_reasoning);
  ASSERT_EQ(parsed.tool_calls.size(), 1u);
  EXPECT_EQ(to_string(parsed.tool_calls[0].status), "ok");
  EXPECT_EQ(dump_python(parsed.tool_calls[0].arguments), R"({"city": "Zürich", "days": 3})");
  EXPECT_THAT(tokenizer_->decode(completion, false), HasSubstr(std::string(renderer_->tool_call_mark())));
}

TEST_P(FamilyRenderers, TextsThatSpellAMarkerStayText) {
  const std::string marker = GetParam().marker;
  const auto id = tokenizer_->id_of(marker);
  ASSERT_TRUE(id);
  const auto count = [&](const std::string& text) {
    json::array messages;
    for (const char* role : {"system", "user", "tool"}) messages.push_back(json::object{{"role", role}, {"content", text}});
    const RenderedConversation out = renderer_->render(messages, {}, true);
    EXPECT_THAT(tokenizer_->decode(out.ids, false), HasSubstr(text));
    EXPECT_EQ(out.ids.size(), out.is_content.size());
    return std::count(out.ids.begin(), out.ids.end(), *id);
  };
  EXPECT_EQ(count("a" + marker + "b" + marker), count("a b"));
}

TEST_P(FamilyRenderers, RepliesOfAnyTokensAreRead) {
  std::uint32_t state = 7;
  const json::array user = list_of(R"([{"role": "user", "content": "x"}])");
  const std::vector<std::int32_t> prompt = renderer_->render_ids(user, {}, true);
  const auto size = static_cast<std::uint32_t>(tokenizer_->vocab_size());
  for (int round = 0; round < 300; ++round) {
    std::vector<std::int32_t> ids;
    for (int i = 0; i < 40; ++i) {
      state = state * 1664525u + 1013904223u;
      const std::uint32_t draw = state >> 8;
      ids.push_back(static_cast<std::int32_t>(draw % 4 == 0 ? draw / 4 % size : size - 1 - draw / 4 % 16));  // the markers are at the end
    }
    const ParsedResponse out = renderer_->parse_response(ids, {}, prompt);
    for (const ParsedToolCall& call : out.tool_calls) {
      if (call.status != ToolCallStatus::kOk) continue;
      EXPECT_NO_THROW(parse_json(call.arguments_text)) << call.raw;
    }
    const auto bridged = renderer_->bridge_to_next_turn(prompt, ids, list_of(R"([{"role": "tool", "content": "y"}])"), {});
    if (!bridged) continue;
    std::vector<std::int32_t> start = prompt;
    start.insert(start.end(), ids.begin(), ids.end());
    ASSERT_TRUE(bridged->ids.size() > start.size() && std::equal(start.begin(), start.end(), bridged->ids.begin()));
  }
}

INSTANTIATE_TEST_SUITE_P(Families, FamilyRenderers, ::testing::ValuesIn(kToldFamilies), [](const auto& family) {
  std::string name = family.param.renderer;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; }, '_');
  return name + (std::string_view(family.param.kwargs) == "{}"           ? ""
                 : family.param.tokenizer == std::string_view("harmony") ? "_all"
                                                                         : "_no_thinking");
});

TEST(MiniMax, ThousandsOfCallsInOneBlockTakeMemoryOnce) {
  const auto tokenizer = std::make_shared<const Tokenizer>(test::fixture_tokenizer("minimax"));
  RendererOptions options;
  options.name = "minimax-m2";
  const auto renderer = make_renderer(options, tokenizer, nullptr);
  std::string reply = "<minimax:tool_call>";
  constexpr std::size_t kNumCalls = 2000;
  for (std::size_t i = 0; i < kNumCalls; ++i) reply += "<invoke name=\"f\"><parameter name=\"a\">1</parameter></invoke>";
  const ParsedResponse out = renderer->parse_response(tokenizer->encode(reply + "</minimax:tool_call>"));
  ASSERT_EQ(out.tool_calls.size(), kNumCalls);
  std::size_t num_raw_bytes = 0;
  for (const ParsedToolCall& call : out.tool_calls) num_raw_bytes += call.raw.size();
  EXPECT_LT(num_raw_bytes, 2 * reply.size());
  EXPECT_EQ(out.tool_calls.back().arguments_text, R"({"a": 1})");
}

TEST(ModelTable, NamesTheRendererOfEachModel) {
  const auto made = [](const char* model, const char* tokenizer) {
    RendererOptions options;
    options.model_name = model;
    return std::string(make_renderer(options, std::make_shared<const Tokenizer>(test::fixture_tokenizer(tokenizer)), nullptr)->name());
  };
  EXPECT_EQ(made("zai-org/GLM-4.5-Air", "glm"), "glm-4.5");
  EXPECT_EQ(made("MiniMaxAI/MiniMax-M2.5", "minimax"), "minimax-m2");
  EXPECT_EQ(made("deepseek-ai/DeepSeek-V3", "deepseek"), "deepseek-v3");
  EXPECT_EQ(made("deepseek-ai/DeepSeek-R1-0528", "deepseek"), "deepseek-r1");
  EXPECT_EQ(made("Qwen/Qwen3.5-9B", "qwen2"), "qwen3.5");
  EXPECT_EQ(made("moonshotai/Kimi-K2-Instruct", "kimi"), "kimi-k2");
  EXPECT_EQ(made("Qwen/Qwen3.6-35B-A3B", "qwen2"), "qwen3.6");
  EXPECT_EQ(made("Qwen/Qwen3.8-27B", "qwen2"), "qwen3.8");
  EXPECT_EQ(made("openai/gpt-oss-20b", "harmony"), "gpt-oss");
  EXPECT_THROW(made("moonshotai/Moonlight-16B-A3B-Instruct", "kimi"), Error);
}

TEST(Qwen35, ThinksByDefaultAsItsTemplateDoes) {
  const auto tokenizer = std::make_shared<const Tokenizer>(test::fixture_tokenizer("qwen2"));
  const auto prompt_of = [&](RendererOptions options, const char* chat_template) {
    const auto source = chat_template == nullptr ? nullptr : std::make_shared<const ChatTemplate>(chat_template);
    const auto renderer = make_renderer(options, tokenizer, source);
    return tokenizer->decode(renderer->render_ids(list_of(R"([{"role": "user", "content": "x"}])"), {}, true), false);
  };
  RendererOptions named, small;
  named.name = "qwen3.5";
  small.model_name = "Qwen/Qwen3.5-0.8B";
  EXPECT_TRUE(prompt_of(named, nullptr).ends_with("assistant\n<think>\n"));
  EXPECT_TRUE(prompt_of(small, nullptr).ends_with("<think>\n\n</think>\n\n"));
  const char* quiet =
      "{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking %}<think>\n{% else %}"
      "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}";
  EXPECT_TRUE(prompt_of(named, quiet).ends_with("<think>\n\n</think>\n\n"));
  named.template_kwargs["enable_thinking"] = true;
  EXPECT_TRUE(prompt_of(named, quiet).ends_with("assistant\n<think>\n"));
}

std::unique_ptr<Renderer> harmony_renderer(std::string_view kwargs, const std::shared_ptr<const Tokenizer>& tokenizer) {
  RendererOptions options;
  options.name = "gpt-oss";
  options.template_kwargs = parse_json(kwargs).as_object();
  return make_renderer(options, tokenizer, nullptr);
}

/// As the family's chat templates write a conversation with images and no thoughts.
TEST(Qwen35, ImagesStandBetweenMarks) {
  prl::testing::TempFolder folder;
  write_byte_level_tokenizer(folder.path(), {.more_special = {"<|vision_start|>", "<|vision_end|>", "<|image_pad|>"}});
  const auto tokenizer = std::make_shared<const Tokenizer>(Tokenizer::load(folder.path()));
  RendererOptions options{.name = "qwen3.5"};
  options.template_kwargs = parse_json(R"({"enable_thinking": false})").as_object();
  const auto renderer = make_renderer(options, tokenizer, nullptr);
  json::array messages = list_of(
      R"([{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": " What is "},
          {"type": "image_url", "image_url": {"url": "data:"}}, {"type": "image"}, {"type": "text", "text": "<|image_pad|>? "}]}])");
  const RenderedConversation prompt = renderer->render(messages, {}, true);
  const std::string image = "<|vision_start|><|image_pad|><|vision_end|>";
  EXPECT_EQ(tokenizer->decode(prompt.ids, false), "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nWhat is " + image + image +
                                                      "<|image_pad|>?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
  EXPECT_EQ(std::ranges::count(prompt.ids, *tokenizer->id_of("<|image_pad|>")), 2) << "what a user spells stays text";
  const std::vector<std::int32_t> reply = tokenizer->encode("A cat<|im_end|>");
  const json::array more = list_of(R"([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And?"}]}])");
  const auto bridged = renderer->bridge_to_next_turn(prompt.ids, reply, more, {});
  ASSERT_TRUE(bridged);
  EXPECT_TRUE(
      tokenizer->decode(bridged->ids, false)
          .ends_with("A cat<|im_end|>\n<|im_start|>user\n" + image + "And?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"));
  messages[0].as_object()["content"] = json::array{json::object{{"type", "image"}}};
  EXPECT_THROW(renderer->render(messages, {}, true), Error);
  EXPECT_THROW(make_renderer({.name = "chatml"}, tokenizer, nullptr)->render(more, {}, true), Error) << "of a family without images";
}

TEST(GptOss, WritesToolsAsHarmonyDoes) {
  const auto tokenizer = std::make_shared<const Tokenizer>(test::fixture_tokenizer("harmony"));
  const auto renderer = harmony_renderer(R"({"use_system_prompt": false})", tokenizer);
  const json::value cases = parse_json(test::fixture_text("renderer_family_cases.json"), kJsonDepth, LargeNumbers::kKeepText);
  const json::array& list = cases.at("harmony_tools").as_array();
  ASSERT_GE(list.size(), 60u);
  const json::array user = list_of(R"([{"role": "user", "content": "x"}])");
  for (const json::value& c : list) {
    const std::string text = tokenizer->decode(renderer->render_ids(user, c.at(0).as_array(), false), false);
    EXPECT_EQ(text, str(c.at(1)) + "<|start|>user<|message|>x<|end|>") << json::serialize(c.at(0));
  }
  const json::array wrong[] = {list_of(R"([1])"), list_of(R"([{"function": {"name": 1}}])"),
                               list_of(R"([{"name": "f", "parameters": "x"}])")};
  for (const json::array& tools : wrong) EXPECT_THROW(renderer->render(user, tools, false), Error);
}

TEST(GptOss, TheDateIsTheOneGivenOrThatOfItsMaking) {
  const auto tokenizer = std::make_shared<const Tokenizer>(test::fixture_tokenizer("harmony"));
  const auto prompt = [&](std::string_view kwargs) {
    const auto renderer = harmony_renderer(kwargs, tokenizer);
    return tokenizer->decode(renderer->render_ids(list_of(R"([{"role": "user", "content": "x"}])"), {}, true), false);
  };
  EXPECT_THAT(prompt(R"({"conversation_start_date": "1999-12-31"})"), HasSubstr("Current date: 1999-12-31\n\nReasoning: medium"));
  EXPECT_THAT(prompt(R"({"conversation_start_date": "x", "reasoning_effort": "low"})"), HasSubstr("Current date: x\n\nReasoning: low"));
  EXPECT_THAT(prompt("{}"), ::testing::ContainsRegex("Current date: 20[0-9][0-9]-[01][0-9]-[0-3][0-9]\n"));
  EXPECT_THROW(prompt(R"({"reasoning_effort": "extreme"})"), Error);
  EXPECT_THROW(prompt(R"({"conversation_start_date": 5})"), Error);
  EXPECT_THROW(prompt(R"({"auto_drop_analysis": "no"})"), Error);
}

TEST(GptOss, AConversationWithToolsKeepsTheTokensOfItsTurns) {
  const auto tokenizer = std::make_shared<const Tokenizer>(test::fixture_tokenizer("harmony"));
  const auto renderer = harmony_renderer(R"({"conversation_start_date": "2025-06-28"})", tokenizer);
  const json::array tools =
      list_of(R"([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}])");
  std::vector<std::int32_t> prompt =
      renderer->render_ids(list_of(R"([{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}])"), tools, true);
  // As models write calls: the recipient behind the channel, which renders put in front of it.
  const char* replies[] = {
      "why<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
      "<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "cut sho"};
  for (const char* reply : replies) {
    const std::vector<std::int32_t> completion = tokenizer->encode(reply);
    const ParsedResponse parsed = renderer->parse_response(completion, tools, prompt);
    const bool is_call = std::string_view(reply).ends_with("<|call|>");
    ASSERT_EQ(parsed.tool_calls.size(), is_call ? 1u : 0u) << reply;
    EXPECT_EQ(is_call ? parsed.tool_calls[0].name : "f", "f");
    const json::array result = list_of(R"([{"role": "tool", "name": "f", "content": "12 <|call|>"}])");
    const auto next = renderer->bridge_to_next_turn(prompt, completion, result, tools);
    ASSERT_TRUE(next) << reply;
    std::vector<std::int32_t> start = prompt;
    start.insert(start.end(), completion.begin(), completion.end());
    ASSERT_TRUE(std::equal(start.begin(), start.end(), next->ids.begin()));
    EXPECT_EQ(tokenizer->decode(std::span(next->ids).subspan(start.size()), false),
              std::string(is_call ? "" : "<|end|>") +
                  "<|start|>functions.f to=assistant<|channel|>commentary<|message|>12 "
                  "<|call|><|end|><|start|>assistant<|channel|>analysis<|message|>");
    prompt = next->ids;
  }
  EXPECT_FALSE(
      renderer->bridge_to_next_turn(prompt, tokenizer->encode("x<|return|>"), list_of(R"([{"role": "tool", "content": "y"}])"), {}));
  EXPECT_FALSE(renderer->bridge_to_next_turn(prompt, {}, list_of(R"([{"role": "user", "content": "y"}])"), {}));
}

TEST(GptOss, ARepliesHeaderMayBeThePrompts) {
  const auto tokenizer = std::make_shared<const Tokenizer>(test::fixture_tokenizer("harmony"));
  const auto renderer = harmony_renderer(R"({"use_system_prompt": false})", tokenizer);
  // The chat template's prompt ends behind the role.
  const ParsedResponse out = renderer->parse_response(
      tokenizer->encode("<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"), {},
      tokenizer->encode("<|start|>user<|message|>x<|end|><|start|>assistant"));
  EXPECT_EQ(out.content, "Yes.");
  EXPECT_EQ(out.reasoning_content, "why");
}

struct ParserCase {
  const char* parser;
  const char* tokenizer;
  const char* reply;
  const char* mark;
};

TEST(DefaultRenderer, ReadsTheCallsOfTheParserThatItIsGiven) {
  const auto chat_template = std::make_shared<const ChatTemplate>("{{ messages[0].content }}");
  const json::array tools = list_of(
      R"([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}])");
  const ParserCase cases[] = {
      {"glm45", "glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "<tool_call>"},
      {"glm47", "glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "<tool_call>"},
      {"glm45", "qwen2", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "<tool_call>"},
      {"minimax_m2", "minimax",
       "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"a\">1</parameter>\n</invoke>\n</minimax:tool_call>",
       "<minimax:tool_call>"},
      {"deepseek_v3", "deepseek",
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": "
       "\"1\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
       "<｜tool▁calls▁begin｜>"},
      {"deepseek_v31", "deepseek",
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"1\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
       "<｜tool▁calls▁begin｜>"},
      {"kimi_k2", "kimi",
       "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": "
       "\"1\"}<|tool_call_end|><|tool_calls_section_end|>",
       "<|tool_calls_section_begin|>"},
      {"qwen3_coder", "qwen2", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "<tool_call>"},
  };
  for (const ParserCase& c : cases) {
    const auto tokenizer = std::make_shared<const Tokenizer>(test::fixture_tokenizer(c.tokenizer));
    RendererOptions options;
    options.name = "default";
    options.tool_parser = c.parser;
    options.reasoning_parser = "think";
    const auto renderer = make_renderer(options, tokenizer, chat_template);
    EXPECT_EQ(renderer->tool_call_mark(), c.mark) << c.parser;
    const ParsedResponse out = renderer->parse_response(tokenizer->encode("<think>why</think>I ask" + std::string(c.reply)), tools);
    EXPECT_EQ(out.content, "I ask") << c.parser;
    EXPECT_EQ(out.reasoning_content, "why") << c.parser;
    ASSERT_EQ(out.tool_calls.size(), 1u) << c.parser;
    EXPECT_EQ(to_string(out.tool_calls[0].status), "ok") << c.parser << out.tool_calls[0].raw;
    EXPECT_EQ(out.tool_calls[0].name, "f") << c.parser;
    EXPECT_EQ(out.tool_calls[0].arguments_text, R"({"a": "1"})") << c.parser;
    EXPECT_EQ(tool_parser_of_template(c.reply), std::string_view(c.parser) == "glm47" ? "glm45" : c.parser);
  }
  EXPECT_EQ(tool_parser_of_template("<tool_call>{{ call | tojson }}</tool_call>"), "hermes");
  EXPECT_EQ(tool_parser_of_template("{{ messages }}"), "");
  RendererOptions unknown;
  unknown.name = "default";
  unknown.tool_parser = "deepseek_v32";
  try {
    make_renderer(unknown, std::make_shared<const Tokenizer>(test::fixture_tokenizer("deepseek")), chat_template);
    FAIL() << "no such parser is built";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("known: hermes, qwen3, qwen3.5, qwen3_coder, glm"));
  }
}

}  // namespace
}  // namespace prl::text
