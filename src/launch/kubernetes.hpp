#pragma once

#include <boost/json/value.hpp>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "config/kubernetes_config.hpp"

namespace prl::launch {

/// A file of a Helm chart or of manifests.
struct RenderedFile {
  std::filesystem::path path;  ///< below the output folder
  std::string text;
};

/// The objects of a run on Kubernetes (spec 9.4), as one stream of YAML documents: a volume claim, and for each role a
/// StatefulSet, whose pods have stable names, a headless service for those names, and a service for its port. The commands of
/// `config.example` have been filled in by resolving.
std::string kubernetes_manifests(const config::K8sConfig& config);

/// A Helm chart of the same objects: Chart.yaml, values.yaml with the values of `config`, and a template for each role and the volume.
/// Rendered with its own values and the release's name it gives the objects of kubernetes_manifests().
std::vector<RenderedFile> kubernetes_chart(const config::K8sConfig& config);

/// Writes <output_dir>/manifests.yaml and <output_dir>/chart/..., and returns their paths.
std::vector<std::filesystem::path> write_kubernetes(const config::K8sConfig& config);

/// JSON as YAML in blocks: keys in their order, strings in double quotes with JSON's escapes.
std::string to_yaml(const boost::json::value& value, int indent = 0);

}  // namespace prl::launch
