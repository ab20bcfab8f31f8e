#pragma once

#include <span>

#include "monitor/metric_set.hpp"

namespace prl::trainer {

/// Everything `prl trainer` and `prl sft` may log, under the field's names.
monitor::MetricSet trainer_metrics();
monitor::MetricSet sft_metrics();

}  // namespace prl::trainer
