#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "server/server_context.hpp"
#include "wire/prompt_image.hpp"

namespace prl::server {

using PixelsList = std::vector<std::shared_ptr<const wire::ImagePixels>>;

/// The images of messages in their order, as the model takes them. Throws net::HttpError naming the part: a model without a vision tower,
/// too many images, what vision::bytes_of_data_uri and decode_image refuse.
PixelsList read_images(const ServerContext& context, const boost::json::array& messages);
/// Widens each placeholder of a rendered prompt to as many as its image has tokens, and says where they stand. Throws net::HttpError if
/// there are not as many placeholders as images, and the canonical context overflow.
std::vector<wire::PromptImage> place_images(const ServerContext& context, const PixelsList& images, std::vector<std::int32_t>& ids);

/// The images of a prompt of token ids whose placeholders are wide: `features` with mm_placeholders.image [{offset, length}],
/// kwargs_data.image, the pictures at the tower's size as data: URIs of PNG files, and mm_hashes.image, what they must hash to
/// (vision::hash_text). Throws net::HttpError naming the member.
std::vector<wire::PromptImage> read_features(const ServerContext& context, const boost::json::object& features,
                                             std::span<const std::int32_t> ids);
/// Where the images of messages stand in `ids`, whose placeholders are wide. Throws net::HttpError.
std::vector<wire::PromptImage> locate_images(const ServerContext& context, const PixelsList& images, std::span<const std::int32_t> ids);

}  // namespace prl::server
