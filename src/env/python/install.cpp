#include "env/python/install.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "env/python/run_program.hpp"
#include "env/python/setup.hpp"
#include "text/json_python.hpp"

namespace prl::env::python {

namespace fs = std::filesystem;
namespace json = boost::json;

namespace {

constexpr const char* kLegacyBound = "verifiers<=0.3.1";

/// What is asked of the new interpreter: module, version, library and API of the environment, without importing it.
constexpr const char* kInspect = R"py(
import importlib.metadata as md, importlib.util, json, re, sys
name = sys.argv[1]
out = {"module": "", "version": "", "api": "", "verifiers": ""}
norm = lambda s: re.sub(r"[-_.]+", "-", s).lower()
for dist in md.distributions():
    if norm(dist.metadata["Name"] or "") == norm(name):
        out["version"] = dist.version
        tops = {str(f).split("/")[0].removesuffix(".py") for f in dist.files or [] if str(f).endswith(".py") and ".." not in str(f)}
        wanted = norm(name).replace("-", "_")
        out["module"] = wanted if wanted in tops or not tops else sorted(tops)[0]
try:
    out["verifiers"] = md.version("verifiers")
except md.PackageNotFoundError:
    pass
module = out["module"] or norm(name).replace("-", "_")
try:
    spec = importlib.util.find_spec(module)
except (ImportError, ValueError):
    spec = None
if spec is not None:
    out["module"] = module
    import pathlib
    origin = pathlib.Path(spec.origin) if spec.origin else None
    files = [origin] if origin and origin.name != "__init__.py" else sorted(origin.parent.rglob("*.py")) if origin else []
    text = "\n".join(f.read_text("utf-8", "replace") for f in files[:200])
    if "verifiers.v1" in text:
        out["api"] = "v1"
    elif re.search(r"def load_environment|import load_environment", text):
        out["api"] = "legacy"
else:
    out["module"] = ""
print("PRL" + json.dumps(out))
)py";

void run_or_fail(const std::vector<std::string>& argv, const std::string& what, const std::map<std::string, std::string>& env = {}) {
  log::info("{}", fmt::join(argv, " "));
  const ProgramResult done = run_program(argv, {.captures = true, .env = env});
  if (done.status == 0) return;
  std::string tail = done.output.size() > 3000 ? done.output.substr(done.output.size() - 3000) : done.output;
  while (!tail.empty() && tail.back() == '\n') tail.pop_back();
  fail(ErrorCode::kUnavailable, "{} failed with status {}:\n{}", what, done.status, tail);
}

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32] = {};
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

/// A Python that verifiers runs on.
fs::path choose_python(const InstallOptions& options) {
  if (options.python) return find_interpreter(*options.python, "--python");
  for (const char* name : {"python3.12", "python3.11", "python3.13"})
    if (const auto found = find_program(name)) {
      // A shim of a version manager may name a Python that is not installed.
      if (run_program({found->string(), "-c", "import ensurepip, venv"}, {.captures = true}).status == 0) return *found;
    }
  return default_interpreter(options.target);
}

/// Runs uv, or venv and pip. Interpreters get -P: modules of the folder that the user is in have no part in it.
class Installer {
 public:
  Installer(const InstallOptions& options, fs::path folder)
      : options_(options), folder_(std::move(folder)), uv_(find_program("uv")), env_({{"UV_PYTHON_DOWNLOADS", "never"}}) {
    if (uv_ && options.is_offline) env_["UV_OFFLINE"] = "1";
  }

  fs::path python() const { return folder_ / "venv" / "bin" / "python"; }
  fs::path lock() const { return folder_ / "requirements.lock"; }

  void make_venv() {
    const fs::path base = choose_python(options_);
    if (uv_)
      run_or_fail({uv_->string(), "venv", "--quiet", "--python", base.string(), (folder_ / "venv").string()}, "uv venv", env_);
    else
      run_or_fail({base.string(), "-P", "-m", "venv", (folder_ / "venv").string()},
                  fmt::format("{} -m venv (Debian: install python3-venv, or uv)", base.string()));
  }

  void install(const std::vector<std::string>& requirements) {
    std::vector<std::string> argv;
    const fs::path report = folder_ / "pip-report.json";
    if (uv_) {
      argv = {uv_->string(), "pip", "install", "--quiet", "--python", python().string()};
    } else {
      argv = {python().string(), "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--report", report.string()};
      if (options_.is_offline) argv.emplace_back("--no-index");
    }
    if (options_.index) {
      argv.emplace_back("--find-links");
      argv.push_back(fs::absolute(*options_.index).string());
    }
    argv.insert(argv.end(), requirements.begin(), requirements.end());
    run_or_fail(argv, uv_ ? "uv pip install" : "pip install", env_);
    if (uv_)
      lock_by_uv();
    else
      lock_by_report(report);
  }

 private:
  /// Versions of what is there, then the hashes of their files from the index. Local packages stay without.
  void lock_by_uv() {
    const ProgramResult frozen =
        run_program({uv_->string(), "pip", "freeze", "--python", python().string()}, {.captures = true, .env = env_});
    std::string named;
    std::string local;
    std::string rest = frozen.output + "\n";
    for (std::size_t begin = 0, end = 0; (end = rest.find('\n', begin)) != std::string::npos; begin = end + 1) {
      const std::string line = rest.substr(begin, end - begin);
      if (line.find("==") != std::string::npos) named += line + "\n";
      if (line.find(" @ ") != std::string::npos) local += "# local: " + line + "\n";
    }
    write_file_atomic(folder_ / "requirements.txt", named);
    std::vector<std::string> argv = {uv_->string(),
                                     "pip",
                                     "compile",
                                     "--quiet",
                                     "--no-deps",
                                     "--generate-hashes",
                                     "--no-header",
                                     "--no-annotate",
                                     "--python",
                                     python().string(),
                                     "-o",
                                     lock().string(),
                                     (folder_ / "requirements.txt").string()};
    if (options_.index) argv.insert(argv.end(), {"--find-links", fs::absolute(*options_.index).string()});
    const ProgramResult compiled = run_program(argv, {.captures = true, .env = env_});
    if (compiled.status != 0) {
      log::warning("the lock has no hashes: uv pip compile said {}", compiled.output.substr(0, 500));
      write_file_atomic(lock(), named + local);
    } else if (!local.empty()) {
      write_file_atomic(lock(), read_file(lock()) + local);
    }
  }

  void lock_by_report(const fs::path& report) {
    const json::value parsed = text::parse_json(read_file(report));
    std::vector<std::string> lines;
    for (const json::value& item : parsed.at("install").as_array()) {
      const json::object& metadata = item.at("metadata").as_object();
      std::string line =
          fmt::format("{}=={}", std::string(metadata.at("name").as_string()), std::string(metadata.at("version").as_string()));
      const json::object& download = item.at("download_info").as_object();
      const json::value* archive = download.if_contains("archive_info");
      const json::value* hashes = archive != nullptr && archive->is_object() ? archive->get_object().if_contains("hashes") : nullptr;
      if (hashes != nullptr && hashes->is_object() && hashes->get_object().contains("sha256"))
        line += fmt::format(" \\\n    --hash=sha256:{}", std::string(hashes->at("sha256").as_string()));
      else
        line = fmt::format("# local: {} from {}", line, std::string(download.at("url").as_string()));
      lines.push_back(std::move(line));
    }
    std::sort(lines.begin(), lines.end());
    write_file_atomic(lock(), fmt::format("{}\n", fmt::join(lines, "\n")));
    fs::remove(report);
  }

  const InstallOptions& options_;
  fs::path folder_;
  std::optional<fs::path> uv_;
  std::map<std::string, std::string> env_;
};

InstalledEnv inspect(const fs::path& python, const std::string& id) {
  const std::size_t slash = id.rfind('/');
  const ProgramResult said =
      run_program({python.string(), "-P", "-c", kInspect, slash == std::string::npos ? id : id.substr(slash + 1)}, {.captures = true});
  InstalledEnv found;
  const std::size_t mark = said.output.rfind("PRL{");
  if (said.status != 0 || mark == std::string::npos)
    fail(ErrorCode::kUnavailable, "the new virtual environment cannot be looked at: {}", said.output.substr(0, 1000));
  const json::value told = text::parse_json(said.output.substr(mark + 3));
  const auto text_at = [&](const char* key) { return std::string(told.at(key).as_string()); };
  found.id = id;
  found.module = text_at("module");
  found.version = text_at("version");
  found.api = text_at("api");
  found.verifiers = text_at("verifiers");
  return found;
}

bool is_after_legacy(const std::string& verifiers) {
  int major = 0;
  int minor = 0;
  int patch = 0;
  std::sscanf(verifiers.c_str(), "%d.%d.%d", &major, &minor, &patch);
  return std::tuple(major, minor, patch) > std::tuple(0, 3, 1);
}

/// Environments of the platform's hub come through its own client.
std::string fetch_from_hub(const Requirement& requirement, const fs::path& folder) {
  const auto client = find_program("prime");
  if (!client)
    fail(ErrorCode::kNotFound,
         "environment {}: ids of the form org/name are on the hub of the platform, which is reached through its client `prime`; install "
         "that "
         "(uv tool install prime), or give a folder, a wheel or a package of an index",
         requirement.id);
  const fs::path source = folder / "source";
  run_or_fail({client->string(), "env", "pull", requirement.text, "--target", source.string()}, "prime env pull");
  return source.string();
}

/// Refuses a folder that holds what no installation put there: PRL_ENVIRONMENTS may name any folder.
void check_ours(const fs::path& folder) {
  constexpr std::array kOurs{"venv", "source", "requirements.txt", "requirements.lock", "pip-report.json", "environment.json"};
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (std::ranges::find(kOurs, name) != kOurs.end() || name.find(".tmp-") != std::string::npos) continue;
    fail(ErrorCode::kAlreadyExists, "{} holds {}, which no installation put there: it is not removed; move it, or set PRL_ENVIRONMENTS",
         folder.string(), name);
  }
}

/// The former installation of an environment while a new one is made; comes back unless the new one is kept. Virtual environments hold
/// their own path, so the new one has to be made where the former was.
class Former {
 public:
  /// Error{kAlreadyExists} while another process installs the same environment.
  explicit Former(const fs::path& folder) : folder_(folder), aside_(former_folder(folder)) {
    fs::create_directories(folder.parent_path());
    const fs::path lock = lock_file(folder);
    lock_ = ::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (lock_ < 0) fail(ErrorCode::kIo, "{} cannot be made: {}", lock.string(), std::strerror(errno));
    if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
      ::close(lock_);
      fail(ErrorCode::kAlreadyExists, "another process installs or removes {} now; try again when it has ended", folder.string());
    }
    if (is_there(aside_)) restore();  // of an installation that was killed
  }
  ~Former() {
    if (is_aside_) restore();
    ::close(lock_);
  }
  Former(const Former&) = delete;
  Former& operator=(const Former&) = delete;

  void set_aside() {
    check_ours(folder_);
    if (is_there(folder_ / "environment.json")) {
      fs::rename(folder_, aside_);
      is_aside_ = true;
    }
    fs::remove_all(folder_);
  }
  void forget() {
    std::error_code ignored;
    is_aside_ = false;
    fs::remove_all(aside_, ignored);
  }

 private:
  static bool is_there(const fs::path& path) noexcept {
    std::error_code ignored;
    return fs::exists(path, ignored);
  }
  void restore() noexcept {
    std::error_code error;
    is_aside_ = false;
    if (is_there(folder_ / "environment.json")) {
      fs::remove_all(aside_, error);
      return;
    }
    fs::remove_all(folder_, error);
    fs::rename(aside_, folder_, error);
    if (error) log::error("the former installation is in {}: {}", aside_.string(), error.message());
  }

  fs::path folder_, aside_;
  int lock_ = -1;
  bool is_aside_ = false;
};

}  // namespace

Requirement parse_requirement(const std::string& target) {
  Requirement requirement;
  requirement.text = target;
  const auto id_of_file = [](const std::string& name) { return plain_id(name.substr(0, name.find('-'))); };
  if (target.starts_with("git+")) {
    requirement.kind = Requirement::Kind::kGit;
    std::string url = target.substr(0, target.find('#'));
    url = url.substr(0, url.rfind('@') > url.rfind('/') && url.rfind('@') != std::string::npos ? url.rfind('@') : std::string::npos);
    std::string name = fs::path(url).filename().string();
    if (const std::size_t folder = target.find("subdirectory="); folder != std::string::npos)
      name = fs::path(target.substr(folder + 13, target.find('&', folder) - folder - 13)).filename().string();
    if (name.ends_with(".git")) name.resize(name.size() - 4);
    requirement.id = plain_id(name);
  } else if (target.ends_with(".whl")) {
    if (!fs::exists(target)) fail(ErrorCode::kNotFound, "environment {}: there is no such wheel", target);
    requirement.kind = Requirement::Kind::kWheel;
    requirement.text = fs::absolute(target).string();
    requirement.id = id_of_file(fs::path(target).filename().string());
  } else if (fs::is_directory(target) || target.starts_with(".") || target.starts_with("/")) {
    const fs::path folder = fs::weakly_canonical(target);
    if (!fs::is_directory(folder)) fail(ErrorCode::kNotFound, "environment {}: there is no such folder", target);
    if (!fs::exists(folder / "pyproject.toml"))
      fail(ErrorCode::kInvalidArgument, "environment {}: the folder has no pyproject.toml; without one it can be used by path = \"{}\"",
           target, folder.string());
    requirement.kind = Requirement::Kind::kFolder;
    requirement.text = folder.string();
    requirement.id = plain_id(folder.filename().string());
  } else if (target.find('/') != std::string::npos) {
    requirement.kind = Requirement::Kind::kHub;
    requirement.id = plain_id(target);
    if (const std::string version = version_of(target); !version.empty()) requirement.text = requirement.id + "@" + version;
  } else {
    requirement.id = plain_id(target);
    if (const std::string version = version_of(target); !version.empty()) requirement.text = requirement.id + "==" + version;
  }
  if (requirement.id.empty()) fail(ErrorCode::kInvalidArgument, "environment \"{}\" has no name", target);
  return requirement;
}

InstalledEnv install_environment(const InstallOptions& options) {
  const Requirement requirement = parse_requirement(options.target);
  const fs::path folder = installed_folder(options.all, requirement.id);
  Former former(folder);
  if (fs::exists(folder / "environment.json") && !options.overwrite)
    fail(ErrorCode::kAlreadyExists, "environment {} is installed in {}; --overwrite replaces it", requirement.id, folder.string());
  // The record is written last: what an interrupted installation left counts for nothing.
  former.set_aside();
  fs::create_directories(folder);
  Installer installer(options, folder);
  try {
    std::vector<std::string> requirements = {requirement.kind == Requirement::Kind::kHub ? fetch_from_hub(requirement, folder)
                                                                                         : requirement.text};
    requirements.insert(requirements.end(), options.with.begin(), options.with.end());
    installer.make_venv();
    installer.install(requirements);
    InstalledEnv made = inspect(installer.python(), requirement.id);
    if (made.api == "legacy" && !made.verifiers.empty() && is_after_legacy(made.verifiers)) {
      log::info("{} is written for the legacy API, which verifiers {} does not have: {} is installed", made.id, made.verifiers,
                kLegacyBound);
      requirements.emplace_back(kLegacyBound);
      installer.install(requirements);
      made = inspect(installer.python(), requirement.id);
    }
    if (made.module.empty())
      fail(ErrorCode::kInvalidArgument, "{} installs no module named {}", options.target, short_name(requirement.id));
    made.source = requirement.text;
    made.installed_at = now_utc();
    made.with = options.with;
    made.folder = folder;
    write_installed(made);
    former.forget();
    return made;
  } catch (const std::exception&) {
    std::error_code ignored;
    fs::remove_all(folder, ignored);
    throw;
  }
}

InstalledEnv update_environment(const InstallOptions& options) {
  const auto old = find_installed(options.all, plain_id(options.target));
  if (!old) fail(ErrorCode::kNotFound, "environment {} is not installed; `prl env install {}` installs it", options.target, options.target);
  InstallOptions again = options;
  const bool is_package = old->source.find('/') == std::string::npos || old->id.find('/') != std::string::npos;
  const std::string version = version_of(options.target);
  if (!version.empty() && !is_package)
    fail(ErrorCode::kInvalidArgument, "environment {} came from {}, which has no version {}: install that by name", old->id, old->source,
         version);
  again.target = !is_package ? old->source : version.empty() ? old->id : fmt::format("{}=={}", old->id, version);
  again.with = old->with;
  for (const std::string& requirement : options.with)
    if (std::find(again.with.begin(), again.with.end(), requirement) == again.with.end()) again.with.push_back(requirement);
  again.overwrite = true;  // the old one stays until the new one is whole
  return install_environment(again);
}

void remove_environment(const fs::path& all, const std::string& id) {
  const auto found = find_installed(all, id);
  if (!found) fail(ErrorCode::kNotFound, "environment {} is not installed", id);
  const Former no_other(found->folder);
  check_ours(found->folder);
  fs::remove_all(found->folder);
}

}  // namespace prl::env::python
