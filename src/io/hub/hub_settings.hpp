#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace prl::io {

enum class HubKind { kModel, kDataset };
/// "model", "dataset": in messages, and with an s in folder names and routes.
std::string_view to_string(HubKind kind) noexcept;

/// A repository of the Hugging Face hub.
struct HubRepo {
  HubKind kind = HubKind::kModel;
  std::string id;                 ///< "organisation/name", or "name" alone for a few old ones
  std::string revision = "main";  ///< branch, tag or commit
};

/// True for texts that the hub takes as a repository id: one or two parts of letters, digits, '.', '_' and '-'.
bool is_hub_id(std::string_view text) noexcept;

/// Where the hub and its local cache are, by the environment variables that Hugging Face's own clients read.
struct HubSettings {
  std::filesystem::path cache_dir;                  ///< HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub
  std::string endpoint = "https://huggingface.co";  ///< HF_ENDPOINT, without a slash at the end
  std::string token;                                ///< HF_TOKEN, else the file HF_TOKEN_PATH or $HF_HOME/token; empty: none
  bool is_offline = false;                          ///< HF_HUB_OFFLINE: only the cache is used
  std::chrono::milliseconds head_timeout{10'000};   ///< HF_HUB_ETAG_TIMEOUT: one question to the hub
  std::chrono::milliseconds stall_timeout{10'000};  ///< HF_HUB_DOWNLOAD_TIMEOUT: a download without a byte
  std::chrono::milliseconds total_timeout = std::chrono::hours(24);  ///< one repository
  int max_attempts = 5;                                              ///< in a row without any progress
  std::chrono::milliseconds first_pause{1'000};                      ///< between attempts; doubles each time

  using GetEnv = std::function<std::optional<std::string>(const char* name)>;
  static HubSettings from_environment(const GetEnv& get_env);
  static HubSettings from_environment();
};

}  // namespace prl::io
