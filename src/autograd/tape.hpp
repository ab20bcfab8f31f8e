#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "autograd/arena.hpp"
#include "ops/context.hpp"

namespace prl::autograd {

/// A value of the forward pass. `id` names its gradient on the tape that made it; -1: none is wanted.
struct Var {
  TensorView value;
  std::int32_t id = -1;
  bool is_defined() const noexcept { return value.data != nullptr; }
};

/// The backward rules of one forward pass, in the order of their forward ops.
///
/// A gradient is made when the first rule writes it, in the dtype of its value (activations: the compute dtype); parameters'
/// gradients are fp32 and belong to the caller. Rules run once, newest first, on the thread of backward().
/// Invariants
///   1. A gradient handed on by alias (set_grad) may be added to in place later, so an op may alias its output's gradient to
///      an input only if every other use of that input was recorded before the one it is aliased for.
///   2. Memory taken by the rules of a block ends with the block; what leaves it must have been taken outside (checked).
class Tape {
 public:
  explicit Tape(Arena& arena) : arena_(arena) {}
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  /// A value whose gradient is wanted.
  Var variable(TensorView value);
  void record(std::function<void()> rule) { rules_.push_back(std::move(rule)); }
  /// Rules recorded between these two share scratch memory that ends when the first of them has run.
  void begin_block();
  void end_block();

  /// data == nullptr while nothing was written.
  TensorView grad(const Var& var) const;
  bool has_grad(const Var& var) const { return grad(var).data != nullptr; }
  /// Hands `grad` to `var`, which must not have one.
  void set_grad(const Var& var, TensorView grad);
  struct Target {
    TensorView view;
    bool accumulate = false;  ///< view already holds a gradient: add to it
  };
  /// Where to write the gradient of `var`; made on first use.
  Target target(const Var& var);

  /// Runs all rules, newest first, and forgets them. Gradients stay readable until clear().
  void backward();
  void clear();
  bool is_empty() const noexcept { return rules_.empty(); }
  Arena& arena() noexcept { return arena_; }

 private:
  Arena& arena_;
  std::vector<TensorView> values_;
  std::vector<TensorView> grads_;
  std::vector<std::function<void()>> rules_;
  std::vector<Arena::Mark> marks_;
};

/// Values that a block does not keep: they lie in memory that all such blocks share, and the ops that made them run again before
/// the block's rules read them.
///
/// A block is what is recorded between begin_block() and end_block(). The arena is nobody else's, and is not reset while a tape
/// refers to it: every block takes the same sizes, so that each value has the same address in both runs.
class Remake {
 public:
  explicit Remake(Arena& arena) : arena_(arena) {}
  Arena& arena() noexcept { return arena_; }
  void begin_block() { arena_.release({}); }
  void add(std::function<void()> op) { ops_.push_back(std::move(op)); }
  /// Call after the block's last rule.
  void end_block(Tape& tape);

 private:
  Arena& arena_;
  std::vector<std::function<void()>> ops_;
};

/// Where one forward pass runs: ops context, memory for activations, and the tape (nullptr: nothing is kept for a backward pass).
struct Frame {
  ops::OpContext& ctx;
  Arena& arena;
  Tape* tape = nullptr;
  bool is_recompute = false;  ///< a block's activations are made again: its output value itself is not needed
  Remake* remake = nullptr;   ///< what is taken here need not be kept

  TensorView take(Shape shape, DType dtype) { return (remake != nullptr ? remake->arena() : arena).take(shape, dtype); }
  /// For a value that is cheaper to keep than to make again.
  TensorView keep(Shape shape, DType dtype) { return arena.take(shape, dtype); }
  /// Runs `op`, which fills what was taken, and sees to its running again if that is not kept.
  template <typename Op>
  void run(Op op) {
    op();
    if (remake != nullptr) remake->add(std::move(op));
  }
  /// The same pass, with its values in other memory.
  Frame in(Arena& memory) const { return {ctx, memory, tape, is_recompute, remake}; }
  /// The same place for values that `with` makes again; nullptr: for values that are kept.
  Frame remaking(Remake* with) const { return {ctx, arena, tape, is_recompute, with}; }
  /// `value` as a Var of the tape, if there is one.
  Var variable(TensorView value) { return tape != nullptr ? tape->variable(value) : Var{value, -1}; }
};

/// Runs `body(frame, x, out)` keeping x and out only; the backward pass runs it again to have its activations. Both runs have their
/// scratch memory from the tape's arena; `out` is the frame's.
///
/// `body` writes its result into `out` (a copy of its shape is given) and returns the Var of it; in the repeated run
/// frame.is_recompute is set and the value need not be written, its rules must be recorded all the same.
using CheckpointBody = std::function<Var(Frame& frame, const Var& x, TensorView out)>;
Var checkpoint(Frame& frame, const Var& x, Shape out_shape, CheckpointBody body);

}  // namespace prl::autograd
