#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

#include "nn/weight_files.hpp"
#include "nn/weights.hpp"

namespace prl::nn {

// A head for multi-token prediction guesses the token after the next one (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2). For position p
// it takes the model's hidden state of p, behind the last norm, and the embedding of token p + 1, norms both, and multiplies them, side by
// side, with one matrix. What comes of it passes one decoder layer of softmax attention at position p, and a norm of its own; the model's
// head then gives the logits of token p + 2. Its output is a hidden state of position p + 1 as good as any, so that a head guesses on.
//
// Here it is a decoder of one layer with a table and weights of its own, of which the embedding and the head are its model's.

/// The configuration of that decoder. PRL_CHECK: the model has a head (ModelConfig::mtp).
ModelConfig mtp_head_config(const ModelConfig& model);

/// The head that is in the model's files, as the successor of `previous` (may be null). `model` has what it shares. Error{kCorrupt} names
/// file and tensor; {kInvalidArgument} if the folder has none.
WeightsPtr load_mtp_head(ops::OpContext& ctx, const Weights& model, const std::filesystem::path& folder, bool with_backward = false);
/// Packs masters of the head's table.
WeightsPtr make_mtp_head(ops::OpContext& ctx, const Parameters& parameters, const Weights& model, bool with_backward);
/// `head` with what it shares taken from another version of its model.
WeightsPtr mtp_head_of(const Weights& model, const WeightsPtr& head);
/// `model` with this head, which shares what the model has.
WeightsPtr with_mtp_head(const WeightsPtr& model, const WeightsPtr& head);

/// Whether files of `model` hold it for a head for multi-token prediction.
bool is_of_mtp_head(std::string_view name, const ModelConfig& model);
/// The tensors of `model.mtp` in the folder that it is from, as they are; what is FP8 there as the numbers that it stands for.
std::vector<WeightSource> mtp_sources(const ModelConfig& model);

}  // namespace prl::nn
