#include "trainer/replay.hpp"

#include <fmt/core.h>

#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"

namespace prl::trainer {

void StepRecorder::record(std::int64_t step, const rollouts::RankBatch* batch, std::uint64_t weights) {
  if (step_ && step == *step_ + 1 && batch != nullptr) {
    PRL_CHECK(batch->step == step, "the samples of step {} recorded as those of {}", batch->step, step);
    rollouts::write_step_record(run_, {.weights_before = weights_, .weights_after = weights, .machine = machine_, .batch = *batch});
  }
  step_ = step;
  weights_ = weights;
}

void Replay::check(std::int64_t step, std::uint64_t weights) {
  const bool is_start = !std::exchange(has_begun_, true);
  const std::optional<rollouts::StepRecord> known = rollouts::read_step_record(run_, is_start ? step + 1 : step);
  if (!known) return;
  const std::uint64_t wanted = is_start ? known->weights_before : known->weights_after;
  if (weights == wanted) {
    if (!is_start) ++num_same_;
    return;
  }
  if (first_other_) return;
  first_other_ = step;
  const std::string& there = known->machine;
  const std::string found =
      fmt::format("the weights after step {} have the checksum {:016x}, the recorded run's had {:016x}", step, weights, wanted);
  const std::string why = there != machine_
                              ? fmt::format("it was recorded on {}, and this is {}, whose kernels round in other ways", there, machine_)
                          : is_start ? std::string("is model.name the same folder with the same weights?")
                                     : std::string("settings, the program or its environment are not those of the recorded run");
  if (must_agree_) fail(ErrorCode::kOutOfSync, "[replay] {}: {}", found, why);
  log::warning("[replay] from here on this run goes its own way: {}", found);
}

}  // namespace prl::trainer
