#pragma once

#include "config/cli.hpp"
#include "config/tool_config.hpp"

/// One function per command: load the configuration, wire, run, report. Each returns the exit status and throws what main prints.
namespace prl::apps {

int run_rl(const config::ParsedCommand& parsed);
int run_trainer(const config::ParsedCommand& parsed);
int run_orchestrator(const config::ParsedCommand& parsed);
int run_inference(const config::ParsedCommand& parsed);
int run_sft(const config::ParsedCommand& parsed);
int run_launch(const config::ParsedCommand& parsed);
/// What `prl launch rl` and `prl launch inference` do; `parsed` has the words after the command.
int run_rl_of_node(const config::ParsedCommand& parsed, const config::LaunchConfig& options);
int run_inference_of_node(const config::ParsedCommand& parsed, const config::LaunchConfig& options);
int run_eval(const config::ParsedCommand& parsed);
int run_synthesize(const config::ParsedCommand& parsed);
int run_results(const config::ParsedCommand& parsed);
int run_bench(const config::ParsedCommand& parsed);
int run_plan(const config::ParsedCommand& parsed);
int run_doctor(const config::ParsedCommand& parsed);
int run_init_model(const config::ParsedCommand& parsed);
int run_make_data(const config::ParsedCommand& parsed);
int run_convert(const config::ParsedCommand& parsed);
int run_runs(const config::ParsedCommand& parsed);
int run_k8s(const config::ParsedCommand& parsed);
int run_router(const config::ParsedCommand& parsed);
int run_dashboard(const config::ParsedCommand& parsed);
int run_plot(const config::ParsedCommand& parsed);
int run_report(const config::ParsedCommand& parsed);
int run_top(const config::ParsedCommand& parsed);
int run_replay(const config::ParsedCommand& parsed);
int run_chat(const config::ParsedCommand& parsed);
int run_env(const config::ParsedCommand& parsed);
int run_env_server(const config::ParsedCommand& parsed);
int run_evals(const config::ParsedCommand& parsed);

}  // namespace prl::apps
