#include "apps/commands.hpp"
#include "base/stop_signal.hpp"
#include "config/inference_config.hpp"
#include "launch/inference_role.hpp"
#include "launch/model_setup.hpp"

namespace prl::apps {

int run_inference(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::InferenceConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  StopSignal stop;
  launch::setup_logging(loaded.config.log, {});
  return launch::run_inference_role(loaded.config, stop.token());
}

}  // namespace prl::apps
