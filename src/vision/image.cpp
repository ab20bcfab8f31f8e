#include "vision/image.hpp"

#include <jpeglib.h>
#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <span>

#include "base/base64.hpp"
#include "base/error.hpp"

namespace prl::vision {
namespace {

constexpr std::string_view kPngMark = "\x89PNG\r\n\x1a\n", kJpegMark = "\xff\xd8\xff";

void check_size(std::int64_t width, std::int64_t height, const ImageLimits& limits) {
  if (width < 1 || height < 1 || width > limits.max_side || height > limits.max_side || width * height > limits.max_pixels)
    fail(ErrorCode::kInvalidArgument, "an image of {} x {} pixels; at most {} pixels and sides of {} are read", width, height,
         limits.max_pixels, limits.max_side);
}

/// One colour over white, in the steps in which Pillow composes.
std::uint8_t over_white(std::uint32_t value, std::uint32_t alpha) {
  const std::uint32_t sum = 128 * (value * alpha + 255 * (255 - alpha)) + (0x80U << 7);
  return static_cast<std::uint8_t>((((sum >> 8) + sum) >> 8) >> 7);
}

/// Rows of 4 channels as 3.
void drop_alpha(const std::vector<std::uint8_t>& rgba, Image& image) {
  for (std::size_t i = 0; i < rgba.size() / 4; ++i)
    for (std::size_t c = 0; c < 3; ++c) image.rgb[3 * i + c] = over_white(rgba[4 * i + c], rgba[4 * i + 3]);
}

struct PngSource {
  std::string_view left;
  std::string message;
};

void png_failed(png_structp png, png_const_charp message) {
  static_cast<PngSource*>(png_get_error_ptr(png))->message = message;
  longjmp(png_jmpbuf(png), 1);
}
void png_warned(png_structp, png_const_charp) {}
void png_take(png_structp png, png_bytep out, std::size_t count) {
  auto* source = static_cast<PngSource*>(png_get_io_ptr(png));
  if (count > source->left.size()) png_error(png, "the file ends early");
  std::memcpy(out, source->left.data(), count);
  source->left.remove_prefix(count);
}

/// Everything that a failure jumps over is held outside: libpng leaves by longjmp, which runs no destructors.
struct PngWork {
  PngSource source;
  Image image;
  std::vector<std::uint8_t> pixels;
  std::vector<png_bytep> rows;
  std::int64_t width = 0, height = 0;
  bool has_alpha = false, is_over_limit = false;
};

bool read_png(PngWork& work, const ImageLimits& limits) {
  png_structp png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &work.source, png_failed, png_warned);
  png_infop info = png != nullptr ? png_create_info_struct(png) : nullptr;
  if (info == nullptr || setjmp(png_jmpbuf(png)) != 0) {
    png_destroy_read_struct(&png, &info, nullptr);
    return false;
  }
  png_set_user_limits(png, static_cast<png_uint_32>(limits.max_side), static_cast<png_uint_32>(limits.max_side));
  png_set_chunk_malloc_max(png, limits.max_bytes);
  png_set_read_fn(png, &work.source, png_take);
  png_read_info(png, info);
  work.width = png_get_image_width(png, info);
  work.height = png_get_image_height(png, info);
  work.is_over_limit = work.width * work.height > limits.max_pixels;
  if (work.is_over_limit) png_error(png, "too many pixels");
  const int type = png_get_color_type(png, info);
  if (png_get_bit_depth(png, info) == 16) png_set_strip_16(png);
  if (type == PNG_COLOR_TYPE_PALETTE) png_set_palette_to_rgb(png);
  if (type == PNG_COLOR_TYPE_GRAY && png_get_bit_depth(png, info) < 8) png_set_expand_gray_1_2_4_to_8(png);
  if (png_get_valid(png, info, PNG_INFO_tRNS) != 0) png_set_tRNS_to_alpha(png);
  if (type == PNG_COLOR_TYPE_GRAY || type == PNG_COLOR_TYPE_GRAY_ALPHA) png_set_gray_to_rgb(png);
  png_set_interlace_handling(png);
  png_read_update_info(png, info);
  const std::size_t channels = png_get_channels(png, info), row_bytes = png_get_rowbytes(png, info);
  if (channels != 3 && channels != 4) png_error(png, "a number of channels that is neither 3 nor 4");
  work.has_alpha = channels == 4;
  work.pixels.resize(row_bytes * static_cast<std::size_t>(work.height));
  for (std::int64_t y = 0; y < work.height; ++y) work.rows.push_back(work.pixels.data() + static_cast<std::size_t>(y) * row_bytes);
  png_read_image(png, work.rows.data());
  png_read_end(png, nullptr);
  png_destroy_read_struct(&png, &info, nullptr);
  return true;
}

Image decode_png(std::string_view bytes, const ImageLimits& limits) {
  PngWork work{.source = {bytes, {}}, .image = {}, .pixels = {}, .rows = {}};
  const bool is_read = read_png(work, limits);
  if (work.is_over_limit) check_size(work.width, work.height, limits);
  if (!is_read) fail(ErrorCode::kInvalidArgument, "a PNG file that cannot be read: {}", work.source.message);
  check_size(work.width, work.height, limits);
  Image image{.width = work.width, .height = work.height, .rgb = {}};
  if (!work.has_alpha) {
    image.rgb = std::move(work.pixels);
    return image;
  }
  image.rgb.resize(work.pixels.size() / 4 * 3);
  drop_alpha(work.pixels, image);
  return image;
}

struct JpegFailure {
  jpeg_error_mgr base;
  std::jmp_buf back;
  char message[JMSG_LENGTH_MAX];
};

void jpeg_failed(j_common_ptr jpeg) {
  auto* failure = reinterpret_cast<JpegFailure*>(jpeg->err);
  jpeg->err->format_message(jpeg, failure->message);
  std::longjmp(failure->back, 1);
}
void jpeg_warned(j_common_ptr jpeg, int level) { jpeg->err->num_warnings += level < 0 ? 1 : 0; }

struct JpegWork {
  jpeg_decompress_struct jpeg{};
  JpegFailure failure{};
  Image image;
  bool is_over_limit = false, is_cmyk = false;
};

bool read_jpeg(JpegWork& work, std::string_view bytes, const ImageLimits& limits) {
  jpeg_decompress_struct& jpeg = work.jpeg;
  jpeg.err = jpeg_std_error(&work.failure.base);
  work.failure.base.error_exit = jpeg_failed;
  work.failure.base.emit_message = jpeg_warned;
  if (setjmp(work.failure.back) != 0) {
    jpeg_destroy_decompress(&jpeg);
    return false;
  }
  jpeg_create_decompress(&jpeg);
  jpeg.mem->max_memory_to_use = static_cast<long>(16 * limits.max_pixels);
  jpeg_mem_src(&jpeg, reinterpret_cast<const unsigned char*>(bytes.data()), static_cast<unsigned long>(bytes.size()));
  jpeg_read_header(&jpeg, TRUE);
  work.image.width = jpeg.image_width;
  work.image.height = jpeg.image_height;
  work.is_cmyk = jpeg.jpeg_color_space == JCS_CMYK || jpeg.jpeg_color_space == JCS_YCCK;
  work.is_over_limit =
      work.image.width > limits.max_side || work.image.height > limits.max_side || work.image.width * work.image.height > limits.max_pixels;
  if (work.is_cmyk || work.is_over_limit) {
    jpeg_destroy_decompress(&jpeg);
    return false;
  }
  jpeg.out_color_space = JCS_RGB;
  jpeg_start_decompress(&jpeg);
  const std::size_t row_bytes = static_cast<std::size_t>(3 * work.image.width);
  work.image.rgb.resize(row_bytes * static_cast<std::size_t>(work.image.height));
  while (jpeg.output_scanline < jpeg.output_height) {
    JSAMPROW row = work.image.rgb.data() + jpeg.output_scanline * row_bytes;
    jpeg_read_scanlines(&jpeg, &row, 1);
  }
  jpeg_finish_decompress(&jpeg);
  jpeg_destroy_decompress(&jpeg);
  return true;
}

Image decode_jpeg(std::string_view bytes, const ImageLimits& limits) {
  JpegWork work;
  const bool is_read = read_jpeg(work, bytes, limits);
  if (work.is_over_limit) check_size(work.image.width, work.image.height, limits);
  if (work.is_cmyk) fail(ErrorCode::kInvalidArgument, "a JPEG file of four inks (CMYK); wanted one of grey or of three colours");
  if (!is_read) fail(ErrorCode::kInvalidArgument, "a JPEG file that cannot be read: {}", work.failure.message);
  // What a damaged file leaves out comes as grey, with a warning.
  if (work.failure.base.num_warnings > 0)
    fail(ErrorCode::kInvalidArgument, "a JPEG file that is damaged or ends early ({} warnings)", work.failure.base.num_warnings);
  return std::move(work.image);
}

}  // namespace

std::string bytes_of_data_uri(std::string_view uri, const ImageLimits& limits) {
  const auto begins = [&](std::string_view with) { return uri.substr(0, with.size()) == with; };
  if (begins("http://") || begins("https://"))
    fail(ErrorCode::kInvalidArgument,
         "an image of another host: this server makes no requests of its own; send the file as a data: URI (data:image/png;base64,...)");
  if (!begins("data:")) fail(ErrorCode::kInvalidArgument, "wanted a data: URI (data:image/png;base64,...), found '{}'", uri.substr(0, 32));
  const std::size_t comma = uri.find(',');
  const std::string_view head = uri.substr(0, comma == std::string_view::npos ? std::min<std::size_t>(uri.size(), 64) : comma);
  if (comma == std::string_view::npos ||
      (head != "data:image/png;base64" && head != "data:image/jpeg;base64" && head != "data:image/jpg;base64"))
    fail(ErrorCode::kInvalidArgument, "wanted 'data:image/png;base64,' or 'data:image/jpeg;base64,', found '{}'", head.substr(0, 64));
  const std::string_view body = uri.substr(comma + 1);
  if (body.size() / 4 * 3 > limits.max_bytes + 3)
    fail(ErrorCode::kInvalidArgument, "an image file of {} bytes; at most {} are read", body.size() / 4 * 3, limits.max_bytes);
  try {
    return from_base64(body);
  } catch (const Error& error) {
    fail(ErrorCode::kInvalidArgument, "{}", error.what());
  }
}

Image decode_image(std::string_view bytes, const ImageLimits& limits) {
  if (bytes.size() > limits.max_bytes)
    fail(ErrorCode::kInvalidArgument, "an image file of {} bytes; at most {} are read", bytes.size(), limits.max_bytes);
  if (bytes.starts_with(kPngMark)) return decode_png(bytes, limits);
  if (bytes.starts_with(kJpegMark)) return decode_jpeg(bytes, limits);
  fail(ErrorCode::kInvalidArgument, "a file that is neither PNG nor JPEG");
}

std::string encode_png(const Image& image) {
  PRL_CHECK(image.width > 0 && image.height > 0 && static_cast<std::int64_t>(image.rgb.size()) == 3 * image.width * image.height,
            "a picture of {} x {} pixels in {} bytes", image.width, image.height, image.rgb.size());
  png_image png{};
  png.version = PNG_IMAGE_VERSION;
  png.width = static_cast<png_uint_32>(image.width);
  png.height = static_cast<png_uint_32>(image.height);
  png.format = PNG_FORMAT_RGB;
  png_alloc_size_t size = 0;
  std::string bytes;
  bool is_written = png_image_write_to_memory(&png, nullptr, &size, 0, image.rgb.data(), 0, nullptr) != 0;
  if (is_written) {
    bytes.resize(size);
    is_written = png_image_write_to_memory(&png, bytes.data(), &size, 0, image.rgb.data(), 0, nullptr) != 0;
  }
  const std::string failure = png.message;
  png_image_free(&png);
  if (!is_written) fail(ErrorCode::kInternal, "a picture of {} x {} pixels as PNG: {}", image.width, image.height, failure);
  bytes.resize(size);
  return bytes;
}

std::string png_data_uri(std::string_view bytes) { return "data:image/png;base64," + to_base64(bytes); }

}  // namespace prl::vision
