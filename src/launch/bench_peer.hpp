#pragma once

#include <filesystem>
#include <string>

#include "launch/bench.hpp"

namespace prl::launch {

/// Runs bench/peer.py (PyTorch and transformers) on the same work and prints the table of both, with ratios, to stdout.
///
/// The script is looked for above the working directory and above this program; PRL_BENCH_PYTHON names the interpreter (default
/// python3), which must have torch and transformers. `shape` as in named_shape(); `json` is our side, as to_json() gives it. The peer has
/// the device to itself: options.runtime is let go first. Error{kNotFound} without the script, {kUnavailable} with the peer's own message
/// if it fails. Blocks until it ends.
void compare_with_peer(BenchOptions options, const std::string& shape, const std::string& json);

}  // namespace prl::launch
