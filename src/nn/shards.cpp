#include "nn/shards.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::nn {
namespace {

/// Rows that are divided by themselves.
struct Kind {
  std::int64_t num_rows = 0;
  std::int64_t num_heads = 0;  ///< of keys or values, which are as many parts; 0: rows of something else
};

/// The kinds of rows that a tensor of the whole model has, in order.
std::vector<Kind> kinds_of_rows(const ModelConfig& c, Slot slot, std::int64_t num_rows) {
  const LinearAttention& linear = c.linear;
  const Kind keys{c.num_kv_heads * c.head_dim, c.num_kv_heads};
  const std::int64_t linear_keys = linear.num_key_heads * linear.key_dim, values = linear.value_width(), heads = linear.num_value_heads;
  const auto of_experts = [&](std::int64_t rows) { return std::vector<Kind>(static_cast<std::size_t>(c.num_experts), {rows}); };
  switch (slot) {
    case Slot::kK:
    case Slot::kV:
    case Slot::kKBias:
    case Slot::kVBias: return {keys};
    case Slot::kFusedQkv: return {{c.num_heads * c.head_dim}, keys, keys};
    case Slot::kFusedGateUp: return {{c.intermediate_size}, {c.intermediate_size}};
    case Slot::kLinearQkv: return {{linear_keys}, {linear_keys}, {values}};
    case Slot::kLinearQkvz: return {{linear_keys}, {linear_keys}, {values}, {values}};
    case Slot::kLinearBa: return {{heads}, {heads}};
    case Slot::kLinearConv: {
      const std::int64_t taps = linear.num_taps;
      if (linear.is_state_space) return {{taps * values}, {taps * linear_keys}, {taps * linear_keys}};
      return {{taps * linear_keys}, {taps * linear_keys}, {taps * values}};
    }
    case Slot::kConvBias: return {{values}, {linear_keys}, {linear_keys}};
    case Slot::kStateIn: return {{values}, {values}, {linear_keys}, {linear_keys}, {heads}};
    case Slot::kExpertPairsBias: return of_experts(2 * c.expert_size);
    case Slot::kStackedDownBias: return of_experts(c.hidden_size);
    default: return {{num_rows}};
  }
}

}  // namespace

std::int64_t num_kv_heads_of_shard(const ModelConfig& config, int size) noexcept {
  return std::max<std::int64_t>(1, config.num_kv_heads / size);
}

std::vector<RowRun> held_rows(const ModelConfig& config, Slot slot, std::int64_t num_rows, Shard shard) {
  std::vector<RowRun> runs;
  std::int64_t begin = 0;
  for (const Kind& kind : kinds_of_rows(config, slot, num_rows)) {
    const bool is_repeated = kind.num_heads > 0 && kind.num_heads < shard.size;
    const std::int64_t num_parts = is_repeated ? kind.num_heads : shard.size, holders = shard.size / num_parts;
    const std::int64_t count = kind.num_rows / num_parts;
    runs.push_back({.first = begin + shard.rank / holders * count, .count = count, .is_copy = shard.rank % holders != 0});
    begin += kind.num_rows;
  }
  PRL_CHECK(begin == num_rows, "{} rows of kinds that have {}", num_rows, begin);
  return runs;
}

void check_shards(const ModelConfig& config, int size) {
  if (size == 1) return;
  constexpr std::int64_t kWidth = 8;  // of what kernels load at once
  const auto check = [&](const char* key, std::int64_t found, std::int64_t unit) {
    if (found % (size * unit) != 0)
      fail(ErrorCode::kInvalidArgument, "{} devices cannot share the layers of this {} model: {} = {} is no multiple of {}", size,
           config.model_type, key, found, size * unit);
  };
  check("num_attention_heads", config.num_heads, 1);
  // Fewer heads than devices are on several of them, but for norms over all heads, which would meet some twice.
  const bool repeats_heads = config.num_kv_heads < size && size % config.num_kv_heads == 0 && !config.qk_norm_is_whole && !config.latent;
  if (!repeats_heads) check("num_key_value_heads", config.num_kv_heads, 1);
  check("hidden_size", config.hidden_size, kWidth);
  const bool is_sparse = config.num_experts > 0;
  const bool has_dense = !is_sparse || !config.dense_layers.empty();
  if (has_dense) check("intermediate_size", config.intermediate_size, kWidth);
  if (is_sparse) {
    check(config.expert_names == ExpertNames::kNumbered ? "intermediate_size" : "moe_intermediate_size", config.expert_size, kWidth);
    check("the width of shared experts", config.shared_expert_size, kWidth);
    check("moe_latent_size", config.expert_input_size, kWidth);
  }
  if (config.latent) check("the width of all heads' values", config.num_heads * config.latent->value_dim, kWidth);
  if (config.linear.layers.empty()) return;
  const LinearAttention& linear = config.linear;
  check(linear.is_state_space ? "n_groups" : "linear_num_key_heads", linear.num_key_heads, 1);
  check("the width of linear attention's values", linear.value_width(), kWidth);
}

ModelConfig config_of_shard(const ModelConfig& config, int size) {
  ModelConfig part = config;
  part.num_heads /= size;
  part.num_kv_heads = num_kv_heads_of_shard(config, size);
  part.intermediate_size /= size;
  part.linear.num_key_heads /= size;
  part.linear.num_value_heads /= size;
  return part;
}

}  // namespace prl::nn
