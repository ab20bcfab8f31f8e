#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "engine/adapter_set.hpp"
#include "engine/core.hpp"
#include "engine/test_support.hpp"

namespace prl::engine {
namespace {
using testing::Collected;
using testing::expected_output;
using testing::FakeRunner;
using wire::FinishReason;

constexpr std::int32_t kVocab = 1000;

/// An engine whose requests name the adapters "a", "b" or none. The adapters change nothing about what FakeRunner draws.
class TenantsTest : public ::testing::Test {
 protected:
  void make(std::int64_t max_num_seqs, std::int64_t num_blocks = 4096) {
    CoreOptions options;
    options.num_blocks = num_blocks;
    options.block_size = 4;
    options.scheduler.max_num_seqs = max_num_seqs;
    options.adapters = std::make_shared<AdapterSet>(4);
    core_ = std::make_unique<EngineCore>(options, std::make_unique<FakeRunner>(options.num_blocks, options.block_size, kVocab));
    for (const char* name : {"a", "b"}) {
      served_[name] = std::make_shared<ServedAdapter>();
      served_[name]->name = name;
      served_[name]->id = served_.size();
      served_[name]->weights.ready = std::make_shared<nn::Adapter>();
    }
  }
  std::shared_ptr<Collected> add(const std::string& adapter, std::int64_t num_prompt_tokens, std::int64_t max_new_tokens,
                                 std::int32_t priority = 0) {
    ResolvedRequest request;
    const std::uint64_t id = ++num_added_;
    for (std::int64_t i = 0; i < num_prompt_tokens; ++i) request.prompt_ids.push_back(static_cast<std::int32_t>(id * 7 + i) % kVocab);
    request.max_new_tokens = max_new_tokens;
    request.seed = id;
    request.priority = priority;
    if (!adapter.empty()) request.served = served_.at(adapter);
    wanted_[id] = expected_output(request, id, PolicyVersion{0}, kVocab);
    auto collected = std::make_shared<Collected>();
    core_->add(RequestId{id}, std::move(request), [collected](const StepEvent& event) { collected->on_event(event); });
    got_[id] = collected;
    return collected;
  }
  TenantStats stats(const std::string& name) {
    for (TenantStats& one : core_->tenants().stats())
      if (one.name == name) return one;
    throw std::runtime_error("no tenant " + name);
  }
  void set(const std::string& name, const TenantOptions& options) {
    core_->deliver();
    core_->tenants().set(name, options);
  }
  void step(int count) {
    for (int i = 0; i < count && core_->step(); ++i) core_->scheduler().check_integrity();
  }
  void drain() {
    int num_left = 100'000;
    while (core_->step()) {
      core_->scheduler().check_integrity();
      ASSERT_GT(num_left--, 0);
    }
  }
  /// Every request has got what it would have got alone.
  void expect_exact() {
    for (const auto& [id, collected] : got_) {
      ASSERT_TRUE(collected->is_over) << id;
      EXPECT_EQ(collected->output.token_ids, wanted_.at(id)) << id;
    }
  }

  std::unique_ptr<EngineCore> core_;
  std::map<std::string, ServedAdapterPtr> served_;
  std::map<std::uint64_t, std::vector<std::int32_t>> wanted_;
  std::map<std::uint64_t, std::shared_ptr<Collected>> got_;
  std::uint64_t num_added_ = 0;
};

/// Both keep requests waiting; their lengths are drawn from another distribution each.
TEST_F(TenantsTest, TokensUnderLoadAreAsTheWeights) {
  for (const auto& [weight_a, weight_b] : {std::pair(1.0, 3.0), std::pair(1.0, 1.0), std::pair(2.0, 0.5)}) {
    SCOPED_TRACE(weight_b);
    make(8);
    set("a", {.weight = weight_a});
    set("b", {.weight = weight_b});
    std::mt19937 random(3);
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    TenantStats begin_a, begin_b;
    for (int i = 0; i < 4000; ++i) {
      if (i == 500) begin_a = stats("a"), begin_b = stats("b");
      while (stats("a").num_waiting < 4) add("a", draw(4, 40), draw(5, 20));
      while (stats("b").num_waiting < 4) add("b", draw(20, 60), draw(10, 80));
      step(1);
    }
    const auto tokens_a = static_cast<double>(stats("a").num_tokens - begin_a.num_tokens);
    const auto tokens_b = static_cast<double>(stats("b").num_tokens - begin_b.num_tokens);
    EXPECT_NEAR(tokens_b / tokens_a, weight_b / weight_a, 0.1 * weight_b / weight_a) << tokens_a << " and " << tokens_b;
    drain();
    expect_exact();
    got_.clear();
  }
}

TEST_F(TenantsTest, WhoeverHadNothingToRunSavesNothingUp) {
  make(4);
  set("a", {});
  set("b", {});
  for (int i = 0; i < 2000; ++i) {  // b alone for a long time
    while (stats("b").num_waiting < 2) add("b", 8, 8);
    step(1);
  }
  const std::int64_t begin_b = stats("b").num_tokens;
  for (int i = 0; i < 400; ++i) {
    while (stats("a").num_waiting < 2) add("a", 8, 8);
    while (stats("b").num_waiting < 2) add("b", 8, 8);
    step(1);
  }
  const auto tokens_a = static_cast<double>(stats("a").num_tokens), tokens_b = static_cast<double>(stats("b").num_tokens - begin_b);
  EXPECT_NEAR(tokens_a / tokens_b, 1.0, 0.15) << tokens_a << " and " << tokens_b;
  drain();
  expect_exact();
}

TEST_F(TenantsTest, APausedTenantHoldsNoPlaceAndGoesOnToTheSameTokens) {
  make(2);
  set("a", {});
  const auto first = add("a", 5, 30);
  add("a", 6, 30);
  const auto other = add("", 5, 10);
  step(3);
  EXPECT_EQ(stats("a").num_running, 1);  // the other place is the other's
  set("a", {.state = TenantState::kPaused});
  EXPECT_EQ(stats("a").num_running, 0);
  EXPECT_EQ(stats("a").num_tokens_in_flight, 0);
  drain();
  EXPECT_TRUE(other->is_over);
  EXPECT_FALSE(first->is_over);
  EXPECT_TRUE(core_->is_idle());  // the engine's thread sleeps
  EXPECT_EQ(stats("a").num_waiting, 2);
  set("a", {});
  EXPECT_FALSE(core_->is_idle());
  drain();
  expect_exact();
}

TEST_F(TenantsTest, TokensInFlightStayBelowTheLimit) {
  make(16);
  set("a", {.max_tokens_in_flight = 60});
  for (int i = 0; i < 12; ++i) add("a", 10, 10);
  for (int i = 0; i < 3; ++i) add("b", 10, 10);
  step(1);
  EXPECT_EQ(core_->scheduler().num_running(), 6);  // three of each
  EXPECT_EQ(stats("a").num_tokens_in_flight, 60);
  for (int i = 0; i < 200 && core_->step(); ++i) ASSERT_LE(stats("a").num_tokens_in_flight, 60);
  // One that needs more by itself runs alone.
  const auto large = add("a", 80, 10);
  const auto small = add("a", 10, 10);
  step(1);
  EXPECT_EQ(stats("a").num_running, 1);
  EXPECT_EQ(stats("a").num_waiting, 1);
  drain();
  EXPECT_TRUE(large->is_over && small->is_over);
  expect_exact();
}

TEST_F(TenantsTest, PriorityComesBeforeTheShare) {
  make(1);
  set("a", {});
  set("b", {});
  add("a", 4, 50);
  step(2);
  const auto late = add("a", 4, 4, -1);
  const auto owed = add("b", 4, 4);
  while (!late->is_over) ASSERT_TRUE(core_->step());
  EXPECT_FALSE(owed->is_over);
  drain();
  expect_exact();
}

TEST_F(TenantsTest, RemovalLeavesItsRequests) {
  make(3);
  set("a", {.weight = 2});
  set("b", {});
  std::vector<std::shared_ptr<Collected>> of_b;
  for (int i = 0; i < 4; ++i) add("a", 4, 20), of_b.push_back(add("b", 4, 20));
  step(3);
  set("b", {.state = TenantState::kPaused});
  drain();
  for (const auto& one : of_b) EXPECT_FALSE(one->is_over);
  core_->tenants().remove("b");
  drain();
  for (const auto& one : of_b) EXPECT_EQ(one->output.finish_reason, FinishReason::kLength);
  expect_exact();
  EXPECT_EQ(core_->tenants().stats().size(), 1u);
}

}  // namespace
}  // namespace prl::engine
