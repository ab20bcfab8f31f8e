// Folders out and in: Parameters, Weights and their checksums.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/testing/temp_folder.hpp"
#include "io/safetensors.hpp"
#include "nn/test_support.hpp"

namespace prl::nn {
namespace {
namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing_support::golden_models;
using testing_support::SmallModel;

void expect_error(const std::function<void()>& body, ErrorCode code, const std::string& part) {
  try {
    body();
    ADD_FAILURE() << "no error; wanted " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

/// Values as `dtype` holds them.
std::vector<float> rounded(const Tensor& tensor, DType dtype) {
  std::vector<float> out(tensor.as<float>(), tensor.as<float>() + tensor.num_elements());
  for (float& v : out) {
    if (dtype == DType::kBF16) v = to_f32(to_bf16(v));
    if (dtype == DType::kF16) v = io::f16_to_f32(io::f32_to_f16(v));
  }
  return out;
}

class PretrainedTest : public ::testing::TestWithParam<std::string> {};

TEST_P(PretrainedTest, RoundTripsInEveryDtypeWholeAndSharded) {
  struct Case {
    bool tied;
    DType dtype;
    std::uint64_t shard_bytes;
  };
  for (const Case c : {Case{true, DType::kBF16, 1 << 30}, Case{true, DType::kF32, 30000}, Case{false, DType::kBF16, 30000},
                       Case{false, DType::kF16, 1 << 30}}) {
    SmallModel model(GetParam(), c.tied);
    const prl::testing::TempFolder temporary;
    const fs::path folder = temporary.path() / "saved";
    save_pretrained(*model.parameters, folder, c.dtype, {}, c.shard_bytes);
    EXPECT_EQ(fs::exists(folder / "model.safetensors.index.json"), c.shard_bytes == 30000);
    const ModelConfig config = load_model_config(folder);
    EXPECT_EQ(config.num_parameters(), model.config.num_parameters());
    EXPECT_EQ(config.torch_dtype, c.dtype == DType::kF32 ? "float32" : c.dtype == DType::kBF16 ? "bfloat16" : "float16");
    Parameters loaded(make_cpu_runtime(), config);
    load_parameters(loaded, folder);
    std::int64_t count = 0;
    for (std::size_t i = 0; i < loaded.named().size(); ++i) {
      const NamedParameter &a = model.parameters->named()[i], &b = loaded.named()[i];
      EXPECT_EQ(a.name, b.name);
      EXPECT_EQ(rounded(a.value, a.is_exact() ? DType::kF32 : c.dtype), rounded(b.value, DType::kF32)) << a.name;
      count += b.is_exact() ? 0 : b.value.num_elements();
    }
    EXPECT_EQ(count, config.num_parameters());
  }
}

TEST_P(PretrainedTest, PackedMastersEqualWeightsLoadedFromAFile) {
  for (const bool tied : {true, false}) {
    SmallModel model(GetParam(), tied);
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      const prl::testing::TempFolder temporary;
      save_pretrained(*model.parameters, temporary.path(), compute, {});
      const WeightsPtr made = model.weights(compute);
      const WeightsPtr loaded =
          load_weights(model.ctx(), load_model_config(temporary.path()), temporary.path(), compute, PolicyVersion{4}, made);
      EXPECT_EQ(loaded->version.value, 4);
      for (std::int64_t layer = 0; layer < model.config.num_layers; ++layer)
        EXPECT_EQ(loaded->rope_of(layer).cos_PR2.data(), made->rope_of(layer).cos_PR2.data()) << "rotary tables are shared";
      const WeightsChecksum a = checksum(*made), b = checksum(model.ctx(), *loaded);
      EXPECT_EQ(a.combined, b.combined);
      EXPECT_EQ(a.tensors, b.tensors);
      ASSERT_EQ(a.tensors.size(), model.parameters->named().size());
      for (std::size_t i = 0; i < a.tensors.size(); ++i) EXPECT_EQ(a.tensors[i].first, model.parameters->named()[i].name);

      InferenceModel inference(model.ctx());
      const std::vector<std::int32_t> prompt = probe_prompt(model.config.vocab_size);
      EXPECT_EQ(probe_logprobs(inference, model.ctx(), *made, prompt), probe_logprobs(inference, model.ctx(), *loaded, prompt));
      // The same without a file: one array that a trainer sends.
      const Tensor values = flat_values(model.ctx(), *model.parameters, compute);
      const WeightsPtr sent = load_flat_weights(model.ctx(), load_model_config(temporary.path()), values, PolicyVersion{5}, made);
      EXPECT_EQ(sent->version.value, 5);
      EXPECT_EQ(checksum(*sent).tensors, a.tensors);
      EXPECT_EQ(probe_logprobs(inference, model.ctx(), *sent, prompt), probe_logprobs(inference, model.ctx(), *made, prompt));
      EXPECT_THROW(load_flat_weights(model.ctx(), model.config, values.slice(1, values.num_elements() - 1), PolicyVersion{6}, made), Error);
      // One row of the embedding that no prompt of a probe may contain.
      const TensorSpec& embedding = model.parameters->table()->tensors()[0];
      const std::int64_t bad = embedding.offset + (embedding.shape[0] - 1) * embedding.shape[1] + 3;
      if (compute == DType::kF32)
        values.as<float>()[bad] = std::numeric_limits<float>::quiet_NaN();
      else
        values.as<BFloat16>()[bad] = to_bf16(std::numeric_limits<float>::infinity());
      expect_error([&] { load_flat_weights(model.ctx(), model.config, values, PolicyVersion{6}, made); }, ErrorCode::kCorrupt,
                   "'" + embedding.name + "'");
    }
    // fp32 file, bf16 compute: rounding while packing equals rounding while saving.
    const prl::testing::TempFolder temporary;
    save_pretrained(*model.parameters, temporary.path(), DType::kF32, {});
    EXPECT_EQ(checksum(*load_weights(model.ctx(), model.config, temporary.path(), DType::kBF16, {}, nullptr)).combined,
              checksum(*model.weights(DType::kBF16)).combined);
  }
}

TEST_P(PretrainedTest, ChecksumSeesEveryTensor) {
  SmallModel model(GetParam(), false);
  const WeightsChecksum before = checksum(*model.weights(DType::kBF16));
  EXPECT_EQ(checksum(*model.weights(DType::kBF16)).combined, before.combined);
  for (NamedParameter& parameter : model.parameters->named()) {
    float& value = parameter.value.as<float>()[parameter.value.num_elements() - 1];
    const float saved = value;
    value = saved + 0.25f;
    const WeightsChecksum after = checksum(*model.weights(DType::kBF16));
    EXPECT_NE(after.combined, before.combined) << parameter.name;
    for (std::size_t i = 0; i < after.tensors.size(); ++i)
      EXPECT_EQ(after.tensors[i].second != before.tensors[i].second, after.tensors[i].first == parameter.name) << parameter.name;
    value = saved;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, PretrainedTest,
                         ::testing::Values("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "mistral", "smollm3", "mixtral", "olmo2",
                                           "phi3", "qwen3_window", "olmo3_window", "qwen3_5_text", "gpt_oss", "gpt_oss_window",
                                           "qwen3_5_moe_text", "qwen3_next", "minimax_m2", "afmoe", "afmoe_window", "deepseek_v3",
                                           "glm4_moe_lite", "gemma3_text", "gemma3_text_window", "nemotron_h", "nemotron_h_narrow"),
                         [](const auto& test) { return test.param; });

class GoldenModelTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenModelTest, SavingKeepsEveryByteOfTensorsConfigAndTokenizer) {
  const prl::testing::TempFolder temporary;
  const fs::path source = golden_models() / GetParam();
  Parameters parameters(make_cpu_runtime(), load_model_config(source));
  load_parameters(parameters, source);
  fs::create_directories(temporary.path() / "tokenizer");
  std::ofstream(temporary.path() / "tokenizer" / "tokenizer.json") << "{}";
  std::ofstream(temporary.path() / "tokenizer" / "model.safetensors") << "not a companion";
  save_pretrained(parameters, temporary.path() / "out", DType::kBF16, {.folder = temporary.path() / "tokenizer", .chat_template = {}});
  EXPECT_EQ(read_file(temporary.path() / "out" / "tokenizer.json"), "{}");
  EXPECT_EQ(read_file(temporary.path() / "out" / "config.json"), read_file(source / "config.json")) << "nothing but the dtype may change";
  const io::SafetensorsFile saved = io::SafetensorsFile::open(temporary.path() / "out" / "model.safetensors");
  const io::SafetensorsFile original = io::SafetensorsFile::open(source / "model.safetensors");
  EXPECT_EQ(saved.metadata().at("format"), "pt");
  ASSERT_EQ(saved.entries().size(), original.entries().size());
  for (const io::SafetensorsEntry& entry : original.entries()) {
    EXPECT_EQ(saved.at(entry.name).shape, entry.shape) << entry.name;
    const auto a = original.bytes(entry), b = saved.bytes(saved.at(entry.name));
    EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size()), 0) << entry.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenModelTest,
                         ::testing::Values("qwen2_tied", "mixtral", "olmo2", "phi3", "qwen3_5", "gpt_oss", "qwen3_5_moe", "qwen3_next",
                                           "minimax_m2", "afmoe", "deepseek_v2", "deepseek_v3", "gemma3", "nemotron_h_experts"),
                         [](const auto& test) { return test.param; });

/// A golden model, how files of the whole hold it and what else they hold.
struct MultimodalCase {
  const char* golden;
  const char* model_type;
  const char* architecture;
  const char* prefix;  ///< in place of "model."
  std::vector<const char*> others;
};

// Published files of Qwen 3.5 and Gemma 3 have other names and hold a part for images.
class MultimodalTest : public ::testing::TestWithParam<MultimodalCase> {};

TEST_P(MultimodalTest, ThePartForTextIsReadFromFilesOfAModelForImages) {
  const prl::testing::TempFolder temporary;
  const MultimodalCase& c = GetParam();
  const fs::path source = golden_models() / c.golden;
  const io::SafetensorsFile file = io::SafetensorsFile::open(source / "model.safetensors");
  const auto write = [&](const std::string& other) {
    std::vector<io::SafetensorsWriter::Spec> specs;
    for (const io::SafetensorsEntry& entry : file.entries())
      specs.push_back({entry.name.starts_with("model.") ? c.prefix + entry.name.substr(6) : entry.name, entry.type, entry.shape});
    specs.push_back({other, io::StoredType::kBF16, {2}});
    io::SafetensorsWriter writer(temporary.path() / "model.safetensors", specs, {{"format", "pt"}});
    for (const io::SafetensorsEntry& entry : file.entries()) writer.append(file.bytes(entry));
    writer.append(std::vector<std::byte>(4));
    writer.finish();
  };
  std::ofstream(temporary.path() / "config.json")
      << R"({"model_type": ")" << c.model_type << R"(", "architectures": [")" << c.architecture
      << R"("], "vision_config": {}, "text_config": )" << read_file(source / "config.json") << "}";
  Parameters wanted(make_cpu_runtime(), load_model_config(source)), found(make_cpu_runtime(), load_model_config(temporary.path()));
  load_parameters(wanted, source);
  for (const char* other : c.others) {
    write(other);
    load_parameters(found, temporary.path());
    for (std::size_t i = 0; i < wanted.named().size(); ++i)
      EXPECT_EQ(std::memcmp(wanted.named()[i].value.data(), found.named()[i].value.data(), wanted.named()[i].value.num_bytes()), 0)
          << wanted.named()[i].name;
  }
  write(std::string(c.prefix) + "layers.9.extra");
  expect_error([&] { load_parameters(found, temporary.path()); }, ErrorCode::kCorrupt, "layers.9.extra");
}

INSTANTIATE_TEST_SUITE_P(
    Models, MultimodalTest,
    ::testing::Values(MultimodalCase{"qwen3_5",
                                     "qwen3_5",
                                     "Qwen3_5ForConditionalGeneration",
                                     "model.language_model.",
                                     {"model.visual.blocks.0.attn.qkv.bias", "mtp.fc.weight"}},
                      MultimodalCase{"qwen3_5_moe",
                                     "qwen3_5_moe",
                                     "Qwen3_5MoeForConditionalGeneration",
                                     "model.language_model.",
                                     {"model.visual.blocks.0.attn.qkv.bias", "mtp.fc.weight"}},
                      // As it is published and as transformers writes it, and by the names of its modules in transformers.
                      MultimodalCase{"gemma3",
                                     "gemma3",
                                     "Gemma3ForConditionalGeneration",
                                     "language_model.model.",
                                     {"vision_tower.vision_model.post_layernorm.bias", "multi_modal_projector.mm_soft_emb_norm.weight"}},
                      MultimodalCase{
                          "gemma3",
                          "gemma3",
                          "Gemma3ForConditionalGeneration",
                          "model.language_model.",
                          {"model.vision_tower.vision_model.post_layernorm.bias", "model.multi_modal_projector.mm_soft_emb_norm.weight"}}),
    [](const auto& test) { return fmt::format("{}_{}", test.param.golden, test.index); });

/// Of experts in MXFP4 the numbers that transformers makes of blocks and scales, in fp32 masters and in bfloat16, and saved as such.
TEST(Pretrained, ExpertsInMxfp4AreReadAsWhatTheyStandFor) {
  const fs::path source = golden_models() / "gpt_oss_mxfp4";
  const io::SafetensorsFile expected = io::SafetensorsFile::open(source / "expected.safetensors");
  const ModelConfig config = load_model_config(source);
  const prl::testing::TempFolder temporary;
  Parameters parameters(make_cpu_runtime(), config);
  load_parameters(parameters, source);
  save_pretrained(parameters, temporary.path() / "saved", DType::kBF16, {});
  const io::SafetensorsFile saved = io::SafetensorsFile::open(temporary.path() / "saved" / "model.safetensors");
  int compared = 0;
  for (const io::SafetensorsEntry& entry : expected.entries()) {
    if (!entry.name.starts_with("dequantised.")) continue;
    const io::SafetensorsEntry& written = saved.at(entry.name.substr(12));
    EXPECT_EQ(written.shape, entry.shape) << entry.name;
    const auto a = expected.bytes(entry), b = saved.bytes(written);
    EXPECT_TRUE(std::ranges::equal(a, b)) << entry.name;
    ++compared;
  }
  EXPECT_EQ(compared, 2);
  EXPECT_EQ(saved.find("model.layers.0.mlp.experts.down_proj_blocks"), nullptr);
  SmallModel any("qwen3");
  const auto checksum_of = [&](const fs::path& folder) {
    return checksum(*load_weights(any.ctx(), load_model_config(folder), folder, DType::kBF16, {}, nullptr)).combined;
  };
  EXPECT_EQ(checksum_of(source), checksum_of(temporary.path() / "saved"));
}

/// 255 is the scale that is no number, and blocks without scales are no tensor.
TEST(Pretrained, BadMxfp4IsRefusedByName) {
  const fs::path source = golden_models() / "gpt_oss_mxfp4";
  const io::SafetensorsFile original = io::SafetensorsFile::open(source / "model.safetensors");
  const auto write = [&](const fs::path& folder, const std::string& without, bool is_spoilt) {
    fs::create_directories(folder);
    fs::copy_file(source / "config.json", folder / "config.json");
    std::vector<io::SafetensorsWriter::Spec> specs;
    for (const io::SafetensorsEntry& entry : original.entries())
      if (entry.name != without) specs.push_back({entry.name, entry.type, entry.shape});
    io::SafetensorsWriter writer(folder / "model.safetensors", specs, {});
    for (const io::SafetensorsWriter::Spec& spec : specs) {
      const auto bytes = original.bytes(original.at(spec.name));
      std::vector<std::byte> copy(bytes.begin(), bytes.end());
      if (is_spoilt && spec.name.ends_with("gate_up_proj_scales")) copy.back() = std::byte{255};
      writer.append(copy);
    }
    writer.finish();
  };
  const prl::testing::TempFolder temporary;
  Parameters parameters(make_cpu_runtime(), load_model_config(source));
  SmallModel any("qwen3");
  for (const auto& [name, without, is_spoilt, said] :
       {std::tuple("no_scales", "model.layers.0.mlp.experts.down_proj_scales", false, "down_proj_scales' of the gpt_oss model is missing"),
        std::tuple("no_number", "", true, "gate_up_proj_blocks' holds nan")}) {
    write(temporary.path() / name, without, is_spoilt);
    expect_error([&] { load_parameters(parameters, temporary.path() / name); }, ErrorCode::kCorrupt, said);
    expect_error([&] { load_weights(any.ctx(), parameters.config(), temporary.path() / name, DType::kBF16, {}, nullptr); },
                 ErrorCode::kCorrupt, said);
  }
}

TEST(Pretrained, AChatTemplateReplacesTheFoldersOwnWhereverReadersLookForIt) {
  SmallModel model("llama");
  const prl::testing::TempFolder temporary;
  const fs::path source = temporary.path() / "source", saved = temporary.path() / "out";
  fs::create_directories(source / "additional_chat_templates");
  std::ofstream(source / "tokenizer_config.json") << R"({"eos_token": "<e>", "chat_template": "old", "model_max_length": 1e30})";
  std::ofstream(source / "chat_template.jinja") << "older";
  std::ofstream(source / "chat_template.json") << "{}";
  std::ofstream(source / "additional_chat_templates" / "tool_use.jinja") << "old tools";
  save_pretrained(*model.parameters, saved, DType::kBF16, {.folder = source, .chat_template = {}});
  EXPECT_EQ(read_file(saved / "chat_template.jinja"), "older");
  EXPECT_EQ(read_file(saved / "additional_chat_templates" / "tool_use.jinja"), "old tools") << "tools have a template of their own";

  fs::remove_all(saved);
  save_pretrained(*model.parameters, saved, DType::kBF16, {.folder = source, .chat_template = "{{ \"new\" }}\n"});
  EXPECT_EQ(read_file(saved / "chat_template.jinja"), "{{ \"new\" }}\n");
  const std::string config = read_file(saved / "tokenizer_config.json");
  EXPECT_THAT(config, HasSubstr(R"("chat_template": "{{ \"new\" }}\n")"));
  EXPECT_THAT(config, HasSubstr(R"("eos_token": "<e>")"));
  EXPECT_FALSE(fs::exists(saved / "chat_template.json"));
  EXPECT_FALSE(fs::exists(saved / "additional_chat_templates" / "tool_use.jinja")) << "the new template is for all conversations";
  EXPECT_THAT(read_file(source / "tokenizer_config.json"), HasSubstr("old")) << "the source stays as it is";
}

TEST(Pretrained, AFolderIsWrittenWholeOrNotAtAll) {
  SmallModel model("llama");
  const prl::testing::TempFolder temporary;
  const fs::path folder = temporary.path() / "out";
  expect_error(
      [&] { save_pretrained(*model.parameters, folder, DType::kBF16, {.folder = temporary.path() / "nowhere", .chat_template = {}}); },
      ErrorCode::kNotFound, "nowhere");
  EXPECT_FALSE(fs::exists(folder));
  save_pretrained(*model.parameters, folder, DType::kBF16, {});
  expect_error([&] { save_pretrained(*model.parameters, folder, DType::kBF16, {}); }, ErrorCode::kAlreadyExists, "out");
  expect_error([&] { save_pretrained(*model.parameters, "/proc/nothing/out", DType::kBF16, {}); }, ErrorCode::kIo, "/proc/nothing");
  for (const auto& entry : fs::directory_iterator(temporary.path())) EXPECT_EQ(entry.path(), folder);
}

TEST(Pretrained, DamagedFoldersAreRefusedByName) {
  SmallModel model("llama", true);
  const prl::testing::TempFolder temporary;
  const fs::path folder = temporary.path() / "m";
  const auto load = [&] { load_parameters(*model.parameters, folder); };
  const auto load_packed = [&] { load_weights(model.ctx(), model.config, folder, DType::kBF16, {}, nullptr); };
  expect_error(load, ErrorCode::kNotFound, "neither model.safetensors");
  const auto write = [&](const std::function<void(std::vector<io::SafetensorsWriter::Spec>&)>& change) {
    std::vector<io::SafetensorsWriter::Spec> specs;
    for (const TensorSpec& weight : model.parameters->table()->tensors()) {
      std::vector<std::int64_t> shape;
      for (int d = 0; d < weight.shape.num_dims(); ++d) shape.push_back(weight.shape[d]);
      specs.push_back({weight.name, io::StoredType::kBF16, shape});
    }
    change(specs);
    fs::remove_all(folder);
    fs::create_directories(folder);
    std::size_t size = 0;
    for (const auto& spec : specs) {
      std::size_t n = size_of(spec.type);
      for (const auto extent : spec.shape) n *= static_cast<std::size_t>(extent);
      size += n;
    }
    io::SafetensorsWriter writer(folder / "model.safetensors", specs, {});
    writer.append(std::vector<std::byte>(size));
    writer.finish();
  };
  using Specs = std::vector<io::SafetensorsWriter::Spec>;
  write([](Specs&) {});
  EXPECT_NO_THROW(load());
  write([](Specs& s) { s.push_back({"lm_head.weight", io::StoredType::kBF16, {97, 64}}); });
  EXPECT_NO_THROW(load()) << "the copy of a tied head";
  write([](Specs& s) { s.push_back({"lm_head.weight", io::StoredType::kF32, {97, 64}}); });
  EXPECT_NO_THROW(load()) << "a copy in another type";
  write([](Specs& s) { s.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", io::StoredType::kF32, {16}}); });
  EXPECT_NO_THROW(load());
  for (const auto& body : {std::function<void()>(load), std::function<void()>(load_packed)}) {
    write([](Specs& s) { s.erase(s.begin() + 3); });
    expect_error(body, ErrorCode::kCorrupt, "'model.layers.0.self_attn.k_proj.weight' of the llama model is missing");
    write([](Specs& s) { s[3].shape = {32, 64}; });
    expect_error(body, ErrorCode::kCorrupt, "k_proj.weight' has shape [32, 64], config.json wants [64, 64]");
    write([](Specs& s) { s[3].type = io::StoredType::kI32; });
    expect_error(body, ErrorCode::kCorrupt, "stored as I32");
    write([](Specs& s) { s.push_back({"model.layers.3.mlp.up_proj.weight", io::StoredType::kBF16, {80, 64}}); });
    expect_error(body, ErrorCode::kCorrupt, "model.layers.3.mlp.up_proj.weight' is no part");
  }
}

TEST(Pretrained, ATiedHeadThatDiffersFromTheEmbeddingIsRefused) {
  SmallModel untied("llama", false);
  const prl::testing::TempFolder temporary;
  save_pretrained(*untied.parameters, temporary.path() / "m", DType::kBF16, {});
  ModelConfig config = load_model_config(temporary.path() / "m");
  EXPECT_FALSE(config.tie_word_embeddings);
  config.tie_word_embeddings = true;
  Parameters tied(make_cpu_runtime(), config);
  expect_error([&] { load_parameters(tied, temporary.path() / "m"); }, ErrorCode::kCorrupt, "tie_word_embeddings");
  expect_error([&] { load_weights(untied.ctx(), config, temporary.path() / "m", DType::kBF16, {}, nullptr); }, ErrorCode::kCorrupt,
               "'lm_head.weight' differs from 'model.embed_tokens.weight'");
}

TEST(Parameters, NamedTensorsArePartsOfBlocks) {
  for (const char* family : {"llama", "qwen2", "qwen3"}) {
    SmallModel model(family, false);
    Parameters& parameters = *model.parameters;
    parameters.zero_grads();
    for (const NamedParameter& p : parameters.named()) {
      EXPECT_EQ(p.value.shape(), p.shape);
      EXPECT_EQ(p.grad.shape(), p.shape);
      EXPECT_EQ(p.value.as<float>() - parameters.all_values().as<float>(), p.offset);
      EXPECT_EQ(p.grad.as<float>() - parameters.all_grads().as<float>(), p.offset);
    }
    EXPECT_EQ(parameters.at("model.norm.weight").value.data(), parameters.value(Block::kFinalNorm).data());
    EXPECT_THROW(parameters.at("nothing"), Error);
    auto* fused = parameters.grad(Block::kQkv, 1).as<float>();
    fused[model.config.num_heads * model.config.head_dim * model.config.hidden_size] = 3.0f;
    EXPECT_EQ(parameters.at("model.layers.1.self_attn.k_proj.weight").grad.as<float>()[0], 3.0f);
    parameters.zero_grads();
    EXPECT_EQ(fused[model.config.num_heads * model.config.head_dim * model.config.hidden_size], 0.0f);
  }
}

TEST(Parameters, FrozenTensorsHaveNoMaster) {
  SmallModel model("qwen2", true);
  std::vector<TensorSpec> specs(model.parameters->table()->tensors().begin(), model.parameters->table()->tensors().end());
  for (TensorSpec& spec : specs) spec.trainable = spec.layer == 1;
  Parameters some(make_cpu_runtime(), model.config, std::make_shared<const TensorTable>(specs));
  some.zero_grads();
  EXPECT_EQ(some.named().size(), 12u) << "those of one layer";
  EXPECT_FALSE(some.value(Block::kEmbedding).defined());
  EXPECT_FALSE(some.grad(Block::kQkv, 0).defined());
  EXPECT_TRUE(some.grad(Block::kQkv, 1).defined());
  const prl::testing::TempFolder temporary;
  save_pretrained(*model.parameters, temporary.path() / "m", DType::kF32, {});
  load_parameters(some, temporary.path() / "m");
  for (const NamedParameter& p : some.named()) {
    const NamedParameter& whole = model.parameters->at(p.name);
    EXPECT_TRUE(std::equal(p.value.as<float>(), p.value.as<float>() + p.num_elements(), whole.value.as<float>())) << p.name;
  }
}

TEST(InitModel, IsAFunctionOfItsSeed) {
  const prl::testing::TempFolder temporary;
  InitModelOptions options;
  options.num_layers = 1;
  options.seed = 3;
  init_model(options, temporary.path() / "a");
  init_model(options, temporary.path() / "b");
  options.seed = 4;
  init_model(options, temporary.path() / "c");
  const auto bytes = [&](const char* name) { return read_file(temporary.path() / name / "model.safetensors"); };
  EXPECT_EQ(bytes("a"), bytes("b"));
  EXPECT_NE(bytes("a"), bytes("c"));
  expect_error([&] { init_model(options, temporary.path() / "c"); }, ErrorCode::kAlreadyExists, "c exists");

  Parameters parameters(make_cpu_runtime(), load_model_config(temporary.path() / "a"));
  load_parameters(parameters, temporary.path() / "a");
  double sum = 0, squares = 0;
  const Tensor& embedding = parameters.value(Block::kEmbedding);
  for (std::int64_t i = 0; i < embedding.num_elements(); ++i) {
    const auto v = static_cast<double>(embedding.as<float>()[i]);
    sum += v;
    squares += v * v;
  }
  const auto n = static_cast<double>(embedding.num_elements());
  EXPECT_NEAR(sum / n, 0.0, 3e-4);
  EXPECT_NEAR(std::sqrt(squares / n), 0.02, 5e-4);
  EXPECT_EQ(parameters.value(Block::kFinalNorm).as<float>()[5], 1.0f);
}

}  // namespace
}  // namespace prl::nn
