#pragma once

#include <filesystem>
#include <string>

namespace prl::tools {

struct DoctorOptions {
  bool json = false;
  std::filesystem::path output_dir = "outputs";
};

/// What this machine has (CPU, memory, GPUs, open-file limit, disk) and what that means for a run, as text or JSON.
std::string doctor_report(const DoctorOptions& options);

}  // namespace prl::tools
