#include "autograd/linear_attention.hpp"

#include <vector>

#include "base/error.hpp"
#include "ops/delta_rule.hpp"

namespace prl::autograd {
namespace {

/// Columns of the projections, or of their gradient.
template <typename View>
struct Columns {
  View channels, gate, b, a;
  Columns(View all, const LinearAttentionParameter& p) {
    const std::int64_t N = p.num_value_heads, V = N * p.value_dim, C = 2 * p.num_key_heads * p.key_dim + V;
    const bool is_space = p.kind == ops::RuleKind::kStateSpace;
    const std::int64_t wanted = C + V + (is_space ? N : 2 * N);
    PRL_CHECK(all.shape.num_cols() == wanted, "projections of linear attention have {} columns, {} wanted", all.shape.num_cols(), wanted);
    if (is_space) {
      gate = all.columns(0, V);
      channels = all.columns(V, C);
      a = all.columns(V + C, N);
      return;
    }
    channels = all.columns(0, C);
    gate = all.columns(C, V);
    b = all.columns(C + V, N);
    a = all.columns(C + V + N, N);
  }
};

/// A parameter's gradient as [rows, cols], or scratch memory that nobody reads.
TensorView target_of(Tape& tape, const VectorParameter& p) {
  return p.grad.data != nullptr ? p.grad : tape.arena().take(p.value.shape, DType::kF32);
}

/// The norm of what the rule gives, and its gradient.
void norm_output(ops::OpContext& ctx, TensorView y, ConstTensorView attended, ConstTensorView gate, const LinearAttentionParameter& p) {
  if (p.kind == ops::RuleKind::kStateSpace)
    ops::gated_group_norm(ctx, y, attended, gate, p.norm.weight, p.num_key_heads, p.norm.eps);
  else
    ops::gated_head_norm(ctx, y, attended, gate, p.norm.weight, p.norm.eps);
}
void norm_output_backward(ops::OpContext& ctx, TensorView dattended, TensorView dgate, TensorView dw, ConstTensorView dy,
                          ConstTensorView attended, ConstTensorView gate, const LinearAttentionParameter& p) {
  if (p.kind == ops::RuleKind::kStateSpace)
    ops::gated_group_norm_backward(ctx, dattended, dgate, dw, dy, attended, gate, p.norm.weight, p.num_key_heads, p.norm.eps);
  else
    ops::gated_head_norm_backward(ctx, dattended, dgate, dw, dy, attended, gate, p.norm.weight, p.norm.eps);
}

template <typename View>
View taps_by_channel(View taps, std::int64_t num_taps) {
  return taps.reshaped({taps.shape.num_elements() / num_taps, num_taps});
}

}  // namespace

Var linear_attention(Frame& frame, const Var& projected, const LinearAttentionParameter& p, const AttentionIndex& index) {
  PRL_CHECK(index.exchange == nullptr, "linear attention over a row that ranks share");
  const Columns<TensorView> in(projected.value, p);
  const std::int64_t T = projected.value.shape.num_rows(), C = in.channels.shape.num_cols(), V = in.gate.shape.num_cols();
  const DType dtype = projected.value.dtype;
  const bool is_paged = index.paged != nullptr || index.decode != nullptr;
  PRL_CHECK(!is_paged || frame.tape == nullptr, "paged attention has no backward pass");
  const ops::StateRows rows = is_paged ? index.state_rows : ops::StateRows{index.cu_seqlens, {}, {}};
  const ops::StateLayer states = is_paged ? *index.state_layer : ops::StateLayer{};
  const ConstTensorView taps = taps_by_channel(p.taps.value, p.num_taps);

  const TensorView mixed = frame.take({T, C}, dtype);
  frame.run([ctx = &frame.ctx, mixed, x = in.channels, taps, inputs = states.inputs_SWC, rows, bias = p.conv_bias.value] {
    ops::causal_conv(*ctx, mixed, x, taps, inputs, rows, bias);
  });
  const ops::DeltaRule rule{.qkv_TC = mixed,
                            .b_TN = in.b,
                            .a_TN = in.a,
                            .decay_rate_N = p.decay_rate.value,
                            .decay_bias_N = p.decay_bias.value,
                            .num_key_heads = p.num_key_heads,
                            .num_value_heads = p.num_value_heads,
                            .key_dim = p.key_dim,
                            .value_dim = p.value_dim,
                            .kind = p.kind,
                            .skip_N = p.skip.value,
                            .min_step = p.min_step,
                            .max_step = p.max_step};
  const Var y = frame.variable(frame.keep({T, V}, dtype));
  const TensorView attended = frame.tape != nullptr ? frame.keep({T, V}, dtype) : y.value;
  ops::delta_rule(frame.ctx, attended, states.state_SF, rule, rows);
  norm_output(frame.ctx, y.value, attended, in.gate, p);
  if (frame.tape == nullptr) return y;

  frame.tape->record([tape = frame.tape, ctx = &frame.ctx, projected, p, in, mixed, rule, y, attended, taps, rows, T, C, V] {
    const TensorView dy = tape->grad(y);
    if (dy.data == nullptr || projected.id < 0) return;
    const Tape::Target target = tape->target(projected);
    PRL_CHECK(!target.accumulate, "the projections of an attention layer have one reader");
    const Columns<TensorView> out(target.view, p);
    Arena& arena = tape->arena();
    const Arena::Mark mark = arena.mark();
    const TensorView dattended = arena.take({T, V}, dy.dtype), dmixed = arena.take({T, C}, dy.dtype);
    norm_output_backward(*ctx, dattended, out.gate, norm_weight_target(*tape, p.norm), dy, attended, in.gate, p);
    ops::delta_rule_backward(*ctx, {dmixed, out.b, out.a, p.decay_rate.grad, p.decay_bias.grad, p.skip.grad}, dattended, rule, rows);
    const bool has_bias = p.conv_bias.value.data != nullptr;
    ops::causal_conv_backward(*ctx, out.channels, taps_by_channel(target_of(*tape, p.taps), p.num_taps), dmixed, in.channels, taps, rows,
                              p.conv_bias.value, has_bias ? target_of(*tape, p.conv_bias) : TensorView{});
    arena.release(mark);
  });
  return y;
}

Var gated_attention(Frame& frame, const Var& projected, const AttentionParameter& p, const AttentionIndex& index) {
  const std::int64_t T = projected.value.shape.num_rows(), Q = p.num_heads * p.head_dim;
  const DType dtype = projected.value.dtype;
  // Where they are apart, the ops see one head as wide as all.
  const std::int64_t num_gates = p.gates_are_apart ? 1 : p.num_heads, gate_dim = Q / num_gates;
  const Var qkv = frame.variable(frame.take({T, p.width()}, dtype));
  frame.run([ctx = &frame.ctx, out = qkv.value, in = projected.value, num_gates, gate_dim] {
    ops::drop_gates(*ctx, out, in, num_gates, gate_dim);
  });
  if (frame.tape != nullptr) {
    frame.tape->record([tape = frame.tape, ctx = &frame.ctx, projected, qkv, num_gates, gate_dim] {
      const TensorView dqkv = tape->grad(qkv);
      if (dqkv.data == nullptr || projected.id < 0) return;
      // The gates' columns were written by the rule below.
      ops::drop_gates_backward(*ctx, tape->target(projected).view, dqkv, num_gates, gate_dim);
    });
  }
  const Var attended = self_attention(frame, qkv, p, index);
  const Var y = frame.variable(frame.tape != nullptr ? frame.keep({T, Q}, dtype) : attended.value);
  ops::gate_heads(frame.ctx, y.value, attended.value, projected.value, num_gates, gate_dim);
  if (frame.tape == nullptr) return y;
  frame.tape->record([tape = frame.tape, ctx = &frame.ctx, projected, attended, y, num_gates, gate_dim] {
    const TensorView dy = tape->grad(y);
    if (dy.data == nullptr || projected.id < 0) return;
    const Tape::Target target = tape->target(projected), dattended = tape->target(attended);
    PRL_CHECK(!target.accumulate && !dattended.accumulate, "the projections of an attention layer have one reader");
    ops::gate_heads_backward(*ctx, dattended.view, target.view, dy, attended.value, projected.value, num_gates, gate_dim);
  });
  return y;
}

}  // namespace prl::autograd
