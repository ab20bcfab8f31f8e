#include "router/fleet.hpp"

#include <gmock/gmock.h>

#include <deque>

#include "base/error.hpp"
#include "base/testing/eventually.hpp"
#include "net/io_runtime.hpp"
#include "router/routed_generate_client.hpp"
#include "router/router_server.hpp"
#include "router/testing/scripted_engine.hpp"
#include "router/weight_updater.hpp"

namespace prl::router {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using testing::ScriptedEngine;
using testing::token_at;

constexpr auto kLong = 60s;

net::HttpClient::Options quick_client() {
  net::HttpClient::Options options;
  options.backoff_first = 1ms;
  return options;
}

class FleetTest : public ::testing::Test {
 protected:
  /// `patience`: for the engines that are slower than the first to take an update.
  explicit FleetTest(FleetOptions options = testing::quick_fleet(), std::chrono::milliseconds patience = kLong) {
    fleet_ = std::make_shared<Fleet>(io_.executor(), client_, options);
    updater_ = std::make_shared<WeightUpdater>(fleet_, client_, WeightUpdaterOptions{.api_key = {}, .patience = patience});
  }

  ScriptedEngine& add_engine() {
    engines_.emplace_back();
    fleet_->add(engines_.back().url());
    return engines_.back();
  }
  void wait_for(const ScriptedEngine& engine, EngineState state) {
    ASSERT_TRUE(prl::testing::eventually([&] { return view_of(engine).state == state; })) << fleet_->describe();
  }
  EngineView view_of(const ScriptedEngine& engine) const {
    for (const EngineView& view : fleet_->engines())
      if (view.url == engine.url()) return view;
    return {};
  }
  wire::GenerateOutput generate(env::GenerateClient& client, std::int64_t seed, const std::string& session = {}) {
    wire::GenerateRequest request;
    request.prompt_ids = {1, 2, 3};
    request.sampling.seed = static_cast<std::uint64_t>(seed);
    request.session_id = session;
    return io_.run_blocking(client.generate(std::move(request), net::Clock::now() + kLong), kLong);
  }
  void apply(std::int64_t version, const std::string& checksum = "00000000000000aa") {
    WeightUpdate update;
    update.version = PolicyVersion{version};
    update.folder = "/weights";
    update.verify = [checksum, wanted = fmt::format("\"policy_version\":{},", version)](const std::string& reply, const std::string& url) {
      if (reply.find(checksum) == std::string::npos || reply.find(wanted) == std::string::npos)
        fail(ErrorCode::kOutOfSync, "{} has other weights", url);
    };
    io_.run_blocking(updater_->apply(std::move(update), net::Clock::now() + 20s), kLong);
  }

  net::IoRuntime io_{2};
  std::shared_ptr<net::HttpClient> client_ = std::make_shared<net::HttpClient>(io_.executor(), quick_client());
  std::deque<ScriptedEngine> engines_;
  std::shared_ptr<Fleet> fleet_;
  std::shared_ptr<WeightUpdater> updater_;
};

TEST_F(FleetTest, EnginesJoinWithTheirLimitsAndLeaveWhenTheyAreDone) {
  ScriptedEngine& engine = add_engine();
  wait_for(engine, EngineState::kReady);
  EXPECT_EQ(view_of(engine).limits.max_requests, 4);
  EXPECT_THROW(fleet_->add(engine.url() + "/v1"), Error);
  EXPECT_THROW(fleet_->drain("http://127.0.0.1:1"), Error);
  fleet_->drain(engine.url());
  EXPECT_TRUE(prl::testing::eventually([&] { return fleet_->engines().empty(); }));
  try {
    io_.run_blocking(fleet_->acquire({}, net::Clock::now() + 50ms), kLong);
    ADD_FAILURE() << "a place on no engine";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeadline);
    EXPECT_THAT(error.what(), HasSubstr("there is no engine"));
  }
}

TEST_F(FleetTest, ASessionKeepsItsEngineAndALostEnginesRequestsGiveTheSameTokensElsewhere) {
  ScriptedEngine& first = add_engine();
  wait_for(first, EngineState::kReady);
  const auto client = make_routed_generate_client(fleet_, client_, {.model = "m"});
  const wire::GenerateOutput calm = generate(*client, 7, "s");
  ScriptedEngine& second = add_engine();
  wait_for(second, EngineState::kReady);
  generate(*client, 8, "s");
  EXPECT_EQ(first.seeds().size(), 2u) << "the session's prefix is there";
  first.change([](auto& script) { script.refuse_status = 503; });
  const wire::GenerateOutput moved = generate(*client, 7, "s");
  EXPECT_EQ(moved.token_ids, calm.token_ids);
  EXPECT_EQ(second.seeds(), std::vector<std::int64_t>{7});
  EXPECT_EQ(fleet_->counts().num_replayed, 1);
  EXPECT_EQ(view_of(first).num_lost, 1);
  first.change([](auto& script) { script.refuse_status = 0; });
  wait_for(first, EngineState::kReady);
}

class PrefixFleetTest : public FleetTest {
 protected:
  static FleetOptions by_prefixes() {
    FleetOptions options = testing::quick_fleet();
    options.router.spread = Spread::kPrefixes;
    return options;
  }
  PrefixFleetTest() : FleetTest(by_prefixes()) {}
};

TEST_F(PrefixFleetTest, PromptsFindTheirEngineUntilItHasOtherWeights) {
  ScriptedEngine& first = add_engine();
  ScriptedEngine& second = add_engine();
  wait_for(first, EngineState::kReady);
  wait_for(second, EngineState::kReady);
  const auto client = make_routed_generate_client(fleet_, client_, {.model = "m"});
  const auto ask = [&](std::int32_t first_token, std::int64_t seed) {
    wire::GenerateRequest request;
    request.prompt_ids.assign(64, first_token);
    request.sampling.seed = static_cast<std::uint64_t>(seed);
    return io_.run_blocking(client->generate(std::move(request), net::Clock::now() + kLong), kLong);
  };
  const wire::GenerateOutput calm = ask(1, 7);
  ask(2, 8);
  EXPECT_EQ(ask(1, 7).token_ids, calm.token_ids);
  ask(1, 9);
  EXPECT_EQ(first.seeds(), (std::vector<std::int64_t>{7, 7, 9}));
  EXPECT_EQ(second.seeds(), std::vector<std::int64_t>{8});
  EXPECT_GT(view_of(first).load.num_sent_bytes, 0);
  apply(1);
  EXPECT_EQ(view_of(first).load.num_sent_bytes, 0);
  EXPECT_EQ(view_of(second).load.num_sent_bytes, 0);
  EXPECT_EQ(ask(1, 7).token_ids, calm.token_ids);
}

TEST_F(PrefixFleetTest, BodiesOfClientsFindTheEngineOfTheirPrompt) {
  ScriptedEngine& first = add_engine();
  ScriptedEngine& second = add_engine();
  wait_for(first, EngineState::kReady);
  wait_for(second, EngineState::kReady);
  RouterServerOptions options;
  options.http.port = 0;
  RouterServer server(options, fleet_, updater_, client_);
  server.start();
  const auto post = [&](const std::string& prompt, int seed) {
    net::HttpCall call;
    call.method = "POST";
    call.url = fmt::format("http://127.0.0.1:{}/v1/completions", server.port());
    call.body = fmt::format(R"({{"prompt":"{}","seed":{},"stream":true}})", prompt, seed);
    call.deadline = net::Clock::now() + kLong;
    EXPECT_TRUE(io_.run_blocking(client_->call(std::move(call)), kLong).is_ok());
  };
  const std::string a(300, 'a'), b(200, 'b');
  post(a, 1);
  post(b, 2);
  post(a + " and more", 3);
  post(b + " and more", 4);
  EXPECT_EQ(first.seeds(), (std::vector<std::int64_t>{1, 3}));
  EXPECT_EQ(second.seeds(), (std::vector<std::int64_t>{2, 4}));
  server.stop(0ms);
}

class SilentEngineTest : public FleetTest {
 protected:
  SilentEngineTest() : FleetTest(testing::hasty_fleet(), 300ms) {}
};

TEST_F(SilentEngineTest, AnEngineThatHangsIsLostAndItsRequestsGoOn) {
  ScriptedEngine& first = add_engine();
  wait_for(first, EngineState::kReady);
  first.change([](auto& script) { script.is_silent = true; });
  ScriptedEngine& second = add_engine();
  wait_for(second, EngineState::kReady);
  const auto client = make_routed_generate_client(fleet_, client_, {.model = "m"});
  const wire::GenerateOutput output = generate(*client, 5);
  EXPECT_EQ(output.token_ids.front(), token_at(5, 0));
  EXPECT_EQ(view_of(first).state, EngineState::kDown);
  first.change([](auto& script) { script.is_silent = false; });
  wait_for(first, EngineState::kReady);
}

TEST_F(FleetTest, AnEngineThatMissesAnUpdateIsLeftOutAndCatchesUp) {
  ScriptedEngine& first = add_engine();
  ScriptedEngine& second = add_engine();
  wait_for(first, EngineState::kReady);
  wait_for(second, EngineState::kReady);
  apply(1);
  EXPECT_EQ(first.script().version, 1);
  EXPECT_EQ(second.script().version, 1);
  EXPECT_TRUE(first.updates().front().at("force").as_bool());
  second.change([](auto& script) { script.refuse_status = 503; });
  apply(2);
  EXPECT_EQ(view_of(second).state, EngineState::kBehind);
  EXPECT_THAT(view_of(second).problem, HasSubstr("503"));
  EXPECT_FALSE(first.updates().back().at("force").as_bool());
  second.change([](auto& script) { script.refuse_status = 0; });
  wait_for(second, EngineState::kReady);
  EXPECT_EQ(second.script().version, 2);
  EXPECT_EQ(view_of(second).version, PolicyVersion{2});
}

TEST_F(SilentEngineTest, OneSilentEngineDoesNotHoldAnUpdateUp) {
  ScriptedEngine& first = add_engine();
  ScriptedEngine& second = add_engine();
  wait_for(first, EngineState::kReady);
  wait_for(second, EngineState::kReady);
  second.change([](auto& script) { script.is_silent = true; });
  apply(3);
  EXPECT_EQ(first.script().version, 3);
  EXPECT_NE(view_of(second).state, EngineState::kReady);
  second.change([](auto& script) { script.is_silent = false; });
  wait_for(second, EngineState::kReady);
  EXPECT_EQ(second.script().version, 3);
}

TEST_F(FleetTest, AWrongProofEndsTheUpdateAndALoneEnginesRefusalIsTheError) {
  ScriptedEngine& first = add_engine();
  wait_for(first, EngineState::kReady);
  EXPECT_THROW(apply(1, "00000000000000bb"), Error);
  first.change([](auto& script) { script.refuse_status = 401; });
  try {
    apply(2);
    ADD_FAILURE() << "a refusal was taken for an update";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnauthorized);
  }
}

TEST_F(FleetTest, AnEngineThatWasStartedAnewWithOlderWeightsServesNothingBeforeItHasTheNewest) {
  ScriptedEngine& first = add_engine();
  wait_for(first, EngineState::kReady);
  apply(4);
  const auto client = make_routed_generate_client(fleet_, client_, {.model = "m"});
  first.change([](auto& script) { script.version = 0; });
  const wire::GenerateOutput output = generate(*client, 1);
  EXPECT_EQ(output.version_start, PolicyVersion{4});
  EXPECT_EQ(view_of(first).num_lost, 1);
  EXPECT_EQ(first.updates().size(), 2u);
}

TEST_F(FleetTest, AStreamGoesOnAtAnotherEngine) {
  ScriptedEngine& first = add_engine();
  wait_for(first, EngineState::kReady);
  ScriptedEngine& second = add_engine();
  wait_for(second, EngineState::kReady);
  first.change([](auto& script) { script.breaks_after = 5; });
  RouterServer server({.http = {.name = "router"}, .guard = {.host = "127.0.0.1"}}, fleet_, updater_, client_);
  server.start();
  net::BlockingHttpClient outside({});
  net::HttpCall call;
  call.method = "POST";
  call.url = fmt::format("http://127.0.0.1:{}/v1/completions", server.port());
  call.body = R"({"prompt":"x","stream":true,"seed":9})";
  std::string text, wanted;
  for (const net::SseEvent& event : outside.read_sse(call)) {
    if (event.data == "[DONE]") continue;
    const boost::json::value data = boost::json::parse(event.data);
    ASSERT_TRUE(data.as_object().contains("choices")) << event.data;
    text += std::string(data.at("choices").at(0).at("text").as_string());
  }
  for (std::int64_t i = 0; i < 12; ++i) wanted += fmt::format("<{}>", token_at(9, i));
  EXPECT_EQ(text, wanted);
  // An engine that broke off is back at once, but the rest is the other's.
  EXPECT_EQ(fleet_->counts().num_replayed, 1);
  // A request without a seed gets one, the same on both engines.
  first.change([](auto& script) { script.breaks_after = 3; });
  wait_for(first, EngineState::kReady);
  call.body = R"({"prompt":"x","stream":true})";
  const auto events = outside.read_sse(call);
  EXPECT_EQ(events.size(), 13u);
  EXPECT_EQ(first.seeds().back(), second.seeds().back());
  net::HttpCall scrape;
  scrape.url = fmt::format("http://127.0.0.1:{}/metrics", server.port());
  const net::HttpReply page = outside.call(scrape);
  EXPECT_THAT(page.body, HasSubstr("prl_router:requests_replayed_total 2\n"));
  server.stop(0ms);
}

TEST_F(SilentEngineTest, AnUpdateThatAllRefuseIsNotGivenToThoseThatComeBack) {
  ScriptedEngine& first = add_engine();
  ScriptedEngine& second = add_engine();
  wait_for(first, EngineState::kReady);
  wait_for(second, EngineState::kReady);
  apply(1);
  for (ScriptedEngine* engine : {&first, &second}) engine->change([](auto& script) { script.refuse_status = 404; });
  EXPECT_THROW(apply(2), Error);
  for (ScriptedEngine* engine : {&first, &second}) engine->change([](auto& script) { script.refuse_status = 0; });
  first.change([](auto& script) {
    script.is_silent = true;
    script.version = 0;  // it is started anew
  });
  wait_for(first, EngineState::kDown);
  first.change([](auto& script) { script.is_silent = false; });
  wait_for(first, EngineState::kReady);
  EXPECT_EQ(first.script().version, 1);
  EXPECT_EQ(view_of(first).version, PolicyVersion{1});
}

TEST_F(FleetTest, NamesOfAdaptersAreAnyText) {
  ScriptedEngine& engine = add_engine();
  wait_for(engine, EngineState::kReady);
  WeightUpdate update;
  update.version = PolicyVersion{1};
  update.folder = "/weights/step_1";
  update.adapter = "run 1&adapter=x/\xC3\xA9";
  update.verify = [](const std::string& reply, const std::string&) {
    if (reply.find("/weights/step_1") == std::string::npos) fail(ErrorCode::kOutOfSync, "another adapter's proof: {}", reply);
  };
  io_.run_blocking(updater_->apply(update, net::Clock::now() + 20s), kLong);
  EXPECT_TRUE(engine.script().adapters.contains(update.adapter));
}

TEST_F(FleetTest, EnginesBeyondTheLimitAreRefused) {
  FleetOptions options = testing::quick_fleet();
  options.max_engines = 1;
  Fleet fleet(io_.executor(), client_, options);
  fleet.add("http://127.0.0.1:1");
  try {
    fleet.add("http://127.0.0.1:2");
    ADD_FAILURE() << "a second engine";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOverloaded);
    EXPECT_THAT(error.what(), HasSubstr("1 engines are the limit"));
  }
}

class RouterServerTest : public FleetTest {
 protected:
  RouterServerTest() { serve(kLong); }
  void serve(std::chrono::milliseconds request_timeout) {
    server_ = std::make_unique<RouterServer>(
        RouterServerOptions{.http = {.name = "router"}, .guard = {.host = "127.0.0.1"}, .request_timeout = request_timeout}, fleet_,
        updater_, client_);
    server_->start();
  }
  net::HttpReply post(const std::string& path, std::string body) {
    net::BlockingHttpClient outside({});
    net::HttpCall call;
    call.method = "POST";
    call.url = fmt::format("http://127.0.0.1:{}{}", server_->port(), path);
    call.body = std::move(body);
    call.max_retries = 0;
    return outside.call(call);
  }
  std::unique_ptr<RouterServer> server_;
};

TEST_F(RouterServerTest, ABodyReachesTheEngineAsTheClientWroteIt) {
  ScriptedEngine& engine = add_engine();
  wait_for(engine, EngineState::kReady);
  std::string schema = R"({"maximum":123456789012345678901234567890,"default":1e400,"multipleOf":0.1})";
  for (int i = 0; i < 60; ++i) schema = R"({"items":)" + schema + "}";
  const net::HttpReply reply = post("/v1/completions", R"({"prompt":"x","stream":true,"seed":9,"tools":[)" + schema + "]}");
  EXPECT_EQ(reply.status, 200) << reply.body;
  ASSERT_EQ(engine.bodies().size(), 1u);
  EXPECT_THAT(engine.bodies().front(), HasSubstr(R"({"maximum":123456789012345678901234567890,"default":1e400,"multipleOf":1E-1})"));
  const net::HttpReply bad = post("/v1/completions", R"({"prompt":"x",})");
  EXPECT_EQ(bad.status, 400);
  EXPECT_THAT(bad.body, HasSubstr("not valid JSON near byte"));
  EXPECT_EQ(post("/v1/completions", std::string(1000, '[')).status, 400);
  EXPECT_EQ(post("/v1/completions", "[]").status, 400);
}

TEST_F(RouterServerTest, ARefusalThatDripsEndsWithTheRequestsTime) {
  ScriptedEngine& engine = add_engine();
  wait_for(engine, EngineState::kReady);
  serve(2s);
  engine.change([](auto& script) { script.drips = true; });
  const net::HttpReply reply = post("/v1/completions", R"({"prompt":"x","stream":true,"seed":9})");
  engine.change([](auto& script) { script.drips = false; });
  EXPECT_EQ(reply.status, 504) << reply.body;
  EXPECT_THAT(reply.body, HasSubstr("the deadline passed"));
}

TEST_F(RouterServerTest, AnUpdateSaysWhatItFound) {
  ScriptedEngine& engine = add_engine();
  wait_for(engine, EngineState::kReady);
  const net::HttpReply negative = post("/update_weights", R"({"weight_dir":"/weights","version":-3})");
  EXPECT_EQ(negative.status, 400);
  EXPECT_THAT(negative.body, HasSubstr("found -3"));
  const net::HttpReply nothing = post("/update_weights", R"({"version":3})");
  EXPECT_EQ(nothing.status, 400);
  EXPECT_THAT(nothing.body, HasSubstr("weight_dir: wanted the path of a Hugging Face folder, found nothing"));
  EXPECT_TRUE(engine.updates().empty());
}

}  // namespace
}  // namespace prl::router
