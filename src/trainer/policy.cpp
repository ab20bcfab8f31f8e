#include "trainer/policy.hpp"

#include <vector>

#include "base/error.hpp"

namespace prl::trainer {

nn::ModelConfig model_config(const PolicyOptions& options) {
  if (options.shape) {
    PRL_CHECK(options.random_init, "a shape has no weights to load");
    return *options.shape;
  }
  nn::ModelConfig config = nn::load_model_config(options.model);
  if (options.num_layers) {
    if (!options.random_init)
      fail(ErrorCode::kInvalidArgument, "[model] debug.num_layers cuts the model, so it needs debug.random_init = true");
    config.num_layers = std::min(config.num_layers, *options.num_layers);
    config.raw_json.clear();  // it would still say the full number of layers
  }
  return config;
}

namespace {

std::vector<std::int32_t> cumulative(const wire::MicroBatch& row) {
  std::vector<std::int32_t> cu{0};
  for (const std::int32_t n : row.sequence_lengths) cu.push_back(cu.back() + n);
  return cu;
}

}  // namespace

Policy::Policy(std::shared_ptr<DeviceRuntime> runtime, PolicyOptions options)
    : options_(std::move(options)),
      runtime_(runtime),
      session_(runtime, options_.num_threads),
      parameters_(runtime, model_config(options_)) {
  if (options_.random_init)
    parameters_.init_random(options_.seed);
  else
    nn::load_parameters(parameters_, options_.model);
  parameters_.ensure_grads();
  parameters_.zero_grads();
  model_ = std::make_unique<nn::TrainableModel>(context(), parameters_, options_.checkpointing, options_.offload);
  model_->keep_logits(options_.num_kept_logits);
  probe_model_ = std::make_unique<nn::InferenceModel>(context());
  refresh(PolicyVersion{0});
}

Policy::~Policy() = default;

Tensor Policy::room_for_weights() {
  return ops::shares_weights(context()) ? Tensor::empty(runtime_, parameters_.all_values().shape(), options_.compute) : Tensor();
}

void Policy::refresh(PolicyVersion version, const Tensor& rounded) {
  weights_ = nn::make_weights(context(), parameters_, options_.compute, version, true, weights_, rounded);
}

nn::TokenStats Policy::forward(const wire::MicroBatch& row, std::span<const std::int32_t> targets_T) {
  const auto cu = cumulative(row);
  return model_->forward(weights_, {row.input_ids, row.position_ids, cu}, targets_T, row.temperatures);
}

nn::TokenStats Policy::evaluate(const wire::MicroBatch& row, std::span<const std::int32_t> targets_T) {
  const auto cu = cumulative(row);
  return model_->evaluate(weights_, {row.input_ids, row.position_ids, cu}, targets_T, row.temperatures);
}

std::size_t Policy::reserve(std::int64_t num_tokens) {
  const std::size_t before = runtime_->bytes_in_use();
  wire::MicroBatch row;
  std::vector<std::int32_t> targets;
  const std::int64_t longest = std::min(num_tokens, config().max_position);
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    if (i % longest == 0) row.sequence_lengths.push_back(0);
    ++row.sequence_lengths.back();
    row.position_ids.push_back(static_cast<std::int32_t>(i % longest));
    row.input_ids.push_back(static_cast<std::int32_t>(i % config().vocab_size));
    targets.push_back(row.input_ids.back());
  }
  row.temperatures.assign(targets.size(), 1.0f);
  model_->expect_tokens(num_tokens, options_.compute);
  forward(row, targets);
  backward(std::vector<float>(targets.size(), 0.0f));
  model_->fit_memory();
  parameters_.zero_grads();
  runtime_->synchronize();
  const std::size_t after = runtime_->bytes_in_use();
  return after > before ? after - before : 0;
}

weights::WeightManifest Policy::manifest() {
  weights::WeightManifest manifest;
  manifest.version = weights_->version;
  manifest.checksum = nn::checksum(context(), *weights_).combined;
  manifest.compute_dtype = std::string(to_string(options_.compute));
  manifest.probe_prompt = nn::probe_prompt(config().vocab_size);
  manifest.probe_logprobs = nn::probe_logprobs(*probe_model_, context(), *weights_, manifest.probe_prompt);
  return manifest;
}

}  // namespace prl::trainer
