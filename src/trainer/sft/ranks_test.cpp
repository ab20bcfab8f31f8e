// SFT in processes of its own that exchange gradients over Gloo.
#include <gtest/gtest.h>

#include <signal.h>

#include "base/files.hpp"
#include "base/testing/eventually.hpp"
#include "comm/testing/ranks.hpp"
#include "trainer/metrics.hpp"
#include "trainer/sft/sft_trainer.hpp"
#include "trainer/test_support.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;
namespace fs = std::filesystem;

struct SftRun {
  DType compute = DType::kF32;
  std::int64_t max_steps = 10;
  bool resumes = false;
  int killed_rank = -1;  ///< stops itself with SIGKILL after step 4
};

SftRunOptions options_of(const SftRun& run, const fs::path& root) {
  SftRunOptions options;
  config::AdamWConfig adamw;
  adamw.lr = 1e-3;
  options.step.optim = adamw;
  options.step.max_steps = run.max_steps;
  config::FakeDataConfig data;
  data.batch_size = 10, data.seq_len = 24, data.micro_batch_size = 2, data.length = config::FakeLength::kVariable,
  data.input_ids = config::FakeInputIds::kRandom;
  options.data = data;
  options.checkpoint.emplace();
  options.checkpoint->checkpoints = root / "checkpoints";
  options.checkpoint->weights = root / "weights";
  if (run.resumes) options.resume.emplace();
  return options;
}

/// The life of one rank; writes its masters to root/rank_R.
int train_rank(const SftRun& run, const fs::path& model, const fs::path& root, int rank, int size) {
  comm::CommOptions comm_options;
  comm_options.rank = rank;
  comm_options.size = size;
  comm_options.store = comm::make_file_store(root / fmt::format("store{}", run.max_steps));
  comm::Mesh mesh(comm::make_communicator(comm_options));
  const auto policy = make_tiny_policy(model, run.compute);
  monitor::Monitor monitor(sft_metrics());
  if (rank == run.killed_rank)
    monitor.add_sink(monitor::make_callback_sink([](std::int64_t step, const monitor::Metrics&) {
      if (step == 4) (void)::raise(SIGKILL);
    }));
  SftRunOptions options = options_of(run, root);
  options.step.mesh = &mesh;
  options.checkpoint->may_write = rank == 0;
  try {
    run_sft(options, *policy, monitor, {});
  } catch (const comm::PeerLost& lost) {
    const bool is_named = lost.ranks() == std::vector<int>{run.killed_rank};
    if (!is_named) std::fprintf(stderr, "rank %d: %s\n", rank, lost.what());
    return is_named ? 7 : 8;
  }
  std::string bytes;
  for (const std::vector<float>& values : masters(*policy))
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  write_file_atomic(root / fmt::format("rank_{}", rank), bytes);
  return 0;
}

/// Exit status of each rank.
std::vector<int> train(const SftRun& run, const fs::path& model, const fs::path& root, int size) {
  fs::create_directories(root);
  comm::testing::Processes ranks(size, [&](int rank) { return train_rank(run, model, root, rank, size); });
  std::vector<int> statuses;
  for (int rank = 0; rank < size; ++rank) statuses.push_back(ranks.wait(rank, 2 * prl::testing::kPatience).value_or(-1));
  return statuses;
}

void expect_same_weights(const fs::path& wanted_root, const fs::path& root, int size) {
  const std::string wanted = read_file(wanted_root / "rank_0");
  ASSERT_GT(wanted.size(), 1000u);
  for (int rank = 0; rank < size; ++rank) EXPECT_TRUE(read_file(root / fmt::format("rank_{}", rank)) == wanted) << root << " rank " << rank;
}

TEST(SftRanks, OneToFourProcessesGiveTheSameWeightsAfterTenSteps) {
  if (!comm::has_gloo()) GTEST_SKIP() << "this build has no Gloo";
  Scratch scratch("sft-ranks");
  nn::init_model(tiny_model(), scratch.path / "model");
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const auto root = [&](int size) { return scratch.path / fmt::format("{}-{}", to_string(compute), size); };
    for (const int size : {1, 2, 3, 4}) {
      ASSERT_EQ(train({.compute = compute}, scratch.path / "model", root(size), size), std::vector<int>(static_cast<std::size_t>(size), 0));
      expect_same_weights(root(1), root(size), size);
      const char* file = "checkpoints/step_10/trainer/optimizer.safetensors";
      EXPECT_TRUE(read_file(root(size) / file) == read_file(root(1) / file)) << size << " ranks";
    }
  }
}

TEST(SftRanks, SavedByThreeAndResumedByTwoAndOne) {
  if (!comm::has_gloo()) GTEST_SKIP() << "this build has no Gloo";
  Scratch scratch("sft-resume-ranks");
  const fs::path model = scratch.path / "model";
  nn::init_model(tiny_model(), model);
  EXPECT_EQ(train({}, model, scratch.path / "whole", 1), std::vector<int>{0});
  for (const int size : {2, 1}) {
    const fs::path root = scratch.path / fmt::format("cut{}", size);
    EXPECT_EQ(train({.max_steps = 5}, model, root, 3), std::vector<int>(3, 0));
    EXPECT_EQ(train({.resumes = true}, model, root, size), std::vector<int>(static_cast<std::size_t>(size), 0));
    expect_same_weights(scratch.path / "whole", root, size);
  }
}

TEST(SftRanks, AKilledRankEndsTheOthersWithItsName) {
  if (!comm::has_gloo()) GTEST_SKIP() << "this build has no Gloo";
  Scratch scratch("sft-killed-rank");
  nn::init_model(tiny_model(), scratch.path / "model");
  EXPECT_EQ(train({.killed_rank = 1}, scratch.path / "model", scratch.path / "run", 3), (std::vector<int>{7, 128 + SIGKILL, 7}));
}

}  // namespace
}  // namespace prl::trainer
