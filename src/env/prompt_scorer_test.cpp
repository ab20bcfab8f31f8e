#include "env/prompt_scorer.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <boost/json/serialize.hpp>

#include <filesystem>

#include "base/error.hpp"
#include "net/http_server.hpp"
#include "net/io_runtime.hpp"
#include "text/json_python.hpp"
#include "text/tokenizer_builder.hpp"

namespace prl::env {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;

/// A teacher with the routes that a test gives it.
struct Teacher {
  Teacher() : server(options()) {}
  ~Teacher() { server.stop(0ms); }
  static net::HttpServer::Options options() {
    net::HttpServer::Options out;
    out.num_io_threads = 1;
    return out;
  }
  void answers(const char* path, std::string body) {
    server.route("POST", path,
                 [this, path, body = std::move(body)](net::HttpRequest request) { return reply(path, body, std::move(request)); });
  }
  asio::awaitable<net::HttpResponse> reply(const char* path, std::string body, net::HttpRequest request) {
    paths.emplace_back(path);
    EXPECT_EQ(request.headers.get("X-Task", ""), std::string_view(path) == "/tokenize" ? "" : "words");
    bodies.push_back(request.body);
    co_return net::HttpResponse::json(std::move(body));
  }
  static asio::awaitable<net::HttpResponse> healthy() { co_return net::HttpResponse::text("", 200); }

  std::shared_ptr<PromptScorer> scorer(std::shared_ptr<const text::Tokenizer> tokenizer = nullptr) {
    server.route("GET", "/health", [](net::HttpRequest) { return healthy(); });
    server.start();
    net::HttpClient::Options http;
    http.max_retries = 0;
    return make_http_prompt_scorer(std::make_shared<net::HttpClient>(io.executor(), http),
                                   {.base_urls = {fmt::format("http://127.0.0.1:{}/v1", server.port())},
                                    .model = "big",
                                    .check_model = false,
                                    .tokenizer = std::move(tokenizer)});
  }
  std::vector<float> score(PromptScorer& scorer, std::vector<std::int32_t> ids) {
    return io.run_blocking(scorer.score(std::move(ids), net::Clock::now() + 5s, {{"X-Task", "words"}}), 10s);
  }

  net::HttpServer server;
  net::IoRuntime io{1, "test"};
  std::vector<std::string> paths, bodies;
};

std::string error_of(const std::function<void()>& work, ErrorCode code) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

constexpr const char* kThree =
    R"({"choices": [{"token_ids": [1]}], "prompt_logprobs": [null, {"6": {"logprob": -0.33333334, "rank": 4}, "9": {"logprob": -0.1}}, {"7": {"logprob": -2.5}}]})";

TEST(PromptScorer, ReadsTheGenerateRoute) {
  Teacher teacher;
  teacher.answers("/inference/v1/generate", kThree);
  const auto scorer = teacher.scorer();
  EXPECT_EQ(teacher.score(*scorer, {5, 6, 7}), (std::vector<float>{0.0f, -0.33333334f, -2.5f})) << "by id, not by place in the entry";
  const json::value sent = text::parse_json(teacher.bodies.at(0));
  EXPECT_EQ(sent.at("model").as_string(), "big");
  EXPECT_EQ(sent.at("token_ids").as_array().size(), 3u);
  EXPECT_EQ(sent.at("sampling_params").at("prompt_logprobs").to_number<int>(), 1);
  EXPECT_EQ(sent.at("sampling_params").at("max_tokens").to_number<int>(), 1);
}

TEST(PromptScorer, FallsBackToCompletionsForGood) {
  Teacher teacher;
  teacher.answers("/v1/completions",
                  R"({"choices": [{"text": "x", "prompt_logprobs": [null, {"9": {"logprob": -0.1}, "6": {"logprob": -1.5}}]}]})");
  const auto scorer = teacher.scorer();
  EXPECT_EQ(teacher.score(*scorer, {5, 6}), (std::vector<float>{0.0f, -1.5f}));
  EXPECT_EQ(teacher.score(*scorer, {5, 6}), (std::vector<float>{0.0f, -1.5f}));
  EXPECT_EQ(teacher.paths, (std::vector<std::string>{"/v1/completions", "/v1/completions"}));
  EXPECT_EQ(text::parse_json(teacher.bodies.at(0)).at("prompt").as_array().size(), 2u);
}

TEST(PromptScorer, RepliesAboutOtherTokensAreRefused) {
  Teacher teacher;
  teacher.answers("/inference/v1/generate", kThree);
  const auto scorer = teacher.scorer();
  EXPECT_NE(error_of([&] { teacher.score(*scorer, {5, 6, 8}); }, ErrorCode::kCorrupt).find("token 8 at position 2"), std::string::npos);
  EXPECT_NE(error_of(
                [&] {
                  teacher.score(*scorer, {5, 6, 7, 8});
                },
                ErrorCode::kCorrupt)
                .find("4 tokens were sent, and 3"),
            std::string::npos);
  Teacher mute;
  mute.answers("/inference/v1/generate", R"({"choices": [{"token_ids": [1]}], "prompt_logprobs": null})");
  const auto silent = mute.scorer();
  EXPECT_NE(error_of([&] { mute.score(*silent, {5, 6}); }, ErrorCode::kCorrupt).find("must be able to score prompts"), std::string::npos);
}

TEST(PromptScorer, AnotherTokenizerIsFoundBeforeTheFirstRollout) {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("prl_prompt_scorer_{}", ::getpid());
  std::filesystem::create_directories(folder);
  text::write_byte_level_tokenizer(folder, {});
  const auto tokenizer = std::make_shared<const text::Tokenizer>(text::Tokenizer::load(folder));
  Teacher other;
  other.answers("/tokenize", R"({"tokens": [1, 2, 3]})");
  const auto scorer = other.scorer(tokenizer);
  const auto ready = [&] { other.io.run_blocking(scorer->check_ready(net::Clock::now() + 5s), 10s); };
  EXPECT_NE(error_of(ready, ErrorCode::kInvalidArgument).find("has another tokenizer"), std::string::npos);
  // The text that was sent, tokenized by us, is what an equal teacher answers.
  const json::value asked = text::parse_json(other.bodies.at(0));
  const std::string text(asked.at("prompt").as_string());
  EXPECT_NE(text.find("<|im_end|>"), std::string::npos) << "special tokens are compared too";
  json::array ids;
  for (const std::int32_t id : tokenizer->encode(text)) ids.emplace_back(id);
  Teacher equal;
  equal.answers("/tokenize", json::serialize(json::object{{"tokens", ids}}));
  const auto same = equal.scorer(tokenizer);
  equal.io.run_blocking(same->check_ready(net::Clock::now() + 5s), 10s);
  Teacher unknown;  // without the route nothing can be compared
  const auto trusted = unknown.scorer(tokenizer);
  unknown.io.run_blocking(trusted->check_ready(net::Clock::now() + 5s), 10s);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace prl::env
