#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "apps/commands.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "config/problem.hpp"
#include "net/errors.hpp"

namespace {

using prl::config::Command;

int dispatch(const prl::config::ParsedCommand& parsed) {
  namespace apps = prl::apps;
  switch (*parsed.command) {
    case Command::kRl: return apps::run_rl(parsed);
    case Command::kTrainer: return apps::run_trainer(parsed);
    case Command::kRouter: return apps::run_router(parsed);
    case Command::kK8s: return apps::run_k8s(parsed);
    case Command::kRuns: return apps::run_runs(parsed);
    case Command::kOrchestrator: return apps::run_orchestrator(parsed);
    case Command::kInference: return apps::run_inference(parsed);
    case Command::kSft: return apps::run_sft(parsed);
    case Command::kLaunch: return apps::run_launch(parsed);
    case Command::kEval: return apps::run_eval(parsed);
    case Command::kSynthesize: return apps::run_synthesize(parsed);
    case Command::kResults: return apps::run_results(parsed);
    case Command::kBench: return apps::run_bench(parsed);
    case Command::kPlan: return apps::run_plan(parsed);
    case Command::kDoctor: return apps::run_doctor(parsed);
    case Command::kInitModel: return apps::run_init_model(parsed);
    case Command::kMakeData: return apps::run_make_data(parsed);
    case Command::kConvert: return apps::run_convert(parsed);
    case Command::kDashboard: return apps::run_dashboard(parsed);
    case Command::kPlot: return apps::run_plot(parsed);
    case Command::kReport: return apps::run_report(parsed);
    case Command::kReplay: return apps::run_replay(parsed);
    case Command::kTop: return apps::run_top(parsed);
    case Command::kChat: return apps::run_chat(parsed);
    case Command::kEnv: return apps::run_env(parsed);
    case Command::kEnvServer: return apps::run_env_server(parsed);
    case Command::kEvals: return apps::run_evals(parsed);
  }
  return 1;
}

int run(int argc, char** argv) {
  try {
    const prl::config::ParsedCommand parsed = prl::config::parse_command(argc, argv);
    if (parsed.wants_version) {
      std::printf("prl %s\n", PRL_VERSION);
      return 0;
    }
    if (!parsed.command) {
      std::fputs(prl::config::program_help().c_str(), stdout);
      return 0;
    }
    return dispatch(parsed);
  } catch (const prl::config::ConfigError& error) {
    prl::config::print_error(error);
  } catch (const std::exception&) {
    const prl::Error error = prl::net::to_error(std::current_exception());
    const bool is_ours = error.code() == prl::ErrorCode::kInternal;
    prl::log::error("{}{} ({})", is_ours ? "internal error: " : "", error.what(), prl::to_string(error.code()));
  }
  return 1;
}

/// Of a command that did its work, but whose words did not all get to a file or a pipe: scripts must not take a part for the whole.
int status_of_output(int status) {
  const bool is_written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  if (is_written || status != 0) return status;
  prl::log::error("cannot write to the standard output: {}", std::strerror(errno));
  return 1;
}

}  // namespace

int main(int argc, char** argv) { return status_of_output(run(argc, argv)); }
