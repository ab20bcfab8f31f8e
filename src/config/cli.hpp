#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/command.hpp"
#include "config/provenance.hpp"
#include "config/resolve.hpp"

/// The way into configuration for the program:
///
///   const ParsedCommand parsed = parse_command(argc, argv);
///   ... switch (*parsed.command) { case Command::kRl: {
///     const Loaded<RlConfig> run = load<RlConfig>(*parsed.command, parsed.args);   // throws ConfigError
///     if (finish_early(*parsed.command, run)) return 0;                                            // --help and --dry-run
///     ... use run.config ...
///   with print_error(error) and exit status 1 for what is thrown.
namespace prl::config {

struct ParsedCommand {
  std::optional<Command> command;  ///< empty for `prl`, `prl --help` and `prl --version`
  std::string program;             ///< "prl rl", or "rl" when the program is linked under that name; for usage lines
  std::vector<std::string> args;   ///< the words after the command
  bool wants_version = false;
};

/// Takes the command from the name of the program (`rl` linked to `prl`) or from the first word; `uv run` in front of it is
/// skipped. Error{kInvalidArgument} for an unknown command, with the nearest name, and for tools of other programs
/// (torchrun, vllm, vf-eval, ...), saying what to type instead.
ParsedCommand parse_command(int argc, const char* const* argv);
/// Usage of `prl` and its commands.
std::string program_help();

/// A resolved configuration and what is needed around it.
template <class C>
struct Loaded {
  C config;
  Value raw;                          ///< what the user wrote, merged, with canonical keys and origins
  Provenance provenance;              ///< for write_resolved
  std::vector<NotBuilt> not_built;    ///< see require_built
  std::vector<std::string> warnings;  ///< to be logged
  std::optional<std::string> help;    ///< text to print instead of running
  bool dry_run = false;               ///< taken out of `config`, where it is false
};

/// Reads defaults, PRIME_ variables, @ files and flags, and resolves. ConfigError lists everything that is wrong at once.
template <class C>
Loaded<C> load(Command command, const std::vector<std::string>& args, const Context& context = Context::from_process());

/// Throws Error{kNotImplemented} that lists every feature the configuration asks for and this build does not have.
void require_built(const std::vector<NotBuilt>& not_built);

/// Writes the configuration below `<output_dir>/configs/`, as TOML and, with
/// nulls, as JSON: one file named after the command, without what follows from
/// other keys, so that it can be extended and varied; for rl also one complete
/// file per role. Keys and passwords are masked (secrets.hpp). Returns the
/// paths. Error as check_resolved_place.
std::vector<std::filesystem::path> write_resolved(Command command, const RlConfig& config, const Provenance& provenance);
template <class C>
std::vector<std::filesystem::path> write_resolved(Command command, const C& config, const Provenance& provenance);

/// Error{kAlreadyExists} naming a file where write_resolved writes that it did not make: the user's own configs/rl.toml, for example.
/// Before a start changes anything.
template <class C>
void check_resolved_place(Command command, const C& config);
/// Whether <folder>/<name>.toml, and so the .json beside it, is of write_resolved.
bool is_resolved_pair(const std::filesystem::path& folder, const std::string& name);

/// What write_resolved masks in a role's files, for the variable kSecretsVariable of a process that reads them; "" for nothing.
template <class C>
std::string secrets_of(const C& config);

/// Prints help, or for a dry run writes the files, demands that all is built and calls `check_start`, which throws what the start would
/// fail at. True if there is nothing left to do. Otherwise demands that all is built, logs the warnings and returns false.
template <class C>
bool finish_early(Command command, const Loaded<C>& loaded, const std::function<void()>& check_start = {});

/// --help of one command. Without a topic one page: purpose, example, the most
/// used keys and the sections. For the topic "all" every key with type, unit,
/// range, default and status, one panel per section; for a section or a key its
/// part of that. ConfigError with the nearest names for a topic that is
/// neither.
std::string command_help(Command command, const TypeOps& ops, std::string_view topic, int width);

}  // namespace prl::config
