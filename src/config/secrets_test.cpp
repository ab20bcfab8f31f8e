#include "config/secrets.hpp"

#include <gtest/gtest.h>

#include "base/files.hpp"
#include "config/cli.hpp"
#include "config/detail/test_support.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace {

using testing::load_line;

TEST(Secrets, AreMaskedByTheKindOfKeyAndComeBack) {
  const std::string text = R"({
    "server": {"api_key": "s1", "admin_api_key": "s2", "host": "localhost"},
    "client": {"api_key_var": "MY_KEY", "headers": {"Authorization": "s3", "X-Api-Key": "s4", "X-Tokens": "plain"},
               "headers_from_env": {"Authorization": "MY_TOKEN"}},
    "env_vars": {"HF_TOKEN": "s5", "OMP_NUM_THREADS": "4"},
    "train": {"env": [{"args": {"judge_api_key": "s6", "key": "plain"}}]},
    "tokenizer": {"pad_token": "plain"}, "empty": {"api_key": ""}, "none": {"api_key": null}})";
  const Value given = parse_json(text, "given");
  Value tree = given;
  const Value secrets = mask_secrets(tree);
  ASSERT_EQ(secrets.members().size(), 6u);
  const std::string masked = to_json(tree);
  for (const char* value : {"s1", "s2", "s3", "s4", "s5", "s6"})
    EXPECT_EQ(masked.find(std::string("\"") + value + "\""), std::string::npos) << value;
  EXPECT_EQ(find_path(tree, "client.headers.X-Tokens")->as_string(), "plain");
  EXPECT_EQ(find_path(tree, "client.headers_from_env.Authorization")->as_string(), "MY_TOKEN");
  EXPECT_EQ(find_path(tree, "env_vars.OMP_NUM_THREADS")->as_string(), "4");
  EXPECT_EQ(find_path(tree, "tokenizer.pad_token")->as_string(), "plain");

  Value restored = tree;
  EXPECT_TRUE(restore_secrets(restored, secrets).empty());
  EXPECT_TRUE(equals(restored, given));
  EXPECT_EQ(restore_secrets(tree, Value::table()).size(), 6u);
  EXPECT_EQ(find_path(tree, "server.api_key"), nullptr);
}

class WrittenFiles : public ::testing::Test {
 protected:
  WrittenFiles() : folder_(std::filesystem::path(::testing::TempDir()) / "prl_config_secrets") { std::filesystem::remove_all(folder_); }
  ~WrittenFiles() override { std::filesystem::remove_all(folder_); }
  std::string file(const std::string& name) const { return (folder_ / "configs" / name).string(); }
  std::filesystem::path folder_;
};

TEST_F(WrittenFiles, HoldNoSecretsAndDemandThemWhenRead) {
  const auto rl = load_line<RlConfig>(
      "rl --model.name ./m --inference.server.api-key hush-1 --env-vars.HF_TOKEN hush-2 --max-steps 3 "
      "--deployment.type single_node --output-dir " +
      folder_.string());
  write_resolved(Command::kRl, rl.config, rl.provenance);
  int num_masked = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "configs")) {
    const std::string text = read_file(entry.path());
    EXPECT_EQ(text.find("hush-"), std::string::npos) << entry.path();
    num_masked += text.find(kMasked) != std::string::npos ? 1 : 0;
  }
  EXPECT_EQ(num_masked, 8);  // rl and its roles, twice each

  // Alone: both are wanted, and named.
  try {
    load_line<InferenceConfig>("inference @ " + file("inference.json"));
    FAIL() << "started without its key";
  } catch (const ConfigError& error) {
    ASSERT_EQ(error.problems().size(), 2u) << error.what();
    EXPECT_NE(std::string(error.what()).find("--server.api-key"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("env_vars.HF_TOKEN"), std::string::npos) << error.what();
  }
  Context context = testing::plain_context();
  context.environment["HF_TOKEN"] = "from outside";
  const auto given = load<InferenceConfig>(Command::kInference, {"@", file("inference.toml"), "--server.api-key", "other"}, context);
  EXPECT_EQ(given.config.server.api_key, "other");
  EXPECT_EQ(given.config.env_vars.at("HF_TOKEN"), "from outside");

  // As `prl rl` starts it.
  context = testing::plain_context();
  context.environment[kSecretsVariable] = secrets_of(*rl.config.inference);
  const auto child = load<InferenceConfig>(Command::kInference, {"@", file("inference.json")}, context);
  EXPECT_EQ(child.config.server.api_key, "hush-1");
  EXPECT_EQ(child.config.env_vars.at("HF_TOKEN"), "hush-2");
}

}  // namespace
}  // namespace prl::config
