#include "launch/policy_sources.hpp"

#include <gtest/gtest.h>

#include <boost/json.hpp>

#include "launch/testing/tiny_engine.hpp"
#include "net/http_server.hpp"
#include "net/io_runtime.hpp"
#include "nn/decoder.hpp"

namespace prl::launch {
namespace {

using namespace std::chrono_literals;
namespace json = boost::json;

/// Waits for a version above `than` and brings it to the engines.
orchestrator::asio::awaitable<std::int64_t> follow_once(orchestrator::PolicySource* source, std::int64_t than) {
  auto waiting = source->wait_newer(PolicyVersion{than}, net::Clock::now() + 60s);
  const auto newest = co_await std::move(waiting);
  if (!newest) co_return -1;
  auto applying = source->apply(*newest, net::Clock::now() + 60s);
  co_await std::move(applying);
  co_return newest->value;
}

std::string error_of(net::IoRuntime& io, orchestrator::PolicySource& source, ErrorCode code) {
  try {
    io.run_blocking(follow_once(&source, -1), 120s);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

TEST(LocalPolicySource, TheEngineTakesWhatWasPublishedAndProvesIt) {
  const testing::TinyModel model("local");
  EngineHost host(model.config(), make_cpu_runtime());
  const auto channel = weights::make_local_channel();
  LocalPolicySource source(channel->follow(), host.engine());
  net::IoRuntime io(1);
  weights::Publication publication;
  const nn::WeightsPtr next = host.load(model.folder, PolicyVersion{1}, nullptr);
  const wire::WeightProof proof = host.engine().proof(60s);
  publication.handle = next;
  publication.manifest.version = PolicyVersion{1};
  publication.manifest.checksum = proof.checksum;
  publication.manifest.probe_logprobs = proof.probe_logprobs;
  channel->publish(publication);
  EXPECT_EQ(io.run_blocking(follow_once(&source, 0), 120s), 1);
  EXPECT_EQ(host.engine().proof(60s).version.value, 1);
  EXPECT_EQ(source.proofs().num_updates, 1);
  EXPECT_EQ(source.proofs().max_probe_difference, 0);
  // A manifest of other weights than those that came.
  publication.manifest.version = PolicyVersion{2};
  publication.manifest.checksum ^= 1;
  publication.handle = host.load(model.folder, PolicyVersion{2}, nullptr);
  channel->publish(publication);
  const std::string message = error_of(io, source, ErrorCode::kOutOfSync);
  EXPECT_NE(message.find("in-process engine"), std::string::npos) << message;
  host.engine().shutdown();
}

/// A server that answers /update_weights, /load_lora_adapter and /weight_proof as it is told, and keeps what it was asked.
struct Server {
  net::HttpServer http{{.name = "engine"}};
  std::vector<json::object> asked;
  std::string proven;  ///< the adapter whose proof was asked for last
  std::function<net::HttpResponse(int attempt)> answer;

  Server() {
    for (const char* path : {"/update_weights", "/load_lora_adapter"})
      http.route("POST", path, [this](net::HttpRequest request) { return handle(std::move(request)); });
    http.route("GET", "/weight_proof", [this](net::HttpRequest request) { return prove(std::move(request)); });
    http.start();
  }
  net::asio::awaitable<net::HttpResponse> handle(net::HttpRequest request) {
    asked.push_back(json::parse(request.body).as_object());
    co_return answer(static_cast<int>(asked.size()));
  }
  net::asio::awaitable<net::HttpResponse> prove(net::HttpRequest request) {
    proven = request.query.get("adapter");
    co_return answer(0);
  }
  std::string url() const { return fmt::format("http://127.0.0.1:{}", http.port()); }
};

class HttpPolicySourceTest : public ::testing::Test {
 protected:
  HttpPolicySourceTest() {
    weights::Publication publication;
    publication.manifest.version = PolicyVersion{3};
    publication.manifest.checksum = 255;
    publication.manifest.probe_prompt = {1, 2};
    publication.manifest.probe_logprobs = {-0.5f};
    publication.save = [](const std::filesystem::path& folder) { std::filesystem::create_directories(folder); };
    channel_->publish(publication);
  }
  ~HttpPolicySourceTest() override { std::filesystem::remove_all(folder_); }
  /// Of one engine, which is ready.
  HttpPolicySource source(HttpPolicySource::Options policy = {}) {
    net::HttpClient::Options options;
    options.backoff_first = 1ms;
    auto client = std::make_shared<net::HttpClient>(io_.executor(), options);
    auto fleet = std::make_shared<router::Fleet>(io_.executor(), client);
    auto updater = std::make_shared<router::WeightUpdater>(fleet, client);
    fleet->add(server_.url());
    EXPECT_TRUE(io_.run_blocking(fleet->wait_ready(net::Clock::now() + 60s), 120s));
    return {channel_, fleet, updater, std::move(policy)};
  }
  static net::HttpResponse proof(const char* checksum) {
    return net::HttpResponse::json(
        fmt::format(R"({{"status": "ok", "policy_version": 3, "checksum": "{}", "probe_logprobs": [-0.5]}})", checksum));
  }

  std::filesystem::path folder_ = std::filesystem::temp_directory_path() / ("prl-policy-source-" + std::to_string(::getpid()));
  std::shared_ptr<weights::WeightChannel> channel_ = weights::make_file_channel({.folder = folder_, .keep_interval = {}});
  net::IoRuntime io_{1};
  Server server_;
};

TEST_F(HttpPolicySourceTest, TellsTheServerWhereTheVersionLiesAndComparesItsProof) {
  server_.answer = [](int attempt) { return attempt == 1 ? net::HttpResponse::text("loading", 503) : proof("00000000000000ff"); };
  HttpPolicySource policy = source();
  EXPECT_EQ(io_.run_blocking(follow_once(&policy, -1), 120s), 3);
  ASSERT_EQ(server_.asked.size(), 2u) << "a server that is busy is asked again";
  EXPECT_EQ(server_.asked[1].at("version").as_int64(), 3);
  EXPECT_EQ(server_.asked[1].at("weight_dir").as_string(), std::filesystem::absolute(folder_ / "step_3").string());
  EXPECT_TRUE(server_.asked[1].at("force").as_bool()) << "the run that begins takes the server over";
  EXPECT_EQ(policy.proofs().num_updates, 1);
  EXPECT_EQ(policy.describe_engines(), server_.url());
}

TEST_F(HttpPolicySourceTest, AnAdapterIsAskedOfTheTrainerOrReadFromTheFolderAndProvenUnderItsName) {
  server_.answer = [](int) { return proof("00000000000000ff"); };
  HttpPolicySource memory = source({.store = "tcp://127.0.0.1:29501", .adapter = "alpha"});
  EXPECT_EQ(io_.run_blocking(follow_once(&memory, -1), 120s), 3);
  HttpPolicySource files = source({.adapter = "alpha"});
  EXPECT_EQ(io_.run_blocking(follow_once(&files, -1), 120s), 3);
  EXPECT_EQ(memory.proofs().num_updates + files.proofs().num_updates, 2);
  ASSERT_EQ(server_.asked.size(), 2u);
  EXPECT_EQ(server_.asked[0], (json::object{{"lora_name", "alpha"}, {"store", "tcp://127.0.0.1:29501"}, {"version", 3}}));
  EXPECT_EQ(server_.asked[1],
            (json::object{{"lora_name", "alpha"}, {"lora_path", std::filesystem::absolute(folder_ / "step_3").string()}}));
  EXPECT_EQ(server_.proven, "alpha");
}

TEST_F(HttpPolicySourceTest, OtherWeightsABrokenReplyAndARefusalNameTheServer) {
  HttpPolicySource policy = source();
  server_.answer = [](int) { return proof("0000000000000001"); };
  EXPECT_NE(error_of(io_, policy, ErrorCode::kOutOfSync).find(server_.url()), std::string::npos);
  server_.answer = [](int) { return net::HttpResponse::json("{}"); };
  EXPECT_NE(error_of(io_, policy, ErrorCode::kCorrupt).find(server_.url()), std::string::npos);
  server_.answer = [](int) { return net::HttpResponse::text("no such key", 401); };
  EXPECT_NE(error_of(io_, policy, ErrorCode::kUnauthorized).find(server_.url()), std::string::npos);
}

}  // namespace
}  // namespace prl::launch
