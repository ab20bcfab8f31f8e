#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace prl::env::python {

/// A file of the Python worker, as the build found it below python/.
struct WorkerFile {
  std::string path;  ///< "prl_worker/worker.py"
  std::string content;
};
std::vector<WorkerFile> worker_files();

/// The folder with the package prl_worker, for PYTHONPATH. The files are written below `cache` once per version of them; processes that do
/// so at the same time do not disturb each other. Error{kIo}.
std::filesystem::path unpack_worker(const std::filesystem::path& cache);
/// $XDG_CACHE_HOME/prl, or ~/.cache/prl.
std::filesystem::path cache_folder();

}  // namespace prl::env::python
