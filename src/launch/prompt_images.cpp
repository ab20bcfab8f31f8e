#include "launch/prompt_images.hpp"

#include <boost/json.hpp>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"

namespace prl::launch {

std::shared_ptr<const vision::ImageProcessor> image_processor_of(EngineHost& host) {
  const std::optional<nn::VisionConfig>& vision = host.engine().model_config().vision;
  if (!vision) return nullptr;
  if (!std::filesystem::exists(host.folder() / "preprocessor_config.json")) {
    log::warning("{} has no preprocessor_config.json, which says at which size images enter: prompts with images are refused",
                 host.folder().string());
    return nullptr;
  }
  auto processor = std::make_shared<vision::ImageProcessor>(vision::ImageProcessor::load(host.folder()));
  const vision::ProcessorConfig& c = processor->config();
  if (c.patch_size != vision->patch_size || c.merge_size != vision->merge_size || c.temporal_patch_size != vision->temporal_patch)
    fail(ErrorCode::kCorrupt, "{}: patch_size {}, merge_size {} and temporal_patch_size {}; vision_config of config.json has {}, {} and {}",
         (host.folder() / "preprocessor_config.json").string(), c.patch_size, c.merge_size, c.temporal_patch_size, vision->patch_size,
         vision->merge_size, vision->temporal_patch);
  return processor;
}

std::shared_ptr<const vision::PromptImages> prompt_images_of(EngineHost& host) {
  std::shared_ptr<const vision::ImageProcessor> processor = image_processor_of(host);
  if (processor == nullptr) return nullptr;
  return std::make_shared<const vision::PromptImages>(
      vision::PromptImages::Options{.processor = std::move(processor), .placeholder = host.engine().model_config().vision->image_token_id});
}

std::shared_ptr<const vision::PromptImages> prompt_images_of(const std::filesystem::path& folder) {
  constexpr std::size_t kMaxConfigBytes = std::size_t{16} << 20;
  const std::filesystem::path path = folder / "config.json";
  boost::json::error_code error;
  const boost::json::value config = boost::json::parse(read_file(path, kMaxConfigBytes), error);
  const boost::json::object* object = error.failed() ? nullptr : config.if_object();
  const boost::json::value* tower = object != nullptr ? object->if_contains("vision_config") : nullptr;
  if (tower == nullptr || !tower->is_object())
    fail(ErrorCode::kInvalidArgument, "model.vlm is set, and {} describes no vision tower (vision_config)", path.string());
  const boost::json::value* id = object->if_contains("image_token_id");
  if (id == nullptr || !id->is_int64() || id->get_int64() < 0 || id->get_int64() > INT32_MAX)
    fail(ErrorCode::kCorrupt, "{}: key 'image_token_id': wanted the id of the placeholder of images", path.string());
  return std::make_shared<const vision::PromptImages>(
      vision::PromptImages::Options{.processor = std::make_shared<const vision::ImageProcessor>(vision::ImageProcessor::load(folder)),
                                    .placeholder = static_cast<std::int32_t>(id->get_int64())});
}

}  // namespace prl::launch
