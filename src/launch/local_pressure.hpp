#pragma once

#include <memory>

#include "engine/engine.hpp"
#include "orchestrator/concurrency.hpp"

namespace prl::launch {

/// The load of an engine in the same process, which outlives this.
std::shared_ptr<orchestrator::PressureSource> make_local_pressure(engine::Engine& engine);

}  // namespace prl::launch
