#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "net/http_client.hpp"
#include "server/api_server.hpp"
#include "server/testing/scripted_backend.hpp"
#include "text/tokenizer_builder.hpp"

namespace prl::server {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using testing::ScriptedBackend;

/// Remembers what the server asks of the engine.
class BackendOfRuns final : public ScriptedBackend {
 public:
  using ScriptedBackend::ScriptedBackend;
  void set_tenant(const std::string& name, const engine::TenantOptions& options) override { runs[name] = options; }
  void remove_tenant(const std::string& name) override { runs.erase(name); }
  std::int64_t cancel_tenant(const std::string& name) override { return name == "alpha" ? 3 : 0; }
  std::vector<engine::TenantStats> tenants() override {
    std::vector<engine::TenantStats> out;
    for (const auto& [name, options] : runs) out.push_back({.name = name, .options = options, .num_running = 2, .num_tokens = 77});
    return out;
  }
  std::map<std::string, engine::TenantOptions> runs;  ///< the admin thread's until its reply is there
};

constexpr const char* kServerKey = "key-of-the-server-itself";
constexpr const char* kAdminKey = "key-of-its-administrator";
constexpr const char* kRunKey = "0123456789abcdef-alpha";

class TenantRoutesTest : public ::testing::Test {
 protected:
  TenantRoutesTest() : folder_(std::filesystem::temp_directory_path() / fmt::format("prl-runs-test-{}", static_cast<const void*>(this))) {
    std::filesystem::create_directories(folder_);
    ids_ = text::write_byte_level_tokenizer(folder_);
    tokenizer_ = std::make_shared<const text::Tokenizer>(text::Tokenizer::load(folder_));
  }
  ~TenantRoutesTest() override {
    server_.reset();
    backend_.reset();
    std::filesystem::remove_all(folder_);
  }
  void start(std::string api_key) {
    ApiOptions options;
    options.port = 0;
    options.served_names = {"tiny"};
    options.api_key = std::move(api_key);
    options.admin_api_key = options.api_key.empty() ? "" : kAdminKey;
    ScriptedBackend::Options backend;
    backend.vocab_size = ids_.vocab_size;
    backend.end_id = ids_.im_end;
    backend.max_model_len = 512;
    backend_ = std::make_unique<BackendOfRuns>(backend, [this](const wire::GenerateRequest&) { return tokenizer_->encode("fine"); });
    server_ = std::make_unique<ApiServer>(options, *backend_, tokenizer_, nullptr, nullptr);
    server_->start();
    net::HttpClient::Options client;
    client.timeout = 30s;
    client.max_retries = 0;
    client_ = std::make_unique<net::BlockingHttpClient>(client);
  }
  net::HttpReply call(const char* method, std::string_view path, std::string body, const std::string& key) {
    net::HttpCall call;
    call.method = method;
    call.url = fmt::format("http://127.0.0.1:{}{}", server_->port(), path);
    call.body = std::move(body);
    call.bearer = key;
    return client_->call(std::move(call));
  }
  net::HttpReply post(std::string_view path, std::string body, const std::string& key = kAdminKey) {
    return call("POST", path, std::move(body), key);
  }

  std::filesystem::path folder_;
  text::ByteTokenizerIds ids_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::unique_ptr<BackendOfRuns> backend_;
  std::unique_ptr<ApiServer> server_;
  std::unique_ptr<net::BlockingHttpClient> client_;
};

TEST_F(TenantRoutesTest, ARunIsMadeChangedListedAndRemoved) {
  start(kServerKey);
  EXPECT_EQ(post("/runs", R"({"name":"alpha","weight":3})").status, 200);
  EXPECT_EQ(post("/runs", R"({"name":"alpha","max_tokens_in_flight":4096})").status, 200);  // the weight stays
  EXPECT_EQ(backend_->runs.at("alpha").weight, 3);
  EXPECT_EQ(backend_->runs.at("alpha").max_tokens_in_flight, 4096);
  for (const auto& [verb, state] : {std::pair("pause", engine::TenantState::kPaused), std::pair("drain", engine::TenantState::kDraining),
                                    std::pair("resume", engine::TenantState::kOpen)}) {
    EXPECT_EQ(post(fmt::format("/runs/{}", verb), R"({"name":"alpha"})").status, 200);
    EXPECT_EQ(backend_->runs.at("alpha").state, state) << verb;
    EXPECT_EQ(backend_->runs.at("alpha").weight, 3);
  }
  const auto listed = call("GET", "/runs", "", kAdminKey).json();
  const auto& run = listed.at("data").at(0);
  EXPECT_EQ(run.at("name"), "alpha");
  EXPECT_EQ(run.at("state"), "open");
  EXPECT_EQ(run.at("has_api_key"), false);
  EXPECT_EQ(run.at("num_tokens"), 77);
  EXPECT_THAT(post("/runs/cancel", R"({"name":"alpha"})").body, HasSubstr("3"));
  EXPECT_EQ(post("/runs/remove", R"({"name":"alpha"})").status, 200);
  EXPECT_TRUE(backend_->runs.empty());
}

TEST_F(TenantRoutesTest, WhatIsWrongIsNamed) {
  start(kServerKey);
  for (const char* verb : {"pause", "resume", "drain", "cancel", "remove"}) {
    const auto reply = post(fmt::format("/runs/{}", verb), R"({"name":"beta"})");
    EXPECT_EQ(reply.status, 404) << verb;
    EXPECT_THAT(reply.body, HasSubstr("beta"));
  }
  for (const auto& [body, word] :
       {std::pair(R"({})", "name"), std::pair(R"({"name":""})", "name"), std::pair(R"({"name":"a","weight":0})", "weight"),
        std::pair(R"({"name":"a","max_tokens_in_flight":-1})", "max_tokens_in_flight"),
        std::pair(R"({"name":"a","api_key":"short"})", "16"),
        std::pair(R"({"name":"a","api_key":"key-of-the-server-itself"})", "server itself")}) {
    const auto reply = post("/runs", body);
    EXPECT_EQ(reply.status, 400) << body;
    EXPECT_THAT(reply.body, HasSubstr(word));
  }
  EXPECT_TRUE(backend_->runs.empty());
  EXPECT_EQ(post("/runs", R"({"name":"a"})", kServerKey).status, 403);  // sampling is all that this key is for
}

TEST_F(TenantRoutesTest, TheKeyOfARunSamplesWithItsOwnAdapterAlone) {
  start(kServerKey);
  ASSERT_EQ(post("/runs", fmt::format(R"({{"name":"tiny","api_key":"{}"}})", kRunKey)).status, 200);
  EXPECT_EQ(post("/v1/completions", R"({"model":"tiny","prompt":"Hi"})", kRunKey).status, 200);
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"Hi"})", kRunKey).status, 200);
  EXPECT_EQ(post("/v1/completions", R"({"model":"other","prompt":"Hi"})", kRunKey).status, 403);
  EXPECT_EQ(post("/tokenize", R"({"model":"other","prompt":"Hi"})", kRunKey).status, 403);
  for (const char* path : {"/runs", "/pause", "/update_weights", "/v1/load_lora_adapter", "/reset_prefix_cache"})
    EXPECT_EQ(post(path, "{}", kRunKey).status, 403) << path;
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"Hi"})", "0123456789abcdef-beta").status, 401);
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"Hi"})", kServerKey).status, 200);
  // Another run may not have the same key; without it the run has none.
  const auto twice = post("/runs", fmt::format(R"({{"name":"beta","api_key":"{}"}})", kRunKey));
  EXPECT_EQ(twice.status, 409) << twice.body;
  EXPECT_FALSE(backend_->runs.contains("beta"));
  ASSERT_EQ(post("/runs", R"({"name":"tiny","api_key":""})").status, 200);
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"Hi"})", kRunKey).status, 401);
}

TEST_F(TenantRoutesTest, AServerWithoutAKeyGivesRunsNone) {
  start("");
  const auto reply = post("/runs", fmt::format(R"({{"name":"alpha","api_key":"{}"}})", kRunKey), "");
  EXPECT_EQ(reply.status, 400);
  EXPECT_THAT(reply.body, HasSubstr("server.api_key"));
  EXPECT_EQ(post("/runs", R"({"name":"alpha"})", "").status, 200);
}

}  // namespace
}  // namespace prl::server
