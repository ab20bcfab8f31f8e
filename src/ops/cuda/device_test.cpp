// What only real device memory and real sizes show: the runtime, and the GPU's bodies beside the CPU's.
#include <chrono>
#include <numeric>
#include <thread>

#include "device/cuda/check.hpp"
#include "device/cuda/cuda_runtime.hpp"
#include "ops/cuda/few_rows.hpp"
#include "ops/cuda/input_codes.hpp"
#include "ops/cuda/launch.hpp"
#include "ops/cuda/linear_weight.hpp"
#include "ops/cuda/test_sides.hpp"
#include "ops/cuda_table.hpp"
#include "ops/lm_head.hpp"
#include "ops/optimizer.hpp"
#include "ops/pointwise.hpp"
#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

TEST(CudaRuntime, CountsCopiesAndZeroes) {
  const auto runtime = make_cuda_runtime();
  const std::size_t available = runtime->bytes_available();
  EXPECT_GT(available, std::size_t{1} << 30);
  // Larger than every staging buffer, of odd sizes, the second one shared by threads.
  for (const std::size_t size : {(std::size_t{37} << 20) + 13, (std::size_t{171} << 20) + 5}) {
    std::vector<unsigned char> source(size), back(size, 7);
    for (std::size_t i = 0; i < size; ++i) source[i] = static_cast<unsigned char>(i * 31 + i / 977);
    void* a = runtime->allocate(size);
    void* b = runtime->allocate(size);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % 256, 0u);
    EXPECT_EQ(runtime->bytes_in_use(), 2 * size);
    runtime->copy_from_host(a, source.data(), size);
    runtime->copy_within(b, a, size);
    runtime->copy_to_host(back.data(), b, size);
    EXPECT_TRUE(back == source);
    runtime->zero(a, size);
    runtime->copy_to_host(back.data(), a, size);
    EXPECT_TRUE(std::all_of(back.begin(), back.end(), [](unsigned char c) { return c == 0; }));
    runtime->deallocate(a, size);
    runtime->deallocate(b, size);
    EXPECT_EQ(runtime->bytes_in_use(), 0u);
    EXPECT_EQ(runtime->peak_bytes(), 2 * size);
  }
  runtime->synchronize();
  EXPECT_GT(runtime->bytes_available(), available - (std::size_t{64} << 20)) << "freed memory counts as available";
}

TEST(CudaRuntime, SaysWhatWasWantedWhenMemoryEnds) {
  const auto runtime = make_cuda_runtime();
  try {
    runtime->allocate(std::size_t{1} << 44);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kOutOfMemory);
    EXPECT_NE(std::strstr(e.what(), "wanted 17592186044416 bytes"), nullptr) << e.what();
  }
  void* p = runtime->allocate(1000);  // the runtime still works
  runtime->zero(p, 1000);
  runtime->synchronize();
  runtime->deallocate(p, 1000);
}

TEST(CudaRuntime, AnIndexThatIsNotThereIsNamed) {
  try {
    make_cuda_runtime(99);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnavailable);
    EXPECT_NE(std::strstr(e.what(), "[cuda:99] there is no such GPU"), nullptr) << e.what();
  }
}

TEST(CudaRuntime, StagedArraysHoldAndEqualOnesAreFoundAgain) {
  const auto runtime = make_cuda_runtime();
  auto& cuda = ::prl::cuda::runtime_of(*runtime);
  const auto read = [&](const void* p, std::size_t n) {
    std::vector<std::int32_t> out(n);
    runtime->copy_to_host(out.data(), p, n * 4);
    return out;
  };
  std::vector<std::int32_t> a(100), b(100, 3);
  std::iota(a.begin(), a.end(), 0);
  const void* pa = cuda.stage(a.data(), 400);
  const void* pb = cuda.stage(b.data(), 400);
  EXPECT_NE(pa, pb);
  EXPECT_EQ(cuda.stage(a.data(), 400), pa);
  EXPECT_EQ(read(pa, 100), a);
  EXPECT_EQ(read(pb, 100), b);
  // Many laps of the ring, checked as an op would use them: three arrays at a time.
  Rng rng(1);
  for (int lap = 0; lap < 200; ++lap) {
    std::vector<std::vector<std::int32_t>> arrays(3);
    const void* p[3];
    for (std::size_t i = 0; i < 3; ++i) {
      arrays[i].resize(1 + rng.next_below(100000));
      for (auto& v : arrays[i]) v = static_cast<std::int32_t>(rng.next_u32());
      p[i] = cuda.stage(arrays[i].data(), arrays[i].size() * 4);
    }
    for (std::size_t i = 0; i < 3 && lap % 10 == 0; ++i) ASSERT_EQ(read(p[i], arrays[i].size()), arrays[i]) << "lap " << lap;
  }
  std::vector<std::int32_t> large(3 << 20, 5);  // larger than a quarter
  EXPECT_EQ(read(cuda.stage(large.data(), large.size() * 4), large.size()), large);
}

TEST(CudaRuntime, CopiesForTheHostAreOfTheirPlaceInTheQueue) {
  const auto runtime = make_cuda_runtime();
  const auto first = make_host_link(runtime, true), second = make_host_link(runtime, true);
  const std::shared_ptr<void> first_host = first->allocate(4000), second_host = second->allocate(4000);
  const auto watch = runtime->make_stopwatch();
  const Tensor a = Tensor::empty(runtime, {1000}, DType::kI32), b = a.clone();
  std::vector<std::int32_t> values(1000);
  for (int round = 0; round < 50; ++round) {
    const std::uint64_t begin = watch->mark();
    std::ranges::fill(values, round);
    runtime->copy_from_host(a.data(), values.data(), a.num_bytes());
    const HostLink::Ticket of_first = first->to_host(first_host.get(), a.data(), a.num_bytes());
    std::ranges::fill(values, -round);
    runtime->copy_from_host(b.data(), values.data(), b.num_bytes());
    const HostLink::Ticket of_second = second->to_host(second_host.get(), b.data(), b.num_bytes());
    const std::uint64_t end = watch->mark();
    first->wait(of_first);
    second->wait(of_second);
    ASSERT_EQ(static_cast<const std::int32_t*>(first_host.get())[999], round);
    ASSERT_EQ(static_cast<const std::int32_t*>(second_host.get())[999], -round);
    EXPECT_GT(watch->seconds(begin, end), 0.0);
  }
}

TEST(CudaRuntime, CopiesFromManyThreads) {
  const auto runtime = make_cuda_runtime();
  constexpr std::size_t kCount = 3 << 20;
  constexpr int kThreads = 8;
  auto* p = static_cast<std::int32_t*>(runtime->allocate(kThreads * kCount * 4));
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      const std::vector<std::int32_t> v(kCount, i);
      runtime->copy_from_host(p + static_cast<std::size_t>(i) * kCount, v.data(), kCount * 4);
    });
  for (auto& t : threads) t.join();
  std::vector<std::int32_t> back(kThreads * kCount);
  runtime->copy_to_host(back.data(), p, back.size() * 4);
  for (std::size_t i = 0; i < back.size(); i += 4097) ASSERT_EQ(back[i], static_cast<std::int32_t>(i / kCount));
  runtime->deallocate(p, kThreads * kCount * 4);
}

/// A stream that frees memory which another stream still reads does not hand it out too early.
TEST(CudaRuntime, MemoryFreedByOneStreamIsSafeForAnother) {
  Sides s;
  const auto other = make_cuda_runtime();
  OpSession session(other, 1);
  constexpr std::int64_t kCount = 64 << 20;
  for (int round = 0; round < 5; ++round) {
    Tensor source = Tensor::empty(s.gpu_runtime, {kCount}, DType::kF32);
    s.gpu_runtime->zero(source.data(), source.num_bytes());
    s.gpu_runtime->synchronize();
    Tensor copy = Tensor::empty(other, {kCount}, DType::kF32);
    for (int i = 0; i < 20; ++i) other->copy_within(copy.data(), source.data(), source.num_bytes());
    source = Tensor();
    Tensor poison = Tensor::empty(s.gpu_runtime, {kCount}, DType::kF32);
    PRL_CUDA_CHECK(cudaMemsetAsync(poison.data(), 0xff, poison.num_bytes(), static_cast<cudaStream_t>(s.gpu_runtime->stream())));
    s.gpu_runtime->synchronize();
    ASSERT_EQ(sum_squares(session.context(), copy), 0.0) << round;
  }
}

/// The contract that exact mode rests on, at the shapes of real models: with split-K off a row is the same bits for every number of
/// rows, although each number has its own fastest kernel.
TEST(CudaLinear, RowsAreTheSameBitsForEveryNumberOfRows) {
  Sides s;
  struct Matrix {
    std::int64_t N, K;
  };
  const std::int64_t num_rows = is_watched() ? 320 : 4096;
  std::vector<std::int64_t> sizes = {1,   2,   3,   4,   5,   6,   7,   8,   9,   11,   13,   15,   16,  17,  23,
                                     24,  31,  32,  33,  47,  48,  49,  63,  64,  65,   96,   97,   127, 128, 129,
                                     160, 191, 255, 256, 257, 383, 512, 513, 777, 1024, 1025, 2047, 3001};
  if (is_watched()) sizes = {1, 2, 3, 9, 17, 33, 64, 97, 128, 160, 257};
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const auto [N, K] : {Matrix{4096, 1024},
                              {1024, 2048},
                              {6144, 1024},
                              {1024, 3072},
                              {960, 576},
                              {576, 1536},
                              {2560, 9728},
                              {75, 300},
                              {2100, 40},
                              {260, 72},
                              {2100, 1000}}) {
      if (dtype == DType::kF32 && N * K > (is_watched() ? 25'000 : 2'000'000)) continue;
      if (is_watched() && N * K > 1'000'000) continue;
      Tensor x = s.to_gpu(s.random({num_rows, K}, dtype, 1)), w = s.to_gpu(s.random({N, K}, DType::kF32, 2, 0.05f));
      const LinearWeightPtr packed = pack_linear(s.gpu, w, {}, dtype, true);
      Tensor all = Tensor::empty(s.gpu_runtime, {num_rows, N}, dtype), dx_all = Tensor::empty(s.gpu_runtime, {num_rows, K}, dtype);
      linear(s.gpu, all, x, *packed);
      linear_backward_input(s.gpu, dx_all, all, *packed, false);
      const Tensor want = s.to_cpu(all), want_dx = s.to_cpu(dx_all);
      for (const std::int64_t m : sizes) {
        const std::int64_t first = (m * 37) % (num_rows - m);
        Tensor y = Tensor::empty(s.gpu_runtime, {m, N}, dtype), dx = Tensor::empty(s.gpu_runtime, {m, K}, dtype);
        linear(s.gpu, y, x.slice(first, m), *packed);
        EXPECT_TRUE(same_bits(s.to_cpu(y), want.slice(first, m))) << to_string(dtype) << " N " << N << " K " << K << ", " << m << " rows";
        linear_backward_input(s.gpu, dx, all.slice(first, m), *packed, false);
        EXPECT_TRUE(same_bits(s.to_cpu(dx), want_dx.slice(first, m)))
            << "input gradient, " << to_string(dtype) << " N " << N << " K " << K << ", " << m << " rows";
      }
    }
  }
}

/// Nor for what else was computed before it: neither when kernels are measured, nor for which size of a class.
TEST(CudaLinear, KernelsAreChosenForSpeedAlone) {
  enum class History { kMeasured, kNot, kOthersFirst, kOften };
  for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{1024, 768}, {264, 200}, {2500, 304}}) {
    std::vector<Tensor> want;
    for (const History history : {History::kMeasured, History::kNot, History::kOthersFirst, History::kOften}) {
      Sides s;
      s.gpu.may_measure = history == History::kMeasured;
      // Rows of dy begin at even places, as those of the head's do, however wide they are.
      const std::int64_t apart = (N + 63) / 64 * 64;
      const Tensor x = s.to_gpu(s.random({700, K}, DType::kBF16, 1)), all_dy = s.to_gpu(s.random({700, apart}, DType::kBF16, 2));
      const TensorView dy{all_dy.data(), {700, N}, DType::kBF16, all_dy.view().device, apart};
      const LinearWeightPtr packed = pack_linear(s.gpu, s.to_gpu(s.random({N, K}, DType::kF32, 3, 0.05f)), {}, DType::kBF16, true);
      std::vector<Tensor> found;
      const auto run = [&](std::int64_t rows) {
        const Tensor y = Tensor::empty(s.gpu_runtime, {rows, N}, DType::kBF16), dx = Tensor::empty(s.gpu_runtime, {rows, K}, DType::kBF16);
        const Tensor dw = Tensor::empty(s.gpu_runtime, {N, K}, DType::kF32);
        linear(s.gpu, y, x.slice(0, rows), *packed);
        linear_backward_input(s.gpu, dx, dy.rows(0, rows), *packed, false);
        linear_backward_weight(s.gpu, dw, {}, dy.rows(0, rows), x.slice(0, rows), false);
        found = {y, dx, dw};
      };
      const std::vector<std::int64_t> sizes =
          is_watched() ? std::vector<std::int64_t>{300} : std::vector<std::int64_t>{136, 300, 390, 515, 700};
      if (history == History::kOthersFirst)
        for (const std::int64_t rows : sizes) run(rows - 3);
      std::size_t i = 0;
      for (const std::int64_t rows : sizes) {
        for (int uses = history == History::kOften && !is_watched() ? 600 : 1; uses > 0; --uses) run(rows);
        for (const Tensor& t : found) {
          if (history == History::kMeasured)
            want.push_back(s.to_cpu(t));
          else
            EXPECT_TRUE(same_bits(s.to_cpu(t), want[i])) << static_cast<int>(history) << ": " << rows << " rows, result " << i % 3;
          ++i;
        }
      }
    }
  }
}

/// A slot is given back only after the next one's products have begun: with one slot for several steps the kernel would wait for ever.
TEST(CudaLinear, AProductOfSeveralStepsWantsTwoSlots) {
  Sides s;
  if (cuda::properties_of(s.gpu).major != 9) GTEST_SKIP() << "kernels for compute capability 9.0";
  constexpr std::int64_t N = 64, K = 1024;
  const Tensor x = s.to_gpu(s.random({2, K}, DType::kBF16, 1)), w = s.to_gpu(s.random({N, K}, DType::kF32, 2, 0.05f));
  const LinearWeightPtr packed = pack_linear(s.gpu, w, {}, DType::kBF16, true);
  Tensor y = Tensor::empty(s.gpu_runtime, {2, N}, DType::kF32);
  cuda::Product p = cuda::forward_product(cuda::dense(s.gpu, *packed), x.data(), K, 2, 0, N);
  p.out = y.data();
  try {
    cuda::few_rows_product(s.gpu, p, {.rows = 8, .columns = 8, .slots = 1});
    ADD_FAILURE() << "it was queued";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("at least 2"));
  }
}

/// Our own kernels for few rows and the library's for many, however the former are cut.
TEST(CudaLinear, FewRowsAreTheLibrarysBitsInEveryTile) {
  Sides s;
  if (cuda::properties_of(s.gpu).major != 9) GTEST_SKIP() << "kernels for compute capability 9.0";
  constexpr std::int64_t kRows = 4096;
  for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{1024, 3072}, {516, 576}, {4096, 1024}}) {
    if (is_watched() && N != 516) continue;  // with all, racecheck runs out of the host's memory
    Tensor x = s.random({kRows, K}, DType::kBF16, 1);
    for (std::int64_t k = 0; k < K; ++k) Session::set(x, 5 * K + k, 0.0f);
    x = s.to_gpu(x);
    Tensor w = s.to_gpu(s.random({N, K}, DType::kF32, 2, 0.05f)), bias = s.to_gpu(s.random({N}, DType::kF32, 3));
    for (const DType out : {DType::kBF16, DType::kF32}) {
      const bool has_bias = out == DType::kBF16;
      const LinearWeightPtr packed = pack_linear(s.gpu, w, has_bias ? bias.view() : ConstTensorView{}, DType::kBF16, true);
      Tensor all = Tensor::empty(s.gpu_runtime, {kRows, N}, out);
      linear(s.gpu, all, x, *packed);
      const Tensor want = s.to_cpu(all);
      std::string different;
      for (int rows = 8; rows <= 128; rows *= 2)
        for (const int columns : {8, 24, 40, 64})
          for (const int slots : {2, 3, 4})
            for (const std::int64_t m : {1, 9, 64, 200}) {
              if (is_watched() && (columns == 24 || columns == 40 || slots == 3 || m == 64)) continue;
              Tensor y = Tensor::empty(s.gpu_runtime, {m, N}, out);
              cuda::Product p = cuda::forward_product(cuda::dense(s.gpu, *packed), x.slice(m % 7, m).data(), K, m, 0, N);
              p.out = y.data();
              p.out_dtype = out;
              if (has_bias) p.bias = bias.as<float>();
              cuda::few_rows_product(s.gpu, p, {rows, columns, slots});
              if (!same_bits(s.to_cpu(y), want.slice(m % 7, m))) different += fmt::format(" {} in {} x {} x {}", m, rows, columns, slots);
            }
      EXPECT_EQ(different, "") << "N " << N << " K " << K << " to " << to_string(out);
    }
  }
}

/// As the trainer and the engine of one process do: one kernel, tiles that want different amounts of shared memory.
TEST(CudaLinear, TwoThreadsLaunchTilesOfDifferentSizes) {
  Sides sides[2];
  if (cuda::properties_of(sides[0].gpu).major != 9) GTEST_SKIP() << "kernels for compute capability 9.0";
  constexpr cuda::FewRowsTile kTiles[2] = {{8, 8, 2}, {8, 64, 4}};
  constexpr std::int64_t kRows = 4, N = 256, K = 1024;
  std::string failures[2];
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&s = sides[i], &tile = kTiles[i], &failure = failures[i]] {
      try {
        ::prl::cuda::runtime_of(*s.gpu.runtime).activate();
        const Tensor x = s.to_gpu(s.random({kRows, K}, DType::kBF16, 1)), w = s.to_gpu(s.random({N, K}, DType::kF32, 2, 0.05f));
        const LinearWeightPtr packed = pack_linear(s.gpu, w, {}, DType::kBF16, true);
        Tensor want = Tensor::empty(s.gpu_runtime, {kRows, N}, DType::kBF16), y = s.to_gpu(s.filled({kRows, N}, DType::kBF16, kNan));
        linear(s.gpu, want, x, *packed);
        cuda::Product p = cuda::forward_product(cuda::dense(s.gpu, *packed), x.data(), K, kRows, 0, N);
        p.out = y.data();
        p.out_dtype = DType::kBF16;
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
        for (int launch = 1; std::chrono::steady_clock::now() < end; ++launch) {
          cuda::few_rows_product(s.gpu, p, tile);
          if (launch % 64 == 0) s.gpu_runtime->synchronize();
        }
        if (!same_bits(s.to_cpu(y), s.to_cpu(want))) failure = "other bits";
      } catch (const std::exception& e) {
        failure = e.what();
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(failures[0], "");
  EXPECT_EQ(failures[1], "");
}

/// Weights of 8 bits, which these kernels read as codes, and the rounded values, which the library reads.
TEST(CudaLinear, FewRowsOfCodesAreTheBitsOfTheirValuesInEveryTile) {
  Sides s;
  if (cuda::properties_of(s.gpu).major != 9) GTEST_SKIP() << "kernels for compute capability 9.0";
  constexpr std::int64_t kRows = 4096;
  for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{4112, 3072}, {4128, 576}, {4096, 64}}) {
    if (is_watched() && K > 64) continue;
    const Tensor x = s.to_gpu(s.random({kRows, K}, DType::kBF16, 1)), bias = s.to_gpu(s.random({N}, DType::kF32, 3));
    // Rows whose factors differ, one of zeros, and zeros in others.
    Tensor host = s.random({N, K}, DType::kF32, 2);
    for (std::int64_t n = 0; n < N; ++n)
      for (std::int64_t k = 0; k < K; ++k)
        host.as<float>()[n * K + k] *= n == 5 || k % 11 == 7 ? 0.0f : std::ldexp(1.0f, static_cast<int>(n % 17) - 12);
    const LinearWeightPtr packed = pack_linear(s.gpu, s.to_gpu(host), bias.view(), DType::kBF16, true, WeightUse::kEightBit);
    const auto& weight = cuda::dense(s.gpu, *packed);
    ASSERT_NE(weight.codes().codes, nullptr);
    ASSERT_EQ(pack_linear(s.gpu, s.to_gpu(host).slice(0, 4080), {}, DType::kBF16, true, WeightUse::kEightBit)->num_bytes(),
              static_cast<std::size_t>(4080 * K * 2))
        << "no kernel reads codes of so few outputs";
    Tensor all = Tensor::empty(s.gpu_runtime, {kRows, N}, DType::kBF16);
    linear(s.gpu, all, x, *share_linear(s.gpu, weight.w_NK, bias.view(), false));
    const Tensor want = s.to_cpu(all);
    std::string different;
    for (int rows = 8; rows <= cuda::kMaxEightBitRows; rows *= 2)
      for (const int columns : {8, 24, 40, 64})
        for (const int slots : {2, 4})
          for (const std::int64_t m : {1, 9, 64, 200}) {
            if (is_watched() && (columns == 24 || columns == 40 || m == 64)) continue;
            const Tensor y = Tensor::empty(s.gpu_runtime, {m, N}, DType::kBF16);
            cuda::Product p = cuda::linear_product(weight, y.view(), x.slice(m % 7, m).view());
            cuda::few_rows_product(s.gpu, p, {.rows = rows, .columns = columns, .slots = slots, .code_slots = 6 - slots});
            if (!same_bits(s.to_cpu(y), want.slice(m % 7, m))) different += fmt::format(" {} in {} x {} x {}", m, rows, columns, slots);
          }
    EXPECT_EQ(different, "") << "N " << N << " K " << K;
  }
}

/// Of codes on both sides the library has kernels as well.
TEST(CudaLinear, FewRowsOfTwoMatricesOfCodesAreTheBitsOfTheLibraryInEveryTile) {
  Sides s;
  if (cuda::properties_of(s.gpu).major != 9) GTEST_SKIP() << "kernels for compute capability 9.0";
  constexpr std::int64_t kRows = 4096;
  for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{1040, 3072}, {4096, 128}, {208, 2560}}) {
    if (is_watched() && K > 128) continue;
    const Tensor x = s.to_gpu(s.random({kRows, K}, DType::kBF16, 1)), bias = s.to_gpu(s.random({N}, DType::kF32, 3)),
                 w = s.to_gpu(s.random({N, K}, DType::kF32, 2));
    const LinearWeightPtr packed = pack_linear(s.gpu, w, bias.view(), DType::kBF16, true, WeightUse::kEightBitProduct);
    const auto& weight = cuda::dense(s.gpu, *packed);
    ASSERT_NE(weight.product_codes().codes, nullptr);
    Tensor all = Tensor::empty(s.gpu_runtime, {kRows, N}, DType::kBF16);
    linear(s.gpu, all, x, *packed);
    const Tensor want = s.to_cpu(all);
    const Tensor codes = Tensor::empty(s.gpu_runtime, {kRows, K}, DType::kU8), factors = Tensor::empty(s.gpu_runtime, {kRows}, DType::kF32);
    cuda::inputs_to_codes(s.gpu, {codes.as<unsigned char>(), factors.as<float>(), K}, x.view());
    std::string different;
    for (int rows = 8; rows <= 128; rows *= 2)
      for (const int columns : {8, 24, 40, 64})
        for (const int slots : {2, 3, 4})
          for (const std::int64_t m : {1, 9, 64, 200}) {
            if (is_watched() && (columns == 24 || columns == 40 || m == 64)) continue;
            const Tensor y = Tensor::empty(s.gpu_runtime, {m, N}, DType::kBF16);
            cuda::Product p = cuda::linear_product(weight, y.view(), x.slice(m % 7, m).view());
            p.in_dtype = DType::kU8;
            p.a = codes.as<unsigned char>() + m % 7 * K;
            p.a_stride = K;
            p.b = weight.product_codes().codes;
            p.a_factors = factors.as<float>() + m % 7;
            p.b_factors = weight.product_codes().factors;
            cuda::few_rows_product(s.gpu, p, {.rows = rows, .columns = columns, .slots = slots});
            if (!same_bits(s.to_cpu(y), want.slice(m % 7, m))) different += fmt::format(" {} in {} x {} x {}", m, rows, columns, slots);
          }
    EXPECT_EQ(different, "") << "N " << N << " K " << K;
  }
}

/// A product and its neighbours in one pass: the bits of the ops one after another.
void expect_fused_neighbours_are_the_ops(WeightUse use) {
  Sides s;
  if (cuda::properties_of(s.gpu).major != 9) GTEST_SKIP() << "kernels for compute capability 9.0";
  constexpr std::int64_t kRows = 256;
  std::string different, refused;
  for (const auto& [N, K, has_bias] : {std::tuple<std::int64_t, std::int64_t, bool>{4096, 1024, false},
                                       {1024, 2048, false},
                                       {6144, 1024, false},
                                       {1024, 3072, false},
                                       {256, 4096, false},
                                       {208, 576, true},
                                       {80, 64, false},
                                       {640, 192, true}}) {
    if (is_watched() && N * K > 200'000) continue;
    Tensor x = s.random({kRows, K}, DType::kBF16, 1);
    for (std::int64_t k = 0; k < K; ++k) Session::set(x, 5 * K + k, 0.0f);
    x = s.to_gpu(x);
    const Tensor w = s.to_gpu(s.random({N, K}, DType::kF32, 2, 0.05f)), bias = s.to_gpu(s.random({N}, DType::kF32, 3)),
                 norm = s.to_gpu(s.random({K}, DType::kF32, 4)), residual = s.to_gpu(s.random({kRows, N}, DType::kBF16, 5, 3.0f));
    const ConstTensorView of_bias = has_bias ? ConstTensorView(bias.view()) : ConstTensorView{};
    const LinearWeightPtr packed = pack_linear(s.gpu, w, of_bias, DType::kBF16, true, use);
    const bool of_codes = use == WeightUse::kEightBitProduct;
    const LinearWeightPtr plain = of_codes ? packed : share_linear(s.gpu, cuda::dense(s.gpu, *packed).w_NK, of_bias, true);
    for (const std::int64_t m : {1, 2, 3, 8, 9, 16, 17, 31, 64, 100, 128, 200, 256}) {
      if (is_watched() && (m % 4 == 3 || m % 8 == 0)) continue;
      const std::int64_t first = m * 7 % (kRows - m + 1);
      const Tensor part = x.slice(first, m);
      Tensor normed = Tensor::empty(s.gpu_runtime, {m, K}, DType::kBF16);
      rms_norm(s.gpu, normed, part, norm, 1e-6f);
      for (int kind = 0; kind < 6; ++kind) {
        const bool has_norm = kind % 2 == 1, swiglu_too = kind / 2 == 1, adds = kind / 2 == 2;
        if (swiglu_too && (has_bias || N % 16 != 0)) continue;
        const std::int64_t width = swiglu_too ? N / 2 : N;
        Tensor y = Tensor::empty(s.gpu_runtime, {m, N}, DType::kBF16), want = Tensor::empty(s.gpu_runtime, {m, width}, DType::kBF16);
        linear(s.gpu, y, has_norm ? normed : part, *plain);
        if (swiglu_too)
          swiglu(s.gpu, want, y);
        else if (adds)
          ops::add(s.gpu, want, y, residual.slice(first, m));
        else
          want = y;
        // In place where it adds.
        Tensor got = s.to_gpu(adds ? s.to_cpu(residual.slice(first, m)) : s.filled({m, width}, DType::kBF16, kNan));
        LinearFusion fusion;
        fusion.swiglu = swiglu_too;
        if (has_norm) fusion.norm_K = norm;
        if (adds) fusion.residual_TN = got;
        const std::string name = fmt::format(" {}x{}x{} kind {}", m, N, K, kind);
        if (!linear_fused(s.gpu, got, part, *packed, fusion))
          refused += (has_norm && !of_codes && (m > cuda::kMaxNormRows || K > cuda::kMaxNormColumns)) ||
                             m * N > cuda::max_few_rows_outputs(m, K) || (of_codes && K % 128 != 0)
                         ? ""
                         : name;
        else if (!same_bits(s.to_cpu(got), s.to_cpu(want)))
          different += name;
      }
    }
  }
  EXPECT_EQ(different, "");
  EXPECT_EQ(refused, "");
}
TEST(CudaLinear, FusedNeighboursAreTheOpsOneAfterAnother) { expect_fused_neighbours_are_the_ops(WeightUse::kMatrix); }
TEST(CudaLinear, FusedNeighboursOfCodesAreTheOpsOneAfterAnother) { expect_fused_neighbours_are_the_ops(WeightUse::kEightBit); }
TEST(CudaLinear, FusedNeighboursOfTwoMatricesOfCodesAreTheOpsOneAfterAnother) {
  expect_fused_neighbours_are_the_ops(WeightUse::kEightBitProduct);
}

/// The same where the result is fp32, as logits are, and at widths that no alignment likes.
TEST(CudaLinear, LogitRowsAreTheSameBitsForEveryNumberOfRows) {
  Sides s;
  constexpr std::int64_t kRows = 2048;
  for (const auto& [N, K] :
       {std::pair<std::int64_t, std::int64_t>{97, 64}, {100, 64}, {104, 64}, {128, 64}, {320, 128}, {2500, 304}, {1001, 576}}) {
    Tensor x = s.to_gpu(s.random({kRows, K}, DType::kBF16, 1)), w = s.to_gpu(s.random({N, K}, DType::kF32, 2, 0.3f));
    const LinearWeightPtr packed = pack_linear(s.gpu, w, {}, DType::kBF16, true);
    Tensor all = Tensor::empty(s.gpu_runtime, {kRows, N}, DType::kF32);
    linear(s.gpu, all, x, *packed);
    const Tensor want = s.to_cpu(all);
    std::string different;
    for (std::int64_t m = 1; m <= 640; m += m < 40 ? 1 : m < 160 ? 7 : 97) {
      Tensor y = Tensor::empty(s.gpu_runtime, {m, N}, DType::kF32);
      linear(s.gpu, y, x.slice(m, m), *packed);
      if (!same_bits(s.to_cpu(y), want.slice(m, m))) different += fmt::format(" {}", m);
    }
    EXPECT_EQ(different, "") << "N " << N << " K " << K;
  }
}

/// The whole vocabulary at once (sampling) and slices of it (training) give the same log-probabilities, bit for bit.
TEST(CudaLmHead, SampledAndTrainedLogprobsAgreeAtRealSizes) {
  Sides s;
  const std::int64_t T = 300, H = 1024, V = 151936;
  Tensor h = s.to_gpu(s.random({T, H}, DType::kBF16, 1));
  Tensor w = Tensor::empty(s.gpu_runtime, {V, H}, DType::kF32);
  {
    const Tensor part = s.to_gpu(s.random({1024, H}, DType::kF32, 2, 0.05f));
    for (std::int64_t v = 0; v < V; v += 1024) {
      const std::int64_t n = std::min<std::int64_t>(1024, V - v);
      s.gpu_runtime->copy_within(w.slice(v, n).data(), part.data(), static_cast<std::size_t>(n * H) * 4);
      TensorView rows = w.slice(v, n).view();
      scale(s.gpu, rows, 1.0f - 0.3f * static_cast<float>(v) / static_cast<float>(V));
    }
  }
  const LinearWeightPtr head = pack_linear(s.gpu, w, {}, DType::kBF16, true);
  std::vector<SampleRow> rows(T);
  std::vector<float> temperatures(T);
  for (std::size_t t = 0; t < rows.size(); ++t) {
    temperatures[t] = t % 3 == 0 ? 1.0f : 0.8f;
    rows[t] = {.temperature = temperatures[t], .seed = 5, .position = t};
  }
  Tensor logp = Tensor::empty(s.gpu_runtime, {T}, DType::kF32), entropy = logp.clone(), lse = logp.clone();
  for (const std::int64_t batch : {1, 7, 128, 300}) {
    std::vector<SampleResult> results(T);
    for (std::int64_t t = 0; t < (batch == 1 ? 20 : T); t += batch) {
      const std::int64_t n = std::min(batch, T - t);
      Tensor logits = Tensor::empty(s.gpu_runtime, {n, V}, DType::kF32);
      linear(s.gpu, logits, h.slice(t, n), *head);
      sample(s.gpu, std::span(results).subspan(static_cast<std::size_t>(t), static_cast<std::size_t>(n)), logits,
             std::span(rows).subspan(static_cast<std::size_t>(t), static_cast<std::size_t>(n)));
    }
    std::vector<std::int32_t> targets(T);
    for (std::size_t t = 0; t < targets.size(); ++t) targets[t] = results[t].token;
    lm_head_logprob(s.gpu, logp, entropy, lse, h, *head, targets, temperatures);
    const Tensor got = s.to_cpu(logp);
    for (std::size_t t = 0; t < (batch == 1 ? 20u : targets.size()); ++t)
      ASSERT_EQ(results[t].logprob, got.as<float>()[t]) << "row " << t << ", batch " << batch;
  }
}

/// Many rows, which one kernel takes with their statistics, are the same rows a few at a time, by way of memory; so are their gradients,
/// whatever was kept.
TEST(CudaLmHead, ManyRowsAreTheSameBitsAsFew) {
  Sides s;
  struct Case {
    std::int64_t T, H, V;
  };
  for (const auto& [T, H, V] : {Case{330, 64, 1028}, Case{330, 64, 17'000}, Case{420, 320, 9000}, Case{1000, 1024, 2432}}) {
    Tensor h = s.random({T, H}, DType::kBF16, 1);
    for (std::int64_t t = 5; t < T; t += 100)  // rows that rule out their targets
      for (std::int64_t i = 0; i < H; ++i) Session::set(h, t * H + i, 30.0f * get(h, t * H + i));
    const Tensor gh = s.to_gpu(h), w = s.to_gpu(s.random({V, H}, DType::kF32, 2, 0.2f)), dlogp = s.to_gpu(s.random({T}, DType::kF32, 3));
    const LinearWeightPtr head = pack_linear(s.gpu, w, {}, DType::kBF16, true);
    std::vector<std::int32_t> targets(static_cast<std::size_t>(T));
    std::vector<float> temperatures(targets.size());
    for (std::size_t t = 0; t < targets.size(); ++t) {
      targets[t] = t % 5 == 4 ? -1
                   : t == 0   ? static_cast<std::int32_t>(V - 1)
                              : static_cast<std::int32_t>(t * 7919 % static_cast<std::size_t>(V));
      temperatures[t] = t % 3 == 0 ? 0.7f : 1.0f;
    }
    Tensor few[3], first_dh, first_dw;
    for (Tensor& x : few) x = s.to_gpu(s.filled({T}, DType::kF32, kNan));
    for (std::int64_t t = 0; t < T; t += 100) {
      const std::int64_t n = std::min<std::int64_t>(100, T - t);
      const auto of = [&](auto& all) { return std::span(all).subspan(static_cast<std::size_t>(t), static_cast<std::size_t>(n)); };
      lm_head_logprob(s.gpu, few[0].slice(t, n), few[1].slice(t, n), few[2].slice(t, n), gh.slice(t, n), *head, of(targets),
                      of(temperatures));
    }
    for (const std::int64_t R : {0, 130, 5000}) {
      Tensor many[3], kept;
      for (Tensor& x : many) x = s.to_gpu(s.filled({T}, DType::kF32, kNan));
      if (R > 0) kept = s.to_gpu(s.filled({R, kept_row_bytes(DType::kBF16, V) / 4}, DType::kF32, kNan));
      const TensorView view = R > 0 ? as_bytes(kept) : TensorView{};
      lm_head_logprob(s.gpu, many[0], many[1], many[2], gh, *head, targets, temperatures, view);
      for (int i = 0; i < 3; ++i)
        EXPECT_TRUE(same_bits(s.to_cpu(many[i]), s.to_cpu(few[i]))) << T << " rows, " << R << " kept, output " << i;
      Tensor dh = s.to_gpu(s.filled({T, H}, DType::kBF16, kNan)), dw = s.to_gpu(s.filled({V, H}, DType::kF32, 0.0f));
      lm_head_logprob_backward(s.gpu, dh, dw, dlogp, many[2], gh, *head, targets, temperatures, true, view);
      if (R == 0) {
        first_dh = s.to_cpu(dh);
        first_dw = s.to_cpu(dw);
      }
      EXPECT_TRUE(same_bits(s.to_cpu(dh), first_dh)) << T << " rows, " << R << " kept";
      EXPECT_TRUE(same_bits(s.to_cpu(dw), first_dw)) << T << " rows, " << R << " kept";
    }
    // A row that is no number is its own matter, and not one of the others.
    Session::set(h, 3 * H + 1, kNan);
    Tensor spoilt[3];
    for (Tensor& x : spoilt) x = s.to_gpu(s.filled({T}, DType::kF32, 0.0f));
    lm_head_logprob(s.gpu, spoilt[0], spoilt[1], spoilt[2], s.to_gpu(h), *head, targets, temperatures);
    for (int i = 0; i < 3; ++i) {
      const std::vector<float> got = values(s.to_cpu(spoilt[i])), want = values(s.to_cpu(few[i]));
      for (std::size_t t = 0; t < got.size(); ++t)
        if (t == 3)
          EXPECT_TRUE(std::isnan(got[t])) << got[t];
        else
          EXPECT_EQ(got[t], want[t]) << "row " << t;
    }
  }
}

TEST(CudaOps, NormsOfManyWidthsAgreeWithTheCpu) {
  Sides s;
  for (const DType dtype : {DType::kBF16, DType::kF32})
    for (const std::int64_t C : {7, 16, 64, 80, 96, 128, 200, 256, 264, 576, 896, 1024, 2560, 4096, 4104, 5120, 9001, 16384}) {
      const std::int64_t R = C > 4000 ? 40 : 1050;  // more than one row for some groups of the gradient
      const Tensor x = s.random({R, C}, dtype, 1), r = s.random({R, C}, dtype, 2), w = s.random({C}, DType::kF32, 3),
                   dy = s.random({R, C}, dtype, 4);
      const Tensor gx = s.to_gpu(x), gr = s.to_gpu(r), gw = s.to_gpu(w), gdy = s.to_gpu(dy);
      Tensor y = s.filled({R, C}, dtype, kNan), sum = y.clone(), dx = y.clone(), dw = s.filled({C}, DType::kF32, 0.5f);
      Tensor gy = s.to_gpu(y), gsum = s.to_gpu(y), gdx = s.to_gpu(y), gdw = s.to_gpu(dw), again = s.to_gpu(dw);
      add_rms_norm(s.cpu, y, sum, x, r, w, 1e-6f);
      add_rms_norm(s.gpu, gy, gsum, gx, gr, gw, 1e-6f);
      EXPECT_TRUE(same_bits(s.to_cpu(gsum), sum)) << C;
      EXPECT_LT(s.difference(gy, y), tolerance(dtype, 2e-6)) << C;
      rms_norm_backward(s.cpu, dx, dw, dy, sum, w, 1e-6f, false);
      rms_norm_backward(s.gpu, gdx, gdw, gdy, gsum, gw, 1e-6f, false);
      EXPECT_LT(s.difference(gdx, dx), tolerance(dtype, 8e-6)) << C;
      EXPECT_LT(s.difference(gdw, dw, 30.0), 5e-6) << C;
      rms_norm_backward(s.gpu, gdx, again, gdy, gsum, gw, 1e-6f, false);
      EXPECT_TRUE(same_bits(s.to_cpu(again), s.to_cpu(gdw))) << C;
      // A row alone is the row among others.
      Tensor alone = s.to_gpu(s.filled({1, C}, dtype, kNan));
      rms_norm(s.gpu, alone, gsum.slice(R - 1, 1), gw, 1e-6f);
      EXPECT_TRUE(same_bits(s.to_cpu(alone), s.to_cpu(gy).slice(R - 1, 1))) << C;
    }
}

TEST(CudaOps, EmbeddingGradientOfFrequentTokens) {
  Sides s;
  const std::int64_t T = 5000, V = 700, H = 264;
  const Tensor dout = s.random({T, H}, DType::kBF16, 1);
  std::vector<std::int32_t> ids(T);
  Rng rng(2);
  for (auto& id : ids) id = rng.next_below(3) == 0 ? 699 : static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(V)));
  Tensor cpu_ids = Tensor::empty(s.cpu_runtime, {T}, DType::kI32);
  std::copy(ids.begin(), ids.end(), cpu_ids.as<std::int32_t>());
  Tensor want = s.filled({V, H}, DType::kF32, 0.25f), got = s.to_gpu(want);
  embedding_backward(s.cpu, want, dout, cpu_ids);
  embedding_backward(s.gpu, got, s.to_gpu(dout), s.to_gpu(cpu_ids));
  EXPECT_TRUE(same_bits(s.to_cpu(got), want)) << "sums run in token order on both sides";
}

TEST(CudaOps, RowsAreStoredInTheirSlotsAsOnTheCpu) {
  Sides s;
  for (const std::int64_t C : {264, 70, 33})
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Tensor rows = s.random({3, C}, dtype, 1);
      Tensor want = s.filled({5, C}, dtype, 0.25f), got = s.to_gpu(want), slots = Tensor::empty(s.cpu_runtime, {3}, DType::kI32);
      slots.as<std::int32_t>()[0] = 4, slots.as<std::int32_t>()[1] = -1, slots.as<std::int32_t>()[2] = 1;
      store_rows(s.cpu, want, rows, slots);
      store_rows(s.gpu, got, s.to_gpu(rows), s.to_gpu(slots));
      EXPECT_TRUE(same_bits(s.to_cpu(got), want)) << C;
    }
}

/// Same seeds, same logits: the same tokens as the CPU draws, truncated or not.
TEST(CudaSample, DrawsTheTokensOfTheCpu) {
  Sides s;
  for (const std::int64_t V : {5, 1000, 1024, 2500, 50257, 151936}) {
    const std::int64_t B = 12;
    const Tensor logits = s.random({B, V}, DType::kF32, static_cast<std::uint64_t>(V), 3.0f);
    std::vector<SampleRow> rows(B);
    for (std::size_t b = 0; b < rows.size(); ++b) rows[b] = {.temperature = 0.5f + 0.1f * static_cast<float>(b), .seed = 3, .position = b};
    rows[1].temperature = 0.0f;
    rows[2].top_k = 7;
    rows[3].top_p = 0.7f;
    rows[4].min_p = 0.05f;
    rows[5] = {.temperature = 1.3f, .top_p = 0.9f, .min_p = 0.001f, .top_k = 50, .seed = 9};
    rows[6].top_p = 0.999f;
    rows[7].top_k = 1;
    rows[8].num_top_logprobs = 5;
    rows[9] = {.temperature = 0.9f, .top_p = 0.5f, .num_top_logprobs = 20};
    std::vector<SampleResult> want(B), got(B);
    sample(s.cpu, want, logits, rows);
    sample(s.gpu, got, s.to_gpu(logits), rows);
    for (std::size_t b = 0; b < rows.size(); ++b) {
      EXPECT_EQ(got[b].token, want[b].token) << "V " << V << " row " << b;
      EXPECT_NEAR(got[b].logprob, want[b].logprob, 2e-5) << "V " << V << " row " << b;
      ASSERT_EQ(got[b].top_logprobs.size(), want[b].top_logprobs.size()) << "V " << V << " row " << b;
      for (std::size_t i = 0; i < want[b].top_logprobs.size(); ++i) {
        EXPECT_EQ(got[b].top_logprobs[i].first, want[b].top_logprobs[i].first);
        EXPECT_NEAR(got[b].top_logprobs[i].second, want[b].top_logprobs[i].second, 2e-5);
      }
    }
  }
}

/// Tokens and log-probabilities, to the bit, with and without logits in memory; a row that is no number disturbs no other.
TEST(CudaSample, DrawsFromTheHeadAreThoseFromItsLogits) {
  Sides s;
  if (cuda::properties_of(s.gpu).major != 9) GTEST_SKIP() << "kernels for compute capability 9.0";
  constexpr std::int64_t kRows = 128;
  std::string different;
  for (const auto& [V, H] : {std::pair<std::int64_t, std::int64_t>{151936, 1024}, {49152, 576}, {5000, 2560}, {1000, 64}, {60, 128}}) {
    Tensor h_host = s.random({kRows, H}, DType::kBF16, 1), w_host = s.filled({V, H}, DType::kF32, 0.0f);
    Session::set(h_host, 7 * H + 3, kNan);
    // The first of equals is the greedy choice: all rows of the head are there at least twice.
    const std::int64_t others = std::min<std::int64_t>(V / 2, 1000);
    const Tensor part = s.random({others, H}, DType::kF32, 2, 0.2f);
    for (std::int64_t v = 0; v < V; v += others) std::copy_n(part.as<float>(), std::min(others, V - v) * H, w_host.as<float>() + v * H);
    const Tensor h = s.to_gpu(h_host);
    const LinearWeightPtr head = pack_linear(s.gpu, s.to_gpu(w_host), {}, DType::kBF16, true);
    for (const std::int64_t m : {24, 31, 64, 65, 100, 128}) {
      const std::int64_t first = std::min<std::int64_t>(kRows - m, m % 7);
      std::vector<SampleRow> rows(static_cast<std::size_t>(m));
      for (std::size_t b = 0; b < rows.size(); ++b)
        rows[b] = {.temperature = b % 4 == 3 ? 0.0f : b % 2 == 0 ? 1.0f : 0.5f + 0.01f * static_cast<float>(b), .seed = 3, .position = b};
      Tensor logits = Tensor::empty(s.gpu_runtime, {m, V}, DType::kF32);
      const Tensor drawn = Tensor::zeros(s.gpu_runtime, {m}, DType::kI32);
      linear(s.gpu, logits, h.slice(first, m), *head);
      std::vector<SampleResult> want(rows.size()), got(rows.size());
      sample(s.gpu, want, logits, rows);
      PendingSamples pending;
      ASSERT_TRUE(begin_sample_head(s.gpu, pending, drawn, h.slice(first, m), *head, rows));
      finish_sample(s.gpu, got, pending);
      const Tensor tokens = s.to_cpu(drawn);
      for (std::size_t b = 0; b < rows.size(); ++b) {
        const bool is_number = !std::isnan(want[b].logprob);
        if (is_number != (first + static_cast<std::int64_t>(b) != 7) || std::isnan(got[b].logprob) == is_number ||
            (is_number && got[b].logprob != want[b].logprob) || got[b].token != want[b].token ||
            tokens.as<std::int32_t>()[b] != got[b].token)
          different +=
              fmt::format(" {} of {} at {}x{}: {} {} for {} {}", b, m, V, H, got[b].token, got[b].logprob, want[b].token, want[b].logprob);
      }
      EXPECT_FALSE(begin_sample_head(s.gpu, pending, drawn, h.slice(0, 23), *head, std::span(rows).first(23)));
      rows.back() = {.top_k = 5};
      EXPECT_FALSE(begin_sample_head(s.gpu, pending, drawn, h.slice(first, m), *head, rows));
      rows.back() = {.num_top_logprobs = 1};
      EXPECT_FALSE(begin_sample_head(s.gpu, pending, drawn, h.slice(first, m), *head, rows));
    }
  }
  EXPECT_EQ(different.substr(0, 2000), "");
}

TEST(CudaOps, AnIdOutsideItsTableIsReportedByTheNextWait) {
  Sides s;
  const Tensor table = s.to_gpu(s.random({10, 16}, DType::kF32, 1));
  Tensor ids = Tensor::empty(s.cpu_runtime, {3}, DType::kI32);
  ids.as<std::int32_t>()[0] = 1, ids.as<std::int32_t>()[1] = 10, ids.as<std::int32_t>()[2] = 2;
  Tensor out = s.to_gpu(s.filled({3, 16}, DType::kF32, kNan));
  embedding(s.gpu, out, table, s.to_gpu(ids));
  try {
    s.gpu_runtime->synchronize();
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_STREQ(e.what(), "[embedding] id 1 lies outside its table (seen on cuda:0)");
  }
  s.gpu_runtime->synchronize();  // reported once
}

TEST(CudaOps, EveryBodyIsThere) {
  const OpTable& t = *cuda_op_table();
  const auto* entry = reinterpret_cast<void* const*>(&t.make_library);
  const auto* end = reinterpret_cast<void* const*>(&t + 1);
  for (; entry < end; ++entry) EXPECT_NE(*entry, nullptr) << "entry " << entry - reinterpret_cast<void* const*>(&t);
}

}  // namespace
}  // namespace prl::ops
