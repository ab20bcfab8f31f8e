#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "config/schema.hpp"

/// Sections that several commands share. Field meanings are the text given to visit(); `--help` prints the same.
namespace prl::config {

enum class DeviceKind { kAuto, kCpu, kCuda };
std::span<const EnumEntry> enum_entries(DeviceKind);
enum class ComputeDType { kAuto, kBFloat16, kFloat32, kFloat16 };
std::span<const EnumEntry> enum_entries(ComputeDType);
enum class LatentAttention { kLatents, kHeads };
std::span<const EnumEntry> enum_entries(LatentAttention);
enum class LogLevel { kDebug, kInfo, kWarning, kError };
std::span<const EnumEntry> enum_entries(LogLevel);

/// Where and how precisely a role computes.
struct ComputeConfig {
  DeviceKind device = DeviceKind::kAuto;
  ComputeDType dtype = ComputeDType::kAuto;
  int num_threads = 0;
  template <class V>
  void visit(V& v) {
    v.field("device", device, "Device that computes; auto takes a GPU if this build and machine have one");
    v.field("dtype", dtype, "Type of matrix products; auto is bfloat16 where the device has it, else float32");
    v.field("num_threads", num_threads, "CPU threads of the role, 0 for one per available core",
            {.unit = "threads", .min = 0, .max = 4096});
  }
};

struct LogConfig {
  LogLevel level = LogLevel::kInfo;
  LogLevel vf_level = LogLevel::kInfo;
  bool json_logging = false;
  bool log_data = false;
  bool file = true;
  double interval = 10.0;
  double step_interval = 0.0;
  std::vector<int> ranks_filter = {0};
  template <class V>
  void visit(V& v) {
    v.field("level", level, "Least severity that is logged; PRIME_LOG_LEVEL sets its default");
    v.field("vf_level", vf_level, "Least severity logged by Python environments; PRIME_VF_LOG_LEVEL sets its default");
    v.field("json_logging", json_logging, "One JSON object per line instead of text");
    v.field("log_data", log_data, "Log the first sample of the data",
            {.status = inert("samples are in the rollouts folder, requests are not logged")});
    v.field("file", file, "Also write to <output_dir>/logs");
    v.field("interval", interval, "Time between two progress lines", {.unit = "seconds", .min = 0, .is_open_min = true});
    v.field("step_interval", step_interval, "Least time between two step lines on the console; log files get every step",
            {.unit = "seconds", .min = 0});
    v.field("ranks_filter", ranks_filter, "Trainer ranks whose lines reach the role's log",
            {.min = 0, .status = inert("rank 0 writes the role's log, each other rank one of its own")});
  }
};

/// The part of a log section that `rl` passes on to its roles.
struct SharedLogConfig {
  std::optional<LogLevel> level;
  std::optional<LogLevel> vf_level;
  std::optional<bool> json_logging;
  std::optional<bool> file;
  std::optional<double> interval;
  double step_interval = 0.0;
  template <class V>
  void visit(V& v) {
    v.field("level", level, "Least severity that is logged, for all roles");
    v.field("vf_level", vf_level, "Least severity logged by Python environments");
    v.field("json_logging", json_logging, "One JSON object per line instead of text, for all roles");
    v.field("file", file, "Also write to <output_dir>/logs");
    v.field("interval", interval, "Time between two progress lines, for trainer and orchestrator",
            {.unit = "seconds", .min = 0, .is_open_min = true});
    v.field("step_interval", step_interval, "Least time between two step lines on the console; log files get every step",
            {.unit = "seconds", .min = 0});
  }
};

/// The page of a run while it runs.
struct DashboardConfig {
  std::string host = "127.0.0.1";
  int port = 7007;
  bool control = false;
  std::optional<std::string> control_api_key;
  template <class V>
  void visit(V& v) {
    v.field("control", control, "Let the page pause the run, make a checkpoint and stop it, for who knows the key");
    v.field("control_api_key", control_api_key, "Key for that; one is drawn and written to <output_dir>/control.key if not set");
    v.field("host", host, "Address to listen on; the page asks for no key, so other machines see the run if it is not a loopback address");
    v.field("port", port, "Port of the page; a free one is taken if it is 0 or busy", {.min = 0, .max = 65535});
  }
};

struct LogExtrasConfig {
  bool samples = true;
  bool distributions = true;
  int interval = 10;
  std::optional<double> sample_ratio;
  template <class V>
  void visit(V& v) {
    v.field("samples", samples, "Log a table of prompts and completions");
    v.field("distributions", distributions, "Log distributions of reward, advantage and entropy");
    v.field("interval", interval, "Steps between two such tables", {.unit = "steps", .min = 1});
    v.field("sample_ratio", sample_ratio, "Part of the rollouts that is logged", {.min = 0, .max = 1});
  }
};

/// Weights & Biases, through its own client. `offline = true` and a missing API key keep the run in files for `wandb sync`.
struct WandbConfig {
  std::string project = "prime-rl";
  std::optional<std::string> entity;
  std::optional<std::string> name;
  std::optional<std::string> group;
  std::optional<std::vector<std::string>> tags;
  std::optional<std::string> id;
  bool offline = false;
  std::optional<LogExtrasConfig> log_extras = LogExtrasConfig{};
  template <class V>
  void visit(V& v) {
    v.field("project", project, "Project that the run belongs to");
    v.field("entity", entity, "Team or user that owns the project");
    v.field("name", name, "Display name of the run");
    v.field("group", group, "Group of runs");
    v.field("tags", tags, "Tags of the run");
    v.field("id", id, "Identity of a run to continue");
    v.field("offline", offline, "Write metrics to local files only");
    v.field("log_extras", log_extras, "Tables of samples and distributions");
  }
};

/// TensorBoard's event files, a folder per role.
struct TensorBoardConfig {
  std::filesystem::path path = "tensorboard";
  template <class V>
  void visit(V& v) {
    v.field("path", path, "Folder of event files, relative to output_dir");
  }
};

/// MLflow, through its own client.
struct MlflowConfig {
  std::optional<std::string> tracking_uri;
  std::string experiment = "prime-rl";
  std::optional<std::string> name;
  template <class V>
  void visit(V& v) {
    v.field("tracking_uri", tracking_uri, "Server or database of MLflow; MLFLOW_TRACKING_URI, else mlflow.db in output_dir");
    v.field("experiment", experiment, "Experiment that the run belongs to");
    v.field("name", name, "Display name of the run; that of output_dir if not set");
  }
};

/// trackio, through its own client.
struct TrackioConfig {
  std::string project = "prime-rl";
  std::optional<std::string> name;
  std::optional<std::string> space_id;
  template <class V>
  void visit(V& v) {
    v.field("project", project, "Project that the run belongs to");
    v.field("name", name, "Display name of the run; that of output_dir if not set");
    v.field("space_id", space_id, "Hugging Face Space that shows the run; local if not set");
  }
};

struct PrimeMonitorConfig {
  std::optional<std::string> run_name;
  std::string base_url = "https://api.primeintellect.ai/api/v1/rft";
  std::string api_key_var = "PRIME_API_KEY";
  std::optional<LogExtrasConfig> log_extras;
  template <class V>
  void visit(V& v) {
    v.field("run_name", run_name, "Name of the run on the platform");
    v.field("base_url", base_url, "Address of the platform");
    v.field("api_key_var", api_key_var, "Environment variable that holds the API key");
    v.field("log_extras", log_extras, "Tables of samples and distributions");
  }
};

struct FileMonitorConfig {
  std::filesystem::path path = "metrics.jsonl";
  template <class V>
  void visit(V& v) {
    v.field("path", path, "JSONL file of metrics, relative to output_dir");
  }
};

struct HeartbeatConfig {
  std::string url;
  template <class V>
  void visit(V& v) {
    v.field("url", url, "Address that gets one GET request per step");
  }
};

/// Prometheus endpoint of a trainer.
struct MetricsServerConfig {
  std::string host = "127.0.0.1";
  int port = 8000;
  template <class V>
  void visit(V& v) {
    v.field("host", host, "Address to listen on");
    v.field("port", port, "Port to listen on", {.min = 1, .max = 65535});
  }
};

struct TokenizerConfig {
  std::optional<std::string> name;
  std::optional<bool> trust_remote_code;
  std::optional<std::string> chat_template;
  template <class V>
  void visit(V& v) {
    v.field("name", name, "Folder of the tokenizer; the model's own if not set");
    v.field("trust_remote_code", trust_remote_code, "Run Python code of the model folder",
            {.status = inert("no code of a model folder is ever run")});
    v.field("chat_template", chat_template, "Jinja text, or the path of a file that holds it");
  }
};

struct RendererConfig {
  std::string name = "auto";
  std::optional<std::string> thinking_retention;
  Value chat_template_kwargs = Value::table();
  template <class V>
  void visit(V& v) {
    v.field("name", name,
            "How messages become tokens: auto, default (the chat template) or a family: qwen3, gpt-oss, glm-4.5, minimax-m2, kimi-k2, ...");
    v.field("thinking_retention", thinking_retention,
            "Which past reasoning stays in the prompt: template, tool_cycle or all; for renderers of model families");
    v.field("chat_template_kwargs", chat_template_kwargs,
            "Options of the chat template or of the family's renderer: enable_thinking, reasoning_effort, conversation_start_date, ...");
  }
};

/// The orchestrator also reads replies.
struct OrchestratorRendererConfig : RendererConfig {
  std::optional<std::string> tool_call_parser = "auto";
  std::optional<std::string> reasoning_parser;
  template <class V>
  void visit(V& v) {
    RendererConfig::visit(v);
    v.field(
        "tool_call_parser", tool_call_parser,
        "How tool calls are read from replies: auto, hermes, qwen3_coder, glm45, minimax_m2, kimi_k2, openai, ...; None for not at all");
    v.field("reasoning_parser", reasoning_parser, "How reasoning is split off replies: auto, think, qwen3, ...; None for not at all");
  }
};

struct SlurmConfig {
  std::string job_name = "prime-rl";
  std::filesystem::path project_dir = ".";
  std::optional<std::filesystem::path> template_path;
  std::string partition = "cluster";
  std::optional<std::string> nodelist;
  std::optional<std::string> exclude;
  std::optional<std::string> account;
  std::optional<std::string> time;
  std::optional<std::string> pre_run_command;
  int cleanup_grace_period = 3600;
  bool shared_fs = true;
  template <class V>
  void visit(V& v) {
    v.field("job_name", job_name, "Name of the job");
    v.field("project_dir", project_dir, "Folder that the job starts in");
    v.field("template_path", template_path, "Own template of the batch script, in Jinja");
    v.field("partition", partition, "Partition to submit to");
    v.field("nodelist", nodelist, "Nodes to use");
    v.field("exclude", exclude, "Nodes to avoid");
    v.field("account", account, "Account to charge");
    v.field("time", time, "Time limit, as sbatch writes it");
    v.field("pre_run_command", pre_run_command, "Shell command that runs before the roles");
    v.field("cleanup_grace_period", cleanup_grace_period, "Time the other nodes get to end by themselves after one has failed",
            {.unit = "seconds", .min = 0});
    v.field("shared_fs", shared_fs, "The nodes share one file system",
            {.status = inert("nothing is installed on a node, and all read and write output_dir")});
  }
};

/// `--bench`: 4 steps (one to warm up, three measured), no checkpoints, a table at the end.
struct BenchModeConfig {
  std::optional<std::filesystem::path> output_json;
  bool overwrite = false;
  template <class V>
  void visit(V& v) {
    v.field("output_json", output_json, "Also write the table as JSON");
    v.field("overwrite", overwrite, "Replace an existing output_json");
  }
};

}  // namespace prl::config
