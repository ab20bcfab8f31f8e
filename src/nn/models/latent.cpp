#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "nn/models/family.hpp"
#include "ops/attention.hpp"

namespace prl::nn {

void read_latent_attention(const ConfigReader& reader, const LatentAttention& without, ModelConfig& config) {
  constexpr std::int64_t kMaxRank = 1 << 16, kMaxDim = 1024;
  LatentAttention latent;
  // null: queries have no latent.
  const bool has_none = reader.names("q_lora_rank") && !reader.has("q_lora_rank");
  latent.query_rank = has_none ? 0 : reader.integer("q_lora_rank", without.query_rank, 1, kMaxRank);
  latent.kv_rank = reader.integer("kv_lora_rank", without.kv_rank, 1, kMaxRank);
  latent.plain_dim = reader.integer("qk_nope_head_dim", without.plain_dim, 1, kMaxDim);
  latent.rotary_dim = reader.integer("qk_rope_head_dim", without.rotary_dim, 1, kMaxDim);
  latent.value_dim = reader.integer("v_head_dim", without.value_dim, 1, kMaxDim);
  latent.are_pairs_neighbours = reader.boolean("rope_interleave", true);
  const auto check = [&](const char* key, std::int64_t found, std::int64_t step) {
    if (found % step != 0)
      fail(ErrorCode::kNotImplemented, "{}: key '{}' is {}; this build has multiples of {}", reader.subject(), key, found, step);
  };
  check("q_lora_rank", latent.query_rank, 8);
  check("kv_lora_rank", latent.kv_rank, 8);
  check("qk_nope_head_dim", latent.plain_dim, 8);
  check("qk_rope_head_dim", latent.rotary_dim, ops::kRotaryStep);
  check("v_head_dim", latent.value_dim, 8);
  if (config.partial_rotary_factor != 1.0)
    fail(ErrorCode::kNotImplemented, "{}: key 'partial_rotary_factor' is {}; of latent attention all of 'qk_rope_head_dim' is rotated",
         reader.subject(), config.partial_rotary_factor);
  if (config.num_kv_heads != config.num_heads)
    fail(ErrorCode::kNotImplemented, "{}: key 'num_key_value_heads' is {}; latent attention has as many as 'num_attention_heads', {}",
         reader.subject(), config.num_kv_heads, config.num_heads);
  if (reader.boolean("attention_bias", false))
    fail(ErrorCode::kNotImplemented, "{}: key 'attention_bias' is true; latent attention has no biases in this build", reader.subject());
  refuse_dropout(reader, {"attention_dropout"});

  const std::int64_t wanted = std::max(latent.query_dim(), latent.value_dim);
  const auto* holds = std::ranges::find_if(ops::kHeadDims, [&](std::int64_t dim) { return dim >= wanted; });
  if (holds == ops::kHeadDims.end())
    fail(ErrorCode::kNotImplemented,
         "{}: heads of {} elements ('qk_nope_head_dim' + 'qk_rope_head_dim', 'v_head_dim'); this build has at most {}", reader.subject(),
         wanted, ops::kHeadDims.back());
  config.head_dim = *holds;
  config.score_scale = 1.0 / std::sqrt(static_cast<double>(latent.query_dim()));
  if (config.yarn && config.yarn->mscale_all_dim > 0 && config.yarn->factor > 1.0) {
    const double of_yarn = 0.1 * config.yarn->mscale_all_dim * std::log(config.yarn->factor) + 1.0;
    config.score_scale *= of_yarn * of_yarn;
  }
  config.latent = latent;
}

void describe_latent_attention(const ModelConfig& config, boost::json::object& object) {
  const LatentAttention& latent = *config.latent;
  object.erase("head_dim");
  object["attention_bias"] = false;
  object["kv_lora_rank"] = latent.kv_rank;
  object["q_lora_rank"] = latent.query_rank > 0 ? boost::json::value(latent.query_rank) : boost::json::value(nullptr);
  object["qk_nope_head_dim"] = latent.plain_dim;
  object["qk_rope_head_dim"] = latent.rotary_dim;
  object["rope_interleave"] = latent.are_pairs_neighbours;
  object["v_head_dim"] = latent.value_dim;
}

}  // namespace prl::nn
