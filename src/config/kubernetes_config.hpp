#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/schema.hpp"

/// `prl k8s`: a run on Kubernetes. Values and objects of spec 9.4.
namespace prl::config {

enum class K8sAction { kRender };
std::span<const EnumEntry> enum_entries(K8sAction);

struct K8sImageConfig {
  std::string repository = "prime-rl-cpp";
  std::string tag = "main";
  std::string pull_policy = "IfNotPresent";
  template <class V>
  void visit(V& v) {
    v.field("repository", repository, "Image of `prl`, as the Dockerfile of this project makes it");
    v.field("tag", tag, "Tag of the image");
    v.field("pull_policy", pull_policy, "IfNotPresent, Always or Never");
  }
};

struct K8sStorageConfig {
  bool enabled = true;
  std::string storage_class_name = "nfs";
  std::string access_mode = "ReadWriteMany";
  std::string size = "1Ti";
  std::string mount_path = "/data";
  template <class V>
  void visit(V& v) {
    v.field("enabled", enabled, "A volume that all pods share; without it each has an empty folder of its own");
    v.field("storage_class_name", storage_class_name, "Class of the volume");
    v.field("access_mode", access_mode, "ReadWriteMany, since all pods write");
    v.field("size", size, "Size of the volume");
    v.field("mount_path", mount_path, "Where the volume is seen in the pods");
  }
};

struct K8sGpuConfig {
  bool enabled = true;
  int count = 1;
  template <class V>
  void visit(V& v) {
    v.field("enabled", enabled, "Ask for GPUs");
    v.field("count", count, "GPUs of a pod", {.unit = "GPUs", .min = 1});
  }
};

/// One role: a StatefulSet, whose pods have stable names, and its services.
struct K8sRoleConfig {
  bool enabled = true;
  int replicas = 1;
  bool auto_start = false;
  std::vector<std::string> command = {};
  std::string memory = "4Gi";
  std::string cpu = "1";
  K8sGpuConfig gpu;
  std::string service_type = "ClusterIP";
  int port = 8000;
  int nccl_port = 29501;
  std::string runtime_class_name = "nvidia";
  bool probes = false;
  std::map<std::string, std::string> env = {};
  template <class V>
  void visit(V& v) {
    v.field("enabled", enabled, "Whether there are pods of this role");
    v.field("replicas", replicas, "Pods", {.min = 1, .max = 1024});
    v.field("auto_start", auto_start, "Run `command` when a pod starts; otherwise the pod sleeps and is entered with kubectl exec");
    v.field("command", command, "Shell words to run; $INFERENCE_URL and the other variables of the pod may stand in them");
    v.field("memory", memory, "Requested memory, as 4Gi");
    v.field("cpu", cpu, "Requested processors, as 1 or 500m");
    v.field("gpu", gpu, "GPUs");
    v.field("service_type", service_type, "ClusterIP, NodePort or LoadBalancer");
    v.field("port", port, "Port of the role's HTTP", {.min = 1, .max = 65535});
    v.field("nccl_port", nccl_port, "Meeting place of the trainer's ranks", {.min = 1, .max = 65535});
    v.field("runtime_class_name", runtime_class_name, "Runtime class of pods with GPUs; empty: the cluster's default");
    v.field("probes", probes, "Let Kubernetes start a pod again that does not answer");
    v.field("env", env, "More environment variables");
  }
};

/// It computes little and answers no HTTP.
struct K8sOrchestratorConfig : K8sRoleConfig {
  K8sOrchestratorConfig() {
    memory = "2Gi";
    gpu.enabled = false;
  }
  template <class V>
  void visit(V& v) {
    K8sRoleConfig::visit(v);
  }
};

struct K8sSecretsConfig {
  bool enabled = false;
  std::string name = "prime-rl-secrets";
  template <class V>
  void visit(V& v) {
    v.field("enabled", enabled, "Give the pods WANDB_API_KEY and HF_TOKEN from a secret");
    v.field("name", name, "The secret, with the keys wandb-api-key and hf-token");
  }
};

struct K8sConfig {
  K8sAction action = K8sAction::kRender;
  std::string name = "prime-rl";
  std::string namespace_name = "default";
  K8sImageConfig image;
  K8sStorageConfig storage;
  K8sOrchestratorConfig orchestrator;
  K8sRoleConfig inference;
  K8sRoleConfig trainer;
  std::optional<std::string> example;
  K8sSecretsConfig secrets;
  std::filesystem::path output_dir = "k8s";
  bool overwrite = false;
  bool dry_run = false;
  template <class V>
  void visit(V& v) {
    v.field("action", action, "What to do: render");
    v.field("name", name, "Name of the release; every object's name begins with it");
    v.field("namespace", namespace_name, "Namespace of the objects");
    v.field("image", image, "Container image");
    v.field("storage", storage, "Volume that all pods share");
    v.field("orchestrator", orchestrator, "Pods of the orchestrator");
    v.field("inference", inference, "Pods of inference, an engine in each");
    v.field("trainer", trainer, "Pods of the trainer, a rank in each");
    v.field("example", example, "Commands of an example that the image holds: reverse-text");
    v.field("secrets", secrets, "Keys of services");
    v.field("output_dir", output_dir, "Folder of the files: manifests.yaml and chart/");
    v.field("overwrite", overwrite, "Replace files of an output_dir that is there");
    v.field("dry_run", dry_run, "Check the configuration and stop");
  }
};

}  // namespace prl::config
