#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "config/rl_config.hpp"

namespace prl::launch {

/// A server that `prl rl` starts belongs to that run. It says so in every reply, takes new weights from that run alone, and the run's
/// clients take replies from no other; so a run whose port is taken cannot write into the server of the one that has it. A server that
/// was started by hand becomes that of the first run that changes its weights (net::RunClaim).
///
/// The launcher hands both to its roles in variables of their environment: the id, and the origins of the servers it starts.
inline constexpr const char* kRunIdVariable = "PRL_RUN_ID";
inline constexpr const char* kRunServersVariable = "PRL_RUN_SERVERS";

/// 16 hexadecimal digits that no other run has.
std::string new_run_identity();
/// Origins of those servers in the client sections that `config` starts itself.
std::vector<std::string> own_servers(const config::RlConfig& config);
/// The two variables for a role.
std::map<std::string, std::string> identity_env(const std::string& run_id, const std::vector<std::string>& servers);

/// The id of the run that this process is a role of; empty if it was started by hand.
std::string run_identity();
/// What an orchestrator announces to servers that the run did not start. Every orchestrator of this output folder has the same, so that a
/// resumed run finds its server again.
std::string run_claim(const std::filesystem::path& output_dir);
/// Origins of the run's servers and the id they must show, for HttpClient::Options::run_ids.
std::map<std::string, std::string> run_servers();

}  // namespace prl::launch
