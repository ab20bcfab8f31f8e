#include "autograd/arena.hpp"

#include <algorithm>

namespace prl::autograd {
namespace {
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kMinBlockBytes = std::size_t{1} << 20;
}  // namespace

Arena::~Arena() {
  for (const Block& block : blocks_) runtime_->deallocate(block.data, block.size);
}

std::size_t Arena::capacity() const noexcept {
  std::size_t total = 0;
  for (const Block& block : blocks_) total += block.size;
  return total;
}

void Arena::add_block(std::size_t size) {
  blocks_.push_back({static_cast<std::byte*>(runtime_->allocate(size)), size, 0});
  ++num_allocations_;
}

void Arena::replace_blocks(std::size_t size) {
  for (const Block& block : blocks_) runtime_->deallocate(block.data, block.size);
  blocks_.clear();
  if (size > 0) add_block(size);
}

TensorView Arena::take(Shape shape, DType dtype) {
  const std::size_t wanted = static_cast<std::size_t>(shape.num_elements()) * size_of(dtype);
  const std::size_t bytes = (wanted + kAlignment - 1) / kAlignment * kAlignment;
  while (block_ < blocks_.size() && offset_ + bytes > blocks_[block_].size) {
    blocks_[block_++].filled = offset_;
    offset_ = 0;
  }
  if (block_ == blocks_.size()) {
    // Growing by a share of what is there keeps the number of blocks logarithmic and little unused.
    add_block(std::max({kMinBlockBytes, bytes, capacity() / 8}));
    offset_ = 0;
  }
  std::byte* data = blocks_[block_].data + offset_;
  offset_ += bytes;
  used_ += bytes;
  most_used_ = std::max(most_used_, used_);
  return TensorView{data, shape, dtype, runtime_->device(), shape.num_cols()};
}

void Arena::release(Mark mark) noexcept {
  block_ = mark.block;
  offset_ = mark.offset;
  used_ = mark.used;
}

void Arena::reset() {
  // Memory that has been touched is worth keeping where it is: a new block of the same size costs as many page faults and cleared pages.
  if (blocks_.size() > 1 && capacity() > most_used_ + most_used_ / 4) replace_blocks(most_used_);
  release({});
}

void Arena::fit() {
  replace_blocks(most_used_);
  release({});
}

void Arena::expect(std::size_t bytes) {
  if (blocks_.size() > 1 || capacity() < bytes) replace_blocks(std::max(bytes, capacity()));
  release({});
}

std::vector<Arena::Span> Arena::spans() const {
  std::vector<Span> out;
  for (std::size_t i = 0; i < blocks_.size() && i <= block_; ++i)
    if (const std::size_t size = i == block_ ? offset_ : blocks_[i].filled; size > 0) out.push_back({blocks_[i].data, size});
  return out;
}

bool Arena::is_above(Mark mark, const void* pointer) const noexcept {
  const auto* p = static_cast<const std::byte*>(pointer);
  for (std::size_t i = mark.block; i < blocks_.size() && i <= block_; ++i) {
    const std::byte* begin = blocks_[i].data + (i == mark.block ? mark.offset : 0);
    const std::byte* end = blocks_[i].data + (i == block_ ? offset_ : blocks_[i].size);
    if (p >= begin && p < end) return true;
  }
  return false;
}

}  // namespace prl::autograd
