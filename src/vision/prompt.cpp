#include "vision/prompt.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::vision {
namespace json = boost::json;

std::vector<wire::PromptImage> place_images(const ImageProcessor& processor, std::int32_t placeholder, std::span<const PixelsPtr> images,
                                            std::vector<std::int32_t>& ids) {
  if (const auto num_places = std::ranges::count(ids, placeholder); num_places != static_cast<std::ptrdiff_t>(images.size()))
    fail(ErrorCode::kInvalidArgument,
         "{} images and {} placeholders of images in the rendered text; it may not hold the placeholder's own text", images.size(),
         num_places);
  std::vector<wire::PromptImage> placed;
  std::vector<std::int32_t> wide;
  for (const std::int32_t id : ids) {
    if (id != placeholder) {
      wide.push_back(id);
      continue;
    }
    placed.push_back(processor.place(images[placed.size()], static_cast<std::int64_t>(wide.size())));
    wide.insert(wide.end(), static_cast<std::size_t>(placed.back().num_tokens()), id);
  }
  ids = std::move(wide);
  return placed;
}

std::vector<wire::PromptImage> locate_images(const ImageProcessor& processor, std::int32_t placeholder, std::span<const PixelsPtr> images,
                                             std::span<const std::int32_t> ids) {
  std::vector<wire::PromptImage> placed;
  auto from = ids.begin();
  for (const PixelsPtr& pixels : images) {
    wire::PromptImage image = processor.place(pixels, 0);
    from = std::search_n(from, ids.end(), image.num_tokens(), placeholder);
    if (from == ids.end())
      fail(ErrorCode::kInvalidArgument,
           "image {} has {} tokens, and no {} placeholders in a row stand behind those of the images before it", placed.size(),
           image.num_tokens(), image.num_tokens());
    image.first = from - ids.begin();
    from += image.num_tokens();
    placed.push_back(std::move(image));
  }
  return placed;
}

std::string hash_text(const wire::ImagePixels& pixels) { return fmt::format("{:016x}{:016x}", pixels.hash[0], pixels.hash[1]); }

void for_each_image(const json::array& messages, const std::function<void(const json::object&, const std::string&)>& body) {
  for (std::size_t m = 0; m < messages.size(); ++m) {
    const json::object* message = messages[m].if_object();
    const json::value* content = message != nullptr ? message->if_contains("content") : nullptr;
    const json::array* parts = content != nullptr ? content->if_array() : nullptr;
    for (std::size_t p = 0; parts != nullptr && p < parts->size(); ++p) {
      const json::object* part = (*parts)[p].if_object();
      const json::value* type = part != nullptr ? part->if_contains("type") : nullptr;
      if (type == nullptr || !type->is_string()) continue;
      const std::string_view kind(type->get_string());
      if (kind == "image_url" || kind == "image") body(*part, fmt::format("messages[{}].content[{}]", m, p));
    }
  }
}

bool has_images(const json::array& messages) {
  bool found = false;
  for_each_image(messages, [&](const json::object&, const std::string&) { found = true; });
  return found;
}

std::string_view uri_of_part(const json::object& part) {
  for (const char* key : {"image_url", "image"}) {
    const json::value* value = part.if_contains(key);
    if (value != nullptr && value->is_object()) value = value->get_object().if_contains("url");
    if (value != nullptr && value->is_string()) return value->get_string();
  }
  fail(ErrorCode::kInvalidArgument, "wanted image_url with the string 'url', a data: URI (data:image/png;base64,...)");
}

PixelsPtr PromptImages::read_file(std::string_view bytes) const {
  constexpr std::size_t kMostForgotten = 4096;
  const std::array<std::uint64_t, 2> key{hash_bytes(bytes), hash_bytes(bytes, 1)};
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = known_.find(key); found != known_.end())
      if (PixelsPtr pixels = found->second.lock()) return pixels;
  }
  PixelsPtr pixels = options_.processor->process(decode_image(bytes, options_.limits));
  const std::lock_guard lock(mutex_);
  if (known_.size() > kMostForgotten) std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
  known_[key] = pixels;
  return pixels;
}

std::vector<PixelsPtr> PromptImages::of_messages(const json::array& messages) const {
  std::vector<PixelsPtr> out;
  for_each_image(messages, [&](const json::object& part, const std::string& name) {
    if (out.size() == options_.max_images)
      fail(ErrorCode::kInvalidArgument, "{}: more than {} images in one conversation", name, options_.max_images);
    try {
      out.push_back(read_file(bytes_of_data_uri(uri_of_part(part), options_.limits)));
    } catch (const Error& error) {
      throw error.with_context(name);
    }
  });
  return out;
}

}  // namespace prl::vision
