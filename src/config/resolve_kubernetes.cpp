#include <fmt/format.h>

#include <algorithm>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "config/bind.hpp"
#include "config/detail/check.hpp"
#include "config/kubernetes_config.hpp"

namespace prl::config {
namespace {

using detail::Check;

constexpr std::string_view kExamples = "/app/k8s/examples";

void check_name(const std::string& value, std::string_view key, const Check& check) {
  static const std::regex kLabel("[a-z]([-a-z0-9]{0,38}[a-z0-9])?");
  if (!std::regex_match(value, kLabel))
    check.problem(key, fmt::format("wanted at most 40 small letters, digits and hyphens, a letter first, found '{}'", value));
}

void check_quantity(const std::string& value, std::string_view key, const Check& check) {
  static const std::regex kQuantity("[0-9]+(\\.[0-9]+)?([EPTGMk]|[EPTGMK]i|m)?");
  if (!std::regex_match(value, kQuantity)) check.problem(key, fmt::format("wanted a quantity such as 4Gi, 2 or 500m, found '{}'", value));
}

void check_word(const std::string& value, std::initializer_list<std::string_view> words, std::string_view key, const Check& check) {
  if (std::find(words.begin(), words.end(), value) == words.end())
    check.problem(key, fmt::format("wanted {}, found '{}'", fmt::join(words, ", "), value));
}

void check_role(const K8sRoleConfig& role, const Check& check) {
  check_quantity(role.memory, "memory", check);
  check_quantity(role.cpu, "cpu", check);
  check_word(role.service_type, {"ClusterIP", "NodePort", "LoadBalancer"}, "service_type", check);
  if (role.auto_start && role.command.empty()) check.problem("auto_start", "needs a command: what should the pods run?");
  if (!role.runtime_class_name.empty()) check_name(role.runtime_class_name, "runtime_class_name", check);
  static const std::regex kVariable("[A-Za-z_][A-Za-z0-9_]*");
  for (const auto& [name, value] : role.env)
    if (!std::regex_match(name, kVariable)) check.problem("env", fmt::format("wanted names of variables, found '{}'", name));
}

/// The commands of an example that the image holds under kExamples, where nothing else is said.
void fill_in_example(K8sConfig& config, const Check& check) {
  if (!config.example) return;
  if (*config.example != "reverse-text") return check.problem("example", fmt::format("wanted reverse-text, found '{}'", *config.example));
  const std::string folder = fmt::format("{}/{}", kExamples, *config.example);
  const std::string output = config.storage.mount_path + "/outputs";
  const auto fill = [&](K8sRoleConfig& role, std::string_view section, std::vector<std::string> command) {
    if (!check.is_set(fmt::format("{}.auto_start", section))) role.auto_start = true;
    if (!check.is_set(fmt::format("{}.command", section))) role.command = std::move(command);
  };
  fill(config.inference, "inference",
       {"prl", "inference", "@", folder + "/infer.toml", "--output-dir", config.storage.mount_path + "/inference-$POD_NAME"});
  // The node agent finds out which pod it is, and does for one pod too; so replicas may change without the command.
  const int num_ranks = config.trainer.gpu.enabled ? config.trainer.gpu.count : 1;
  fill(config.trainer, "trainer",
       {"prl", "launch", "--nproc-per-node", std::to_string(num_ranks), "trainer", "@", folder + "/train.toml", "--output-dir", output});
  fill(config.orchestrator, "orchestrator",
       {"prl", "orchestrator", "@", folder + "/orch.toml", "--output-dir", output, "--student.client.base-url", "$INFERENCE_URL"});
  // Requests are spread over all engines by the orchestrator itself.
  if (config.inference.replicas > 1 && !check.is_set("orchestrator.command")) config.orchestrator.command.back() = "$ADMIN_INFERENCE_URLS";
  if (!check.is_set("orchestrator.memory")) config.orchestrator.memory = "1Gi";
  if (!check.is_set("orchestrator.cpu")) config.orchestrator.cpu = "500m";
}

}  // namespace

template <>
Resolution<K8sConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<K8sConfig>(raw);
  K8sConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  check_name(config.name, "name", check);
  check_name(config.namespace_name, "namespace", check);
  check_word(config.image.pull_policy, {"IfNotPresent", "Always", "Never"}, "image.pull_policy", check);
  check_word(config.storage.access_mode, {"ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"}, "storage.access_mode", check);
  check_quantity(config.storage.size, "storage.size", check);
  if (!config.storage.mount_path.starts_with('/') || config.storage.mount_path.find(':') != std::string::npos)
    check.problem("storage.mount_path", fmt::format("wanted an absolute path without a colon, found '{}'", config.storage.mount_path));
  fill_in_example(config, check);
  check_role(config.orchestrator, check.sub("orchestrator"));
  check_role(config.inference, check.sub("inference"));
  check_role(config.trainer, check.sub("trainer"));
  const std::vector<std::string>& trainer = config.trainer.command;
  if (config.trainer.replicas > 1 && config.trainer.auto_start && std::find(trainer.begin(), trainer.end(), "launch") == trainer.end())
    check.problem("trainer.command",
                  fmt::format("would start {} trainers that know nothing of each other: wanted prl launch --nproc-per-node N trainer ..., "
                              "which reads the pod's number",
                              config.trainer.replicas));
  if (config.orchestrator.replicas != 1) check.problem("orchestrator.replicas", "a run has one orchestrator");
  if (!config.storage.enabled && config.trainer.enabled && config.inference.enabled)
    check.warn("storage.enabled", "without a shared volume weights cannot reach the pods of inference through files");
  return resolution;
}

}  // namespace prl::config
