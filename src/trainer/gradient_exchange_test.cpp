// Gradients that are sent while the backward pass goes on: between threads, and compiled a second time between GPUs (NCCL).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <mutex>

#include "comm/testing/lazy_communicator.hpp"
#include "comm/testing/ranks.hpp"
#include "device/testing/test_runtime.hpp"
#include "trainer/test_support.hpp"

namespace prl::trainer {
namespace {

using testing_support::Scratch;

const char* backend() { return tests_gpu() ? "nccl" : "threads"; }

constexpr std::int64_t kNumRows = 5;

/// Of layers with something to compute and to send.
nn::InitModelOptions model_of(bool ties_head) {
  nn::InitModelOptions options = testing_support::model_of_several_chunks();
  options.num_layers = 5;
  options.tie_word_embeddings = ties_head;
  if (tests_gpu()) {
    options.hidden_size = 512;
    options.intermediate_size = 2048;
    options.num_heads = 8;
    options.num_kv_heads = 4;
    options.head_dim = 64;
  }
  return options;
}

std::unique_ptr<Policy> make_policy(const std::filesystem::path& model, std::shared_ptr<DeviceRuntime> runtime, DType compute) {
  PolicyOptions options;
  options.model = model;
  options.compute = compute;
  options.num_threads = 1;
  return std::make_unique<Policy>(runtime != nullptr ? std::move(runtime) : make_cpu_runtime(), options);
}

/// The gradient of an element in a row; sums depend on their order.
float gradient_of(std::int64_t row, std::int64_t element) {
  const auto h = static_cast<std::uint32_t>(row * 7919 + element * 104729 + 17) * 2654435761u;
  return (static_cast<float>(h >> 8) / 16777216.0f - 0.5f) * static_cast<float>(1 << (h % 12));
}

/// What a backward pass does, as far as gradients are concerned: section by section, into the places there are.
void write_gradients(nn::Parameters& parameters, std::int64_t row) {
  std::vector<float> values;
  for (std::size_t s = 0; s < parameters.sections().size(); ++s) {
    const nn::GradSection& section = parameters.sections()[s];
    values.resize(static_cast<std::size_t>(section.range.count()));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = gradient_of(row, section.range.begin + static_cast<std::int64_t>(i));
    const Tensor& grads = parameters.section_grads(s);
    grads.runtime()->copy_from_host(grads.data(), values.data(), grads.num_bytes());
    parameters.section_is_done(section.layer);
  }
}

struct Exchange {
  int size = 3;
  bool ties_head = false, overlaps = true;
  std::int64_t bucket_elements = 1000;
};

/// The sum of kNumRows rows at each rank, twice, against sums formed here.
void expect_sums(const Exchange& run, const std::filesystem::path& model) {
  comm::testing::run_threads(backend(), run.size, [&](comm::Communicator& world) {
    comm::Communicator* group = &world;
    std::optional<comm::testing::LazyCommunicator> lazy;
    std::vector<int> all;
    for (int r = 0; r < run.size; ++r) all.push_back(r);
    if (!tests_gpu()) group = &lazy.emplace(world.subgroup(all, "lazy", 0));
    const auto policy = make_policy(model, world.options().runtime, DType::kF32);
    nn::Parameters& parameters = policy->parameters();
    const ShardPlan plan(*parameters.table(), run.size, false);
    parameters.hold(plan.elements(world.rank()));
    parameters.divide_grads(true, false, num_grad_places(run.overlaps, run.size));
    ASSERT_GT(parameters.sections().size(), 5u);
    GradientExchange exchange(policy->context(), parameters, *group, plan,
                              {.overlaps = run.overlaps, .bucket_elements = run.bucket_elements});
    for (int step = 0; step < 2; ++step) {
      exchange.begin(kNumRows);
      for (std::int64_t round = 0; round < exchange.num_rounds(); ++round) {
        if (const auto row = exchange.row_of(round)) {
          exchange.begin_leaf();
          write_gradients(parameters, *row);
        }
        exchange.end_round();
      }
      const Tensor sum = exchange.finish();
      const ElementRanges& own = plan.elements(world.rank());
      ASSERT_EQ(sum.num_elements(), own.count());
      std::vector<float> found(static_cast<std::size_t>(own.count()));
      sum.runtime()->copy_to_host(found.data(), sum.data(), sum.num_bytes());
      for (const ElementRange range : own.ranges())
        for (std::int64_t element = range.begin; element < range.end; ++element) {
          float wanted = gradient_of(0, element);
          for (std::int64_t row = 1; row < kNumRows; ++row) wanted += gradient_of(row, element);
          ASSERT_EQ(std::bit_cast<std::uint32_t>(found[static_cast<std::size_t>(own.place_of(element))]),
                    std::bit_cast<std::uint32_t>(wanted))
              << "rank " << world.rank() << " of " << run.size << ", step " << step << ", element " << element;
        }
    }
    if (lazy) {
      const auto num_sections = static_cast<int>(parameters.sections().size());
      EXPECT_TRUE(run.overlaps ? lazy->num_started() > 4 * num_sections : lazy->num_started() == 0)
          << lazy->num_started() << " operations beside the pass, in several passes for what is larger than a layer";
    }
  });
}

TEST(GradientExchange, SectionsAreAddedWhenTheyHaveComeAndPlacesWrittenWhenTheyWereSent) {
  const int most = tests_gpu() ? 2 : 4;
  if (const std::string reason = comm::testing::reason_to_skip(backend(), most); !reason.empty()) GTEST_SKIP() << reason;
  for (const bool ties_head : {false, true}) {
    Scratch scratch("exchange");
    nn::init_model(model_of(ties_head), scratch.path);
    for (int size = 2; size <= most; ++size)
      for (const bool overlaps : {true, false}) expect_sums({.size = size, .ties_head = ties_head, .overlaps = overlaps}, scratch.path);
  }
}

// One device adds most of a row where the sum is: the bits of rows that were formed apart, in less memory.
TEST(GradientExchange, OneRankAddsRowsWhereTheSumIs) {
  if (const std::string reason = comm::testing::reason_to_skip(backend(), 1); !reason.empty()) GTEST_SKIP() << reason;
  Scratch scratch("exchange-one");
  for (const bool ties_head : {false, true}) {
    nn::init_model(model_of(ties_head), scratch.path / (ties_head ? "tied" : "untied"));
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      const auto policy = make_policy(scratch.path / (ties_head ? "tied" : "untied"), tests_gpu() ? make_cuda_runtime() : nullptr, compute);
      nn::Parameters& parameters = policy->parameters();
      const auto group = comm::make_local_communicator();
      const ShardPlan plan(*parameters.table(), 1, false);
      GradientExchange exchange(policy->context(), parameters, *group, plan);
      const std::vector<wire::MicroBatch> rows = testing_support::cross_entropy_rows(1, 4);
      const auto backward = [&](const wire::MicroBatch& row) {
        const std::vector<std::int32_t> targets = make_targets(row);
        policy->forward(row, targets);
        policy->backward(std::vector<float>(targets.size(), -0.25f));
      };
      const auto read = [&](const Tensor& grads) {
        std::vector<float> values(static_cast<std::size_t>(grads.num_elements()));
        grads.runtime()->copy_to_host(values.data(), grads.data(), grads.num_bytes());
        return values;
      };
      std::vector<float> wanted;
      for (const wire::MicroBatch& row : rows) {
        parameters.start_grads();
        backward(row);
        const std::vector<float> leaf = read(parameters.all_grads());
        wanted.resize(leaf.size(), -0.0f);
        for (std::size_t i = 0; i < leaf.size(); ++i) wanted[i] += leaf[i];
      }
      std::int64_t num_stepwise = 0;
      for (const ElementRange range : parameters.stepwise_grads()) num_stepwise += range.count();
      EXPECT_LT(num_stepwise, static_cast<std::int64_t>(wanted.size()));
      for (int step = 0; step < 2; ++step) {
        const std::size_t before = policy->context().runtime->bytes_in_use();
        exchange.begin(static_cast<std::int64_t>(rows.size()));
        for (const wire::MicroBatch& row : rows) {
          exchange.begin_leaf();
          backward(row);
          exchange.end_round();
        }
        const std::vector<float> found = read(exchange.finish());
        ASSERT_EQ(found.size(), wanted.size());
        for (std::size_t i = 0; i < wanted.size(); ++i)
          ASSERT_EQ(std::bit_cast<std::uint32_t>(found[i]), std::bit_cast<std::uint32_t>(wanted[i]))
              << "element " << i << " of " << to_string(compute) << ", step " << step << ", tied: " << ties_head;
        EXPECT_LE(policy->context().runtime->bytes_in_use(), before + sizeof(float) * static_cast<std::size_t>(num_stepwise) + 4096);
      }
    }
  }
}

// Of a whole training step, with its forward and backward passes.
TEST(GradientExchange, StepsOfTwoDevicesGiveTheBitsOfOne) {
  if (const std::string reason = comm::testing::reason_to_skip(backend(), 2); !reason.empty()) GTEST_SKIP() << reason;
  Scratch scratch("exchange-steps");
  nn::init_model(model_of(true), scratch.path);
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const auto train = [&](comm::Mesh* mesh, std::shared_ptr<DeviceRuntime> runtime, bool overlaps) {
      const auto policy = make_policy(scratch.path, std::move(runtime), compute);
      GradientStepOptions options;
      options.mesh = mesh;
      options.overlaps_exchange = overlaps;
      GradientStep step(*policy, options);
      for (std::int64_t i = 1; i <= 3; ++i) step.run(testing_support::cross_entropy_rows(i, 7), PolicyVersion{i});
      return nn::checksum(*policy->weights()).combined;
    };
    const std::uint64_t alone = train(nullptr, tests_gpu() ? make_cuda_runtime() : nullptr, false);
    for (const bool overlaps : {false, true})
      comm::testing::run_threads(backend(), 2, [&](comm::Communicator& group) {
        comm::Mesh mesh(group.subgroup(std::vector<int>{0, 1}, "train", 0));
        EXPECT_EQ(train(&mesh, group.options().runtime, overlaps), alone) << to_string(compute) << ", overlaps: " << overlaps;
      });
  }
}

}  // namespace
}  // namespace prl::trainer
