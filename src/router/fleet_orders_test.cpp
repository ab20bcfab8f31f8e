#include "router/fleet_orders.hpp"

#include <gmock/gmock.h>

#include <boost/json/parse.hpp>

#include <deque>
#include <future>

#include "base/error.hpp"
#include "base/testing/eventually.hpp"
#include "net/io_runtime.hpp"
#include "router/router_server.hpp"
#include "router/testing/scripted_engine.hpp"

namespace prl::router {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::ScriptedEngine;

constexpr auto kTestTime = 60s;
constexpr const char* kKey = "the-key-of-the-router";

/// Engines behind a router with a key.
class FleetOrdersTest : public ::testing::Test {
 protected:
  explicit FleetOrdersTest(FleetOptions options = testing::quick_fleet()) {
    fleet_ = std::make_shared<Fleet>(io_.executor(), client_, options);
    updater_ = std::make_shared<WeightUpdater>(fleet_, client_, WeightUpdaterOptions{.api_key = {}, .patience = kTestTime});
    server_ = std::make_unique<RouterServer>(
        RouterServerOptions{.http = {.name = "router"}, .guard = {.api_key = kKey, .host = "127.0.0.1"}, .update_timeout = 20s}, fleet_,
        updater_, client_);
    server_->start();
  }

  ScriptedEngine& add_engine() {
    engines_.emplace_back();
    return join(engines_.back());
  }
  ScriptedEngine& join(ScriptedEngine& engine) {
    fleet_->add(engine.url());
    wait_for(engine, EngineState::kReady);
    return engine;
  }
  void wait_for(const ScriptedEngine& engine, EngineState state) {
    ASSERT_TRUE(prl::testing::eventually([&] { return view_of(engine).state == state; })) << fleet_->describe();
  }
  EngineView view_of(const ScriptedEngine& engine) const {
    for (const EngineView& view : fleet_->engines())
      if (view.url == engine.url()) return view;
    return {};
  }
  net::HttpReply call(const char* method, const std::string& path, const std::string& body = {}, const std::string& key = kKey) {
    net::BlockingHttpClient outside({});
    net::HttpCall call;
    call.method = method;
    call.url = fmt::format("http://127.0.0.1:{}{}", server_->port(), path);
    call.body = body;
    call.bearer = key;
    call.max_retries = 0;
    return outside.call(call);
  }
  net::HttpReply load(const std::string& name, const std::string& folder, const char* path = "/load_lora_adapter") {
    return call("POST", path, fmt::format(R"({{"lora_name":"{}","lora_path":"{}"}})", name, folder));
  }

  net::IoRuntime io_{2};
  std::shared_ptr<net::HttpClient> client_ = std::make_shared<net::HttpClient>(io_.executor(), net::HttpClient::Options());
  std::deque<ScriptedEngine> engines_;
  std::shared_ptr<Fleet> fleet_;
  std::shared_ptr<WeightUpdater> updater_;
  std::unique_ptr<RouterServer> server_;
};

class SilentOrdersTest : public FleetOrdersTest {
 protected:
  SilentOrdersTest() : FleetOrdersTest(testing::hasty_fleet()) {}
};

using Adapters = std::map<std::string, std::string>;

TEST_F(SilentOrdersTest, AdaptersGoToAllEnginesAndToThoseThatComeLater) {
  EXPECT_EQ(load("a", "/one").status, 503) << "nobody is there";
  ScriptedEngine& first = add_engine();
  ScriptedEngine& second = add_engine();
  EXPECT_EQ(load("a", "/one").status, 200);
  EXPECT_EQ(load("b", "/two", "/v1/load_lora_adapter").body, "Success");
  EXPECT_EQ(load("a", "/three").status, 200);
  const Adapters wanted{{"a", "/three"}, {"b", "/two"}};
  EXPECT_EQ(first.script().adapters, wanted);
  EXPECT_EQ(second.script().adapters, wanted);
  EXPECT_EQ(add_engine().script().adapters, wanted) << "an engine that is ready has what the others have";
  // One that was away misses a load and an unload, and comes back as another process.
  second.change([](auto& script) { script.is_silent = true; });
  wait_for(second, EngineState::kDown);
  EXPECT_EQ(call("POST", "/v1/unload_lora_adapter", R"({"lora_name":"b"})").status, 200);
  EXPECT_EQ(load("c", "/four").status, 200);
  second.change([](auto& script) {
    script.adapters.erase("a");
    script.is_silent = false;
  });
  wait_for(second, EngineState::kReady);
  EXPECT_EQ(second.script().adapters, (Adapters{{"a", "/three"}, {"c", "/four"}}));
  EXPECT_EQ(call("POST", "/v1/unload_lora_adapter", R"({"lora_name":"b"})").status, 404);
}

TEST_F(FleetOrdersTest, ARefusalNamesTheEnginesAndChangesNone) {
  ScriptedEngine& first = add_engine();
  ScriptedEngine& second = add_engine();
  EXPECT_EQ(load("a", "/one").status, 200);
  second.change([](auto& script) { script.refuse_order_status = 404; });
  for (const char* name : {"a", "new"}) {
    const net::HttpReply refused = load(name, "/other");
    EXPECT_EQ(refused.status, 404);
    EXPECT_THAT(refused.body, AllOf(HasSubstr("1 of 2 engines refused"), HasSubstr(second.url()), HasSubstr("no such folder")));
    EXPECT_THAT(refused.body, ::testing::Not(HasSubstr(first.url())));
  }
  EXPECT_EQ(first.script().adapters, (Adapters{{"a", "/one"}}));
  EXPECT_EQ(second.script().adapters, (Adapters{{"a", "/one"}}));
  // vLLM's refusal of a name that is there comes from both.
  second.change([](auto& script) { script.refuse_order_status = 0; });
  const net::HttpReply twice = load("a", "/other", "/v1/load_lora_adapter");
  EXPECT_EQ(twice.status, 400);
  EXPECT_THAT(twice.body, AllOf(HasSubstr("2 of 2"), HasSubstr("already loaded")));
  EXPECT_EQ(first.script().adapters, (Adapters{{"a", "/one"}}));
}

TEST_F(FleetOrdersTest, ProofsCoverEachAdapterOnEachEngine) {
  ScriptedEngine& first = add_engine();
  ScriptedEngine& second = add_engine();
  ASSERT_EQ(load("a b", "/one").status, 200);
  EXPECT_THAT(call("GET", "/weight_proof?adapter=a%20b").body, HasSubstr("/one on 00000000000000aa"));
  EXPECT_EQ(call("GET", "/weight_proof?adapter=none").status, 404);
  EXPECT_EQ(call("GET", "/weight_proof").status, 200);
  second.change([](auto& script) { script.checksum = "00000000000000bb"; });
  EXPECT_THAT(call("GET", "/weight_proof?adapter=a%20b").body, HasSubstr("proves other weights"));
  const net::HttpReply unlike = load("c", "/two");
  EXPECT_EQ(unlike.status, 500);
  EXPECT_THAT(unlike.body, HasSubstr("proves other weights"));
  for (const ScriptedEngine* engine : {&first, &second}) EXPECT_FALSE(engine->script().adapters.contains("c"));
  // An engine that comes with another base is not used beside the first.
  engines_.emplace_back();
  engines_.back().change([](auto& script) { script.checksum = "00000000000000cc"; });
  fleet_->add(engines_.back().url());
  EXPECT_TRUE(prl::testing::eventually([&] { return view_of(engines_.back()).problem.find("proves other weights") != std::string::npos; }))
      << fleet_->describe();
  EXPECT_EQ(view_of(engines_.back()).state, EngineState::kStarting);
}

TEST_F(SilentOrdersTest, AnEngineThatAnswersNothingIsLeftOutAndHearsItLater) {
  ScriptedEngine& first = add_engine();
  ScriptedEngine& second = add_engine();
  FleetOrders quick(fleet_, updater_, client_, {.api_key = {}, .patience = 50ms});
  // These orders have heard of no engine yet: both are brought up once more.
  for (ScriptedEngine* engine : {&first, &second}) {
    fleet_->set_behind(view_of(*engine).id, "test");
    wait_for(*engine, EngineState::kReady);
  }
  second.change([](auto& script) { script.is_silent = true; });
  Order order{.kind = OrderKind::kAdapter, .name = "a", .path = "/load_lora_adapter", .body = {}, .effect = OrderEffect::kLoaded};
  order.body = {{"lora_name", "a"}, {"lora_path", "/one"}};
  const auto replies = io_.run_blocking(quick.carry_out(order, net::Clock::now() + 20s), kTestTime);
  EXPECT_EQ(replies.size(), 1u);
  EXPECT_NE(view_of(second).state, EngineState::kReady);
  second.change([](auto& script) { script.is_silent = false; });
  wait_for(second, EngineState::kReady);
  EXPECT_EQ(second.script().adapters, (Adapters{{"a", "/one"}}));
}

TEST_F(FleetOrdersTest, EnginesThatAnOrderCannotBeTakenBackFromAreLeftOutTogether) {
  std::vector<ScriptedEngine*> engines;
  for (int i = 0; i < 4; ++i) engines.push_back(&add_engine());
  constexpr auto kUndoTime = 3s;
  FleetOrders orders(fleet_, updater_, client_, {.api_key = {}, .patience = 20s, .undo_time = kUndoTime});
  for (ScriptedEngine* engine : engines) {
    fleet_->set_behind(view_of(*engine).id, "test");
    wait_for(*engine, EngineState::kReady);
  }
  engines.back()->change([](auto& script) { script.refuse_order_status = 404; });
  for (int i = 0; i < 3; ++i) engines[i]->change([](auto& script) { script.is_silent_on_unload = true; });
  Order order{.kind = OrderKind::kAdapter, .name = "a", .path = "/load_lora_adapter", .body = {}, .effect = OrderEffect::kLoaded};
  order.body = {{"lora_name", "a"}, {"lora_path", "/one"}};
  const net::TimePoint begin = net::Clock::now();
  EXPECT_THAT([&] { io_.run_blocking(orders.carry_out(order, net::Clock::now() + 20s), kTestTime); },
              ::testing::ThrowsMessage<Error>(HasSubstr("1 of 4 engines refused")));
  EXPECT_LT(net::Clock::now() - begin, 3 * kUndoTime) << "one after another they would take that long";
  for (int i = 0; i < 3; ++i) EXPECT_NE(view_of(*engines[i]).state, EngineState::kReady) << fleet_->describe();
  EXPECT_EQ(view_of(*engines.back()).state, EngineState::kReady);
  for (int i = 0; i < 3; ++i) engines[i]->change([](auto& script) { script.is_silent_on_unload = false; });
  for (int i = 0; i < 3; ++i) wait_for(*engines[i], EngineState::kReady);
  for (int i = 0; i < 3; ++i)
    EXPECT_THAT(engines[i]->script().adapters, ::testing::IsEmpty()) << "an engine rejoins without what was refused";
}

TEST_F(FleetOrdersTest, RunsAreToldToAllEnginesAndTheirNumbersAreSums) {
  ScriptedEngine& first = add_engine();
  EXPECT_EQ(call("POST", "/runs/pause", R"({"name":"a"})").status, 404);
  EXPECT_EQ(call("POST", "/runs", R"({"name":"a","weight":3,"api_key":"short"})").status, 400);
  EXPECT_EQ(call("POST", "/runs", R"({"name":"a","weight":3,"api_key":"a-key-of-run-a-alone"})").status, 200);
  EXPECT_EQ(call("POST", "/runs", R"({"name":"b","api_key":"a-key-of-run-a-alone"})").status, 409);
  EXPECT_EQ(call("POST", "/runs", R"({"name":"b"})").status, 200);
  EXPECT_EQ(call("POST", "/runs", R"({"name":"a","max_tokens_in_flight":100})").status, 200);
  EXPECT_EQ(call("POST", "/runs/pause", R"({"name":"a"})").status, 200);
  EXPECT_EQ(call("POST", "/runs/remove", R"({"name":"b"})").status, 200);
  ScriptedEngine& late = add_engine();
  for (ScriptedEngine* engine : {&first, &late}) {
    EXPECT_EQ(engine->script().runs, (std::map<std::string, std::string>{{"a", "pause"}}));
    EXPECT_EQ(engine->script().weights.at("a"), 3.0);
  }
  const boost::json::value list = call("GET", "/runs").json();
  ASSERT_EQ(list.at("data").as_array().size(), 1u);
  EXPECT_EQ(list.at("data").at(0).at("num_tokens").as_int64(), 20);
  EXPECT_TRUE(list.at("data").at(0).at("has_api_key").as_bool());
  EXPECT_EQ(call("POST", "/runs/cancel", R"({"name":"a"})").json().at("num_requests").as_int64(), 6);
  // One engine refuses: the other's run stays as it was.
  late.change([](auto& script) { script.refuse_order_status = 409; });
  EXPECT_EQ(call("POST", "/runs/resume", R"({"name":"a"})").status, 409);
  EXPECT_EQ(first.script().runs.at("a"), "pause");
}

TEST_F(FleetOrdersTest, ARunsKeyOpensItsAdapterAlone) {
  add_engine();
  const std::string key = "a-key-of-run-a-alone";
  ASSERT_EQ(call("POST", "/runs", fmt::format(R"({{"name":"a","api_key":"{}"}})", key)).status, 200);
  const std::string body = R"({"model":"a","sampling_params":{"seed":1},"token_ids":[1]})";
  EXPECT_EQ(call("POST", "/inference/v1/generate", body, key).status, 200);
  EXPECT_EQ(call("POST", "/inference/v1/generate", R"({"sampling_params":{"seed":1},"token_ids":[1]})", key).status, 200);
  EXPECT_EQ(call("POST", "/inference/v1/generate", R"({"model":"b","token_ids":[1]})", key).status, 403);
  EXPECT_EQ(call("GET", "/runs", {}, key).status, 401);
  EXPECT_EQ(call("POST", "/inference/v1/generate", body, "another-key-altogether").status, 401);
  ASSERT_EQ(call("POST", "/runs/remove", R"({"name":"a"})").status, 200);
  EXPECT_EQ(call("POST", "/inference/v1/generate", body, key).status, 401);
}

TEST_F(FleetOrdersTest, TheNumberOfNamesIsBounded) {
  add_engine();
  FleetOrders few(fleet_, updater_, client_, {.api_key = {}, .max_names = 2});
  fleet_->set_behind(view_of(engines_.back()).id, "test");
  wait_for(engines_.back(), EngineState::kReady);
  const auto order = [&](const std::string& name, OrderEffect effect) {
    Order one{.kind = OrderKind::kAdapter, .name = name, .path = "/load_lora_adapter", .body = {}, .effect = effect};
    if (effect == OrderEffect::kRemoved) one.path = "/v1/unload_lora_adapter";
    one.body = {{"lora_name", name}, {"lora_path", "/x"}};
    return io_.run_blocking(few.carry_out(one, net::Clock::now() + 20s), kTestTime);
  };
  for (int i = 0; i < 5; ++i) {
    order(fmt::format("n{}", i), OrderEffect::kLoaded);
    order(fmt::format("n{}", i), OrderEffect::kRemoved);
  }
  order("a", OrderEffect::kLoaded);
  order("b", OrderEffect::kLoaded);
  order("a", OrderEffect::kLoaded);
  try {
    order("c", OrderEffect::kLoaded);
    ADD_FAILURE() << "a third name of two";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOverloaded);
  }
}

TEST(TurnsTest, OneAtATimeInOrderOfArrivalAndNotTooMany) {
  net::IoRuntime io(2);
  const Turns turns(1);
  std::optional<Turns::Turn> first(io.run_blocking(turns.take(net::Clock::now() + kTestTime), kTestTime));
  EXPECT_THROW(io.run_blocking(turns.take(net::Clock::now() + 20ms), kTestTime), Error) << "its time passes";
  auto waiting = std::async(std::launch::async, [&] {
    first.reset();
    return io.run_blocking(turns.take(net::Clock::now() + kTestTime), kTestTime);
  });
  const Turns::Turn second = waiting.get();
  const auto code_of = [&](net::Clock::duration patience) {
    try {
      io.run_blocking(turns.take(net::Clock::now() + patience), kTestTime);
      return ErrorCode::kInternal;
    } catch (const Error& error) {
      return error.code();
    }
  };
  auto third = std::async(std::launch::async, [&] {
    ErrorCode code = ErrorCode::kOverloaded;
    while (code == ErrorCode::kOverloaded) code = code_of(2s);  // the other one waited
    return code;
  });
  EXPECT_TRUE(prl::testing::eventually([&] { return code_of(0s) == ErrorCode::kOverloaded; })) << "a second waits where one may";
  EXPECT_EQ(third.get(), ErrorCode::kDeadline);
}

}  // namespace
}  // namespace prl::router
