#pragma once

#include <memory>
#include <string>

#include "env/generate_client.hpp"
#include "router/fleet.hpp"

namespace prl::router {

struct RoutedClientOptions {
  std::string model;  ///< name that the engines serve
  /// Of the model's adapter that requests are for, empty for none. A WeightUpdater brings it: an engine that does not know it was started
  /// anew, and counts as lost.
  std::string adapter = {};
};

/// The engines of a fleet behind one client: turns of a session go where their prefix is. A request whose engine is lost, hangs, or answers
/// with older weights than it has proven, begins anew elsewhere with the same sampling seed: as its tokens depend on prompt, seed and
/// weights alone, they are those that the lost engine would have given. check_health waits for one engine, and a short while for the
/// others, which may join later.
std::shared_ptr<env::GenerateClient> make_routed_generate_client(std::shared_ptr<Fleet> fleet, std::shared_ptr<net::HttpClient> client,
                                                                 RoutedClientOptions options);

}  // namespace prl::router
