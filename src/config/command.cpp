#include "config/command.hpp"

namespace prl::config {
namespace {

constexpr CommandInfo kCommands[] = {
    {Command::kRl, "rl", "Reinforcement learning: trainer, orchestrator and inference in one launch"},
    {Command::kSft, "sft", "Supervised fine-tuning on local conversations"},
    {Command::kInference, "inference", "OpenAI-compatible server whose weights can be updated"},
    {Command::kRouter, "router", "One address in front of several inference engines"},
    {Command::kOrchestrator, "orchestrator", "The orchestrator alone"},
    {Command::kTrainer, "trainer", "The trainer alone"},
    {Command::kLaunch, "launch", "Start the ranks of `prl sft` or `prl trainer` on this node"},
    {Command::kEval, "eval", "Evaluate a model, a server or the checkpoints of a run"},
    {Command::kSynthesize, "synthesize", "Generate episodes as training data"},
    {Command::kResults, "results", "Look at what eval and synthesize wrote"},
    {Command::kDashboard, "dashboard", "Show finished and running runs in a browser"},
    {Command::kPlot, "plot", "Draw metrics of runs as a picture"},
    {Command::kReport, "report", "Write a run as one HTML file to send to others"},
    {Command::kReplay, "replay", "Train once more on what a run trained on, to the same weights or with other settings"},
    {Command::kRuns, "runs", "List, add, pause, drain or stop the runs of a trainer that serves several"},
    {Command::kTop, "top", "Watch a run in the terminal"},
    {Command::kInitModel, "init-model", "Make a small model folder with random weights"},
    {Command::kMakeData, "make-data", "Write SFT conversations from an environment's demonstrations"},
    {Command::kConvert, "convert", "Make a model folder from a GGUF file or another folder"},
    {Command::kChat, "chat", "Talk to a model"},
    {Command::kBench, "bench", "Measure this machine"},
    {Command::kPlan, "plan", "Foretell what fits on how many devices, and how long a step takes"},
    {Command::kDoctor, "doctor", "Say what this machine has and what that means"},
    {Command::kEnv, "env", "Install, list, show, remove or begin Python environments"},
    {Command::kK8s, "k8s", "Write manifests and a Helm chart for Kubernetes"},
    {Command::kEnvServer, "env-server", "Python workers of an environment for runs on other machines"},
    {Command::kEvals, "evals", "Evaluate a model once, or the steps of a training run while it goes on"},
};

}  // namespace

std::span<const CommandInfo> all_commands() { return kCommands; }

std::string_view command_name(Command command) {
  for (const CommandInfo& info : kCommands)
    if (info.command == command) return info.name;
  return "?";
}

std::optional<Command> find_command(std::string_view name) {
  for (const CommandInfo& info : kCommands)
    if (info.name == name) return info.command;
  return std::nullopt;
}

}  // namespace prl::config
