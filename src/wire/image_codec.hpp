#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "wire/msgpack.hpp"
#include "wire/prompt_image.hpp"

// Images in messages: where they stand is told beside the tokens, [[picture, first, rows, cols], ...], and the pictures follow once for
// all,
// [[height, width, bytes, mean, deviation], ...].
namespace prl::wire {

/// The pictures of a message, each once.
class PictureTable {
 public:
  std::int64_t number_of(const std::shared_ptr<const ImagePixels>& pixels) {
    const auto [at, is_new] = numbers_.try_emplace(pixels->hash, static_cast<std::int64_t>(pictures_.size()));
    if (is_new) pictures_.push_back(pixels);
    return at->second;
  }
  const std::vector<std::shared_ptr<const ImagePixels>>& pictures() const { return pictures_; }

 private:
  std::map<std::array<std::uint64_t, 2>, std::int64_t> numbers_;
  std::vector<std::shared_ptr<const ImagePixels>> pictures_;
};

/// Nil if there are none.
void write_images(MsgpackWriter& out, const std::vector<PromptImage>& images, PictureTable& table);
void write_pictures(MsgpackWriter& out, const PictureTable& table);

/// Where images stand; which picture each of them is goes to `numbers`. Error{kCorrupt} naming the field, as all below.
std::vector<PromptImage> read_images(MsgpackReader& in, std::vector<std::size_t>& numbers);
std::vector<std::shared_ptr<const ImagePixels>> read_pictures(MsgpackReader& in);
void give_pictures(std::vector<PromptImage>& images, const std::vector<std::size_t>& numbers,
                   const std::vector<std::shared_ptr<const ImagePixels>>& pictures);

/// The pictures as a message of their own.
std::string encode_pictures(const PictureTable& table);
std::vector<std::shared_ptr<const ImagePixels>> decode_pictures(std::string_view bytes);

}  // namespace prl::wire
