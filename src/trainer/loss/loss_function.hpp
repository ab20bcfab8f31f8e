#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "trainer/loss/token_streams.hpp"

namespace prl::trainer {

/// What a policy loss that is written elsewhere says of one sequence.
struct SequenceLoss {
  double loss = 0;                        ///< the sum over its tokens, not yet divided by global counts
  std::vector<double> dlogp;              ///< d loss / d logp of each token
  std::map<std::string, double> metrics;  ///< go to custom_loss/<name>
};

/// A policy loss that is written elsewhere (`type = "custom"`): all sequences of a row at once, an answer for each in their order. The same
/// input must give the same answer: with several ranks, and when a step is repeated, each row is asked for anew. Errors end the step.
using LossFunction = std::function<std::vector<SequenceLoss>(std::span<const TokenStreams>)>;

}  // namespace prl::trainer
