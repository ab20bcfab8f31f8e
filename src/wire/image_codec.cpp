#include "wire/image_codec.hpp"

#include <cmath>

#include "base/error.hpp"

namespace prl::wire {
namespace {

constexpr std::size_t kMaxPictures = 1 << 20;
constexpr std::int64_t kMaxSide = 1 << 16;

std::array<float, 3> read_colours(MsgpackReader& in, std::string_view field) {
  const std::vector<float> values = in.reals(field);
  if (values.size() != 3) fail(ErrorCode::kCorrupt, "[msgpack] field {}: wanted 3 numbers, found {}", field, values.size());
  return {values[0], values[1], values[2]};
}

}  // namespace

void write_images(MsgpackWriter& out, const std::vector<PromptImage>& images, PictureTable& table) {
  if (images.empty()) return out.nil();
  out.array(images.size());
  for (const PromptImage& image : images) {
    out.array(4);
    for (const std::int64_t number : {table.number_of(image.pixels), image.first, image.rows, image.cols}) out.integer(number);
  }
}

void write_pictures(MsgpackWriter& out, const PictureTable& table) {
  out.array(table.pictures().size());
  for (const auto& picture : table.pictures()) {
    out.array(5);
    out.integer(picture->height);
    out.integer(picture->width);
    out.binary({reinterpret_cast<const char*>(picture->rgb.data()), picture->rgb.size()});
    out.reals(picture->mean);
    out.reals(picture->deviation);
  }
}

std::vector<PromptImage> read_images(MsgpackReader& in, std::vector<std::size_t>& numbers) {
  std::vector<PromptImage> images;
  if (in.take_nil()) return images;
  const std::size_t count = in.array("images");
  for (std::size_t i = 0; i < count; ++i) {
    if (const std::size_t n = in.array("images"); n != 4)
      fail(ErrorCode::kCorrupt, "[msgpack] field images: wanted picture, first, rows and cols, found {} members", n);
    const std::int64_t number = in.integer("images.picture");
    if (number < 0) fail(ErrorCode::kCorrupt, "[msgpack] field images.picture is {}: must not be negative", number);
    numbers.push_back(static_cast<std::size_t>(number));
    PromptImage& image = images.emplace_back();
    for (std::int64_t* value : {&image.first, &image.rows, &image.cols}) *value = in.integer("images");
  }
  return images;
}

std::vector<std::shared_ptr<const ImagePixels>> read_pictures(MsgpackReader& in) {
  std::vector<std::shared_ptr<const ImagePixels>> pictures;
  const std::size_t count = in.array("pictures");
  if (count > kMaxPictures) fail(ErrorCode::kCorrupt, "[msgpack] field pictures: {} pictures, at most {} are allowed", count, kMaxPictures);
  for (std::size_t i = 0; i < count; ++i) {
    if (const std::size_t n = in.array("pictures"); n != 5)
      fail(ErrorCode::kCorrupt, "[msgpack] field pictures: wanted height, width, bytes, mean and deviation, found {} members", n);
    auto picture = std::make_shared<ImagePixels>();
    for (std::int64_t* side : {&picture->height, &picture->width}) {
      *side = in.integer("pictures");
      if (*side < 1 || *side > kMaxSide)
        fail(ErrorCode::kCorrupt, "[msgpack] field pictures: a side of {} pixels, wanted 1 to {}", *side, kMaxSide);
    }
    const std::string_view bytes = in.binary("pictures.bytes");
    if (bytes.size() != static_cast<std::size_t>(3 * picture->height * picture->width))
      fail(ErrorCode::kCorrupt, "[msgpack] field pictures: {} bytes for {} x {} pixels of 3 bytes", bytes.size(), picture->width,
           picture->height);
    picture->rgb.assign(bytes.begin(), bytes.end());
    picture->mean = read_colours(in, "pictures.mean");
    picture->deviation = read_colours(in, "pictures.deviation");
    for (std::size_t c = 0; c < 3; ++c)
      if (!std::isfinite(picture->mean[c]) || !std::isfinite(picture->deviation[c]) || !(picture->deviation[c] > 0))
        fail(ErrorCode::kCorrupt, "[msgpack] field pictures: mean {} and deviation {}; wanted finite numbers, the second above 0",
             picture->mean[c], picture->deviation[c]);
    picture->hash = hash_of(*picture);
    pictures.push_back(std::move(picture));
  }
  return pictures;
}

void give_pictures(std::vector<PromptImage>& images, const std::vector<std::size_t>& numbers,
                   const std::vector<std::shared_ptr<const ImagePixels>>& pictures) {
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] >= pictures.size())
      fail(ErrorCode::kCorrupt, "[msgpack] field images names picture {} of {}", numbers[i], pictures.size());
    images[i].pixels = pictures[numbers[i]];
  }
}

std::string encode_pictures(const PictureTable& table) {
  MsgpackWriter out;
  write_pictures(out, table);
  return out.take();
}

std::vector<std::shared_ptr<const ImagePixels>> decode_pictures(std::string_view bytes) {
  MsgpackReader in(bytes);
  return read_pictures(in);
}

}  // namespace prl::wire
