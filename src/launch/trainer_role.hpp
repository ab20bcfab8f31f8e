#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <stop_token>

#include "config/trainer_config.hpp"
#include "monitor/monitor.hpp"
#include "trainer/rl_trainer.hpp"

namespace prl::launch {

// Host memory for activations and optimizer state is made beside `runtime` if it is asked for and the device has memory of its own.
trainer::PolicyOptions policy_options(const config::TrainerConfig& config, const std::shared_ptr<DeviceRuntime>& runtime);
/// How rows are cut into leaves and shared by ranks.
trainer::RowCut row_cut(const config::TrainerModelConfig& model);
trainer::GradientStepOptions step_options(const config::TrainerConfig& config, const std::shared_ptr<DeviceRuntime>& runtime);
/// What the run loop needs; `measured_peak_flops` is of the policy's dtype.
trainer::RlRunOptions rl_run_options(const config::TrainerConfig& config, trainer::GradientStepOptions step, double measured_peak_flops);
/// What is recorded of the run's steps, and held against those of another that it replays.
void add_records(trainer::RlRunOptions& options, const config::TrainerConfig& config, const DeviceRuntime& runtime);
/// Checkpoints as a trainer-like section asks for them, below `output_dir`. `chat_template`, text or file as the config key takes it,
/// goes with the weights in place of the tokenizer folder's own.
std::optional<trainer::CheckpointOptions> checkpoint_options(const std::optional<config::TrainerCkptConfig>& config,
                                                             const std::filesystem::path& output_dir,
                                                             const std::filesystem::path& tokenizer,
                                                             const std::optional<std::string>& chat_template);
std::optional<trainer::ResumeOptions> resume_options(const std::optional<config::TrainerCkptConfig>& config);

/// Metrics of a role to <output_dir>/<file_monitor.path>, in rows of `role` (run_folder.hpp). A benchmark by itself keeps no rows: its
/// folder may be another run's.
std::unique_ptr<monitor::Monitor> make_monitor(monitor::MetricSet declared, const char* role, const std::filesystem::path& output_dir,
                                               const config::FileMonitorConfig& file, bool is_bench = false);
/// The same for a monitor that has kept no rows so far.
void open_monitor(monitor::Monitor& monitor, const std::filesystem::path& output_dir, const config::FileMonitorConfig& file, bool is_bench);

/// `prl trainer`: a trainer in a process of its own, samples and weights through files or ZeroMQ. Returns the exit status.
int run_trainer_role(const config::TrainerConfig& config, std::stop_token stop);

}  // namespace prl::launch
