#pragma once

#include <cstdint>

#include "engine/sequence.hpp"

namespace prl::engine {

/// What the hash of a sequence's block of tokens [first, first + count) is chained to: `before`, the hash of the block before it, and the
/// images whose tokens begin in it. All tokens of images are alike, so that without this other pictures would find each other's blocks.
BlockHash link_of_block(const Sequence& sequence, BlockHash before, std::int64_t first, std::int64_t count) noexcept;

}  // namespace prl::engine
