#include "weights/manifest.hpp"

#include <fmt/core.h>

#include <boost/json.hpp>
#include <charconv>
#include <cmath>
#include <limits>

namespace prl::weights {

namespace json = boost::json;

namespace {

/// A probe prompt is a few dozen tokens; a list beyond this is not one.
constexpr std::size_t kMaxProbeTokens = 65536;

template <typename T>
void append_list(std::string& out, const std::vector<T>& values) {
  out += '[';
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out += ", ";
    // A double prints in the shortest form that reads back as itself, so a widened fp32 survives exactly.
    if constexpr (std::is_floating_point_v<T>)
      out += fmt::format("{}", static_cast<double>(values[i]));
    else
      out += fmt::format("{}", values[i]);
  }
  out += ']';
}

/// Keys of a JSON object whose damage is Error{kCorrupt}.
class Fields {
 public:
  Fields(std::string_view text, std::string subject) : subject_(std::move(subject)) {
    boost::system::error_code ec;
    root_ = json::parse(json::string_view(text.data(), text.size()), ec);
    if (ec || !root_.is_object()) throw corrupt(ec ? ec.message() : "wanted a JSON object");
  }
  Error corrupt(std::string_view what) const { return Error(ErrorCode::kCorrupt, fmt::format("[weights] {}: {}", subject_, what)); }
  const json::value& at(const char* key) const {
    const json::value* value = root_.get_object().if_contains(key);
    if (value == nullptr) throw corrupt(fmt::format("key '{}' is missing", key));
    return *value;
  }
  PolicyVersion version(const char* key) const {
    const json::value& value = at(key);
    if (!value.is_int64() || value.get_int64() < 0) throw corrupt(fmt::format("key '{}' must be a whole number of at least 0", key));
    return PolicyVersion{value.get_int64()};
  }
  std::uint64_t checksum() const {
    const json::value& value = at("checksum");
    if (!value.is_string()) throw corrupt("key 'checksum' must be text");
    const auto& hex = value.get_string();
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(hex.data(), hex.data() + hex.size(), number, 16);
    if (error != std::errc() || end != hex.data() + hex.size() || hex.size() != 16) throw corrupt("key 'checksum' must be 16 hex digits");
    return number;
  }
  std::vector<float> logprobs() const {
    const json::value& list = at("probe_logprobs");
    if (!list.is_array() || list.get_array().size() > kMaxProbeTokens)
      throw corrupt("key 'probe_logprobs' must be a short list of numbers");
    std::vector<float> out;
    for (const json::value& value : list.get_array()) {
      if (!value.is_number()) throw corrupt("key 'probe_logprobs' holds something that is no number");
      out.push_back(static_cast<float>(value.to_number<double>()));
    }
    return out;
  }

 private:
  json::value root_;
  std::string subject_;
};

}  // namespace

std::string to_json(const WeightManifest& m) {
  std::string out =
      fmt::format("{{\"version\": {}, \"checksum\": \"{:016x}\", \"compute_dtype\": \"{}\", \"probe_prompt\": ", m.version.value,
                  m.checksum, m.compute_dtype);
  append_list(out, m.probe_prompt);
  out += ", \"probe_logprobs\": ";
  append_list(out, m.probe_logprobs);
  return out + "}\n";
}

WeightManifest parse_manifest(std::string_view text, std::string_view source) {
  const Fields fields(text, fmt::format("manifest {}", source));
  WeightManifest m;
  m.version = fields.version("version");
  m.checksum = fields.checksum();
  const json::value& dtype = fields.at("compute_dtype");
  if (!dtype.is_string()) throw fields.corrupt("key 'compute_dtype' must be text");
  m.compute_dtype = std::string(dtype.get_string());
  const json::value& prompt = fields.at("probe_prompt");
  if (!prompt.is_array() || prompt.get_array().size() > kMaxProbeTokens)
    throw fields.corrupt("key 'probe_prompt' must be a short list of token ids");
  for (const json::value& id : prompt.get_array()) {
    if (!id.is_int64() || id.get_int64() < 0 || id.get_int64() > std::numeric_limits<std::int32_t>::max())
      throw fields.corrupt("key 'probe_prompt' holds something that is no token id");
    m.probe_prompt.push_back(static_cast<std::int32_t>(id.get_int64()));
  }
  m.probe_logprobs = fields.logprobs();
  if (m.probe_logprobs.size() + (m.probe_prompt.empty() ? 0 : 1) != m.probe_prompt.size())
    throw fields.corrupt("key 'probe_logprobs' must have one entry less than 'probe_prompt'");
  return m;
}

WeightProof parse_proof(std::string_view text, std::string_view source) {
  const Fields fields(text, fmt::format("proof of {}", source));
  return {fields.version("policy_version"), fields.checksum(), fields.logprobs()};
}

double max_probe_difference(const std::vector<float>& a, const std::vector<float>& b) noexcept {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!std::isfinite(difference)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, difference);
  }
  return largest;
}

std::optional<Error> verify_proof(const WeightManifest& m, const WeightProof& proof, double probe_tolerance) {
  const double difference = max_probe_difference(m.probe_logprobs, proof.probe_logprobs);
  const bool has_version = m.version == proof.version, has_checksum = m.checksum == proof.checksum;
  // With a tolerance the engine may hold another layout or rounding, of which only the probe can speak.
  const bool has_weights = probe_tolerance > 0 ? difference <= probe_tolerance : has_checksum && difference == 0;
  if (has_version && has_weights) return std::nullopt;
  std::string what;
  const auto add = [&](const std::string& part) { what += (what.empty() ? "" : "; ") + part; };
  if (!has_version) add(fmt::format("the engine holds version {}", proof.version.value));
  if (!has_checksum) add(fmt::format("its checksum is {:016x}, wanted {:016x}", proof.checksum, m.checksum));
  if (m.probe_logprobs.size() != proof.probe_logprobs.size())
    add(fmt::format("it gave {} probe log-probabilities, wanted {}", proof.probe_logprobs.size(), m.probe_logprobs.size()));
  else
    add(fmt::format("the largest difference on the probe prompt is {:.3g} nats, allowed {:.3g}", difference, probe_tolerance));
  return Error(ErrorCode::kOutOfSync, fmt::format("[weights] engine and trainer do not hold the same policy after the update to version "
                                                  "{}: {}. No rollout of this version counts; look for a damaged broadcast, another base "
                                                  "model, rope_scaling or compute dtype on the inference side",
                                                  m.version.value, what));
}

}  // namespace prl::weights
