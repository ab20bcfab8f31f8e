#include "launch/batch_job.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <boost/json/object.hpp>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <variant>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "config/cli.hpp"
#include "config/secrets.hpp"
#include "launch/rl_nodes.hpp"
#include "text/jinja.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

/// Paths come quoted for the shell. The signal before the time limit goes to the script alone, which has the program stop as Ctrl-C does:
/// it saves a checkpoint, and the job is queued again. The signal reaches the program through scancel, because an srun that gets SIGTERM
/// kills its tasks at once. A cancelled job gets SIGTERM in every process from SLURM itself, so the script only waits, and is not queued.
constexpr std::string_view kTemplate = R"sh(#!/bin/bash
#SBATCH --job-name={{ job_name }}
#SBATCH --nodes={{ num_nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --partition={{ partition }}
#SBATCH --output={{ log_file }}
#SBATCH --open-mode=append
#SBATCH --requeue
{% if num_gpus %}
#SBATCH --gres=gpu:{{ num_gpus }}
{% endif %}
{% if account %}
#SBATCH --account={{ account }}
{% endif %}
{% if time %}
#SBATCH --time={{ time }}
#SBATCH --signal=B:USR1@120
{% endif %}
{% if nodelist %}
#SBATCH --nodelist={{ nodelist }}
{% endif %}
{% if exclude %}
#SBATCH --exclude={{ exclude }}
{% endif %}
set -euo pipefail
cd {{ project_dir }}
if [ -f .env ]; then
  set -a
  . ./.env
  set +a
fi
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
{% if pre_run_command %}
{{ pre_run_command }}
{% endif %}

arguments=(--no-slurm)
{% if can_resume %}
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  arguments+=(--ckpt.resume-step -1)
fi
{% endif %}
steps=()
{% if num_nodes > 1 %}
# Where SLURM reaches a node is where the others do.
address_of() { scontrol show node --oneliner "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'; }
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
PRL_RDZV_ENDPOINT="$(address_of "${nodes[0]}"):${MASTER_PORT:-29500}"
export PRL_RDZV_ENDPOINT
attempt={{ log_dir }}/attempt_"${SLURM_RESTART_COUNT:-0}"
mkdir -p "$attempt"
for ((node = 0; node < {{ num_nodes }}; ++node)); do
  output=()
  if [ "$node" -gt 0 ]; then output=(--output="$attempt/node_$node.log"); fi
  PRL_NODE_RANK=$node PRL_NODE_HOST="$(address_of "${nodes[node]}")" srun --nodes=1 --ntasks=1 --nodelist="${nodes[node]}" ${output[@]+"${output[@]}"} \
    --kill-on-bad-exit=1 {{ program }} launch {{ command }} @ {{ config_file }} "${arguments[@]}" &
  steps+=($!)
done
{% else %}
srun --ntasks=1 --kill-on-bad-exit=1 {{ program }} {{ command }} @ {{ config_file }} "${arguments[@]}" &
steps+=($!)
{% endif %}
is_out_of_time=0
is_cancelled=0
tell_all() {
  if [ "$1" = KILL ]; then  # to a job it would mean to cancel all of it, this script too
    for i in "${!steps[@]}"; do scancel --signal=KILL "$SLURM_JOB_ID.$i" || kill -KILL "${steps[i]}" 2>/dev/null || true; done
  else
    scancel --signal="$1" "$SLURM_JOB_ID" || kill -"$1" "${steps[@]}" 2>/dev/null || true
  fi
}
trap 'is_out_of_time=1; tell_all TERM' USR1
trap 'is_cancelled=1' TERM INT
status=0
deadline=0
word=TERM
num_left={{ num_nodes }}
while [ "$num_left" -gt 0 ]; do
  sleep 1 &
  wait $! || true  # a signal ends it early
  for i in "${!steps[@]}"; do
    if kill -0 "${steps[i]}" 2>/dev/null; then continue; fi
    ended=0
    wait "${steps[i]}" || ended=$?
    unset "steps[i]"
    num_left=$((num_left - 1))
    if [ "$ended" -ne 0 ] && [ "$status" -eq 0 ]; then
      status=$ended
      deadline=$((SECONDS + {{ cleanup_grace_period }}))
    fi
    # A killed first node takes the place along where the nodes meet: the others cannot go on.
    if [ "$i" -eq 0 ] && [ "$ended" -gt 128 ] && [ "$deadline" -gt $((SECONDS + {{ lost_grace_period }})) ]; then
      deadline=$((SECONDS + {{ lost_grace_period }}))
    fi
  done
  if [ "$num_left" -gt 0 ] && [ "$status" -ne 0 ] && [ "$SECONDS" -ge "$deadline" ]; then
    echo "a step ended with status $status, and the others go on after their time: they get SIG$word"
    tell_all "$word"
    word=KILL
    deadline=$((SECONDS + 60))
  fi
done
{% if can_resume %}
if [ "$is_out_of_time" -eq 1 ]; then
  echo "the time limit is near: the job is queued again and goes on from its last checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
elif [ "$status" -gt 128 ] && [ "$is_cancelled" -eq 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt {{ max_requeues }} ]; then
  echo "a step was killed (status $status): the job is queued again and goes on from its last checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
{% endif %}
exit "$status"
)sh";

/// What nodes that have lost the first one get to end by themselves.
constexpr int kLostGracePeriod = 20;
/// Times that a job whose step was killed is queued again.
constexpr int kMaxRequeues = 3;
constexpr std::uint64_t kMaxTemplateBytes = 1 << 20;

/// A file of ours in the job's arguments, whatever its name holds.
std::string quoted(const fs::path& path) {
  std::string out = "'";
  for (const char c : fs::absolute(path).lexically_normal().string()) c == '\'' ? out += "'\\''" : out += c;
  return out + "'";
}

/// Directives end with their line, and sbatch splits them at spaces.
const std::string& directive(const char* key, const std::string& value) {
  const bool is_bad =
      value.empty() || std::ranges::any_of(value, [](unsigned char c) { return c <= ' ' || c == 127 || c == '"' || c == '\''; });
  if (is_bad)
    fail(ErrorCode::kInvalidArgument, "slurm.{}: wanted a word without spaces and quotes, which sbatch reads from one line; found \"{}\"",
         key, value);
  return value;
}

void set_directive(boost::json::object& out, const char* key, const std::optional<std::string>& value) {
  if (value)
    out[key] = directive(key, *value);
  else
    out[key] = nullptr;
}

BatchJob start_job(const config::SlurmConfig& slurm, const char* command, const fs::path& output_dir) {
  BatchJob job;
  job.slurm = slurm;
  job.command = command;
  job.output_dir = output_dir;
  job.config_file = output_dir / "configs" / fmt::format("{}.toml", command);
  job.program = fs::read_symlink("/proc/self/exe");
  return job;
}

bool uses_gpu(const config::ComputeConfig& compute) { return compute.device != config::DeviceKind::kCpu; }

/// One for each engine and each rank of the trainer; where the configuration numbers them, all up to the highest number.
int gpus_of_one_node(const config::RlConfig& config) {
  const auto* node = config.deployment ? std::get_if<config::SingleNodeDeployment>(&*config.deployment) : nullptr;
  int highest = 0, wanted = 0;
  const auto add = [&](const config::ComputeConfig& compute, const std::optional<std::vector<int>>& ids, int num) {
    if (!uses_gpu(compute)) return;
    wanted += ids ? 0 : num;
    if (ids && !ids->empty()) highest = std::max(highest, std::ranges::max(*ids) + 1);
  };
  add(config.trainer.compute, config.trainer_gpu_ids, node ? node->num_train_gpus : 1);
  if (node && config.inference) add(config.inference->compute, config.inference_gpu_ids, config::num_engine_gpus(*config.inference));
  if (node && config.teacher_inference)
    add(config.teacher_inference->compute, config.teacher_gpu_ids, config::num_engine_gpus(*config.teacher_inference));
  return highest + wanted;
}

}  // namespace

BatchJob batch_job(const config::RlConfig& config) {
  BatchJob job = start_job(*config.slurm, "rl", config.output_dir);
  job.num_gpus = gpus_of_one_node(config);
  if (const auto* nodes = config.deployment ? std::get_if<config::MultiNodeDeployment>(&*config.deployment) : nullptr) {
    const bool has_gpus = uses_gpu(config.trainer.compute) || (config.inference && uses_gpu(config.inference->compute));
    job.num_nodes = RlNodes(config).size();
    job.num_gpus = has_gpus ? nodes->gpus_per_node : 0;
  }
  job.can_resume = config.trainer.ckpt.has_value();
  job.secrets = config::secrets_of(config);
  return job;
}

BatchJob batch_job(const config::SftConfig& config) {
  BatchJob job = start_job(*config.slurm, "sft", config.output_dir);
  const auto* node = std::get_if<config::SftSingleNode>(&config.deployment);
  job.num_gpus = uses_gpu(config.compute) && node != nullptr ? node->num_gpus : 0;
  if (node != nullptr && config.eval && uses_gpu(config.inference->compute)) job.num_gpus += node->num_infer_gpus;
  if (const auto* nodes = std::get_if<config::SftMultiNode>(&config.deployment)) {
    job.num_nodes = nodes->num_nodes;
    job.num_gpus = uses_gpu(config.compute) ? nodes->gpus_per_node : 0;
  }
  job.can_resume = config.ckpt.has_value();
  job.secrets = config::secrets_of(config);
  return job;
}

BatchJob batch_job(const config::InferenceConfig& config) {
  BatchJob job = start_job(*config.slurm, "inference", config.output_dir);
  job.num_gpus = uses_gpu(config.compute) ? config::num_engine_gpus(config) : 0;
  if (const auto* nodes = std::get_if<config::InferenceMultiNode>(&config.deployment)) {
    job.num_nodes = nodes->num_nodes;
    job.num_gpus = uses_gpu(config.compute) ? nodes->gpus_per_node : 0;
  }
  if (const auto* nodes = std::get_if<config::InferenceDisaggregated>(&config.deployment)) {
    job.num_nodes = config::num_nodes_of(*nodes);
    job.num_gpus = uses_gpu(config.compute) ? nodes->gpus_per_node : 0;
  }
  job.secrets = config::secrets_of(config);
  return job;
}

std::string render_batch_script(const BatchJob& job) {
  const config::SlurmConfig& slurm = job.slurm;
  const std::string& name = directive("job_name", slurm.job_name);
  if (name.find('/') != std::string::npos || name.starts_with('.'))
    fail(ErrorCode::kInvalidArgument, "slurm.job_name: it names the script too, so wanted no '/' and no leading '.'; found \"{}\"", name);
  const std::string log_file = (fs::absolute(job.output_dir).lexically_normal() / "job_%j.log").string();
  boost::json::object values;
  values["job_name"] = name;
  values["partition"] = directive("partition", slurm.partition);
  values["log_file"] = log_file.find_first_of(" \t\n\"'\\") == std::string::npos ? log_file : fmt::format("\"{}\"", log_file);
  if (log_file.find_first_of("\n\"\\") != std::string::npos)
    fail(ErrorCode::kInvalidArgument, "output_dir: sbatch cannot write its log to a path with quotes, backslashes or line ends: {}",
         log_file);
  set_directive(values, "account", slurm.account);
  set_directive(values, "time", slurm.time);
  set_directive(values, "nodelist", slurm.nodelist);
  set_directive(values, "exclude", slurm.exclude);
  if (slurm.pre_run_command)
    values["pre_run_command"] = *slurm.pre_run_command;
  else
    values["pre_run_command"] = nullptr;
  values["project_dir"] = quoted(slurm.project_dir);
  values["output_dir"] = quoted(job.output_dir);
  values["config_file"] = quoted(job.config_file);
  values["program"] = quoted(job.program);
  values["command"] = job.command;
  values["num_gpus"] = job.num_gpus;
  values["num_nodes"] = job.num_nodes;
  values["log_dir"] = quoted(job.output_dir / "logs" / "slurm");
  values["cleanup_grace_period"] = slurm.cleanup_grace_period;
  values["lost_grace_period"] = kLostGracePeriod;
  values["max_requeues"] = kMaxRequeues;
  values["can_resume"] = job.can_resume;
  if (!slurm.template_path) return text::JinjaTemplate(kTemplate).render(values);
  try {
    return text::JinjaTemplate(read_file(*slurm.template_path, kMaxTemplateBytes)).render(values);
  } catch (const Error& error) {
    throw error.with_context(fmt::format("slurm.template_path = {}", slurm.template_path->string()));
  }
}

namespace {

/// The last line of a script that we wrote: whoever changes the script makes it another's.
std::string seal_of(std::string_view script) {
  return fmt::format("# Written by prl, which replaces it while it is unchanged; sum {:016x}\n", hash_bytes(script));
}

bool is_sealed(std::string_view text) {
  if (!text.ends_with('\n')) return false;
  const std::size_t end = text.rfind('\n', text.size() - 2);
  return end != std::string_view::npos && text.substr(end + 1) == seal_of(text.substr(0, end + 1));
}

}  // namespace

fs::path write_batch_script(const BatchJob& job) {
  std::string script = render_batch_script(job);
  if (!script.ends_with('\n')) script += '\n';
  const fs::path path = job.output_dir / fmt::format("{}.sbatch", job.slurm.job_name);
  fs::create_directories(job.output_dir);
  const fs::file_status there = fs::symlink_status(path);
  const bool may_write = !fs::exists(there) || (fs::is_regular_file(there) && is_sealed(read_file(path, 2 * kMaxTemplateBytes)));
  if (!may_write)
    fail(ErrorCode::kAlreadyExists,
         "{} is not as prl wrote it, so it stays: submit it with sbatch yourself, move it, or choose another slurm.job_name or output_dir",
         path.string());
  write_file_atomic(path, script + seal_of(script));
  log::info("wrote {}", path.string());
  return path;
}

void submit_batch_job(const BatchJob& job, const fs::path& script) {
  if (!job.secrets.empty()) ::setenv(config::kSecretsVariable, job.secrets.c_str(), 1);  // sbatch hands its variables to the job
  const std::string command = fmt::format("timeout 60 sbatch --parsable {} 2>&1", quoted(script));
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) fail(ErrorCode::kUnavailable, "cannot run sbatch");
  std::string output;
  std::array<char, 512> buffer;
  while (output.size() < 64 * 1024 && std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) output += buffer.data();
  const int status = ::pclose(pipe);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  while (!output.empty() && (output.back() == '\n' || output.back() == ' ')) output.pop_back();
  if (code == 127)
    fail(ErrorCode::kUnavailable, "there is no sbatch in PATH: call this where SLURM's commands are, or submit {} yourself",
         script.string());
  if (code == 124) fail(ErrorCode::kUnavailable, "sbatch did not answer within 60 s; is slurmctld up? The script is {}", script.string());
  if (code != 0) fail(ErrorCode::kUnavailable, "sbatch refused {} (exit status {}): {}", script.string(), code, output);
  std::string number = output.substr(output.rfind('\n') + 1);  // warnings come before it
  number = number.substr(0, number.find(';'));                 // the cluster's name comes after it
  const std::string log_file = (fs::absolute(job.output_dir).lexically_normal() / fmt::format("job_{}.log", number)).string();
  log::success("submitted job {}; follow it with `tail -F {}`, end it with `scancel {}`", number, log_file, number);
}

}  // namespace prl::launch
