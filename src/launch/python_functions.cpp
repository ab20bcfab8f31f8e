#include "launch/python_functions.hpp"

#include <boost/json/parse.hpp>

#include <utility>

#include "base/error.hpp"
#include "config/text_format.hpp"
#include "launch/log_folder.hpp"
#include "text/json_python.hpp"

namespace prl::launch {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kRowLimit = 60s;
constexpr std::size_t kMaxMetrics = 64;
/// What the worker calls: it turns the numbers into tensors, asks the user's function and differentiates its loss.
constexpr const char* kEvaluate = "prl_worker.losses.evaluate";

/// Numbers as they lie in memory, so that both sides have the same bits.
template <typename T>
std::string to_hex(std::span<const T> values) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(values.size_bytes() * 2);
  for (const std::byte byte : std::as_bytes(values)) {
    text += kDigits[static_cast<unsigned>(byte) >> 4];
    text += kDigits[static_cast<unsigned>(byte) & 15];
  }
  return text;
}

std::vector<double> doubles_of(const json::value& value, std::size_t wanted) {
  if (!value.is_string() || value.get_string().size() != wanted * sizeof(double) * 2)
    fail(ErrorCode::kCorrupt, "the worker's answer does not have {} numbers where it should", wanted);
  const auto digit = [](char c) { return static_cast<unsigned>(c <= '9' ? c - '0' : c - 'a' + 10) & 15U; };
  const json::string& text = value.get_string();
  std::vector<double> values(wanted);
  auto* bytes = reinterpret_cast<unsigned char*>(values.data());
  for (std::size_t i = 0; i < wanted * sizeof(double); ++i)
    bytes[i] = static_cast<unsigned char>(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
  return values;
}

json::object sequence_json(const trainer::TokenStreams& s) {
  std::vector<std::uint8_t> members(s.size());
  for (std::size_t i = 0; i < s.size(); ++i) members[i] = s.in_rl(i) ? 1 : 0;
  json::object out;
  out["trainer_logprobs"] = to_hex(s.logp);
  out["inference_logprobs"] = to_hex(s.inference_logp);
  out["advantages"] = to_hex(s.advantages);
  out["loss_mask"] = to_hex(std::span<const std::uint8_t>(members));
  if (!s.ref_logp.empty()) out["ref_logprobs"] = to_hex(s.ref_logp);
  if (!s.rl_weights.empty()) out["loss_weights"] = to_hex(s.rl_weights);
  return out;
}

trainer::SequenceLoss answer_of(const json::value& value, std::size_t num_tokens) {
  const json::object* answer = value.if_object();
  const json::value* loss = answer != nullptr ? answer->if_contains("loss") : nullptr;
  const json::value* gradient = answer != nullptr ? answer->if_contains("gradient") : nullptr;
  if (loss == nullptr || gradient == nullptr) fail(ErrorCode::kCorrupt, "the worker's answer has no loss or gradient");
  trainer::SequenceLoss out;
  out.loss = doubles_of(*loss, 1).front();
  out.dlogp = doubles_of(*gradient, num_tokens);
  if (const json::value* metrics = answer->if_contains("metrics"); metrics != nullptr && metrics->is_object())
    for (const json::key_value_pair& metric : metrics->get_object())
      if (const auto number = text::as_double(metric.value()); number && out.metrics.size() < kMaxMetrics)
        out.metrics[metric.key()] = *number;
  return out;
}

std::vector<trainer::SequenceLoss> ask(const env::python::PythonFunction& function, const std::string& import_path,
                                       std::span<const trainer::TokenStreams> sequences) {
  try {
    json::array rows;
    for (const trainer::TokenStreams& sequence : sequences) rows.push_back(sequence_json(sequence));
    json::array args;
    args.emplace_back(import_path);
    args.push_back(std::move(rows));
    const json::value value = function.call_now(std::move(args), kRowLimit);
    if (!value.is_array() || value.get_array().size() != sequences.size())
      fail(ErrorCode::kCorrupt, "the worker's answer is not that of {} sequences", sequences.size());
    std::vector<trainer::SequenceLoss> answers;
    for (std::size_t i = 0; i < sequences.size(); ++i) answers.push_back(answer_of(value.get_array()[i], sequences[i].size()));
    return answers;
  } catch (const Error& error) {
    throw error.with_context(fmt::format("trainer.loss.import_path = {}", import_path));
  }
}

}  // namespace

std::shared_ptr<env::python::PythonFunction> python_function(const std::string& key, const std::string& function,
                                                             const config::PythonFunctionConfig& config,
                                                             const std::filesystem::path& output_dir) {
  env::python::PythonSettings settings;
  settings.path = config.path.value_or("");
  settings.python = config.python.value_or("");
  settings.log_folder = log_file(output_dir, "envs") / "functions";
  return std::make_shared<env::python::PythonFunction>(key, function, json::parse(config::to_compact_json(config.kwargs)).as_object(),
                                                       settings);
}

trainer::LossFunction loss_function(const config::LossConfig& loss, const std::filesystem::path& output_dir) {
  const auto* custom = std::get_if<config::CustomLossConfig>(&loss);
  if (custom == nullptr) return {};
  const auto function = python_function("loss", kEvaluate, *custom, output_dir);
  const std::string path = custom->import_path.value();
  ask(*function, path, {});
  return [function, path](std::span<const trainer::TokenStreams> sequences) { return ask(*function, path, sequences); };
}

}  // namespace prl::launch
