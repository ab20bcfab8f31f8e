#include "apps/commands.hpp"
#include "base/log.hpp"
#include "config/kubernetes_config.hpp"
#include "launch/kubernetes.hpp"

namespace prl::apps {

int run_k8s(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::K8sConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded) || loaded.config.dry_run) return 0;
  switch (loaded.config.action) {
    case config::K8sAction::kRender: {
      for (const auto& path : launch::write_kubernetes(loaded.config)) log::info("wrote {}", path.string());
      const std::string folder = loaded.config.output_dir.string();
      log::success("kubectl apply -f {0}/manifests.yaml, or helm install {1} {0}/chart -n {2}", folder, loaded.config.name,
                   loaded.config.namespace_name);
    }
  }
  return 0;
}

}  // namespace prl::apps
