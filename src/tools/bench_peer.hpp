#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "tools/bench.hpp"

namespace prl::tools {

// Benchmarks that are scripts of the project: the peer, and what is measured from outside a process. The scripts are looked for above
// the working directory and above this program; PRL_BENCH_PYTHON names the interpreter (default python3). Errors: {kNotFound} without the
// script, {kUnavailable} when it fails, after its own message. They block until the script has ended.

/// Runs bench/peer.py (PyTorch and transformers) on the same work and prints the table of both, with ratios, to stdout. `shape` as in
/// named_shape(); `json` is our side, as to_json() gives it. The peer has the device to itself: options.runtime is let go first.
void compare_with_peer(BenchOptions options, const std::string& shape, const std::string& json);

/// Start of `prl inference` to its first token (bench/first_token.py); steps of `prl rl --bench` (bench/rl.py). Random weights of `shape`.
void bench_start(const std::string& shape, int num_repeats);
void bench_rl(const std::string& shape, std::uint64_t seed);
/// What `num_pages` open pages cost a run beside one without, in `num_turns` turns, and the time to a page's first view
/// (bench/dashboard.py).
void bench_dashboard(const std::string& shape, int num_pages, int num_turns, const std::optional<std::filesystem::path>& output_json);

}  // namespace prl::tools
