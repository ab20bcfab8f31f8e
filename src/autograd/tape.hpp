#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "autograd/arena.hpp"
#include "ops/context.hpp"

namespace prl::autograd {

/// A value of the forward pass. `id` is the index of its gradient on the tape that made it; -1: no gradient is needed.
struct Var {
  TensorView value;
  std::int32_t id = -1;
  bool is_defined() const noexcept { return value.data != nullptr; }
};

/// The backward rules of one forward pass, in the order of their forward ops.
///
/// A gradient is allocated when the first rule writes it, in the dtype of its value (activations: the compute dtype); parameters'
/// gradients are fp32 and owned by the caller. Rules run once, newest first, on the thread of backward().
/// Invariants
///   1. An aliased gradient (set_grad) may be accumulated into in place later, so an op may alias its output's gradient to
///      an input only if every other use of that input was recorded before it.
///   2. Memory that the rules of a block allocate is freed with the block; what outlives it must be allocated outside (checked).
class Tape {
 public:
  explicit Tape(Arena& arena) : arena_(arena) {}
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  /// Registers a value that needs a gradient.
  Var variable(TensorView value);
  void record(std::function<void()> rule) { rules_.push_back(std::move(rule)); }
  /// Rules recorded between these two share scratch memory, freed when the first of them has run (they run in reverse).
  void begin_block();
  void end_block();

  /// data == nullptr while nothing was written.
  TensorView grad(const Var& var) const;
  bool has_grad(const Var& var) const { return grad(var).data != nullptr; }
  /// Sets the gradient of `var`, which must not have one.
  void set_grad(const Var& var, TensorView grad);
  struct Target {
    TensorView view;
    bool accumulate = false;  ///< view already holds a gradient: add to it
  };
  /// Where to write the gradient of `var`; allocated on first use.
  Target target(const Var& var);

  /// Runs all rules, newest first, and discards them. Gradients stay readable until clear().
  void backward();
  void clear();
  bool is_empty() const noexcept { return rules_.empty(); }
  Arena& arena() noexcept { return arena_; }
  /// Blocks of tokens over which rules form gradients of parameters (sum_over_blocks).
  int num_token_blocks() const noexcept { return num_token_blocks_; }
  void set_token_blocks(int num_blocks) noexcept { num_token_blocks_ = num_blocks; }

 private:
  Arena& arena_;
  int num_token_blocks_ = 1;
  std::vector<TensorView> values_;
  std::vector<TensorView> grads_;
  std::vector<std::function<void()>> rules_;
  std::vector<Arena::Mark> marks_;
};

/// Selective recomputation: values that a block does not save. All such blocks share one arena, and the ops that made the values run again
/// before the block's backward rules read them.
///
/// A block is what is recorded between begin_block() and end_block(). The arena is used for nothing else and is not reset while a tape
/// refers to it: every block allocates the same sizes, so each value has the same address in both runs.
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

/// Where one forward pass runs: ops context, memory for activations, and the tape (nullptr: nothing is saved for a backward pass).
struct Frame {
  ops::OpContext& ctx;
  Arena& arena;
  Tape* tape = nullptr;
  bool is_recompute = false;  ///< a checkpointed block runs again: its output value itself is not needed
  Remake* remake = nullptr;   ///< values are recomputed instead of saved

  TensorView take(Shape shape, DType dtype) { return (remake != nullptr ? remake->arena() : arena).take(shape, dtype); }
  /// For a value that is cheaper to save than to recompute.
  TensorView keep(Shape shape, DType dtype) { return arena.take(shape, dtype); }
  /// Runs `op`, which writes what take() gave, and records it for recomputation if the values are not saved.
  template <typename Op>
  void run(Op op) {
    op();
    if (remake != nullptr) remake->add(std::move(op));
  }
  /// The same pass with its values in other memory.
  Frame in(Arena& memory) const { return {ctx, memory, tape, is_recompute, remake}; }
  /// The same frame for values that `with` recomputes; nullptr: for values that are saved.
  Frame remaking(Remake* with) const { return {ctx, arena, tape, is_recompute, with}; }
  /// `value` as a Var of the tape, if there is one.
  Var variable(TensorView value) { return tape != nullptr ? tape->variable(value) : Var{value, -1}; }
};

/// Activation checkpointing: runs `body(frame, x, out)` and saves x and out only; the backward pass runs it again to recompute its
/// activations. Both runs allocate in the tape's arena; `out` is the frame's.
///
/// `body` writes its result into `out` (of the given shape) and returns its Var; in the second run frame.is_recompute is set and the
/// value need not be written, but its backward rules must be recorded.
using CheckpointBody = std::function<Var(Frame& frame, const Var& x, TensorView out)>;
Var checkpoint(Frame& frame, const Var& x, Shape out_shape, CheckpointBody body);

}  // namespace prl::autograd
