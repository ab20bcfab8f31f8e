#include "launch/run_folders.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <condition_variable>
#include <mutex>
#include <utility>

#include <fmt/ranges.h>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/hosts.hpp"
#include "base/log.hpp"
#include "config/cli.hpp"
#include "io/checkpoint_dir.hpp"
#include "launch/model_setup.hpp"
#include "launch/output_folder.hpp"
#include "orchestrator/progress.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

constexpr std::uint64_t kMaxControlBytes = 1 << 16;
constexpr std::uint64_t kMaxReportBytes = 1 << 24;
constexpr std::chrono::milliseconds kControlPoll{500};
constexpr std::pair<RunState, std::string_view> kStates[] = {
    {RunState::kRun, "run"}, {RunState::kPause, "pause"}, {RunState::kDrain, "drain"}, {RunState::kStop, "stop"}};

std::optional<struct stat> stat_of(const fs::path& path, bool follows = true) {
  struct stat found {};
  if ((follows ? ::stat(path.c_str(), &found) : ::lstat(path.c_str(), &found)) != 0) return std::nullopt;
  return found;
}

std::array<std::int64_t, 2> folder_stamp(const struct stat& found) {
  return {static_cast<std::int64_t>(found.st_dev), static_cast<std::int64_t>(found.st_ino)};
}

std::optional<RunFolder> run_at(const fs::path& folder) {
  RunFolder run{.name = folder.filename().string(), .folder = folder, .config = {}, .stamp = {}};
  const auto found = stat_of(folder, /*follows=*/false);
  if (!found || !S_ISDIR(found->st_mode)) return std::nullopt;
  run.stamp.folder = folder_stamp(*found);
  for (const char* name : {"configs/orchestrator.toml", "configs/orch.toml"}) {
    const auto file = stat_of(folder / name);
    if (!file || !S_ISREG(file->st_mode)) continue;
    run.config = folder / name;
    run.stamp.config = {static_cast<std::int64_t>(file->st_ino), static_cast<std::int64_t>(file->st_size),
                        static_cast<std::int64_t>(file->st_mtim.tv_sec), static_cast<std::int64_t>(file->st_mtim.tv_nsec)};
    return run;
  }
  return std::nullopt;
}

}  // namespace

bool RunFolder::is_there() const {
  const std::optional<RunFolder> found = run_at(folder);
  return found && found->stamp.folder == stamp.folder;
}

namespace {

/// Clocks of file systems tick slower than ours.
constexpr std::chrono::milliseconds kClockSlack{100};
constexpr std::size_t kMaxLeftovers = 10'000;

constexpr std::string_view kOfSteps[] = {"broadcasts", "weights", "token_exports", "checkpoints"};

/// Whether a trainer writes something of that path, relative to the run's folder, in one of these steps.
bool is_of_trainer(const fs::path& path, bool is_folder, const RunFolder::Written& written) {
  std::vector<std::string> parts;
  for (const fs::path& part : path) parts.push_back(part.string());
  if (std::ranges::find(kOfSteps, parts[0]) == std::end(kOfSteps))
    return is_folder ? path == "logs" || path == "configs" || path == "rollouts"
                     : path == "metrics.jsonl" || path == "logs/trainer.log" || path == "configs/error.txt";
  if (parts.size() < (is_folder ? 2U : 3U)) return is_folder;
  const std::int64_t step = parse_step_dir(parts[1].substr(0, parts[1].find(".tmp-")));
  if (step < written.first_step || step > written.last_step) return false;
  return parts[0] != "checkpoints" || parts.size() < 3 || parts[2].starts_with("trainer");
}

/// What is in the folder, inner ones first; nullopt if anything is not what was written.
std::optional<std::vector<fs::path>> leftovers_in(const fs::path& folder, const RunFolder::Written& written) {
  std::vector<fs::path> found;
  std::error_code ec;
  for (fs::recursive_directory_iterator it(folder, ec), end; !ec && it != end; it.increment(ec)) {
    const fs::path path = it->path().lexically_relative(folder);
    const fs::file_status status = it->symlink_status(ec);
    if (ec || found.size() >= kMaxLeftovers) return std::nullopt;
    if (!fs::is_directory(status) && !fs::is_regular_file(status)) return std::nullopt;
    if (!is_of_trainer(path, fs::is_directory(status), written)) return std::nullopt;
    if (fs::is_regular_file(status)) {
      const fs::file_time_type time = it->last_write_time(ec);
      if (ec || time < written.since - kClockSlack || time > written.until) return std::nullopt;
    }
    found.push_back(it->path());
  }
  if (ec) return std::nullopt;
  std::ranges::reverse(found);
  return found;
}

}  // namespace

void RunFolder::remove_leftovers(const Written& written) const {
  std::error_code ec;
  // A folder that lost its configuration alone has its marker still.
  if (run_at(folder) || fs::exists(folder / OutputFolder::kMarkerName, ec)) return;
  if (const auto found = stat_of(folder, /*follows=*/false); !found || !S_ISDIR(found->st_mode)) return;
  const auto leftovers = leftovers_in(folder, written);
  if (!leftovers) return;
  // One by one, so that what comes meanwhile stays.
  for (const fs::path& path : *leftovers) fs::remove(path, ec);
  fs::remove(folder, ec);
  if (ec) log::warning("what was written to {} while it was removed is left: {}", folder.string(), ec.message());
}

std::vector<RunFolder> find_run_folders(const fs::path& output_dir) {
  std::vector<RunFolder> runs;
  std::error_code ec;
  for (fs::directory_iterator it(output_dir, ec), end; !ec && it != end; it.increment(ec)) {
    if (!it->path().filename().string().starts_with(kRunPrefix)) continue;
    if (auto run = run_at(it->path())) runs.push_back(std::move(*run));
  }
  std::ranges::sort(runs, {}, &RunFolder::name);
  return runs;
}

config::OrchestratorConfig read_run_config(const RunFolder& run) {
  config::Context context = config::Context::from_process();
  context.environment.clear();  // variables of this process are not the run's
  auto loaded = config::load<config::OrchestratorConfig>(config::Command::kOrchestrator, {"@", run.config.string()}, context);
  config::require_built(loaded.not_built);
  return std::move(loaded.config);
}

namespace {

std::string_view name_of(const config::WeightBroadcast& broadcast) {
  return std::visit([](const auto& of_type) { return std::decay_t<decltype(of_type)>::kType; }, broadcast);
}

/// Engines get the adapters of all runs in one way, at one address.
void check_weight_broadcast(const config::WeightBroadcast& of_trainer, const config::WeightBroadcast& of_run) {
  if (of_trainer.index() != of_run.index())
    fail(ErrorCode::kInvalidArgument, "weight_broadcast.type: is {}, but the trainer's is {}; it must be the same", name_of(of_run),
         name_of(of_trainer));
  const auto* trainers = std::get_if<config::NcclBroadcast>(&of_trainer);
  const auto* runs = std::get_if<config::NcclBroadcast>(&of_run);
  if (trainers != nullptr && trainers->port != runs->port)
    fail(ErrorCode::kInvalidArgument, "weight_broadcast.port: is {}, but the trainer's is {}; it must be the same", runs->port,
         trainers->port);
}

}  // namespace

config::TrainerConfig trainer_config_of(const config::TrainerConfig& shared, const RunFolder& run,
                                        const config::OrchestratorConfig& orchestrator) {
  PRL_CHECK(shared.model.lora.has_value(), "a trainer of several runs without an adapter");
  const auto& adapter = orchestrator.student.model.lora;
  if (!adapter || !adapter->name)
    fail(ErrorCode::kInvalidArgument, "student.model.lora.name: is needed, the name under which servers hold the adapter of this run");
  if (orchestrator.student.model.name != shared.model.name &&
      fs::weakly_canonical(model_folder(orchestrator.student.model.name)) != fs::weakly_canonical(model_folder(shared.model.name)))
    fail(ErrorCode::kInvalidArgument, "student.model.name: is \"{}\", but the trainer's base model is \"{}\"",
         orchestrator.student.model.name, shared.model.name);
  if (orchestrator.seq_len > shared.model.seq_len)
    fail(ErrorCode::kInvalidArgument, "seq_len: is {}, but the trainer's model.seq_len is {}; it must not be larger", orchestrator.seq_len,
         shared.model.seq_len);
  check_weight_broadcast(shared.weight_broadcast, orchestrator.weight_broadcast);
  if (std::holds_alternative<config::LocalRollouts>(orchestrator.rollout_transport))
    fail(ErrorCode::kInvalidArgument, "rollout_transport.type: of one of several runs must be filesystem or zmq");
  if (const auto* zmq = std::get_if<config::ZmqRollouts>(&orchestrator.rollout_transport); zmq != nullptr && zmq->host == "*")
    fail(ErrorCode::kInvalidArgument, "rollout_transport.host: is \"*\", but the trainer connects to it; name the orchestrator's machine");
  if (orchestrator.training_mode != config::TrainingMode::kRl && !orchestrator.teacher)
    fail(ErrorCode::kInvalidArgument, "teacher: is needed by training_mode");

  config::TrainerConfig config = shared;
  config.output_dir = run.folder;
  config.max_concurrent_runs = 1;
  if (config.wandb && config.wandb->name) *config.wandb->name += "-" + run.name;
  config.rollout_transport = orchestrator.rollout_transport;
  config.max_steps = orchestrator.max_steps ? orchestrator.max_steps : shared.max_steps;
  config.max_async_level = orchestrator.max_async_level;
  config.seed = orchestrator.seed;
  if (adapter->rank) config.model.lora->rank = *adapter->rank;
  if (adapter->alpha) config.model.lora->alpha = *adapter->alpha;
  if (orchestrator.run) {
    if (orchestrator.run->optim) config.optim = *orchestrator.run->optim;
    if (orchestrator.run->scheduler) config.scheduler = *orchestrator.run->scheduler;
    if (orchestrator.run->loss) config.loss = *orchestrator.run->loss;
  }
  // Both roles save the same steps, or neither does: a checkpoint is whole with both parts.
  if (!orchestrator.ckpt) {
    config.ckpt.reset();
    return config;
  }
  if (!config.ckpt) config.ckpt.emplace();
  config.ckpt->interval = orchestrator.ckpt->interval;
  config.ckpt->output_dir = orchestrator.ckpt->output_dir;
  const fs::path checkpoints = orchestrator.ckpt->output_dir.value_or(run.folder) / "checkpoints";
  const std::string units[] = {"trainer", orchestrator::kCheckpointUnit};
  if (!io::list_checkpoints(checkpoints, units).empty()) config.ckpt->resume_step = -1;
  return config;
}

bool share_ports(const config::RolloutTransport& a, const config::RolloutTransport& b) noexcept {
  const auto* one = std::get_if<config::ZmqRollouts>(&a);
  const auto* other = std::get_if<config::ZmqRollouts>(&b);
  return one != nullptr && other != nullptr && std::abs(one->port - other->port) <= 1 &&
         (one->host == other->host || (is_loopback(one->host) && is_loopback(other->host)));
}

std::string_view to_string(RunState state) noexcept {
  for (const auto& [one, name] : kStates)
    if (one == state) return name;
  return "?";
}

fs::path control_file(const fs::path& run_folder) { return run_folder / "configs/control.json"; }

RunControlFile read_control(const fs::path& run_folder) {
  const fs::path file = control_file(run_folder);
  RunControlFile control;
  std::string text;
  try {
    text = read_file(file, kMaxControlBytes);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNotFound) return control;
    throw;
  }
  boost::system::error_code ec;
  const json::value root = json::parse(text, ec);
  if (ec || !root.is_object()) fail(ErrorCode::kCorrupt, "{} is no JSON object", file.string());
  if (const json::value* state = root.get_object().if_contains("state")) {
    const auto known =
        std::ranges::find_if(kStates, [&](const auto& one) { return state->is_string() && state->get_string() == one.second; });
    if (known == std::end(kStates))
      fail(ErrorCode::kCorrupt, "{}: state: wanted run, pause, drain or stop, found {}", file.string(), json::serialize(*state));
    control.state = known->first;
  }
  if (const json::value* weight = root.get_object().if_contains("weight"); weight != nullptr && !weight->is_null()) {
    if (!weight->is_number() || !(weight->to_number<double>() > 0))
      fail(ErrorCode::kCorrupt, "{}: weight: wanted a number above 0, found {}", file.string(), json::serialize(*weight));
    control.weight = weight->to_number<double>();
  }
  return control;
}

void write_control(const fs::path& run_folder, const RunControlFile& control) {
  json::object root{{"state", std::string(to_string(control.state))}};
  if (control.weight) root["weight"] = *control.weight;
  write_file_atomic(control_file(run_folder), json::serialize(root) + "\n");
}

std::string to_string(const RunStamp& stamp) {
  return fmt::format("{}", fmt::join(stamp.folder, ".")) + fmt::format(":{}", fmt::join(stamp.config, "."));
}

std::vector<RunReport> read_runs_file(const fs::path& output_dir) {
  const fs::path file = output_dir / kRunsFile;
  std::string text;
  try {
    text = read_file(file, kMaxReportBytes);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNotFound) return {};
    throw;
  }
  boost::system::error_code ec;
  const json::value root = json::parse(text, ec);
  const json::value* runs = !ec && root.is_object() ? root.get_object().if_contains("runs") : nullptr;
  if (runs == nullptr || !runs->is_array()) fail(ErrorCode::kCorrupt, "{} is no list of runs", file.string());
  std::vector<RunReport> out;
  for (const json::value& run : runs->get_array()) {
    if (!run.is_object()) fail(ErrorCode::kCorrupt, "{}: an entry of runs is no JSON object", file.string());
    const auto words = [&](const char* key) {
      const json::value* value = run.get_object().if_contains(key);
      return value != nullptr && value->is_string() ? std::string(value->get_string()) : std::string();
    };
    const auto number = [&](const char* key) {
      const json::value* value = run.get_object().if_contains(key);
      return value != nullptr && value->is_int64() ? std::optional(value->get_int64()) : std::nullopt;
    };
    const json::value* weight = run.get_object().if_contains("weight");
    const std::string state = words("state");
    out.push_back({.name = words("name"),
                   .state = state.empty() ? RunReport().state : state,
                   .detail = words("detail"),
                   .adapter = words("adapter"),
                   .stamp = words("stamp"),
                   .slot = number("slot"),
                   .step = number("step"),
                   .tokens = number("tokens"),
                   .weight = weight != nullptr && weight->is_number() ? weight->to_number<double>() : 1.0});
  }
  return out;
}

RunControlWatch::RunControlWatch(fs::path run_folder, std::function<void(const std::string&)> on_stop)
    : thread_([folder = std::move(run_folder), on_stop = std::move(on_stop)](std::stop_token stop) {
        const auto begin = stat_of(folder);
        std::mutex mutex;
        std::condition_variable_any wake;
        std::unique_lock lock(mutex);
        while (!wake.wait_for(lock, stop, kControlPoll, [] { return false; }) && !stop.stop_requested()) {
          const auto now = stat_of(folder);
          if (begin && (!now || folder_stamp(*now) != folder_stamp(*begin))) return on_stop(folder.string() + " was taken away");
          try {
            const RunState state = read_control(folder).state;
            if (state == RunState::kDrain || state == RunState::kStop)
              return on_stop(fmt::format("{} says {}", control_file(folder).string(), to_string(state)));
          } catch (const Error& error) {
            log::debug("{}", error.what());  // whoever wrote it is told by the trainer
          }
        }
      }) {}

}  // namespace prl::launch
