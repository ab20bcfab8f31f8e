#include "io/hub/hub_settings.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "base/ascii.hpp"
#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::io {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kMaxIdLength = 96;
constexpr std::uint64_t kMaxTokenBytes = 4096;

bool is_true(const std::optional<std::string>& value) {
  if (!value) return false;
  std::string upper = *value;
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return upper == "1" || upper == "ON" || upper == "YES" || upper == "TRUE";
}

bool is_part(std::string_view part) noexcept {
  if (part.empty() || part.front() == '-' || part.front() == '.' || part.back() == '-' || part.back() == '.') return false;
  if (part.find("--") != std::string_view::npos || part.find("..") != std::string_view::npos || part.ends_with(".git")) return false;
  return std::all_of(part.begin(), part.end(), [](char c) { return is_ascii_alnum(c) || c == '.' || c == '_' || c == '-'; });
}

std::string trimmed(std::string text) {
  const auto is_space = [](char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; };
  while (!text.empty() && is_space(text.back())) text.pop_back();
  text.erase(text.begin(), std::find_if_not(text.begin(), text.end(), is_space));
  return text;
}

}  // namespace

std::string_view to_string(HubKind kind) noexcept { return kind == HubKind::kModel ? "model" : "dataset"; }

bool is_hub_id(std::string_view text) noexcept {
  if (text.empty() || text.size() > kMaxIdLength) return false;
  const std::size_t slash = text.find('/');
  if (slash == std::string_view::npos) return is_part(text);
  return is_part(text.substr(0, slash)) && is_part(text.substr(slash + 1));
}

HubSettings HubSettings::from_environment(const GetEnv& get_env) {
  // An empty variable counts as not set, as it does for Hugging Face's clients.
  const auto get = [&](const char* name) {
    std::optional<std::string> value = get_env(name);
    if (value && value->empty()) value.reset();
    return value;
  };
  const auto folder = [&](const std::string& text) {
    return text.starts_with("~/") ? fs::path(get("HOME").value_or("/")) / text.substr(2) : fs::path(text);
  };
  const auto seconds = [&](const char* name, std::chrono::milliseconds fallback) {
    const auto text = get(name);
    if (!text) return fallback;
    int value = 0;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
    if (error != std::errc() || end != text->data() + text->size() || value < 1 || value > 86'400)
      fail(ErrorCode::kInvalidArgument, "environment variable {}: '{}' is no number of seconds from 1 to 86400", name, *text);
    return std::chrono::milliseconds(std::chrono::seconds(value));
  };
  HubSettings settings;
  fs::path home = fs::path(get("HOME").value_or("/")) / ".cache";
  if (const auto xdg = get("XDG_CACHE_HOME")) home = folder(*xdg);
  home /= "huggingface";
  if (const auto given = get("HF_HOME")) home = folder(*given);
  settings.cache_dir = home / "hub";
  for (const char* name : {"HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"})  // the later one wins
    if (const auto given = get(name)) settings.cache_dir = folder(*given);
  if (const auto endpoint = get("HF_ENDPOINT")) settings.endpoint = *endpoint;
  while (settings.endpoint.ends_with('/')) settings.endpoint.pop_back();
  if (!settings.endpoint.starts_with("http://") && !settings.endpoint.starts_with("https://"))
    fail(ErrorCode::kInvalidArgument, "environment variable HF_ENDPOINT: '{}' must begin with http:// or https://", settings.endpoint);
  if (const auto token = get("HF_TOKEN")) {
    settings.token = trimmed(*token);
  } else if (!is_true(get("HF_HUB_DISABLE_IMPLICIT_TOKEN"))) {
    const fs::path file = get("HF_TOKEN_PATH") ? folder(*get("HF_TOKEN_PATH")) : home / "token";
    std::error_code error;
    if (fs::is_regular_file(file, error)) settings.token = trimmed(read_file(file, kMaxTokenBytes));
  }
  settings.is_offline = is_true(get("HF_HUB_OFFLINE")) || is_true(get("TRANSFORMERS_OFFLINE"));
  settings.head_timeout = seconds("HF_HUB_ETAG_TIMEOUT", settings.head_timeout);
  settings.stall_timeout = seconds("HF_HUB_DOWNLOAD_TIMEOUT", settings.stall_timeout);
  return settings;
}

HubSettings HubSettings::from_environment() {
  return from_environment([](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  });
}

}  // namespace prl::io
