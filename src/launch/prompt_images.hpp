#pragma once

#include <filesystem>
#include <memory>

#include "launch/engine_host.hpp"
#include "vision/prompt.hpp"

namespace prl::launch {

/// How the host's model takes images; nullptr if it has no vision tower, or no preprocessor_config.json, of which a warning tells.
std::shared_ptr<const vision::ImageProcessor> image_processor_of(EngineHost& host);
/// The same for conversations.
std::shared_ptr<const vision::PromptImages> prompt_images_of(EngineHost& host);
/// Of a model folder whose weights may be elsewhere, for roles that compute nothing: model.vlm is set. Error{kNotFound|kCorrupt} naming the
/// file and the key.
std::shared_ptr<const vision::PromptImages> prompt_images_of(const std::filesystem::path& folder);

}  // namespace prl::launch
