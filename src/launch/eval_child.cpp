#include "launch/eval_child.hpp"

#include <filesystem>
#include <span>
#include <variant>

#include "base/error.hpp"
#include "config/cli.hpp"
#include "config/resolve.hpp"
#include "config/secrets.hpp"
#include "launch/log_folder.hpp"
#include "launch/model_setup.hpp"
#include "launch/run_folder.hpp"
#include "launch/visible_gpus.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

constexpr int kMaxEvalRestarts = 3;

}  // namespace

std::optional<std::string> eval_devices(const config::SftConfig& config, bool trains_on_gpus, int num_gpus) {
  const auto& node = std::get<config::SftSingleNode>(config.deployment);
  const config::DeviceKind wanted = config.inference ? config.inference->compute.device : config::DeviceKind::kAuto;
  if (wanted == config::DeviceKind::kCpu || node.num_infer_gpus == 0) return "";
  const int gpu = trains_on_gpus ? node.num_gpus : 0;
  if (num_gpus == 0 && wanted == config::DeviceKind::kAuto) return std::nullopt;
  if (gpu >= num_gpus)
    fail(ErrorCode::kInvalidArgument,
         "deployment.num_infer_gpus: evaluations need a GPU of their own beside the {} of the ranks, and there are {} in all; lower "
         "deployment.num_gpus, evaluate on the CPU with deployment.num_infer_gpus = 0, or leave out [eval] and evaluate the saved weights "
         "with `prl eval --weights-dir`",
         trains_on_gpus ? node.num_gpus : 0, num_gpus);
  return visible_devices_of(std::span(&gpu, 1));
}

ChildSpec eval_child(const config::SftConfig& config) {
  ChildSpec child;
  child.name = "evals";
  child.argv = {fs::read_symlink("/proc/self/exe").string(), "evals", "@", (config.output_dir / "configs" / "evals.json").string()};
  child.env[kRunFolderVariable] = fs::absolute(config.output_dir).string();
  if (const std::string secrets = config::secrets_of(config::evals_of(config)); !secrets.empty())
    child.env[config::kSecretsVariable] = secrets;
  if (const auto devices = eval_devices(config, device_kind(config.compute) == DeviceKind::kCuda, num_visible_gpus()))
    child.env["CUDA_VISIBLE_DEVICES"] = *devices;
  child.log_file = log_file(config.output_dir, "evals.log");
  child.is_optional = true;
  child.max_restarts = kMaxEvalRestarts;
  child.restarts_after_signals_only = true;
  return child;
}

}  // namespace prl::launch
