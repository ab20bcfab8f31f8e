#include "env/python/installed.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "env/python/frame.hpp"
#include "text/json_python.hpp"

namespace prl::env::python {

namespace fs = std::filesystem;
namespace json = boost::json;

namespace {

constexpr const char* kRecord = "environment.json";
constexpr std::string_view kFormer = ".former-";

std::size_t end_of_name(const std::string& id) {
  const std::size_t slash = id.rfind('/');
  return id.find_first_of("@=<>!~[", slash == std::string::npos ? 0 : slash + 1);
}

std::string text_at(const json::object& object, const char* key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_string() ? std::string(value->get_string()) : std::string();
}

std::optional<InstalledEnv> read_record(const fs::path& folder) {
  if (!fs::exists(folder / kRecord)) return std::nullopt;
  try {
    const json::value record = text::parse_json(read_file(folder / kRecord, 1 << 20));
    const json::object& object = record.as_object();
    InstalledEnv found;
    found.id = text_at(object, "id");
    found.module = text_at(object, "module");
    found.version = text_at(object, "version");
    found.source = text_at(object, "source");
    found.api = text_at(object, "api");
    found.verifiers = text_at(object, "verifiers");
    found.installed_at = text_at(object, "installed_at");
    if (const json::value* with = object.if_contains("with"); with != nullptr && with->is_array())
      for (const json::value& requirement : with->get_array())
        if (requirement.is_string()) found.with.emplace_back(requirement.get_string());
    found.folder = folder;
    if (!found.id.empty()) return found;
    log::warning("{} is damaged and is left out: it has no id", (folder / kRecord).string());
  } catch (const std::exception& error) {
    log::warning("{} is damaged and is left out: {}", (folder / kRecord).string(), error.what());
  }
  return std::nullopt;
}

/// Brings back the former installation of `folder`, unless a process makes the new one still.
void restore_former(const fs::path& folder) {
  const int lock = ::open(lock_file(folder).c_str(), O_RDWR | O_CLOEXEC);
  if (lock < 0) return;
  if (::flock(lock, LOCK_EX | LOCK_NB) == 0) {
    std::error_code error;
    if (!fs::exists(folder / kRecord, error) && fs::exists(former_folder(folder) / kRecord, error)) {
      fs::remove_all(folder, error);
      fs::rename(former_folder(folder), folder, error);
      if (error)
        log::warning("the former installation is in {}: {}", former_folder(folder).string(), error.message());
      else
        log::warning("{} is as before its last installation, which was killed halfway", folder.string());
    }
  }
  ::close(lock);
}

}  // namespace

fs::path environments_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value != nullptr ? value : "");
  };
  if (const std::string own = variable("PRL_ENVIRONMENTS"); !own.empty()) return fs::absolute(own);
  if (const std::string xdg = variable("XDG_DATA_HOME"); !xdg.empty()) return fs::path(xdg) / "prl" / "environments";
  const std::string home = variable("HOME");
  return fs::path(home.empty() ? "/var/lib" : home + "/.local/share") / "prl" / "environments";
}

std::string plain_id(const std::string& id) {
  std::string plain = id.substr(0, end_of_name(id));
  std::replace(plain.begin(), plain.end(), '_', '-');
  return plain;
}

std::string version_of(const std::string& id) {
  const std::size_t end = end_of_name(id);
  if (end == std::string::npos) return {};
  const std::string rest = id.substr(end);
  if (rest.starts_with("==")) return rest.substr(2);
  return rest.starts_with("@") ? rest.substr(1) : std::string();
}

fs::path installed_folder(const fs::path& all, const std::string& id) {
  std::string name;
  for (const char c : plain_id(id)) name += c == '/' ? std::string("--") : std::string(1, c);
  return all / name;
}

fs::path former_folder(const fs::path& folder) { return folder.parent_path() / (std::string(kFormer) + folder.filename().string()); }
fs::path lock_file(const fs::path& folder) { return folder.parent_path() / (".lock-" + folder.filename().string()); }

std::vector<InstalledEnv> list_installed(const fs::path& all) {
  std::vector<InstalledEnv> found;
  std::error_code error;
  std::vector<fs::path> replaced;
  for (const auto& entry : fs::directory_iterator(all, error))
    if (const std::string name = entry.path().filename().string(); name.starts_with(kFormer))
      replaced.push_back(all / name.substr(kFormer.size()));
  for (const fs::path& folder : replaced) restore_former(folder);
  for (const auto& entry : fs::directory_iterator(all, error))
    if (entry.is_directory() && !entry.path().filename().string().starts_with('.'))  // ".former-x" while x is replaced
      if (auto environment = read_record(entry.path())) found.push_back(std::move(*environment));
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return found;
}

std::optional<InstalledEnv> find_installed(const fs::path& all, const std::string& id) {
  const std::string wanted = plain_id(id);
  std::vector<InstalledEnv> matches;
  for (InstalledEnv& environment : list_installed(all)) {
    const std::size_t slash = environment.id.rfind('/');
    const std::string name = slash == std::string::npos ? environment.id : environment.id.substr(slash + 1);
    if (environment.id == wanted || (wanted.find('/') == std::string::npos && name == wanted)) matches.push_back(std::move(environment));
  }
  const auto exact = std::find_if(matches.begin(), matches.end(), [&](const InstalledEnv& e) { return e.id == wanted; });
  if (exact != matches.end()) matches = {*exact};
  if (matches.empty()) return std::nullopt;
  if (matches.size() > 1)
    fail(ErrorCode::kInvalidArgument, "environment {}: {} and {} are installed; name one of them", id, matches[0].id, matches[1].id);
  const std::string version = version_of(id);
  if (!version.empty() && version != matches.front().version)
    fail(ErrorCode::kNotFound, "environment {}: version {} is installed; `prl env install {}` replaces it", id, matches.front().version,
         id);
  return std::move(matches.front());
}

void write_installed(const InstalledEnv& environment) {
  json::object record;
  record["id"] = environment.id;
  record["module"] = environment.module;
  record["version"] = environment.version;
  record["source"] = environment.source;
  record["api"] = environment.api;
  record["verifiers"] = environment.verifiers;
  record["installed_at"] = environment.installed_at;
  if (!environment.with.empty()) record["with"] = json::array(environment.with.begin(), environment.with.end());
  write_file_atomic(environment.folder / kRecord, text::dump_python(record, {.indent = 2}) + "\n");
}

}  // namespace prl::env::python
