#pragma once

#include <stop_token>
#include <string>

#include "env/python/settings.hpp"

namespace prl::env::python {

struct ServerOptions {
  std::string id;
  PythonSettings settings;
  std::string address;  ///< host:port of the first worker; the others listen on the ports after it
  int num_workers = 1;
};

/// Keeps workers of the environment listening, each for one connection at a time, until `stop`; a worker whose connection has ended is
/// replaced. The runs that connect say which arguments the environment gets. Error as plan_environment; {kInvalidArgument} for the address.
void serve(const ServerOptions& options, std::stop_token stop);

}  // namespace prl::env::python
