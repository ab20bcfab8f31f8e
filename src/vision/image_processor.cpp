#include "vision/image_processor.hpp"

#include <boost/json.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <string_view>

#include "base/error.hpp"
#include "base/files.hpp"
#include "vision/resample.hpp"

namespace prl::vision {
namespace json = boost::json;
namespace {

constexpr std::size_t kMaxProcessorBytes = std::size_t{1} << 20;
constexpr double kMaxProportion = 200;

/// Typed reading of preprocessor_config.json.
class KeyReader {
 public:
  KeyReader(std::string subject, const json::object& object) : subject_(std::move(subject)), object_(object) {}
  const json::value* find(std::string_view key) const {
    const json::value* value = object_.if_contains(key);
    return value != nullptr && !value->is_null() ? value : nullptr;
  }
  double number(std::string_view key, double fallback, double low, double high) const {
    const json::value* value = find(key);
    if (value == nullptr) return fallback;
    const double found = value->is_number() ? value->to_number<double>() : std::nan("");
    if (!(found >= low && found <= high)) bad(key, fmt::format("a number from {} to {}", low, high), *value);
    return found;
  }
  std::int64_t integer(std::string_view key, std::int64_t fallback, std::int64_t low, std::int64_t high) const {
    const double found = number(key, static_cast<double>(fallback), static_cast<double>(low), static_cast<double>(high));
    if (found != std::floor(found)) bad(key, "a whole number", *find(key));
    return static_cast<std::int64_t>(found);
  }
  bool boolean(std::string_view key, bool fallback) const {
    const json::value* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_bool()) bad(key, "true or false", *value);
    return value->get_bool();
  }
  std::array<double, 3> colours(std::string_view key, const std::array<double, 3>& fallback) const {
    const json::value* value = find(key);
    if (value == nullptr) return fallback;
    std::array<double, 3> out{};
    const json::array* list = value->if_array();
    if (list == nullptr || list->size() != 3) bad(key, "three numbers", *value);
    for (std::size_t i = 0; i < 3; ++i) {
      if (!(*list)[i].is_number()) bad(key, "three numbers", *value);
      out[i] = (*list)[i].to_number<double>();
    }
    return out;
  }
  [[noreturn]] void bad(std::string_view key, std::string_view wanted, const json::value& found) const {
    fail(ErrorCode::kCorrupt, "{}: key '{}': wanted {}, found {}", subject_, key, wanted, json::serialize(found));
  }
  void require_true(std::string_view key) const {
    if (!boolean(key, true)) fail(ErrorCode::kNotImplemented, "{}: key '{}' is false; this build always does it", subject_, key);
  }
  const std::string& subject() const { return subject_; }

 private:
  std::string subject_;
  const json::object& object_;
};

void read_bounds(const KeyReader& reader, ProcessorConfig& config) {
  constexpr std::int64_t kMost = std::int64_t{1} << 32;
  if (const json::value* size = reader.find("size"); size != nullptr) {
    if (!size->is_object()) reader.bad("size", "an object with shortest_edge and longest_edge", *size);
    const KeyReader within(reader.subject() + ": size", size->get_object());
    config.min_pixels = within.integer("shortest_edge", config.min_pixels, 1, kMost);
    config.max_pixels = within.integer("longest_edge", config.max_pixels, 1, kMost);
  }
  config.min_pixels = reader.integer("min_pixels", config.min_pixels, 1, kMost);
  config.max_pixels = reader.integer("max_pixels", config.max_pixels, 1, kMost);
  if (config.min_pixels > config.max_pixels)
    fail(ErrorCode::kCorrupt, "{}: at least {} pixels are wanted, and at most {}", reader.subject(), config.min_pixels, config.max_pixels);
}

}  // namespace

ImageProcessor ImageProcessor::load(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "preprocessor_config.json";
  if (!std::filesystem::exists(path))
    fail(ErrorCode::kNotFound, "{}: missing, and the model has a vision tower: it says at which size and in which numbers images enter",
         path.string());
  json::error_code error;
  const json::value parsed = json::parse(read_file(path, kMaxProcessorBytes), error);
  if (error.failed() || !parsed.is_object()) fail(ErrorCode::kCorrupt, "{}: not a JSON object", path.string());
  const KeyReader reader(path.string(), parsed.get_object());
  if (const json::value* type = reader.find("image_processor_type");
      type != nullptr && (!type->is_string() || !std::string_view(type->get_string()).starts_with("Qwen2VLImageProcessor")))
    fail(ErrorCode::kNotImplemented, "{}: key 'image_processor_type' is {}; this build has Qwen2VLImageProcessor and its fast form",
         path.string(), json::serialize(*type));
  ProcessorConfig config;
  config.patch_size = reader.integer("patch_size", config.patch_size, 1, 64);
  config.temporal_patch_size = reader.integer("temporal_patch_size", config.temporal_patch_size, 1, 8);
  config.merge_size = reader.integer("merge_size", config.merge_size, 1, 8);
  read_bounds(reader, config);
  config.resizes = reader.boolean("do_resize", true);
  for (const char* key : {"do_rescale", "do_normalize", "do_convert_rgb"}) reader.require_true(key);
  if (const std::int64_t filter = reader.integer("resample", 3, 0, 5); filter != 3)
    fail(ErrorCode::kNotImplemented, "{}: key 'resample' is {}; this build has 3 (bicubic)", path.string(), filter);
  const double factor = reader.number("rescale_factor", 1.0 / 255.0, 1e-9, 1e9);
  const auto mean = reader.colours("image_mean", {0.48145466, 0.4578275, 0.40821073});
  const auto deviation = reader.colours("image_std", {0.26862954, 0.26130258, 0.27577711});
  for (std::size_t c = 0; c < 3; ++c) {
    if (!(deviation[c] > 0)) fail(ErrorCode::kCorrupt, "{}: key 'image_std' has {}, wanted more than 0", path.string(), deviation[c]);
    config.mean[c] = static_cast<float>(mean[c]) * static_cast<float>(1.0 / factor);
    config.deviation[c] = static_cast<float>(deviation[c]) * static_cast<float>(1.0 / factor);
  }
  return ImageProcessor(config);
}

PictureSize smart_resize(PictureSize from, std::int64_t factor, std::int64_t min_pixels, std::int64_t max_pixels) {
  const auto h = static_cast<double>(from.height), w = static_cast<double>(from.width), f = static_cast<double>(factor);
  if (std::max(h, w) / std::min(h, w) > kMaxProportion)
    fail(ErrorCode::kInvalidArgument, "an image of {} x {} pixels; one side may be at most {} times the other", from.width, from.height,
         kMaxProportion);
  // Halves go to the even neighbour.
  PictureSize to{static_cast<std::int64_t>(std::nearbyint(h / f)) * factor, static_cast<std::int64_t>(std::nearbyint(w / f)) * factor};
  if (to.height * to.width > max_pixels) {
    const double beta = std::sqrt(h * w / static_cast<double>(max_pixels));
    to.height = std::max(factor, static_cast<std::int64_t>(std::floor(h / beta / f)) * factor);
    to.width = std::max(factor, static_cast<std::int64_t>(std::floor(w / beta / f)) * factor);
  } else if (to.height * to.width < min_pixels) {
    const double beta = std::sqrt(static_cast<double>(min_pixels) / (h * w));
    to.height = static_cast<std::int64_t>(std::ceil(h * beta / f)) * factor;
    to.width = static_cast<std::int64_t>(std::ceil(w * beta / f)) * factor;
  }
  return to;
}

std::shared_ptr<const wire::ImagePixels> ImageProcessor::process(const Image& image) const {
  PictureSize size{image.height, image.width};
  if (config_.resizes) size = smart_resize(size, config_.patch_size * config_.merge_size, config_.min_pixels, config_.max_pixels);
  require_whole_tokens(size, image);
  return take(resize_bicubic(image, size.width, size.height));
}

void ImageProcessor::require_whole_tokens(const PictureSize& size, const Image& image) const {
  const std::int64_t factor = config_.patch_size * config_.merge_size;
  if (size.height < 1 || size.width < 1 || size.height % factor != 0 || size.width % factor != 0)
    fail(ErrorCode::kInvalidArgument, "an image of {} x {} pixels; the model takes sides that are multiples of {}", image.width,
         image.height, factor);
}

std::shared_ptr<const wire::ImagePixels> ImageProcessor::take(Image image) const {
  const PictureSize size{image.height, image.width};
  require_whole_tokens(size, image);
  // What process() makes of the longest picture that it takes may be larger than max_pixels.
  const std::int64_t side = config_.patch_size * config_.merge_size;
  const std::int64_t most = std::max(config_.max_pixels, static_cast<std::int64_t>(kMaxProportion) * side * side);
  if (config_.resizes && size.height * size.width > most)
    fail(ErrorCode::kInvalidArgument, "an image of {} x {} pixels; the model takes at most {}", image.width, image.height, most);
  auto out = std::make_shared<wire::ImagePixels>();
  out->rgb = std::move(image.rgb);
  out->height = size.height;
  out->width = size.width;
  out->mean = config_.mean;
  out->deviation = config_.deviation;
  out->hash = wire::hash_of(*out);
  return out;
}

wire::PromptImage ImageProcessor::place(std::shared_ptr<const wire::ImagePixels> pixels, std::int64_t first) const {
  const std::int64_t factor = config_.patch_size * config_.merge_size;
  const std::int64_t rows = pixels->height / factor, cols = pixels->width / factor;
  return {.pixels = std::move(pixels), .first = first, .rows = rows, .cols = cols};
}

}  // namespace prl::vision
