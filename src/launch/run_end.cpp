#include "launch/run_end.hpp"

#include <charconv>
#include <string>
#include <string_view>
#include <system_error>

#include "base/log.hpp"

namespace prl::launch {
namespace fs = std::filesystem;

UnsavedNotice::UnsavedNotice(bool is_fine, std::stop_token stop) {
  if (is_fine) return;
  log::warning("checkpoints are off: nothing will be saved (--ckpt saves the last step, --ckpt.interval N every N steps)");
  on_stop_.emplace(std::move(stop),
                   [] { log::warning("checkpoints are off: the weights of all steps so far are lost when the run ends"); });
}

std::optional<fs::path> newest_weights(const std::optional<config::TrainerCkptConfig>& ckpt, const fs::path& output_dir) {
  if (!ckpt) return std::nullopt;
  constexpr std::string_view kPrefix = "step_";
  std::optional<fs::path> newest;
  long newest_step = -1;
  std::error_code none;
  for (const fs::directory_entry& entry : fs::directory_iterator(ckpt->output_dir.value_or(output_dir) / "weights", none)) {
    const std::string name = entry.path().filename().string();
    long step = 0;
    const char* const end = name.data() + name.size();
    if (!name.starts_with(kPrefix) || std::from_chars(name.data() + kPrefix.size(), end, step).ptr != end || step <= newest_step) continue;
    newest_step = step;
    newest = entry.path();
  }
  return newest;
}

void log_weights(const std::optional<config::TrainerCkptConfig>& ckpt, const fs::path& output_dir) {
  if (const auto weights = newest_weights(ckpt, output_dir))
    log::success("weights: {}; talk to them: prl chat --model.name {}", weights->string(), weights->string());
}

}  // namespace prl::launch
