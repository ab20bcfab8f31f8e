#include "nn/layers.hpp"

#include "base/error.hpp"

namespace prl::nn {
namespace {
using autograd::AttentionIndex;
using autograd::AttentionParameter;
using autograd::Frame;
using autograd::LinearParameter;
using autograd::NormParameter;
using autograd::Var;

TensorView view_or_none(const Tensor& tensor) { return tensor.defined() ? tensor.view() : TensorView{}; }

NormParameter norm(const Tensor& weight, const Tensor& grad, float eps) {
  if (!weight.defined()) return {};
  return {weight.view(), view_or_none(grad), eps};
}

}  // namespace

Stream decoder_layer(Frame& frame, const BoundModel& model, std::int64_t i, const Stream& in, const AttentionIndex& index,
                     const StreamBuffers* out) {
  static const Parameters::Layer kNoGradients;
  const ModelConfig& c = model.weights.config;
  const Weights::Layer& w = model.weights.layers[static_cast<std::size_t>(i)];
  const Parameters::Layer& g = model.gradients != nullptr ? model.gradients->layer(i) : kNoGradients;
  const float eps = c.rms_norm_eps;
  const bool accumulate = model.gradients == nullptr || !model.gradients->grads_are_fresh();
  const auto matrix = [accumulate](const ops::LinearWeightPtr& weight, const Tensor& grad, const Tensor& bias_grad) {
    return LinearParameter{weight.get(), view_or_none(grad), view_or_none(bias_grad), accumulate};
  };

  const NormParameter input_norm = norm(w.input_norm, g.d_input_norm, eps);
  autograd::NormedSum x;
  if (in.delta_TH.is_defined()) {
    x = autograd::add_rms_norm(frame, in.delta_TH, in.residual_TH, input_norm);
  } else {
    x = {autograd::rms_norm(frame, in.residual_TH, input_norm), in.residual_TH};
  }

  const AttentionParameter attention{
      c.num_heads, c.num_kv_heads, c.head_dim, norm(w.q_norm, g.d_q_norm, eps), norm(w.k_norm, g.d_k_norm, eps), &model.weights.rope};
  const Var qkv = autograd::linear(frame, x.normed, matrix(w.qkv, g.d_qkv, g.d_qkv_bias));
  const Var heads = autograd::self_attention(frame, qkv, attention, index);
  const Var attended = autograd::linear(frame, heads, matrix(w.o, g.d_o, g.d_o_bias));

  const autograd::NormedSum y = autograd::add_rms_norm(frame, attended, x.sum, norm(w.post_norm, g.d_post_norm, eps),
                                                       out != nullptr ? out->residual_TH : TensorView{});
  const Var gate_up = autograd::linear(frame, y.normed, matrix(w.gate_up, g.d_gate_up, {}));
  const Var hidden = autograd::swiglu(frame, gate_up);
  const Var delta = autograd::linear(frame, hidden, matrix(w.down, g.d_down, {}), out != nullptr ? out->delta_TH : TensorView{}, true);
  return {y.sum, delta};
}

Var decoder_forward(Frame& frame, const BoundModel& model, ConstTensorView ids_T, const AttentionIndex& index,
                    std::span<const ops::KvLayer> kv_layers, int recompute_freq) {
  const Weights& w = model.weights;
  const Parameters* g = model.gradients;
  const std::int64_t T = ids_T.shape.num_elements(), H = w.config.hidden_size;
  const Shape shape{T, H};

  Stream stream;
  stream.residual_TH = autograd::embedding(frame, w.embedding_VH, g != nullptr ? view_or_none(g->d_embedding) : TensorView{}, ids_T);

  // Without a tape two pairs of stream buffers take turns and everything else of a layer is given back after it.
  StreamBuffers turns[2];
  if (frame.tape == nullptr)
    for (StreamBuffers& buffers : turns) buffers = {frame.take(shape, w.compute), frame.take(shape, w.compute)};

  for (std::int64_t i = 0; i < w.config.num_layers; ++i) {
    AttentionIndex layer_index = index;
    if (!kv_layers.empty()) layer_index.kv_layer = &kv_layers[static_cast<std::size_t>(i)];
    if (frame.tape == nullptr) {
      const autograd::Arena::Mark mark = frame.arena.mark();
      stream = decoder_layer(frame, model, i, stream, layer_index, &turns[i % 2]);
      frame.arena.release(mark);
    } else if (recompute_freq > 0 && i % recompute_freq == 0) {
      // The sum is what survives: adding and norming apart gives the same bits as the fused form.
      Var x = stream.residual_TH;
      if (stream.delta_TH.is_defined()) x = autograd::add(frame, stream.residual_TH, stream.delta_TH);
      stream = {autograd::checkpoint(frame, x, shape,
                                     [&w, g, i, layer_index](Frame& inner, const Var& block_in, TensorView out) {
                                       const Stream s = decoder_layer(inner, {w, g}, i, {block_in, {}}, layer_index, nullptr);
                                       return autograd::add(inner, s.residual_TH, s.delta_TH, out);
                                     }),
                {}};
    } else {
      frame.tape->begin_block();
      stream = decoder_layer(frame, model, i, stream, layer_index, nullptr);
      frame.tape->end_block();
    }
  }

  const NormParameter final_norm = norm(w.final_norm, g != nullptr ? g->d_final_norm : Tensor(), w.config.rms_norm_eps);
  if (!stream.delta_TH.is_defined()) return autograd::rms_norm(frame, stream.residual_TH, final_norm);
  return autograd::add_rms_norm(frame, stream.delta_TH, stream.residual_TH, final_norm).normed;
}

}  // namespace prl::nn
