#include "config/cli.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>

#include "base/files.hpp"
#include "base/log.hpp"
#include "config/aliases.hpp"
#include "config/args.hpp"
#include "config/bind.hpp"
#include "config/detail/sampling.hpp"
#include "config/merge.hpp"
#include "config/secrets.hpp"
#include "config/status.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace {

constexpr int kHelpWidth = 110;

/// Keys that words without a flag fill.
std::vector<std::string_view> positionals_of(Command command) {
  if (command == Command::kInitModel) return {"output_dir"};
  if (command == Command::kMakeData) return {"output"};
  if (command == Command::kResults) return {"path"};
  if (command == Command::kBench) return {"suite"};
  if (command == Command::kPlan) return {"model"};
  if (command == Command::kEnv) return {"action", "target"};
  if (command == Command::kK8s) return {"action"};
  if (command == Command::kRuns) return {"action", "run"};
  if (command == Command::kDashboard || command == Command::kPlot) return {"runs..."};
  if (command == Command::kReport || command == Command::kTop || command == Command::kReplay) return {"run"};
  if (command == Command::kConvert) return {"input", "output_dir"};
  return {};
}

/// Sections with a list of environments; "" for the root.
std::vector<std::string> environment_sections(Command command) {
  if (command == Command::kRl) return {"orchestrator.train", "orchestrator.eval"};
  if (command == Command::kOrchestrator) return {"train", "eval"};
  if (command == Command::kEval || command == Command::kSynthesize) return {""};
  return {};
}

/// nullopt too where config.json cannot be read: whoever loads the model says what is wrong with it.
std::optional<int> positions_of_folder(const std::string& model) {
  constexpr std::size_t kMaxBytes = 16 << 20;
  const std::filesystem::path file = std::filesystem::path(model) / "config.json";
  std::error_code ec;
  if (!std::filesystem::is_regular_file(file, ec)) return std::nullopt;
  try {
    const Value parsed = parse_json(read_file(file, kMaxBytes), file.string());
    const Value* positions = parsed.find("max_position_embeddings");
    if (positions && positions->is_int() && positions->as_int() > 0 && positions->as_int() <= std::numeric_limits<int>::max())
      return static_cast<int>(positions->as_int());
  } catch (const Error&) {
    return std::nullopt;
  }
  return std::nullopt;
}

/// What a launcher handed to this process; an empty table if nothing.
Value known_secrets(const Context& context) {
  const auto found = context.environment.find(kSecretsVariable);
  if (found == context.environment.end()) return Value::table();
  Value secrets = parse_json(found->second, kSecretsVariable);
  return secrets.is_table() ? secrets : Value::table();
}

/// A masked value must come from somewhere else: from another source that is merged already, or for a variable of the process from
/// the environment.
void require_secrets(Value& tree, const std::vector<Member>& missing, const Context& context, Report& report) {
  for (const Member& member : missing) {
    if (find_path(tree, member.key)) continue;
    const std::size_t dot = member.key.rfind('.');
    const std::string table = dot == std::string::npos ? std::string() : member.key.substr(0, dot);
    const auto variable = context.environment.find(member.key.substr(dot + 1));
    if (table.ends_with("env_vars") && variable != context.environment.end()) {
      set_path(tree, member.key, Value(variable->second));
    } else {
      report.add(member.key,
                 fmt::format("is masked in this file, which a run wrote: give the value again, for example with {}", to_flag(member.key)),
                 &member.value);
    }
  }
}

/// nullopt, with a problem, where the file cannot be read.
std::optional<Value> read_layer(const std::string& path, const std::string& section, Command command, Report& report) {
  Value layer = Value::table();
  try {
    Value content = read_config_file(path);
    none_to_null(content);
    if (section.empty()) {
      layer = std::move(content);
    } else {
      set_path(layer, section, std::move(content));
    }
    canonicalize(layer, command, report);
  } catch (const ConfigError&) {
    throw;
  } catch (const Error& error) {
    report.problems.push_back({{}, error.what(), {}, Origin{Origin::Kind::kFile, path, 0}, {}});
    return std::nullopt;
  }
  return layer;
}

void merge_layer(Value& tree, const Value& layer, Report& report) {
  try {
    merge(tree, layer);
  } catch (const Error& error) {
    report.add({}, error.what());
  }
}

/// All sources merged in their order of precedence, lowest first.
Value merge_sources(const ParsedArgs& args, Command command, const TypeOps& ops, const Context& context, Report& report) {
  std::vector<std::string> roots = root_keys(ops);
  for (std::string& name : alias_roots(command)) roots.push_back(std::move(name));
  Value tree = parse_environment(context.environment, roots, report);
  none_to_null(tree);
  canonicalize(tree, command, report);
  const Value secrets = known_secrets(context);
  std::vector<Member> missing_secrets;
  bool is_complete = true;
  const auto merge_file = [&](const std::string& path, const std::string& section) {
    std::optional<Value> layer = read_layer(path, section, command, report);
    if (!layer) {
      is_complete = false;
      return;
    }
    for (Member& member : restore_secrets(*layer, secrets)) missing_secrets.push_back(std::move(member));
    merge_layer(tree, *layer, report);
  };
  for (const std::string& path : args.root_files) merge_file(path, {});
  for (const auto& [section, path] : args.section_files) merge_file(path, section);
  // What else would be wrong may follow from what a file that cannot be read
  // says.
  if (!is_complete) throw ConfigError(std::string(command_name(command)), std::move(report.problems));
  Value flags = args.flags;
  none_to_null(flags);
  canonicalize(flags, command, report);
  merge_layer(tree, flags, report);
  require_secrets(tree, missing_secrets, context, report);
  return tree;
}

/// Begins every TOML file that write_resolved makes.
constexpr std::string_view kMadeByARun = "# Made by a run";

bool begins_with_mark(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string head(kMadeByARun.size(), '\0');
  return file.read(head.data(), static_cast<std::streamsize>(head.size())) && head == kMadeByARun;
}

/// `provenance`: leaves out what follows from other keys; null for a complete
/// file.
void write_pair(const std::filesystem::path& folder, const std::string& name, const TypeOps& ops, const void* config,
                const Provenance* provenance, std::vector<std::filesystem::path>& written) {
  const auto tree = [&](NullStyle nulls) {
    Value dumped = dump(ops, config, nulls);
    if (provenance) dumped = without_derived(std::move(dumped), *provenance);
    mask_secrets(dumped);
    return dumped;
  };
  written.push_back(folder / (name + ".toml"));
  const std::string note =
      provenance
          ? fmt::format("; extend it or change it: prl {} @ {}.toml --KEY VALUE. What follows from other keys is left out.\n", name, name)
          : ": all that this role was given.\n";
  write_file_atomic(written.back(), std::string(kMadeByARun) + note + to_toml(tree(NullStyle::kIfNotDefault)));
  written.push_back(folder / (name + ".json"));
  write_file_atomic(written.back(), to_json(tree(NullStyle::kAlways)));
}

/// True if both are about one value that the user wrote once and that was
/// copied to several keys.
bool is_copy(const Problem& a, const Problem& b) {
  const auto name = [](const Problem& problem) { return problem.key.substr(problem.key.rfind('.') + 1); };
  return a.origin.kind != Origin::Kind::kDefault && a.origin.where == b.origin.where && a.origin.line == b.origin.line &&
         a.value == b.value && (a.message == b.message || name(a) == name(b));
}

/// A shared key that is wrong is wrong in every role it was copied to: only the shortest key of each such set stays.
std::vector<Problem> without_copies(const std::vector<Problem>& problems) {
  std::vector<Problem> kept;
  for (const Problem& problem : problems) {
    const auto same = std::find_if(kept.begin(), kept.end(), [&](const Problem& other) { return is_copy(problem, other); });
    if (same == kept.end()) {
      kept.push_back(problem);
    } else if (problem.key.size() < same->key.size()) {
      *same = problem;
    }
  }
  return kept;
}

/// Moves the switch out of the configuration: a written one must start when it is read again.
template <class C>
bool take_dry_run(C& config) {
  if constexpr (requires { config.dry_run; }) return std::exchange(config.dry_run, false);
  return false;
}

template <class C>
std::filesystem::path output_dir_of(const C& config) {
  if constexpr (requires { config.output_dir; }) return config.output_dir;
  return "outputs";
}

}  // namespace

template <class C>
Loaded<C> load(Command command, const std::vector<std::string>& words, const Context& context) {
  const TypeOps& ops = ops_of<C>();
  Report report;
  const ParsedArgs args = parse_args(words, positionals_of(command), report);
  Loaded<C> loaded;
  if (args.wants_help) {
    loaded.help = command_help(command, ops, args.help_topic, kHelpWidth);
    return loaded;
  }
  loaded.raw = merge_sources(args, command, ops, context, report);
  for (const std::string& section : environment_sections(command))
    detail::list_environments(section.empty() ? &loaded.raw : find_path(loaded.raw, section));
  Resolution<C> resolution = resolve<C>(loaded.raw, context);
  std::vector<Problem> problems = std::move(report.problems);
  for (Problem& problem : resolution.report.problems) problems.push_back(std::move(problem));
  if (!problems.empty()) throw ConfigError(std::string(command_name(command)), without_copies(problems));
  loaded.config = std::move(resolution.config);
  loaded.provenance = {loaded.raw, std::move(resolution.report.bound), std::move(resolution.report.decisive)};
  loaded.not_built = std::move(report.not_built);
  for (NotBuilt& entry : resolution.report.not_built) loaded.not_built.push_back(std::move(entry));
  loaded.warnings = std::move(report.warnings);
  for (std::string& warning : resolution.report.warnings) loaded.warnings.push_back(std::move(warning));
  if (std::string warning = inert_warning(resolution.report.inert); !warning.empty() && !context.environment.contains(kRunFolderVariable))
    loaded.warnings.push_back(std::move(warning));
  loaded.dry_run = take_dry_run(loaded.config);
  return loaded;
}

void require_built(const std::vector<NotBuilt>& not_built) {
  if (not_built.empty()) return;
  // One line per feature, with every key that asks for it.
  std::vector<std::pair<std::string, std::string>> features;
  for (const NotBuilt& entry : not_built) {
    const bool is_written = entry.origin.kind != Origin::Kind::kDefault;
    const std::string key = is_written ? fmt::format("{} [{}]", entry.key, entry.origin.describe()) : entry.key;
    const auto known = std::find_if(features.begin(), features.end(), [&](const auto& f) { return f.first == entry.feature; });
    if (known == features.end()) {
      features.emplace_back(entry.feature, key);
    } else {
      known->second += ", " + key;
    }
  }
  std::string text = "the configuration asks for what this build does not have yet:";
  for (const auto& [feature, keys] : features) text += fmt::format("\n- {}: {}", keys, feature);
  throw Error(ErrorCode::kNotImplemented, text);
}

bool is_resolved_pair(const std::filesystem::path& folder, const std::string& name) { return begins_with_mark(folder / (name + ".toml")); }

template <class C>
void check_resolved_place(Command command, const C& config) {
  const std::filesystem::path folder = output_dir_of(config) / "configs";
  std::vector<std::string> names{std::string(command_name(command))};
  if constexpr (std::is_same_v<C, RlConfig>) names.insert(names.end(), {"trainer", "orchestrator", "inference", "teacher_inference"});
  if constexpr (std::is_same_v<C, SftConfig>)
    if (config.eval) names.emplace_back("evals");
  for (const std::string& name : names) {
    // In the opposite order of their making: another process may be writing the same pair.
    for (const char* extension : {".json", ".toml"}) {
      const std::filesystem::path path = folder / (name + extension);
      if (!std::filesystem::exists(std::filesystem::symlink_status(path)) || is_resolved_pair(folder, name)) continue;
      fail(ErrorCode::kAlreadyExists,
           "{} was not made by a run, and the resolved configuration would replace it; move it, or choose another --output-dir",
           path.string());
    }
  }
}

std::vector<std::filesystem::path> write_resolved(Command command, const RlConfig& config, const Provenance& provenance) {
  check_resolved_place(command, config);
  const std::filesystem::path folder = config.output_dir / "configs";
  std::filesystem::create_directories(folder);
  std::vector<std::filesystem::path> written;
  write_pair(folder, "rl", ops_of<RlConfig>(), &config, &provenance, written);
  write_pair(folder, "trainer", ops_of<TrainerConfig>(), &config.trainer, nullptr, written);
  write_pair(folder, "orchestrator", ops_of<OrchestratorConfig>(), &config.orchestrator, nullptr, written);
  if (config.inference) write_pair(folder, "inference", ops_of<InferenceConfig>(), &*config.inference, nullptr, written);
  if (config.teacher_inference)
    write_pair(folder, "teacher_inference", ops_of<InferenceConfig>(), &*config.teacher_inference, nullptr, written);
  return written;
}

template <class C>
std::vector<std::filesystem::path> write_resolved(Command command, const C& config, const Provenance& provenance) {
  check_resolved_place(command, config);
  const std::filesystem::path folder = output_dir_of(config) / "configs";
  std::filesystem::create_directories(folder);
  std::vector<std::filesystem::path> written;
  write_pair(folder, std::string(command_name(command)), ops_of<C>(), &config, &provenance, written);
  if constexpr (std::is_same_v<C, SftConfig>) {
    if (config.eval) {
      const EvalsConfig evals = evals_of(config);
      write_pair(folder, "evals", ops_of<EvalsConfig>(), &evals, nullptr, written);
    }
  }
  return written;
}

template <class C>
std::string secrets_of(const C& config) {
  Value tree = dump(ops_of<C>(), &config, NullStyle::kIfNotDefault);
  const Value secrets = mask_secrets(tree);
  return secrets.members().empty() ? std::string() : to_compact_json(secrets);
}

template <class C>
bool finish_early(Command command, const Loaded<C>& loaded, const std::function<void()>& check_start) {
  if (loaded.help) {
    std::fputs(loaded.help->c_str(), stdout);
    return true;
  }
  for (const std::string& warning : loaded.warnings) log::warning("{}", warning);
  if (!loaded.dry_run) {
    require_built(loaded.not_built);
    return false;
  }
  const auto written = write_resolved(command, loaded.config, loaded.provenance);
  for (const auto& path : written) log::info("wrote {}", path.string());
  require_built(loaded.not_built);
  if (check_start) check_start();
  log::success("the configuration is valid; remove --dry-run to start");
  return true;
}

Context Context::from_process() {
  Context context;
  context.num_positions = positions_of_folder;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals != std::string_view::npos) context.environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return context;
}

#define PRL_INSTANTIATE(C)                                                           \
  template Loaded<C> load(Command, const std::vector<std::string>&, const Context&); \
  template bool finish_early(Command, const Loaded<C>&, const std::function<void()>&);
PRL_INSTANTIATE(RlConfig)
PRL_INSTANTIATE(TrainerConfig)
PRL_INSTANTIATE(OrchestratorConfig)
PRL_INSTANTIATE(InferenceConfig)
PRL_INSTANTIATE(SftConfig)
PRL_INSTANTIATE(EvalConfig)
PRL_INSTANTIATE(SynthesizeConfig)
PRL_INSTANTIATE(InitModelConfig)
PRL_INSTANTIATE(MakeDataConfig)
PRL_INSTANTIATE(ResultsConfig)
PRL_INSTANTIATE(ConvertConfig)
PRL_INSTANTIATE(ChatConfig)
PRL_INSTANTIATE(BenchConfig)
PRL_INSTANTIATE(PlanConfig)
PRL_INSTANTIATE(DoctorConfig)
PRL_INSTANTIATE(EnvCommandConfig)
PRL_INSTANTIATE(DashboardToolConfig)
PRL_INSTANTIATE(PlotConfig)
PRL_INSTANTIATE(RouterToolConfig)
PRL_INSTANTIATE(K8sConfig)
PRL_INSTANTIATE(RunsToolConfig)
PRL_INSTANTIATE(ReplayConfig)
PRL_INSTANTIATE(ReportConfig)
PRL_INSTANTIATE(TopConfig)
PRL_INSTANTIATE(EvalsConfig)
PRL_INSTANTIATE(EnvServerConfig)
PRL_INSTANTIATE(LaunchConfig)
#undef PRL_INSTANTIATE

template void check_resolved_place(Command, const RlConfig&);
template void check_resolved_place(Command, const TrainerConfig&);
template void check_resolved_place(Command, const OrchestratorConfig&);
template void check_resolved_place(Command, const SftConfig&);
template std::vector<std::filesystem::path> write_resolved(Command, const TrainerConfig&, const Provenance&);
template std::vector<std::filesystem::path> write_resolved(Command, const OrchestratorConfig&, const Provenance&);
template std::vector<std::filesystem::path> write_resolved(Command, const InferenceConfig&, const Provenance&);
template std::vector<std::filesystem::path> write_resolved(Command, const SftConfig&, const Provenance&);
template std::vector<std::filesystem::path> write_resolved(Command, const EvalConfig&, const Provenance&);
template std::vector<std::filesystem::path> write_resolved(Command, const SynthesizeConfig&, const Provenance&);

template std::string secrets_of(const RlConfig&);
template std::string secrets_of(const SftConfig&);
template std::string secrets_of(const EvalsConfig&);
template std::string secrets_of(const TrainerConfig&);
template std::string secrets_of(const OrchestratorConfig&);
template std::string secrets_of(const InferenceConfig&);

}  // namespace prl::config
