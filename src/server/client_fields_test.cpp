#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "net/http_client.hpp"
#include "server/api_server.hpp"
#include "server/channel_stream.hpp"
#include "server/request_fields.hpp"
#include "server/testing/scripted_backend.hpp"
#include "server/thinking_budget.hpp"
#include "server/tool_call_stream.hpp"
#include "text/tokenizer_builder.hpp"

namespace prl::server {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;
using testing::ScriptedBackend;

/// A server that reads calls and reasoning and answers with `reply_`.
class ClientFieldsTest : public ::testing::Test {
 protected:
  ClientFieldsTest() : folder_(std::filesystem::temp_directory_path() / fmt::format("prl-fields-test-{}", static_cast<const void*>(this))) {
    std::filesystem::create_directories(folder_);
    ids_ = text::write_byte_level_tokenizer(folder_);
    tokenizer_ = std::make_shared<const text::Tokenizer>(text::Tokenizer::load(folder_));
    template_ = std::make_shared<const text::ChatTemplate>(text::ChatTemplate::load(folder_, *tokenizer_));
  }
  ~ClientFieldsTest() override {
    server_.reset();
    backend_.reset();
    std::filesystem::remove_all(folder_);
  }
  void start(ApiOptions options = {}) {
    options.port = 0;
    options.served_names = {"tiny"};
    options.enable_tools = options.enable_reasoning = true;
    text::RendererOptions wanted;
    wanted.name = "default";
    wanted.tool_parser = tool_parser_;
    wanted.reasoning_parser = "think";
    ScriptedBackend::Options backend;
    backend.vocab_size = ids_.vocab_size;
    backend.end_id = ids_.im_end;
    backend.max_model_len = 8192;
    backend.max_queued = 8;
    backend.max_running = 4;
    backend_ = std::make_unique<ScriptedBackend>(backend, [this](const wire::GenerateRequest&) { return tokenizer_->encode(reply_); });
    server_ = std::make_unique<ApiServer>(options, *backend_, tokenizer_, template_, text::make_renderer(wanted, tokenizer_, template_));
    server_->start();
    net::HttpClient::Options client;
    client.timeout = 30s;
    client.max_retries = 0;
    client_ = std::make_unique<net::BlockingHttpClient>(client);
  }
  net::HttpCall make_call(std::string_view path, std::string body) const {
    net::HttpCall call;
    call.method = "POST";
    call.url = fmt::format("http://127.0.0.1:{}{}", server_->port(), path);
    call.body = std::move(body);
    return call;
  }
  net::HttpReply post(std::string_view path, std::string body) { return client_->call(make_call(path, std::move(body))); }
  net::HttpReply chat(const std::string& members) {
    return post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"Hi"}])" + members + "}");
  }
  json::value chat_choice(const std::string& members) {
    const net::HttpReply reply = chat(members);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return reply.status == 200 ? reply.json().at("choices").at(0) : json::value(json::object());
  }
  std::vector<json::value> stream(std::string_view path, std::string body) {
    std::vector<json::value> out;
    for (const auto& event : client_->read_sse(make_call(path, std::move(body))))
      if (event.data != "[DONE]") out.push_back(json::parse(event.data));
    return out;
  }
  /// Reasoning, content, and name and arguments of each call of a streamed reply.
  std::vector<std::string> streamed_parts(std::string_view members) {
    std::vector<std::string> out(2);
    for (const json::value& chunk :
         stream("/v1/chat/completions", R"({"messages":[{"role":"user","content":"Hi"}],"stream":true)" + std::string(members) + "}")) {
      const json::object& delta = chunk.at("choices").at(0).at("delta").as_object();
      if (const json::value* text = delta.if_contains("reasoning_content")) out[0] += text->as_string();
      if (const json::value* text = delta.if_contains("content")) out[1] += text->as_string();
      const json::value* calls = delta.if_contains("tool_calls");
      if (calls == nullptr) continue;
      for (const json::value& call : calls->as_array()) {
        if (call.as_object().contains("id")) out.insert(out.end(), {std::string(call.at("function").at("name").as_string()), ""});
        out.back() += call.at("function").at("arguments").as_string();
      }
    }
    return out;
  }
  /// A tokenizer of the harmony format, and a template whose prompt ends behind the role, or inside the analysis channel.
  void use_harmony(bool is_open = false) {
    const std::string source = read_file(test_source_dir() / "tests/fixtures/text/harmony.tokenizer.json");
    tokenizer_ = std::make_shared<const text::Tokenizer>(text::Tokenizer::parse(source, R"({"eos_token": "<|return|>"})"));
    ids_.vocab_size = tokenizer_->vocab_size();
    ids_.im_end = tokenizer_->id_of("<|return|>").value();
    template_ = std::make_shared<const text::ChatTemplate>(
        "<|start|>user<|message|>{{ messages[0].content }}{{ reasoning_effort }}<|end|><|start|>assistant" +
        std::string(is_open ? "<|channel|>analysis<|message|>" : ""));
    tool_parser_ = "openai";
  }
  wire::SamplingParams sampling() const { return backend_->last_request().sampling; }

  std::filesystem::path folder_;
  text::ByteTokenizerIds ids_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::shared_ptr<const text::ChatTemplate> template_;
  std::string reply_ = "Hello";
  std::string tool_parser_ = "hermes";
  std::unique_ptr<ScriptedBackend> backend_;
  std::unique_ptr<ApiServer> server_;
  std::unique_ptr<net::BlockingHttpClient> client_;
};

constexpr const char* kTools = R"(,"tools":[{"type":"function","function":{"name":"get","parameters":{}}}])";
constexpr const char* kArguments =
    R"({"big": 123456789012345678901234567890,"far":1e400, "half": "\ud83c", "tag": "a</tool_call>b", "deep": [{"x": -0.10}]})";

TEST_F(ClientFieldsTest, ArgumentsThatAreAnObjectReachTheTemplateAsTheyWere) {
  start();
  const std::string arguments = R"({"big": 123456789012345678901234567890, "far": [1e400, -1e-400], "one": 1.0, "two": 1})";
  for (const std::string& form : {arguments, json::serialize(json::value(arguments))}) {
    const net::HttpReply reply =
        post("/v1/chat/completions", R"({"max_tokens":99999999999999999999,"messages":[{"role":"user","content":"Hi"},{"role":"assistant",)"
                                     R"("tool_calls":[{"id":"1","type":"function","function":{"name":"get","arguments":)" +
                                         form + R"(}}]},{"role":"tool","tool_call_id":"1","content":"3"}]})");
    EXPECT_EQ(reply.status, 400) << "a number of its own of the request stays a number: " << reply.body;
    EXPECT_NE(reply.body.find("max_tokens"), std::string::npos) << reply.body;
    const net::HttpReply fine =
        post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"Hi"},{"role":"assistant","tool_calls":[{"id":"1",)"
                                     R"("type":"function","function":{"name":"get","arguments":)" +
                                         form + R"(}}]},{"role":"tool","tool_call_id":"1","content":"3"}]})");
    ASSERT_EQ(fine.status, 200) << fine.body;
    const std::string prompt = tokenizer_->decode(backend_->last_request().prompt_ids);
    EXPECT_NE(prompt.find("\"arguments\": " + arguments), std::string::npos) << prompt;
  }
}

TEST_F(ClientFieldsTest, NumbersOfToolsAndTemplateVariablesKeepTheirText) {
  template_ = std::make_shared<const text::ChatTemplate>(
      "{% if tools %}{{ tools[0].function.parameters | tojson }} {{ big }} {{ documents | tojson }} {{ messages[0].id }}{% else %}x{% "
      "endif %}");
  start();
  const std::string parameters =
      R"({"type": "object", "properties": {"n": {"maximum": 123456789012345678901234567890, "default": 1e400}}})";
  const std::string tool = R"({"type":"function","function":{"name":"get","parameters":)" + parameters + "}}";
  const std::string wanted = parameters + R"( 99999999999999999999 [{"id": 18446744073709551616}] )";
  const std::string kwargs = R"("chat_template_kwargs":{"big":99999999999999999999,"documents":[{"id":18446744073709551616}]})";
  const auto prompt = [&] { return tokenizer_->decode(backend_->last_request().prompt_ids); };
  for (const std::string& members :
       {R"("tools":[)" + tool + "]," + kwargs, R"("extra_body":{"tools":[)" + tool + "]," + kwargs + "}",
        R"("tools":[)" + tool + R"(],"documents":[{"id":18446744073709551616}],"chat_template_kwargs":{"big":99999999999999999999})"}) {
    const net::HttpReply reply =
        post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"Hi","id":-99999999999999999999}],)" + members + "}");
    ASSERT_EQ(reply.status, 200) << reply.body;
    EXPECT_EQ(prompt(), wanted + "-99999999999999999999");
  }
  const net::HttpReply response =
      post("/v1/responses", R"({"input":"Hi","tools":[{"type":"function","name":"get","parameters":)" + parameters + "}]," + kwargs + "}");
  ASSERT_EQ(response.status, 200) << response.body;
  EXPECT_EQ(prompt(), wanted);
  EXPECT_NE(response.body.find(R"("maximum":123456789012345678901234567890,"default":1e400)"), std::string::npos) << response.body;
  // Where a text or an object is wanted, a large number is none.
  const net::HttpReply role = post("/v1/chat/completions", R"({"messages":[{"role":"user","content":99999999999999999999}]})");
  EXPECT_EQ(role.status, 400) << role.body;
  const net::HttpReply format =
      post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"Hi"}],"response_format":{"type":99999999999999999999}})");
  EXPECT_EQ(format.status, 400) << format.body;
  EXPECT_NE(format.body.find("found 99999999999999999999"), std::string::npos) << format.body;
}

TEST_F(ClientFieldsTest, ArgumentsOfCallsPassThroughUnchanged) {
  reply_ = "<tool_call>\n{\"name\": \"get\", \"arguments\": " + std::string(kArguments) + "}\n</tool_call>\n<tool_call>" +
           R"({"arguments": {"y": 2}, "name": "put"})" + "</tool_call>";
  start();
  const json::value choice = chat_choice(kTools);
  const json::array& calls = choice.at("message").at("tool_calls").as_array();
  ASSERT_EQ(calls.size(), 2u) << choice;
  EXPECT_EQ(calls[0].at("function").at("arguments").as_string(), kArguments);
  EXPECT_EQ(calls[1].at("function").at("arguments").as_string(), R"({"y": 2})");

  std::vector<std::string> names, arguments;
  int num_deltas = 0;
  std::string finish;
  for (const json::value& chunk :
       stream("/v1/chat/completions", R"({"messages":[{"role":"user","content":"Hi"}],"stream":true)" + std::string(kTools) + "}")) {
    const json::value& streamed = chunk.at("choices").at(0);
    if (streamed.at("finish_reason").is_string()) {
      finish = streamed.at("finish_reason").as_string();
      EXPECT_EQ(chunk.at("policy_version").at("end").as_int64(), 0);
    }
    const json::value* list = streamed.at("delta").as_object().if_contains("tool_calls");
    if (!list) continue;
    for (const json::value& delta : list->as_array()) {
      ++num_deltas;
      const auto index = delta.at("index").to_number<std::size_t>();
      if (delta.as_object().contains("id")) {
        ASSERT_EQ(index, names.size());
        names.emplace_back(delta.at("function").at("name").as_string());
        arguments.emplace_back();
      }
      ASSERT_LT(index, arguments.size());
      arguments[index] += delta.at("function").at("arguments").as_string();
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"get", "put"}));
  EXPECT_EQ(arguments, (std::vector<std::string>{kArguments, R"({"y": 2})"}));
  EXPECT_GT(num_deltas, 50) << "arguments must be told while they are made";
  EXPECT_EQ(finish, "tool_calls");
}

// What a reply is, whole and streamed: reasoning, content, and per call its name and arguments.
std::vector<std::string> told(const json::value& message) {
  const auto text = [&](const char* key) {
    const json::value* value = message.as_object().if_contains(key);
    return value != nullptr && value->is_string() ? std::string(value->as_string()) : std::string();
  };
  std::vector<std::string> out{text("reasoning_content"), text("content")};
  if (const json::value* calls = message.as_object().if_contains("tool_calls"))
    for (const json::value& call : calls->as_array()) {
      out.emplace_back(call.at("function").at("name").as_string());
      out.emplace_back(call.at("function").at("arguments").as_string());
    }
  return out;
}

TEST_F(ClientFieldsTest, CallsOfEveryParserAreToldAlikeInBothForms) {
  const std::pair<const char*, const char*> cases[] = {
      {"hermes", "<tool_call>{\"name\": \"get\", \"arguments\": {\"x\": 1}}</tool_call>"},
      {"qwen3_coder", "<tool_call>\n<function=get>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"},
      {"glm45", "<tool_call>get\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"},
      {"minimax_m2", "<minimax:tool_call>\n<invoke name=\"get\">\n<parameter name=\"x\">1</parameter>\n</invoke>\n</minimax:tool_call>"},
      {"deepseek_v3",
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{\"x\": "
       "1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
      {"deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{\"x\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
      {"kimi_k2",
       "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{\"x\": "
       "1}<|tool_call_end|><|tool_calls_section_end|>"},
  };
  for (const auto& [parser, markup] : cases) {
    tool_parser_ = parser;
    reply_ = "<think>\nhm</think>Sure." + std::string(markup);
    server_.reset();
    start();
    const std::vector<std::string> want{"hm", "Sure.", "get", R"({"x": 1})"};
    const json::value whole = chat_choice(kTools);
    EXPECT_EQ(told(whole.at("message")), want) << parser << whole;
    EXPECT_EQ(whole.at("finish_reason").as_string(), "tool_calls") << parser;
    EXPECT_EQ(streamed_parts(kTools), want) << parser;
    if (std::string_view(parser) == "hermes") continue;
    const net::HttpReply forced = chat(std::string(kTools) + R"(,"tool_choice":"required")");
    const bool is_json = std::string_view(parser).starts_with("deepseek") || std::string_view(parser) == "kimi_k2";
    EXPECT_EQ(forced.status, is_json ? 200 : 501) << parser << forced.body;
    reply_ = "<think>\nhm</think>Sure." + std::string(markup).substr(0, std::string_view(markup).find("get") + 1);
    EXPECT_EQ(told(chat_choice(kTools).at("message")), (std::vector<std::string>{"hm", reply_.substr(reply_.find("Sure"))})) << parser;
  }
}

TEST_F(ClientFieldsTest, MarkersOfCallsAreSeenAlsoWhereTheyAreSpecialTokens) {
  // As some checkpoints of the family have it: the same tokenizer, but all its added tokens are special.
  std::string source = read_file(test_source_dir() / "tests/fixtures/text/kimi.tokenizer.json");
  for (std::size_t at = 0; (at = source.find("\"special\":false", at)) != std::string::npos;) source.replace(at, 15, "\"special\":true");
  tokenizer_ = std::make_shared<const text::Tokenizer>(text::Tokenizer::parse(source));
  ids_.vocab_size = tokenizer_->vocab_size();
  ids_.im_end = tokenizer_->id_of("<|im_end|>").value();
  template_ = std::make_shared<const text::ChatTemplate>("{{ messages[0].content }}");
  ASSERT_TRUE(tokenizer_->is_special(*tokenizer_->id_of("<|tool_calls_section_begin|>")));
  tool_parser_ = "kimi_k2";
  reply_ =
      "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{\"x\": "
      "1}<|tool_call_end|><|tool_calls_section_end|>";
  start();
  const json::value choice = chat_choice(kTools);
  EXPECT_EQ(told(choice.at("message")), (std::vector<std::string>{"", "Sure.", "get", R"({"x": 1})"})) << choice;
  EXPECT_EQ(choice.at("message").at("tool_calls").at(0).at("id").as_string(), "functions.get:0");
  EXPECT_EQ(chat_choice("").at("message").at("content").as_string(), "Sure.functions.get:0{\"x\": 1}") << "no tools, no markers";
}

TEST_F(ClientFieldsTest, ChannelsOfGptOssAreToldApart) {
  const std::string answer = "<|start|>assistant<|channel|>final<|message|>Sure. ";
  const std::string look = "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>";
  const std::string call = "<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|> {\"x\": 1} ";
  const std::string as_in_template = "<|start|>assistant to=functions.get<|channel|>commentary json<|message|>{\"x\": 1}";
  struct Case {
    std::string reply;
    std::vector<std::string> parts;
    const char* finish_reason;
  };
  const Case cases[] = {
      {"hm<|end|>" + answer, {"hm", "Sure. "}, "stop"},
      {"hm<|end|>" + look + call, {"hm", "Let me look.", "get", R"({"x": 1})"}, "tool_calls"},
      {"hm<|end|>" + as_in_template, {"hm", "", "get", R"({"x": 1})"}, "tool_calls"},
      {"hm<|end|>" + as_in_template + "<|call|>" + call, {"hm", "", "get", R"({"x": 1})"}, "tool_calls"},  // <|call|> ends the turn
      {"only thought", {"only thought", ""}, "stop"},
  };
  for (const bool is_open : {false, true}) {
    use_harmony(is_open);
    server_.reset();
    start();
    for (const Case& c : cases) {
      reply_ = (is_open ? "" : "<|channel|>analysis<|message|>") + c.reply;
      const json::value whole = chat_choice(kTools);
      std::vector<std::string> parts = told(whole.at("message"));
      EXPECT_EQ(parts, c.parts) << reply_ << whole;
      EXPECT_EQ(whole.at("finish_reason").as_string(), c.finish_reason) << reply_;
      EXPECT_EQ(streamed_parts(kTools), c.parts) << reply_;
    }
  }
  EXPECT_FALSE(sampling().skip_special_tokens);
  EXPECT_THAT(sampling().stop_token_ids, ::testing::IsSupersetOf({*tokenizer_->id_of("<|call|>"), *tokenizer_->id_of("<|return|>")}));
  // A call that breaks off is content, and so is one that nobody asked for; a server that was not asked to split reasoning off does it too.
  reply_ = "hm<|end|><|start|>assistant to=functions.get<|channel|>commentary json<|message|>{\"x\": ";
  EXPECT_EQ(told(chat_choice(kTools).at("message")), (std::vector<std::string>{"hm", "{\"x\":"}));
  reply_ = "hm<|end|>" + as_in_template;
  EXPECT_EQ(told(chat_choice("").at("message")), (std::vector<std::string>{"hm", "{\"x\": 1}"}));
  EXPECT_EQ(told(chat_choice(std::string(R"(,"include_reasoning":false)") + kTools).at("message"))[0], "");
  chat_choice(R"(,"reasoning_effort":"high")");
  EXPECT_THAT(tokenizer_->decode(backend_->last_request().prompt_ids, false), ::testing::HasSubstr("Hihigh<|end|>"));
}

TEST(ChannelStream, EveryCutGivesTheSameParts) {
  const std::string text =
      "<|channel|>analysis<|message|>a<b <|en<|end|>lost<|start|>assistant<|channel|>commentary<|message|>pre<|end|><|start|>assistant "
      "to=functions.f<|channel|>commentary json<|message|>\n {\"a\": \" <|end \"} "
      "\n<|call|><|start|>assistant<|channel|>other<|message|>lost"
      "<|start|>assistant<|channel|>final<|message|> yes <|return|>";
  for (std::size_t cut = 1; cut <= text.size(); ++cut) {
    ChannelStream stream({.header = "assistant"}, true);
    ChannelStream::Piece all;
    const auto add = [&](ChannelStream::Piece piece) {
      all.reasoning += piece.reasoning;
      all.content += piece.content;
      for (CallDelta& delta : piece.calls) {
        if (all.calls.size() == delta.index) {
          EXPECT_FALSE(delta.id.empty());
          all.calls.push_back(delta);
        } else {
          EXPECT_TRUE(delta.id.empty());
          all.calls.back().arguments += delta.arguments;
        }
      }
    };
    for (std::size_t i = 0; i < text.size(); i += cut) add(stream.push(std::string_view(text).substr(i, cut)));
    add(stream.finish());
    EXPECT_EQ(all.reasoning, "a<b <|en") << cut;
    EXPECT_EQ(all.content, "pre yes ") << cut;
    ASSERT_EQ(all.calls.size(), 1u) << cut;
    EXPECT_EQ(all.calls[0].name, "f") << cut;
    EXPECT_EQ(all.calls[0].arguments, "{\"a\": \" <|end \"}") << cut;
  }
}

TEST(ToolCallStream, EveryCutGivesTheSameCalls) {
  const std::string text =
      "<tool_call>\n{\"name\": \"a\\u0062\", \"arguments\": " + std::string(kArguments) +
      "}\n</tool_call> between <tool_call>{broken</tool_call><tool_call>{\"name\": \"d\", \"arguments\": \"{\\\"z\\\":1}\"}"
      "</tool_call><tool_call>{\"name\": \"open\", \"arguments\": {\"q\": \"unfin";
  for (std::size_t cut = 1; cut <= text.size(); ++cut) {
    ToolCallStream stream;
    std::vector<std::string> names, arguments;
    for (std::size_t i = 0; i < text.size(); i += cut)
      for (const CallDelta& delta : stream.push(std::string_view(text).substr(i, cut))) {
        if (delta.index == names.size()) {
          EXPECT_FALSE(delta.id.empty());
          names.push_back(delta.name);
          arguments.emplace_back();
        }
        arguments[delta.index] += delta.arguments;
      }
    EXPECT_EQ(names, (std::vector<std::string>{"ab", "d", "open"})) << cut;
    ASSERT_EQ(arguments.size(), 3u);
    EXPECT_EQ(arguments[0], kArguments) << cut;
    EXPECT_EQ(arguments[1], R"({"z":1})") << cut;
    EXPECT_EQ(arguments[2], R"({"q": "unfin)") << cut;
  }
}

TEST_F(ClientFieldsTest, MembersWithoutEffectAreNamed) {
  start();
  const net::HttpReply reply = chat(R"(,"temprature":0.5,"user":"me","store":true,"metadata":{},"we\nird":1,"use_beam_search":false)");
  EXPECT_EQ(reply.status, 200) << reply.body;
  EXPECT_EQ(reply.headers.get("X-Prl-Ignored"), "temprature, we?ird");
  EXPECT_EQ(chat(",\"temperature\":0.5").headers.find("X-Prl-Ignored"), nullptr);
  EXPECT_EQ(
      post("/inference/v1/generate", R"({"token_ids":[65],"sampling_params":{"max_tokens":2,"beams":3}})").headers.get("X-Prl-Ignored"),
      "sampling_params.beams");
  const std::vector<std::pair<const char*, const char*>> refused = {
      {R"(,"use_beam_search":true)", "use_beam_search"},   {R"(,"audio":{"voice":"x"})", "audio"},
      {R"(,"modalities":["text","audio"])", "modalities"}, {R"(,"functions":[{"name":"f"}])", "functions"},
      {R"(,"chat_template":"x")", "chat_template"},        {R"(,"logits_processors":["a.b"])", "logits_processors"}};
  for (const auto& [members, param] : refused) {
    const net::HttpReply refusal = chat(members);
    EXPECT_EQ(refusal.status, 400) << members;
    EXPECT_EQ(refusal.json().at("error").at("param"), json::value(param)) << refusal.body;
  }
}

TEST_F(ClientFieldsTest, LogprobsOfNamedTokens) {
  reply_ = "H";
  start();
  const auto id_of = [&](const char* text) { return tokenizer_->encode(text).at(0); };
  const std::int32_t drawn = id_of("H"), other = id_of("a"), never = ScriptedBackend::kImpossible;
  const std::string named = fmt::format(R"("logprob_token_ids":[{},{},{}])", other, never, other);
  const auto listed = [](const json::value& content) {
    std::vector<std::pair<std::string, float>> out;
    for (const json::value& entry : content.at("top_logprobs").as_array())
      out.emplace_back(entry.at("token").as_string().c_str(), entry.at("logprob").to_number<float>());
    return out;
  };
  const auto key = [](std::int32_t id) { return fmt::format("token_id:{}", id); };
  using Listed = std::vector<std::pair<std::string, float>>;
  const Listed three = {
      {key(drawn), ScriptedBackend::logprob_of(drawn)}, {key(other), ScriptedBackend::logprob_of(other)}, {key(never), -9998.0f}};
  const json::value choice = chat_choice(R"(,"logprobs":true,"top_logprobs":1,"return_tokens_as_token_ids":true,)" + named);
  EXPECT_EQ(sampling().logprob_token_ids, (std::vector<std::int32_t>{other, never}));
  EXPECT_EQ(listed(choice.at("logprobs").at("content").at(0)), three) << choice;
  const net::HttpReply generated =
      post("/inference/v1/generate", fmt::format(R"({{"token_ids":[65],"sampling_params":{{"max_tokens":1,{}}}}})", named));
  EXPECT_EQ(listed(generated.json().at("choices").at(0).at("logprobs").at("content").at(0)), three) << generated.body;
  // A drawn token that is named stands once, in its place.
  const json::value again =
      chat_choice(fmt::format(R"(,"logprobs":true,"return_tokens_as_token_ids":true,"logprob_token_ids":[{},{}])", other, drawn));
  EXPECT_EQ(listed(again.at("logprobs").at("content").at(0)), (Listed{three[1], three[0]}));
  const net::HttpReply completed =
      post("/v1/completions", R"({"prompt":"x","max_tokens":1,"logprobs":0,"return_tokens_as_token_ids":true,)" + named + "}");
  EXPECT_EQ(completed.json().at("choices").at(0).at("logprobs").at("top_logprobs").at(0).as_object().size(), 3u) << completed.body;

  std::string many = "[0";
  for (int id = 1; id <= 128; ++id) many += fmt::format(",{}", id);
  for (const std::string& members :
       {"," + named, std::string(R"(,"logprobs":true,"logprob_token_ids":[1000000])"),
        R"(,"logprobs":true,"logprob_token_ids":)" + many + "]", std::string(R"(,"logprobs":true,"logprob_token_ids":true)")}) {
    const net::HttpReply refusal = chat(members);
    EXPECT_EQ(refusal.status, 400) << members;
    EXPECT_EQ(refusal.json().at("error").at("param"), "logprob_token_ids") << refusal.body;
  }
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"x","max_tokens":0,"echo":true,"logprobs":1,)" + named + "}").status, 400);
}

TEST_F(ClientFieldsTest, StrictServersRefuseMembersWithoutEffect) {
  ApiOptions options;
  options.is_strict = true;
  start(options);
  const net::HttpReply reply = chat(",\"temprature\":0.5");
  EXPECT_EQ(reply.status, 400);
  EXPECT_NE(reply.body.find("did you mean temperature"), std::string::npos) << reply.body;
  EXPECT_EQ(chat(R"(,"temperature":0.5,"user":"me","extra_body":{"top_k":3})").status, 200);
}

TEST_F(ClientFieldsTest, DefaultsOfTheModelCountWhereTextIsAskedFor) {
  std::ofstream(folder_ / "generation_config.json")
      << R"({"temperature":0.6,"top_k":20,"top_p":0.95,"repetition_penalty":1.1,"max_new_tokens":7,
    "do_sample":true,"eos_token_id":[1]})";
  ApiOptions options;
  options.sampling_defaults = read_sampling_defaults("auto", folder_);
  start(options);
  EXPECT_EQ(chat("").status, 200);
  EXPECT_FLOAT_EQ(sampling().temperature, 0.6f);
  EXPECT_FLOAT_EQ(sampling().top_p, 0.95f);
  EXPECT_FLOAT_EQ(sampling().repetition_penalty, 1.1f);
  EXPECT_EQ(sampling().top_k, 20);
  EXPECT_EQ(sampling().max_tokens, 7);
  EXPECT_EQ(chat(R"(,"temperature":1,"top_k":-1,"max_tokens":3)").status, 200);
  EXPECT_FLOAT_EQ(sampling().temperature, 1.0f);
  EXPECT_EQ(sampling().top_k, -1);
  EXPECT_EQ(sampling().max_tokens, 3);
  EXPECT_EQ(chat(R"(,"max_tokens":50)").status, 200);
  EXPECT_EQ(sampling().max_tokens, 7);
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"x"})").status, 200);
  EXPECT_EQ(sampling().top_k, 20);
  // Training draws from the plain distribution: what generate is not told is not changed.
  EXPECT_EQ(post("/inference/v1/generate", R"({"token_ids":[65],"sampling_params":{"max_tokens":9}})").status, 200);
  EXPECT_FLOAT_EQ(sampling().temperature, 1.0f);
  EXPECT_EQ(sampling().top_k, -1);
  EXPECT_EQ(sampling().max_tokens, 9);
  EXPECT_FALSE(read_sampling_defaults("vllm", folder_).temperature);
  EXPECT_THROW(read_sampling_defaults((folder_ / "none").string(), folder_), Error);
  std::ofstream(folder_ / "generation_config.json") << R"({"top_p":7})";
  EXPECT_THROW(read_sampling_defaults("auto", folder_), Error);
}

TEST_F(ClientFieldsTest, WordsAndTokensThatMayNotCome) {
  start();
  EXPECT_EQ(chat(R"(,"bad_words":["no"],"allowed_token_ids":[70,71,72])").status, 200);
  EXPECT_EQ(sampling().allowed_token_ids, (std::vector<std::int32_t>{70, 71, 72}));
  ASSERT_EQ(sampling().bad_sequences.size(), 1u);
  EXPECT_EQ(sampling().bad_sequences[0], tokenizer_->encode("no"));
  for (const auto& [members, param] :
       std::vector<std::pair<const char*, const char*>>{{R"(,"allowed_token_ids":[])", "allowed_token_ids"},
                                                        {R"(,"allowed_token_ids":[1000000])", "allowed_token_ids"},
                                                        {R"(,"bad_words":[" "])", "bad_words"},
                                                        {R"(,"allowed_token_ids":[70],"guided_choice":["a"])", "allowed_token_ids"},
                                                        {R"(,"detokenize":false,"stop":["x"])", "stop"},
                                                        {R"(,"n":13)", "n"}}) {
    const net::HttpReply reply = chat(members);
    EXPECT_EQ(reply.status, 400) << members << reply.body;
    EXPECT_EQ(reply.json().at("error").at("param"), json::value(param)) << reply.body;
  }
  EXPECT_EQ(post("/v1/completions", R"({"prompt":["a","b","c","d","e","f","g"],"n":2})").status, 400);
  EXPECT_EQ(chat(R"(,"n":8,"max_tokens":1)").status, 200);
}

TEST_F(ClientFieldsTest, WhatTheTemplateAndTheReplyAreToShow) {
  template_ = std::make_shared<const text::ChatTemplate>(
      "{{ documents[0].text if documents }}|{{ reasoning_effort }}|{{ enable_thinking }}|{{ messages[-1].content }}");
  reply_ = "<think>\nhm\n</think>\n\nyes";
  start();
  const auto prompt_of = [&](const std::string& members) {
    EXPECT_EQ(chat(members).status, 200);
    return tokenizer_->decode(backend_->last_request().prompt_ids);
  };
  EXPECT_EQ(prompt_of(R"(,"documents":[{"text":"doc"}],"reasoning_effort":"low")"), "doc|low||Hi");
  EXPECT_EQ(prompt_of(R"(,"reasoning_effort":"none")"), "|none|False|Hi");
  EXPECT_EQ(prompt_of(R"(,"reasoning_effort":"none","chat_template_kwargs":{"enable_thinking":true})"), "|none|True|Hi");
  EXPECT_EQ(chat_choice("").at("message").at("reasoning_content"), "hm\n");
  const json::value hidden = chat_choice(R"(,"include_reasoning":false)");
  EXPECT_FALSE(hidden.at("message").as_object().contains("reasoning_content"));
  EXPECT_EQ(hidden.at("message").at("content"), "yes");
  EXPECT_EQ(chat_choice(R"(,"detokenize":false,"return_token_ids":true)").at("message").at("content"), "");
  const std::string said =
      R"({"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"I say: "}],"echo":true,"include_reasoning":false)";
  const net::HttpReply echoed = post("/v1/chat/completions", said + "}");
  EXPECT_EQ(echoed.json().at("choices").at(0).at("message").at("content"), "I say: yes") << echoed.body;
  std::string streamed;
  for (const json::value& chunk : stream("/v1/chat/completions", said + ",\"stream\":true}")) {
    const json::value* content = chunk.at("choices").at(0).at("delta").as_object().if_contains("content");
    if (content) streamed += content->as_string();
    EXPECT_FALSE(chunk.at("choices").at(0).at("delta").as_object().contains("reasoning"));
  }
  EXPECT_EQ(streamed, "I say: yes");
}

/// Lets one token come, always.
class OneToken final : public wire::TokenRule {
 public:
  explicit OneToken(std::size_t token) : token_(token) {}
  bool allow(std::span<const std::int32_t>, wire::TokenRuleCursor&, std::span<std::uint64_t> allowed_words) const override {
    std::fill(allowed_words.begin(), allowed_words.end(), 0);
    allowed_words[token_ / 64] |= std::uint64_t{1} << (token_ % 64);
    return true;
  }

 private:
  std::size_t token_;
};

TEST_F(ClientFieldsTest, AThinkingBudgetClosesTheBlock) {
  const auto close = tokenizer_->encode("</think>");
  const auto open = tokenizer_->encode("<think>");
  std::vector<std::uint64_t> words((static_cast<std::size_t>(tokenizer_->vocab_size()) + 63) / 64);
  wire::TokenRuleCursor cursor;
  const auto count = [&] {
    int bits = 0;
    for (const std::uint64_t word : words) bits += std::popcount(word);
    return bits;
  };
  const ThinkingBudget rule(*tokenizer_, kThinkMarks, 3, true);
  EXPECT_FALSE(rule.needs_stop_tokens());
  std::vector<std::int32_t> output{65, 66};
  EXPECT_TRUE(rule.allow(output, cursor, words));
  EXPECT_GE(count(), tokenizer_->vocab_size());
  output.push_back(67);
  for (const std::int32_t id : close) {
    EXPECT_FALSE(rule.allow(output, cursor, words));
    EXPECT_EQ(count(), 1);
    EXPECT_TRUE(words[static_cast<std::size_t>(id) / 64] >> (id % 64) & 1);
    output.push_back(id);
  }
  EXPECT_TRUE(rule.allow(output, cursor, words));
  // Without an open block nothing is closed.
  const ThinkingBudget later(*tokenizer_, kThinkMarks, 0, false);
  EXPECT_TRUE(later.allow(std::vector<std::int32_t>{65, 66, 67, 68, 69, 70, 71}, cursor, words));
  EXPECT_FALSE(later.allow(open, cursor, words));
  // Beside structured output: its rule decides everything but when the block closes.
  const ThinkingBudget of_form(*tokenizer_, kThinkMarks, 3, true, std::make_shared<const OneToken>(65));
  EXPECT_TRUE(of_form.needs_stop_tokens());
  EXPECT_TRUE(of_form.allow(std::vector<std::int32_t>{70, 71}, cursor, words));
  EXPECT_EQ(count(), 1);
  EXPECT_TRUE(words[1] >> 1 & 1) << "token 65";
  EXPECT_FALSE(of_form.allow(std::vector<std::int32_t>{70, 71, 72}, cursor, words));
  EXPECT_TRUE(words[static_cast<std::size_t>(close[0]) / 64] >> (close[0] % 64) & 1);
  start();
  EXPECT_EQ(chat(R"(,"thinking_token_budget":5,"ignore_eos":true,"min_tokens":2,"max_tokens":4)").status, 200);
  EXPECT_NE(sampling().token_rule, nullptr);
  EXPECT_EQ(chat(R"(,"thinking_token_budget":5,"guided_choice":["a"])").status, 200);
  EXPECT_NE(sampling().token_rule, nullptr);
}

TEST_F(ClientFieldsTest, ResponsesHaveItemsAndTheSameEvents) {
  reply_ = "<think>\nhm\n</think>\n\nSure.<tool_call>{\"name\": \"get\", \"arguments\": {\"x\": 1}}</tool_call>";
  start();
  const std::string body = R"({"model":"tiny","input":"Hi","instructions":"Be brief","max_output_tokens":500,
    "tools":[{"type":"function","name":"get","parameters":{"type":"object"}}])";
  const net::HttpReply reply = post("/v1/responses", body + "}");
  ASSERT_EQ(reply.status, 200) << reply.body;
  const json::value whole = reply.json();
  EXPECT_EQ(whole.at("object"), "response");
  EXPECT_EQ(whole.at("status"), "completed");
  EXPECT_EQ(whole.at("instructions"), "Be brief");
  ASSERT_EQ(whole.at("output").as_array().size(), 3u) << reply.body;
  EXPECT_EQ(whole.at("output").at(0).at("content").at(0).at("text"), "hm\n");
  EXPECT_EQ(whole.at("output").at(1).at("content").at(0).at("text"), "Sure.");
  EXPECT_EQ(whole.at("output").at(2).at("arguments"), R"({"x": 1})");
  EXPECT_EQ(whole.at("usage").at("total_tokens").as_int64(),
            whole.at("usage").at("input_tokens").as_int64() + whole.at("usage").at("output_tokens").as_int64());
  EXPECT_NE(tokenizer_->decode(backend_->last_request().prompt_ids).find("Be brief"), std::string::npos);

  std::vector<std::string> types;
  json::value last;
  std::string streamed, arguments;
  std::int64_t number = 0;
  for (const auto& event : client_->read_sse(make_call("/v1/responses", body + ",\"stream\":true}"))) {
    const json::value data = json::parse(event.data);
    EXPECT_EQ(data.at("type"), json::value(event.event));
    EXPECT_EQ(data.at("sequence_number").as_int64(), number++);
    if (types.empty() || types.back() != event.event) types.push_back(event.event);
    if (event.event == "response.output_text.delta") streamed += data.at("delta").as_string();
    if (event.event == "response.function_call_arguments.delta") arguments += data.at("delta").as_string();
    last = data;
  }
  EXPECT_EQ(types, (std::vector<std::string>{"response.created", "response.in_progress", "response.output_item.added",
                                             "response.content_part.added", "response.reasoning_text.delta", "response.reasoning_text.done",
                                             "response.content_part.done", "response.output_item.done", "response.output_item.added",
                                             "response.content_part.added", "response.output_text.delta", "response.output_text.done",
                                             "response.content_part.done", "response.output_item.done", "response.output_item.added",
                                             "response.function_call_arguments.delta", "response.function_call_arguments.done",
                                             "response.output_item.done", "response.completed"}));
  EXPECT_EQ(streamed, "Sure.");
  EXPECT_EQ(arguments, R"({"x": 1})");
  const json::array& items = last.at("response").at("output").as_array();
  ASSERT_EQ(items.size(), 3u);
  EXPECT_EQ(items[1].at("content").at(0).at("text"), "Sure.");

  // The conversation goes on from what is kept, with the result of the call.
  const std::string id(whole.at("id").as_string()), call(whole.at("output").at(2).at("call_id").as_string());
  const net::HttpReply next = post("/v1/responses", R"({"input":[{"type":"function_call_output","call_id":")" + call +
                                                        R"(","output":"42 kg"}],"previous_response_id":")" + id + "\"}");
  ASSERT_EQ(next.status, 200) << next.body;
  const std::string prompt = tokenizer_->decode(backend_->last_request().prompt_ids);
  for (const char* words : {"Hi", "Sure.", "42 kg"}) EXPECT_NE(prompt.find(words), std::string::npos) << words << " in " << prompt;
  EXPECT_EQ(prompt.find("Be brief"), std::string::npos) << "instructions are not carried over";
  EXPECT_EQ(post("/v1/responses", R"({"input":"Hi","max_output_tokens":2})").json().at("incomplete_details").at("reason"),
            "max_output_tokens");
}

TEST_F(ClientFieldsTest, ResponsesRefuseByName) {
  start();
  for (const auto& [body, status, param] : std::vector<std::tuple<const char*, int, const char*>>{
           {R"({"input":"x","previous_response_id":"resp_none"})", 404, "previous_response_id"},
           {R"({"input":"x","tools":[{"type":"web_search"}]})", 400, "tools"},
           {R"({"input":[{"role":"user","content":[{"type":"input_image","image_url":"x"}]}]})", 400, "input"},
           {R"({"input":[{"type":"item_reference","id":"x"}]})", 400, "input"},
           {R"({"input":"x","background":true})", 400, "background"},
           {R"({"input":"x","truncation":"auto"})", 400, "truncation"},
           {R"({"input":5})", 400, "input"},
           {"{}", 400, "input"}}) {
    const net::HttpReply reply = post("/v1/responses", body);
    EXPECT_EQ(reply.status, status) << body << reply.body;
    EXPECT_EQ(reply.json().at("error").at("param"), json::value(param)) << reply.body;
  }
  const net::HttpReply stored = post("/v1/responses", R"({"input":"x","store":false})");
  const std::string id(stored.json().at("id").as_string());
  EXPECT_EQ(post("/v1/responses", R"({"input":"y","previous_response_id":")" + id + "\"}").status, 404);
  const net::HttpReply embeddings = post("/v1/embeddings", R"({"input":"x"})");
  EXPECT_EQ(embeddings.status, 404);
  EXPECT_NE(embeddings.body.find("/v1/embeddings is not built"), std::string::npos) << embeddings.body;
  net::HttpCall files = make_call("/v1/files", "");
  files.method = "GET";
  EXPECT_EQ(client_->call(files).status, 404) << "the list that a client asks for first";
}

TEST(RequestFields, TheDocumentNamesEveryMember) {
  std::ifstream file(test_source_dir() / "docs/http-api.md");
  const std::string page((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (const BodyKind kind :
       {BodyKind::kChat, BodyKind::kCompletion, BodyKind::kGenerate, BodyKind::kSamplingParams, BodyKind::kResponses}) {
    std::vector<std::string_view> names;
    for (const RequestField& field : request_fields(kind)) {
      EXPECT_NE(page.find(field.name), std::string::npos) << field.name << " is not in docs/http-api.md";
      names.push_back(field.name);
      EXPECT_EQ(field.fate == RequestField::Fate::kRefused, !field.reason.empty()) << field.name;
    }
    std::sort(names.begin(), names.end());
    EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end()) << "a member stands twice";
  }
}

TEST(ResponseStore, ForgetsTheOldest) {
  ResponseStore store(200, 3);
  for (int i = 0; i < 5; ++i) store.put(std::to_string(i), json::array{i});
  EXPECT_FALSE(store.get("1"));
  ASSERT_TRUE(store.get("2"));
  EXPECT_EQ(store.get("4")->at(0), 4);
  store.put("big", json::array{std::string(150, 'x')});
  store.put("too big", json::array{std::string(300, 'x')});
  EXPECT_TRUE(store.get("big"));
  EXPECT_FALSE(store.get("too big"));
  store.put("bigger", json::array{std::string(190, 'x')});
  EXPECT_FALSE(store.get("big"));
}

TEST_F(ClientFieldsTest, MetricsHaveTheNamesOfVllm) {
  start();
  EXPECT_EQ(chat(R"(,"n":3,"max_tokens":4)").status, 200);
  net::HttpCall call;
  call.url = fmt::format("http://127.0.0.1:{}/metrics", server_->port());
  const std::string page = client_->call(call).body;
  for (const char* name : {"request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
                           "request_inference_time_seconds", "iteration_tokens_total", "request_params_n", "request_params_max_tokens",
                           "request_max_num_generation_tokens", "request_time_per_output_token_seconds"}) {
    EXPECT_NE(page.find(fmt::format("# TYPE vllm:{} histogram", name)), std::string::npos) << name;
    EXPECT_NE(page.find(fmt::format("vllm:{}_count{{engine=\"0\",model_name=\"tiny\"}}", name)), std::string::npos) << name;
  }
  EXPECT_NE(page.find("vllm:request_params_n_sum{engine=\"0\",model_name=\"tiny\"} 3\n"), std::string::npos) << page;
  EXPECT_NE(page.find("vllm:request_params_max_tokens_sum{engine=\"0\",model_name=\"tiny\"} 12\n"), std::string::npos);
  EXPECT_NE(page.find("vllm:request_queue_time_seconds_count{engine=\"0\",model_name=\"tiny\"} 3\n"), std::string::npos);
  EXPECT_NE(page.find("vllm:cache_config_info{engine=\"0\",model_name=\"tiny\",block_size=\"16\",num_gpu_blocks=\"100\"} 1"),
            std::string::npos);
}

// A vocabulary made from SentencePiece: words carry their space, and rare characters are tokens of one byte each.
TEST_F(ClientFieldsTest, RepliesOfByteTokensHaveTheirBytes) {
  const std::string file = read_file(test_source_dir() / "tests/fixtures/text/characters/llama2.tokenizer.json");
  tokenizer_ = std::make_shared<const text::Tokenizer>(text::Tokenizer::parse(file, R"({"bos_token":"<s>","eos_token":"</s>"})"));
  ids_.vocab_size = tokenizer_->vocab_size();
  ids_.im_end = tokenizer_->id_of("</s>").value();
  reply_ = "the W\u00f6rld \u9f98\nnext";
  start();
  const std::vector<std::int32_t> ids = tokenizer_->encode(reply_);
  const json::value whole = post("/v1/completions", R"({"prompt":"the","logprobs":1,"max_tokens":60})").json();
  const json::object& choice = whole.at("choices").at(0).as_object();
  EXPECT_EQ(choice.at("text").as_string(), " " + reply_) << "the prompt stands before it";
  const json::object& lists = choice.at("logprobs").as_object();
  ASSERT_EQ(lists.at("tokens").as_array().size(), ids.size() + 1);
  EXPECT_EQ(lists.at("text_offset").at(1).as_int64(), static_cast<std::int64_t>(tokenizer_->bytes_of(ids[0]).size()));
  const json::value echoed = post("/v1/completions", R"({"prompt":"the","echo":true,"max_tokens":60})").json();
  EXPECT_EQ(echoed.at("choices").at(0).at("text").as_string(), "the " + reply_);

  std::string bytes;
  const json::value chatted = chat_choice(R"(,"logprobs":true)");
  for (const json::value& entry : chatted.at("logprobs").at("content").as_array()) {
    std::string of_token;
    for (const json::value& byte : entry.at("bytes").as_array()) of_token.push_back(static_cast<char>(byte.as_int64()));
    const std::size_t i = static_cast<std::size_t>(&entry - chatted.at("logprobs").at("content").as_array().data());
    EXPECT_EQ(of_token, tokenizer_->bytes_of(i < ids.size() ? ids[i] : ids_.im_end));
    bytes += of_token;
  }
  EXPECT_EQ(bytes, " " + reply_ + "</s>");
  std::string text;
  for (const json::value& chunk : stream("/v1/completions", R"({"prompt":"the","stream":true,"max_tokens":60})"))
    text += std::string(chunk.at("choices").at(0).at("text").as_string());
  EXPECT_EQ(text, " " + reply_);

  const json::value stopped = post("/v1/completions", R"({"prompt":"the","stop":"\n","max_tokens":60})").json();
  EXPECT_EQ(stopped.at("choices").at(0).at("text").as_string(), " the W\u00f6rld \u9f98");
  EXPECT_EQ(stopped.at("choices").at(0).at("stop_reason").as_string(), "\n");
  const auto newline = std::find(ids.begin(), ids.end(), tokenizer_->id_of("<0x0A>").value());
  EXPECT_EQ(stopped.at("usage").at("completion_tokens").as_int64(), newline - ids.begin() + 1) << "it stops at the byte, not a token later";
}

}  // namespace
}  // namespace prl::server
