#pragma once

#include <boost/json/parse.hpp>

#include <filesystem>
#include <memory>
#include <string>

#include "config/loss_config.hpp"
#include "config/text_format.hpp"
#include "env/python/python_function.hpp"
#include "launch/log_folder.hpp"
#include "trainer/loss/loss_function.hpp"

namespace prl::launch {

/// `function`, "module.name", run as `section` says, which has path, python and kwargs; `key` names it in messages and its log below
/// `output_dir`.
template <class Section>
std::shared_ptr<env::python::PythonFunction> python_function(const std::string& key, const std::string& function, const Section& section,
                                                             const std::filesystem::path& output_dir) {
  env::python::PythonSettings settings;
  settings.path = section.path.value_or("");
  settings.python = section.python.value_or("");
  settings.log_folder = log_file(output_dir, "envs") / "functions";
  return std::make_shared<env::python::PythonFunction>(key, function,
                                                       boost::json::parse(config::to_compact_json(section.kwargs)).as_object(), settings);
}

/// The function of a loss of type custom; empty for other types. It is imported at once, so that a name that is not there ends the start.
/// Any thread.
///
/// Errors  Error{kInvalidArgument}, {kNotFound} for a function, folder or interpreter that is not there. When it is called:
/// {kInvalidArgument}
///         with what the Python function raised or returned, {kDeadline} after a minute for one row, {kUnavailable} when it kills its
///         worker.
trainer::LossFunction loss_function(const config::LossConfig& loss, const std::filesystem::path& output_dir);

}  // namespace prl::launch
