// What the short help of a command shows: how it is called, and the keys that most runs set.
#include "config/detail/help_guide.hpp"

namespace prl::config::detail {
namespace {

constexpr std::string_view kRlKeys[] = {"model.name",
                                        "orchestrator.train.env[].id",
                                        "orchestrator.batch_size",
                                        "orchestrator.group_size",
                                        "seq_len",
                                        "max_steps",
                                        "trainer.optim<adamw>.lr",
                                        "orchestrator.train.sampling.temperature",
                                        "orchestrator.train.sampling.max_completion_tokens",
                                        "max_async_level",
                                        "ckpt.interval",
                                        "ckpt.resume_step",
                                        "compute.device",
                                        "output_dir",
                                        "clean_output_dir",
                                        "dry_run"};
constexpr std::string_view kTrainerKeys[] = {"model.name",      "model.seq_len", "optim<adamw>.lr",  "loss<default>.kl_tau", "max_steps",
                                             "max_async_level", "ckpt.interval", "ckpt.resume_step", "compute.device",       "output_dir"};
constexpr std::string_view kOrchestratorKeys[] = {"student.model.name",
                                                  "student.client.base_url",
                                                  "train.env[].id",
                                                  "train.env[].args",
                                                  "batch_size",
                                                  "group_size",
                                                  "seq_len",
                                                  "max_steps",
                                                  "train.sampling.temperature",
                                                  "train.sampling.max_completion_tokens",
                                                  "max_async_level",
                                                  "output_dir"};
constexpr std::string_view kInferenceKeys[] = {"model.name",     "model.max_model_len", "model.dtype",   "server.host",    "server.port",
                                               "server.api_key", "max_num_seqs",        "kv.num_blocks", "compute.device", "output_dir"};
constexpr std::string_view kSftKeys[] = {
    "model.name",    "data<sft>.name",   "data<sft>.batch_size", "data<sft>.seq_len", "max_steps",        "optim<adamw>.lr", "val.interval",
    "ckpt.interval", "ckpt.resume_step", "compute.device",       "output_dir",        "clean_output_dir", "dry_run"};
constexpr std::string_view kEvalKeys[] = {"env[].id",     "env[].args",     "model.name",           "client.base_url",
                                          "num_examples", "group_size",     "sampling.temperature", "sampling.max_completion_tokens",
                                          "weights_dir",  "save.disk.path", "resume_path",          "max_concurrent",
                                          "output_dir",   "dry_run"};
constexpr std::string_view kSynthesizeKeys[] = {"env[].id",
                                                "model.name",
                                                "client.base_url",
                                                "num_examples",
                                                "group_size",
                                                "sampling.temperature",
                                                "sampling.max_completion_tokens",
                                                "save.disk.path",
                                                "max_concurrent",
                                                "output_dir",
                                                "dry_run"};
constexpr std::string_view kMakeDataKeys[] = {"output", "env.id", "env.args", "num_examples", "eval_split"};
constexpr std::string_view kChatKeys[] = {
    "model.name", "client.base_url", "prompt", "system_prompt", "sampling.temperature", "sampling.max_completion_tokens", "compute.device"};

/// What is of one suite alone is left to --help all.
constexpr std::string_view kBenchKeys[] = {"suite",
                                           "model",
                                           "shape",
                                           "num_layers",
                                           "quantization",
                                           "num_sequences",
                                           "tp",
                                           "prompt_tokens",
                                           "completion_tokens",
                                           "train_tokens",
                                           "sequence_tokens",
                                           "checkpoint_every",
                                           "num_repeats",
                                           "speculative_tokens",
                                           "speculative_fresh",
                                           "peer",
                                           "num_rollouts",
                                           "max_concurrent",
                                           "num_adapters",
                                           "lora_rank",
                                           "train_lora_rank",
                                           "output_json",
                                           "overwrite",
                                           "compute.device",
                                           "compute.dtype",
                                           "compute.num_threads"};

constexpr std::string_view kPlanKeys[] = {
    "model",         "work",       "card",          "num_devices",       "num_infer_devices", "gpus_per_node",     "seq_len",
    "num_rows",      "batch_size", "prompt_tokens", "completion_tokens", "checkpoint_every",  "optim_cpu_offload", "assume_bandwidth",
    "assume_memory", "json"};

constexpr std::string_view kPlanNotes =
    "Memory is the plan that a run makes of a device before it begins. The time of a step is the sum of its parts:\n"
    "compute (forward and backward), exchange (gradients to their owners), optimizer, gather (new weights of the other\n"
    "ranks), and of rl sampling and weight sync. The output names what was assumed; --assume-... changes it, and\n"
    "docs/operators/plan.md says how each part is formed and how far off it was where it was measured.\n";

constexpr std::string_view kReplayNotes =
    "The samples are those that the run recorded with --trainer.record, in its order; no model is asked and no environment is\n"
    "played. With the run's own settings each step must make the weights that it made then, bit for bit. With others, as\n"
    "--trainer.optim.lr 1e-6, it shows what they would have done with the same samples. docs/operators/replay.md.\n";

constexpr HelpGuide kGuides[] = {
    {Command::kRl, "prl rl @ configs/reverse_text/rl.toml --model.name MODEL --output-dir outputs/first", kRlKeys},
    {Command::kTrainer, "prl trainer @ outputs/first/configs/trainer.toml", kTrainerKeys},
    {Command::kOrchestrator, "prl orchestrator @ outputs/first/configs/orchestrator.toml", kOrchestratorKeys},
    {Command::kInference, "prl inference --model.name MODEL --server.port 8000", kInferenceKeys},
    {Command::kSft, "prl sft --model.name MODEL --data.name conversations.jsonl --max-steps 100 --output-dir outputs/sft", kSftKeys},
    {Command::kEval, "prl eval --env.id reverse-text --model.name MODEL --num-examples 20", kEvalKeys},
    {Command::kSynthesize, "prl synthesize --env.id reverse-text --model.name MODEL --num-examples 20", kSynthesizeKeys},
    {Command::kMakeData, "prl make-data conversations.jsonl --env.id reverse-text", kMakeDataKeys},
    {Command::kChat, "prl chat --model.name MODEL", kChatKeys},
    {Command::kResults, "prl results outputs --sort lowest_first", {}},
    {Command::kInitModel, "prl init-model models/tiny", {}},
    {Command::kConvert, "prl convert model.gguf models/converted", {}},
    {Command::kBench, "prl bench decode --shape smollm2-135m", kBenchKeys},
    {Command::kPlan, "prl plan qwen3-8b --card h200 --num-devices 8 --seq-len 8192", kPlanKeys, kPlanNotes},
    {Command::kDoctor, "prl doctor", {}},
    {Command::kEnv, "prl env install reverse-text-py==0.1.0", {}},
    {Command::kK8s, "prl k8s render --example reverse-text --output-dir k8s-run", {}},
    {Command::kRouter, "prl router --engines http://node0:8000,http://node1:8000 --port 9000", {}},
    {Command::kDashboard, "prl dashboard outputs/first outputs/second", {}},
    {Command::kPlot, "prl plot outputs/first outputs/second --metric reward --out curve.svg", {}},
    {Command::kReport, "prl report outputs/first --out report.html", {}},
    {Command::kTop, "prl top outputs/first", {}},
    {Command::kReplay, "prl replay outputs/first", {}, kReplayNotes},
    {Command::kEvals,
     "prl evals --model MODEL --eval.env.0.id reverse-text --online.broadcasts-dir outputs/weights --output-dir outputs/evals",
     {}},
    {Command::kLaunch, "prl launch --nproc-per-node 8 sft @ sft.toml", {}},
    {Command::kEnvServer, "prl env-server --env.id reverse-text", {}},
};

}  // namespace

std::span<const HelpGuide> help_guides() { return kGuides; }

}  // namespace prl::config::detail
