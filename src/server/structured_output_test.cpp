#include <gtest/gtest.h>

#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/files.hpp"
#include "base/rng.hpp"
#include "base/testing/source_dir.hpp"
#include "net/http_client.hpp"
#include "server/api_server.hpp"
#include "server/testing/scripted_backend.hpp"
#include "text/tokenizer_builder.hpp"

namespace prl::server {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;
using testing::ScriptedBackend;

/// A server whose model draws at random from what the request's rule allows.
class StructuredOutputTest : public ::testing::Test {
 protected:
  StructuredOutputTest()
      : folder_(std::filesystem::temp_directory_path() / fmt::format("prl-structured-test-{}", static_cast<const void*>(this))) {
    std::filesystem::create_directories(folder_);
    const text::ByteTokenizerIds ids = text::write_byte_level_tokenizer(folder_);
    tokenizer_ = std::make_shared<const text::Tokenizer>(text::Tokenizer::load(folder_));
    template_ = std::make_shared<const text::ChatTemplate>(text::ChatTemplate::load(folder_, *tokenizer_));
    ScriptedBackend::Options backend;
    backend.vocab_size = ids.vocab_size;
    backend.end_id = ids.im_end;
    backend.max_model_len = 1 << 16;
    backend_ = std::make_unique<ScriptedBackend>(backend, [this](const wire::GenerateRequest& request) { return walk(request); });
  }
  ~StructuredOutputTest() override {
    server_.reset();
    backend_.reset();
    std::filesystem::remove_all(folder_);
  }
  void start(bool has_parsers) {
    ApiOptions options;
    options.port = 0;
    options.served_names = {"tiny"};
    options.enable_tools = options.enable_reasoning = has_parsers;
    std::shared_ptr<const text::Renderer> renderer;
    if (has_parsers) {
      text::RendererOptions wanted;
      wanted.name = "default";
      wanted.tool_parser = tool_parser_;
      wanted.reasoning_parser = "think";
      renderer = text::make_renderer(wanted, tokenizer_, template_);
    }
    server_ = std::make_unique<ApiServer>(options, *backend_, tokenizer_, template_, renderer);
    server_->start();
    net::HttpClient::Options client;
    client.timeout = 30s;
    client.max_retries = 0;
    client_ = std::make_unique<net::BlockingHttpClient>(client);
  }
  /// The tokenizer and the calls of another family, whose replies end with `end`.
  void use_family(const char* tokenizer, const char* parser, std::string_view end, std::string_view chat_template) {
    const std::string source = read_file(test_source_dir() / "tests/fixtures/text" / fmt::format("{}.tokenizer.json", tokenizer));
    tokenizer_ = std::make_shared<const text::Tokenizer>(text::Tokenizer::parse(source, fmt::format(R"({{"eos_token": "{}"}})", end)));
    template_ = std::make_shared<const text::ChatTemplate>(std::string(chat_template));
    tool_parser_ = parser;
    ScriptedBackend::Options backend;
    backend.vocab_size = tokenizer_->vocab_size();
    backend.end_id = tokenizer_->id_of(end).value();
    backend.max_model_len = 1 << 16;
    server_.reset();
    backend_ = std::make_unique<ScriptedBackend>(backend, [this](const wire::GenerateRequest& request) { return walk(request); });
  }
  std::vector<std::int32_t> walk(const wire::GenerateRequest& request) {
    std::vector<std::int32_t> output;
    if (!request.sampling.token_rule) return tokenizer_->encode("free");
    wire::TokenRuleCursor cursor;
    std::vector<std::uint64_t> words((static_cast<std::size_t>(tokenizer_->vocab_size()) + 63) / 64);
    while (output.size() < 30'000) {
      const bool may_end = request.sampling.token_rule->allow(output, cursor, words);
      std::vector<std::int32_t> open;
      for (std::int32_t id = 0; id < tokenizer_->vocab_size(); ++id)
        if (words[static_cast<std::size_t>(id) / 64] >> (id % 64) & 1) open.push_back(id);
      if (may_end && (open.empty() || rng_.next_below(2) == 0)) return output;
      if (open.empty()) break;
      // Nothing drawn at random would ever end a think block.
      const std::string text = output.size() % 16 == 15 ? tokenizer_->decode(output) : "";
      if (text.starts_with("<think>") && text.find("</think>") == std::string::npos) {
        const auto close = tokenizer_->encode("</think>");
        output.insert(output.end(), close.begin(), close.end());
        continue;
      }
      const auto end = tokenizer_->id_of("<|end|>");
      if (end && output.size() % 16 == 15 && std::find(open.begin(), open.end(), *end) != open.end()) {
        output.push_back(*end);
        continue;
      }
      std::int32_t token = open[rng_.next_below(open.size())];
      // Long values close sooner.
      if (output.size() > 60)
        for (const char c : std::string_view("\"}],:>"))
          for (const std::int32_t id : open)
            if (tokenizer_->bytes_of(id) == std::string_view(&c, 1) && rng_.next_below(2) == 0) token = id;
      output.push_back(token);
    }
    ADD_FAILURE() << "no end: " << tokenizer_->decode(output).substr(0, 300);
    return output;
  }
  net::HttpReply post(std::string_view path, const std::string& body) {
    net::HttpCall call;
    call.method = "POST";
    call.url = fmt::format("http://127.0.0.1:{}{}", server_->port(), path);
    call.body = body;
    return client_->call(call);
  }
  /// choices[0] of the reply; `members` are added to a minimal body.
  json::value choice(const std::string& path, const std::string& members) {
    const std::string prompt =
        path.find("chat") != std::string::npos ? R"("messages":[{"role":"user","content":"Hi"}])" : R"("prompt":"Hi")";
    const net::HttpReply reply = post(path, "{" + prompt + R"(,"max_tokens":60000,)" + members + "}");
    EXPECT_EQ(reply.status, 200) << members << reply.body;
    return reply.status == 200 ? reply.json().at("choices").at(0) : json::value(json::object());
  }
  std::string chat_text(const std::string& members) {
    return std::string(choice("/v1/chat/completions", members).at("message").at("content").as_string());
  }

  static constexpr const char* kSchema =
      R"({"type":"object","properties":{"n":{"type":"integer","minimum":0,"maximum":9},"s":{"enum":["a","b"]}},"required":["n","s"]})";
  static void expect_fits(const std::string& text) {
    const json::value value = json::parse(text);
    ASSERT_TRUE(value.is_object() && value.get_object().size() == 2u) << text;
    EXPECT_TRUE(value.at("n").as_int64() >= 0 && value.at("n").as_int64() <= 9) << text;
    EXPECT_TRUE(value.at("s") == "a" || value.at("s") == "b") << text;
  }

  std::string tool_parser_ = "hermes";
  std::filesystem::path folder_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::shared_ptr<const text::ChatTemplate> template_;
  Rng rng_{17};
  std::unique_ptr<ScriptedBackend> backend_;
  std::unique_ptr<ApiServer> server_;
  std::unique_ptr<net::BlockingHttpClient> client_;
};

TEST_F(StructuredOutputTest, EverySpellingOfTheFieldIsKept) {
  start(false);
  const std::string schema = kSchema;
  const std::string quoted = json::serialize(json::value(schema));
  for (const std::string& members :
       {R"("response_format":{"type":"json_schema","json_schema":{"name":"x","strict":true,"schema":)" + schema + "}}",
        "\"guided_json\":" + schema, "\"guided_json\":" + quoted, R"("structured_outputs":{"json":)" + schema + "}",
        R"("extra_body":{"guided_json":)" + schema + "}"}) {
    expect_fits(chat_text(members));
    expect_fits(std::string(choice("/v1/completions", members).at("text").as_string()));
  }
  EXPECT_TRUE(json::parse(chat_text(R"("response_format":{"type":"json_object"})")).is_object());
  EXPECT_TRUE(json::parse(chat_text(R"("structured_outputs":{"json_object":true})")).is_object());
  for (const char* members : {R"("guided_regex":"[0-9]{3}-[ab]+!")", R"("structured_outputs":{"regex":"[0-9]{3}-[ab]+!"})"}) {
    const std::string text = chat_text(members);
    EXPECT_TRUE(text.size() >= 6 && text[3] == '-' && text.back() == '!') << text;
  }
  for (const char* members : {R"("guided_choice":["red","blue sky"])", R"("structured_outputs":{"choice":["red","blue sky"]})"}) {
    const std::string text = chat_text(members);
    EXPECT_TRUE(text == "red" || text == "blue sky") << text;
  }
  for (const char* members : {R"("guided_grammar":"root ::= [a-c]{2} (\"-\" num)*\nnum ::= [1-9]")",
                              R"("structured_outputs":{"grammar":"start: /[a-c]{2}/ (\"-\" NUM)*\nNUM: \"1\"..\"9\""})"}) {
    const std::string text = chat_text(members);
    EXPECT_TRUE(text.size() % 2 == 0 && text[0] >= 'a' && text[1] <= 'c' && (text.size() == 2 || text[2] == '-')) << text;
  }
  EXPECT_EQ(chat_text(R"("response_format":{"type":"text"})"), "free");
  EXPECT_EQ(chat_text(R"("response_format":null,"guided_json":null)"), "free");
  // Token ids in, token ids out: the same rule, in the sampling parameters.
  const json::value reply =
      post("/inference/v1/generate", R"({"token_ids":[65],"sampling_params":{"max_tokens":50000,"guided_json":)" + schema + "}}").json();
  std::vector<std::int32_t> ids;
  for (const auto& id : reply.at("choices").at(0).at("token_ids").as_array()) ids.push_back(static_cast<std::int32_t>(id.as_int64()));
  expect_fits(tokenizer_->decode(ids));
}

TEST_F(StructuredOutputTest, ReasoningComesBeforeTheText) {
  start(true);
  bool has_thought = false, has_not = false;
  for (int i = 0; i < 30; ++i) {
    const json::value message = choice("/v1/chat/completions", R"("guided_choice":["yes"])").at("message");
    EXPECT_NE(message.at("content").as_string().find("yes"), json::string::npos);
    (message.as_object().contains("reasoning_content") ? has_thought : has_not) = true;
  }
  EXPECT_TRUE(has_thought && has_not) << "both ways must be open";
}

TEST_F(StructuredOutputTest, ToolChoiceForcesACall) {
  start(true);
  const std::string tools = R"("tools":[{"type":"function","function":{"name":"get","parameters":)" + std::string(kSchema) +
                            R"(}},{"type":"function","function":{"name":"put"}}],)";
  bool has_get = false, has_put = false;
  for (int i = 0; i < 12; ++i) {
    const json::value any = choice("/v1/chat/completions", tools + R"("tool_choice":"required","parallel_tool_calls":false)");
    EXPECT_EQ(any.at("finish_reason").as_string(), "tool_calls");
    ASSERT_EQ(any.at("message").at("tool_calls").as_array().size(), 1u) << any;
    const json::value& function = any.at("message").at("tool_calls").at(0).at("function");
    const std::string arguments(function.at("arguments").as_string());
    if (function.at("name") == "get") expect_fits(arguments);
    EXPECT_TRUE(json::parse(arguments).is_object());
    (function.at("name") == "get" ? has_get : has_put) = true;
    const json::value named = choice("/v1/chat/completions", tools + R"("tool_choice":{"type":"function","function":{"name":"put"}})");
    EXPECT_EQ(named.at("message").at("tool_calls").at(0).at("function").at("name"), "put");
  }
  EXPECT_TRUE(has_get && has_put);
  EXPECT_EQ(chat_text(tools + R"("tool_choice":"auto")"), "free");
  EXPECT_EQ(chat_text(tools + R"("tool_choice":"none")"), "free");
}

TEST_F(StructuredOutputTest, ToolChoiceForcesACallInTheFormOfTheFamily) {
  struct Family {
    const char* tokenizer;
    const char* parser;
    const char* end;
    const char* chat_template;
  };
  const Family families[] = {
      {"harmony", "openai", "<|return|>", "<|start|>user<|message|>{{ messages[0].content }}<|end|><|start|>assistant"},
      {"harmony", "gpt_oss", "<|return|>", "<|start|>user<|message|>x<|end|><|start|>assistant<|channel|>analysis<|message|>"},
      {"kimi", "kimi_k2", "<|im_end|>", "{{ messages[0].content }}"},
      {"deepseek", "deepseek_v3", "<｜end▁of▁sentence｜>", "{{ messages[0].content }}"},
      {"deepseek", "deepseek_v31", "<｜end▁of▁sentence｜>", "{{ messages[0].content }}"},
  };
  const std::string tools = R"("tools":[{"type":"function","function":{"name":"get","parameters":)" + std::string(kSchema) +
                            R"(}},{"type":"function","function":{"name":"put"}}],)";
  for (const Family& family : families) {
    use_family(family.tokenizer, family.parser, family.end, family.chat_template);
    start(true);
    std::size_t most = 0;
    for (int i = 0; i < 10; ++i) {
      const json::value any = choice("/v1/chat/completions", tools + R"("tool_choice":"required")");
      EXPECT_EQ(any.at("finish_reason").as_string(), "tool_calls") << family.parser;
      const json::array& calls = any.at("message").at("tool_calls").as_array();
      ASSERT_GE(calls.size(), 1u) << family.parser << any;
      most = std::max(most, calls.size());
      for (const json::value& call : calls) {
        const std::string arguments(call.at("function").at("arguments").as_string());
        if (call.at("function").at("name") == "get") expect_fits(arguments);
        EXPECT_TRUE(json::parse(arguments).is_object()) << family.parser;
      }
      const json::value named = choice("/v1/chat/completions", tools + R"("tool_choice":{"type":"function","function":{"name":"put"}})");
      ASSERT_EQ(named.at("message").at("tool_calls").as_array().size(), 1u) << family.parser << named;
      EXPECT_EQ(named.at("message").at("tool_calls").at(0).at("function").at("name"), "put") << family.parser;
    }
    EXPECT_EQ(most > 1, family.tokenizer != std::string_view("harmony")) << family.parser;
    // Other forms are those of the answer, behind the reasoning.
    for (int i = 0; i < 6; ++i) expect_fits(chat_text(R"("guided_json":)" + std::string(kSchema)));
  }
}

TEST_F(StructuredOutputTest, ArgumentsOfACallAreAlwaysAnObject) {
  start(true);
  for (const char* parameters :
       {"{}", "true", "null", R"({"description":"any"})", R"({"type":["object","null"],"properties":{"a":{"type":"integer"}}})"}) {
    for (int i = 0; i < 6; ++i) {
      const json::value call =
          choice("/v1/chat/completions", R"("tools":[{"type":"function","function":{"name":"f","parameters":)" + std::string(parameters) +
                                             R"(}}],"tool_choice":"required","parallel_tool_calls":false)");
      ASSERT_EQ(call.at("message").at("tool_calls").as_array().size(), 1u) << parameters << call;
      const std::string arguments(call.at("message").at("tool_calls").at(0).at("function").at("arguments").as_string());
      EXPECT_TRUE(json::parse(arguments).is_object()) << parameters << ": " << arguments;
    }
  }
}

TEST_F(StructuredOutputTest, MistakesAreNamed) {
  start(true);
  const std::string tools = R"("tools":[{"type":"function","function":{"name":"get"}}],)";
  const std::vector<std::tuple<std::string, int, const char*, const char*>> cases = {
      {R"("response_format":{"type":"xml"})", 400, "response_format", "'xml'"},
      {R"("response_format":{"type":"json_schema"})", 400, "response_format", "schema"},
      {R"("response_format":{"type":"json_schema","json_schema":{"schema":{"type":"array","uniqueItems":true}}})", 400,
       "response_format.json_schema.schema", "uniqueItems"},
      {R"("guided_json":{"type":"nonsense"})", 400, "guided_json", "guided_json.type"},
      {R"("guided_json":"{")", 400, "guided_json", "not a schema"},
      {R"("guided_json":7)", 400, "guided_json", "wanted a schema"},
      {R"("guided_regex":"(a")", 400, "guided_regex", "not closed"},
      {R"("guided_regex":"a{9000}{9}")", 400, "guided_regex", "quantifier"},
      {R"x("guided_regex":"(((a{999}){999}){999})")x", 400, "guided_regex", "states"},
      {R"("guided_choice":[])", 400, "guided_choice", "1 to"},
      {R"("guided_choice":[""])", 400, "guided_choice", "not empty"},
      {R"("guided_choice":[5])", 400, "guided_choice", "strings"},
      {R"("guided_choice":["a"],"guided_regex":"b")", 400, "guided_choice", "already"},
      {R"("guided_grammar":"root ::= x")", 400, "guided_grammar", "the name x is used and not defined"},
      {R"("guided_grammar":"root ::= root \"a\" | \"b\"")", 400, "guided_grammar", "refers to itself"},
      {R"("structured_outputs":{"structural_tag":{}})", 501, "structured_outputs.structural_tag", "not built"},
      {R"("guided_choice":["a"],"ignore_eos":true)", 400, "ignore_eos", "stop tokens"},
      {R"("guided_choice":["a"],"min_tokens":3)", 400, "min_tokens", "decides"},
      {R"("tool_choice":"required")", 400, "tool_choice", "no tools"},
      {tools + R"("tool_choice":"maybe")", 400, "tool_choice", "required"},
      {tools + R"("tool_choice":{"type":"function","function":{"name":"set"}})", 400, "tool_choice", "'set'"},
      {tools + R"("tool_choice":"required","guided_choice":["a"])", 400, "tool_choice", "guided_choice"},
  };
  for (const auto& [members, status, param, words] : cases) {
    const net::HttpReply reply = post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"Hi"}],)" + members + "}");
    ASSERT_EQ(reply.status, status) << members << reply.body;
    EXPECT_EQ(reply.json().at("error").at("param"), json::value(param)) << reply.body;
    EXPECT_NE(reply.body.find(words), std::string::npos) << reply.body;
  }
}

}  // namespace
}  // namespace prl::server
