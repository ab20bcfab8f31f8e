#include "tools/lora_floor.hpp"

#include <gtest/gtest.h>

#include "tools/bench.hpp"

namespace prl::tools {
namespace {

/// SmolLM2-135M by hand: 30 layers of width 576, with 9 heads of 64, 3 of keys and values, and an MLP of 1,536; a tied head of 49,152.
TEST(LoraFloorTest, CountsWhatAStepReadsAndMultiplies) {
  const nn::ModelConfig model = named_shape("smollm2-135m");
  constexpr double kAttention = 2 * (576 + 576) + 2 * (576 + 192);
  constexpr double kMlp = 3 * (576 + 1536);
  constexpr double kWeights = 49'152.0 * 576 + 30.0 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536);
  constexpr double kKeysAndValues = 32.0 * 100 * 30 * 2 * 192;
  for (const std::int64_t rank : {4, 16}) {
    const auto ranks = static_cast<double>(30 * rank);
    const LoraFloor all = lora_floor(model, adapter_of(LoraTargets::kAll, rank), {.num_rows = 32, .num_adapters = 64, .context = 100});
    EXPECT_DOUBLE_EQ(all.adapter_bytes, 32 * 2 * ranks * (kAttention + kMlp)) << "as many as there are rows";
    EXPECT_DOUBLE_EQ(all.base_bytes, 2 * (kWeights + kKeysAndValues));
    EXPECT_DOUBLE_EQ(all.by_bytes, 1 + all.adapter_bytes / all.base_bytes);
    EXPECT_DOUBLE_EQ(all.by_flops, 1 + 2 * 32 * ranks * (kAttention + kMlp) / (2 * 32 * kWeights + 4 * 32.0 * 100 * 30 * 576));
    const LoraFloor attention = lora_floor(model, adapter_of(LoraTargets::kAttention, rank),
                                           {.num_rows = 32, .num_adapters = 1, .context = 100, .dtype = DType::kF32});
    EXPECT_DOUBLE_EQ(attention.adapter_bytes, 4 * ranks * kAttention);
  }
}

TEST(LoraFloorTest, MemoryIsReadAtSomeSpeed) {
  ThreadPool pool(2);
  EXPECT_GT(measured_read_speed(pool), 1e7);
}

}  // namespace
}  // namespace prl::tools
