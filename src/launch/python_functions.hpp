#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "config/loss_config.hpp"
#include "env/python/python_function.hpp"
#include "trainer/loss/loss_function.hpp"

namespace prl::launch {

/// `function`, "module.name", run as `config` says, whose own import_path is not looked at; `key` names it in messages and its log below
/// `output_dir`.
std::shared_ptr<env::python::PythonFunction> python_function(const std::string& key, const std::string& function,
                                                             const config::PythonFunctionConfig& config,
                                                             const std::filesystem::path& output_dir);

/// The function of a loss of type custom; empty for other types. It is imported at once, so that a name that is not there ends the start.
/// Any thread.
///
/// Errors  Error{kInvalidArgument}, {kNotFound} for a function, folder or interpreter that is not there. When it is called:
///         {kInvalidArgument} with what the Python function raised or returned, {kDeadline} after a minute for one row, {kUnavailable}
///         when it kills its worker.
trainer::LossFunction loss_function(const config::LossConfig& loss, const std::filesystem::path& output_dir);

}  // namespace prl::launch
