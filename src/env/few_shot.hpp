#pragma once

#include <cstdint>

#include "env/environment.hpp"

namespace prl::env {

/// `inner`, with worked examples as turns before each question (after the system message): for models that follow an example
/// better than an instruction. The examples are the last `num_shots` tasks of the train split with their demonstrations; they are
/// tasks no more. Error{kInvalidArgument} if the split is too small or one of them has no demonstration.
EnvironmentPtr with_examples(EnvironmentPtr inner, std::int64_t num_shots);

}  // namespace prl::env
