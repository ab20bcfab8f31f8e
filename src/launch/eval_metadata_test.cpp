#include "launch/eval_metadata.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json/parse.hpp>
#include <filesystem>

#include "base/files.hpp"

namespace prl::launch {
namespace {
namespace fs = std::filesystem;
namespace json = boost::json;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(EvalMetadata, NamesWhatWasAskedForButNoSecrets) {
  const fs::path folder = fs::path(::testing::TempDir()) / "prl_eval_metadata";
  fs::remove_all(folder);
  EvalFacts facts;
  facts.env_id = "wiki-search";
  facts.env_args = json::parse(R"({"judge_model": "m", "num_pages": 12, "ratio": 0.5, "judge_api_key_var": "JUDGE_KEY",
    "judge_api_key": "sk-one", "tools": [{"api_key": "sk-two", "headers": {"Authorization": "Bearer sk-three", "Accept": "*/*"}}]})")
                       .as_object();
  facts.model = "tiny";
  facts.sampling = json::parse(R"({"max_tokens": 8, "extra_body": {"api_key": "sk-four", "top_k": 3}})").as_object();
  write_metadata(folder, facts, nullptr);

  const std::string text = read_file(folder / "metadata.json");
  EXPECT_THAT(text, Not(HasSubstr("sk-")));
  const json::object written = json::parse(text).as_object();
  EXPECT_EQ(written.at("env_args"),
            json::parse(R"({"judge_model": "m", "num_pages": 12, "ratio": 0.5, "judge_api_key_var": "JUDGE_KEY", "judge_api_key": "***",
              "tools": [{"api_key": "***", "headers": {"Authorization": "***", "Accept": "*/*"}}]})"));
  EXPECT_EQ(written.at("sampling_args"), json::parse(R"({"max_tokens": 8, "extra_body": {"api_key": "***", "top_k": 3}})"));
  EXPECT_EQ(written.at("is_complete"), false);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace prl::launch
