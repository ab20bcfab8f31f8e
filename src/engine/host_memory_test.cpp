// An engine whose cache is too small keeps blocks in host memory, and gives the tokens and log-probabilities of one with room for all.
// Compiled a second time for a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <filesystem>
#include <fstream>

#include "base/rng.hpp"
#include "base/testing/eventually.hpp"
#include "base/testing/temp_folder.hpp"
#include "device/testing/test_runtime.hpp"
#include "engine/core.hpp"
#include "engine/engine.hpp"
#include "engine/paged_runner.hpp"
#include "engine/resolve_request.hpp"
#include "engine/test_support.hpp"
#include "nn/decoder.hpp"
#include "nn/init_model.hpp"

namespace prl::engine {
namespace {
using prl::testing::kPatience;
using testing::Inbox;

constexpr std::int64_t kHostVocab = 300;

std::vector<std::uint32_t> host_bits(const std::vector<float>& values) {
  std::vector<std::uint32_t> out;
  for (const float value : values) out.push_back(std::bit_cast<std::uint32_t>(value));
  return out;
}

class HostMemory : public ::testing::TestWithParam<DType> {
 protected:
  HostMemory() : session_(make_test_runtime(), 2) {
    config_ = nn::make_model_config({.family = "qwen3",
                                     .vocab_size = kHostVocab,
                                     .hidden_size = 64,
                                     .intermediate_size = 96,
                                     .num_layers = 2,
                                     .num_heads = 4,
                                     .num_kv_heads = 2,
                                     .head_dim = 16,
                                     .max_position = 512});
  }
  nn::WeightsPtr weights(std::uint64_t seed, std::int64_t version) {
    nn::Parameters made(session_.context().runtime, config_);
    made.init_random(seed, 0.2f);
    return nn::make_weights(session_.context(), made, GetParam(), PolicyVersion{version}, false, nullptr);
  }
  static EngineOptions options(std::int64_t num_blocks, std::int64_t num_host_blocks) {
    EngineOptions options;
    options.max_model_len = 160;
    options.num_blocks = num_blocks;
    options.num_host_blocks = num_host_blocks;
    options.max_num_seqs = 16;
    options.num_threads = 2;
    return options;
  }
  std::unique_ptr<Engine> engine_of(const EngineOptions& options) {
    return std::make_unique<Engine>(session_.context().runtime, options, weights(7, 1));
  }
  static wire::GenerateRequest request_of(std::size_t prompt, std::uint64_t prompt_seed, std::int32_t max_tokens, std::uint64_t seed) {
    wire::GenerateRequest request;
    Rng rng(prompt_seed);
    for (std::size_t i = 0; i < prompt; ++i) request.prompt_ids.push_back(static_cast<std::int32_t>(rng.next_below(kHostVocab)));
    request.sampling.max_tokens = max_tokens;
    request.sampling.seed = seed;
    request.sampling.ignore_eos = true;
    request.sampling.logprobs = 2;
    return request;
  }
  /// Long prompts, some with equal beginnings.
  static std::vector<wire::GenerateRequest> mixed() {
    std::vector<wire::GenerateRequest> requests;
    for (std::uint64_t i = 0; i < 14; ++i)
      requests.push_back(request_of(20 + (i * 37) % 90, i % 5, static_cast<std::int32_t>(4 + (i * 11) % 30), i));
    requests[3].sampling.prompt_logprobs = 1;
    requests[4].sampling.repetition_penalty = 1.3f;
    return requests;
  }
  static std::vector<wire::GenerateOutput> run(Engine& engine, bool is_in_turn) {
    if (!is_in_turn) engine.pause(kPatience);  // so that they meet in one batch
    std::vector<std::shared_ptr<Inbox>> inboxes;
    for (const wire::GenerateRequest& request : mixed()) {
      inboxes.push_back(std::make_shared<Inbox>());
      engine.submit(request, [inbox = inboxes.back()](const StepEvent& event) { inbox->push(event); });
      if (is_in_turn) (void)inboxes.back()->wait();
    }
    if (!is_in_turn) engine.resume();
    std::vector<wire::GenerateOutput> outputs;
    for (const auto& inbox : inboxes) outputs.push_back(inbox->wait().output);
    return outputs;
  }
  static wire::GenerateOutput generate(Engine& engine, const wire::GenerateRequest& request) {
    const auto inbox = std::make_shared<Inbox>();
    engine.submit(request, [inbox](const StepEvent& event) { inbox->push(event); });
    return inbox->wait().output;
  }
  static void expect_same(const std::vector<wire::GenerateOutput>& got, const std::vector<wire::GenerateOutput>& wanted) {
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      SCOPED_TRACE(i);
      EXPECT_EQ(got[i].error, "");
      EXPECT_EQ(got[i].token_ids, wanted[i].token_ids);
      EXPECT_EQ(host_bits(got[i].logprobs), host_bits(wanted[i].logprobs));
      EXPECT_EQ(host_bits(got[i].prompt_logprobs), host_bits(wanted[i].prompt_logprobs));
    }
  }

  ops::OpSession session_;
  nn::ModelConfig config_;
};

TEST_P(HostMemory, ChangesNoBitAndSparesComputing) {
  const auto roomy = engine_of(options(512, 0)), small = engine_of(options(10, 0)), with_host = engine_of(options(10, 512)),
             with_little = engine_of(options(10, 7));
  for (const bool is_in_turn : {true, false, true}) {
    SCOPED_TRACE(is_in_turn);
    const auto wanted = run(*roomy, is_in_turn);
    expect_same(run(*small, is_in_turn), wanted);
    expect_same(run(*with_host, is_in_turn), wanted);
    expect_same(run(*with_little, is_in_turn), wanted);
  }
  const EngineStats all = roomy->stats(), none = small->stats(), stats = with_host->stats(), little = with_little->stats();
  EXPECT_EQ(none.num_host_hit_tokens, 0);
  EXPECT_EQ(none.num_host_blocks_total, 0);
  EXPECT_GT(stats.num_host_hit_tokens, 0);
  EXPECT_LE(stats.num_host_hit_tokens, stats.num_prefix_hit_tokens);
  EXPECT_LT(none.num_prefix_hit_tokens, stats.num_prefix_hit_tokens);
  EXPECT_GE(stats.num_prefix_hit_tokens, all.num_prefix_hit_tokens * 9 / 10) << "host memory has room for all";
  EXPECT_LT(stats.num_step_tokens, none.num_step_tokens);
  EXPECT_GT(stats.num_blocks_saved, 0);
  EXPECT_GT(stats.num_blocks_restored, 0);
  EXPECT_GT(little.num_blocks_saved, 0);
  EXPECT_EQ(stats.num_host_blocks_total, 512);
  EXPECT_EQ(little.num_host_blocks_total, 7);
  EXPECT_LE(little.num_host_blocks_used, 7);
}

TEST_P(HostMemory, ChunksOfPromptsChangeNoBit) {
  EngineOptions few = options(10, 40);
  few.max_num_batched_tokens = 17;
  const auto roomy = engine_of(options(512, 0)), chunked = engine_of(few);
  const auto wanted = run(*roomy, false);
  expect_same(run(*chunked, false), wanted);
  expect_same(run(*chunked, false), wanted);
  EXPECT_GT(chunked->stats().num_host_hit_tokens, 0);
}

TEST_P(HostMemory, PreemptedSequencesFindTheirBlocksThere) {
  const auto outputs_of = [&](std::int64_t num_host_blocks, EngineStats& stats) {
    const EngineOptions engine_options = options(24, num_host_blocks);
    CoreOptions core_options;
    core_options.num_blocks = engine_options.num_blocks;
    core_options.block_size = engine_options.block_size;
    core_options.num_host_blocks = num_host_blocks;
    core_options.scheduler.max_num_seqs = engine_options.max_num_seqs;
    core_options.scheduler.preempt_period = 2;
    EngineCore core(core_options, std::make_unique<PagedRunner>(session_.context().runtime, engine_options, weights(7, 1)));
    std::vector<testing::Collected> all(mixed().size());
    for (std::size_t i = 0; i < all.size(); ++i)
      core.add(RequestId{i + 1}, resolve_request(mixed()[i], engine_options, config_),
               [&, i](const StepEvent& event) { all[i].on_event(event); });
    while (core.step()) core.scheduler().check_integrity();
    stats = core.stats();
    std::vector<wire::GenerateOutput> outputs;
    for (const testing::Collected& one : all) outputs.push_back(one.output);
    return outputs;
  };
  EngineStats without, with;
  const auto wanted = outputs_of(0, without);
  expect_same(outputs_of(512, with), wanted);
  expect_same(wanted, run(*engine_of(options(512, 0)), false));
  EXPECT_GT(with.num_preemptions, 20);
  EXPECT_GT(with.num_blocks_restored, 0);
  EXPECT_LT(with.num_step_tokens, without.num_step_tokens) << "what a preempted sequence had computed need not be computed again";
}

TEST_P(HostMemory, BlocksOfOtherWeightsAreNotFound) {
  const auto engine = engine_of(options(10, 512));
  const auto first = request_of(100, 1, 5, 1), second = request_of(140, 2, 5, 1);
  const auto before = generate(*engine, first);
  generate(*engine, second);
  const auto again = generate(*engine, first);
  EXPECT_EQ(again.num_cached_tokens, 96);
  EXPECT_EQ(again.token_ids, before.token_ids);
  EXPECT_EQ(host_bits(again.logprobs), host_bits(before.logprobs));
  EXPECT_GT(engine->stats().num_host_hit_tokens, 0);
  for (const std::int64_t version : {2, 2}) {  // which may come back with other weights
    const auto changed = weights(7 + static_cast<std::uint64_t>(version), version);
    engine->update_weights(changed, kPatience);
    generate(*engine, second);
    const auto fresh = generate(*engine, first);
    EXPECT_EQ(fresh.num_cached_tokens, 0);
    Engine other(session_.context().runtime, options(512, 0), changed);
    const auto wanted = generate(other, first);
    EXPECT_EQ(fresh.token_ids, wanted.token_ids);
    EXPECT_EQ(host_bits(fresh.logprobs), host_bits(wanted.logprobs));
    generate(*engine, second);
    EXPECT_EQ(generate(*engine, first).num_cached_tokens, 96) << "those of the new ones are";
  }
  generate(*engine, second);
  engine->reset_prefix_cache();
  EXPECT_EQ(generate(*engine, first).num_cached_tokens, 0);
}

TEST_P(HostMemory, ASaltSeparatesBlocksThereToo) {
  const auto engine = engine_of(options(10, 512));
  auto mine = request_of(100, 1, 5, 1);
  mine.cache_salt = "mine";
  generate(*engine, mine);
  generate(*engine, request_of(140, 2, 5, 1));
  auto theirs = mine;
  theirs.cache_salt = "theirs";
  EXPECT_EQ(generate(*engine, theirs).num_cached_tokens, 0);
  generate(*engine, request_of(140, 2, 5, 1));
  EXPECT_EQ(generate(*engine, mine).num_cached_tokens, 96);
}

/// Little host memory, and files.
class DiskMemory : public HostMemory {
 protected:
  EngineOptions with_files(std::int64_t num_host_blocks, std::int64_t num_disk_blocks) const {
    EngineOptions made = options(10, num_host_blocks);
    made.num_disk_blocks = num_disk_blocks;
    made.disk_folder = folder_.path();
    made.disk_read_timeout = std::chrono::seconds(60);  // however slow the machine is
    return made;
  }
  void wait_until_written(Engine& engine) {
    ASSERT_TRUE(prl::testing::eventually([&] { return engine.stats().disk.num_writes_queued == 0; }));
  }
  std::filesystem::path only_file() const {
    std::filesystem::path found;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      EXPECT_TRUE(found.empty()) << "more than a file";
      found = entry.path();
    }
    return found;
  }
  prl::testing::TempFolder folder_;
};

TEST_P(DiskMemory, ChangesNoBitAndSparesComputing) {
  const auto roomy = engine_of(options(512, 0)), without = engine_of(options(10, 12));
  const auto with_disk = engine_of(with_files(12, 512)), with_little = engine_of(with_files(12, 9));
  for (const bool is_in_turn : {true, false, true}) {
    SCOPED_TRACE(is_in_turn);
    const auto wanted = run(*roomy, is_in_turn);
    expect_same(run(*without, is_in_turn), wanted);
    expect_same(run(*with_disk, is_in_turn), wanted);
    expect_same(run(*with_little, is_in_turn), wanted);
  }
  const EngineStats none = without->stats(), stats = with_disk->stats(), little = with_little->stats();
  EXPECT_EQ(none.num_disk_blocks_total, 0);
  EXPECT_GT(stats.num_disk_hit_tokens, 0);
  EXPECT_LE(stats.num_disk_hit_tokens, stats.num_host_hit_tokens);
  EXPECT_GT(stats.num_prefix_hit_tokens, none.num_prefix_hit_tokens);
  EXPECT_LT(stats.num_step_tokens, none.num_step_tokens);
  EXPECT_GT(stats.disk.num_read, 0);
  EXPECT_EQ(stats.disk.num_damaged + stats.disk.num_late, 0);
  EXPECT_LE(little.num_disk_blocks_used, 9);
  EXPECT_EQ(little.num_disk_blocks_total, 9);
}

TEST_P(DiskMemory, PreemptedSequencesFindTheirBlocksThere) {
  const EngineOptions engine_options = with_files(12, 512);
  CoreOptions core_options;
  core_options.num_blocks = 24;
  core_options.block_size = engine_options.block_size;
  core_options.num_host_blocks = 12;
  core_options.num_disk_blocks = 512;
  core_options.scheduler.max_num_seqs = engine_options.max_num_seqs;
  core_options.scheduler.preempt_period = 2;
  EngineOptions runner_options = engine_options;
  runner_options.num_blocks = 24;
  EngineCore core(core_options, std::make_unique<PagedRunner>(session_.context().runtime, runner_options, weights(7, 1)));
  const auto wanted = run(*engine_of(options(512, 0)), false);
  for (std::size_t round = 0; round < 3; ++round) {
    std::vector<testing::Collected> all(mixed().size());
    for (std::size_t i = 0; i < all.size(); ++i)
      core.add(RequestId{1 + i + 100 * round}, resolve_request(mixed()[i], runner_options, config_),
               [&, i](const StepEvent& event) { all[i].on_event(event); });
    while (core.step()) core.scheduler().check_integrity();
    std::vector<wire::GenerateOutput> outputs;
    for (const testing::Collected& one : all) outputs.push_back(one.output);
    expect_same(outputs, wanted);
  }
  EXPECT_GT(core.stats().num_preemptions, 20);
  EXPECT_GT(core.stats().disk.num_read, 0);
}

TEST_P(DiskMemory, BlocksThatWereAlteredAreComputedAgain) {
  const auto roomy = engine_of(options(512, 0)), with_disk = engine_of(with_files(12, 512));
  const auto wanted = run(*roomy, true);
  expect_same(run(*with_disk, true), wanted);
  wait_until_written(*with_disk);
  {
    std::fstream file(only_file(), std::ios::in | std::ios::out | std::ios::binary);
    const auto size = static_cast<std::int64_t>(std::filesystem::file_size(only_file()));
    for (std::int64_t at = 1000; at < size; at += 1999) {
      file.seekg(at);
      const char before = static_cast<char>(file.get());
      file.seekp(at);
      file.put(static_cast<char>(before ^ 0x40));
    }
  }
  expect_same(run(*with_disk, true), wanted);
  EXPECT_GT(with_disk->stats().disk.num_damaged, 0);
  wait_until_written(*with_disk);
  std::filesystem::resize_file(only_file(), 100);
  expect_same(run(*with_disk, false), wanted);
}

TEST_P(DiskMemory, BlocksOfOtherWeightsAndSaltsAreNotFound) {
  const auto engine = engine_of(with_files(20, 512));
  const auto first = request_of(100, 1, 5, 1);
  const auto push_out = [&] {
    for (std::uint64_t i = 2; i < 7; ++i) generate(*engine, request_of(140, i, 5, 1));
  };
  const auto before = generate(*engine, first);
  push_out();
  const auto again = generate(*engine, first);
  EXPECT_EQ(again.num_cached_tokens, 96);
  EXPECT_GT(engine->stats().num_disk_hit_tokens, 0);
  EXPECT_EQ(again.token_ids, before.token_ids);
  EXPECT_EQ(host_bits(again.logprobs), host_bits(before.logprobs));
  push_out();
  auto salted = first;
  salted.cache_salt = "mine";
  EXPECT_EQ(generate(*engine, salted).num_cached_tokens, 0);
  const auto changed = weights(9, 2);
  engine->update_weights(changed, kPatience);
  push_out();
  const auto fresh = generate(*engine, first);
  EXPECT_EQ(fresh.num_cached_tokens, 0);
  Engine other(session_.context().runtime, options(512, 0), changed);
  const auto wanted = generate(other, first);
  EXPECT_EQ(fresh.token_ids, wanted.token_ids);
  EXPECT_EQ(host_bits(fresh.logprobs), host_bits(wanted.logprobs));
  push_out();
  EXPECT_EQ(generate(*engine, first).num_cached_tokens, 96) << "those of the new ones are";
}

TEST_P(DiskMemory, NoFileIsLeft) {
  {
    const auto engine = engine_of(with_files(4, 512));
    run(*engine, true);
    EXPECT_FALSE(only_file().empty());
  }
  EXPECT_TRUE(only_file().empty());
  EngineOptions wrong = with_files(4, 512);
  wrong.num_host_blocks = 0;
  EXPECT_THROW(engine_of(wrong), Error);
}

INSTANTIATE_TEST_SUITE_P(Types, DiskMemory, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& type) { return type.param == DType::kF32 ? "F32" : "BF16"; });

TEST_P(HostMemory, NeedsTheCacheOfPrefixes) {
  EngineOptions wrong = options(10, 5);
  wrong.enable_prefix_caching = false;
  EXPECT_THROW(engine_of(wrong), Error);
}

INSTANTIATE_TEST_SUITE_P(Types, HostMemory, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& type) { return type.param == DType::kF32 ? "F32" : "BF16"; });

}  // namespace
}  // namespace prl::engine
