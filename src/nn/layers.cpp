#include "nn/layers.hpp"

#include "autograd/fused.hpp"
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

/// W norm(stream), and the stream as the one sum that was normed.
struct Projected {
  Var value, sum;
};
Projected project_normed(Frame& frame, const Stream& in, const NormParameter& norm, const LinearParameter& w, bool has_gate,
                         TensorView sum_out = {}) {
  ops::LinearFusion fusion;
  fusion.eps = norm.eps;
  fusion.swiglu = has_gate;
  Projected out;
  Var normed;
  if (in.delta_TH.is_defined()) {
    const autograd::NormedSum x = autograd::add_rms_norm(frame, in.delta_TH, in.residual_TH, norm, sum_out);
    normed = x.normed;
    out.sum = x.sum;
  } else {
    out.sum = in.residual_TH;
    fusion.norm_K = norm.weight;
    out.value = autograd::fused_linear(frame, in.residual_TH, w, fusion);
    if (out.value.is_defined()) return out;
    fusion.norm_K = {};
    normed = autograd::rms_norm(frame, in.residual_TH, norm);
  }
  if (has_gate) out.value = autograd::fused_linear(frame, normed, w, fusion);
  if (out.value.is_defined()) return out;
  out.value = autograd::linear(frame, normed, w);
  if (has_gate) out.value = autograd::swiglu(frame, out.value);
  return out;
}

/// The stream residual + W x: summed at once where the product's pass can do it. `out.residual_TH` may be the residual.
Stream project_onto(Frame& frame, const Var& residual, const Var& x, const LinearParameter& w, const StreamBuffers& out,
                    bool is_block_output) {
  ops::LinearFusion fusion;
  fusion.residual_TN = residual.value;
  const Var sum = autograd::fused_linear(frame, x, w, fusion, out.residual_TH);
  if (sum.is_defined()) return {sum, {}};
  return {residual, autograd::linear(frame, x, w, out.delta_TH, is_block_output)};
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

  const TensorView sum_out = out != nullptr ? out->residual_TH : TensorView{};

  const AttentionParameter attention{
      c.num_heads, c.num_kv_heads, c.head_dim, norm(w.q_norm, g.d_q_norm, eps), norm(w.k_norm, g.d_k_norm, eps), &model.weights.rope};
  const Projected qkv =
      project_normed(frame, in, norm(w.input_norm, g.d_input_norm, eps), matrix(w.qkv, g.d_qkv, g.d_qkv_bias), /*has_gate=*/false);
  const Var heads = autograd::self_attention(frame, qkv.value, attention, index);
  const Stream attended = project_onto(frame, qkv.sum, heads, matrix(w.o, g.d_o, g.d_o_bias), {sum_out, {}}, /*is_block_output=*/false);

  const Projected hidden = project_normed(frame, attended, norm(w.post_norm, g.d_post_norm, eps), matrix(w.gate_up, g.d_gate_up, {}),
                                          /*has_gate=*/true, sum_out);
  return project_onto(frame, hidden.sum, hidden.value, matrix(w.down, g.d_down, {}),
                      {sum_out, out != nullptr ? out->delta_TH : TensorView{}}, /*is_block_output=*/true);
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
