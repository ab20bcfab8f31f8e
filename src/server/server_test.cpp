#include <gtest/gtest.h>

#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value_to.hpp>

#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/rng.hpp"
#include "net/http_client.hpp"
#include "net/io_runtime.hpp"
#include "net/run_claim.hpp"
#include "net/task_group.hpp"
#include "server/api_server.hpp"
#include "server/testing/scripted_backend.hpp"
#include "text/tokenizer_builder.hpp"

namespace prl::server {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;
using testing::ScriptedBackend;

constexpr const char* kReply = "Hello, w\xC3\xB6rld! \xF0\x9F\x98\x80 done";

class ServerTest : public ::testing::Test {
 protected:
  ServerTest() {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("prl-server-test-{}", static_cast<const void*>(this));
    std::filesystem::create_directories(folder_);
    ids_ = text::write_byte_level_tokenizer(folder_);
    tokenizer_ = std::make_shared<const text::Tokenizer>(text::Tokenizer::load(folder_));
    template_ = std::make_shared<const text::ChatTemplate>(text::ChatTemplate::load(folder_, *tokenizer_));
  }
  ~ServerTest() override {
    server_.reset();
    backend_.reset();
    std::filesystem::remove_all(folder_);
  }

  ScriptedBackend::Options backend_options() const {
    ScriptedBackend::Options options;
    options.vocab_size = ids_.vocab_size;
    options.end_id = ids_.im_end;
    return options;
  }
  void start(ApiOptions options = {}) { start(options, backend_options()); }
  void start(ApiOptions options, ScriptedBackend::Options backend) {
    options.port = 0;
    options.served_names = {"tiny", "alias/tiny"};
    backend_ = std::make_unique<ScriptedBackend>(backend, [this](const wire::GenerateRequest& request) { return script(request); });
    server_ = std::make_unique<ApiServer>(options, *backend_, tokenizer_, template_, renderer_);
    server_->start();
    net::HttpClient::Options client;
    client.timeout = 20s;
    client.max_retries = 0;
    client_ = std::make_unique<net::BlockingHttpClient>(client);
  }
  std::vector<std::int32_t> script(const wire::GenerateRequest& request) const {
    if (is_endless_) return std::vector<std::int32_t>(1'000'000, 65);
    std::string text = reply_;
    if (request.sampling.seed) text = fmt::format("seed {}", *request.sampling.seed);
    return tokenizer_->encode(text);
  }
  std::string url(std::string_view path) const { return fmt::format("http://127.0.0.1:{}{}", server_->port(), path); }
  net::HttpCall make_call(std::string_view path, std::string body, std::string key = {}) const {
    net::HttpCall call;
    call.method = "POST";
    call.url = url(path);
    call.body = std::move(body);
    if (!key.empty()) call.bearer = std::move(key);
    return call;
  }
  net::HttpReply post(std::string_view path, std::string body, std::string key = {}) {
    return client_->call(make_call(path, std::move(body), std::move(key)));
  }
  net::HttpReply get(std::string_view path) {
    net::HttpCall call;
    call.url = url(path);
    return client_->call(call);
  }
  json::value ok(std::string_view path, std::string body) {
    const net::HttpReply reply = post(path, std::move(body));
    EXPECT_EQ(reply.status, 200) << reply.body;
    return reply.status == 200 ? reply.json() : json::value(json::object());
  }
  std::vector<json::value> stream(std::string_view path, std::string body) {
    std::vector<json::value> out;
    const auto events = client_->read_sse(make_call(path, std::move(body)));
    EXPECT_FALSE(events.empty());
    for (std::size_t i = 0; i + 1 < events.size(); ++i) out.push_back(json::parse(events[i].data));
    if (!events.empty()) {
      EXPECT_EQ(events.back().data, "[DONE]");
    }
    return out;
  }
  template <typename Condition>
  static bool eventually(Condition condition) {
    for (const auto deadline = net::Clock::now() + 60s; net::Clock::now() < deadline; std::this_thread::sleep_for(100us))
      if (condition()) return true;
    return false;
  }
  static const json::value& choice(const json::value& reply, std::size_t i = 0) { return reply.at("choices").at(i); }

  std::filesystem::path folder_;
  text::ByteTokenizerIds ids_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::shared_ptr<const text::ChatTemplate> template_;
  std::shared_ptr<const text::Renderer> renderer_;
  std::string reply_ = kReply;
  bool is_endless_ = false;
  std::unique_ptr<ScriptedBackend> backend_;
  std::unique_ptr<ApiServer> server_;
  std::unique_ptr<net::BlockingHttpClient> client_;
};

constexpr const char* kChat = "/v1/chat/completions";
constexpr const char* kGenerate = "/inference/v1/generate";

TEST_F(ServerTest, AServerOfARunTakesWeightsFromThatRunAlone) {
  ApiOptions options;
  options.run_id = "first";
  start(options);
  EXPECT_EQ(get("/health").headers.get(net::kRunIdHeader), "first");
  EXPECT_EQ(get("/nowhere").headers.get(net::kRunIdHeader), "first");
  EXPECT_EQ(get("/version").json().at("run_id").as_string(), "first");
  const std::string update = fmt::format(R"({{"weight_dir":"{}","version":5}})", folder_.string());
  for (const char* run : {"", "second"}) {
    net::HttpCall call = make_call("/update_weights", update);
    if (*run != 0) call.headers.add(net::kRunIdHeader, run);
    const net::HttpReply refused = client_->call(call);
    EXPECT_EQ(refused.status, 421) << refused.body;
    EXPECT_NE(refused.body.find("belongs to run first"), std::string::npos) << refused.body;
    call.url = url("/reload_weights");
    EXPECT_EQ(client_->call(call).status, 421);
    EXPECT_EQ(backend_->stats().version.value, 0);
  }
  net::HttpCall own = make_call("/update_weights", update);
  own.headers.add(net::kRunIdHeader, "first");
  EXPECT_EQ(client_->call(own).status, 200);
  // Others may ask it for text, but not in the belief that it is theirs.
  const std::string chat = R"({"messages":[{"role":"user","content":"Hi"}]})";
  EXPECT_EQ(post(kChat, chat).status, 200);
  net::HttpCall mistaken = make_call(kChat, chat);
  mistaken.headers.add(net::kRunIdHeader, "second");
  EXPECT_EQ(client_->call(mistaken).status, 421);
}

TEST_F(ServerTest, AServerStartedByHandBelongsToTheFirstRunThatGivesItWeights) {
  start();
  const auto update = [&](const char* path, const char* run, int version) {
    net::HttpCall call = make_call(path, fmt::format(R"({{"weight_dir":"{}","version":{},"force":true}})", folder_.string(), version));
    if (*run != 0) call.headers.add(net::kClaimHeader, run);
    return client_->call(call);
  };
  EXPECT_EQ(update("/update_weights", "", 1).status, 200) << "nobody's server takes weights from anybody";
  EXPECT_EQ(update("/update_weights", "first", 2).status, 200);
  EXPECT_EQ(get("/version").json().at("claimed_by").as_string(), "first");
  for (const char* path : {"/update_weights", "/reload_weights"})
    for (const char* other : {"second", ""}) {
      const net::HttpReply refused = update(path, other, 3);
      EXPECT_EQ(refused.status, 421) << path << other << refused.body;
      EXPECT_NE(refused.body.find("run first"), std::string::npos) << refused.body;
      EXPECT_NE(refused.body.find("POST /release"), std::string::npos) << refused.body;
    }
  EXPECT_EQ(backend_->stats().version.value, 2);
  EXPECT_EQ(update("/update_weights", "first", 3).status, 200);
  EXPECT_EQ(update("/release", "second", 0).json().at("status").as_string(), "not_held");
  EXPECT_EQ(update("/update_weights", "second", 4).status, 421);
  EXPECT_EQ(update("/release", "first", 0).json().at("status").as_string(), "released");
  EXPECT_EQ(update("/update_weights", "second", 5).status, 200);
  EXPECT_EQ(update("/release", "", 0).json().at("status").as_string(), "released") << "an administrator's way out";
  EXPECT_EQ(update("/update_weights", "first", 6).status, 200);
}

TEST_F(ServerTest, AServerOfNoRunIsNotTakenForOneOfARun) {
  start();
  const std::string update = fmt::format(R"({{"weight_dir":"{}","version":5}})", folder_.string());
  net::HttpCall mistaken = make_call("/update_weights", update);
  mistaken.headers.add(net::kRunIdHeader, "second");
  EXPECT_EQ(client_->call(mistaken).status, 421);
  EXPECT_EQ(post("/update_weights", update).status, 200);
  EXPECT_EQ(get("/health").headers.find(net::kRunIdHeader), nullptr);
}

TEST_F(ServerTest, ChatReplyHasAllFieldsThatTrainersRead) {
  start();
  const json::value reply = ok(kChat, R"({"model":"tiny","messages":[{"role":"user","content":"Hi","tool_calls":null}],
    "logprobs":true,"top_logprobs":2,"return_token_ids":true,"unknown_key":{"x":1},"user":"me"})");
  EXPECT_EQ(reply.at("object").as_string(), "chat.completion");
  EXPECT_TRUE(reply.at("id").as_string().starts_with("chatcmpl-"));
  EXPECT_EQ(reply.at("model").as_string(), "tiny");
  EXPECT_EQ(choice(reply).at("message").at("content").as_string(), kReply);
  EXPECT_EQ(choice(reply).at("message").at("role").as_string(), "assistant");
  EXPECT_EQ(choice(reply).at("finish_reason").as_string(), "stop");
  EXPECT_TRUE(choice(reply).at("stop_reason").is_null());
  text::RenderOptions render;
  render.add_generation_prompt = true;
  const auto prompt = tokenizer_->encode(template_->render(json::parse(R"([{"role":"user","content":"Hi"}])").as_array(), render));
  EXPECT_EQ(json::value_to<std::vector<std::int32_t>>(reply.at("prompt_token_ids")), prompt);
  auto want = tokenizer_->encode(kReply);
  want.push_back(ids_.im_end);
  EXPECT_EQ(json::value_to<std::vector<std::int32_t>>(choice(reply).at("token_ids")), want);
  const json::array& content = choice(reply).at("logprobs").at("content").as_array();
  ASSERT_EQ(content.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(static_cast<float>(content[i].at("logprob").as_double()), ScriptedBackend::logprob_of(want[i]));
    EXPECT_EQ(content[i].at("top_logprobs").as_array().size(), 2u);
    EXPECT_TRUE(content[i].at("token").is_string());
    EXPECT_TRUE(content[i].at("bytes").is_array());
  }
  EXPECT_EQ(reply.at("usage").at("prompt_tokens").as_int64(), static_cast<std::int64_t>(prompt.size()));
  EXPECT_EQ(reply.at("usage").at("completion_tokens").as_int64(), static_cast<std::int64_t>(want.size()));
  EXPECT_EQ(reply.at("usage").at("total_tokens").as_int64(), static_cast<std::int64_t>(want.size() + prompt.size()));
  EXPECT_FALSE(reply.at("usage").as_object().contains("prompt_tokens_details"));
}

TEST_F(ServerTest, ChatStreamsTheSameText) {
  start();
  const auto chunks = stream(kChat, R"({"model":"alias/tiny","messages":[{"role":"user","content":"Hi"}],"stream":true,
    "stream_options":{"include_usage":true},"logprobs":true,"return_token_ids":true})");
  std::string text;
  std::vector<std::int32_t> ids;
  std::size_t num_logprobs = 0;
  std::string finish;
  for (const auto& chunk : chunks) {
    EXPECT_EQ(chunk.at("object").as_string(), "chat.completion.chunk");
    if (chunk.at("choices").as_array().empty()) {
      EXPECT_GT(chunk.at("usage").at("completion_tokens").as_int64(), 0);
      continue;
    }
    const json::object& delta = choice(chunk).at("delta").as_object();
    if (const auto* content = delta.if_contains("content")) text += std::string(content->as_string());
    if (const auto* tokens = choice(chunk).as_object().if_contains("token_ids"))
      for (const auto& id : tokens->as_array()) ids.push_back(static_cast<std::int32_t>(id.as_int64()));
    if (choice(chunk).at("logprobs").is_object()) num_logprobs += choice(chunk).at("logprobs").at("content").as_array().size();
    if (choice(chunk).at("finish_reason").is_string()) finish = choice(chunk).at("finish_reason").as_string();
  }
  EXPECT_EQ(text, kReply);
  EXPECT_EQ(finish, "stop");
  auto want = tokenizer_->encode(kReply);
  want.push_back(ids_.im_end);
  EXPECT_EQ(ids, want);
  EXPECT_EQ(num_logprobs, want.size());
  EXPECT_TRUE(chunks.back().at("choices").as_array().empty());
  EXPECT_TRUE(chunks.front().as_object().contains("prompt_token_ids"));
}

TEST_F(ServerTest, ToolCallsAndReasoningAreSplitAlikeInBothForms) {
  text::RendererOptions renderer;
  renderer.name = "default";
  renderer.tool_parser = "hermes";
  renderer.reasoning_parser = "think";
  renderer_ = text::make_renderer(renderer, tokenizer_, template_);
  reply_ = "<think>\nhmm\n</think>\n\nSure. <tool_call>\n{\"name\": \"get\", \"arguments\": {\"x\": 1}}\n</tool_call>";
  ApiOptions options;
  options.enable_tools = true;
  options.enable_reasoning = true;
  ScriptedBackend::Options backend = backend_options();
  backend.max_model_len = 4096;
  start(options, backend);
  const std::string body = R"({"messages":[{"role":"user","content":"Hi"}],
    "tools":[{"type":"function","function":{"name":"get","parameters":{"type":"object","properties":{"x":{"type":"integer"}}}}}],"stream":)";
  const json::value reply = ok(kChat, body + "false}");
  const json::object& message = choice(reply).at("message").as_object();
  EXPECT_EQ(message.at("reasoning_content").as_string(), "hmm\n");
  EXPECT_EQ(message.at("content").as_string(), "Sure. ");
  ASSERT_EQ(message.at("tool_calls").as_array().size(), 1u);
  const json::value& call = message.at("tool_calls").at(0);
  EXPECT_EQ(call.at("type").as_string(), "function");
  EXPECT_EQ(call.at("function").at("name").as_string(), "get");
  EXPECT_EQ(json::parse(call.at("function").at("arguments").as_string()), json::parse(R"({"x":1})"));
  EXPECT_EQ(choice(reply).at("finish_reason").as_string(), "tool_calls");
  std::string reasoning;
  std::string content;
  std::string finish;
  json::array calls;
  for (const auto& chunk : stream(kChat, body + "true}")) {
    const json::object& delta = choice(chunk).at("delta").as_object();
    if (const auto* text = delta.if_contains("content")) content += std::string(text->as_string());
    if (const auto* text = delta.if_contains("reasoning_content")) reasoning += std::string(text->as_string());
    if (const auto* list = delta.if_contains("tool_calls"))
      for (const json::value& piece : list->as_array()) {
        EXPECT_EQ(piece.at("index").to_number<int>(), 0);
        if (calls.empty())
          calls.push_back(piece);
        else
          calls[0].at("function").at("arguments") = std::string(calls[0].at("function").at("arguments").as_string()) +
                                                    std::string(piece.at("function").at("arguments").as_string());
      }
    if (choice(chunk).at("finish_reason").is_string()) finish = choice(chunk).at("finish_reason").as_string();
  }
  EXPECT_EQ(reasoning, "hmm\n");
  EXPECT_EQ(content, "Sure. ");
  EXPECT_EQ(finish, "tool_calls");
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0].at("index").to_number<int>(), 0);
  EXPECT_EQ(calls[0].at("function"), call.at("function"));
  // Markup that is no call stays content, and nothing is parsed when the client offers no tools.
  const json::value none = ok(kChat, R"({"messages":[{"role":"user","content":"Hi"}]})");
  EXPECT_NE(std::string(choice(none).at("message").at("content").as_string()).find("<tool_call>"), std::string::npos);
  EXPECT_EQ(choice(none).at("finish_reason").as_string(), "stop");
  EXPECT_EQ(post(kChat, R"({"messages":[{"role":"user","content":"Hi"}],"tool_choice":"required"})").status, 400);
}

TEST_F(ServerTest, StopStringsEndTheTextInBothForms) {
  start();
  const std::string body = R"({"messages":[{"role":"user","content":"Hi"}],"stop":["rld","nothing"],"stream":)";
  const json::value reply = ok(kChat, body + "false}");
  EXPECT_EQ(choice(reply).at("message").at("content").as_string(), "Hello, w\xC3\xB6");
  EXPECT_EQ(choice(reply).at("finish_reason").as_string(), "stop");
  EXPECT_EQ(choice(reply).at("stop_reason").as_string(), "rld");
  std::string text;
  for (const auto& chunk : stream(kChat, body + "true}"))
    if (const auto* content = choice(chunk).at("delta").as_object().if_contains("content")) text += std::string(content->as_string());
  EXPECT_EQ(text, "Hello, w\xC3\xB6");
  const json::value with = ok(kChat, R"({"messages":[{"role":"user","content":"Hi"}],"stop":"rld","include_stop_str_in_output":true})");
  EXPECT_EQ(choice(with).at("message").at("content").as_string(), "Hello, w\xC3\xB6rld");
  // The stop string lies before min_tokens, so it does not count.
  const json::value late = ok(kChat, R"({"messages":[{"role":"user","content":"Hi"}],"stop":"ell","min_tokens":10})");
  EXPECT_EQ(choice(late).at("message").at("content").as_string(), kReply);
}

TEST_F(ServerTest, StopTokensLimitsAndSeeds) {
  start();
  const auto comma = tokenizer_->encode(",").front();
  const json::value stopped =
      ok("/v1/completions", fmt::format(R"({{"prompt":"x","max_tokens":50,"stop_token_ids":[{}],"return_token_ids":true}})", comma));
  EXPECT_EQ(choice(stopped).at("text").as_string(), "Hello");
  EXPECT_EQ(choice(stopped).at("stop_reason").as_int64(), comma);
  EXPECT_EQ(choice(stopped).at("token_ids").as_array().size(), 6u);
  EXPECT_TRUE(choice(stopped).as_object().contains("prompt_token_ids"));
  const json::value cut = ok("/v1/completions", R"({"prompt":"x"})");
  EXPECT_EQ(choice(cut).at("finish_reason").as_string(), "length");
  EXPECT_EQ(cut.at("usage").at("completion_tokens").as_int64(), 16);
  const json::value many = ok(kChat, R"({"messages":[{"role":"user","content":"Hi"}],"n":3,"seed":7})");
  ASSERT_EQ(many.at("choices").as_array().size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(choice(many, i).at("index").as_int64(), static_cast<std::int64_t>(i));
    EXPECT_EQ(choice(many, i).at("message").at("content").as_string(), fmt::format("seed {}", 7 + i));
  }
  const json::value endless = ok(kChat, R"({"messages":[{"role":"user","content":"Hi"}],"ignore_eos":true,"max_completion_tokens":40})");
  EXPECT_EQ(endless.at("usage").at("completion_tokens").as_int64(), 40);
  const json::value clamped = ok(kChat, R"({"messages":[{"role":"user","content":"Hi"}],"ignore_eos":true,"max_tokens":100000})");
  EXPECT_EQ(clamped.at("usage").at("total_tokens").as_int64(), 256);
  EXPECT_EQ(choice(clamped).at("finish_reason").as_string(), "length");
}

TEST_F(ServerTest, CompletionsTakeEveryPromptForm) {
  start();
  const json::value two = ok("/v1/completions", R"({"prompt":["a","b"],"n":2,"max_tokens":60,"logprobs":1,"echo":false})");
  ASSERT_EQ(two.at("choices").as_array().size(), 4u);
  EXPECT_EQ(choice(two, 3).at("index").as_int64(), 3);
  const json::object& logprobs = choice(two).at("logprobs").as_object();
  const std::size_t count = logprobs.at("tokens").as_array().size();
  EXPECT_EQ(count, tokenizer_->encode(kReply).size() + 1);
  EXPECT_EQ(logprobs.at("token_logprobs").as_array().size(), count);
  EXPECT_EQ(logprobs.at("top_logprobs").as_array().size(), count);
  EXPECT_EQ(logprobs.at("text_offset").as_array().at(3).as_int64(), 3);
  EXPECT_EQ(two.at("usage").at("prompt_tokens").as_int64(), 2);
  const json::value ids = ok("/v1/completions", R"({"prompt":[65,66],"max_tokens":2,"echo":true})");
  EXPECT_EQ(choice(ids).at("text").as_string(), tokenizer_->decode(std::vector<std::int32_t>{65, 66}) + "He");
  EXPECT_EQ(ok("/v1/completions", R"({"prompt":[[65],[66,67]],"max_tokens":2})").at("choices").as_array().size(), 2u);
  std::string text;
  for (const auto& chunk : stream("/v1/completions", R"({"prompt":"a","max_tokens":60,"stream":true})"))
    text += std::string(choice(chunk).at("text").as_string());
  EXPECT_EQ(text, kReply);
}

// What evaluation harnesses ask for: log-probabilities of a given text.
TEST_F(ServerTest, EchoedPromptsHaveLogprobs) {
  start();
  const json::value both = ok("/v1/completions", R"({"prompt":[[65,66,67],[68]],"max_tokens":1,"logprobs":1,"echo":true,"n":2})");
  ASSERT_EQ(both.at("choices").as_array().size(), 4u);
  for (const std::size_t i : {0u, 1u}) {  // the second choice of a prompt shows the prompt too
    const json::object& logprobs = choice(both, i).at("logprobs").as_object();
    const json::array& values = logprobs.at("token_logprobs").as_array();
    ASSERT_EQ(values.size(), 4u) << "three of the prompt, one drawn";
    EXPECT_TRUE(values.at(0).is_null()) << "nothing predicts the first token";
    EXPECT_EQ(static_cast<float>(values.at(1).as_double()), ScriptedBackend::logprob_of(66));
    EXPECT_EQ(static_cast<float>(values.at(2).as_double()), ScriptedBackend::logprob_of(67));
    EXPECT_TRUE(logprobs.at("top_logprobs").at(0).is_null());
    EXPECT_EQ(logprobs.at("top_logprobs").at(1).as_object().size(), 1u);
    EXPECT_EQ(logprobs.at("tokens").at(0).as_string(), tokenizer_->decode(std::vector<std::int32_t>{65}));
    EXPECT_EQ(logprobs.at("text_offset").at(3).as_int64(), 3);
    EXPECT_TRUE(choice(both, i).at("prompt_logprobs").is_null()) << "that member is another question";
  }
  const json::value none = ok("/v1/completions", R"({"prompt":[65,66],"max_tokens":0,"logprobs":0,"echo":true})");
  EXPECT_EQ(choice(none).at("logprobs").at("token_logprobs").as_array().size(), 2u);
  EXPECT_EQ(choice(none).at("text").as_string(), tokenizer_->decode(std::vector<std::int32_t>{65, 66}));
  EXPECT_EQ(choice(none).at("finish_reason").as_string(), "length");
  EXPECT_EQ(none.at("usage").at("completion_tokens").as_int64(), 0);
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"a","max_tokens":0})").status, 400) << "without echo there would be nothing to say";
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"a","logprobs":1,"echo":true,"stream":true})").status, 400);
}

TEST_F(ServerTest, GenerateIsTokensInTokensOut) {
  start();
  net::HttpCall call = make_call(kGenerate, R"({"model":"tiny","token_ids":[65,66,67,68,69],"cache_salt":"7","priority":3,
    "sampling_params":{"temperature":0.5,"logprobs":1,"stop_token_ids":[],"skip_special_tokens":false,"reasoning_effort":"high","prompt_logprobs":1}})");
  call.headers.add("X-Session-ID", "trace-1");
  const net::HttpReply raw = client_->call(call);
  ASSERT_EQ(raw.status, 200) << raw.body;
  const json::value reply = raw.json();
  auto want = tokenizer_->encode(kReply);
  want.push_back(ids_.im_end);
  EXPECT_EQ(json::value_to<std::vector<std::int32_t>>(choice(reply).at("token_ids")), want);
  const json::array& content = choice(reply).at("logprobs").at("content").as_array();
  ASSERT_EQ(content.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(content[i].at("token").as_string(), fmt::format("token_id:{}", want[i]));
    EXPECT_EQ(content[i].at("token_id").as_int64(), want[i]);
    EXPECT_EQ(static_cast<float>(content[i].at("logprob").as_double()), ScriptedBackend::logprob_of(want[i]));
  }
  EXPECT_EQ(choice(reply).at("policy_versions").as_array().size(), want.size());
  EXPECT_TRUE(reply.at("request_id").as_string().starts_with("generate-tokens-"));
  const json::array& prompt = reply.at("prompt_logprobs").as_array();
  ASSERT_EQ(prompt.size(), 5u);
  EXPECT_TRUE(prompt[0].is_null());
  EXPECT_EQ(static_cast<float>(prompt[1].at("66").at("logprob").as_double()), ScriptedBackend::logprob_of(66));
  EXPECT_EQ(prompt[1].at("66").at("rank").as_int64(), ScriptedBackend::rank_of(66)) << "also outside the list of the likeliest";
  EXPECT_EQ(reply.at("usage").at("prompt_tokens_details").at("cached_tokens").as_int64(), 4);
  const wire::GenerateRequest seen = backend_->last_request();
  EXPECT_EQ(seen.session_id, "trace-1");
  EXPECT_EQ(seen.cache_salt, "7");
  EXPECT_EQ(seen.priority, 3);
  EXPECT_EQ(seen.sampling.max_tokens, 256 - 5);
  EXPECT_EQ(raw.body.find(": "), std::string::npos);  // compact, as a fast path of clients expects
  std::size_t num_streamed = 0;
  for (const auto& chunk : stream(kGenerate, R"({"token_ids":[65],"stream":true})"))
    num_streamed += choice(chunk).at("token_ids").as_array().size();
  EXPECT_EQ(num_streamed, want.size());
}

TEST_F(ServerTest, WrongFieldsAreNamed) {
  start();
  const std::vector<std::tuple<const char*, const char*, int, const char*>> cases = {
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"temperature":"hot"})", 400, "temperature"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"temperature":3})", 400, "temperature"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"top_p":0})", 400, "top_p"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"n":0})", 400, "n"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"max_tokens":1.5})", 400, "max_tokens"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"stop":[1]})", 400, "stop"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"logprobs":5})", 400, "logprobs"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"top_logprobs":5})", 400, "top_logprobs"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"logit_bias":{"x":1}})", 400, "logit_bias"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"logit_bias":{"5":"y"}})", 400, "logit_bias.5"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"stream_options":{}})", 400, "stream_options"},
      {kChat, R"({"messages":[{"role":"user","content":"x"}],"min_tokens":5,"max_tokens":2})", 400, "min_tokens"},
      {kChat, R"({"messages":"x"})", 400, "messages"},
      {kChat, R"({"messages":[]})", 400, "messages"},
      {kChat, R"({"messages":[5]})", 400, "messages"},
      {kChat, R"({"messages":[{"content":"x"}]})", 400, "messages"},
      {kChat, R"({"model":"gpt-4","messages":[{"role":"user","content":"x"}]})", 404, "model"},
      {kChat, R"({"model":5,"messages":[{"role":"user","content":"x"}]})", 400, "model"},
      {kChat, "[1]", 400, "body"},
      {kChat, "{", 400, "body"},
      {kChat, "", 400, "body"},
      {kGenerate, R"({"token_ids":[65,"x"]})", 400, "token_ids"},
      {kGenerate, R"({"token_ids":[65,99999]})", 400, "token_ids"},
      {kGenerate, R"({"token_ids":[-1]})", 400, "token_ids"},
      {kGenerate, R"({"token_ids":[]})", 400, "prompt"},
      {kGenerate, R"({"token_ids":[65],"sampling_params":{"top_k":"x"}})", 400, "sampling_params.top_k"},
      {kGenerate, R"({"token_ids":[65],"sampling_params":[]})", 400, "sampling_params"},
      {kGenerate, R"({"token_ids":[65],"features":{}})", 400, "features"},
      {kGenerate, R"({"token_ids":[65],"content_parts":[{}]})", 501, "content_parts"},
      {"/v1/completions", R"({"prompt":{}})", 400, "prompt"},
      {"/v1/completions", R"({})", 400, "prompt"},
      {"/tokenize", R"({"prompt":5})", 400, "prompt"},
      {"/detokenize", R"({"tokens":"x"})", 400, "tokens"},
      {"/update_weights", R"({})", 400, "weight_dir"},
  };
  for (const auto& [path, body, status, param] : cases) {
    const net::HttpReply reply = post(path, body);
    ASSERT_EQ(reply.status, status) << body << " -> " << reply.body;
    const json::value error = reply.json().at("error");
    EXPECT_EQ(error.at("param"), json::value(param)) << reply.body;
    EXPECT_EQ(error.at("code").as_int64(), status);
    EXPECT_EQ(reply.body.find("context length"), std::string::npos) << reply.body;
  }
}

TEST_F(ServerTest, WhatEachChoiceCopiesIsBounded) {
  start();
  json::object biases;
  for (int i = 0; i < 4097; ++i) biases[std::to_string(i)] = 1;
  const std::string many = json::serialize(biases), longest(16 << 10, 'x');
  EXPECT_EQ(post("/v1/completions", fmt::format(R"({{"prompt":"a","n":2,"stop":"{}"}})", longest)).status, 200);
  for (const auto& [body, param] : {std::pair(fmt::format(R"({{"prompt":"a","stop":["x","{}"]}})", longest), "stop"),
                                    std::pair(fmt::format(R"({{"prompt":"a","logit_bias":{}}})", many), "logit_bias")}) {
    const net::HttpReply reply = post("/v1/completions", body);
    EXPECT_EQ(reply.status, 400);
    EXPECT_NE(reply.body.find(fmt::format(R"("param":"{}")", param)), std::string::npos) << reply.body.substr(0, 200);
  }
}

TEST_F(ServerTest, DamagedBodiesNeverBreakTheServer) {
  ScriptedBackend::Options backend = backend_options();
  backend.max_model_len = 2048;
  start({}, backend);
  const std::vector<std::pair<const char*, std::string>> seeds = {
      {kChat,
       R"({"model":"tiny","messages":[{"role":"user","content":[{"type":"text","text":"Hi"}]},{"role":"assistant","content":null}],"n":2,
        "stop":["a"],"logit_bias":{"5":1.5},"max_tokens":4,"logprobs":true,"top_logprobs":2,"tools":[{"type":"function","function":{"name":"f"}}]})"},
      {kGenerate, R"({"token_ids":[65,66],"sampling_params":{"max_tokens":4,"logprobs":1,"stop_token_ids":[3],"min_p":0.5,"seed":1}})"},
      {"/v1/completions", R"({"prompt":["a",[65]],"max_tokens":4,"logprobs":2,"echo":false,"best_of":1})"},
      {"/tokenize", R"({"prompt":"abc","add_special_tokens":true})"},
  };
  // Bytes, and pieces of JSON that fit where other pieces were.
  const std::vector<std::string> pieces = {"null", "-1", "1e999", "\"\"", "[]", "{}", "true", "\"\\ud800\"", "99999999999999999999",
                                           "\xff", "[[", "0.5"};
  Rng rng(11);
  for (int i = 0; i < 400; ++i) {
    auto [path, body] = seeds[rng.next_below(seeds.size())];
    for (std::uint64_t k = rng.next_below(3) + 1; k > 0; --k) {
      const std::size_t place = rng.next_below(body.size());
      if (rng.next_below(2) == 0) {
        body[place] = static_cast<char>(rng.next_below(256));
      } else {
        const std::size_t end = std::min(body.find_first_of(",}]", place), body.size());
        body.replace(place, end - place, pieces[rng.next_below(pieces.size())]);
      }
    }
    const int status = post(path, body).status;
    EXPECT_TRUE(status == 200 || status == 400 || status == 404 || status == 501) << status << " " << body;
  }
  EXPECT_TRUE(eventually([&] { return backend_->stats().num_running == 0; }));
}

TEST_F(ServerTest, OverlongPromptsGetTheCanonicalError) {
  start();
  const std::string long_text(400, 'a');
  for (const auto& [path, body] :
       std::vector<std::pair<std::string, std::string>>{{kChat, R"({"messages":[{"role":"user","content":")" + long_text + "\"}]}"},
                                                        {"/v1/completions", R"({"prompt":")" + long_text + "\"}"}}) {
    const net::HttpReply reply = post(path, body);
    EXPECT_EQ(reply.status, 400);
    const json::value error = reply.json().at("error");
    EXPECT_TRUE(error.at("message").as_string().starts_with("This model's maximum context length is 256 tokens"));
    EXPECT_EQ(error.at("type").as_string(), "BadRequestError");
    EXPECT_EQ(error.at("param").as_string(), "input_tokens");
    EXPECT_EQ(error.at("code").as_int64(), 400);
  }
}

TEST_F(ServerTest, ExtraBodyIsMergedBelowTheTopLevel) {
  start();
  ok(kChat, R"({"messages":[{"role":"user","content":"x"}],"temperature":0.5,"max_tokens":3,"max_completion_tokens":9,
     "extra_body":{"temperature":0.9,"top_k":5,"min_p":0.25,"cache_salt":"s","repetition_penalty":1.5}})");
  const wire::GenerateRequest seen = backend_->last_request();
  EXPECT_EQ(seen.sampling.temperature, 0.5f);
  EXPECT_EQ(seen.sampling.top_k, 5);
  EXPECT_EQ(seen.sampling.min_p, 0.25f);
  EXPECT_EQ(seen.sampling.repetition_penalty, 1.5f);
  EXPECT_EQ(seen.sampling.max_tokens, 3);
  EXPECT_EQ(seen.cache_salt, "s");
}

TEST_F(ServerTest, TokensRouteTokenizeAndDetokenize) {
  start();
  const json::value chat = ok("/tokenize", R"({"messages":[{"role":"user","content":"Hi"}],"return_token_strs":true})");
  EXPECT_EQ(chat.at("count").as_int64(), static_cast<std::int64_t>(chat.at("tokens").as_array().size()));
  EXPECT_EQ(chat.at("token_strs").as_array().front().as_string(), "<|im_start|>");
  EXPECT_EQ(chat.at("max_model_len").as_int64(), 256);
  const json::value plain = ok("/tokenize", R"({"prompt":"abc"})");
  EXPECT_EQ(ok("/detokenize", fmt::format(R"({{"tokens":{}}})", json::serialize(plain.at("tokens")))).at("prompt").as_string(), "abc");
  ok("/v1/chat/completions/tokens", R"({"messages":[{"role":"user","content":"Hi"}],"tokens":[65,66,67]})");
  EXPECT_EQ(backend_->last_request().prompt_ids, (std::vector<std::int32_t>{65, 66, 67}));
}

TEST_F(ServerTest, InfoAndMetrics) {
  start();
  const json::value models = get("/v1/models").json();
  EXPECT_EQ(models.at("data").at(0).at("id").as_string(), "tiny");
  EXPECT_EQ(models.at("data").at(0).at("max_model_len").as_int64(), 256);
  EXPECT_EQ(get("/v1/models/alias/tiny").json().at("id").as_string(), "alias/tiny");
  EXPECT_EQ(get("/v1/models/alias%2Ftiny").json().at("id").as_string(), "alias/tiny") << "as OpenAI's client writes it";
  const auto unknown = get("/v1/models/other");
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(unknown.json().at("error").at("message").as_string(), "The model `other` does not exist.");
  EXPECT_EQ(get("/health").status, 200);
  EXPECT_EQ(get("/ping").status, 200);
  EXPECT_EQ(get("/version").json().at("policy_version").as_int64(), 0);
  EXPECT_EQ(get("/liveness").body, R"({"status":"ok"})");
  ok(kChat, R"({"messages":[{"role":"user","content":"x"}]})");
  const std::string page = get("/metrics").body;
  for (const char* name :
       {"vllm:num_requests_running{", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc{", "vllm:num_preemptions_total{",
        "vllm:prompt_tokens_total{", "vllm:generation_tokens_total{", "vllm:prefix_cache_queries_total{", "vllm:prefix_cache_hits_total{",
        "vllm:time_to_first_token_seconds_bucket{", "vllm:e2e_request_latency_seconds_count{", "finished_reason=\"stop\"} 1"})
    EXPECT_NE(page.find(name), std::string::npos) << name;
  EXPECT_NE(page.find("vllm:time_to_first_token_seconds_count{engine=\"0\",model_name=\"tiny\"} 1"), std::string::npos) << page;
  EXPECT_EQ(page.find("spec_decode"), std::string::npos) << "it is off";
  engine::EngineStats drafts;
  drafts.max_draft_tokens = 4;
  drafts.num_drafts = 3;
  drafts.num_draft_tokens = 10;
  drafts.num_accepted_tokens = 7;
  backend_->set_stats(drafts);
  const std::string later = get("/metrics").body;
  EXPECT_NE(later.find("vllm:spec_decode_num_drafts_total{engine=\"0\",model_name=\"tiny\"} 3"), std::string::npos) << later;
  EXPECT_NE(later.find("vllm:spec_decode_num_draft_tokens_total{engine=\"0\",model_name=\"tiny\"} 10"), std::string::npos);
  EXPECT_NE(later.find("vllm:spec_decode_num_accepted_tokens_total{engine=\"0\",model_name=\"tiny\"} 7"), std::string::npos);
  backend_->set_alive(false);
  EXPECT_EQ(get("/health").status, 503);
  EXPECT_EQ(get("/liveness").body, R"({"status":"engine_unresponsive"})");
}

TEST_F(ServerTest, KeysGuardRoutes) {
  ApiOptions options;
  options.api_key = "secret";
  options.admin_api_key = "root";
  start(options);
  const std::string body = R"({"messages":[{"role":"user","content":"x"}]})";
  EXPECT_EQ(post(kChat, body).status, 401);
  EXPECT_EQ(post(kChat, body, "wrong!").status, 401);
  EXPECT_EQ(post(kChat, body, "secret").status, 200);
  EXPECT_EQ(get("/v1/models").status, 401);
  EXPECT_EQ(get("/health").status, 200);
  EXPECT_EQ(get("/metrics").status, 200);
  for (const char* route : {"/pause", "/resume", "/update_weights", "/load_lora_adapter", "/v1/unload_lora_adapter"})
    EXPECT_EQ(post(route, "{}", "secret").status, 403) << route << ": a key for sampling";
  EXPECT_EQ(post("/resume", "", "root").status, 200);
}

TEST_F(ServerTest, PauseHoldsRequestsAndUpdatesChangeTheVersion) {
  start();
  EXPECT_EQ(post("/pause?mode=keep&clear_cache=false", "").body, R"({"status":"paused"})");
  net::IoRuntime runtime(1);
  net::HttpClient client(runtime.executor(), {});
  net::TaskGroup group(runtime.executor(), "held");
  std::atomic<int> num_done{0};
  struct Call {
    static net::asio::awaitable<void> run(net::HttpClient& http, net::HttpCall call, std::atomic<int>& done) {
      auto calling = http.call(std::move(call));
      const net::HttpReply reply = co_await std::move(calling);
      const auto version = reply.json().at("policy_version").at("end").as_int64();
      if (reply.status == 200 && version == 7) ++done;
    }
  };
  for (int i = 0; i < 20; ++i)
    group.spawn("call", Call::run(client, make_call(kChat, R"({"messages":[{"role":"user","content":"x"}]})"), num_done));
  ASSERT_TRUE(eventually([&] { return backend_->stats().num_waiting == 20; }));
  EXPECT_EQ(num_done, 0);
  const json::value updated = ok("/update_weights", fmt::format(R"({{"weight_dir":"{}","version":5}})", folder_.string()));
  EXPECT_EQ(updated.at("status").as_string(), "ok");
  EXPECT_EQ(updated.at("policy_version").as_int64(), 5);
  EXPECT_EQ(updated.at("checksum").as_string(), "0000000000abcdef");
  EXPECT_EQ(post("/update_weights", R"({"weight_dir":"/nowhere"})").status, 404);
  // From a trainer's memory: named by the request, or once for all.
  EXPECT_EQ(post("/update_weights", R"({"version":6})").status, 400);
  EXPECT_EQ(post("/update_weights", R"({"store":"file:/tmp/x","version":6})").status, 400);
  EXPECT_EQ(post("/update_weights", R"({"store":"tcp://node0:29501"})").status, 400);
  ok("/update_weights", R"({"store":"tcp://node0:29501","version":6})");
  EXPECT_EQ(backend_->last_store, "tcp://node0:29501");
  EXPECT_EQ(post("/init_broadcaster", R"({"host":"node 1","port":29502})").status, 400);
  EXPECT_EQ(post("/init_broadcaster", R"({"host":"node1"})").status, 400);
  EXPECT_EQ(ok("/init_broadcaster", R"({"host":"node1","port":29502,"timeout":60})").at("status").as_string(), "initialized");
  EXPECT_EQ(ok("/update_weights", R"({"version":7})").at("policy_version").as_int64(), 7);
  EXPECT_EQ(backend_->last_store, "tcp://node1:29502");
  EXPECT_EQ(post("/resume", "").body, R"({"status":"resumed"})");
  EXPECT_TRUE(group.join_blocking(10s));
  EXPECT_EQ(num_done, 20);
  EXPECT_EQ(ok("/reload_weights", "{}").at("policy_version").as_int64(), 0);
  EXPECT_EQ(post("/reset_prefix_cache", "").status, 200);
  EXPECT_EQ(backend_->num_resets, 1);
}

TEST_F(ServerTest, FullQueueIs429AndLeavingClientsCancel) {
  is_endless_ = true;
  ScriptedBackend::Options backend = backend_options();
  backend.max_model_len = 1'000'000;
  backend.max_running = 2;
  backend.max_queued = 3;
  backend.step_time = std::chrono::microseconds(500);
  start({}, backend);
  net::IoRuntime runtime(1);
  net::HttpClient client(runtime.executor(), {});
  net::TaskGroup group(runtime.executor(), "calls");
  struct Call {
    static net::asio::awaitable<void> run(net::HttpClient& http, net::HttpCall call) {
      auto calling = http.call(std::move(call));
      co_await std::move(calling);
    }
  };
  const std::string body = R"({"messages":[{"role":"user","content":"x"}]})";
  for (int i = 0; i < 2; ++i) group.spawn("call", Call::run(client, make_call(kChat, body)));
  ASSERT_TRUE(eventually([&] { return backend_->stats().num_running == 2; }));
  for (int i = 0; i < 3; ++i) group.spawn("call", Call::run(client, make_call(kChat, body)));
  ASSERT_TRUE(eventually([&] { return backend_->stats().num_waiting == 3; }));
  const net::HttpReply full = post(kChat, body);
  EXPECT_EQ(full.status, 429);
  EXPECT_EQ(full.json().at("error").at("type").as_string(), "RateLimitError");
  group.cancel();
  EXPECT_TRUE(group.join_blocking(5s));
  EXPECT_TRUE(eventually([&] { return backend_->stats().num_running == 0 && backend_->stats().num_waiting == 0; }));
  EXPECT_EQ(backend_->num_cancels(), 5);
  EXPECT_EQ(backend_->stats().num_finished_abort, 5);
}

TEST_F(ServerTest, RequestTimeoutEndsTheRequest) {
  is_endless_ = true;
  ScriptedBackend::Options backend = backend_options();
  backend.max_model_len = 1'000'000;
  backend.step_time = std::chrono::microseconds(500);
  ApiOptions options;
  options.request_timeout = 50ms;
  start(options, backend);
  EXPECT_EQ(post(kChat, R"({"messages":[{"role":"user","content":"x"}]})").status, 504);
  const auto events = client_->read_sse(make_call(kChat, R"({"messages":[{"role":"user","content":"x"}],"stream":true})"));
  ASSERT_GE(events.size(), 2u);
  EXPECT_NE(events[events.size() - 2].data.find("\"code\":504"), std::string::npos);
  EXPECT_TRUE(eventually([&] { return backend_->stats().num_running == 0; }));
}

TEST_F(ServerTest, RequestTimeoutEndsAStreamThatNeverPauses) {
  is_endless_ = true;
  ScriptedBackend::Options backend = backend_options();
  backend.max_model_len = 1'000'000;
  backend.max_running = 64;
  backend.step_time = std::chrono::microseconds(1);  // 64 tokens at a time come faster than they are written
  ApiOptions options;
  options.request_timeout = 50ms;
  start(options, backend);
  const auto events = client_->read_sse(
      make_call(kChat, R"({"messages":[{"role":"user","content":"x"}],"stream":true,"logprobs":true,"n":64,"max_tokens":20000})"));
  ASSERT_GE(events.size(), 2u);
  EXPECT_NE(events[events.size() - 2].data.find("\"code\":504"), std::string::npos) << events[events.size() - 2].data;
}

TEST_F(ServerTest, SilentStreamsAreKeptAlive) {
  ApiOptions options;
  options.keep_alive_interval = 10ms;
  start(options);
  post("/pause", "");
  std::thread resumer([&] {
    eventually([&] { return backend_->stats().num_waiting == 1; });
    std::this_thread::sleep_for(50ms);  // several keep-alive intervals of real silence
    backend_->resume();
  });
  std::string text;
  for (const auto& chunk : stream("/v1/completions", R"({"prompt":"a","max_tokens":60,"stream":true})"))
    text += std::string(choice(chunk).at("text").as_string());
  resumer.join();
  EXPECT_EQ(text, kReply);
}

TEST_F(ServerTest, ThousandConcurrentRequestsAllFinish) {
  ScriptedBackend::Options backend = backend_options();
  backend.max_queued = 2000;
  start({}, backend);
  net::IoRuntime runtime(1);
  net::HttpClient::Options options;
  options.max_connections_per_host = 1000;
  net::HttpClient client(runtime.executor(), options);
  net::TaskGroup group(runtime.executor(), "calls");
  std::atomic<int> num_ok{0};
  struct Call {
    static net::asio::awaitable<void> run(net::HttpClient& http, net::HttpCall call, std::atomic<int>& ok) {
      auto calling = http.call(std::move(call));
      const net::HttpReply reply = co_await std::move(calling);
      if (reply.status == 200 && reply.body.find("done") != std::string::npos) ++ok;
    }
  };
  post("/pause", "");
  for (int i = 0; i < 1000; ++i)
    group.spawn("call", Call::run(client, make_call("/v1/completions", R"({"prompt":"a","max_tokens":60})"), num_ok));
  ASSERT_TRUE(eventually([&] { return backend_->stats().num_waiting == 1000; })) << backend_->stats().num_waiting;
  EXPECT_GE(server_->http_stats().num_connections, 1000u);
  post("/resume", "");
  EXPECT_TRUE(group.join_blocking(120s));
  EXPECT_EQ(num_ok, 1000);
}

}  // namespace
}  // namespace prl::server
