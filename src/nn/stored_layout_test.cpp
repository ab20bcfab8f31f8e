// Files that do not have the tensors of the table one by one, row after row.
#include "nn/stored_layout.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>

#include "base/error.hpp"
#include "base/testing/temp_folder.hpp"
#include "io/safetensors.hpp"
#include "nn/peft.hpp"
#include "nn/stored_tensor.hpp"
#include "nn/test_support.hpp"

namespace prl::nn {
namespace {
namespace fs = std::filesystem;
using testing_support::golden_models;
using testing_support::SmallModel;

std::vector<float> values_of(const io::SafetensorsFile& file, const std::string& name) {
  const io::SafetensorsEntry& entry = file.at(name);
  std::vector<float> out(static_cast<std::size_t>(entry.num_elements()));
  file.read_f32(entry, 0, out);
  return out;
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

/// Writes tensors that are bfloat16, by name.
void write(const fs::path& path, const std::map<std::string, std::pair<std::vector<std::int64_t>, std::vector<std::byte>>>& tensors) {
  std::vector<io::SafetensorsWriter::Spec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back({name, io::StoredType::kBF16, tensor.first});
  io::SafetensorsWriter writer(path, specs, {{"format", "pt"}});
  for (const auto& [name, tensor] : tensors) writer.append(tensor.second);
  writer.finish();
}

/// transformers writes the experts of a model for text one by one, published files have them in stacks.
TEST(StoredLayout, ExpertsOneByOneAreThoseOfTheStacks) {
  const fs::path source = golden_models() / "qwen3_5_moe";
  const prl::testing::TempFolder temporary;
  fs::copy_file(source / "config.json", temporary.path() / "config.json");
  const ModelConfig config = load_model_config(source);
  std::map<std::string, std::pair<std::vector<std::int64_t>, std::vector<std::byte>>> tensors;
  const io::SafetensorsFile file = io::SafetensorsFile::open(source / "model.safetensors");
  for (const io::SafetensorsEntry& entry : file.entries()) {
    const std::span<const std::byte> bytes = file.bytes(entry);
    const std::size_t kind = entry.name.find("experts.") == std::string::npos ? std::string::npos : entry.name.rfind('.') + 1;
    if (kind == std::string::npos) {
      tensors[entry.name] = {entry.shape, {bytes.begin(), bytes.end()}};
      continue;
    }
    const bool is_pair = entry.name.ends_with("gate_up_proj");
    ASSERT_EQ(entry.shape[0], config.num_experts);
    const std::int64_t rows = is_pair ? entry.shape[1] / 2 : entry.shape[1], size = rows * entry.shape[2] * 2;
    std::size_t at = 0;
    for (std::int64_t expert = 0; expert < config.num_experts; ++expert)
      for (const char* name : is_pair ? std::vector{"gate_proj", "up_proj"} : std::vector{"down_proj"}) {
        const auto part = bytes.subspan(at, static_cast<std::size_t>(size));
        tensors[entry.name.substr(0, kind) + std::to_string(expert) + "." + name + ".weight"] = {{rows, entry.shape[2]},
                                                                                                 {part.begin(), part.end()}};
        at += part.size();
      }
  }
  write(temporary.path() / "model.safetensors", tensors);
  Parameters wanted(make_cpu_runtime(), config), found(make_cpu_runtime(), load_model_config(temporary.path()));
  load_parameters(wanted, source);
  load_parameters(found, temporary.path());
  ASSERT_EQ(wanted.named().size(), found.named().size());
  for (std::size_t i = 0; i < wanted.named().size(); ++i)
    EXPECT_EQ(std::memcmp(wanted.named()[i].value.data(), found.named()[i].value.data(), wanted.named()[i].value.num_bytes()), 0)
        << wanted.named()[i].name;
  SmallModel any("qwen3");
  const auto checksum_of = [&](const fs::path& folder, DType compute) {
    return checksum(*load_weights(any.ctx(), config, folder, compute, {}, nullptr)).combined;
  };
  for (const DType compute : {DType::kF32, DType::kBF16}) EXPECT_EQ(checksum_of(source, compute), checksum_of(temporary.path(), compute));
  const std::string lost = "model.layers.1.mlp.experts.4.up_proj.weight";
  tensors.erase(lost);
  write(temporary.path() / "model.safetensors", tensors);
  EXPECT_THAT(error_of([&] { load_parameters(found, temporary.path()); }), ::testing::HasSubstr("'" + lost + "'"));
}

/// Published files have tensors for multi-token prediction beside the model's.
TEST(StoredLayout, TensorsForMultiTokenPredictionAreLeftOut) {
  const fs::path source = golden_models() / "qwen3_next";
  const prl::testing::TempFolder temporary;
  fs::copy_file(source / "config.json", temporary.path() / "config.json");
  std::map<std::string, std::pair<std::vector<std::int64_t>, std::vector<std::byte>>> tensors;
  const io::SafetensorsFile file = io::SafetensorsFile::open(source / "model.safetensors");
  for (const io::SafetensorsEntry& entry : file.entries())
    tensors[entry.name] = {entry.shape, {file.bytes(entry).begin(), file.bytes(entry).end()}};
  Parameters parameters(make_cpu_runtime(), load_model_config(temporary.path()));
  for (const char* name : {"mtp.layers.0.mlp.gate.weight", "mtpx.fc.weight"}) {
    auto with = tensors;
    with[name] = {{2}, std::vector<std::byte>(4)};
    write(temporary.path() / "model.safetensors", with);
    const std::string said = error_of([&] { load_parameters(parameters, temporary.path()); });
    EXPECT_EQ(said == "no error", std::string(name).starts_with("mtp.")) << said;
  }
}

/// Any part of a matrix whose rows a file has in another order, and that order again when it is written.
TEST(StoredLayout, RowsInAnotherOrderAreReadFromAnywhere) {
  const ModelConfig config = SmallModel("qwen3_next").config;
  const LinearAttention& c = config.linear;
  ASSERT_EQ(c.num_value_heads, 2 * c.num_key_heads);
  ASSERT_GT(c.num_key_heads, 1);
  for (const Slot slot : {Slot::kLinearQkvz, Slot::kLinearBa}) {
    const std::vector<RowRun> runs = stored_rows(config, slot);
    const std::int64_t rows = slot == Slot::kLinearBa ? 2 * c.num_value_heads : c.num_channels() + c.value_width(), cols = 3;
    std::vector<float> memory(static_cast<std::size_t>(rows * cols));
    std::iota(memory.begin(), memory.end(), 0.0f);
    const WeightSource source = reordered_source(
        {.name = "w",
         .shape = {rows, cols},
         .read = [&](std::int64_t first, std::span<float> out) { std::copy_n(memory.begin() + first, out.size(), out.begin()); }},
        runs);
    const prl::testing::TempFolder temporary;
    write_weight_files(temporary.path(), std::span(&source, 1), {.dtype = DType::kF32});
    const io::SafetensorsFile file = io::SafetensorsFile::open(temporary.path() / "model.safetensors");
    const std::vector<float> stored = values_of(file, "w");
    EXPECT_NE(stored, memory);
    EXPECT_TRUE(std::ranges::is_permutation(stored, memory));
    std::vector<float> part(7);
    for (std::int64_t first = 0; first + 7 <= rows * cols; first += cols) {
      source.read(first, part);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), stored.begin() + first)) << first;
    }
    const StoredTensor tensor = StoredTensor::reordered({&file, &file.at("w")}, runs, cols);
    EXPECT_EQ(tensor.num_elements(), rows * cols);
    EXPECT_FALSE(tensor.is_plain());
    for (std::int64_t first = 0; first + 7 <= rows * cols; ++first) {
      tensor.read_f32(first, part);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), memory.begin() + first)) << first;
    }
    EXPECT_EQ(tensor.find_not_finite(0, rows * cols, DType::kF32), -1);
  }
  EXPECT_TRUE(stored_rows(config, Slot::kQ).empty());
}

/// The difference that an adapter makes in merged files is B A of its own files, row by row, and reading them gives what was written.
TEST(StoredLayout, AdaptersOfLinearAttentionHaveTheRowsOfFiles) {
  SmallModel model("qwen3_next", false);
  AdapterConfig config;
  config.rank = 4;
  config.alpha = 8.0;
  config.target_modules = {"in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert"};
  Parameters trained(model.ctx().runtime, model.config, make_adapter_table(model.config, config));
  init_adapter(trained, 3);
  Rng rng(4);
  for (NamedParameter& p : trained.named())
    for (std::int64_t i = 0; !is_lora_a(p.block) && i < p.num_elements(); ++i)
      p.value.as<float>()[i] = 0.1f * static_cast<float>(rng.next_normal());
  const WeightsPtr base = model.weights(DType::kF32),
                   adapted = adapt_weights(model.ctx(), trained, config, DType::kF32, base, PolicyVersion{1});
  const prl::testing::TempFolder temporary;
  save_merged(adapted, temporary.path() / "merged", DType::kF32);
  save_merged(base, temporary.path() / "base", DType::kF32);
  save_peft_adapter(*adapted, *trained.table(), temporary.path());
  const io::SafetensorsFile merged = io::SafetensorsFile::open(temporary.path() / "merged/model.safetensors"),
                            before = io::SafetensorsFile::open(temporary.path() / "base/model.safetensors"),
                            files = io::SafetensorsFile::open(temporary.path() / kPeftTensors);
  for (const char* module : {"linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj", "mlp.shared_expert.gate_proj",
                             "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"}) {
    const std::string name = std::string("model.layers.1.") + module;
    const std::vector<float> w = values_of(merged, name + ".weight"), v = values_of(before, name + ".weight"),
                             a = values_of(files, kPeftPrefix + name + ".lora_A.weight"),
                             b = values_of(files, kPeftPrefix + name + ".lora_B.weight");
    const std::size_t cols = a.size() / 4, rows = b.size() / 4;
    ASSERT_EQ(w.size(), rows * cols) << name;
    float worst = 0, largest = 0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      float product = 0;
      for (std::size_t r = 0; r < 4; ++r) product += b[i / cols * 4 + r] * a[r * cols + i % cols];
      worst = std::max(worst, std::abs(w[i] - v[i] - 2.0f * product));
      largest = std::max(largest, std::abs(product));
    }
    EXPECT_LT(worst, 1e-6f) << name;
    EXPECT_GT(largest, 1e-3f) << name;
  }
  auto again = std::make_shared<Weights>(*base);
  again->adapter = load_peft_adapter(model.ctx(), model.config, temporary.path(), DType::kF32);
  EXPECT_EQ(checksum(*again).combined, checksum(*adapted).combined);
  EXPECT_EQ(load_peft_config(temporary.path()).target_modules.front(), "in_proj_ba");
}

TEST(StoredLayout, WhatTakesNoAdapterIsRefusedByName) {
  for (const auto& [family, target] : {std::pair("qwen3_next", "shared_expert_gate"),
                                       {"qwen3_next", "in_proj_z"},
                                       {"qwen3_5_moe_text", "in_proj_qkvz"},
                                       {"qwen3_5_moe_text", "mlp.gate"}}) {
    const ModelConfig config = make_model_config(testing_support::small_options(family));
    AdapterConfig adapter;
    adapter.target_modules = {target};
    const std::string said = error_of([&] { make_adapter_table(config, adapter); });
    EXPECT_THAT(said, ::testing::HasSubstr(std::string("'") + target + "' matches no module of this model that takes an adapter"))
        << family;
    EXPECT_THAT(said, ::testing::HasSubstr(std::string(family) == "qwen3_next" ? "in_proj_qkvz, in_proj_ba" : "in_proj_qkv, in_proj_z"));
  }
}

}  // namespace
}  // namespace prl::nn
