#pragma once

#include <optional>
#include <string>

#include "config/schema.hpp"

namespace prl::config {

/// A Python function that a run asks: where it is and what it gets besides what it is asked about. Base of the sections that name one.
struct PythonFunctionConfig {
  std::optional<std::string> import_path;  ///< module.name; a section that needs it says so when the configuration is resolved
  std::optional<std::string> path;
  std::optional<std::string> python;
  Value kwargs = Value::table();

  /// `what` says what the function gets and returns.
  template <class V>
  void visit_function(V& v, const char* what, const char* interpreter = "Interpreter or virtual environment that runs the function") {
    v.field("import_path", import_path, what);
    v.field("path", path, "Folders, with colons, of that module if it is not installed");
    v.field("python", python, interpreter);
    v.field("kwargs", kwargs, "Further arguments of the function");
  }
};

}  // namespace prl::config
