#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace prl::env::python {

struct ProgramOptions {
  bool captures = false;                        ///< stdout and stderr become ProgramResult::output; else they are this process's
  std::map<std::string, std::string> env = {};  ///< added to this process's variables
  std::filesystem::path folder = {};            ///< working folder; empty: this process's
  std::size_t max_output_bytes = std::size_t{64} << 20;
};
struct ProgramResult {
  int status = -1;  ///< exit status; 128 + signal
  std::string output;
};

/// Runs a program to its end; it gets SIGTERM if this process ends before. argv[0] is a path. Error{kNotFound} if it cannot be started.
ProgramResult run_program(const std::vector<std::string>& argv, const ProgramOptions& options = {});
/// The program in PATH.
std::optional<std::filesystem::path> find_program(const std::string& name);

}  // namespace prl::env::python
