#include "autograd/tape.hpp"

#include <memory>

#include "base/error.hpp"

namespace prl::autograd {

Var Tape::variable(TensorView value) {
  values_.push_back(value);
  grads_.push_back({});
  return {value, static_cast<std::int32_t>(values_.size() - 1)};
}

void Tape::begin_block() {
  const std::size_t index = marks_.size();
  marks_.push_back({});
  const std::size_t num_outside = values_.size();
  record([this, index, num_outside] {
    const Arena::Mark mark = marks_[index];
    for (std::size_t i = 0; i < num_outside; ++i)
      PRL_CHECK(!arena_.is_above(mark, grads_[i].data),
                "the gradient of value {} lies in the scratch memory of a block it does not belong to", i);
    arena_.release(mark);
  });
}

void Tape::end_block() {
  PRL_CHECK(!marks_.empty(), "end_block() without begin_block()");
  const std::size_t index = marks_.size() - 1;
  record([this, index] { marks_[index] = arena_.mark(); });
}

TensorView Tape::grad(const Var& var) const {
  PRL_CHECK(var.id < static_cast<std::int32_t>(grads_.size()), "value {} belongs to another tape", var.id);
  return var.id < 0 ? TensorView{} : grads_[static_cast<std::size_t>(var.id)];
}

void Tape::set_grad(const Var& var, TensorView grad) {
  if (var.id < 0) return;
  PRL_CHECK(!has_grad(var), "value {} has a gradient already", var.id);
  PRL_CHECK(grad.shape.num_elements() == var.value.shape.num_elements() && grad.dtype == var.value.dtype,
            "a gradient of shape {} for a value of shape {}", grad.shape.to_string(), var.value.shape.to_string());
  grads_[static_cast<std::size_t>(var.id)] = grad;
}

Tape::Target Tape::target(const Var& var) {
  PRL_CHECK(var.id >= 0, "no gradient is wanted here");
  TensorView& grad = grads_[static_cast<std::size_t>(var.id)];
  if (grad.data != nullptr) return {grad, true};
  grad = arena_.take(var.value.shape, var.value.dtype);
  return {grad, false};
}

void Tape::backward() {
  while (!rules_.empty()) {
    const std::function<void()> rule = std::move(rules_.back());
    rules_.pop_back();
    rule();
  }
}

void Tape::clear() {
  rules_.clear();
  values_.clear();
  grads_.clear();
  marks_.clear();
}

void Remake::end_block(Tape& tape) {
  if (ops_.empty()) return;
  tape.record([ops = std::move(ops_)] {
    for (const std::function<void()>& op : ops) op();
  });
  ops_.clear();
}

Var checkpoint(Frame& frame, const Var& x, Shape out_shape, CheckpointBody body) {
  const TensorView out = frame.take(out_shape, x.value.dtype);
  Arena* arena = frame.tape != nullptr ? &frame.tape->arena() : &frame.arena;
  const Arena::Mark mark = arena->mark();
  {
    Frame plain{frame.ctx, *arena, nullptr};
    body(plain, Var{x.value, -1}, out);
  }
  arena->release(mark);
  const Var result = frame.variable(out);
  if (frame.tape == nullptr) return result;

  Tape* tape = frame.tape;
  ops::OpContext* ctx = &frame.ctx;
  tape->record([tape, ctx, arena, x, result, out_shape, body = std::move(body)] {
    const TensorView dy = tape->grad(result);
    if (dy.data == nullptr) return;
    // Room for dx outside of the scratch memory, unless the block hands dy itself through.
    const Arena::Mark scratch = arena->mark();
    Tape inner(*arena);
    inner.set_token_blocks(tape->num_token_blocks());
    Frame again{*ctx, *arena, &inner, true};
    const Var leaf = inner.variable(x.value);
    const Var y = body(again, leaf, arena->take(out_shape, x.value.dtype));
    inner.set_grad(y, dy);
    inner.backward();
    const TensorView dx = inner.grad(leaf);
    PRL_CHECK(dx.data != nullptr, "a checkpointed block gave its input no gradient");
    PRL_CHECK(!arena->is_above(scratch, dx.data), "a checkpointed block must hand its input's gradient through (a residual stream)");
    if (x.id >= 0) tape->set_grad(x, dx);
    arena->release(scratch);
  });
  return result;
}

}  // namespace prl::autograd
