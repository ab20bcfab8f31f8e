#include "trainer/token_export.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <boost/json.hpp>
#include <cmath>
#include <fstream>

#include "base/rng.hpp"
#include "trainer/loss/batch_loss.hpp"

namespace prl::trainer {
namespace {
namespace fs = std::filesystem;
namespace json = boost::json;

struct Row {
  wire::MicroBatch batch;
  std::vector<float> logp, entropy;
};

/// Sequences of these lengths; the first third of each is a prompt, and the last sequence is all prompt.
Row random_row(const std::vector<std::int32_t>& lengths) {
  Row row;
  Rng rng(7);
  row.batch.sequence_lengths = lengths;
  for (std::size_t sequence = 0; sequence < lengths.size(); ++sequence) {
    row.batch.env_names.push_back("env" + std::to_string(sequence));
    for (std::int32_t i = 0; i < lengths[sequence]; ++i) {
      const bool is_sampled = i >= lengths[sequence] / 3 && i > 0 && sequence + 1 < lengths.size();
      row.batch.input_ids.push_back(static_cast<std::int32_t>(rng.next_below(1000)));
      row.batch.position_ids.push_back(i);
      row.batch.loss_mask.push_back(is_sampled ? 1 : 0);
      row.batch.advantages.push_back(static_cast<float>(rng.next_normal()));
      row.batch.inference_logprobs.push_back(-2.0f * static_cast<float>(rng.next_double()));
      row.batch.temperatures.push_back(1);
      row.logp.push_back(-2.0f * static_cast<float>(rng.next_double()));
      row.entropy.push_back(static_cast<float>(rng.next_double()));
    }
  }
  return row;
}

TEST(TokenExport, HoldsWhatTheLossAndTheMetricsAreMadeOf) {
  const fs::path folder = fs::temp_directory_path() / ("token_export_" + std::to_string(::getpid()));
  fs::remove_all(folder);
  const Row row = random_row({30, 12, 9});
  MetricPool metrics;
  TokenExporter exporter(folder, 3, 1);
  exporter.begin_row(5);
  compute_batch_loss(config::DefaultLossConfig{}, row.batch, row.logp, row.entropy, count_losses(row.batch), metrics,
                     {.on_sequence = [&](const SequenceValues& values) { exporter.add(values); }});
  exporter.finish();
  EXPECT_FALSE(fs::exists(folder / "step_3/STABLE"));
  exporter.mark_stable();
  EXPECT_TRUE(fs::exists(folder / "step_3/STABLE"));

  std::ifstream file(folder / "step_3/rank_1.jsonl");
  std::vector<json::object> records;
  for (std::string line; std::getline(file, line);) records.push_back(json::parse(line).as_object());
  ASSERT_EQ(records.size(), 2u) << "a sequence without trained tokens leaves no record";
  double kl = 0, entropy = 0, masked = 0, first_masked = 0, tokens = 0;
  std::size_t first = 0;
  for (std::size_t r = 0; r < records.size(); ++r) {
    const json::object& record = records[r];
    EXPECT_EQ(record.at("schema_version"), 1);
    EXPECT_EQ(record.at("step"), 3);
    EXPECT_EQ(record.at("rank"), 1);
    EXPECT_EQ(record.at("micro_step"), 5);
    EXPECT_EQ(record.at("micro_sequence_idx").as_int64(), static_cast<std::int64_t>(r));
    EXPECT_EQ(record.at("export_sequence_idx").as_int64(), static_cast<std::int64_t>(r));
    EXPECT_EQ(std::string(record.at("env_name").as_string()), "env" + std::to_string(r));
    const auto n = static_cast<std::size_t>(row.batch.sequence_lengths[r]);
    for (const char* key : {"token_ids", "position_ids", "loss_mask", "advantages", "inference_logprobs", "trainer_logprobs", "entropy",
                            "mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta", "is_masked", "is_masked_high",
                            "is_masked_low", "rl_weights", "ce_weights", "ref_kl_weights"})
      EXPECT_EQ(record.at(key).as_array().size(), n) << key;
    for (std::size_t i = 0; i < n; ++i) {
      const auto number = [&](const char* key) { return record.at(key).as_array()[i].to_number<double>(); };
      EXPECT_EQ(number("token_ids"), row.batch.input_ids[first + i]);
      if (row.batch.loss_mask[first + i] == 0) {
        EXPECT_TRUE(record.at("entropy").as_array()[i].is_null()) << "nobody predicted it";
        continue;
      }
      const double logp = row.logp[first + i - 1], sampled = row.batch.inference_logprobs[first + i];
      EXPECT_NEAR(number("trainer_logprobs"), logp, 1e-6) << "predicted one token before";
      EXPECT_NEAR(number("importance_ratio"), std::exp(logp - sampled), 1e-6);
      EXPECT_NEAR(number("prob_delta"), std::exp(logp) - std::exp(sampled), 1e-6);
      kl += number("mismatch_kl");
      entropy += number("entropy");
      masked += number("is_masked");
      if (r == 0) first_masked += number("is_masked");
      ++tokens;
    }
    first += n;
  }
  EXPECT_NEAR(kl / tokens, metrics.mean("mismatch_kl/all"), 1e-6);
  EXPECT_NEAR(entropy / tokens, metrics.mean("entropy/all"), 1e-6);
  // The metric is a mean over sequences: 20 and 8 of them are trained.
  EXPECT_NEAR((first_masked / 20 + (masked - first_masked) / 8) / 2, metrics.mean("is_masked"), 1e-6);
  EXPECT_GT(masked, 0) << "else the marks prove nothing";
  fs::remove_all(folder);
}

}  // namespace
}  // namespace prl::trainer
