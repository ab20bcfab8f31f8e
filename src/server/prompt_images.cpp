#include "server/prompt_images.hpp"

#include <string>

#include "server/prepared_request.hpp"
#include "vision/prompt.hpp"

namespace prl::server {
namespace json = boost::json;

PixelsList read_images(const ServerContext& context, const json::array& messages) {
  const ImageInput& options = context.options.images;
  PixelsList out;
  vision::for_each_image(messages, [&](const json::object& part, const std::string& name) {
    const std::string param = name + ".image_url";
    if (options.processor == nullptr) net::fail_param(param, param + ": this model has no vision tower; send text alone");
    if (out.size() == options.max_images)
      net::fail_param(param, fmt::format("{}: more than {} images in one request", param, options.max_images));
    try {
      const std::string bytes = vision::bytes_of_data_uri(vision::uri_of_part(part), options.limits);
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

std::vector<wire::PromptImage> locate_images(const ServerContext& context, const PixelsList& images, std::span<const std::int32_t> ids) {
  try {
    return vision::locate_images(*context.options.images.processor, context.options.images.token_id, images, ids);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    net::fail_param("tokens", std::string("tokens: ") + error.what());
  }
}

namespace {

/// features.<member>.image, a list of `count` entries if that is not negative.
const json::array& feature_list(const json::object& features, const char* member, std::int64_t count) {
  const std::string name = fmt::format("features.{}.image", member);
  const json::value* of_kinds = features.if_contains(member);
  const json::object* kinds = of_kinds != nullptr ? of_kinds->if_object() : nullptr;
  const json::value* value = kinds != nullptr ? kinds->if_contains("image") : nullptr;
  if (value == nullptr || !value->is_array()) net::fail_param(name, name + ": wanted a list with an entry for each image");
  const auto found = static_cast<std::int64_t>(value->get_array().size());
  if (count >= 0 && found != count) net::fail_param(name, fmt::format("{}: {} entries for {} images", name, found, count));
  return value->get_array();
}

std::int64_t place_number(const json::value& place, const char* key, const std::string& name) {
  const json::object* object = place.if_object();
  const json::value* value = object != nullptr ? object->if_contains(key) : nullptr;
  if (value == nullptr || !value->is_int64()) net::fail_param(name, fmt::format("{}: wanted {{offset, length}}", name));
  return value->get_int64();
}

}  // namespace

std::vector<wire::PromptImage> read_features(const ServerContext& context, const json::object& features,
                                             std::span<const std::int32_t> ids) {
  const ImageInput& options = context.options.images;
  if (options.processor == nullptr) net::fail_param("features", "features: this model has no vision tower; send text alone");
  const json::array& places = feature_list(features, "mm_placeholders", -1);
  const auto count = static_cast<std::int64_t>(places.size());
  if (places.size() > options.max_images)
    net::fail_param("features", fmt::format("features: more than {} images in one request", options.max_images));
  const json::array &data = feature_list(features, "kwargs_data", count), &hashes = feature_list(features, "mm_hashes", count);
  std::vector<wire::PromptImage> out;
  std::int64_t end = 0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const std::string name = fmt::format("features.kwargs_data.image[{}]", i), place = fmt::format("features.mm_placeholders.image[{}]", i);
    if (!data[i].is_string())
      net::fail_param(name,
                      name + ": wanted the picture at the size of the model's tower as a data: URI of a PNG file; tensors are not read");
    try {
      vision::Image picture =
          vision::decode_image(vision::bytes_of_data_uri(std::string_view(data[i].get_string()), options.limits), options.limits);
      out.push_back(options.processor->place(options.processor->take(std::move(picture)), place_number(places[i], "offset", place)));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument) throw;
      net::fail_param(name, name + ": " + error.what());
    }
    const wire::PromptImage& image = out.back();
    if (hashes[i] != json::string(vision::hash_text(*image.pixels)))
      net::fail_param(fmt::format("features.mm_hashes.image[{}]", i),
                      fmt::format("features.mm_hashes.image[{}]: the picture with this model's mean and deviation hashes to {}: is "
                                  "preprocessor_config.json the same on both sides?",
                                  i, vision::hash_text(*image.pixels)));
    if (place_number(places[i], "length", place) != image.num_tokens() || image.first < end ||
        image.first > static_cast<std::int64_t>(ids.size()) - image.num_tokens())
      net::fail_param(place, fmt::format("{}: the picture has {} tokens; wanted so many, behind {} and within the prompt of {}", place,
                                         image.num_tokens(), end, ids.size()));
    for (std::int64_t t = image.first; t < image.end(); ++t)
      if (ids[static_cast<std::size_t>(t)] != options.token_id)
        net::fail_param(place, fmt::format("{}: token {} is no placeholder of images", place, t));
    end = image.end();
  }
  return out;
}

}  // namespace prl::server
