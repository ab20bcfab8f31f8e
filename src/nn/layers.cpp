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

/// Frames for the parts of a layer: each drops what its part need not keep.
struct PartFrames {
  Frame norm, attn_proj, heads, mlp;
  PartFrames(const Frame& frame, const LayerMemory& memory, bool has_head_norms)
      : norm(frame.remaking(memory.again.norm ? memory.remake : nullptr)),
        attn_proj(frame.remaking(memory.again.attn_proj ? memory.remake : nullptr)),
        // Without norms heads are rotated in place, so that they are kept as the projections are.
        heads(frame.remaking(memory.again.attn_proj || (memory.again.norm && has_head_norms) ? memory.remake : nullptr)),
        mlp(frame.remaking(memory.again.mlp ? memory.remake : nullptr)) {}
};

/// W norm(stream), and the stream as the one sum that was normed.
struct Projected {
  Var value, sum;
};
Projected project_normed(Frame& norm_frame, Frame& frame, const Stream& in, const NormParameter& norm, const LinearParameter& w,
                         bool has_gate, TensorView sum_out) {
  ops::LinearFusion fusion;
  fusion.eps = norm.eps;
  fusion.swiglu = has_gate;
  Projected out;
  Var normed;
  if (in.delta_TH.is_defined()) {
    const autograd::NormedSum x = autograd::add_rms_norm(norm_frame, in.delta_TH, in.residual_TH, norm, sum_out);
    normed = x.normed;
    out.sum = x.sum;
  } else {
    out.sum = in.residual_TH;
    fusion.norm_K = norm.weight;
    out.value = autograd::fused_linear(frame, in.residual_TH, w, fusion);
    if (out.value.is_defined()) return out;
    fusion.norm_K = {};
    normed = autograd::rms_norm(norm_frame, in.residual_TH, norm);
  }
  if (has_gate) out.value = autograd::fused_linear(frame, normed, w, fusion);
  if (out.value.is_defined()) return out;
  out.value = autograd::linear(frame, normed, w);
  if (has_gate) out.value = autograd::swiglu(frame, out.value);
  return out;
}

/// The stream residual + W x: summed at once where the product's pass can do it. `memory.residual_TH` may be the residual.
Stream project_onto(Frame& frame, const Var& residual, const Var& x, const LinearParameter& w, const LayerMemory& memory,
                    bool is_block_output) {
  ops::LinearFusion fusion;
  fusion.residual_TN = residual.value;
  const Var sum = autograd::fused_linear(frame, x, w, fusion, memory.residual_TH);
  if (sum.is_defined()) return {sum, {}};
  return {residual, autograd::linear(frame, x, w, memory.delta_TH, is_block_output)};
}

// Rules run newest first: what is recorded before a layer's rules runs after them.
void record_release(autograd::OffloadedRegions* offload, autograd::Tape& tape, std::int64_t layer) {
  if (offload != nullptr) tape.record([offload, i = static_cast<std::size_t>(layer)] { offload->release(i); });
}
void record_fetch(autograd::OffloadedRegions* offload, autograd::Tape& tape, std::int64_t layer) {
  if (offload != nullptr) tape.record([offload, i = static_cast<std::size_t>(layer)] { offload->fetch(i); });
}

}  // namespace

Stream decoder_layer(Frame& frame, const BoundModel& model, std::int64_t i, const Stream& in, const AttentionIndex& index,
                     const LayerMemory& memory) {
  static const Parameters::Layer kNoGradients;
  const ModelConfig& c = model.weights.config;
  const Weights::Layer& w = model.weights.layers[static_cast<std::size_t>(i)];
  const Parameters::Layer& g = model.gradients != nullptr ? model.gradients->layer(i) : kNoGradients;
  const float eps = c.rms_norm_eps;
  const bool accumulate = model.gradients == nullptr || !model.gradients->grads_are_fresh();
  const auto matrix = [accumulate](const ops::LinearWeightPtr& weight, const Tensor& grad, const Tensor& bias_grad,
                                   const ops::LinearWeightPtr& next) {
    return LinearParameter{weight.get(), view_or_none(grad), view_or_none(bias_grad), accumulate, next.get()};
  };
  const bool is_last = i + 1 == c.num_layers;
  const ops::LinearWeightPtr& after = is_last ? model.weights.lm_head : model.weights.layers[static_cast<std::size_t>(i + 1)].qkv;
  PartFrames part(frame, memory, w.q_norm.defined());

  const AttentionParameter attention{
      c.num_heads, c.num_kv_heads, c.head_dim, norm(w.q_norm, g.d_q_norm, eps), norm(w.k_norm, g.d_k_norm, eps), &model.weights.rope};
  const Projected qkv = project_normed(part.norm, part.attn_proj, in, norm(w.input_norm, g.d_input_norm, eps),
                                       matrix(w.qkv, g.d_qkv, g.d_qkv_bias, w.o), /*has_gate=*/false, /*sum_out=*/{});
  const Var heads = autograd::self_attention(part.heads, qkv.value, attention, index);
  const Stream attended = project_onto(frame, qkv.sum, heads, matrix(w.o, g.d_o, g.d_o_bias, w.gate_up), memory, /*is_block_output=*/false);

  const Projected hidden = project_normed(part.norm, part.mlp, attended, norm(w.post_norm, g.d_post_norm, eps),
                                          matrix(w.gate_up, g.d_gate_up, {}, w.down), /*has_gate=*/true, memory.residual_TH);
  return project_onto(frame, hidden.sum, hidden.value, matrix(w.down, g.d_down, {}, after), memory, /*is_block_output=*/true);
}

Var decoder_forward(Frame& frame, const BoundModel& model, const ops::TokenIds& ids, const AttentionIndex& index,
                    std::span<const ops::KvLayer> kv_layers, const KeptActivations* kept) {
  const Weights& w = model.weights;
  const Parameters* g = model.gradients;
  const std::int64_t T = ids.ids_T.shape.num_elements(), H = w.config.hidden_size;
  const Shape shape{T, H};
  static const KeptActivations kAll;
  const KeptActivations& keep = kept != nullptr ? *kept : kAll;

  // What a layer's rules read lies in its region, if activations are offloaded: its place is another layer's later on.
  autograd::OffloadedRegions* offload = frame.tape != nullptr ? keep.offload : nullptr;
  const auto region_of = [&](std::int64_t i) -> autograd::Arena& {
    return offload != nullptr && i < w.config.num_layers ? offload->enter(static_cast<std::size_t>(i)) : frame.arena;
  };
  autograd::Arena* region = &region_of(0);

  Stream stream;
  Frame first = frame.in(*region);
  stream.residual_TH = autograd::embedding(first, w.embedding_VH, g != nullptr ? view_or_none(g->d_embedding) : TensorView{}, ids);

  // Without a tape two pairs of stream buffers take turns and everything else of a layer is given back after it. With one, no backward
  // rule reads the outputs that are added to the stream, so that all of them share one buffer.
  LayerMemory turns[2];
  if (frame.tape == nullptr)
    for (LayerMemory& memory : turns) memory = {frame.take(shape, w.compute), frame.take(shape, w.compute)};
  else
    turns[0].delta_TH = frame.take(shape, w.compute);

  for (std::int64_t i = 0; i < w.config.num_layers; ++i) {
    Frame here = frame.in(*region);
    AttentionIndex layer_index = index;
    if (!kv_layers.empty()) layer_index.kv_layer = &kv_layers[static_cast<std::size_t>(i)];
    if (frame.tape == nullptr) {
      const autograd::Arena::Mark mark = frame.arena.mark();
      stream = decoder_layer(frame, model, i, stream, layer_index, turns[i % 2]);
      frame.arena.release(mark);
    } else if (keep.is_checkpointed(i) && !keep.checkpointing.parts.any()) {
      // The sum is what survives: adding and norming apart gives the same bits as the fused form.
      Var x = stream.residual_TH;
      if (stream.delta_TH.is_defined()) x = autograd::add(here, stream.residual_TH, stream.delta_TH);
      record_release(offload, *frame.tape, i);
      if (offload != nullptr) offload->leave(static_cast<std::size_t>(i));
      region = &region_of(i + 1);
      Frame next = frame.in(*region);
      stream = {autograd::checkpoint(next, x, shape,
                                     [&w, g, i, layer_index](Frame& inner, const Var& block_in, TensorView out) {
                                       const Stream s = decoder_layer(inner, {w, g}, i, {block_in, {}}, layer_index, {});
                                       return autograd::add(inner, s.residual_TH, s.delta_TH, out);
                                     }),
                {}};
      record_fetch(offload, *frame.tape, i);
    } else {
      LayerMemory memory = turns[0];
      if (keep.is_checkpointed(i)) {
        memory.again = keep.checkpointing.parts;
        memory.remake = keep.remake;
        memory.remake->begin_block();
      }
      record_release(offload, *frame.tape, i);
      frame.tape->begin_block();
      stream = decoder_layer(here, model, i, stream, layer_index, memory);
      if (memory.remake != nullptr) memory.remake->end_block(*frame.tape);
      frame.tape->end_block();
      record_fetch(offload, *frame.tape, i);
      if (offload != nullptr) offload->leave(static_cast<std::size_t>(i));
      region = &region_of(i + 1);
    }
  }

  const NormParameter final_norm = norm(w.final_norm, g != nullptr ? g->d_final_norm : Tensor(), w.config.rms_norm_eps);
  if (!stream.delta_TH.is_defined()) return autograd::rms_norm(frame, stream.residual_TH, final_norm);
  return autograd::add_rms_norm(frame, stream.delta_TH, stream.residual_TH, final_norm).normed;
}

}  // namespace prl::nn
