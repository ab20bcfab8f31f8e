#pragma once

#include <cstdint>

#include "wire/training.hpp"

namespace prl::wire {

/// What the trainer relies on in a micro-batch: streams as long as the tokens, lengths that add up, one environment name per
/// sequence, ids and positions not negative, temperatures > 0, log-probabilities <= 0, every number finite, the first token of a sequence
/// in no loss component, images apart, each within a sequence and as its grid divides it. Error{kCorrupt} naming the field, the sequence's
/// environment and the token.
void check(const MicroBatch& batch);
/// The same for a sample before packing; Error{kInvalidArgument}.
void check(const TrainingSample& sample);

}  // namespace prl::wire
