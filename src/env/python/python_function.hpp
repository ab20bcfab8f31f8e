#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>

#include <chrono>
#include <memory>
#include <string>

#include "env/python/settings.hpp"
#include "net/asio.hpp"

namespace prl::env::python {

/// A function written in Python, called in a worker process that lives as environments' workers do: its own folder, limits, no network.
/// The process starts with the first call. Any thread.
class PythonFunction {
 public:
  /// `path` is "package.module.name"; `settings.path` holds its module if it is not installed, `settings.python` the interpreter.
  /// `key` names it in messages. Error{kInvalidArgument}, {kNotFound} for an interpreter or folder that is not there.
  PythonFunction(std::string key, const std::string& path, boost::json::object kwargs, const PythonSettings& settings);
  ~PythonFunction();

  /// What the function returns, as JSON. Error{kInvalidArgument} with what it raised; {kDeadline}; {kUnavailable} when it kills its worker.
  net::asio::awaitable<boost::json::value> call(boost::json::array args, std::chrono::milliseconds limit) const;
  /// The same, waiting for it. Not from the pool's own thread.
  boost::json::value call_now(boost::json::array args, std::chrono::milliseconds limit) const;
  const std::string& name() const noexcept { return function_; }

 private:
  struct Impl;
  std::string function_;  ///< "package.module:name"
  boost::json::object kwargs_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace prl::env::python
