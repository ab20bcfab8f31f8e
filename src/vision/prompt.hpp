#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "vision/image_processor.hpp"

namespace prl::vision {

using PixelsPtr = std::shared_ptr<const wire::ImagePixels>;

/// Widens each placeholder of a rendered prompt to as many as its image has tokens, and says where they stand. Error{kInvalidArgument} if
/// there are not as many placeholders as images: `ids` are as they were then.
std::vector<wire::PromptImage> place_images(const ImageProcessor& processor, std::int32_t placeholder, std::span<const PixelsPtr> images,
                                            std::vector<std::int32_t>& ids);

/// Where images stand in a prompt whose placeholders are wide already: each on the first run that is long enough, behind the one before.
/// Error{kInvalidArgument} if there is none.
std::vector<wire::PromptImage> locate_images(const ImageProcessor& processor, std::int32_t placeholder, std::span<const PixelsPtr> images,
                                             std::span<const std::int32_t> ids);

/// Widens what belongs to each id of a prompt in the same way.
template <typename T>
void widen_at(std::span<const wire::PromptImage> placed, std::vector<T>& of_ids) {
  for (const wire::PromptImage& image : placed) {
    const T value = of_ids.at(static_cast<std::size_t>(image.first));
    of_ids.insert(of_ids.begin() + static_cast<std::ptrdiff_t>(image.first), static_cast<std::size_t>(image.num_tokens() - 1), value);
  }
}

/// The picture's hash as 32 hex digits.
std::string hash_text(const wire::ImagePixels& pixels);

/// body(part, "messages[0].content[1]") for each part of a message that is an image, in order: those of the types image_url and image.
void for_each_image(const boost::json::array& messages, const std::function<void(const boost::json::object&, const std::string&)>& body);
bool has_images(const boost::json::array& messages);
/// The address of an image: the member image_url (a text, or an object with `url`) or image. Error{kInvalidArgument} if there is none.
std::string_view uri_of_part(const boost::json::object& part);

/// Pictures of conversations as one model takes them. Pictures that somebody still has are not decoded again.
/// Threads  any number.
class PromptImages {
 public:
  struct Options {
    std::shared_ptr<const ImageProcessor> processor;
    std::int32_t placeholder = -1;
    std::size_t max_images = 16;  ///< of a conversation
    ImageLimits limits = {};
  };
  explicit PromptImages(Options options) : options_(std::move(options)) {}
  const Options& options() const noexcept { return options_; }
  /// Of a PNG or JPEG file. Error{kInvalidArgument} of decode_image and process.
  PixelsPtr read_file(std::string_view bytes) const;
  /// Those of messages, in order, as data: URIs. Error{kInvalidArgument} naming the part: too many images, another address, a picture that
  /// cannot be read.
  std::vector<PixelsPtr> of_messages(const boost::json::array& messages) const;
  std::vector<wire::PromptImage> place(std::span<const PixelsPtr> images, std::vector<std::int32_t>& ids) const {
    return place_images(*options_.processor, options_.placeholder, images, ids);
  }

 private:
  Options options_;
  mutable std::mutex mutex_;
  mutable std::map<std::array<std::uint64_t, 2>, std::weak_ptr<const wire::ImagePixels>> known_;  ///< by hashes of the file
};

}  // namespace prl::vision
