#pragma once

#include "vision/image.hpp"

namespace prl::vision {

/// The picture at another size, bicubic (a = -0.5) with a support that grows where it shrinks (antialiasing): the numbers of torchvision's
/// resize of bytes, whose weights are 16-bit integers, first along rows and then along columns, rounded to bytes in between. Pillow's
/// weights have more bits, so that its bytes may differ by one.
Image resize_bicubic(const Image& image, std::int64_t width, std::int64_t height);

}  // namespace prl::vision
