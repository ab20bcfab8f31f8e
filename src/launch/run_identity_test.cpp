#include "launch/run_identity.hpp"

#include <gtest/gtest.h>

#include <cstdlib>

namespace prl::launch {
namespace {

TEST(RunIdentity, NamesTheServersThatTheRunStarts) {
  config::RlConfig config;
  config.inference.emplace();
  config.inference->server.port = 8123;
  config.orchestrator.student.client.base_url = {"http://localhost:8123/v1", "http://elsewhere:9000/v1"};
  EXPECT_EQ(own_servers(config), std::vector<std::string>{"http://localhost:8123"}) << "servers of others have no identity";
  config.orchestrator.student.client.admin_base_url = {"http://127.0.0.1:8123"};
  EXPECT_EQ(own_servers(config), (std::vector<std::string>{"http://localhost:8123", "http://127.0.0.1:8123"}));
  config.inference.reset();
  EXPECT_TRUE(own_servers(config).empty());
}

TEST(RunIdentity, GoesThroughTheEnvironment) {
  EXPECT_NE(new_run_identity(), new_run_identity());
  EXPECT_EQ(new_run_identity().size(), 16u);
  for (const auto& [name, value] : identity_env("abc", {"http://a:1", "http://b:2"})) ::setenv(name.c_str(), value.c_str(), 1);
  EXPECT_EQ(run_identity(), "abc");
  EXPECT_EQ(run_servers(), (std::map<std::string, std::string>{{"http://a:1", "abc"}, {"http://b:2", "abc"}}));
  ::unsetenv(kRunIdVariable);
  EXPECT_TRUE(run_servers().empty()) << "started by hand";
  ::unsetenv(kRunServersVariable);
}

TEST(RunIdentity, OrchestratorsOfOneFolderClaimAlike) {
  EXPECT_EQ(run_claim("outputs/a"), run_claim("./outputs/b/../a/"));
  EXPECT_NE(run_claim("outputs/a"), run_claim("outputs/b"));
}

}  // namespace
}  // namespace prl::launch
