// Adapters in the engine: rows under any of them have the trainer's bits_of, whatever shares their batch; updates, prefixes and limits.
// Compiled a second time for a GPU, where steps of decoding are recorded and adapters lie in slots.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <condition_variable>
#include <mutex>
#include <set>

#include "base/normal_draws.hpp"
#include "base/testing/eventually.hpp"
#include "device/testing/test_runtime.hpp"
#include "engine/adapter_set.hpp"
#include "engine/engine.hpp"
#include "engine/test_support.hpp"
#include "nn/decoder.hpp"
#include "nn/init_model.hpp"
#include "nn/peft.hpp"

namespace prl::engine {
namespace {
using namespace std::chrono_literals;
using testing::Collected;
using ::testing::HasSubstr;

using prl::testing::kPatience;
constexpr std::int64_t kAdapterVocab = 300;
constexpr std::size_t kNumAdapters = 16;

std::string name_of(std::size_t i) { return fmt::format("adapter-{}", i); }

/// A small model and adapters of different ranks and modules, as a trainer holds them.
struct Lab {
  explicit Lab(DType compute_dtype) : session(make_test_runtime(), 2), compute(compute_dtype) {
    config = nn::make_model_config({.family = "qwen3",
                                    .vocab_size = kAdapterVocab,
                                    .hidden_size = 64,
                                    .intermediate_size = 96,
                                    .num_layers = 2,
                                    .num_heads = 4,
                                    .num_kv_heads = 2,
                                    .head_dim = 16,
                                    .max_position = 512});
    parameters = std::make_unique<nn::Parameters>(session.context().runtime, config);
    parameters->init_random(7, 0.2f);
    trainable = std::make_unique<nn::TrainableModel>(session.context(), *parameters, nn::ActivationCheckpointing{});
    base = nn::make_weights(session.context(), *parameters, compute, PolicyVersion{1}, false, nullptr);
    for (std::size_t i = 0; i < kNumAdapters; ++i) adapters.push_back(make(i));
  }
  nn::AdapterPtr make(std::size_t seed) {
    static const std::vector<std::string> kTargets[] = {
        {"q_proj", "v_proj"}, {"gate_proj", "up_proj", "down_proj"}, {"o_proj", "k_proj", "q_proj"}};
    nn::AdapterConfig wanted;
    wanted.rank = static_cast<std::int64_t>(1 + (seed * 5) % 13);
    wanted.alpha = 8;
    wanted.target_modules = kTargets[seed % 3];
    nn::Parameters trained(session.context().runtime, config, nn::make_adapter_table(config, wanted));
    nn::init_adapter(trained, seed);
    Rng rng(seed, 3);
    for (nn::NamedParameter& p : trained.named())
      if (!nn::is_lora_a(p.block)) {
        const std::vector<float> values = normal_draws(rng, p.num_elements(), 0.3f);
        p.value.runtime()->copy_from_host(p.value.data(), values.data(), values.size() * sizeof(float));
      }
    session.context().runtime->synchronize();
    return nn::adapt_weights(session.context(), trained, wanted, compute, base, PolicyVersion{1})->adapter;
  }
  nn::WeightsPtr with(const nn::AdapterPtr& adapter) const {
    auto weights = std::make_shared<nn::Weights>(*base);
    weights->adapter = adapter;
    return weights;
  }
  /// The trainer's log-probabilities of an output.
  std::vector<float> evaluate(const nn::AdapterPtr& adapter, const std::vector<std::int32_t>& prompt,
                              const std::vector<std::int32_t>& output) {
    std::vector<std::int32_t> ids = prompt;
    ids.insert(ids.end(), output.begin(), output.end());
    std::vector<std::int32_t> positions(ids.size()), targets(ids.begin() + 1, ids.end());
    for (std::size_t i = 0; i < ids.size(); ++i) positions[i] = static_cast<std::int32_t>(i);
    targets.push_back(-1);
    const std::vector<float> temperatures(ids.size(), 1.0f);
    const std::vector<std::int32_t> cu_seqlens = {0, static_cast<std::int32_t>(ids.size())};
    const auto stats = trainable->evaluate(with(adapter), {ids, positions, cu_seqlens}, targets, temperatures);
    return {stats.logp_T.begin() + static_cast<std::ptrdiff_t>(prompt.size()) - 1, stats.logp_T.end() - 1};
  }

  ops::OpSession session;
  DType compute;
  nn::ModelConfig config;
  std::unique_ptr<nn::Parameters> parameters;
  std::unique_ptr<nn::TrainableModel> trainable;
  nn::WeightsPtr base;
  std::vector<nn::AdapterPtr> adapters;
};

class AdapterInbox {
 public:
  /// With `held_at` the engine stands still from that many tokens on, until go_on().
  explicit AdapterInbox(std::size_t held_at = SIZE_MAX) : held_at_(held_at) {}
  void push(const StepEvent& event) {
    std::unique_lock lock(mutex_);
    num_tokens_ += event.delta.token_ids.size();
    collected_.on_event(event);
    changed_.notify_all();
    PRL_CHECK(changed_.wait_for(lock, kPatience, [&] { return num_tokens_ < held_at_; }), "the engine was held for ever");
  }
  void go_on() {
    const std::lock_guard lock(mutex_);
    held_at_ = SIZE_MAX;
    changed_.notify_all();
  }
  const wire::GenerateOutput& wait() {
    std::unique_lock lock(mutex_);
    PRL_CHECK(changed_.wait_for(lock, kPatience, [&] { return collected_.is_over; }), "the request never ended");
    return collected_.output;
  }
  void wait_for_tokens(std::size_t count) {
    std::unique_lock lock(mutex_);
    PRL_CHECK(changed_.wait_for(lock, kPatience, [&] { return num_tokens_ >= count; }), "{} tokens never came", count);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t num_tokens_ = 0, held_at_;
  Collected collected_;
};

std::vector<std::int32_t> random_adapter_prompt(std::size_t length, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<std::int32_t> prompt(length);
  for (auto& id : prompt) id = static_cast<std::int32_t>(rng.next_below(kAdapterVocab));
  return prompt;
}

struct AdapterRequest : wire::GenerateRequest {
  std::string adapter;
};

AdapterRequest request_of(std::vector<std::int32_t> prompt, std::int32_t max_tokens, std::uint64_t seed, std::string adapter) {
  AdapterRequest request;
  request.prompt_ids = std::move(prompt);
  request.sampling.max_tokens = max_tokens;
  request.sampling.seed = seed;
  request.sampling.ignore_eos = true;
  request.adapter = std::move(adapter);
  return request;
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> out;
  for (const float value : values) out.push_back(std::bit_cast<std::uint32_t>(value));
  return out;
}

class Adapters : public ::testing::TestWithParam<DType> {
 protected:
  Adapters() : lab_(GetParam()) {}
  void make(EngineOptions options) {
    options.max_model_len = 256;
    if (options.num_blocks == 0) options.num_blocks = 256;
    options.max_num_seqs = 40;
    options.num_threads = 2;
    if (options.adapters == nullptr) options.adapters = std::make_shared<AdapterSet>(kNumAdapters);
    engine_ = std::make_unique<Engine>(lab_.session.context().runtime, options, lab_.base);
    for (std::size_t i = 0; i < kNumAdapters; ++i) engine_->adapters().set(name_of(i), PolicyVersion{1}, {lab_.adapters[i], nullptr});
  }
  std::shared_ptr<AdapterInbox> submit(const AdapterRequest& request, std::size_t held_at = SIZE_MAX) {
    auto inbox = std::make_shared<AdapterInbox>(held_at);
    engine_->submit(
        request, [inbox](const StepEvent& event) { inbox->push(event); }, request.adapter);
    return inbox;
  }
  wire::GenerateOutput generate(const AdapterRequest& request) { return submit(request)->wait(); }
  std::vector<wire::GenerateOutput> run_together(const std::vector<AdapterRequest>& requests) {
    engine_->pause(kPatience);
    std::vector<std::shared_ptr<AdapterInbox>> inboxes;
    for (const auto& request : requests) inboxes.push_back(submit(request));
    engine_->resume();
    std::vector<wire::GenerateOutput> outputs;
    for (auto& inbox : inboxes) outputs.push_back(inbox->wait());
    return outputs;
  }
  /// Two rows of each adapter and of none, in no order, some with equal prompts.
  static std::vector<AdapterRequest> mixed() {
    std::vector<AdapterRequest> requests;
    for (std::size_t i = 0; i < 2 * (kNumAdapters + 1); ++i) {
      const std::size_t adapter = (i * 7) % (kNumAdapters + 1);
      requests.push_back(request_of(random_adapter_prompt(3 + (i * 37) % 70, i % 4), static_cast<std::int32_t>(4 + (i * 5) % 20), i,
                                    adapter == kNumAdapters ? "" : name_of(adapter)));
    }
    return requests;
  }
  nn::AdapterPtr adapter_of(const AdapterRequest& request) const {
    for (std::size_t i = 0; i < kNumAdapters; ++i)
      if (request.adapter == name_of(i)) return lab_.adapters[i];
    return nullptr;
  }
  void expect_exact(const AdapterRequest& request, const wire::GenerateOutput& output) {
    ASSERT_EQ(output.token_ids.size(), static_cast<std::size_t>(*request.sampling.max_tokens)) << output.error;
    EXPECT_EQ(bits_of(output.logprobs), bits_of(lab_.evaluate(adapter_of(request), request.prompt_ids, output.token_ids)))
        << request.adapter;
  }

  Lab lab_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(Adapters, ABatchOfSixteenAndNoneHasTheBitsOfTheTrainerAndOfRowsAlone) {
  make({});
  const auto requests = mixed();
  const auto together = run_together(requests);
  std::set<std::vector<std::uint32_t>> different;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    expect_exact(requests[i], together[i]);
    different.insert(bits_of(together[i].logprobs));
  }
  EXPECT_EQ(different.size(), requests.size());
  engine_->reset_prefix_cache();
  for (std::size_t i = 0; i < requests.size(); i += 3) {
    const auto alone = generate(requests[i]);
    EXPECT_EQ(alone.token_ids, together[i].token_ids) << i;
    EXPECT_EQ(bits_of(alone.logprobs), bits_of(together[i].logprobs)) << i;
  }
}

TEST_P(Adapters, ChunkedPrefillAndPreemptionChangeNoBit) {
  EngineOptions options;
  options.max_num_batched_tokens = 45;
  options.num_blocks = 24;  // for a part of the requests only
  make(options);
  const auto requests = mixed();
  const auto outputs = run_together(requests);
  for (std::size_t i = 0; i < requests.size(); ++i) expect_exact(requests[i], outputs[i]);
}

TEST_P(Adapters, GuessesChangeNoBitAndAreThoseOfTheAdapter) {
  EngineOptions options;
  options.drafts.num_tokens = 5;
  make(options);
  const auto requests = mixed();
  for (int round = 0; round < 2; ++round) {
    const auto outputs = run_together(requests);
    for (std::size_t i = 0; i < requests.size(); ++i) expect_exact(requests[i], outputs[i]);
  }
  const EngineStats before = engine_->stats();
  // A GPU has fewer where its steps were slow at first (DraftCost).
  const bool is_gpu = lab_.session.context().runtime->device().kind == DeviceKind::kCuda;
  EXPECT_GT(before.num_accepted_tokens, is_gpu ? 0 : 100) << "the second round follows the first";
  auto elsewhere = requests;  // the same prompts of other adapters
  for (AdapterRequest& request : elsewhere) request.adapter = request.adapter.empty() ? name_of(0) : "";
  const auto outputs = run_together(elsewhere);
  for (std::size_t i = 0; i < elsewhere.size(); ++i) expect_exact(elsewhere[i], outputs[i]);
}

TEST_P(Adapters, BlocksFromHostMemoryAreThoseOfAnAdapterAndItsVersion) {
  EngineOptions options;
  options.num_blocks = 16;  // of one sequence
  options.num_host_blocks = 512;
  make(options);
  const auto requests = mixed();
  run_together(requests);
  const EngineStats before = engine_->stats();
  const auto outputs = run_together(requests);
  for (std::size_t i = 0; i < requests.size(); ++i) expect_exact(requests[i], outputs[i]);
  EXPECT_GT(engine_->stats().num_host_hit_tokens, before.num_host_hit_tokens);
  // New weights of an adapter find nothing, those of the others all there was.
  const auto prompt = random_adapter_prompt(77, 1);
  for (std::size_t i = 0; i < 4; ++i) generate(request_of(prompt, 8, 1, name_of(i)));
  const nn::AdapterPtr other = lab_.make(99);
  engine_->adapters().set(name_of(0), PolicyVersion{1}, {other, nullptr});
  const auto updated = generate(request_of(prompt, 8, 1, name_of(0)));
  EXPECT_EQ(updated.num_cached_tokens, 0);
  EXPECT_EQ(bits_of(updated.logprobs), bits_of(lab_.evaluate(other, prompt, updated.token_ids)));
  const auto kept = generate(request_of(prompt, 8, 1, name_of(1)));
  EXPECT_EQ(kept.num_cached_tokens, 64);
  expect_exact(request_of(prompt, 8, 1, name_of(1)), kept);
}

TEST_P(Adapters, FewPlacesForManyAdaptersOnlyTakeLonger) {
  EngineOptions options;
  options.adapters = std::make_shared<AdapterSet>(2);
  make(options);
  const auto requests = mixed();
  const auto outputs = run_together(requests);
  for (std::size_t i = 0; i < requests.size(); ++i) expect_exact(requests[i], outputs[i]);
}

TEST_P(Adapters, PrefixesAreThoseOfAnAdapterAndItsVersion) {
  make({});
  const auto prompt = random_adapter_prompt(77, 1);
  const auto cached_with = [&](const std::string& adapter) {
    const auto request = request_of(prompt, 8, 1, adapter);
    const auto output = generate(request);
    if (adapter != name_of(0)) expect_exact(request, output);
    return output.num_cached_tokens;
  };
  EXPECT_EQ(cached_with(""), 0);
  EXPECT_EQ(cached_with(name_of(0)), 0);
  EXPECT_EQ(cached_with(name_of(1)), 0);
  EXPECT_EQ(cached_with(name_of(1)), 64);
  EXPECT_EQ(cached_with(""), 64);
  EXPECT_EQ(cached_with(name_of(0)), 64);
  const nn::AdapterPtr other = lab_.make(99);
  engine_->adapters().set(name_of(0), PolicyVersion{1}, {other, nullptr});  // the same version: it is its weights that count
  const auto request = request_of(prompt, 8, 1, name_of(0));
  const auto updated = generate(request);
  EXPECT_EQ(updated.num_cached_tokens, 0);
  EXPECT_EQ(bits_of(updated.logprobs), bits_of(lab_.evaluate(other, prompt, updated.token_ids)));
  EXPECT_EQ(cached_with(name_of(1)), 64);
}

TEST_P(Adapters, AnUpdateInFlightPausesNothingAndMarksTheTokens) {
  make({});
  const auto own = request_of(random_adapter_prompt(9, 1), 200, 1, name_of(3)),
             other = request_of(random_adapter_prompt(9, 1), 200, 1, name_of(4)),
             none = request_of(random_adapter_prompt(9, 1), 200, 1, "");
  auto under_way = submit(own, 3), beside = submit(other), plain = submit(none);
  under_way->wait_for_tokens(3);
  engine_->adapters().set(name_of(3), PolicyVersion{8}, {lab_.make(50), nullptr});
  under_way->go_on();
  const auto& output = under_way->wait();
  ASSERT_EQ(output.token_ids.size(), 200u) << output.error;
  EXPECT_EQ(output.version_start.value, 1);
  EXPECT_EQ(output.version_end.value, 8);
  EXPECT_TRUE(std::ranges::is_sorted(output.versions));
  expect_exact(other, beside->wait());
  expect_exact(none, plain->wait());
  EXPECT_EQ(plain->wait().version_end.value, 1);
  // What was cached of both versions together is found by nobody.
  EXPECT_EQ(generate(request_of(own.prompt_ids, 4, 1, name_of(3))).version_start.value, 8);
  std::vector<std::int32_t> longer = own.prompt_ids;
  longer.insert(longer.end(), output.token_ids.begin(), output.token_ids.end());
  EXPECT_EQ(generate(request_of(longer, 4, 1, name_of(3))).num_cached_tokens, 0);
}

TEST_P(Adapters, NamesThatAreGoneAreRefusedAndRequestsInFlightEnd) {
  make({});
  const auto request = request_of(random_adapter_prompt(9, 1), 150, 1, name_of(5));
  auto under_way = submit(request, 1);
  under_way->wait_for_tokens(1);
  EXPECT_TRUE(engine_->adapters().remove(name_of(5)));
  EXPECT_FALSE(engine_->adapters().remove(name_of(5)));
  try {
    submit(request);
    FAIL() << "an adapter that is gone was served";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    EXPECT_THAT(error.what(), HasSubstr("adapter-5"));
  }
  under_way->go_on();
  expect_exact(request, under_way->wait());
}

TEST_P(Adapters, TheirProofIsThatOfTheModelWithThem) {
  make({});
  const WeightProof base = engine_->proof(kPatience), one = engine_->proof_of(name_of(1), kPatience),
                    two = engine_->proof_of(name_of(2), kPatience);
  EXPECT_EQ(one.checksum, nn::checksum(lab_.session.context(), *lab_.with(lab_.adapters[1])).combined);
  EXPECT_NE(one.checksum, base.checksum);
  EXPECT_NE(one.checksum, two.checksum);
  EXPECT_NE(bits_of(one.probe_logprobs), bits_of(base.probe_logprobs));
}

INSTANTIATE_TEST_SUITE_P(Engine, Adapters, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& one) { return one.param == DType::kF32 ? "F32" : "BF16"; });

/// Makes adapters of nothing and counts them.
class CountingRunner final : public ModelRunner {
 public:
  void begin(const StepPlan&, StepOutput&) override {}
  void finish(const StepPlan&, StepOutput&) override {}
  void set_weights(nn::WeightsPtr) override {}
  nn::WeightsPtr weights() const override { return nullptr; }
  WeightProof prove() override { return {}; }
  nn::AdapterPtr make_adapter(const nn::StoredAdapter&) override {
    ++num_made;
    return std::make_shared<nn::Adapter>();
  }
  int num_made = 0;
};

TEST(AdapterSet, TheLeastRecentlyUsedLeaveTheDeviceAndComeBack) {
  AdapterSet set(2);
  CountingRunner runner;
  const auto stored = std::make_shared<const nn::StoredAdapter>();
  for (const char* name : {"a", "b", "c"}) set.set(name, PolicyVersion{1}, {nullptr, stored});
  const auto use = [&](const std::vector<std::string>& names) {
    std::vector<ResolvedRequest> requests(names.size());
    std::vector<Sequence> sequences(names.size());
    StepPlan plan;
    for (std::size_t i = 0; i < names.size(); ++i) {
      requests[i].served = set.find(names[i]);
      sequences[i].request = &requests[i];
      plan.rows.push_back({.sequence = &sequences[i]});
    }
    set.bring(plan, runner);
    for (const ResolvedRequest& request : requests) EXPECT_NE(request.served->weights.ready, nullptr) << request.served->name;
    std::string on_device;
    for (const char* name : {"a", "b", "c"})
      if (set.find(name)->weights.ready != nullptr) on_device += name;
    return on_device;
  };
  EXPECT_EQ(use({"a"}), "a");
  EXPECT_EQ(use({"b"}), "ab");
  EXPECT_EQ(use({"a"}), "ab");
  EXPECT_EQ(use({"c"}), "ac");
  EXPECT_EQ(runner.num_made, 3);
  EXPECT_EQ(use({"b", "c"}), "bc");
  EXPECT_EQ(runner.num_made, 4);
  set.set("c", PolicyVersion{2}, {nullptr, stored});
  EXPECT_TRUE(set.has_news());
  set.apply_news();
  EXPECT_EQ(use({"c"}), "bc");
  EXPECT_EQ(runner.num_made, 5);
  EXPECT_EQ(set.find("c")->version.value, 2);
}

TEST(AdapterSet, RefusesWhatItCannotServe) {
  AdapterSet none(0), some(1);
  EXPECT_THROW(none.set("a", PolicyVersion{1}, {std::make_shared<nn::Adapter>(), nullptr}), Error);
  EXPECT_THROW(some.set("a", PolicyVersion{1}, {}), Error);
  EXPECT_THROW(some.find("a"), Error);
}

}  // namespace
}  // namespace prl::engine
