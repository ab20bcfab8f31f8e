#include <gtest/gtest.h>

#include <atomic>
#include <mutex>

#include "base/error.hpp"
#include "env/chat_pool.hpp"
#include "env/http_generate_client.hpp"
#include "env/openai_chat_client.hpp"
#include "net/deadline.hpp"
#include "net/http_server.hpp"
#include "net/io_runtime.hpp"
#include "text/json_python.hpp"

namespace prl::env {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;

/// A server that answers each route with what the test prepared and keeps the last request.
class FakeServer {
 public:
  FakeServer() : server_(options()) {
    for (const char* path : {"/inference/v1/generate", "/v1/chat/completions"})
      server_.route("POST", path, [this](net::HttpRequest request) { return answer(std::move(request)); });
    server_.route("GET", "/health", [this](net::HttpRequest) { return health(); });
    server_.route("GET", "/v1/models", [](net::HttpRequest) { return models(); });
    server_.start();
  }
  ~FakeServer() { server_.stop(0ms); }
  std::string url() const { return fmt::format("http://127.0.0.1:{}", server_.port()); }

  std::vector<net::HttpResponse> replies;  ///< in order; the last one repeats
  std::vector<net::HttpRequest> requests;
  std::atomic<int> num_unhealthy{0};
  std::atomic<bool> hangs{false};  ///< does not answer

 private:
  static net::HttpServer::Options options() {
    net::HttpServer::Options out;
    out.num_io_threads = 1;
    return out;
  }
  asio::awaitable<net::HttpResponse> answer(net::HttpRequest request) {
    requests.push_back(std::move(request));
    if (hangs) co_await net::sleep_for(60s);
    const std::size_t i = std::min(requests.size(), replies.size()) - 1;
    co_return replies.at(i);
  }
  asio::awaitable<net::HttpResponse> health() { co_return net::HttpResponse::text("", num_unhealthy-- > 0 ? 503 : 200); }
  static asio::awaitable<net::HttpResponse> models() { co_return net::HttpResponse::json(R"({"data": [{"id": "tiny"}, {"id": "big"}]})"); }

  net::HttpServer server_;
};

struct Fixture {
  Fixture() {
    net::HttpClient::Options options;
    options.max_retries = 0;
    options.bearer = "secret";
    client = std::make_shared<net::HttpClient>(io.executor(), options);
  }
  FakeServer server;
  net::IoRuntime io{1, "test"};
  std::shared_ptr<net::HttpClient> client;
};

ErrorCode code_of(const std::function<void()>& work, std::string* message = nullptr) {
  try {
    work();
  } catch (const Error& error) {
    if (message != nullptr) *message = error.what();
    return error.code();
  }
  ADD_FAILURE() << "no error";
  return ErrorCode::kInternal;
}

TEST(HttpGenerateClient, SpeaksTheGenerateRoute) {
  Fixture f;
  f.server.replies = {net::HttpResponse::json(
      R"({"request_id":"r","choices":[{"index":0,"token_ids":[5,6,2],"logprobs":{"content":[{"token":"token_id:5","logprob":-0.1},{"logprob":-0.33333334},{"logprob":0}]},)"
      R"("finish_reason":"stop","policy_versions":[3,3,4]}],"prompt_logprobs":[null,{"7":{"logprob":-2.5}}],"usage":{"prompt_tokens":4}})")};
  const auto client = make_http_generate_client(f.client, {.base_url = f.server.url() + "/v1/", .model = "tiny"});
  wire::GenerateRequest request;
  request.prompt_ids = {1, 2, 3, 4};
  request.sampling.temperature = 0.5f;
  request.sampling.seed = 0xffff'ffff'ffff'ffffull;
  request.sampling.max_tokens = 16;
  request.sampling.stop_token_ids = {2};
  request.session_id = "s-1";
  request.headers = {{"X-Task", "words"}};
  request.cache_salt = "v3";
  const wire::GenerateOutput output = f.io.run_blocking(client->generate(request, net::Clock::now() + 5s), 10s);
  EXPECT_EQ(output.token_ids, (std::vector<std::int32_t>{5, 6, 2}));
  EXPECT_EQ(output.logprobs, (std::vector<float>{-0.1f, -0.33333334f, 0.0f}));
  EXPECT_EQ(output.versions, (std::vector<std::int64_t>{3, 3, 4}));
  EXPECT_EQ(output.version_end.value, 4);
  EXPECT_EQ(output.finish_reason, wire::FinishReason::kStop);
  EXPECT_EQ(output.prompt_logprobs, (std::vector<float>{0.0f, -2.5f}));
  const net::HttpRequest& sent = f.server.requests.at(0);
  EXPECT_EQ(sent.headers.get("X-Session-ID"), "s-1");
  EXPECT_EQ(sent.headers.get("X-Task"), "words");
  EXPECT_EQ(sent.bearer(), "secret");
  const json::value body = text::parse_json(sent.body);
  EXPECT_EQ(body.at("token_ids").as_array().size(), 4u);
  EXPECT_EQ(body.at("cache_salt").as_string(), "v3");
  const json::object& sampling = body.at("sampling_params").as_object();
  EXPECT_EQ(sampling.at("max_tokens").to_number<int>(), 16);
  EXPECT_EQ(sampling.at("logprobs").to_number<int>(), 1);
  EXPECT_EQ(sampling.at("seed").to_number<std::int64_t>(), INT64_MAX);
  EXPECT_EQ(sampling.at("skip_special_tokens").as_bool(), true);
}

TEST(HttpGenerateClient, ReadsWhichExpertsTokensHad) {
  Fixture f;
  const auto reply = [](const char* experts) {
    return net::HttpResponse::json(fmt::format(
        R"({{"choices":[{{"token_ids":[5],"logprobs":{{"content":[{{"logprob":-0.1}}]}},"finish_reason":"stop","routed_experts":{}}}]}})",
        experts));
  };
  f.server.replies = {reply(R"({"data":"AQIDBAUG","shape":[1,3,2],"start":7,"dtype":"uint8"})"), reply("null"),
                      reply(R"({"data":"AQIDBAUG","shape":[2,3,2],"start":0,"dtype":"uint8"})"),
                      reply(R"({"data":"AQ*DBAUG","shape":[1,3,2],"start":0,"dtype":"uint8"})")};
  const auto client = make_http_generate_client(f.client, {.base_url = f.server.url(), .model = "tiny"});
  wire::GenerateRequest request;
  request.prompt_ids = {1};
  const auto generate = [&] { return f.io.run_blocking(client->generate(request, net::Clock::now() + 5s), 10s); };
  request.sampling.routed_experts_start = 7;
  const wire::RoutedExperts wanted{.start = 7, .num_layers = 3, .top_k = 2, .ids = {1, 2, 3, 4, 5, 6}};
  EXPECT_EQ(generate().routed_experts, wanted);
  EXPECT_EQ(text::parse_json(f.server.requests.at(0).body).at("sampling_params").at("routed_experts_prompt_start").to_number<int>(), 7);
  request.sampling.routed_experts_start.reset();
  EXPECT_TRUE(generate().routed_experts.empty());
  EXPECT_FALSE(text::parse_json(f.server.requests.at(1).body).at("sampling_params").as_object().contains("routed_experts_prompt_start"));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(code_of([&] { generate(); }), ErrorCode::kCorrupt) << i;
}

TEST(HttpGenerateClient, FurtherFieldsGoOutAsTheyAreBelowOurOwn) {
  Fixture f;
  const net::HttpResponse reply =
      net::HttpResponse::json(R"({"choices":[{"token_ids":[5],"logprobs":{"content":[{"logprob":-0.1}]},"finish_reason":"stop"}]})");
  f.server.replies = {reply};
  const auto client = make_http_generate_client(f.client, {.base_url = f.server.url(), .model = "tiny"});
  wire::GenerateRequest request;
  request.prompt_ids = {1};
  request.sampling.temperature = 0.5f;
  request.sampling.stop = {"END"};
  request.sampling.ignore_eos = true;
  request.sampling.extra_json = R"({"temperature": 9, "reasoning_effort": "low", "vllm_xargs": {"a": 1}})";
  f.io.run_blocking(client->generate(request, net::Clock::now() + 5s), 10s);
  const json::value body = text::parse_json(f.server.requests.at(0).body);
  const json::object& sampling = body.at("sampling_params").as_object();
  EXPECT_EQ(sampling.at("reasoning_effort").as_string(), "low");
  EXPECT_EQ(sampling.at("vllm_xargs").at("a").to_number<int>(), 1);
  EXPECT_EQ(sampling.at("temperature").to_number<double>(), 0.5);
  EXPECT_EQ(sampling.at("stop").as_array().at(0).as_string(), "END");
  EXPECT_TRUE(sampling.at("ignore_eos").as_bool());
}

TEST(HttpGenerateClient, FailuresKeepTheirMeaning) {
  Fixture f;
  const auto client = make_http_generate_client(f.client, {.base_url = f.server.url(), .model = "tiny"});
  const auto ask = [&] { f.io.run_blocking(client->generate(wire::GenerateRequest{}, net::Clock::now() + 5s), 10s); };
  f.server.replies = {net::error_response(400, "This model's maximum context length is 8 tokens", "input_tokens")};
  EXPECT_EQ(code_of(ask), ErrorCode::kOverlong);
  f.server.replies = {net::error_response(503, "restarting")};
  EXPECT_EQ(code_of(ask), ErrorCode::kUnavailable);
  f.server.replies = {net::HttpResponse::json(R"({"choices":[]})")};
  std::string message;
  EXPECT_EQ(code_of(ask, &message), ErrorCode::kCorrupt);
  EXPECT_NE(message.find("something else than tokens"), std::string::npos) << message;
}

TEST(HttpGenerateClient, TheClientsTimeoutEndsARequestBeforeTheRolloutsDeadline) {
  Fixture f;
  f.server.hangs = true;
  net::HttpClient::Options options;
  options.timeout = 100ms;
  const auto http = std::make_shared<net::HttpClient>(f.io.executor(), options);
  const auto begin = net::Clock::now();
  const auto generate = make_http_generate_client(http, {.base_url = f.server.url(), .model = "tiny"});
  EXPECT_EQ(code_of([&] { f.io.run_blocking(generate->generate(wire::GenerateRequest{}, begin + 60s), 60s); }), ErrorCode::kDeadline);
  OpenAIChatOptions chat_options;
  chat_options.base_url = f.server.url();
  OpenAIChatClientFactory chats(http, std::move(chat_options));
  const auto chat = chats.open({});
  ChatRequest request;
  request.deadline = begin + 60s;
  EXPECT_EQ(code_of([&] { f.io.run_blocking(chat->complete(request), 60s); }), ErrorCode::kDeadline);
  EXPECT_LT(net::Clock::now() - begin, 30s);
}

TEST(HttpGenerateClient, HealthWaitsAndChecksTheModel) {
  Fixture f;
  f.server.num_unhealthy = 1;
  auto client = make_http_generate_client(f.client, {.base_url = f.server.url(), .model = "tiny"});
  f.io.run_blocking(client->check_health(net::Clock::now() + 10s), 12s);
  auto other = make_http_generate_client(f.client, {.base_url = f.server.url(), .model = "huge"});
  std::string message;
  EXPECT_EQ(code_of([&] { f.io.run_blocking(other->check_health(net::Clock::now() + 5s), 10s); }, &message), ErrorCode::kNotFound);
  EXPECT_NE(message.find("tiny, big"), std::string::npos) << message;
  auto nowhere = make_http_generate_client(f.client, {.base_url = "http://127.0.0.1:1", .model = ""});
  EXPECT_EQ(code_of([&] { f.io.run_blocking(nowhere->check_health(net::Clock::now() + 100ms), 10s); }, &message), ErrorCode::kDeadline);
  EXPECT_NE(message.find("127.0.0.1:1"), std::string::npos) << message;
}

ChatRequest chat_request() {
  ChatRequest request;
  request.messages.push_back(json::object{{"role", "user"}, {"content", "hi"}});
  request.deadline = net::Clock::now() + 5s;
  return request;
}

TEST(OpenAIChatClient, TextToolsAndReasoning) {
  Fixture f;
  f.server.replies = {net::HttpResponse::json(
      R"({"choices":[{"message":{"role":"assistant","content":null,"reasoning_content":"hm","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{}"}}]},)"
      R"("finish_reason":"tool_calls"}],"usage":{"prompt_tokens":9,"completion_tokens":4}})")};
  OpenAIChatOptions options;
  options.base_url = f.server.url();
  options.model = "tiny";
  options.extra_body = json::object{{"reasoning_effort", "low"}};
  OpenAIChatClientFactory factory(f.client, options);
  const auto client = factory.open({.session_id = "s-9", .cache_salt = ""});
  ChatRequest request = chat_request();
  request.sampling.temperature = 0;
  request.sampling.max_tokens = 7;
  request.sampling.extra_json = R"({"max_tokens": 3, "user": "me"})";
  const ChatTurn turn = f.io.run_blocking(client->complete(request), 10s);
  EXPECT_EQ(turn.finish_reason, "tool_calls");
  EXPECT_EQ(turn.message.at("content").as_string(), "");
  EXPECT_EQ(turn.message.at("reasoning_content").as_string(), "hm");
  EXPECT_EQ(turn.message.at("tool_calls").as_array().size(), 1u);
  EXPECT_FALSE(turn.has_tokens);
  EXPECT_EQ(turn.num_completion_tokens, 4);
  const json::value body = text::parse_json(f.server.requests.at(0).body);
  EXPECT_EQ(body.at("temperature").to_number<double>(), 0);
  EXPECT_EQ(body.at("max_tokens").to_number<int>(), 7);
  EXPECT_EQ(body.at("reasoning_effort").as_string(), "low");
  EXPECT_EQ(body.at("user").as_string(), "me");
  EXPECT_FALSE(body.as_object().contains("top_p")) << "defaults are the server's";
  EXPECT_FALSE(body.as_object().contains("tools"));
}

TEST(OpenAIChatClient, NumbersOfMessagesAndToolsGoOutAsTheyCame) {
  Fixture f;
  f.server.replies = {net::HttpResponse::json(R"({"choices":[{"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]})")};
  OpenAIChatOptions options;
  options.base_url = f.server.url();
  options.model = "tiny";
  OpenAIChatClientFactory factory(f.client, options);
  const auto client = factory.open({.session_id = "s", .cache_salt = ""});
  ChatRequest request = chat_request();
  const std::string tools = R"([{"type":"function","function":{"name":"f","parameters":{"maximum":123456789012345678901234567890}}}])";
  const std::string messages = R"([{"role":"user","content":"x","id":99999999999999999999}])";
  request.tools = text::parse_json(tools, 200, text::LargeNumbers::kKeepText).as_array();
  request.messages = text::parse_json(messages, 200, text::LargeNumbers::kKeepText).as_array();
  request.sampling.extra_json = R"({"chat_template_kwargs":{"k":18446744073709551616}})";
  f.io.run_blocking(client->complete(request), 10s);
  const std::string body = f.server.requests.at(0).body;
  for (const std::string& part : {"\"tools\":" + tools, "\"messages\":" + messages, std::string(R"({"k":18446744073709551616})")})
    EXPECT_NE(body.find(part), std::string::npos) << part << " in " << body;
}

TEST(OpenAIChatClient, TokenIdsComeAllOrNothing) {
  Fixture f;
  const std::string with = R"({"prompt_token_ids":[1,2],"choices":[{"message":{"content":"ok"},"finish_reason":"length","token_ids":[3,4],)"
                           R"("logprobs":{"content":[{"logprob":-0.5},{"logprob":-1}]}}]})";
  const std::string without =
      R"({"choices":[{"message":{"content":"ok"},"finish_reason":"stop","token_ids":[3,4],"logprobs":{"content":[]}}]})";
  const std::string uneven =
      R"({"prompt_token_ids":[1],"choices":[{"message":{"content":"ok"},"finish_reason":"stop","token_ids":[3,4],"logprobs":{"content":[]}}]})";
  f.server.replies = {net::HttpResponse::json(with), net::HttpResponse::json(without), net::HttpResponse::json(uneven)};
  OpenAIChatOptions options;
  options.base_url = f.server.url() + "/v1";
  options.return_token_ids = true;
  OpenAIChatClientFactory factory(f.client, options);
  const auto client = factory.open({});
  const ChatTurn turn = f.io.run_blocking(client->complete(chat_request()), 10s);
  EXPECT_TRUE(turn.has_tokens);
  EXPECT_TRUE(turn.is_truncated());
  EXPECT_EQ(turn.tokens.completion_ids, (std::vector<std::int32_t>{3, 4}));
  EXPECT_TRUE(turn.tokens.versions.empty());
  EXPECT_FALSE(f.io.run_blocking(client->complete(chat_request()), 10s).has_tokens);
  EXPECT_EQ(code_of([&] { f.io.run_blocking(client->complete(chat_request()), 10s); }), ErrorCode::kCorrupt);
}

TEST(OpenAIChatClient, AFullContextIsTriedOnceMoreWithWhatFits) {
  Fixture f;
  f.server.replies = {
      net::error_response(400, "This model's maximum context length is 100 tokens. However, you requested 130 tokens (80 of text input)."),
      net::HttpResponse::json(R"({"choices":[{"message":{"content":"ok"},"finish_reason":"stop"}]})"),
      net::error_response(400, "This model's maximum context length is 100 tokens. Your prompt has 120 input tokens.")};
  OpenAIChatOptions options;
  options.base_url = f.server.url();
  OpenAIChatClientFactory factory(f.client, options);
  const auto client = factory.open({});
  ChatRequest request = chat_request();
  request.sampling.max_tokens = 50;
  EXPECT_EQ(f.io.run_blocking(client->complete(request), 10s).message.at("content").as_string(), "ok");
  EXPECT_EQ(text::parse_json(f.server.requests.at(1).body).at("max_tokens").to_number<int>(), 20);
  EXPECT_EQ(code_of([&] { f.io.run_blocking(client->complete(request), 10s); }), ErrorCode::kOverlong);
  EXPECT_EQ(f.server.requests.size(), 3u);
}

TEST(OpenAIChatClient, HeadersOfTheConversationAndTheLimitByItsOwnName) {
  Fixture f;
  f.server.replies = {net::error_response(400, "maximum context length is 100 tokens, you sent 80 input tokens"),
                      net::HttpResponse::json(R"({"choices":[{"message":{"content":"ok"},"finish_reason":"stop"}]})")};
  OpenAIChatOptions options;
  options.base_url = f.server.url();
  options.extra_body = json::object{{"max_completion_tokens", 50}, {"temperature", 1.0}};
  OpenAIChatClientFactory factory(f.client, options);
  const auto client = factory.open({.session_id = "s-1", .cache_salt = "", .headers = {{"X-Session-ID", "mine"}, {"X-Example", "7"}}});
  f.io.run_blocking(client->complete(chat_request()), 10s);
  EXPECT_EQ(f.server.requests.at(0).headers.get("X-Session-ID"), "mine");
  EXPECT_EQ(f.server.requests.at(0).headers.get("X-Example"), "7");
  const json::value first = text::parse_json(f.server.requests.at(0).body);
  EXPECT_EQ(first.at("temperature").to_number<double>(), 1.0) << "what is set is sent, even if it is the usual value";
  const json::value second = text::parse_json(f.server.requests.at(1).body);
  EXPECT_EQ(second.at("max_completion_tokens").to_number<int>(), 20);
  EXPECT_FALSE(second.as_object().contains("max_tokens"));
}

TEST(ChatPool, ConversationsGoToTheServicesInTurns) {
  Fixture a, b;
  const auto service = [](Fixture& f) {
    OpenAIChatOptions options;
    options.base_url = f.server.url();
    return std::make_shared<OpenAIChatClientFactory>(f.client, options);
  };
  const auto ok = net::HttpResponse::json(R"({"choices":[{"message":{"content":"ok"},"finish_reason":"stop"}]})");
  a.server.replies = {ok, ok, ok, ok};
  b.server.replies = {ok, ok, ok, ok};
  const auto pool = make_chat_pool({service(a), service(b)});
  for (int i = 0; i < 3; ++i) {
    const auto client = pool->open({});
    a.io.run_blocking(client->complete(chat_request()), 10s);
    if (i == 0) a.io.run_blocking(client->complete(chat_request()), 10s);  // the same conversation stays where it is
  }
  EXPECT_EQ(a.server.requests.size(), 3u);
  EXPECT_EQ(b.server.requests.size(), 1u);
  EXPECT_EQ(pool->describe(), a.server.url() + "/v1, " + b.server.url() + "/v1");
  EXPECT_EQ(code_of([] { make_chat_pool({}); }), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace prl::env
