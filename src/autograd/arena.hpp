#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "tensor/tensor.hpp"

namespace prl::autograd {

/// Stack allocator over a few large device blocks, for activations and their gradients: after the largest step has been seen, a step
/// allocates no device memory.
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
  /// Frees everything taken after `mark`.
  void release(Mark mark) noexcept;
  /// Frees everything. Blocks of which more than a fifth was not needed at the peak are replaced by one of the peak use.
  void reset();
  /// Frees everything and keeps one block of the peak use: growing leaves more than that.
  void fit();
  /// Frees everything and keeps one block of at least `bytes`, so that a well predicted step need not grow.
  void expect(std::size_t bytes);
  /// Memory that was taken and not released.
  struct Span {
    std::byte* data = nullptr;
    std::size_t size = 0;
  };
  std::vector<Span> spans() const;
  /// True if `pointer` was taken after `mark` and not released.
  bool is_above(Mark mark, const void* pointer) const noexcept;

  std::size_t capacity() const noexcept;
  /// Device allocations so far; constant after warm-up.
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
  std::size_t used_ = 0, most_used_ = 0;  ///< bytes taken, without the unused ends of blocks
};

}  // namespace prl::autograd
