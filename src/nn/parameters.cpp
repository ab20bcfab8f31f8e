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

/// Cuts one array into tensors, vectors first.
class Blocks {
 public:
  void want(Tensor& tensor, Shape shape) { (shape.num_dims() == 1 ? vectors_ : matrices_).push_back({&tensor, shape}); }
  /// Zeros; sets the tensors that were wanted.
  Tensor cut(const std::shared_ptr<DeviceRuntime>& runtime) const {
    const std::int64_t end = num_vector_elements();
    const Tensor all = Tensor::zeros(runtime, {end + total(matrices_)}, DType::kF32);
    place(all, vectors_, 0);
    place(all, matrices_, end);
    return all;
  }
  std::int64_t num_vector_elements() const { return total(vectors_); }

 private:
  struct Wanted {
    Tensor* tensor;
    Shape shape;
    std::int64_t room() const {
      constexpr std::int64_t kAlignedElements = 16;  // 64 bytes
      return (shape.num_elements() + kAlignedElements - 1) / kAlignedElements * kAlignedElements;
    }
  };
  static std::int64_t total(const std::vector<Wanted>& list) {
    std::int64_t sum = 0;
    for (const Wanted& w : list) sum += w.room();
    return sum;
  }
  static void place(const Tensor& all, const std::vector<Wanted>& list, std::int64_t begin) {
    for (const Wanted& w : list) {
      *w.tensor = all.slice(begin, w.shape.num_elements()).reshaped(w.shape);
      begin += w.room();
    }
  }
  std::vector<Wanted> vectors_, matrices_;
};

}  // namespace

template <typename Fn>
void Parameters::each_block(Fn fn) {
  const ModelConfig& c = config_;
  const std::int64_t H = c.hidden_size, Q = c.num_heads * c.head_dim, K = c.num_kv_heads * c.head_dim;
  fn(embedding, d_embedding, Shape{c.vocab_size, H});
  for (Layer& l : layers_) {
    fn(l.input_norm, l.d_input_norm, Shape{H});
    fn(l.qkv, l.d_qkv, Shape{Q + 2 * K, H});
    if (c.attention_bias) fn(l.qkv_bias, l.d_qkv_bias, Shape{Q + 2 * K});
    if (c.qk_norm) {
      fn(l.q_norm, l.d_q_norm, Shape{c.head_dim});
      fn(l.k_norm, l.d_k_norm, Shape{c.head_dim});
    }
    fn(l.o, l.d_o, Shape{H, Q});
    if (c.attention_out_bias) fn(l.o_bias, l.d_o_bias, Shape{H});
    fn(l.post_norm, l.d_post_norm, Shape{H});
    fn(l.gate_up, l.d_gate_up, Shape{2 * c.intermediate_size, H});
    fn(l.down, l.d_down, Shape{H, c.intermediate_size});
  }
  fn(final_norm, d_final_norm, Shape{H});
  if (!c.tie_word_embeddings) fn(lm_head, d_lm_head, Shape{c.vocab_size, H});
}

Parameters::Parameters(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config) : config_(config), runtime_(std::move(runtime)) {
  const ModelConfig& c = config_;
  const Family& family = find_family(c.model_type, "parameters");
  const std::int64_t Q = c.num_heads * c.head_dim, K = c.num_kv_heads * c.head_dim;
  layers_.resize(static_cast<std::size_t>(c.num_layers));
  Blocks blocks;
  each_block([&](Tensor& value, Tensor&, Shape shape) { blocks.want(value, shape); });
  values_ = blocks.cut(runtime_);
  num_vector_elements_ = blocks.num_vector_elements();
  if (c.tie_word_embeddings) lm_head = embedding;

  const auto list = [&](Slot slot, std::int64_t layer, const Tensor& value) {
    named_.push_back({family.name_of(slot, layer), value, {}, value.as<float>() - values_.as<float>()});
  };
  list(Slot::kEmbedding, -1, embedding);
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const Layer& layer = layers_[static_cast<std::size_t>(i)];
    list(Slot::kInputNorm, i, layer.input_norm);
    list(Slot::kQ, i, layer.qkv.slice(0, Q));
    list(Slot::kK, i, layer.qkv.slice(Q, K));
    list(Slot::kV, i, layer.qkv.slice(Q + K, K));
    if (c.attention_bias) {
      list(Slot::kQBias, i, layer.qkv_bias.slice(0, Q));
      list(Slot::kKBias, i, layer.qkv_bias.slice(Q, K));
      list(Slot::kVBias, i, layer.qkv_bias.slice(Q + K, K));
    }
    if (c.qk_norm) {
      list(Slot::kQNorm, i, layer.q_norm);
      list(Slot::kKNorm, i, layer.k_norm);
    }
    list(Slot::kO, i, layer.o);
    if (c.attention_out_bias) {
      list(Slot::kOBias, i, layer.o_bias);
    }
    list(Slot::kPostNorm, i, layer.post_norm);
    list(Slot::kGate, i, layer.gate_up.slice(0, c.intermediate_size));
    list(Slot::kUp, i, layer.gate_up.slice(c.intermediate_size, c.intermediate_size));
    list(Slot::kDown, i, layer.down);
  }
  list(Slot::kFinalNorm, -1, final_norm);
  if (!c.tie_word_embeddings) list(Slot::kLmHead, -1, lm_head);
}

NamedParameter& Parameters::at(const std::string& name) {
  const auto it = std::find_if(named_.begin(), named_.end(), [&](const NamedParameter& p) { return p.name == name; });
  if (it == named_.end()) fail(ErrorCode::kNotFound, "the {} model has no parameter '{}'", config_.model_type, name);
  return *it;
}

void Parameters::ensure_grads() {
  if (grads_.defined()) return;
  Blocks blocks;
  each_block([&](Tensor&, Tensor& grad, Shape shape) { blocks.want(grad, shape); });
  grads_ = blocks.cut(runtime_);
  if (config_.tie_word_embeddings) d_lm_head = d_embedding;
  for (NamedParameter& p : named_) p.grad = grads_.slice(p.offset, p.value.num_elements()).reshaped(p.value.shape());
}

void Parameters::zero_grads() {
  ensure_grads();
  runtime_->zero(grads_.data(), grads_.num_bytes());
  grads_are_fresh_ = false;
}

void Parameters::start_grads() {
  ensure_grads();
  // What backward passes only ever add to: vectors, and the rows of an embedding that is no head at the same time.
  runtime_->zero(grads_.data(), static_cast<std::size_t>(num_vector_elements_) * sizeof(float));
  if (!config_.tie_word_embeddings) runtime_->zero(d_embedding.data(), d_embedding.num_bytes());
  grads_are_fresh_ = true;
}

void Parameters::settle_grads() {
  if (grads_are_fresh_) zero_grads();
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
