// For tests alone: a run folder, made and removed.
#pragma once

#include <unistd.h>

#include <fmt/core.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace prl::dashboard::testing {

/// An empty folder of this test and process; its destructor removes it.
class RunFiles {
 public:
  explicit RunFiles(const std::string& name)
      : folder_(std::filesystem::temp_directory_path() / fmt::format("prl_page_{}_{}", name, ::getpid())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~RunFiles() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  RunFiles(const RunFiles&) = delete;
  RunFiles& operator=(const RunFiles&) = delete;

  const std::filesystem::path& folder() const { return folder_; }
  void write(const std::string& name, std::string_view bytes) const { put(name, bytes, std::ios::trunc); }
  void append(const std::string& name, std::string_view bytes) const { put(name, bytes, std::ios::app); }
  /// As a resumed run does it: another file takes the name.
  void replace(const std::string& name, std::string_view bytes) const {
    write(name + ".new", bytes);
    std::filesystem::rename(folder_ / (name + ".new"), folder_ / name);
  }

 private:
  void put(const std::string& name, std::string_view bytes, std::ios::openmode mode) const {
    const std::filesystem::path path = folder_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary | mode).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  std::filesystem::path folder_;
};

inline std::string metrics_row(int step, const std::string& role, const std::string& key, double value) {
  return fmt::format("{{\"step\": {}, \"role\": \"{}\", \"time\": {}, \"{}\": {}}}\n", step, role, 1000 + step, key, value);
}

inline std::string rollout_row(int example, double reward, const std::string& text, const std::string& more = "") {
  return fmt::format(
      "{{\"example_id\":{},\"task\":\"reverse-text\",\"prompt\":[{{\"role\":\"user\",\"content\":\"ask\"}}],\"completion\":[{{\"role\":"
      "\"assistant\",\"content\":\"{}\"}}],\"reward\":{},\"error\":null,\"stop_condition\":\"max_turns_reached\",\"is_truncated\":false,"
      "\"num_turns\":1,\"advantage\":{},\"group_id\":{}{}}}\n",
      example, text, reward, reward - 0.5, example / 4, more);
}

}  // namespace prl::dashboard::testing
