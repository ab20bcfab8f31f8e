#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "config/inference_config.hpp"
#include "config/rl_config.hpp"
#include "config/sft_config.hpp"

namespace prl::launch {

/// A SLURM job that runs one command of this program, on several nodes through `prl launch` (spec/prime-rl.md 9.2).
struct BatchJob {
  config::SlurmConfig slurm;
  std::string command;  ///< "rl", "sft", "inference"
  std::filesystem::path output_dir;
  std::filesystem::path config_file;  ///< what the job starts from, written before
  std::filesystem::path program;      ///< this binary; the node must see it under the same path
  int num_nodes = 1;
  int num_gpus = 0;         ///< of each node; 0: the job asks for none
  bool can_resume = false;  ///< has checkpoints: when SLURM starts the job again, it goes on from the last one
  std::string secrets;      ///< for config::kSecretsVariable of the job; empty: none
};

/// Jobs of these commands. GPUs: one for each rank of a trainer and each engine, none with compute.device = "cpu".
BatchJob batch_job(const config::RlConfig& config);
BatchJob batch_job(const config::SftConfig& config);
BatchJob batch_job(const config::InferenceConfig& config);

/// The batch script: slurm.template_path, or the built-in one, as a Jinja template. Error{kInvalidArgument} naming the key of a value that
/// cannot stand in a script (control characters, a job name that is no file name) or the template's line.
std::string render_batch_script(const BatchJob& job);
/// Writes <output_dir>/<job name>.sbatch and returns its path. Error{kAlreadyExists} if a file is there that it did not write or that was
/// changed since.
std::filesystem::path write_batch_script(const BatchJob& job);
/// Hands a script to sbatch and logs the job's number and how to follow it. Error{kUnavailable} with sbatch's words, or saying that there
/// is no sbatch here.
void submit_batch_job(const BatchJob& job, const std::filesystem::path& script);

}  // namespace prl::launch
