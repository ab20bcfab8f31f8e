#include "autograd/functions.hpp"

#include "autograd/fused.hpp"
#include "autograd/token_blocks.hpp"
#include "base/error.hpp"

namespace prl::autograd {
namespace {

TensorView output(Frame& frame, TensorView wanted, Shape shape, DType dtype) {
  if (wanted.data == nullptr) return frame.take(shape, dtype);
  PRL_CHECK(wanted.shape.num_elements() == shape.num_elements() && wanted.dtype == dtype, "output of shape {} given, {} wanted",
            wanted.shape.to_string(), shape.to_string());
  return wanted;
}

/// Adds `fresh(view)` to the gradient of `var` for ops that can only overwrite.
template <typename Fn>
void write_grad(ops::OpContext& ctx, Tape& tape, const Var& var, Fn&& fresh) {
  const Tape::Target target = tape.target(var);
  if (!target.accumulate) {
    fresh(target.view);
    return;
  }
  const Arena::Mark mark = tape.arena().mark();
  const TensorView part = tape.arena().take(var.value.shape, var.value.dtype);
  fresh(part);
  ops::add(ctx, target.view, target.view, part);
  tape.arena().release(mark);
}

/// The gradient of a sum goes to each addend as it is.
void hand_on(ops::OpContext& ctx, Tape& tape, const Var& to, TensorView grad) {
  if (to.id < 0) return;
  if (!tape.has_grad(to)) {
    tape.set_grad(to, grad);
  } else if (const TensorView held = tape.grad(to); held.data != grad.data) {
    ops::add(ctx, held, held, grad);
  }
}

/// x * scale in fp32, which lies in `arena`; x itself if it is not scaled.
TensorView scaled(ops::OpContext& ctx, Arena& arena, TensorView x, float scale) {
  if (scale == 1.0f) return x;
  const TensorView out = arena.take(x.shape, DType::kF32);
  ops::cast(ctx, out, x);
  ops::scale(ctx, out, scale);
  return out;
}

}  // namespace

Var embedding(Frame& frame, ConstTensorView table_VH, TensorView dtable_VH, const ops::TokenIds& ids, float scale) {
  const ConstTensorView ids_T = ids.ids_T;
  const Var y = frame.variable(frame.take({ids_T.shape.num_elements(), table_VH.shape.num_cols()}, table_VH.dtype));
  ops::embedding(frame.ctx, y.value, table_VH, ids);
  if (scale != 1.0f) {
    // Scratch memory lies where that of the backward pass does: not among what a layer saves.
    Arena& scratch = frame.tape != nullptr ? frame.tape->arena() : frame.arena;
    const Arena::Mark mark = scratch.mark();
    ops::cast(frame.ctx, y.value, scaled(frame.ctx, scratch, y.value, scale));
    scratch.release(mark);
  }
  if (frame.tape != nullptr && dtable_VH.data != nullptr) {
    frame.tape->record([tape = frame.tape, ctx = &frame.ctx, y, dtable_VH, ids_T, scale] {
      if (!tape->has_grad(y)) return;
      const Arena::Mark mark = tape->arena().mark();
      const TensorView dy = scaled(*ctx, tape->arena(), tape->grad(y), scale);
      sum_over_blocks(*ctx, tape->arena(), {.outs = std::span(&dtable_VH, 1)}, dy.shape.num_rows(), tape->num_token_blocks(),
                      [&](std::int64_t begin, std::int64_t count, std::span<const TensorView> to, bool) {
                        ops::embedding_backward(*ctx, to[0], dy.rows(begin, count), part_of_vector(ids_T, begin, count));
                      });
      tape->arena().release(mark);
    });
  }
  return y;
}

namespace {

bool has_gradients(const LinearParameter& p) { return p.lora != nullptr && p.lora->da.data != nullptr; }

/// x as adapters read it: with parts of it dropped if they are trained so.
TensorView adapter_input(Frame& frame, const Var& x_TK, const LinearParameter& p) {
  return p.lora != nullptr && p.lora->dropout.probability > 0 ? frame.take(x_TK.value.shape, x_TK.value.dtype) : x_TK.value;
}

void run_linear(ops::OpContext& ctx, TensorView y, ConstTensorView x, TensorView x_of_adapter, const LinearParameter& p) {
  const bool is_indexed = p.lora != nullptr && p.lora->index;
  PRL_CHECK(!is_indexed || p.lora->dropout.probability == 0, "adapters by index have no dropout");
  const auto is_fused = [&] {
    ops::LinearFusion fusion;
    fusion.lora = &*p.lora->index;
    return fusion.lora->single != nullptr && ops::linear_fused(ctx, y, x, *p.weight, fusion);
  };
  if (is_indexed && is_fused()) return;
  if (is_indexed && ops::linear_lora(ctx, y, x, *p.weight, *p.lora->index)) return;
  ops::linear(ctx, y, x, *p.weight, p.next);
  if (p.lora == nullptr) return;
  if (p.lora->dropout.probability > 0) ops::dropout(ctx, x_of_adapter, x, p.lora->dropout, false);
  if (is_indexed)
    ops::add_lora_indexed(ctx, y, x, *p.lora->index);
  else
    ops::add_lora(ctx, y, x_of_adapter, p.lora->groups);
}

}  // namespace

void weight_backward(ops::OpContext& ctx, Tape& tape, const LinearParameter& p, ConstTensorView dy, ConstTensorView x) {
  const TensorView outs[] = {p.dw, p.db};
  if (tape.num_token_blocks() == 1) return ops::linear_backward_weight(ctx, p.dw, p.db, dy, x, p.accumulate);
  sum_over_blocks(ctx, tape.arena(), {.outs = outs, .accumulate = p.accumulate, .can_overwrite = true}, x.shape.num_rows(),
                  tape.num_token_blocks(), [&](std::int64_t begin, std::int64_t count, std::span<const TensorView> to, bool accumulate) {
                    // The op only ever adds to a bias.
                    if (to[1].data != nullptr && !accumulate)
                      ctx.runtime->zero(to[1].data, static_cast<std::size_t>(to[1].shape.num_elements()) * sizeof(float));
                    ops::linear_backward_weight(ctx, to[0], to[1], dy.rows(begin, count), x.rows(begin, count), accumulate);
                  });
}

namespace {

/// ops::lora_backward, block by block of tokens.
void lora_backward(ops::OpContext& ctx, Tape& tape, TensorView dx, ConstTensorView dy, ConstTensorView x, const LoraParameter& p,
                   bool accumulate_dx) {
  std::vector<TensorView> outs{p.da};
  outs.insert(outs.end(), p.db.begin(), p.db.end());
  sum_over_blocks(ctx, tape.arena(), {.outs = outs, .accumulate = p.accumulate, .can_overwrite = true}, x.shape.num_rows(),
                  tape.num_token_blocks(), [&](std::int64_t begin, std::int64_t count, std::span<const TensorView> to, bool accumulate) {
                    ops::lora_backward(ctx, dx.data != nullptr ? dx.rows(begin, count) : TensorView{}, to[0], to.subspan(1),
                                       dy.rows(begin, count), x.rows(begin, count), *p.groups.front().weight, accumulate_dx, accumulate);
                  });
}

/// Gradients of the adapter, and what reaches x through it.
void adapter_backward(ops::OpContext& ctx, Tape& tape, const Var& x_TK, TensorView dy, ConstTensorView x_of_adapter,
                      const LoraParameter& p) {
  if (x_TK.id < 0) {
    lora_backward(ctx, tape, {}, dy, x_of_adapter, p, false);
  } else if (p.dropout.probability > 0) {
    const Tape::Target dx = tape.target(x_TK);
    const Arena::Mark mark = tape.arena().mark();
    const TensorView through = tape.arena().take(x_TK.value.shape, x_TK.value.dtype);
    lora_backward(ctx, tape, through, dy, x_of_adapter, p, false);
    ops::dropout(ctx, dx.view, through, p.dropout, dx.accumulate);
    tape.arena().release(mark);
  } else {
    const Tape::Target dx = tape.target(x_TK);
    lora_backward(ctx, tape, dx.view, dy, x_of_adapter, p, dx.accumulate);
  }
}

}  // namespace

Var linear(Frame& frame, const Var& x_TK, const LinearParameter& p, TensorView out, bool is_block_output) {
  const Var y = frame.variable(output(frame, out, {x_TK.value.shape.num_rows(), p.weight->num_outputs()}, p.weight->dtype()));
  const TensorView x_of_adapter = adapter_input(frame, x_TK, p);
  if (!(is_block_output && frame.is_recompute))
    frame.run([ctx = &frame.ctx, y = y.value, x = x_TK.value, x_of_adapter, p] { run_linear(*ctx, y, x, x_of_adapter, p); });
  else if (x_of_adapter.data != x_TK.value.data)
    ops::dropout(frame.ctx, x_of_adapter, x_TK.value, p.lora->dropout, false);
  if (frame.tape != nullptr) {
    frame.tape->record([tape = frame.tape, ctx = &frame.ctx, x_TK, x_of_adapter, y, p] {
      const TensorView dy = tape->grad(y);
      if (dy.data == nullptr) return;
      if (p.dw.data != nullptr) weight_backward(*ctx, *tape, p, dy, x_TK.value);
      if (x_TK.id >= 0) {
        const Tape::Target dx = tape->target(x_TK);
        ops::linear_backward_input(*ctx, dx.view, dy, *p.weight, dx.accumulate);
      }
      if (has_gradients(p)) adapter_backward(*ctx, *tape, x_TK, dy, x_of_adapter, *p.lora);
    });
  }
  return y;
}

Var fused_linear(Frame& frame, const Var& x_TK, const LinearParameter& p, ops::LinearFusion fusion, TensorView out) {
  if (frame.tape != nullptr) return {};
  if (p.lora != nullptr) {
    if (!p.lora->index || p.lora->index->single == nullptr) return {};
    fusion.lora = &*p.lora->index;
  }
  const Arena::Mark mark = frame.arena.mark();
  const std::int64_t num_outputs = fusion.swiglu ? p.weight->num_outputs() / 2 : p.weight->num_outputs();
  const TensorView y = output(frame, out, {x_TK.value.shape.num_rows(), num_outputs}, p.weight->dtype());
  if (ops::linear_fused(frame.ctx, y, x_TK.value, *p.weight, fusion)) return frame.variable(y);
  frame.arena.release(mark);
  return {};
}

TensorView norm_weight_target(Tape& tape, const NormParameter& p) {
  return p.dweight.data != nullptr ? p.dweight : tape.arena().take(p.weight.shape, DType::kF32);
}

void norm_backward(ops::OpContext& ctx, Tape& tape, const NormParameter& p, const Tape::Target& dx, ConstTensorView dy, ConstTensorView x) {
  const TensorView dweight = norm_weight_target(tape, p);
  sum_over_blocks(ctx, tape.arena(), {.outs = std::span(&dweight, 1)}, x.shape.num_rows(), tape.num_token_blocks(),
                  [&](std::int64_t begin, std::int64_t count, std::span<const TensorView> to, bool) {
                    ops::rms_norm_backward(ctx, dx.view.rows(begin, count), to[0], dy.rows(begin, count), x.rows(begin, count), p.weight,
                                           p.eps, dx.accumulate);
                  });
}

Var rms_norm(Frame& frame, const Var& x_TH, const NormParameter& p, TensorView out) {
  const Var y = frame.variable(output(frame, out, x_TH.value.shape, x_TH.value.dtype));
  frame.run([ctx = &frame.ctx, y = y.value, x = x_TH.value, p] { ops::rms_norm(*ctx, y, x, p.weight, p.eps); });
  if (frame.tape != nullptr) {
    frame.tape->record([tape = frame.tape, ctx = &frame.ctx, x_TH, y, p] {
      const TensorView dy = tape->grad(y);
      if (dy.data == nullptr || x_TH.id < 0) return;
      const Tape::Target dx = tape->target(x_TH);
      norm_backward(*ctx, *tape, p, dx, dy, x_TH.value);
    });
  }
  return y;
}

Var normed_pair(Frame& frame, ConstTensorView a_TH, const NormParameter& of_a, ConstTensorView b_TH, const NormParameter& of_b) {
  const std::int64_t T = a_TH.shape.num_rows(), H = a_TH.shape.num_cols();
  const Var y = frame.variable(frame.take({T, 2 * H}, a_TH.dtype));
  frame.run([ctx = &frame.ctx, a_TH, of_a, b_TH, of_b, y = y.value, H] {
    ops::rms_norm(*ctx, y.columns(0, H), a_TH, of_a.weight, of_a.eps);
    ops::rms_norm(*ctx, y.columns(H, H), b_TH, of_b.weight, of_b.eps);
  });
  if (frame.tape != nullptr) {
    frame.tape->record([tape = frame.tape, ctx = &frame.ctx, a_TH, of_a, b_TH, of_b, y, H] {
      const TensorView dy = tape->grad(y);
      if (dy.data == nullptr) return;
      const Tape::Target unread{tape->arena().take(a_TH.shape, a_TH.dtype), false};
      norm_backward(*ctx, *tape, of_a, unread, dy.columns(0, H), a_TH);
      norm_backward(*ctx, *tape, of_b, unread, dy.columns(H, H), b_TH);
    });
  }
  return y;
}

Var norm_projections(Frame& frame, const Var& qkv_TE, const NormParameter& q, const NormParameter& k) {
  const ConstTensorView x = qkv_TE.value;
  const std::int64_t Q = q.weight.shape.num_elements(), K = k.weight.shape.num_elements();
  PRL_CHECK(x.shape.num_cols() == Q + 2 * K, "projections of {} columns for norms of {} and {}", x.shape.num_cols(), Q, K);
  const bool in_place = frame.tape == nullptr;
  const Var y = in_place ? qkv_TE : frame.variable(frame.take(x.shape, x.dtype));
  frame.run([ctx = &frame.ctx, x, y = y.value, q, k, Q, K, in_place] {
    ops::rms_norm(*ctx, y.columns(0, Q), x.columns(0, Q), q.weight, q.eps);
    ops::rms_norm(*ctx, y.columns(Q, K), x.columns(Q, K), k.weight, k.eps);
    if (!in_place) ops::cast(*ctx, y.columns(Q + K, K), x.columns(Q + K, K));
  });
  if (frame.tape != nullptr) {
    frame.tape->record([tape = frame.tape, ctx = &frame.ctx, qkv_TE, x, y, q, k, Q, K] {
      const TensorView dy = tape->grad(y);
      if (dy.data == nullptr || qkv_TE.id < 0) return;
      const Tape::Target dx = tape->target(qkv_TE);
      PRL_CHECK(!dx.accumulate, "projections that are normed have one reader");
      norm_backward(*ctx, *tape, q, {dx.view.columns(0, Q), false}, dy.columns(0, Q), x.columns(0, Q));
      norm_backward(*ctx, *tape, k, {dx.view.columns(Q, K), false}, dy.columns(Q, K), x.columns(Q, K));
      ops::cast(*ctx, dx.view.columns(Q + K, K), dy.columns(Q + K, K));
    });
  }
  return y;
}

NormedSum add_rms_norm(Frame& frame, const Var& delta_TH, const Var& residual_TH, const NormParameter& p, TensorView sum_out) {
  const Shape shape = residual_TH.value.shape;
  const Var sum = frame.variable(sum_out.data != nullptr ? output(frame, sum_out, shape, residual_TH.value.dtype)
                                                         : frame.keep(shape, residual_TH.value.dtype));
  const Var y = frame.variable(frame.take(shape, residual_TH.value.dtype));
  ops::add_rms_norm(frame.ctx, y.value, sum.value, delta_TH.value, residual_TH.value, p.weight, p.eps);
  if (frame.remake != nullptr)
    frame.remake->add([ctx = &frame.ctx, y = y.value, sum = sum.value, p] { ops::rms_norm(*ctx, y, sum, p.weight, p.eps); });
  if (frame.tape != nullptr) {
    frame.tape->record([tape = frame.tape, ctx = &frame.ctx, delta_TH, residual_TH, sum, y, p] {
      if (const TensorView dy = tape->grad(y); dy.data != nullptr) {
        const Tape::Target dsum = tape->target(sum);
        norm_backward(*ctx, *tape, p, dsum, dy, sum.value);
      }
      const TensorView dsum = tape->grad(sum);
      if (dsum.data == nullptr) return;
      hand_on(*ctx, *tape, delta_TH, dsum);
      hand_on(*ctx, *tape, residual_TH, dsum);
    });
  }
  return {y, sum};
}

Var add(Frame& frame, const Var& a, const Var& b, TensorView out, bool is_block_output) {
  const Var y = frame.variable(output(frame, out, a.value.shape, a.value.dtype));
  if (!(is_block_output && frame.is_recompute)) ops::add(frame.ctx, y.value, a.value, b.value);
  if (frame.tape != nullptr) {
    frame.tape->record([tape = frame.tape, ctx = &frame.ctx, a, b, y] {
      const TensorView dy = tape->grad(y);
      if (dy.data == nullptr) return;
      hand_on(*ctx, *tape, a, dy);
      hand_on(*ctx, *tape, b, dy);
    });
  }
  return y;
}

namespace {

/// One of the gates of [T, 2F], or what stands in place of one of [T, F], which is `num_parts` 1.
Var gate(Frame& frame, const Var& gate_up_T2F, decltype(ops::swiglu)* forward, decltype(ops::swiglu_backward)* backward,
         std::int64_t num_parts = 2) {
  const Shape& shape = gate_up_T2F.value.shape;
  const Var y = frame.variable(frame.take({shape.num_rows(), shape.num_cols() / num_parts}, gate_up_T2F.value.dtype));
  frame.run([ctx = &frame.ctx, y = y.value, x = gate_up_T2F.value, forward] { forward(*ctx, y, x); });
  if (frame.tape != nullptr) {
    frame.tape->record([tape = frame.tape, ctx = &frame.ctx, gate_up_T2F, y, backward] {
      const TensorView dy = tape->grad(y);
      if (dy.data == nullptr || gate_up_T2F.id < 0) return;
      write_grad(*ctx, *tape, gate_up_T2F, [&](TensorView dx) { backward(*ctx, dx, dy, gate_up_T2F.value); });
    });
  }
  return y;
}

}  // namespace

Var swiglu(Frame& frame, const Var& gate_up_T2F) { return gate(frame, gate_up_T2F, ops::swiglu, ops::swiglu_backward); }
Var squared_relu(Frame& frame, const Var& x_TF) {
  return gate(
      frame, x_TF, [](ops::OpContext& ctx, TensorView out, ConstTensorView x) { ops::squared_relu(ctx, out, x, {}); },
      [](ops::OpContext& ctx, TensorView dx, ConstTensorView dout, ConstTensorView x) {
        ops::squared_relu_backward(ctx, dx, {}, dout, x, {});
      },
      1);
}
Var geglu(Frame& frame, const Var& gate_up_T2F) { return gate(frame, gate_up_T2F, ops::geglu, ops::geglu_backward); }

}  // namespace prl::autograd
