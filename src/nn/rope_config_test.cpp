#include <cmath>
#include <string>

#include "nn/model_config_test_fixture.hpp"
#include "nn/models/family.hpp"

// Rotary embeddings as config.json says them, in its old keys and its new ones.

namespace prl::nn {
namespace {
using ::testing::HasSubstr;

class RopeConfigTest : public ModelConfigTest {};

TEST_F(RopeConfigTest, RopeKeysOldAndNew) {
  const std::string scaling =
      R"({"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"})";
  const ModelConfig old_style = load(edit(kSmolLM2, "\"rope_scaling\": null", "\"rope_scaling\": " + scaling));
  EXPECT_TRUE(old_style.rope_scaling.enabled);
  EXPECT_EQ(old_style.rope_scaling.factor, 32.0);
  EXPECT_EQ(old_style.rope_theta, 100000.0);
  const ModelConfig new_style = load(edit(kSmolLM2, "\"rope_scaling\": null, \"rope_theta\": 100000",
                                          "\"rope_parameters\": {\"rope_theta\": 500000.0, " + scaling.substr(1)));
  EXPECT_TRUE(new_style.rope_scaling.enabled);
  EXPECT_EQ(new_style.rope_theta, 500000.0);
  EXPECT_EQ(new_style.rope_scaling.original_max_position, 8192);
  const ModelConfig plain = load(edit(kSmolLM2, "\"rope_scaling\": null, \"rope_theta\": 100000",
                                      R"("rope_parameters": {"rope_theta": 7000, "rope_type": "default"})"));
  EXPECT_FALSE(plain.rope_scaling.enabled);
  EXPECT_EQ(plain.rope_theta, 7000.0);

  expect_error(edit(kSmolLM2, "\"rope_scaling\": null", R"("rope_scaling": {"type": "dynamic", "factor": 4})"), ErrorCode::kNotImplemented,
               "'rope_type' is 'dynamic'");
  expect_error(edit(kSmolLM2, "\"rope_scaling\": null", R"("rope_scaling": {"rope_type": "llama3"})"), ErrorCode::kCorrupt, "factor");
  expect_error(edit(kSmolLM2, "\"rope_scaling\": null", R"("rope_parameters": {"partial_rotary_factor": 0.5})"), ErrorCode::kNotImplemented,
               "partial_rotary_factor");
  expect_error(edit(kSmolLM2, "\"rope_scaling\": null", R"("partial_rotary_factor": 0.5)"), ErrorCode::kNotImplemented,
               "partial_rotary_factor");
}

// The expected values are those of transformers 5.23: AutoConfig.from_pretrained, then standardize_rope_params as its models call it.
TEST_F(RopeConfigTest, Yarn) {
  const auto with = [](const std::string& keys) { return edit(kQwen3, "\"rope_scaling\": null", "\"rope_scaling\": {" + keys + "}"); };
  const ModelConfig config = load(with(R"("rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768)"));
  ASSERT_TRUE(config.yarn);
  EXPECT_FALSE(config.rope_scaling.enabled);
  EXPECT_EQ(config.yarn->original_max_position, 32768);
  EXPECT_EQ(config.yarn->beta_fast, 32.0);
  EXPECT_NEAR(config.yarn->attention_factor, 0.1 * std::log(4.0) + 1.0, 1e-12);
  EXPECT_EQ(load(to_config_json(config)).yarn, config.yarn);
  EXPECT_EQ(load(with(R"("type": "yarn", "factor": 4.0)")).yarn->original_max_position, 40960) << "max_position_embeddings";
  const ModelConfig scaled = load(with(R"("type": "yarn", "factor": 40, "mscale": 0.5, "mscale_all_dim": 1.0, "truncate": false)"));
  EXPECT_NEAR(scaled.yarn->attention_factor, (0.05 * std::log(40.0) + 1.0) / (0.1 * std::log(40.0) + 1.0), 1e-12);
  EXPECT_FALSE(scaled.yarn->truncates);
  expect_error(with(R"("type": "yarn", "factor": 0.5)"), ErrorCode::kCorrupt, "factor");
}

TEST_F(RopeConfigTest, Linear) {
  const auto with = [](const std::string& keys) { return edit(kQwen3, "\"rope_scaling\": null", "\"rope_scaling\": {" + keys + "}"); };
  for (const char* key : {"rope_type", "type"}) {
    const ModelConfig config = load(with("\"" + std::string(key) + R"(": "linear", "factor": 2.5)"));
    EXPECT_EQ(config.rope_divisor, 2.5);
    EXPECT_FALSE(config.yarn || config.rope_scaling.enabled);
    EXPECT_EQ(config.max_position, 40960) << "as the file says";
    EXPECT_EQ(load(to_config_json(config)).rope_divisor, 2.5);
  }
  expect_error(with(R"("type": "linear")"), ErrorCode::kCorrupt, "factor");
  expect_error(with(R"("type": "linear", "factor": 0.5)"), ErrorCode::kCorrupt, "factor");
}

TEST_F(RopeConfigTest, AnOverrideOfTheRotaryScalingIsAsIfTheFileHadIt) {
  const std::string yarn = R"({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})";
  const auto load_with = [&](const std::string& text, const std::string& rope) {
    load(text);
    return load_model_config(folder_, {.rope_scaling = rope});
  };
  const ModelConfig written = load(edit(kQwen3, "\"rope_scaling\": null", "\"rope_scaling\": " + yarn));
  const ModelConfig config = load_with(kQwen3, yarn);
  EXPECT_EQ(config.yarn, written.yarn);
  EXPECT_EQ(config.rope_theta, written.rope_theta);
  EXPECT_EQ(config.max_position, 131072) << "what the factor stretches the original length to";
  EXPECT_EQ(config.raw_json, load(kQwen3).raw_json) << "what would be saved is the model's own";
  EXPECT_EQ(load_with(kQwen3, R"({"type": "yarn", "factor": 2, "original_max_position_embeddings": 1024})").max_position, 40960);
  // In place of what a file of transformers 5 says; the base of the angles stays.
  const std::string newer =
      edit(kQwen3, "\"rope_scaling\": null, ",
           R"("rope_parameters": {"rope_theta": 7e5, "rope_type": "yarn", "factor": 2}, "original_max_position_embeddings": 99, )");
  const ModelConfig replaced = load_with(newer, yarn);
  EXPECT_EQ(replaced.yarn, written.yarn);
  EXPECT_EQ(replaced.rope_theta, 7e5);
  const ModelConfig off = load_with(newer, R"({"rope_type": "default", "rope_theta": 5e5})");
  EXPECT_FALSE(off.yarn);
  EXPECT_EQ(off.rope_theta, 5e5);
  const ModelConfig llama = load_with(
      kSmolLM2,
      R"({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192})");
  EXPECT_TRUE(llama.rope_scaling.enabled);
  EXPECT_EQ(llama.max_position, 65536);
  EXPECT_EQ(load_with(kSmolLM2, R"({"rope_type": "linear", "factor": 4})").max_position, 32768);
  EXPECT_EQ(load_with(kSmolLM2, R"({"rope_type": "linear", "factor": 4, "original_max_position_embeddings": 4096})").max_position, 16384);

  const auto reason = [&](const std::string& rope) -> std::string {
    try {
      load_with(kQwen3, rope);
    } catch (const Error& error) {
      return error.what();
    }
    return "loaded";
  };
  EXPECT_THAT(reason(R"({"rope_type": "yarn", "facter": 4})"), HasSubstr("no type of scaling has the key 'facter'"));
  EXPECT_THAT(reason(R"({"factor": 4})"), HasSubstr("wanted a 'rope_type'"));
  EXPECT_THAT(reason(R"({"rope_type": "dynamic", "factor": 4})"), HasSubstr("'rope_type' is 'dynamic'"));
  EXPECT_THAT(reason("[4]"), HasSubstr("wanted an object"));
}

TEST_F(RopeConfigTest, RopeKeysSideBySideCountAsInTransformers) {
  const std::string llama3 =
      R"({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512)";
  const std::string no_length = R"({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0)";
  const auto with = [&](const std::string& keys) { return edit(kSmolLM2, R"("rope_scaling": null, "rope_theta": 100000)", keys); };
  struct Case {
    std::string keys;
    bool is_scaled;
    double theta;
    std::int64_t original;
  };
  const Case cases[] = {
      {"\"rope_scaling\": " + llama3 + R"(, "rope_theta": 7e5}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4})", true, 7e5,
       512},
      {"\"rope_scaling\": " + llama3 + R"(}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 5e5)", true, 5e5,
       512},
      {"\"rope_scaling\": " + llama3 + R"(}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6})", true, 1e4, 512},
      {R"("rope_scaling": {}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6})", false, 1e6, 0},
      {R"("rope_scaling": null, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6})", false, 1e6, 0},
      {R"("rope_scaling": {"rope_type": "default"}, "rope_parameters": )" + llama3 + R"(, "rope_theta": 1e6})", false, 1e4, 0},
      {"\"rope_parameters\": " + llama3 + R"(}, "rope_theta": 5e5)", true, 5e5, 512},
      {"\"rope_parameters\": " + llama3 + R"(, "rope_theta": 1e6}, "original_max_position_embeddings": 1024)", true, 1e6, 1024},
      {"\"rope_parameters\": " + no_length + R"(, "rope_theta": 1e6}, "original_max_position_embeddings": 1024)", true, 1e6, 1024},
      {"\"rope_parameters\": " + no_length + R"(, "rope_theta": 1e6})", true, 1e6, 8192},
  };
  for (const Case& c : cases) {
    const ModelConfig config = load(with(c.keys));
    EXPECT_EQ(config.rope_scaling.enabled, c.is_scaled) << c.keys;
    EXPECT_EQ(config.rope_theta, c.theta) << c.keys;
    if (c.is_scaled) {
      EXPECT_EQ(config.rope_scaling.original_max_position, c.original) << c.keys;
    }
  }
  for (const char* key : {"rope_parameters", "rope_scaling"})
    expect_error(with(std::string("\"") + key + "\": {\"full_attention\": " + llama3 + "}}"), ErrorCode::kNotImplemented,
                 "'full_attention'");
}

}  // namespace
}  // namespace prl::nn
