#include "autograd/tape.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "autograd/functions.hpp"
#include "base/normal_draws.hpp"

namespace prl::autograd {
namespace {

class TapeTest : public ::testing::Test {
 protected:
  TapeTest() : session_(make_cpu_runtime(), 1), arena_(ctx().runtime) {}
  ops::OpContext& ctx() { return session_.context(); }
  Tensor random(Shape shape, std::uint64_t seed) {
    const Tensor t = Tensor::empty(ctx().runtime, shape, DType::kF32);
    Rng rng(seed);
    draw_normals(rng, {t.as<float>(), static_cast<std::size_t>(t.num_elements())});
    return t;
  }
  static std::vector<float> values(TensorView v) { return {v.as<float>(), v.as<float>() + v.shape.num_elements()}; }

  ops::OpSession session_;
  Arena arena_;
};

TEST_F(TapeTest, ArenaGivesAlignedMemoryAndReusesIt) {
  const TensorView a = arena_.take({3, 5}, DType::kF32);
  const Arena::Mark mark = arena_.mark();
  const TensorView b = arena_.take({7}, DType::kBF16);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data) % 64, 0u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data) % 64, 0u);
  EXPECT_TRUE(arena_.is_above(mark, b.data));
  EXPECT_FALSE(arena_.is_above(mark, a.data));
  arena_.release(mark);
  EXPECT_FALSE(arena_.is_above(mark, b.data));
  EXPECT_EQ(arena_.take({1}, DType::kF32).data, b.data);
  // Growth spreads over blocks; a mark from before still releases everything above it.
  const TensorView big = arena_.take({3 << 20}, DType::kF32);
  EXPECT_TRUE(arena_.is_above(mark, big.data));
  EXPECT_GE(arena_.num_allocations(), 2u);
  arena_.release(mark);
  EXPECT_FALSE(arena_.is_above(mark, big.data));
  arena_.reset();
  const std::size_t allocations = arena_.num_allocations(), capacity = arena_.capacity();
  for (int step = 0; step < 3; ++step) {
    arena_.take({3, 5}, DType::kF32);
    arena_.take({3 << 20}, DType::kF32);
    arena_.reset();
  }
  EXPECT_EQ(arena_.num_allocations(), allocations) << "a step as large as the largest takes nothing new";
  EXPECT_EQ(arena_.capacity(), capacity);
}

TEST_F(TapeTest, ArenaKeepsTheBlocksThatItNeeds) {
  const auto take_mib = [&](std::int64_t mib) { return arena_.take({mib << 20}, DType::kU8).data; };
  const void* first = take_mib(1);
  const void* second = take_mib(16);
  EXPECT_NE(first, second);
  arena_.reset();
  EXPECT_EQ(take_mib(1), first) << "nothing is unused, so touched memory stays";
  EXPECT_EQ(take_mib(16), second);
  arena_.reset();
  // A tensor that is a little larger than a block leaves all of it unused.
  (void)take_mib(17);
  arena_.reset();
  EXPECT_EQ(arena_.capacity(), std::size_t{17} << 20) << "half of the memory is unused, so that one block replaces it";
  const std::size_t allocations = arena_.num_allocations();
  (void)take_mib(1);
  (void)take_mib(16);
  EXPECT_EQ(arena_.num_allocations(), allocations);
}

TEST_F(TapeTest, NothingIsRecordedWithoutATape) {
  const Tensor x = random({2, 8}, 1), w = random({8}, 2);
  Frame frame{ctx(), arena_};
  const Var y = rms_norm(frame, frame.variable(x), {w.view(), {}, 1e-6f});
  EXPECT_EQ(y.id, -1);
  EXPECT_TRUE(y.is_defined());
}

/// f(x) = sum(c * swiglu(linear(norm(x)))) + residual terms, through every function of the module.
TEST_F(TapeTest, GradientsOfAChainAreThoseOfFiniteDifferences) {
  const Tensor x = random({3, 6}, 1), norm_w = random({6}, 2), w1 = random({8, 6}, 3), w2 = random({6, 4}, 4), b1 = random({8}, 5),
               c = random({3, 6}, 6);
  const Tensor d_norm = Tensor::zeros(ctx().runtime, {6}, DType::kF32), d_w1 = Tensor::zeros(ctx().runtime, {8, 6}, DType::kF32),
               d_b1 = Tensor::zeros(ctx().runtime, {8}, DType::kF32), d_w2 = Tensor::zeros(ctx().runtime, {6, 4}, DType::kF32);
  std::vector<float> dx;
  const auto run = [&](bool with_tape) {
    arena_.reset();
    Tape tape(arena_);
    Frame frame{ctx(), arena_, with_tape ? &tape : nullptr};
    const ops::LinearWeightPtr p1 = ops::pack_linear(ctx(), w1, b1.view(), DType::kF32, true),
                               p2 = ops::pack_linear(ctx(), w2, {}, DType::kF32, true);
    const Var in = frame.variable(x);
    if (with_tape) tape.begin_block();
    const Var normed = rms_norm(frame, in, {norm_w.view(), d_norm.view(), 1e-5f});
    const Var delta =
        linear(frame, swiglu(frame, linear(frame, normed, {p1.get(), d_w1.view(), d_b1.view()})), {p2.get(), d_w2.view(), {}});
    const NormedSum y = add_rms_norm(frame, delta, in, {norm_w.view(), d_norm.view(), 1e-5f});
    const Var out = add(frame, y.normed, y.sum);
    if (with_tape) tape.end_block();
    double loss = 0;
    for (std::int64_t i = 0; i < c.num_elements(); ++i)
      loss += static_cast<double>(c.as<float>()[i]) * static_cast<double>(out.value.as<float>()[i]);
    if (with_tape) {
      const TensorView seed = frame.take(out.value.shape, DType::kF32);
      ctx().runtime->copy_within(seed.data, c.data(), c.num_bytes());
      tape.set_grad(out, seed);
      // The sum is read by its norm and by the last add: both parts must be in its gradient.
      tape.backward();
      EXPECT_TRUE(tape.is_empty());
      dx = values(tape.grad(in));
    }
    return loss;
  };
  run(true);
  const auto check = [&](const Tensor& value, const float* gradient, const char* name) {
    for (std::int64_t i = 0; i < value.num_elements(); ++i) {
      const float saved = value.as<float>()[i];
      constexpr float kStep = 1e-2f;
      value.as<float>()[i] = saved + kStep;
      const double up = run(false);
      value.as<float>()[i] = saved - kStep;
      const double down = run(false);
      value.as<float>()[i] = saved;
      const double numeric = (up - down) / (2 * static_cast<double>(kStep));
      EXPECT_NEAR(static_cast<double>(gradient[i]), numeric, 5e-3 * std::max(1.0, std::abs(numeric))) << name << " " << i;
    }
  };
  check(x, dx.data(), "x");
  check(norm_w, d_norm.as<float>(), "norm");
  check(w1, d_w1.as<float>(), "w1");
  check(b1, d_b1.as<float>(), "b1");
  check(w2, d_w2.as<float>(), "w2");
}

TEST_F(TapeTest, ABlockMayNotLeakItsScratchMemory) {
  const Tensor x = random({2, 8}, 1), w = random({8}, 2);
  Tape tape(arena_);
  Frame frame{ctx(), arena_, &tape};
  const Var in = frame.variable(x);
  tape.begin_block();
  const Var y = rms_norm(frame, in, {w.view(), {}, 1e-6f});
  tape.end_block();
  tape.set_grad(y, frame.take(y.value.shape, DType::kF32));
  // Nobody made room for the gradient of `in` before the block: it would die with it.
  EXPECT_DEATH(tape.backward(), "scratch memory of a block");
}

TEST_F(TapeTest, CheckpointRunsItsBodyAgain) {
  const Tensor x = random({2, 8}, 1), w = random({8}, 2);
  const Tensor dw = Tensor::zeros(ctx().runtime, {8}, DType::kF32);
  int runs = 0, recomputed = 0;
  const auto body = [&](Frame& inner, const Var& in, TensorView out) {
    ++runs;
    recomputed += inner.is_recompute ? 1 : 0;
    const Var y = rms_norm(inner, in, {w.view(), dw.view(), 1e-6f});
    return add(inner, in, y, out);
  };
  const auto run = [&](bool with_checkpoint) {
    arena_.reset();
    ctx().runtime->zero(dw.data(), dw.num_bytes());
    Tape tape(arena_);
    Frame frame{ctx(), arena_, &tape};
    const Var in = frame.variable(x);
    const Var out =
        with_checkpoint ? checkpoint(frame, in, in.value.shape, body) : body(frame, in, frame.take(in.value.shape, DType::kF32));
    const TensorView seed = frame.take(out.value.shape, DType::kF32);
    for (int i = 0; i < 16; ++i) seed.as<float>()[i] = 0.5f + static_cast<float>(i);
    std::vector<float> result = values(out.value);
    tape.set_grad(out, seed);
    tape.backward();
    for (const float v : values(tape.grad(in))) result.push_back(v);
    for (const float v : values(dw)) result.push_back(v);
    return result;
  };
  const std::vector<float> plain = run(false);
  EXPECT_EQ(runs, 1);
  EXPECT_EQ(run(true), plain);
  EXPECT_EQ(runs, 3);
  EXPECT_EQ(recomputed, 1);
}

}  // namespace
}  // namespace prl::autograd
