#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "tensor/tensor.hpp"

namespace prl::autograd {

/// Stack of scratch tensors over a few large device blocks: activations and their gradients live here, so that a step takes
/// no memory from the device once the largest one has been seen.
///
/// take() moves a cursor up, release() moves it back. One thread at a time. Contents are undefined.
class Arena {
 public:
  struct Mark {
    std::size_t block = 0, offset = 0, used = 0;
  };

  explicit Arena(std::shared_ptr<DeviceRuntime> runtime) : runtime_(std::move(runtime)) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// 64-byte aligned. Error{kOutOfMemory} as the device says.
  TensorView take(Shape shape, DType dtype);
  Mark mark() const noexcept { return {block_, offset_, used_}; }
  /// Everything taken after `mark` ends.
  void release(Mark mark) noexcept;
  /// Everything ends. Blocks that had to be added since the last reset are merged into one.
  void reset();
  /// Everything ends. One block is left, of the most that was in use at once: growing leaves more than that.
  void fit();
  /// Everything ends, and there is one block of at least `bytes`: what was foretold well need not grow.
  void expect(std::size_t bytes);
  /// What was taken and is still held.
  struct Span {
    std::byte* data = nullptr;
    std::size_t size = 0;
  };
  std::vector<Span> spans() const;
  /// True if `pointer` was taken after `mark` and is still held.
  bool is_above(Mark mark, const void* pointer) const noexcept;

  std::size_t capacity() const noexcept;
  /// Blocks asked of the device so far; constant after warm-up.
  std::size_t num_allocations() const noexcept { return num_allocations_; }

 private:
  struct Block {
    std::byte* data = nullptr;
    std::size_t size = 0;
    std::size_t filled = 0;  ///< of a block that the cursor has left
  };
  void add_block(std::size_t size);
  void replace_blocks(std::size_t size);
  std::shared_ptr<DeviceRuntime> runtime_;
  std::vector<Block> blocks_;
  std::size_t block_ = 0, offset_ = 0, num_allocations_ = 0;
  std::size_t used_ = 0, most_used_ = 0;  ///< bytes taken, without what is lost at the ends of blocks
};

}  // namespace prl::autograd
