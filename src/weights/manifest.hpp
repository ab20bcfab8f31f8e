#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/ids.hpp"
#include "wire/weight_proof.hpp"

namespace prl::weights {

/// What the trainer says about weights it publishes, so that whoever loads them can prove to hold the same.
struct WeightManifest {
  PolicyVersion version;
  std::uint64_t checksum = 0;  ///< over all tensors in compute dtype; independent of packing and transport
  std::string compute_dtype;   ///< "BF16", "F32": checksum and probe are of weights rounded to it
  std::vector<std::int32_t> probe_prompt;
  std::vector<float> probe_logprobs;  ///< of probe_prompt[i + 1] given what is before; one less than the prompt
  bool operator==(const WeightManifest&) const = default;
};

using wire::WeightProof;

/// JSON with the checksum in hex and every fp32 exactly.
std::string to_json(const WeightManifest& manifest);
/// Error{kCorrupt} naming `source` and the key.
WeightManifest parse_manifest(std::string_view json, std::string_view source);
/// The reply of a server's /update_weights and /weight_proof: {"policy_version", "checksum", "probe_logprobs"}. Error{kCorrupt} likewise.
WeightProof parse_proof(std::string_view json, std::string_view source);

/// Largest absolute difference of two lists of log-probabilities; infinity if their lengths differ or one is not finite.
double max_probe_difference(const std::vector<float>& a, const std::vector<float>& b) noexcept;

/// nullopt if the engine runs exactly the published weights; else Error{kOutOfSync} saying which version, checksum and probe
/// difference were found. A `probe_tolerance` above 0 lets engines with other kernels differ by so much (nats).
std::optional<Error> verify_proof(const WeightManifest& manifest, const WeightProof& proof, double probe_tolerance = 0.0);

}  // namespace prl::weights
