#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <stop_token>

#include "config/checkpoint_config.hpp"

namespace prl::launch {

/// Of a training run without checkpoints: says so at its start, and once more when somebody stops it, before anything is lost.
class UnsavedNotice {
 public:
  /// `is_fine`: checkpoints are on, or nothing is to be kept. The log is set up.
  UnsavedNotice(bool is_fine, std::stop_token stop);
  UnsavedNotice(const UnsavedNotice&) = delete;
  UnsavedNotice& operator=(const UnsavedNotice&) = delete;

 private:
  std::optional<std::stop_callback<std::function<void()>>> on_stop_;
};

/// The newest weights that a run of this configuration has saved; none if there are none.
std::optional<std::filesystem::path> newest_weights(const std::optional<config::TrainerCkptConfig>& ckpt,
                                                    const std::filesystem::path& output_dir);
/// The last line of a run: where its weights are, and the command that talks to them.
void log_weights(const std::optional<config::TrainerCkptConfig>& ckpt, const std::filesystem::path& output_dir);

}  // namespace prl::launch
