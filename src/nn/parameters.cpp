#include "nn/parameters.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "base/thread_pool.hpp"
#include "nn/models/family.hpp"

namespace prl::nn {
namespace {

/// Random numbers are drawn in runs of this many elements, each from a stream of its own, so that tensors fill in parallel and
/// the values do not depend on the number of threads.
constexpr std::int64_t kRandomRun = 1 << 16;

}  // namespace

Parameters::Parameters(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config) : config_(config), runtime_(std::move(runtime)) {
  const ModelConfig& c = config_;
  const Family& family = find_family(c.model_type, "parameters");
  const std::int64_t Q = c.num_heads * c.head_dim, K = c.num_kv_heads * c.head_dim;
  const auto zeros = [&](Shape shape) { return Tensor::zeros(runtime_, shape, DType::kF32); };
  const auto list = [&](Slot slot, std::int64_t layer, const Tensor& value) { named_.push_back({family.name_of(slot, layer), value, {}}); };

  embedding = zeros({c.vocab_size, c.hidden_size});
  list(Slot::kEmbedding, -1, embedding);
  layers_.resize(static_cast<std::size_t>(c.num_layers));
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    Layer& layer = layers_[static_cast<std::size_t>(i)];
    layer.input_norm = zeros({c.hidden_size});
    layer.qkv = zeros({Q + 2 * K, c.hidden_size});
    layer.o = zeros({c.hidden_size, Q});
    layer.post_norm = zeros({c.hidden_size});
    layer.gate_up = zeros({2 * c.intermediate_size, c.hidden_size});
    layer.down = zeros({c.hidden_size, c.intermediate_size});
    list(Slot::kInputNorm, i, layer.input_norm);
    list(Slot::kQ, i, layer.qkv.slice(0, Q));
    list(Slot::kK, i, layer.qkv.slice(Q, K));
    list(Slot::kV, i, layer.qkv.slice(Q + K, K));
    if (c.attention_bias) {
      layer.qkv_bias = zeros({Q + 2 * K});
      list(Slot::kQBias, i, layer.qkv_bias.slice(0, Q));
      list(Slot::kKBias, i, layer.qkv_bias.slice(Q, K));
      list(Slot::kVBias, i, layer.qkv_bias.slice(Q + K, K));
    }
    if (c.qk_norm) {
      layer.q_norm = zeros({c.head_dim});
      layer.k_norm = zeros({c.head_dim});
      list(Slot::kQNorm, i, layer.q_norm);
      list(Slot::kKNorm, i, layer.k_norm);
    }
    list(Slot::kO, i, layer.o);
    if (c.attention_out_bias) {
      layer.o_bias = zeros({c.hidden_size});
      list(Slot::kOBias, i, layer.o_bias);
    }
    list(Slot::kPostNorm, i, layer.post_norm);
    list(Slot::kGate, i, layer.gate_up.slice(0, c.intermediate_size));
    list(Slot::kUp, i, layer.gate_up.slice(c.intermediate_size, c.intermediate_size));
    list(Slot::kDown, i, layer.down);
  }
  final_norm = zeros({c.hidden_size});
  list(Slot::kFinalNorm, -1, final_norm);
  if (c.tie_word_embeddings) {
    lm_head = embedding;
  } else {
    lm_head = zeros({c.vocab_size, c.hidden_size});
    list(Slot::kLmHead, -1, lm_head);
  }
}

NamedParameter& Parameters::at(const std::string& name) {
  const auto it = std::find_if(named_.begin(), named_.end(), [&](const NamedParameter& p) { return p.name == name; });
  if (it == named_.end()) fail(ErrorCode::kNotFound, "the {} model has no parameter '{}'", config_.model_type, name);
  return *it;
}

void Parameters::ensure_grads() {
  if (d_embedding.defined()) return;
  const auto like = [&](const Tensor& value) { return value.defined() ? Tensor::zeros(runtime_, value.shape(), DType::kF32) : Tensor(); };
  // Each named gradient is the same slice of its block as the value is.
  std::size_t next = 0;
  const auto list = [&](const Tensor& value, const Tensor& grad, std::initializer_list<std::int64_t> rows) {
    if (!value.defined()) return;
    std::int64_t begin = 0;
    for (const std::int64_t count : rows) {
      NamedParameter& parameter = named_[next++];
      parameter.grad = count < 0 ? grad : grad.slice(begin, count);
      begin += count;
      PRL_CHECK(parameter.grad.shape() == parameter.value.shape(), "gradient of {} has shape {}", parameter.name,
                parameter.grad.shape().to_string());
    }
  };
  const std::int64_t Q = config_.num_heads * config_.head_dim, K = config_.num_kv_heads * config_.head_dim, F = config_.intermediate_size;
  d_embedding = like(embedding);
  list(embedding, d_embedding, {-1});
  for (Layer& l : layers_) {
    l.d_input_norm = like(l.input_norm);
    l.d_qkv = like(l.qkv);
    l.d_qkv_bias = like(l.qkv_bias);
    l.d_q_norm = like(l.q_norm);
    l.d_k_norm = like(l.k_norm);
    l.d_o = like(l.o);
    l.d_o_bias = like(l.o_bias);
    l.d_post_norm = like(l.post_norm);
    l.d_gate_up = like(l.gate_up);
    l.d_down = like(l.down);
    list(l.input_norm, l.d_input_norm, {-1});
    list(l.qkv, l.d_qkv, {Q, K, K});
    list(l.qkv_bias, l.d_qkv_bias, {Q, K, K});
    list(l.q_norm, l.d_q_norm, {-1});
    list(l.k_norm, l.d_k_norm, {-1});
    list(l.o, l.d_o, {-1});
    list(l.o_bias, l.d_o_bias, {-1});
    list(l.post_norm, l.d_post_norm, {-1});
    list(l.gate_up, l.d_gate_up, {F, F});
    list(l.down, l.d_down, {-1});
  }
  d_final_norm = like(final_norm);
  list(final_norm, d_final_norm, {-1});
  if (config_.tie_word_embeddings) {
    d_lm_head = d_embedding;
  } else {
    d_lm_head = like(lm_head);
    list(lm_head, d_lm_head, {-1});
  }
  PRL_CHECK(next == named_.size(), "{} of {} parameters got a gradient", next, named_.size());
}

void Parameters::zero_grads() {
  ensure_grads();
  for (NamedParameter& parameter : named_) runtime_->zero(parameter.grad.data(), parameter.grad.num_bytes());
}

void Parameters::init_random(std::uint64_t seed, float std_dev) {
  struct Run {
    std::size_t tensor;
    std::int64_t first;
  };
  std::vector<Run> runs;
  for (std::size_t i = 0; i < named_.size(); ++i)
    for (std::int64_t first = 0; first < named_[i].value.num_elements(); first += kRandomRun) runs.push_back({i, first});
  ThreadPool pool;
  pool.parallel_for(static_cast<std::int64_t>(runs.size()), [&](std::int64_t r) {
    const Run run = runs[static_cast<std::size_t>(r)];
    const NamedParameter& parameter = named_[run.tensor];
    const std::int64_t count = std::min(kRandomRun, parameter.value.num_elements() - run.first);
    std::vector<float> values(static_cast<std::size_t>(count));
    if (parameter.value.shape().num_dims() == 2) {
      Rng rng(mix_seed(seed, run.tensor), static_cast<std::uint64_t>(run.first / kRandomRun));
      for (float& value : values) value = static_cast<float>(rng.next_normal()) * std_dev;
    } else {
      std::fill(values.begin(), values.end(), parameter.name.ends_with(".bias") ? 0.0f : 1.0f);
    }
    runtime_->copy_from_host(parameter.value.as<float>() + run.first, values.data(), values.size() * sizeof(float));
  });
}

}  // namespace prl::nn
