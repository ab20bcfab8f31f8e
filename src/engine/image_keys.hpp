#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/sequence.hpp"

namespace prl::engine {

/// Where an image begins in a prompt, and which one it is.
struct ImageMark {
  std::int64_t first = 0;
  std::array<std::uint64_t, 2> hash{};
};
std::vector<ImageMark> marks_of(std::span<const wire::PromptImage> images);

/// What the hash of a sequence's block of tokens [first, first + count) is chained to: `before`, the hash of the block before it, and the
/// images whose tokens begin in it. All tokens of images are alike, so that without this other pictures would find each other's blocks.
BlockHash link_of_block(const Sequence& sequence, BlockHash before, std::int64_t first, std::int64_t count) noexcept;
/// The same of a prompt with these images, ascending.
BlockHash link_of_block(std::span<const ImageMark> images, BlockHash before, std::int64_t first, std::int64_t count) noexcept;

}  // namespace prl::engine
