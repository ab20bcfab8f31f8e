// Prompts that have engines of their own: whom the router and the orchestrator's client ask, and what they do without them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <future>

#include "base/error.hpp"
#include "base/testing/eventually.hpp"
#include "net/io_runtime.hpp"
#include "router/prefill_orders.hpp"
#include "router/routed_generate_client.hpp"
#include "router/router_server.hpp"
#include "router/testing/scripted_engine.hpp"

namespace prl::router {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::ScriptedEngine;
using testing::token_at;

constexpr auto kPrefillTestTime = 60s;
constexpr const char* kQuestion = R"({"max_uncached_tokens":16})";

class PrefillTest : public ::testing::Test {
 protected:
  PrefillTest() {
    FleetOptions options = testing::quick_fleet();
    options.router.spread = Spread::kTurns;
    fleet_ = std::make_shared<Fleet>(io_.executor(), client_, options);
    direct_ = make_routed_generate_client(fleet_, client_, {.model = "m"});
    server_ = std::make_unique<RouterServer>(RouterServerOptions{.http = {.name = "router"}, .guard = {.host = "127.0.0.1"}}, fleet_,
                                             std::make_shared<WeightUpdater>(fleet_, client_, WeightUpdaterOptions{}), client_);
    server_->start();
    prefill_ = add_engine(EngineRole::kPrefill);
    decode_ = add_engine(EngineRole::kAll);
    decode_->change([](auto& script) { script.num_uncached = 100; });
    EXPECT_TRUE(prl::testing::eventually([&] { return fleet_->has_prefill(); })) << fleet_->describe();
  }
  ScriptedEngine* add_engine(EngineRole role) {
    engines_.emplace_back();
    fleet_->add(engines_.back().url(), role);
    return &engines_.back();
  }
  /// Tokens of the reply by the orchestrator's client, or by HTTP, as {tokens, status}.
  std::vector<std::int64_t> generate(bool over_http, std::int64_t seed) {
    if (!over_http) {
      wire::GenerateRequest request;
      request.prompt_ids = {1, 2, 3};
      request.sampling.seed = static_cast<std::uint64_t>(seed);
      const auto output = io_.run_blocking(direct_->generate(std::move(request), net::Clock::now() + kPrefillTestTime), kPrefillTestTime);
      return {output.token_ids.begin(), output.token_ids.end()};
    }
    net::BlockingHttpClient outside({});
    net::HttpCall call;
    call.method = "POST";
    call.url = fmt::format("http://127.0.0.1:{}/inference/v1/generate", server_->port());
    // What a client asks of blocks is not passed on: it could send an engine anywhere.
    call.body =
        fmt::format(R"({{"token_ids":[1,2,3],"kv_transfer_params":{{"remote_host":"evil"}},"sampling_params":{{"seed":{}}}}})", seed);
    call.max_retries = 0;
    const net::HttpReply reply = outside.call(call);
    EXPECT_EQ(reply.status, 200) << reply.body;
    std::vector<std::int64_t> ids;
    const auto body = reply.json();
    for (const auto& id : body.at("choices").at(0).at("token_ids").as_array()) ids.push_back(id.to_number<std::int64_t>());
    return ids;
  }
  static std::vector<std::int64_t> wanted(std::int64_t seed) {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < 12; ++i) ids.push_back(token_at(seed, i));
    return ids;
  }
  static std::string told_by(const ScriptedEngine& engine) { return fmt::format(R"({{"remote_port":{}}})", engine.port()); }

  net::IoRuntime io_{2};
  std::shared_ptr<net::HttpClient> client_ = std::make_shared<net::HttpClient>(io_.executor(), net::HttpClient::Options{});
  std::deque<ScriptedEngine> engines_;
  std::shared_ptr<Fleet> fleet_;
  std::shared_ptr<env::GenerateClient> direct_;
  std::unique_ptr<RouterServer> server_;
  ScriptedEngine* prefill_ = nullptr;
  ScriptedEngine* decode_ = nullptr;
};

TEST_F(PrefillTest, ALongPromptIsComputedByAPrefillEngineAndAShortOneIsNot) {
  for (const bool over_http : {false, true}) {
    SCOPED_TRACE(over_http);
    EXPECT_EQ(generate(over_http, 5), wanted(5));
  }
  EXPECT_THAT(prefill_->kv_params(), ElementsAre(kPrefillOnly, kPrefillOnly));
  EXPECT_THAT(decode_->kv_params(), ElementsAre(kQuestion, told_by(*prefill_), kQuestion, told_by(*prefill_)));
  EXPECT_EQ(fleet_->counts().num_prefills, 2);
  decode_->change([](auto& script) { script.num_uncached = 16; });
  for (const bool over_http : {false, true}) EXPECT_EQ(generate(over_http, 6), wanted(6));
  EXPECT_EQ(prefill_->kv_params().size(), 2u);
  EXPECT_EQ(fleet_->counts().num_prefills_skipped, 2);
}

TEST_F(PrefillTest, PrefillEnginesTakeTurnsAndDecodeEnginesAmongThemselves) {
  ScriptedEngine* const second = add_engine(EngineRole::kPrefill);
  EXPECT_TRUE(prl::testing::eventually([&] {
    for (const EngineView& view : fleet_->engines())
      if (view.state != EngineState::kReady) return false;
    return true;
  }));
  for (std::int64_t seed = 0; seed < 4; ++seed) EXPECT_EQ(generate(true, seed), wanted(seed));
  EXPECT_EQ(prefill_->kv_params().size(), 2u);
  EXPECT_EQ(second->kv_params().size(), 2u);
  EXPECT_EQ(decode_->kv_params().size(), 8u);
}

TEST_F(PrefillTest, APrefillEngineThatFailsIsReplacedByAnotherOrByTheDecodeEngine) {
  for (const bool over_http : {false, true}) {
    SCOPED_TRACE(over_http);
    prefill_->change([](auto& script) { script.refuse_status = 503; });
    EXPECT_EQ(generate(over_http, 7), wanted(7));
    EXPECT_EQ(decode_->kv_params().back(), "") << "the decode engine was told of a prefill that did not happen";
    prefill_->change([](auto& script) { script.refuse_status = 0; });
    EXPECT_TRUE(prl::testing::eventually([&] { return fleet_->has_prefill(); }));
  }
  EXPECT_EQ(fleet_->counts().num_prefills_failed, 2);
  EXPECT_GE(fleet_->counts().num_lost, 2);
  ScriptedEngine* const second = add_engine(EngineRole::kPrefill);
  EXPECT_TRUE(prl::testing::eventually([&] { return fleet_->engines().back().state == EngineState::kReady; }));
  prefill_->change([](auto& script) { script.refuse_status = 503; });
  for (std::int64_t seed = 0; seed < 2; ++seed) EXPECT_EQ(generate(true, seed), wanted(seed));
  EXPECT_GE(second->kv_params().size(), 1u);
  EXPECT_EQ(fleet_->counts().num_prefills_failed, 2);
  // A refusal is no loss: the decode engine has its own words for it.
  second->change([](auto& script) { script.refuse_status = 400; });
  fleet_->drain(prefill_->url());
  EXPECT_TRUE(prl::testing::eventually([&] { return fleet_->engines().size() == 2; }));
  EXPECT_EQ(generate(true, 3), wanted(3));
  EXPECT_EQ(fleet_->counts().num_prefills_failed, 3);
}

TEST_F(PrefillTest, WithoutADecodeEnginePrefillEnginesTakeWholeRequests) {
  fleet_->drain(decode_->url());
  EXPECT_TRUE(prl::testing::eventually([&] { return fleet_->engines().size() == 1; }));
  for (const bool over_http : {false, true}) EXPECT_EQ(generate(over_http, 8), wanted(8));
  EXPECT_THAT(prefill_->kv_params(), ElementsAre("", ""));
  EXPECT_THAT(decode_->kv_params(), IsEmpty());
}

TEST_F(PrefillTest, WhoWaitsForAPrefillEngineIsToldThatThereIsNone) {
  // The limit of the engine is 4 requests, unless it is the only one; a second one makes it count.
  ScriptedEngine* const second = add_engine(EngineRole::kPrefill);
  EXPECT_TRUE(prl::testing::eventually([&] {
    for (const EngineView& view : fleet_->engines())
      if (view.state != EngineState::kReady) return false;
    return true;
  }));
  std::vector<Lease> places;
  for (int i = 0; i < 8; ++i)
    places.push_back(io_.run_blocking(fleet_->acquire_prefill({}, net::Clock::now() + kPrefillTestTime), kPrefillTestTime));
  auto waiting = std::async(std::launch::async, [&] {
    try {
      (void)io_.run_blocking(fleet_->acquire_prefill({}, net::Clock::now() + kPrefillTestTime), kPrefillTestTime);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  });
  EXPECT_TRUE(prl::testing::eventually([&] { return fleet_->counts().num_waiting == 1; }));
  for (ScriptedEngine* engine : {prefill_, second}) fleet_->drain(engine->url());
  for (Lease& place : places) place.report_lost("it is over");
  EXPECT_EQ(waiting.get(), ErrorCode::kUnavailable);
  places.clear();
}

}  // namespace
}  // namespace prl::router
