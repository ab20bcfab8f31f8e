#pragma once

#include <boost/json/array.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "server/server_context.hpp"
#include "wire/prompt_image.hpp"

namespace prl::server {

using PixelsList = std::vector<std::shared_ptr<const wire::ImagePixels>>;

/// Whether a part of a message is an image. Knows no other kinds.
bool has_images(const boost::json::array& messages);
/// The images of messages in their order, as the model takes them. Throws net::HttpError naming the part: a model without a vision tower,
/// too many images, what vision::bytes_of_data_uri and decode_image refuse.
PixelsList read_images(const ServerContext& context, const boost::json::array& messages);
/// Widens each placeholder of a rendered prompt to as many as its image has tokens, and says where they stand. Throws net::HttpError if
/// there are not as many placeholders as images, and the canonical context overflow.
std::vector<wire::PromptImage> place_images(const ServerContext& context, const PixelsList& images, std::vector<std::int32_t>& ids);

}  // namespace prl::server
