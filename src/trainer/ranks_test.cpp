// SFT and RL in processes of their own that exchange gradients over Gloo.
#include <gtest/gtest.h>

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <stop_token>
#include <thread>

#include "base/files.hpp"
#include "base/rng.hpp"
#include "base/testing/eventually.hpp"
#include "comm/admission.hpp"
#include "comm/testing/ranks.hpp"
#include "io/checkpoint_dir.hpp"
#include "io/safetensors.hpp"
#include "trainer/fake_rollouts.hpp"
#include "trainer/metrics.hpp"
#include "trainer/rl_trainer.hpp"
#include "trainer/sft/sft_trainer.hpp"
#include "trainer/test_support.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;
namespace fs = std::filesystem;

enum class Kind { kSft, kRl };

constexpr int kCameTooLate = 10;  // exit status of a newcomer

struct TrainCase {
  Kind kind = Kind::kSft;
  DType compute = DType::kF32;
  std::int64_t max_steps = 10;
  bool resumes = false;
  int killed_rank = -1;  ///< stops itself with SIGKILL after step 4
  int victim = -1;       ///< sends itself `signal` after `moment`; the others go on
  std::chrono::microseconds moment{0};
  int signal = SIGKILL;
  std::chrono::milliseconds timeout{60'000};
  bool has_newcomer = false;  ///< one more process, which joins the others between two steps
  int num_replicas = 1;
  bool save_async = false;
  bool saves_often = false;  ///< after every second step, and a lost rank ends the others
  bool gathers_layers = false;
};

void set_common(TrainRunOptions& options, const TrainCase& run, const fs::path& root, comm::Mesh& mesh) {
  config::AdamWConfig adamw;
  adamw.lr = 1e-3;
  options.step.optim = adamw;
  options.step.max_steps = run.max_steps;
  options.step.mesh = &mesh;
  options.step.num_replicas = run.num_replicas;
  options.step.overlaps_exchange = true;  // as runs do
  options.checkpoint.emplace();
  options.checkpoint->checkpoints = root / "checkpoints";
  options.checkpoint->weights = root / "weights";
  options.checkpoint->may_write = mesh.world().rank() == 0;
  if (run.resumes) options.resume.emplace();
  options.checkpoint->save_async = run.save_async;
  if (run.saves_often) {
    options.checkpoint->interval = 2;
    return;
  }
  if (run.victim >= 0 || run.has_newcomer) {
    options.max_losses = 1;
    options.copy_piece_bytes = 20'000;  // so that copies travel in many pieces, of which no two arrays end with one
    options.is_newcomer = mesh.world().generation() > 0;
    options.checkpoint->interval = 3;
  }
}

void run_sft_rank(const TrainCase& run, const fs::path& root, comm::Mesh& mesh, Policy& policy, monitor::Monitor& monitor) {
  SftRunOptions options;
  set_common(options, run, root, mesh);
  config::FakeDataConfig data;
  data.batch_size = 10, data.seq_len = 24, data.micro_batch_size = 2, data.length = config::FakeLength::kVariable,
  data.input_ids = config::FakeInputIds::kRandom;
  options.data = data;
  run_sft(options, policy, monitor, {});
}

void run_rl_rank(const TrainCase& run, const fs::path& root, comm::Mesh& mesh, Policy& policy, monitor::Monitor& monitor) {
  RlRunOptions options;
  set_common(options, run, root, mesh);
  options.seq_len = 48;
  const ReceiverFactory samples = [&](std::int64_t first_step) -> std::unique_ptr<rollouts::SampleReceiver> {
    if (mesh.world().rank() != 0 && run.victim != 0)
      ADD_FAILURE() << "rank " << mesh.world().rank() << " takes samples, which only rank 0 may";
    return make_fake_rollouts(
        {.num_micro_batches = 5, .seq_len = 48, .vocab_size = 96, .generate_samples = true, .first_step = first_step, .rank = 0});
  };
  run_rl_trainer(options, policy, samples, nullptr, monitor, {});
}

/// What a rank leaves: the masters that it holds, and a checksum of all weights.
void write_result(Policy& policy, const fs::path& root, int rank) {
  const nn::Parameters& parameters = policy.parameters();
  std::string bytes;
  const std::span<const ElementRange> held = parameters.held().ranges();
  // The ranks no longer bring each other's layers.
  const std::uint64_t checksum = policy.layered() != nullptr ? 0 : nn::checksum(*policy.weights()).combined;
  for (const std::uint64_t word : {checksum, static_cast<std::uint64_t>(held.size())})
    bytes.append(reinterpret_cast<const char*>(&word), sizeof word);
  bytes.append(reinterpret_cast<const char*>(held.data()), held.size_bytes());
  bytes.append(static_cast<const char*>(parameters.held_values().data()), parameters.held_values().num_bytes());
  write_file_atomic(root / fmt::format("rank_{}", rank), bytes);
}

struct Result {
  std::uint64_t checksum = 0;
  std::vector<ElementRange> held;
  std::string masters;
};
Result read_result(const fs::path& root, int rank) {
  const std::string bytes = read_file(root / fmt::format("rank_{}", rank));
  Result result;
  if (bytes.size() < 16) return result;
  std::uint64_t num_ranges = 0;
  std::memcpy(&result.checksum, bytes.data(), 8);
  std::memcpy(&num_ranges, bytes.data() + 8, 8);
  const std::size_t num_bytes = num_ranges * sizeof(ElementRange);
  if (bytes.size() - 16 < num_bytes) return result;
  result.held.resize(num_ranges);
  std::memcpy(result.held.data(), bytes.data() + 16, num_bytes);
  result.masters = bytes.substr(16 + num_bytes);
  return result;
}

/// The life of one rank; see write_result().
int train_rank(const TrainCase& run, const fs::path& model, const fs::path& root, int rank, int size) {
  comm::CommOptions comm_options;
  comm_options.rank = rank;
  comm_options.size = size;
  comm_options.store = comm::make_file_store(root / fmt::format("store{}", run.max_steps));
  comm_options.timeout = run.timeout;
  PolicyOptions of_policy;
  of_policy.model = model;
  of_policy.compute = run.compute;
  of_policy.num_threads = 1;
  of_policy.gathers_layers = run.gathers_layers;
  const auto policy = std::make_unique<Policy>(make_cpu_runtime(), of_policy);
  std::stop_source has_ended;  // once the others are done nobody lets a newcomer in
  std::jthread watch;
  if (rank == size)
    watch = std::jthread([&](std::stop_token stop) {
      const auto is_over = [&] { return stop.stop_requested() || fs::exists(root / "rank_1") || fs::exists(root / "rank_0"); };
      if (prl::testing::eventually(is_over, 2 * prl::testing::kPatience)) has_ended.request_stop();
    });
  std::unique_ptr<comm::Communicator> group =
      rank == size ? comm::join(comm_options, "newcomer", run.timeout, has_ended.get_token()) : comm::make_communicator(comm_options);
  if (group == nullptr) return kCameTooLate;
  const comm::MeshShape shape = comm::replicated_shape(group->size(), run.num_replicas);
  comm::Mesh mesh(std::move(group), shape);
  const auto end_later = [&run] {
    std::thread([&run] {
      std::this_thread::sleep_for(run.moment);
      (void)::kill(::getpid(), run.signal);
    }).detach();
  };
  // Groups that are made at the start have no others to go on with.
  if (rank == run.victim && !run.gathers_layers) end_later();
  monitor::Monitor monitor(run.kind == Kind::kSft ? sft_metrics() : trainer_metrics());
  if (rank == run.victim && run.gathers_layers)
    monitor.add_sink(monitor::make_callback_sink([&](std::int64_t step, const monitor::Metrics&) {
      if (step == 1) end_later();
    }));
  if (rank == run.killed_rank)
    monitor.add_sink(monitor::make_callback_sink([](std::int64_t step, const monitor::Metrics&) {
      if (step == 4) (void)::raise(SIGKILL);
    }));
  monitor.add_sink(monitor::make_callback_sink([&](std::int64_t, const monitor::Metrics& metrics) {
    const auto found = metrics.find("healing/recover_seconds");
    if (found != metrics.end() && found->second > 0)
      write_file_atomic(root / fmt::format("recovered_{}", rank), fmt::format("{}", found->second));
  }));
  try {
    (run.kind == Kind::kSft ? run_sft_rank : run_rl_rank)(run, root, mesh, *policy, monitor);
  } catch (const comm::PeerLost& lost) {
    const bool is_named = lost.ranks() == std::vector<int>{std::max(run.killed_rank, run.victim)};
    if (!is_named) std::fprintf(stderr, "rank %d: %s\n", rank, lost.what());
    return is_named ? 7 : 8;
  }
  write_result(*policy, root, rank);
  return ::testing::Test::HasFailure() ? 9 : 0;
}

/// Exit status of each rank but the victim, which may hang.
std::vector<int> train(const TrainCase& run, const fs::path& model, const fs::path& root, int size) {
  fs::create_directories(root);
  const int num_processes = run.has_newcomer ? size + 1 : size;
  comm::testing::Processes ranks(num_processes, [&](int rank) { return train_rank(run, model, root, rank, size); });
  std::vector<int> statuses;
  for (int rank = 0; rank < num_processes; ++rank)
    if (rank != run.victim) statuses.push_back(ranks.wait(rank, 2 * prl::testing::kPatience).value_or(-1));
  return statuses;
}

void expect_same_weights(const fs::path& wanted_root, const fs::path& root, int size, int without = -1, std::size_t num_copies = 1) {
  const Result wanted = read_result(wanted_root, 0);
  ASSERT_GT(wanted.masters.size(), 1000u);
  std::size_t num_bytes = 0;
  for (int rank = 0; rank < size; ++rank) {
    if (rank == without) continue;
    const Result found = read_result(root, rank);
    if (found.checksum != 0) {
      EXPECT_EQ(found.checksum, wanted.checksum) << root << " rank " << rank;
    }
    std::string masters;
    for (const ElementRange held : found.held)
      masters += wanted.masters.substr(static_cast<std::size_t>(held.begin) * sizeof(float),
                                       static_cast<std::size_t>(held.count()) * sizeof(float));
    EXPECT_TRUE(found.masters == masters) << root << " rank " << rank;
    num_bytes += found.masters.size();
  }
  if (without < 0) {
    EXPECT_EQ(num_bytes, num_copies * wanted.masters.size()) << "each master is held once in a copy";
  }
}

void expect_same_checkpoint(const fs::path& wanted_root, const fs::path& root, const fs::path& model) {
  const char* folder = "checkpoints/step_10/trainer";
  expect_same_state(root / folder, wanted_root / folder, *nn::make_tensor_table(nn::load_model_config(model)));
  EXPECT_EQ(read_file(root / folder / "progress.json"), read_file(wanted_root / folder / "progress.json"));
}

/// Tensors of the snapshots, whoever wrote which file.
void expect_same_snapshot(const fs::path& wanted_root, const fs::path& root) {
  const auto values = [](const fs::path& of) {
    const auto folder = io::SafetensorsFolder::open(of / "weights/step_10");
    std::vector<std::pair<std::string, std::vector<std::byte>>> all;
    for (const auto& [tensor, ref] : folder.tensors()) {
      const auto bytes = ref.file->bytes(*ref.entry);
      all.emplace_back(tensor, std::vector<std::byte>(bytes.begin(), bytes.end()));
    }
    return all;
  };
  EXPECT_FALSE(values(root).empty());
  EXPECT_TRUE(values(root) == values(wanted_root)) << root;
}

class Ranks : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (!comm::has_gloo()) GTEST_SKIP() << "this build has no Gloo";
    nn::init_model(tiny_model(), model());
  }
  fs::path model() const { return scratch_.path / "model"; }
  fs::path root(const std::string& name) const { return scratch_.path / name; }

 private:
  Scratch scratch_{"ranks"};
};

INSTANTIATE_TEST_SUITE_P(Kinds, Ranks, ::testing::Values(Kind::kSft, Kind::kRl),
                         [](const auto& kind) { return kind.param == Kind::kSft ? "Sft" : "Rl"; });

TEST_P(Ranks, OneToFourProcessesGiveTheSameWeightsAfterTenSteps) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const auto name = [&](int size) { return root(fmt::format("{}-{}", to_string(compute), size)); };
    for (const int size : {1, 2, 3, 4}) {
      ASSERT_EQ(train({.kind = GetParam(), .compute = compute}, model(), name(size), size),
                std::vector<int>(static_cast<std::size_t>(size), 0));
      expect_same_weights(name(1), name(size), size);
      expect_same_checkpoint(name(1), name(size), model());
    }
  }
}

TEST_P(Ranks, SavedByThreeAndResumedByTwoAndOne) {
  const Kind kind = GetParam();
  EXPECT_EQ(train({.kind = kind}, model(), root("whole"), 1), std::vector<int>{0});
  for (const int size : {2, 1}) {
    const fs::path cut = root(fmt::format("cut{}", size));
    EXPECT_EQ(train({.kind = kind, .max_steps = 5, .save_async = size == 2}, model(), cut, 3), std::vector<int>(3, 0));
    EXPECT_TRUE(fs::exists(cut / "checkpoints/step_5/trainer/layout.json"));
    EXPECT_EQ(train({.kind = kind, .resumes = true}, model(), cut, size), std::vector<int>(static_cast<std::size_t>(size), 0));
    expect_same_weights(root("whole"), cut, size);
  }
}

// Each rank has a part of each layer's weights: the state and the snapshot of a rank that has all of them, also when one is lost.
TEST_P(Ranks, GatheredLayersGiveTheSameWeightsAndAreSavedResumedAndHealed) {
  const Kind kind = GetParam();
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const auto name = [&](const std::string& what) { return root(fmt::format("{}-{}", to_string(compute), what)); };
    ASSERT_EQ(train({.kind = kind, .compute = compute}, model(), name("whole"), 1), std::vector<int>{0});
    for (const int size : {1, 2, 3}) {
      const fs::path folder = name(std::to_string(size));
      ASSERT_EQ(train({.kind = kind, .compute = compute, .save_async = size == 2, .gathers_layers = true}, model(), folder, size),
                std::vector<int>(static_cast<std::size_t>(size), 0));
      expect_same_weights(name("whole"), folder, size);
      expect_same_checkpoint(name("whole"), folder, model());
      expect_same_snapshot(name("whole"), folder);
    }
    ASSERT_EQ(train({.kind = kind, .compute = compute, .max_steps = 5, .gathers_layers = true}, model(), name("cut"), 3),
              std::vector<int>(3, 0));
    ASSERT_EQ(train({.kind = kind, .compute = compute, .resumes = true, .gathers_layers = true}, model(), name("cut"), 2),
              std::vector<int>(2, 0));
    expect_same_weights(name("whole"), name("cut"), 2);
    expect_same_snapshot(name("whole"), name("cut"));
    if ((compute == DType::kBF16) != (kind == Kind::kSft)) continue;  // a loss is met alike in either: one of them for each kind
    Rng rng(7, static_cast<std::uint64_t>(kind));
    for (int victim = 0; victim < 3; ++victim) {
      const TrainCase lost{.kind = kind,
                           .compute = compute,
                           .victim = victim,
                           .moment = std::chrono::microseconds(rng.next_below(40'000)),
                           .gathers_layers = true};
      const fs::path folder = name(fmt::format("lost{}", victim));
      ASSERT_EQ(train(lost, model(), folder, 3), std::vector<int>(2, 0));
      expect_same_weights(name("whole"), folder, 3, victim);
      expect_same_checkpoint(name("whole"), folder, model());
    }
  }
}

TEST_P(Ranks, CopiesOfTheStateAreSavedResumedAndHealed) {
  const Kind kind = GetParam();
  ASSERT_EQ(train({.kind = kind}, model(), root("whole"), 1), std::vector<int>{0});
  ASSERT_EQ(train({.kind = kind, .max_steps = 5, .num_replicas = 2}, model(), root("cut"), 4), std::vector<int>(4, 0));
  EXPECT_FALSE(fs::exists(root("cut") / "checkpoints/step_5/trainer/rank_2.safetensors")) << "the second copy is not written";
  ASSERT_EQ(train({.kind = kind, .resumes = true, .num_replicas = 2}, model(), root("cut"), 2), std::vector<int>(2, 0));
  expect_same_weights(root("whole"), root("cut"), 2, -1, 2);
  // Three ranks do not hold two copies: they go on with one.
  const TrainCase lost{.kind = kind, .victim = 1, .moment = std::chrono::milliseconds(60), .num_replicas = 2};
  ASSERT_EQ(train(lost, model(), root("lost"), 4), std::vector<int>(3, 0));
  expect_same_weights(root("whole"), root("lost"), 4, lost.victim);
  expect_same_checkpoint(root("whole"), root("lost"), model());
}

/// As train(), and how long it took in seconds.
std::vector<int> train_timed(const TrainCase& run, const fs::path& model, const fs::path& root, int size, double& seconds) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<int> statuses = train(run, model, root, size);
  seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return statuses;
}

// Rank 0 waits in the background for a part that never comes: the group knows of the loss within a second or two.
TEST_P(Ranks, ASaveEndsWithTheRankThatItWaitsFor) {
  for (const int killed : {1, 2}) {
    double seconds = 0;
    const TrainCase run{.kind = GetParam(), .killed_rank = killed, .save_async = true, .saves_often = true};
    std::vector<int> wanted(3, 7);
    wanted[static_cast<std::size_t>(killed)] = 128 + SIGKILL;
    EXPECT_EQ(train_timed(run, model(), root(fmt::format("run{}", killed)), 3, seconds), wanted);
    EXPECT_LT(seconds, std::chrono::duration<double>(run.timeout).count() / 2) << "waited for the part of a rank that is gone";
    EXPECT_EQ(io::list_checkpoints(root(fmt::format("run{}", killed)) / "checkpoints", std::vector<std::string>{"trainer"}),
              std::vector<std::int64_t>{2});
  }
}

// Whatever is there afterwards is whole, and a run that resumes from it ends as one that never stopped.
TEST_P(Ranks, AKillAtAnyMomentOfASaveLeavesNoHalf) {
  constexpr int kSize = 3;
  ASSERT_EQ(train({.kind = GetParam()}, model(), root("whole"), 1), std::vector<int>{0});
  Rng rng(9, static_cast<std::uint64_t>(GetParam()));
  for (int i = 0; i < 6; ++i) {
    TrainCase run{.kind = GetParam(), .victim = i % kSize, .save_async = i % 2 == 0, .saves_often = true};
    run.moment = std::chrono::microseconds(rng.next_below(250'000));
    SCOPED_TRACE(fmt::format("moment {}: rank {} after {} us", i, run.victim, run.moment.count()));
    const fs::path folder = root(fmt::format("killed{}", i));
    double seconds = 0;
    (void)train_timed(run, model(), folder, kSize, seconds);
    EXPECT_LT(seconds, std::chrono::duration<double>(run.timeout).count() / 2);
    for (int rank = 0; rank <= kSize; ++rank) fs::remove(folder / fmt::format("rank_{}", rank));
    fs::remove_all(folder / "store10");
    const std::vector<std::int64_t> steps = io::list_checkpoints(folder / "checkpoints", std::vector<std::string>{"trainer"});
    for (const std::int64_t step : steps) io::verify_checkpoint(folder / "checkpoints", step, "trainer");
    ASSERT_EQ(train({.kind = GetParam(), .resumes = true}, model(), folder, 2), std::vector<int>(2, 0));
    if (steps.empty() || steps.back() < 10) expect_same_weights(root("whole"), folder, 2);
    expect_same_checkpoint(root("whole"), folder, model());
    fs::remove_all(folder);
  }
}

TEST_P(Ranks, AKilledRankEndsTheOthersWithItsName) {
  EXPECT_EQ(train({.kind = GetParam(), .killed_rank = 1}, model(), root("run"), 3), (std::vector<int>{7, 128 + SIGKILL, 7}));
}

/// Of the ranks that are left, from noticing the loss to going on; none if the victim was done before its moment came.
std::optional<double> recover_seconds(const fs::path& root, int size) {
  std::optional<double> longest;
  for (int rank = 0; rank < size; ++rank)
    if (const fs::path file = root / fmt::format("recovered_{}", rank); fs::exists(file))
      longest = std::max(longest.value_or(0), std::stod(read_file(file)));
  return longest;
}

// The others take what it owned from its neighbour's copy, do the step again and end with the weights and checkpoints of a run that lost
// nobody. PRL_HEALING_MOMENTS=50 tries so many moments, every second one with a rank that is stopped instead of killed.
TEST_P(Ranks, ALostRankAtAnyMomentChangesNoBit) {
  constexpr int kSize = 3;
  const char* asked = std::getenv("PRL_HEALING_MOMENTS");
  const int num_moments = asked != nullptr ? std::stoi(asked) : 6;
  ASSERT_EQ(train({.kind = GetParam()}, model(), root("whole"), 1), std::vector<int>{0});
  Rng rng(5, static_cast<std::uint64_t>(GetParam()));
  std::vector<double> seconds;
  for (int i = 0; i < num_moments; ++i) {
    TrainCase run{.kind = GetParam(), .victim = i / 2 % kSize, .moment = std::chrono::microseconds(rng.next_below(300'000))};
    run.save_async = i % 3 == 2;
    if (asked != nullptr && i % 2 == 1) run.signal = SIGSTOP, run.timeout = std::chrono::seconds(4);
    SCOPED_TRACE(fmt::format("moment {}: rank {} after {} us, signal {}", i, run.victim, run.moment.count(), run.signal));
    const fs::path folder = root(fmt::format("lost{}", i));
    ASSERT_EQ(train(run, model(), folder, kSize), std::vector<int>(kSize - 1, 0));
    expect_same_weights(root("whole"), folder, kSize, run.victim);
    expect_same_checkpoint(root("whole"), folder, model());
    // One that was on its way in the background when the rank was lost is given up.
    if (!run.save_async) {
      EXPECT_TRUE(fs::exists(folder / "checkpoints/step_9/trainer/manifest.json"));
    }
    if (const auto found = recover_seconds(folder, kSize)) seconds.push_back(*found);
    fs::remove_all(folder);
  }
  std::ranges::sort(seconds);
  if (!seconds.empty())
    std::printf("%zu of %d moments hit a run that went on; from noticing to going on: median %.3f s, longest %.3f s\n", seconds.size(),
                num_moments, seconds[seconds.size() / 2], seconds.back());
}

// One joins while another is killed: the number of ranks goes down and up, and no bit changes.
TEST_P(Ranks, ANewcomerJoinsBetweenTwoSteps) {
  constexpr int kSize = 3, kSteps = 40;
  ASSERT_EQ(train({.kind = GetParam(), .max_steps = kSteps}, model(), root("whole"), 1), std::vector<int>{0});
  for (const int victim : {-1, 0, 2}) {
    SCOPED_TRACE(victim);
    TrainCase run{.kind = GetParam(), .max_steps = kSteps, .victim = victim, .has_newcomer = true};
    run.moment = std::chrono::milliseconds(150);
    const fs::path folder = root(fmt::format("joined{}", victim));
    std::vector<int> statuses = train(run, model(), folder, kSize);
    const bool has_joined = statuses.back() != kCameTooLate || victim < 0;
    if (!has_joined) statuses.pop_back();
    ASSERT_EQ(statuses, std::vector<int>(statuses.size(), 0));
    expect_same_weights(root("whole"), folder, has_joined ? kSize + 1 : kSize, victim);
  }
}

TEST_P(Ranks, AStoppedRankIsGoneWithoutAfterTheTimeout) {
  constexpr int kSize = 3;
  ASSERT_EQ(train({.kind = GetParam()}, model(), root("whole"), 1), std::vector<int>{0});
  const TrainCase run{.kind = GetParam(),
                      .victim = GetParam() == Kind::kRl ? 0 : 1,
                      .moment = std::chrono::milliseconds(60),
                      .signal = SIGSTOP,
                      .timeout = std::chrono::seconds(4)};
  ASSERT_EQ(train(run, model(), root("stopped"), kSize), std::vector<int>(kSize - 1, 0));
  expect_same_weights(root("whole"), root("stopped"), kSize, run.victim);
}

}  // namespace
}  // namespace prl::trainer
