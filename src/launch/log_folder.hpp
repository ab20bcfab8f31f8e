#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace prl::launch {

/// Where a run logs. Each start of its launcher has a folder of its own, <output_dir>/logs/attempt_N with N one above the highest there
/// is; logs/latest is a link to the newest, and logs/NAME one to latest/NAME. The links are for people: nothing here reads them, and a
/// file system without links only lacks them.

/// The folder of this process's attempt, by its absolute path; processes that it starts inherit the variable and log there too.
inline constexpr const char* kLogFolderVariable = "PRL_LOG_FOLDER";

/// Makes the folder of a new attempt, points logs/latest at it and hands it to this process and its children. Error{kIo}.
std::filesystem::path begin_attempt(const std::filesystem::path& output_dir);
/// The same for a command that may be one of several that make up a run: it logs into the attempt that it was started in, else into the
/// newest one that has no log of its name yet, else into a new one.
std::filesystem::path join_attempt(const std::filesystem::path& output_dir, std::string_view command);

/// The same for an attempt that another node has begun, by the name of its folder ("attempt_2").
void enter_attempt(const std::filesystem::path& output_dir, const std::string& name);

/// The folder of the attempt that this process was started in or has begun, else of the newest; makes nothing.
std::filesystem::path log_folder(const std::filesystem::path& output_dir);
/// log_folder / name ("trainer.log", "trainer/rank_1.log"). Of an attempt that is there the folder of the file and the link
/// logs/<first part of name> are made; without one nothing is.
std::filesystem::path log_file(const std::filesystem::path& output_dir, const std::string& name);
/// Removes the folders of all attempts and the links, and nothing else; an attempt that was handed to this process stays.
void remove_attempts(const std::filesystem::path& output_dir);

}  // namespace prl::launch
