#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace prl::vision {

/// Red, green and blue of each pixel, row after row.
struct Image {
  std::int64_t width = 0, height = 0;
  std::vector<std::uint8_t> rgb;
};

struct ImageLimits {
  std::size_t max_bytes = std::size_t{20} << 20;    ///< of a file
  std::int64_t max_pixels = std::int64_t{1} << 25;  ///< of a picture, before it is brought to the tower's size
  std::int64_t max_side = std::int64_t{1} << 16;    ///< pixels
};

/// The bytes that "data:image/png;base64,..." (or image/jpeg) holds. Error{kInvalidArgument} that says what was found: another scheme
/// (http and https among them: nothing is fetched), a type or an encoding that is not known, more bytes than allowed.
std::string bytes_of_data_uri(std::string_view uri, const ImageLimits& limits);

/// A PNG or JPEG file, by its first bytes. Grey is widened, what is transparent lies on white, 16 bits a channel become the upper 8, and
/// no orientation of EXIF is applied. Error{kInvalidArgument} that says why a file cannot be read, or which limit it passes.
Image decode_image(std::string_view bytes, const ImageLimits& limits);

/// A PNG file of the picture: the same pixels when it is decoded.
std::string encode_png(const Image& image);
/// "data:image/png;base64,..." of a PNG file.
std::string png_data_uri(std::string_view bytes);

}  // namespace prl::vision
