#include "trainer/sft/sft_trainer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <cmath>
#include <fstream>
#include <set>

#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "text/tokenizer_builder.hpp"
#include "trainer/metrics.hpp"
#include "trainer/sft/mixture.hpp"
#include "trainer/test_support.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

/// A model whose vocabulary is the byte tokenizer's.
SftText make_text_model(const fs::path& folder, std::string chat_template = {}) {
  nn::InitModelOptions options = tiny_model();
  options.vocab_size = 272;
  options.max_position = 512;
  options.tie_word_embeddings = true;
  nn::init_model(options, folder);
  text::ByteTokenizerOptions tokenizer_options;
  tokenizer_options.chat_template = std::move(chat_template);
  text::write_byte_level_tokenizer(folder, tokenizer_options);
  SftText text;
  text.tokenizer = std::make_shared<const text::Tokenizer>(text::Tokenizer::load(folder));
  text.chat_template = std::make_shared<const text::ChatTemplate>(text::ChatTemplate::load(folder, *text.tokenizer));
  return text;
}

void write_lines(const fs::path& path, const std::vector<std::string>& lines) {
  fs::create_directories(path.parent_path());
  std::ofstream out(path);
  for (const std::string& line : lines) out << line << "\n";
}

/// No test asks the hub.
io::HubSettings offline() {
  io::HubSettings hub;
  hub.is_offline = true;
  return hub;
}

struct Recorder {
  monitor::Monitor monitor{sft_metrics()};
  std::vector<monitor::Metrics> steps;
  Recorder() {
    monitor.add_sink(monitor::make_callback_sink([this](std::int64_t, const monitor::Metrics& m) { steps.push_back(m); }));
  }
};

SftRunOptions fake_options(const fs::path& root, std::int64_t max_steps) {
  SftRunOptions options;
  config::AdamWConfig adamw;
  adamw.lr = 1e-3;
  options.step.optim = adamw;
  options.step.max_steps = max_steps;
  config::FakeDataConfig data;
  data.batch_size = 4, data.seq_len = 24, data.micro_batch_size = 2, data.length = config::FakeLength::kVariable,
  data.input_ids = config::FakeInputIds::kRandom;
  options.data = data;
  options.checkpoint.emplace();
  options.checkpoint->checkpoints = root / "checkpoints";
  options.checkpoint->weights = root / "weights";
  return options;
}

TEST(SftTrainer, ResumeEqualsUninterruptedBitForBit) {
  Scratch scratch("sft-resume");
  const auto whole = make_tiny_policy(scratch.path / "model"), second = make_tiny_policy(scratch.path / "model");
  Recorder one, two, three;
  run_sft(fake_options(scratch.path / "a", 10), *whole, one.monitor, {});
  {
    const auto first = make_tiny_policy(scratch.path / "model");
    run_sft(fake_options(scratch.path / "b", 5), *first, two.monitor, {});
  }
  SftRunOptions options = fake_options(scratch.path / "b", 10);
  options.resume.emplace();
  run_sft(options, *second, three.monitor, {});
  EXPECT_EQ(masters(*whole), masters(*second));
  ASSERT_EQ(three.steps.size(), 5u);
  for (std::size_t i = 0; i < 5; ++i)
    for (const char* name : {"loss/mean", "progress/num_tokens", "progress/num_samples", "progress/epoch"})
      EXPECT_EQ(one.steps[5 + i].at(name), three.steps[i].at(name)) << name;
}

/// Samples of up to 512 tokens, stacked in buckets of 256, 512 and 1,024.
SftRunOptions stacked_options(const fs::path& root, std::int64_t max_steps) {
  SftRunOptions options = fake_options(root, max_steps);
  config::FakeDataConfig data = std::get<config::FakeDataConfig>(options.data);
  data.seq_len = 512, data.micro_batch_size = 2, data.pack_function = config::PackFunction::kStack;
  data.seed = 1;  // with which samples wait after two steps
  options.data = data;
  return options;
}

void make_long_model(const fs::path& folder) {
  nn::InitModelOptions options = tiny_model();
  options.max_position = 512;
  nn::init_model(options, folder);
}

TEST(SftTrainer, AResumeOfStackedSamplesEqualsUninterruptedBitForBit) {
  Scratch scratch("sft-stack-resume");
  make_long_model(scratch.path / "model");
  const auto whole = make_tiny_policy(scratch.path / "model"), second = make_tiny_policy(scratch.path / "model");
  Recorder one, two, three;
  run_sft(stacked_options(scratch.path / "a", 5), *whole, one.monitor, {});
  {
    const auto first = make_tiny_policy(scratch.path / "model");
    run_sft(stacked_options(scratch.path / "b", 2), *first, two.monitor, {});
  }
  const std::string saved = read_file(scratch.path / "b/checkpoints/step_2/trainer/progress.json");
  EXPECT_THAT(saved, HasSubstr("data_pending")) << "samples wait at the checkpoint, or the test shows nothing";
  SftRunOptions options = stacked_options(scratch.path / "b", 5);
  options.resume.emplace();
  run_sft(options, *second, three.monitor, {});
  EXPECT_EQ(masters(*whole), masters(*second));
  ASSERT_EQ(three.steps.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(one.steps[2 + i].at("progress/num_tokens"), 2048.0 * static_cast<double>(3 + i)) << "rows are full";
    for (const char* name : {"loss/mean", "progress/num_tokens", "progress/num_samples", "progress/epoch"})
      EXPECT_EQ(one.steps[2 + i].at(name), three.steps[i].at(name)) << name;
  }
}

TEST(SftTrainer, StackedSamplesHaveTheLossAndTheGradientOfJoinedOnes) {
  Scratch scratch("sft-stack-loss");
  make_long_model(scratch.path / "model");
  config::FakeDataConfig data = std::get<config::FakeDataConfig>(stacked_options(scratch.path, 1).data);
  std::vector<GradientStepResult> results;
  std::vector<std::vector<std::vector<float>>> after;
  for (const auto function : {config::PackFunction::kCat, config::PackFunction::kStack}) {
    const auto policy = make_tiny_policy(scratch.path / "model");
    const auto stream = make_fake_stream(data, policy->config().vocab_size);
    const auto packer = make_packer(function, *stream, 1024);
    std::vector<wire::MicroBatch> rows;
    while (auto row = packer->next_until(12)) rows.push_back(std::move(*row));
    GradientStepOptions options;
    options.optim = config::SgdConfig{.lr = 0.1};
    results.push_back(GradientStep(*policy, options).run(rows, PolicyVersion{1}));
    after.push_back(masters(*policy));
  }
  EXPECT_GT(results[1].num_tokens, results[0].num_tokens) << "rows are filled up";
  EXPECT_NEAR(results[0].loss, results[1].loss, 1e-9);
  EXPECT_NEAR(results[0].grad_norm.value_or(0), results[1].grad_norm.value_or(0), 1e-6);
  for (std::size_t tensor = 0; tensor < after[0].size(); ++tensor)
    for (std::size_t i = 0; i < after[0][tensor].size(); ++i) ASSERT_NEAR(after[0][tensor][i], after[1][tensor][i], 1e-6) << tensor;
}

TEST(SftTrainer, AValidationOfStackedSamplesIsThatOfJoinedOnes) {
  Scratch scratch("sft-stack-val");
  write_lines(scratch.path / "val.jsonl", [] {
    std::vector<std::string> lines;
    for (int i = 0; i < 9; ++i)
      lines.push_back(fmt::format(R"({{"prompt": "say {}", "completion": "{}"}})", i, std::string(10 + 37 * i, 'a')));
    return lines;
  }());
  const SftText text = make_text_model(scratch.path / "model");
  const auto policy = make_tiny_policy(scratch.path / "model");
  config::SftDataConfig data;
  data.name = (scratch.path / "val.jsonl").string();
  const auto stream = make_data_stream(data, text, offline());
  const double joined = validation_loss(*policy, *stream, 512),
               stacked = validation_loss(*policy, *stream, 512, config::PackFunction::kStack);
  EXPECT_NEAR(joined, stacked, 1e-12);
}

TEST(SftTrainer, StepsThatAreEvaluatedArePublishedAsTheyAreSaved) {
  Scratch scratch("sft-evaluated");
  SftRunOptions options = fake_options(scratch.path, 7);
  options.checkpoint->interval = 1;
  options.evaluated.emplace();
  options.evaluated->intervals = {3, 4};
  const fs::path folder = scratch.path / "broadcasts";
  options.evaluated->channel = weights::make_file_channel({.folder = folder, .keep_versions = 100, .keep_interval = {}});
  {
    const auto policy = make_tiny_policy(scratch.path / "model");
    Recorder recorder;
    run_sft(options, *policy, recorder.monitor, {});
    for (std::size_t i = 0; i < 7; ++i) EXPECT_EQ(recorder.steps.at(i).contains("time/broadcast_weights"), i != 0 && i != 1 && i != 4) << i;
  }
  for (int step = 1; step <= 7; ++step) {
    const std::string name = fmt::format("step_{}", step);
    EXPECT_EQ(fs::exists(folder / name / "STABLE"), step == 3 || step == 4 || step == 6 || step == 7) << name;
    if (fs::exists(folder / name)) {
      EXPECT_EQ(read_file(folder / name / "model.safetensors"), read_file(scratch.path / "weights" / name / "model.safetensors")) << name;
    }
  }
  // A run that goes on publishes where it starts only if it is asked to.
  fs::remove_all(folder / "step_6");
  options.resume.emplace();
  options.resume->step = 6;
  for (const bool publishes : {false, true}) {
    options.evaluated->publishes_start = publishes;
    const auto policy = make_tiny_policy(scratch.path / "model");
    Recorder recorder;
    run_sft(options, *policy, recorder.monitor, {});
    EXPECT_EQ(fs::exists(folder / "step_6/STABLE"), publishes);
  }
}

// Loss and gradient are the mean over all targets of the step, however rows are cut.
TEST(SftTrainer, MicroBatchSizeChangesNothing) {
  Scratch scratch("sft-micro");
  std::vector<monitor::Metrics> first_steps;
  for (const int micro_batch_size : {1, 4}) {
    const auto policy = make_tiny_policy(scratch.path / "model");
    Recorder recorder;
    SftRunOptions options = fake_options(scratch.path, 1);
    options.checkpoint.reset();
    config::FakeDataConfig data = std::get<config::FakeDataConfig>(options.data);
    data.length = config::FakeLength::kFixed, data.micro_batch_size = micro_batch_size;
    options.data = data;
    run_sft(options, *policy, recorder.monitor, {});
    first_steps.push_back(recorder.steps.at(0));
  }
  EXPECT_NEAR(first_steps[0].at("loss/mean"), first_steps[1].at("loss/mean"), 1e-9);
  EXPECT_NEAR(first_steps[0].at("optim/grad_norm"), first_steps[1].at("optim/grad_norm"), 1e-5);
  EXPECT_EQ(first_steps[0].at("progress/num_tokens"), 96);
  EXPECT_NEAR(first_steps[0].at("loss/perplexity"), std::exp(first_steps[0].at("loss/mean")), 1e-6);
}

TEST(SftTrainer, LearnsFromConversationsAndValidates) {
  Scratch scratch("sft-learn");
  const SftText text = make_text_model(scratch.path / "model");
  std::vector<std::string> lines;
  for (int i = 0; i < 20; ++i) lines.push_back(fmt::format(R"({{"prompt": "say {}", "completion": "abcabc"}})", i));
  write_lines(scratch.path / "train.jsonl", lines);
  const auto policy = make_tiny_policy(scratch.path / "model");
  Recorder recorder;
  SftRunOptions options;
  config::AdamWConfig adamw;
  adamw.lr = 1e-2;
  options.step.optim = adamw;
  options.step.max_steps = 12;
  config::SftDataConfig data;
  data.name = (scratch.path / "train.jsonl").string();
  data.batch_size = 2, data.seq_len = 128;
  options.data = data;
  options.val.emplace();
  options.val->interval = 4, options.val->eval_on_start = true, options.val->data = data;
  options.text = text;
  const TrainRunResult result = run_sft(options, *policy, recorder.monitor, {});
  EXPECT_EQ(result.last_step, 12);
  ASSERT_EQ(recorder.steps.size(), 12u);
  EXPECT_TRUE(recorder.steps[0].contains("val/loss"));
  EXPECT_FALSE(recorder.steps[1].contains("val/loss"));
  EXPECT_TRUE(recorder.steps[3].contains("val/loss"));
  EXPECT_LT(recorder.steps[11].at("val/loss"), 0.6 * recorder.steps[0].at("val/loss"));
  EXPECT_LT(result.last_loss.value_or(1e9), 0.6 * recorder.steps[0].at("loss/mean"));
  EXPECT_EQ(recorder.steps[0].at("optim/lr"), 1e-2) << "the rate that was used";
}

TEST(SftTrainer, ValidatesAtStepsOfItsIntervalAndOnTheStartOnlyIfAsked) {
  Scratch scratch("sft-val");
  for (const bool on_start : {false, true}) {
    const auto policy = make_tiny_policy(scratch.path / "model");
    Recorder recorder;
    SftRunOptions options = fake_options(scratch.path, 3);
    options.checkpoint.reset();
    options.val.emplace();
    options.val->interval = 1, options.val->eval_on_start = on_start, options.val->data = options.data;
    run_sft(options, *policy, recorder.monitor, {});
    ASSERT_EQ(recorder.steps.size(), 3u);
    EXPECT_EQ(recorder.steps[0].contains("val/loss"), on_start);
    EXPECT_TRUE(recorder.steps[1].contains("val/loss"));
    EXPECT_TRUE(recorder.steps[2].contains("val/loss"));
  }
}

// A row that is left out is as if it had never been in the batch: its tokens do not thin out the others' gradients.
TEST(GradientStep, RowsThatAreNotFiniteDoNotCount) {
  Scratch scratch("sft-nan");
  constexpr std::int32_t kBadId = 95;
  const auto row = [](std::int32_t first_id, bool is_bad) {
    wire::MicroBatch b;
    for (std::int32_t i = 0; i < 12; ++i) {
      b.input_ids.push_back(is_bad && i == 4 ? kBadId : first_id + i);
      b.position_ids.push_back(i);
      b.ce_weights.push_back(i > 0 ? 1.0f : 0.0f);
    }
    b.loss_mask.resize(12, 0);
    b.advantages.resize(12, 0.0f);
    b.inference_logprobs.resize(12, 0.0f);
    b.temperatures.resize(12, 1.0f);
    b.sequence_lengths = {12};
    b.env_names = {"sft"};
    return b;
  };
  std::vector<std::vector<std::vector<float>>> after;
  std::vector<GradientStepResult> results;
  for (const bool with_bad : {true, false}) {
    const auto policy = make_tiny_policy(scratch.path / "model");
    nn::NamedParameter& embedding = policy->parameters().at("model.embed_tokens.weight");
    embedding.value.as<float>()[kBadId * embedding.value.shape()[1]] = std::numeric_limits<float>::quiet_NaN();
    policy->refresh(PolicyVersion{0});
    GradientStepOptions options;
    options.skip_non_finite_rows = true;
    options.optim = config::SgdConfig{.lr = 0.1};
    GradientStep step(*policy, options);
    std::vector<wire::MicroBatch> rows{row(1, false), row(40, false)};
    if (with_bad) rows.insert(rows.begin() + 1, {row(20, true), row(60, true)});
    results.push_back(step.run(rows, PolicyVersion{1}));
    embedding.value.as<float>()[kBadId * embedding.value.shape()[1]] = 0;
    after.push_back(masters(*policy));
  }
  EXPECT_EQ(results[0].num_non_finite_rows, 2);
  EXPECT_EQ(results[0].loss, results[1].loss);
  EXPECT_EQ(results[0].flops, results[1].flops);
  EXPECT_TRUE(after[0] == after[1]) << "the weights differ from those of a step without the bad rows";
}

TEST(DataStream, MasksFollowRoles) {
  Scratch scratch("sft-mask");
  const SftText text = make_text_model(scratch.path / "model");
  write_lines(
      scratch.path / "d.jsonl",
      {R"({"messages": [{"role": "system", "content": "SYS"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANS"}]})"});
  const auto trained = [&](config::LossMaskConfig roles) {
    config::SftDataConfig data;
    data.name = (scratch.path / "d.jsonl").string();
    data.loss_mask = roles;
    const auto sample = make_data_stream(data, text, offline())->at(0, 1000);
    std::vector<std::int32_t> ids;
    for (std::size_t i = 0; sample && i < sample->ids.size(); ++i)
      if (sample->mask[i] != 0) ids.push_back(sample->ids[i]);
    return text.tokenizer->decode(ids, false);
  };
  EXPECT_EQ(trained({}), "ANS<|im_end|>\n");
  config::LossMaskConfig all;
  all.system = all.user = true;
  const std::string everything = trained(all);
  EXPECT_THAT(everything, ::testing::AllOf(HasSubstr("SYS"), HasSubstr("Q"), HasSubstr("ANS")));
  config::LossMaskConfig none;
  none.assistant = false;
  EXPECT_EQ(trained(none), "") << "a row without targets is skipped";
}

// A family's renderer marks exactly what the model itself would emit; other roles give their content only.
TEST(DataStream, RendererMarksWhatTheModelEmits) {
  Scratch scratch("sft-renderer");
  SftText text = make_text_model(scratch.path / "model");
  text::RendererOptions renderer;
  renderer.name = "chatml";
  text.renderer = text::make_renderer(renderer, text.tokenizer, text.chat_template);
  write_lines(
      scratch.path / "d.jsonl",
      {R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANS"}, {"role": "user", "content": "R"}, {"role": "assistant", "content": "X"}]})"});
  config::SftDataConfig data;
  data.name = (scratch.path / "d.jsonl").string();
  const auto trained = [&] {
    const auto sample = make_data_stream(data, text, offline())->at(0, 1000);
    std::vector<std::int32_t> ids;
    for (std::size_t i = 0; i < sample->ids.size(); ++i)
      if (sample->mask[i] != 0) ids.push_back(sample->ids[i]);
    return text.tokenizer->decode(ids, false);
  };
  EXPECT_EQ(trained(), "ANS<|im_end|>X<|im_end|>");
  data.loss_mask.user = true, data.loss_mask.assistant = false;
  EXPECT_EQ(trained(), "QR");
}

std::string trained_text(const SftText& text, const config::SftDataConfig& data) {
  const auto sample = make_data_stream(data, text, offline())->at(0, 2000);
  std::vector<std::int32_t> ids;
  for (std::size_t i = 0; sample && i < sample->ids.size(); ++i)
    if (sample->mask[i] != 0) ids.push_back(sample->ids[i]);
  return text.tokenizer->decode(ids, false);
}

// The prompt of a row is read, not learnt: its assistant messages too, whatever data.loss_mask says.
TEST(DataStream, APromptIsNeverTrained) {
  Scratch scratch("sft-prompt");
  SftText text = make_text_model(scratch.path / "model");
  write_lines(
      scratch.path / "d.jsonl",
      {R"({"prompt": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "SHOWN"}, {"role": "user", "content": "R"}],)"
       R"( "completion": [{"role": "assistant", "content": "A"}, {"role": "user", "content": "S"}, {"role": "assistant", "content": "B"}]})"});
  config::SftDataConfig data;
  data.name = (scratch.path / "d.jsonl").string();
  EXPECT_EQ(trained_text(text, data), "A<|im_end|>\nB<|im_end|>\n");
  data.loss_mask.user = data.loss_mask.system = true;
  EXPECT_THAT(trained_text(text, data), ::testing::AllOf(HasSubstr("A<|im_end|>"), HasSubstr("S<|im_end|>"),
                                                         ::testing::Not(HasSubstr("SHOWN")), ::testing::Not(HasSubstr("R"))));
  text.renderer = text::make_renderer({.name = "chatml"}, text.tokenizer, text.chat_template);
  data.loss_mask.user = data.loss_mask.system = false;
  EXPECT_EQ(trained_text(text, data), "A<|im_end|>B<|im_end|>");
  data.loss_mask.user = true;
  EXPECT_EQ(trained_text(text, data), "A<|im_end|>SB<|im_end|>");
}

TEST(DataStream, ANamedRendererTakesTheRowsTemplateKwargs) {
  Scratch scratch("sft-kwargs");
  SftText text = make_text_model(scratch.path / "model");
  text.renderer = text::make_renderer({.name = "qwen3"}, text.tokenizer, text.chat_template);
  const std::string messages =
      R"("messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}, {"role": "user", "content": "R"}, )"
      R"({"role": "assistant", "content": "B"}])";
  const auto trained = [&](const std::string& kwargs) {
    write_lines(scratch.path / "d.jsonl", {"{" + messages + kwargs + "}"});
    config::SftDataConfig data;
    data.name = (scratch.path / "d.jsonl").string();
    return trained_text(text, data);
  };
  EXPECT_EQ(trained(""), "A<|im_end|><think>\n\n</think>\n\nB<|im_end|>");
  EXPECT_EQ(trained(R"(, "chat_template_kwargs": {"enable_thinking": false})"),
            "<think>\n\n</think>\n\nA<|im_end|><think>\n\n</think>\n\nB<|im_end|>");
  try {
    trained(R"(, "chat_template_kwargs": {"thinking_budget": 3})");
    FAIL() << "a setting that the renderer does not know was dropped";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("d.jsonl:1"), HasSubstr("'thinking_budget'"), HasSubstr("'qwen3'")));
  }
}

// What the Python package `renderers` gives for whole conversations (src/text/renderer_test.cpp), through a data file.
TEST(DataStream, ANamedRendererGivesItsGoldenIdsAndMask) {
  namespace json = boost::json;
  Scratch scratch("sft-golden");
  const fs::path fixtures = test_source_dir() / "tests" / "fixtures" / "text";
  SftText text;
  text.tokenizer = std::make_shared<const text::Tokenizer>(text::Tokenizer::parse(read_file(fixtures / "qwen2.tokenizer.json"), {}));
  text.renderer = text::make_renderer({.name = "qwen3"}, text.tokenizer, nullptr);
  const auto fnv = [](const auto& values) {
    std::uint64_t hash = 0xCBF29CE484222325u;
    for (const auto value : values)
      for (int shift = 0; shift < 32; shift += 8)
        hash = (hash ^ static_cast<std::uint64_t>(static_cast<std::uint32_t>(value) >> shift & 0xFF)) * 0x100000001B3u;
    return fmt::format("{:016x}", hash);
  };
  const json::value cases = json::parse(read_file(fixtures / "renderer_cases.json"));
  const json::array& conversations = cases.at("conversations").as_array();
  const json::array& golden = cases.at("renders").at("qwen3").as_array();
  int num_compared = 0;
  for (std::size_t i = 0; i < conversations.size(); ++i) {
    const json::object& c = conversations[i].as_object();
    const bool has_reply = std::any_of(c.at("messages").as_array().begin(), c.at("messages").as_array().end(),
                                       [](const json::value& message) { return message.at("role") == "assistant"; });
    if (c.at("add_generation_prompt").as_bool() || !has_reply || golden[i].is_object()) continue;
    json::object row;
    row["messages"] = c.at("messages");
    row["tools"] = c.at("tools");
    write_lines(scratch.path / "d.jsonl", {json::serialize(row)});
    config::SftDataConfig data;
    data.name = (scratch.path / "d.jsonl").string();
    const auto sample = make_data_stream(data, text, offline())->at(0, 1 << 20);
    ASSERT_TRUE(sample) << json::serialize(row);
    EXPECT_EQ(fnv(sample->ids), std::string_view(golden[i].at(0).as_string())) << json::serialize(row);
    EXPECT_EQ(fnv(sample->mask), std::string_view(golden[i].at(2).as_string())) << json::serialize(row);
    ++num_compared;
  }
  EXPECT_GE(num_compared, 10);
}

TEST(DataStream, EveryEpochIsAnotherFullOrder) {
  Scratch scratch("sft-order");
  const SftText text = make_text_model(scratch.path / "model");
  fs::create_directories(scratch.path / "data");
  std::vector<std::string> lines;
  for (int i = 0; i < 12; ++i) lines.push_back(fmt::format(R"({{"prompt": "p", "completion": "{}"}})", static_cast<char>('a' + i)));
  write_lines(scratch.path / "data" / "1.jsonl", {lines.begin(), lines.begin() + 5});
  write_lines(scratch.path / "data" / "2.jsonl", {lines.begin() + 5, lines.end()});
  config::SftDataConfig data;
  data.name = (scratch.path / "data").string();
  const auto read_epoch = [&](SampleStream& stream, std::int64_t epoch) {
    std::vector<std::vector<std::int32_t>> ids;
    for (std::int64_t i = 0; i < stream.epoch_size(); ++i) ids.push_back(stream.at(epoch * stream.epoch_size() + i, 1000)->ids);
    return ids;
  };
  const auto one = make_data_stream(data, text, offline()), two = make_data_stream(data, text, offline());
  EXPECT_EQ(one->epoch_size(), 12);
  const auto first = read_epoch(*one, 0), second = read_epoch(*one, 1);
  EXPECT_NE(first, second);
  EXPECT_EQ(std::set(first.begin(), first.end()), std::set(second.begin(), second.end()));
  EXPECT_EQ(std::set(first.begin(), first.end()).size(), 12u);
  EXPECT_EQ(read_epoch(*two, 1), second) << "an epoch's order needs no history";
  EXPECT_EQ(read_epoch(*two, 0), first);
  data.shuffle = false;
  const auto plain = make_data_stream(data, text, offline());
  EXPECT_EQ(read_epoch(*plain, 0), read_epoch(*plain, 1));
  data.shuffle = true, data.seed = 1;
  const auto seeded = make_data_stream(data, text, offline());
  EXPECT_EQ(read_epoch(*seeded, 0), second) << "the order depends on seed + epoch";
}

TEST(DataStream, ErrorsNameFileAndLine) {
  Scratch scratch("sft-errors");
  // This template drops what earlier assistant messages said, so a longer render does not begin with the shorter one.
  const SftText text = make_text_model(scratch.path / "model",
                                       "{% for m in messages %}{{ m.role }}:{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% "
                                       "endif %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}");
  write_lines(
      scratch.path / "d.jsonl",
      {"", R"({"text": "x"})",
       R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})"});
  config::SftDataConfig data;
  data.name = (scratch.path / "d.jsonl").string();
  data.shuffle = false;
  const auto stream = make_data_stream(data, text, offline());
  const auto reason = [&](std::int64_t position) -> std::string {
    try {
      stream->at(position, 100);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(reason(0), ::testing::AllOf(HasSubstr("d.jsonl:2"), HasSubstr("'messages'")));
  EXPECT_THAT(reason(1), ::testing::AllOf(HasSubstr("d.jsonl:3"), HasSubstr("message"))) << "the broken prefix is named";

  const auto failure = [&] {
    try {
      make_data_stream(data, text, offline());
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  data.name = (scratch.path / "none.jsonl").string();
  EXPECT_THAT(failure(), ::testing::AllOf(HasSubstr("[data.name]"), HasSubstr("none.jsonl")));
  data.name = (scratch.path / "d.jsonl").string();
  data.splits = {"test"};
  EXPECT_THAT(failure(), HasSubstr("its only split is train"));
  data.splits = {"train[2:2]"};
  EXPECT_THAT(failure(), HasSubstr("no rows"));
  data.splits = {"train[x]"};
  EXPECT_THAT(failure(), HasSubstr("train[x]"));
  data.splits = {"train"};
  data.subsets = {"a", "b"};
  EXPECT_THAT(failure(), HasSubstr("1 splits for 2 subsets"));
  data.subsets = {"a"};
  EXPECT_THAT(failure(), HasSubstr("has no subset 'a'"));
}

TEST(DataStream, MixesSubsetsAndSplitsOfEveryFormat) {
  Scratch scratch("sft-mix");
  const SftText text = make_text_model(scratch.path / "model");
  const auto line = [](const std::string& answer) { return R"({"prompt": "q", "completion": ")" + answer + R"("})"; };
  write_lines(scratch.path / "set" / "a" / "train.jsonl", {line("a0"), line("a1"), line("a2")});
  write_lines(scratch.path / "set" / "a" / "test.jsonl", {line("t0")});
  write_lines(scratch.path / "set" / "b" / "all.csv", {"prompt,completion,id", "q,b0,7", "q,b1,8"});
  write_lines(scratch.path / "set" / "c" / "rows.json",
              {"[", R"({"messages": "[{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"c0\"}]"})", "]"});
  config::SftDataConfig data;
  data.name = (scratch.path / "set").string();
  data.shuffle = false;
  const auto answers = [&] {
    const auto stream = make_data_stream(data, text, offline());
    std::string all;
    const auto names = stream->part_names();
    for (std::int64_t i = 0; i < stream->epoch_size(); ++i) {
      const auto sample = stream->at(i, 1000);
      std::vector<std::int32_t> ids;
      for (std::size_t t = 0; t < sample->ids.size(); ++t)
        if (sample->mask[t] != 0) ids.push_back(sample->ids[t]);
      const std::string answer = text.tokenizer->decode(ids, true).substr(0, 2);
      EXPECT_EQ(names[sample->part].substr(0, 1), answer.substr(0, 1) == "t" ? "a" : answer.substr(0, 1));
      all += (all.empty() ? "" : " ") + answer;
    }
    return all;
  };
  data.subsets = {"a", "b", "c"};
  EXPECT_EQ(answers(), "a0 b0 c0 a1 b1 c0 a2 b0 c0") << "by turns until all are used up";
  data.stopping_strategy = config::StoppingStrategy::kFirstExhausted;
  EXPECT_EQ(answers(), "a0 b0 c0");
  data.subsets = {"a", "a"};
  data.splits = {"train[1:]", "test"};
  data.stopping_strategy = config::StoppingStrategy::kAllExhausted;
  EXPECT_EQ(answers(), "a1 t0 a2 t0");
  data.probabilities = {0.5, 0.5};
  const std::string drawn = answers();
  EXPECT_EQ(answers(), drawn) << "the mixture is a function of the seed";
  data.seed = 5;
  EXPECT_NE(answers(), drawn);
}

TEST(Mixture, FollowsTurnsAndProbabilities) {
  const auto shape = [](const std::vector<MixedRow>& rows) {
    std::string text;
    for (const MixedRow& row : rows) text += fmt::format("{}{} ", static_cast<char>('a' + row.part), row.index);
    return text;
  };
  const std::size_t sizes[] = {3, 1};
  using Strategy = config::StoppingStrategy;
  EXPECT_EQ(shape(mix_rows(sizes, {}, Strategy::kAllExhausted, 1)), "a0 b0 a1 b0 a2 b0 ");
  EXPECT_EQ(shape(mix_rows(sizes, {}, Strategy::kFirstExhausted, 1)), "a0 b0 ");
  const std::size_t one[] = {3};
  EXPECT_EQ(shape(mix_rows(one, {}, Strategy::kAllExhausted, 1)), "a0 a1 a2 ");
  const std::size_t large[] = {5000, 5000, 5000};
  const std::vector<double> p{0.6, 0.3, 0.1};
  for (const Strategy strategy : {Strategy::kFirstExhausted, Strategy::kAllExhausted}) {
    const auto rows = mix_rows(large, p, strategy, 7);
    std::vector<double> count(3);
    std::vector<std::uint32_t> next(3);
    bool in_order = true;
    for (const MixedRow& row : rows) {
      in_order = in_order && row.index == next[row.part]++ % 5000;
      count[row.part] += 1;
    }
    EXPECT_TRUE(in_order) << "each part runs in its own order";
    for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(count[i] / static_cast<double>(rows.size()), p[i], 0.02);
    if (strategy == Strategy::kFirstExhausted) {
      EXPECT_EQ(count[0], 5000);
    } else {
      EXPECT_EQ(count[2], 5000) << "the epoch ends when the rarest part is used up once";
    }
  }
  const auto problem = [&](std::vector<double> probabilities, Strategy strategy = Strategy::kAllExhausted) {
    try {
      mix_rows(sizes, probabilities, strategy, 1);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(problem({1.0}), HasSubstr("1 probabilities for 2 parts"));
  EXPECT_THAT(problem({0.5, 0.4}), HasSubstr("sum to 0.9"));
  EXPECT_THAT(problem({1.5, -0.5}), HasSubstr("negative"));
  EXPECT_THAT(problem({1, 0}), HasSubstr("never used up"));
  EXPECT_EQ(problem({1, 0}, Strategy::kFirstExhausted), "accepted");
  const std::size_t empty[] = {3, 0};
  EXPECT_THROW(mix_rows(empty, {}, Strategy::kAllExhausted, 1), Error);
}

TEST(SftTrainer, ABadRowIsFoundBeforeTheFirstStep) {
  Scratch scratch("sft-bad-row");
  const SftText text = make_text_model(scratch.path / "model");
  std::vector<std::string> lines(40, R"({"prompt": "a", "completion": "b"})");
  lines[33] = R"({"prompt": "a"})";
  write_lines(scratch.path / "data.jsonl", lines);
  config::SftDataConfig data;
  data.name = (scratch.path / "data.jsonl").string(), data.batch_size = 1, data.seq_len = 64, data.shuffle = false;
  SftRunOptions options = fake_options(scratch.path, 100);
  options.data = data, options.text = text, options.hub = offline();
  const auto policy = make_tiny_policy(scratch.path / "model");
  Recorder recorder;
  try {
    run_sft(options, *policy, recorder.monitor, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("data.jsonl:34"));
  }
  EXPECT_TRUE(recorder.steps.empty());
}

TEST(SftTrainer, ARowThatFailsInItsTurnKeepsTheStepsBeforeIt) {
  Scratch scratch("sft-late-row");
  // The row is well formed; the template refuses it when it is tokenized.
  const std::string picky =
      "{% for m in messages %}{% if m.content == 'never' %}{{ raise_exception('no such word') }}{% endif %}"
      "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}";
  const SftText text = make_text_model(scratch.path / "model", picky);
  std::vector<std::string> lines(40, R"({"prompt": "some words to fill a row with tokens", "completion": "and an answer of more words"})");
  lines[33] = R"({"prompt": "never", "completion": "b"})";
  write_lines(scratch.path / "data.jsonl", lines);
  config::SftDataConfig data;
  data.name = (scratch.path / "data.jsonl").string(), data.batch_size = 1, data.seq_len = 64, data.shuffle = false;
  SftRunOptions options = fake_options(scratch.path, 100);
  options.data = data, options.text = text, options.hub = offline();
  const auto policy = make_tiny_policy(scratch.path / "model");
  Recorder recorder;
  std::string message;
  try {
    run_sft(options, *policy, recorder.monitor, {});
    FAIL();
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_THAT(message, HasSubstr("data.jsonl:34"));
  ASSERT_FALSE(recorder.steps.empty());
  EXPECT_THAT(message, HasSubstr(fmt::format("Step {} is saved", recorder.steps.size())));
  ResumeOptions resume;
  EXPECT_EQ(find_resume_step(options.checkpoint->checkpoints, resume), static_cast<std::int64_t>(recorder.steps.size()));
}

TEST(SftTrainer, BatchShapeIsChecked) {
  Scratch scratch("sft-shape");
  const auto policy = make_tiny_policy(scratch.path / "model");
  SftRunOptions options = fake_options(scratch.path, 1);
  std::get<config::FakeDataConfig>(options.data).micro_batch_size = 3;
  Recorder recorder;
  EXPECT_THROW(run_sft(options, *policy, recorder.monitor, {}), Error);
}

TEST(SftTrainer, BenchRunsFourStepsWithoutCheckpoint) {
  Scratch scratch("sft-bench");
  const auto policy = make_tiny_policy(scratch.path / "model");
  SftRunOptions options = fake_options(scratch.path, 100);
  options.is_bench = true;
  options.peak_flops = 1e12;
  options.bench_json = scratch.path / "bench.json";
  Recorder recorder;
  const TrainRunResult result = run_sft(options, *policy, recorder.monitor, {});
  EXPECT_EQ(result.last_step, 4);
  EXPECT_FALSE(fs::exists(scratch.path / "checkpoints"));
  EXPECT_TRUE(fs::exists(scratch.path / "bench.json"));
  EXPECT_GT(recorder.steps[3].at("perf/mfu"), 0);
}

}  // namespace
}  // namespace prl::trainer
