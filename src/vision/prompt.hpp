#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "vision/image_processor.hpp"

namespace prl::vision {

/// Widens each placeholder of a rendered prompt to as many as its image has tokens, and says where they stand. Error{kInvalidArgument} if
/// there are not as many placeholders as images: `ids` are as they were then.
std::vector<wire::PromptImage> place_images(const ImageProcessor& processor, std::int32_t placeholder,
                                            std::span<const std::shared_ptr<const wire::ImagePixels>> images,
                                            std::vector<std::int32_t>& ids);

}  // namespace prl::vision
