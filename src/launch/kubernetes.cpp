#include "launch/kubernetes.hpp"

#include <fmt/format.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <functional>
#include <string_view>

#include "base/files.hpp"
#include "base/output_file.hpp"
#include "launch/run_identity.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

/// Strings that begin with it stand in the YAML as they are: expressions of a template that are numbers, truth values or lists.
constexpr char kRaw = '\x01';
/// Keys that begin with it make their members conditional in a template; what follows is the condition.
constexpr char kIf = '\x02';
/// A key whose value is the path of a table of variables, of which each becomes an item {name, value}.
constexpr std::string_view kEnvOf = "\x03";

std::string pad(int indent) { return std::string(static_cast<std::size_t>(indent), ' '); }

std::string scalar(const json::value& value) {
  if (value.is_string() && !value.get_string().empty() && value.get_string().front() == kRaw)
    return std::string(std::string_view(value.get_string()).substr(1));
  return json::serialize(value);
}

bool is_block(const json::value& value) {
  return (value.is_object() && !value.get_object().empty()) || (value.is_array() && !value.get_array().empty());
}

void write_members(const json::object& object, int indent, std::string& out);

void write_items(const json::array& array, int indent, std::string& out) {
  for (const json::value& item : array) {
    const json::object* object = item.if_object();
    const std::string_view first = object && object->size() == 1 ? std::string_view(object->begin()->key()) : std::string_view();
    if (!first.empty() && first.front() == kIf) {
      out += fmt::format("{}{{{{- if {} }}}}\n", pad(indent), first.substr(1));
      write_items(object->begin()->value().get_array(), indent, out);
      out += fmt::format("{}{{{{- end }}}}\n", pad(indent));
    } else if (first == kEnvOf) {
      const std::string path(object->begin()->value().get_string());
      out += fmt::format(
          "{0}{{{{- range $name, $value := {1} }}}}\n{0}- name: {{{{ $name | quote }}}}\n{0}  value: {{{{ $value | quote }}}}\n"
          "{0}{{{{- end }}}}\n",
          pad(indent), path);
    } else if (is_block(item)) {
      std::string block;
      if (object)
        write_members(*object, indent + 2, block);
      else
        write_items(item.get_array(), indent + 2, block);
      block[static_cast<std::size_t>(indent)] = '-';
      out += block;
    } else {
      out += fmt::format("{}- {}\n", pad(indent), scalar(item));
    }
  }
}

void write_members(const json::object& object, int indent, std::string& out) {
  for (const auto& [key, value] : object) {
    if (key.front() == kIf) {
      // A condition may stand several times in one object: what tells its places apart ends with a space.
      const std::string_view condition = std::string_view(key).substr(1, key.rfind('#') - 1);
      out += fmt::format("{}{{{{- if {} }}}}\n", pad(indent), condition);
      write_members(value.get_object(), indent, out);
      out += fmt::format("{}{{{{- end }}}}\n", pad(indent));
    } else if (is_block(value)) {
      out += fmt::format("{}{}:\n", pad(indent), std::string_view(key));
      if (value.is_object())
        write_members(value.get_object(), indent + 2, out);
      else
        write_items(value.get_array(), indent, out);
    } else {
      out += fmt::format("{}{}: {}\n", pad(indent), std::string_view(key), scalar(value));
    }
  }
}

/// A role as the objects name it.
struct Role {
  std::string_view name;
  const config::K8sRoleConfig* config;
  bool is_inference = false, is_trainer = false;
};

std::vector<Role> roles_of(const config::K8sConfig& config) {
  return {{.name = "orchestrator", .config = &config.orchestrator},
          {.name = "inference", .config = &config.inference, .is_inference = true},
          {.name = "trainer", .config = &config.trainer, .is_trainer = true}};
}

/// The objects, once: with the values themselves, or with expressions of a chart's template in their places.
class Objects {
 public:
  Objects(const config::K8sConfig& config, bool is_chart) : config_(config), is_chart_(is_chart) {}

  json::object claim() const {
    const config::K8sStorageConfig& storage = config_.storage;
    json::object spec{{"accessModes", json::array{text("storage.accessMode", storage.access_mode)}},
                      {"storageClassName", text("storage.storageClassName", storage.storage_class_name)},
                      {"resources", json::object{{"requests", json::object{{"storage", text("storage.size", storage.size)}}}}}};
    return {{"apiVersion", "v1"}, {"kind", "PersistentVolumeClaim"}, {"metadata", metadata("shared-data", "")}, {"spec", std::move(spec)}};
  }

  json::object service(const Role& role, bool is_headless) const {
    json::array ports{json::object{{"name", "http"}, {"port", number(role, "service.port", role.config->port)}, {"targetPort", "http"}}};
    if (is_headless && !role.is_inference)
      ports.push_back(json::object{{"name", "nccl"}, {"port", number(role, "ncclPort", role.config->nccl_port)}, {"targetPort", "nccl"}});
    json::object spec;
    if (is_headless) {
      spec["clusterIP"] = "None";
      spec["publishNotReadyAddresses"] = true;  // ranks meet before they are ready
    } else {
      spec["type"] = text(path(role, "service.type"), role.config->service_type);
    }
    spec["selector"] = labels(role.name);
    spec["ports"] = std::move(ports);
    return {{"apiVersion", "v1"},
            {"kind", "Service"},
            {"metadata", metadata(std::string(role.name) + (is_headless ? "-headless" : ""), role.name)},
            {"spec", std::move(spec)}};
  }

  json::object stateful_set(const Role& role) const {
    json::object pod_spec;
    when(pod_spec, path(role, "gpu.enabled"), role.config->gpu.enabled && !role.config->runtime_class_name.empty(),
         {{"runtimeClassName", text(path(role, "runtimeClassName"), role.config->runtime_class_name)}},
         fmt::format("and .Values.{0}.gpu.enabled .Values.{0}.runtimeClassName", role.name));
    pod_spec["terminationGracePeriodSeconds"] = 120;  // for a checkpoint
    pod_spec["containers"] = json::array{container(role)};
    json::array volumes{json::object{{"name", "shm"}, {"emptyDir", json::object{{"medium", "Memory"}}}}};
    when(volumes, "storage.enabled", config_.storage.enabled,
         {json::object{{"name", "shared-data"}, {"persistentVolumeClaim", json::object{{"claimName", name("shared-data")}}}}});
    pod_spec["volumes"] = std::move(volumes);
    json::object spec{{"serviceName", name(std::string(role.name) + "-headless")},
                      {"replicas", number(role, "replicas", role.config->replicas)},
                      {"podManagementPolicy", "Parallel"},  // ranks wait for each other
                      {"selector", json::object{{"matchLabels", labels(role.name)}}},
                      {"template", json::object{{"metadata", json::object{{"labels", labels(role.name)}}}, {"spec", std::move(pod_spec)}}}};
    return {{"apiVersion", "apps/v1"}, {"kind", "StatefulSet"}, {"metadata", metadata(role.name, role.name)}, {"spec", std::move(spec)}};
  }

 private:
  static std::string path(const Role& role, std::string_view key) { return fmt::format("{}.{}", role.name, key); }
  std::string text(std::string_view path, std::string_view value) const {
    return is_chart_ ? fmt::format("{{{{ .Values.{} }}}}", path) : std::string(value);
  }
  json::value number(const Role& role, std::string_view key, int value) const {
    if (!is_chart_) return value;
    return json::value(std::string(1, kRaw) + text(path(role, key), ""));
  }
  /// Members that are there while the value at `path` is true; a template asks for `condition`, if that says more.
  void when(json::object& object, std::string_view path, bool is_true, const json::object& members, std::string condition = {}) const {
    if (condition.empty()) condition = fmt::format(".Values.{}", path);
    if (is_chart_)
      object[fmt::format("{}{}#{}", kIf, condition, object.size())] = members;
    else if (is_true)
      for (const auto& [key, value] : members) object[key] = value;
  }
  void when(json::array& array, std::string_view path, bool is_true, const json::array& items) const {
    if (is_chart_)
      array.push_back(json::object{{fmt::format("{}.Values.{}", kIf, path), items}});
    else if (is_true)
      for (const json::value& item : items) array.push_back(item);
  }

  std::string release() const { return is_chart_ ? "{{ .Release.Name }}" : config_.name; }
  std::string name(std::string_view suffix) const { return fmt::format("{}-{}", release(), suffix); }
  /// Of pod `ordinal` of a role; each has a name while its StatefulSet exists.
  std::string host(std::string_view role, std::string_view ordinal) const {
    return fmt::format("{0}-{1}-{2}.{0}-{1}-headless.{3}.svc.cluster.local", release(), role, ordinal,
                       text("namespace", config_.namespace_name));
  }
  json::object labels(std::string_view role) const {
    json::object labels{{"app", "prime-rl"}, {"release", release()}};
    if (!role.empty()) labels["role"] = role;
    return labels;
  }
  json::object metadata(std::string_view suffix, std::string_view role) const {
    json::object all = labels(role);
    if (!role.empty())
      when(all, "config.example", config_.example.has_value(), {{"example", text("config.example", config_.example.value_or(""))}});
    return {{"name", name(suffix)}, {"namespace", text("namespace", config_.namespace_name)}, {"labels", std::move(all)}};
  }

  /// With auto_start the command, and then nothing: a pod that ended would be started again. A command that fails ends the pod.
  json::value script(const Role& role) const {
    constexpr std::string_view kStart = "ulimit -n 32000; {} || exit $?; exec sleep infinity";
    if (!is_chart_)
      return json::value(role.config->auto_start ? fmt::format(fmt::runtime(kStart), fmt::join(role.config->command, " "))
                                                 : std::string("exec sleep infinity"));
    return json::value(
        fmt::format("{0}{{{{ if .Values.{1}.autoStart }}}}{{{{ printf \"{2}\" (join \" \" .Values.{1}.command) | quote }}}}{{{{ else }}}}"
                    "\"exec sleep infinity\"{{{{ end }}}}",
                    kRaw, role.name, fmt::format(fmt::runtime(kStart), "%s")));
  }

  static json::object probe(std::string_view path, int period, int failures, int timeout) {
    return {{"httpGet", json::object{{"path", path}, {"port", "http"}}},
            {"periodSeconds", period},
            {"failureThreshold", failures},
            {"timeoutSeconds", timeout}};
  }
  /// The orchestrator answers no HTTP.
  void add_probes(const Role& role, json::object& container) const {
    json::object probes;
    if (role.is_inference)
      probes = {{"startupProbe", probe("/health", 10, 270, 5)},
                {"livenessProbe", probe("/liveness", 10, 3, 10)},
                {"readinessProbe", probe("/health", 5, 2, 5)}};
    else if (role.is_trainer)
      probes = {{"startupProbe", probe("/health", 10, 60, 5)},
                {"livenessProbe", probe("/health", 30, 6, 5)},
                {"readinessProbe", probe("/health", 10, 3, 5)}};
    else
      return;
    when(container, path(role, "probes.enabled"), role.config->probes, probes);
  }

  json::array env(const Role& role) const {
    const auto value = [](std::string_view key, std::string_view text) { return json::object{{"name", key}, {"value", text}}; };
    const auto field = [](std::string_view key, std::string_view of) {
      return json::object{{"name", key}, {"valueFrom", json::object{{"fieldRef", json::object{{"fieldPath", of}}}}}};
    };
    json::array env{field("POD_NAME", "metadata.name"), field("POD_IP", "status.podIP"), field("POD_NAMESPACE", "metadata.namespace"),
                    value("ROLE", role.name),
                    value("STATEFUL_REPLICAS", text(path(role, "replicas"), std::to_string(role.config->replicas)))};
    if (!role.is_inference) {
      const std::string port = text("inference.service.port", std::to_string(config_.inference.port));
      env.push_back(value("INFERENCE_URL", fmt::format("http://{}:{}/v1", host("inference", "0"), port)));
      env.push_back(value("ADMIN_INFERENCE_URLS", pod_urls(host("inference", is_chart_ ? "{{ $i }}" : "{}"), port, ",")));
      env.push_back(value(kRunServersVariable, server_origins(port)));
    }
    env.push_back(value(kRunIdVariable, fmt::format("{}.{}", text("namespace", config_.namespace_name), release())));
    if (role.is_trainer) {
      env.push_back(value("RDZV_ENDPOINT",
                          fmt::format("{}:{}", host("trainer", "0"), text("trainer.ncclPort", std::to_string(config_.trainer.nccl_port)))));
      // What `prl launch` reads.
      env.push_back(value("PRL_RDZV_ENDPOINT", "$(RDZV_ENDPOINT)"));
      env.push_back(value("PRL_NODE_HOST", "$(POD_IP)"));
    }
    const auto secret = [&](std::string_view key, std::string_view of) {
      return json::object{
          {"name", key},
          {"valueFrom",
           json::object{{"secretKeyRef",
                         json::object{{"name", text("config.secrets.name", config_.secrets.name)}, {"key", of}, {"optional", true}}}}}};
    };
    when(env, "config.secrets.enabled", config_.secrets.enabled,
         {secret("WANDB_API_KEY", "wandb-api-key"), secret("HF_TOKEN", "hf-token")});
    if (is_chart_)
      env.push_back(json::object{{kEnvOf, fmt::format(".Values.{}.env", role.name)}});
    else
      for (const auto& [key, text] : role.config->env) env.push_back(value(key, text));
    return env;
  }
  /// Of all pods of inference, whose host has the ordinal in place of {} (of {{ $i }} in a template): weights go to each of them.
  std::string pod_urls(const std::string& host, const std::string& port, std::string_view separator) const {
    if (is_chart_)
      return fmt::format(
          "{{{{ range $i, $_ := until (int .Values.inference.replicas) }}}}{{{{ if $i }}}}{}{{{{ end }}}}http://{}:{}{{{{ end }}}}",
          separator, inside_range(host), inside_range(port));
    std::string urls;
    for (int i = 0; i < config_.inference.replicas; ++i)
      urls += fmt::format("{}http://{}:{}", i == 0 ? "" : separator, fmt::format(fmt::runtime(host), i), port);
    return urls;
  }
  /// Origins under which a client may know the release's engines: each pod, and the Service before them, by all their names.
  std::string server_origins(const std::string& port) const {
    const std::string ordinal = is_chart_ ? "{{ $i }}" : "{}";
    std::string origins = pod_urls(host("inference", ordinal), port, " ");
    origins += " " + pod_urls(fmt::format("{0}-inference-{1}.{0}-inference-headless", release(), ordinal), port, " ");
    const std::string space = text("namespace", config_.namespace_name);
    for (const std::string& rest : {std::string(), "." + space, "." + space + ".svc", "." + space + ".svc.cluster.local"})
      origins += fmt::format(" http://{}{}:{}", name("inference"), rest, port);
    return origins;
  }
  /// Inside a range "." is the item; "$" is what "." was outside.
  static std::string inside_range(std::string text) {
    for (const std::string_view word : {"{{ .Values", "{{ .Release"})
      for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + word.size() + 1)) text.insert(at + 3, "$");
    return text;
  }

  json::object container(const Role& role) const {
    const config::K8sImageConfig& image = config_.image;
    json::object container{{"name", role.name},
                           {"image", text("image.repository", image.repository) + ":" + text("image.tag", image.tag)},
                           {"imagePullPolicy", text("image.pullPolicy", image.pull_policy)},
                           {"command", json::array{"/bin/sh", "-c", script(role)}},
                           {"env", env(role)}};
    json::array ports{json::object{{"name", "http"}, {"containerPort", number(role, "service.port", role.config->port)}}};
    if (!role.is_inference)
      ports.push_back(json::object{{"name", "nccl"}, {"containerPort", number(role, "ncclPort", role.config->nccl_port)}});
    container["ports"] = std::move(ports);
    json::object resources{{"requests", json::object{{"memory", text(path(role, "resources.requests.memory"), role.config->memory)},
                                                     {"cpu", text(path(role, "resources.requests.cpu"), role.config->cpu)}}}};
    when(resources, path(role, "gpu.enabled"), role.config->gpu.enabled,
         {{"limits", json::object{{"nvidia.com/gpu", number(role, "gpu.count", role.config->gpu.count)}}}});
    container["resources"] = std::move(resources);
    json::array mounts{json::object{{"name", "shm"}, {"mountPath", "/dev/shm"}}};
    when(mounts, "storage.enabled", config_.storage.enabled,
         {json::object{{"name", "shared-data"}, {"mountPath", text("storage.mountPath", config_.storage.mount_path)}}});
    container["volumeMounts"] = std::move(mounts);
    add_probes(role, container);
    return container;
  }

  const config::K8sConfig& config_;
  bool is_chart_;
};

std::string documents(std::initializer_list<json::object> objects) {
  std::string out;
  for (const json::object& object : objects) out += "---\n" + to_yaml(object);
  return out;
}

json::object values_of(const config::K8sConfig& config) {
  const auto role = [](const config::K8sRoleConfig& of) {
    json::array command;
    for (const std::string& word : of.command) command.emplace_back(word);
    json::object env;
    for (const auto& [key, value] : of.env) env[key] = value;
    return json::object{{"enabled", of.enabled},
                        {"replicas", of.replicas},
                        {"autoStart", of.auto_start},
                        {"command", std::move(command)},
                        {"resources", json::object{{"requests", json::object{{"memory", of.memory}, {"cpu", of.cpu}}}}},
                        {"gpu", json::object{{"enabled", of.gpu.enabled}, {"count", of.gpu.count}}},
                        {"service", json::object{{"type", of.service_type}, {"port", of.port}}},
                        {"ncclPort", of.nccl_port},
                        {"runtimeClassName", of.runtime_class_name},
                        {"env", std::move(env)},
                        {"probes", json::object{{"enabled", of.probes}}}};
  };
  return {
      {"namespace", config.namespace_name},
      {"image", json::object{{"repository", config.image.repository}, {"tag", config.image.tag}, {"pullPolicy", config.image.pull_policy}}},
      {"storage", json::object{{"enabled", config.storage.enabled},
                               {"storageClassName", config.storage.storage_class_name},
                               {"accessMode", config.storage.access_mode},
                               {"size", config.storage.size},
                               {"mountPath", config.storage.mount_path}}},
      {"orchestrator", role(config.orchestrator)},
      {"inference", role(config.inference)},
      {"trainer", role(config.trainer)},
      {"config", json::object{{"example", config.example.value_or("")},
                              {"secrets", json::object{{"enabled", config.secrets.enabled}, {"name", config.secrets.name}}}}}};
}

}  // namespace

std::string to_yaml(const json::value& value, int indent) {
  std::string out;
  if (value.is_object() && is_block(value))
    write_members(value.get_object(), indent, out);
  else if (is_block(value))
    write_items(value.get_array(), indent, out);
  else
    out = scalar(value) + "\n";
  return out;
}

std::string kubernetes_manifests(const config::K8sConfig& config) {
  const Objects objects(config, /*is_chart=*/false);
  std::string out;
  if (config.storage.enabled) out += documents({objects.claim()});
  for (const Role& role : roles_of(config))
    if (role.config->enabled) out += documents({objects.service(role, true), objects.service(role, false), objects.stateful_set(role)});
  return out;
}

std::vector<RenderedFile> kubernetes_chart(const config::K8sConfig& config) {
  const Objects objects(config, /*is_chart=*/true);
  const auto guarded = [](std::string_view path, const std::string& text) {
    return fmt::format("{{{{- if .Values.{} }}}}\n{}{{{{- end }}}}\n", path, text);
  };
  std::vector<RenderedFile> files;
  files.push_back(
      {"Chart.yaml", to_yaml(json::object{{"apiVersion", "v2"},
                                          {"name", "prime-rl"},
                                          {"description", "Reinforcement learning of language models: trainer, orchestrator and inference"},
                                          {"type", "application"},
                                          {"version", "0.1.0"}})});
  files.push_back({"values.yaml", to_yaml(values_of(config))});
  files.push_back({"templates/storage.yaml", guarded("storage.enabled", documents({objects.claim()}))});
  for (const Role& role : roles_of(config))
    files.push_back({fmt::format("templates/{}.yaml", role.name),
                     guarded(fmt::format("{}.enabled", role.name),
                             documents({objects.service(role, true), objects.service(role, false), objects.stateful_set(role)}))});
  return files;
}

std::vector<fs::path> write_kubernetes(const config::K8sConfig& config) {
  refuse_overwrite(config.output_dir, config.overwrite);
  std::vector<fs::path> written;
  const auto write = [&](const fs::path& path, const std::string& text) {
    fs::create_directories(path.parent_path());
    write_file_atomic(path, text);
    written.push_back(path);
  };
  write(config.output_dir / "manifests.yaml", kubernetes_manifests(config));
  for (const RenderedFile& file : kubernetes_chart(config)) write(config.output_dir / "chart" / file.path, file.text);
  return written;
}

}  // namespace prl::launch
