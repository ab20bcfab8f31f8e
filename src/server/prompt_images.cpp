#include "server/prompt_images.hpp"

#include <string>

#include "server/prepared_request.hpp"
#include "vision/prompt.hpp"

namespace prl::server {
namespace json = boost::json;
namespace {

constexpr std::string_view kImagePart = "image_url";

/// body(part, index of the message, index of the part) for each image.
template <typename Body>
void for_each_image(const json::array& messages, const Body& body) {
  for (std::size_t m = 0; m < messages.size(); ++m) {
    const json::object* message = messages[m].if_object();
    const json::value* content = message != nullptr ? message->if_contains("content") : nullptr;
    const json::array* parts = content != nullptr ? content->if_array() : nullptr;
    for (std::size_t p = 0; parts != nullptr && p < parts->size(); ++p) {
      const json::object* part = (*parts)[p].if_object();
      const json::value* type = part != nullptr ? part->if_contains("type") : nullptr;
      if (type != nullptr && type->is_string() && std::string_view(type->get_string()) == kImagePart) body(*part, m, p);
    }
  }
}

}  // namespace

bool has_images(const json::array& messages) {
  bool found = false;
  for_each_image(messages, [&](const json::object&, std::size_t, std::size_t) { found = true; });
  return found;
}

PixelsList read_images(const ServerContext& context, const json::array& messages) {
  const ImageInput& options = context.options.images;
  PixelsList out;
  for_each_image(messages, [&](const json::object& part, std::size_t m, std::size_t p) {
    const std::string param = fmt::format("messages[{}].content[{}].image_url", m, p);
    if (options.processor == nullptr) net::fail_param(param, param + ": this model has no vision tower; send text alone");
    if (out.size() == options.max_images)
      net::fail_param(param, fmt::format("{}: more than {} images in one request", param, options.max_images));
    const json::value* value = part.if_contains(kImagePart);
    if (value != nullptr && value->is_object()) value = value->get_object().if_contains("url");
    if (value == nullptr || !value->is_string())
      net::fail_param(param, param + ": wanted an object with the string 'url', a data: URI (data:image/png;base64,...)");
    try {
      const std::string bytes = vision::bytes_of_data_uri(std::string_view(value->get_string()), options.limits);
      out.push_back(options.processor->process(vision::decode_image(bytes, options.limits)));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument) throw;
      net::fail_param(param, param + ": " + error.what());
    }
  });
  return out;
}

std::vector<wire::PromptImage> place_images(const ServerContext& context, const PixelsList& images, std::vector<std::int32_t>& ids) {
  try {
    std::vector<wire::PromptImage> placed =
        vision::place_images(*context.options.images.processor, context.options.images.token_id, images, ids);
    check_prompt_fits(context, static_cast<std::int64_t>(ids.size()));
    return placed;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    net::fail_param("messages", std::string("messages: ") + error.what());
  }
}

}  // namespace prl::server
