#include "nn/gguf_model.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "base/testing/temp_folder.hpp"
#include "nn/stored_weights.hpp"
#include "nn/test_support.hpp"

namespace prl::nn {
namespace {
namespace fs = std::filesystem;
using ::testing::HasSubstr;

fs::path fixture(const std::string& name) { return test_source_dir() / "tests/fixtures/gguf" / name; }
std::shared_ptr<const io::GgufFile> open(const fs::path& path) { return std::make_shared<io::GgufFile>(io::GgufFile::open(path)); }

std::vector<float> all_of(const WeightSource& source) {
  std::vector<float> values(static_cast<std::size_t>(source.shape.num_elements()));
  source.read(0, values);
  return values;
}

void expect_error(const std::function<void()>& body, ErrorCode code, const std::string& part) {
  try {
    body();
    ADD_FAILURE() << "no error; wanted " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

/// The same bytes with one text replaced by another of the same length, wherever it is.
fs::path changed(const fs::path& folder, const std::string& name, const std::string& from, const std::string& to) {
  std::string bytes = read_file(fixture(name));
  EXPECT_EQ(from.size(), to.size());
  std::size_t count = 0;
  for (std::size_t at = bytes.find(from); at != std::string::npos; at = bytes.find(from, at + to.size()), ++count)
    bytes.replace(at, from.size(), to);
  EXPECT_GT(count, 0u) << from;
  std::ofstream(folder / "changed.gguf", std::ios::binary) << bytes;
  return folder / "changed.gguf";
}

class GgufGolden : public ::testing::TestWithParam<std::string> {};

TEST_P(GgufGolden, GivesBackConfigurationAndWeights) {
  const auto file = open(fixture(GetParam() + ".gguf"));
  const fs::path golden = test_source_dir() / "tests/golden/models" / GetParam();
  const ModelConfig config = gguf_model_config(*file), wanted = load_model_config(golden);
  EXPECT_EQ(config.model_type, wanted.model_type);
  EXPECT_EQ(config.architecture, wanted.architecture);
  EXPECT_EQ(config.vocab_size, wanted.vocab_size);
  EXPECT_EQ(config.hidden_size, wanted.hidden_size);
  EXPECT_EQ(config.intermediate_size, wanted.intermediate_size);
  EXPECT_EQ(config.num_layers, wanted.num_layers);
  EXPECT_EQ(config.num_heads, wanted.num_heads);
  EXPECT_EQ(config.num_kv_heads, wanted.num_kv_heads);
  EXPECT_EQ(config.head_dim, wanted.head_dim);
  EXPECT_EQ(config.max_position, wanted.max_position);
  EXPECT_EQ(config.rms_norm_eps, wanted.rms_norm_eps);
  EXPECT_EQ(config.rope_theta, wanted.rope_theta);
  EXPECT_EQ(config.tie_word_embeddings, wanted.tie_word_embeddings);
  EXPECT_EQ(config.attention_bias, wanted.attention_bias);
  EXPECT_EQ(config.qk_norm, wanted.qk_norm);
  EXPECT_EQ(config.rope_scaling.enabled, wanted.rope_scaling.enabled);
  if (wanted.rope_scaling.enabled) {
    EXPECT_EQ(config.rope_scaling.factor, wanted.rope_scaling.factor);
    EXPECT_EQ(config.rope_scaling.low_freq_factor, wanted.rope_scaling.low_freq_factor);
    EXPECT_EQ(config.rope_scaling.high_freq_factor, wanted.rope_scaling.high_freq_factor);
    EXPECT_EQ(config.rope_scaling.original_max_position, wanted.rope_scaling.original_max_position);
  }
  const auto sources = gguf_weight_sources(file, config);
  const auto stored = io::SafetensorsFolder::open(golden);
  const auto refs = match_stored_weights(stored, wanted, *make_tensor_table(wanted));
  ASSERT_EQ(sources.size(), refs.size());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    EXPECT_EQ(sources[i].name, refs[i].name());
    std::vector<float> values(static_cast<std::size_t>(refs[i].num_elements()));
    refs[i].read_f32(0, values);
    EXPECT_EQ(all_of(sources[i]), values) << sources[i].name;
  }
}
INSTANTIATE_TEST_SUITE_P(Models, GgufGolden, ::testing::Values("llama_rope3_sharded", "qwen2_untied", "qwen3_tied"),
                         [](const auto& test) { return test.param; });

TEST(GgufModel, QuantisedLlamaBecomesAFolderThatLoads) {
  const auto file = open(fixture("tiny_llama.gguf"));
  const ModelConfig config = gguf_model_config(*file);
  EXPECT_EQ(config.model_type, "llama");
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.bos_id, 1);
  EXPECT_EQ(config.pad_id, 2);
  EXPECT_EQ(config.eos_ids, std::vector<std::int32_t>{2});
  EXPECT_EQ(gguf_natural_dtype(*file), DType::kBF16);
  const auto sources = gguf_weight_sources(file, config);
  const auto expected = io::SafetensorsFile::open(fixture("tiny_llama.safetensors"));
  ASSERT_EQ(sources.size(), expected.entries().size());
  const prl::testing::TempFolder temporary;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const fs::path folder = temporary.path() / std::string(to_string(dtype));
    std::uint64_t last = 0, total = 0;
    make_model_folder(folder, [&](const fs::path& out) {
      write_weight_files(out, sources, {.dtype = dtype, .max_shard_bytes = 40000, .progress = [&](std::uint64_t done, std::uint64_t all) {
                                          EXPECT_GT(done, last);
                                          last = done;
                                          total = all;
                                        }});
      write_file_atomic(out / "config.json", saved_config_json(config, dtype));
    });
    EXPECT_EQ(last, total);
    EXPECT_TRUE(fs::exists(folder / "model.safetensors.index.json"));
    const ModelConfig loaded = load_model_config(folder);
    EXPECT_EQ(loaded.eos_ids, config.eos_ids);
    Parameters parameters(make_cpu_runtime(), loaded);
    load_parameters(parameters, folder);
    for (const NamedParameter& parameter : parameters.named()) {
      std::vector<float> values(static_cast<std::size_t>(parameter.value.num_elements()));
      expected.read_f32(expected.at(parameter.name), 0, values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const float wanted = dtype == DType::kF32    ? values[i]
                             : dtype == DType::kBF16 ? to_f32(to_bf16(values[i]))
                                                     : io::f16_to_f32(io::f32_to_f16(values[i]));
        ASSERT_EQ(parameter.value.as<float>()[i], wanted) << parameter.name << " " << i;
      }
    }
  }
  expect_error([&] { make_model_folder(temporary.path(), [](const fs::path&) {}); }, ErrorCode::kAlreadyExists, "exists");
}

TEST(GgufModel, NamesWhatItCannotTake) {
  const prl::testing::TempFolder temporary;
  const auto config_of = [&](const std::string& from, const std::string& to) {
    return [&, from, to] { gguf_model_config(*open(changed(temporary.path(), "tiny_llama.gguf", from, to))); };
  };
  const auto sources_of = [&](const std::string& from, const std::string& to) {
    return [&, from, to] {
      const auto file = open(changed(temporary.path(), "tiny_llama.gguf", from, to));
      gguf_weight_sources(file, gguf_model_config(*file));
    };
  };
  expect_error(config_of("general.architecture", "general.architectura"), ErrorCode::kCorrupt, "'general.architecture' is missing");
  expect_error(config_of("llama.block_count", "llama.block_xount"), ErrorCode::kCorrupt, "'llama.block_count' is missing");
  expect_error(config_of("token_embd.weight", "token_embx.weight"), ErrorCode::kCorrupt, "'token_embd.weight' is missing");
  expect_error(sources_of("blk.1.ffn_up.weight", "blk.1.ffn_ux.weight"), ErrorCode::kCorrupt, "'blk.1.ffn_up.weight' of the llama model");
  expect_error(sources_of("output_norm.weight", "output_nork.weight"), ErrorCode::kCorrupt, "'output_norm.weight' of the llama");
  // A tensor too many: the model has one layer less.
  std::string bytes = read_file(fixture("tiny_llama.gguf"));
  const std::size_t at = bytes.find("llama.block_count") + 17 + 4;
  ASSERT_EQ(bytes[at], 2);
  bytes[at] = 1;
  std::ofstream(temporary.path() / "short.gguf", std::ios::binary) << bytes;
  expect_error(
      [&] {
        const auto file = open(temporary.path() / "short.gguf");
        gguf_weight_sources(file, gguf_model_config(*file));
      },
      ErrorCode::kCorrupt, "is no part of a llama model");
  expect_error([&] { gguf_model_config(*open(fixture("quants.gguf"))); }, ErrorCode::kNotImplemented, "model_type");
  // A family that is known from config.json alone. The name is longer by two letters, which the padding before the tensors has room for.
  bytes = read_file(fixture("tiny_llama.gguf"));
  const std::size_t name = bytes.find("general.architecture") + 20 + 4;
  ASSERT_EQ(bytes.substr(name + 8, 5), "llama");
  bytes[name] = 7;
  bytes.replace(name + 8, 5, "smollm3");
  std::ofstream(temporary.path() / "smollm3.gguf", std::ios::binary) << bytes;
  expect_error([&] { gguf_model_config(*open(temporary.path() / "smollm3.gguf")); }, ErrorCode::kNotImplemented,
               "'general.architecture' is 'smollm3'");
}

}  // namespace
}  // namespace prl::nn
