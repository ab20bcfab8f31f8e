// Copies of what ranks own while a group changes twice.
#include <gtest/gtest.h>

#include <array>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "comm/communicator.hpp"
#include "trainer/peer_snapshot.hpp"
#include "trainer/test_support.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;

/// What commit() exchanges, by a rank of which nothing is kept.
void send_copies_that_nobody_keeps(comm::Communicator& group) {
  constexpr double kBytes = 64;
  const comm::Call call{.what = "a copy for the neighbour"};
  (void)group.gather_bytes("0\n", call);
  const std::vector<double> sizes = group.gather_number(kBytes, call);
  const int size = group.size(), next = (group.rank() + 1) % size, previous = (group.rank() + size - 1) % size;
  std::vector<char> own(static_cast<std::size_t>(kBytes)), theirs(static_cast<std::size_t>(sizes[static_cast<std::size_t>(previous)]));
  const auto bytes = [](std::vector<char>& of, std::size_t count) {
    const auto n = static_cast<std::int64_t>(count);
    return TensorView{of.data(), {n}, DType::kU8, {}, n};
  };
  std::vector<TensorView> outs(static_cast<std::size_t>(size), bytes(theirs, 0));
  std::vector<ConstTensorView> ins(outs.begin(), outs.end());
  outs[static_cast<std::size_t>(previous)] = bytes(theirs, theirs.size());
  ins[static_cast<std::size_t>(next)] = bytes(own, own.size());
  group.all_to_all(outs, ins, call);
  group.settle(call);
}

/// One of four ranks, which are threads; the last joins the others.
class Life {
 public:
  Life(int rank, const std::filesystem::path& model, std::span<const std::shared_ptr<comm::Store>> stores)
      : rank_(rank), stores_(stores), policy_(make_tiny_policy(model)), copies_(*policy_, rank == kNewcomer) {}

  /// Masters and how often the optimizer stepped, of the three after two steps and of those that are left in the end.
  struct Trace {
    std::vector<std::vector<float>> before, after;
    std::int64_t step_before = 0, step_after = -1;
  };
  Trace run() {
    Trace trace;
    if (rank_ != kNewcomer) {
      start_in(group(0, rank_, kNewcomer));
      for (std::int64_t step = 1; step <= 2; ++step) {
        step_->run(cross_entropy_rows(step, 4), PolicyVersion{step});
        progress_.step = step;
        copies_.commit(progress_, *step_);
      }
      trace.before = masters(*policy_, *step_);
      trace.step_before = progress_.step;
    }
    if (rank_ == kNewcomer)
      start_in(group(1, rank_, 4));
    else
      step_->move_to(group(1, rank_, 4));
    if (!copies_.restore(*step_)) fail(ErrorCode::kInternal, "no copies to join with");
    // A step, after which a rank dies when all have sent their copies, and the newcomer has not kept what came to it.
    step_->run(cross_entropy_rows(3, 4), PolicyVersion{3});
    progress_.step = 3;
    try {
      if (rank_ < kVictim) {
        copies_.commit(progress_, *step_);
      } else {
        send_copies_that_nobody_keeps(step_->ranks());
        if (rank_ == kVictim) return die(std::move(trace));
        step_->ranks().barrier();
      }
      ADD_FAILURE() << "rank " << rank_ << " noticed nothing";
    } catch (const comm::PeerLost&) {
    }
    step_->move_to(group(2, rank_ < kVictim ? rank_ : rank_ - 1, 3));
    const std::optional<TrainProgress> restored = copies_.restore(*step_);
    if (!restored) fail(ErrorCode::kInternal, "no copies to go on with");
    trace.step_after = restored->step;
    trace.after = masters(*policy_, *step_);
    return trace;
  }

  static constexpr int kVictim = 2, kNewcomer = 3;

 private:
  Trace die(Trace trace) {
    step_->ranks().abort("it dies");
    return trace;
  }
  std::unique_ptr<comm::Communicator> group(std::int64_t generation, int rank, int size) const {
    return comm::make_threads_communicator(
        {.rank = rank, .size = size, .store = stores_[static_cast<std::size_t>(generation)], .generation = generation});
  }
  void start_in(std::unique_ptr<comm::Communicator> of) {
    mesh_ = std::make_unique<comm::Mesh>(std::move(of));
    GradientStepOptions options;
    options.mesh = mesh_.get();
    step_ = std::make_unique<GradientStep>(*policy_, options);
  }

  int rank_;
  std::span<const std::shared_ptr<comm::Store>> stores_;
  std::unique_ptr<Policy> policy_;
  PeerSnapshots copies_;
  std::unique_ptr<comm::Mesh> mesh_;
  std::unique_ptr<GradientStep> step_;
  TrainProgress progress_;
};

// What was kept before the newcomer came is still there, and what has been kept since is not whole: the newcomer has nothing of it.
TEST(PeerSnapshots, ARankIsLostBeforeTheNewcomerHasItsFirstCopies) {
  Scratch scratch("copies");
  nn::init_model(model_of_several_chunks(), scratch.path);
  const std::array<std::shared_ptr<comm::Store>, 3> stores{comm::make_memory_store(), comm::make_memory_store(), comm::make_memory_store()};
  std::array<Life::Trace, 4> traces;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank)
    threads.emplace_back([&, rank] {
      try {
        traces[static_cast<std::size_t>(rank)] = Life(rank, scratch.path, stores).run();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const int rank : {0, 1, Life::kNewcomer}) {
    EXPECT_EQ(traces[static_cast<std::size_t>(rank)].step_after, traces[0].step_before) << "rank " << rank;
    EXPECT_EQ(traces[static_cast<std::size_t>(rank)].after, traces[0].before) << "rank " << rank;
  }
  EXPECT_FALSE(traces[0].before.empty());
}

}  // namespace
}  // namespace prl::trainer
