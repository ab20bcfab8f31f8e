// Which tensors an adapter has: patterns over the modules of a model.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <regex>
#include <set>

#include "base/error.hpp"
#include "nn/adapter.hpp"

namespace prl::nn {
namespace {

/// Of mixtures of experts, which the usual lists of targets name beside those of dense models.
constexpr std::array<std::string_view, 3> kExpertModules = {"experts", "fc1_latent_proj", "fc2_latent_proj"};

/// Of MLPs, which the usual lists of targets name too. Where experts have numbers in place of these names, "experts" is all of them.
constexpr std::array<std::string_view, 3> kMlpModules = {"gate_proj", "up_proj", "down_proj"};

bool is_regex(std::string_view pattern) { return pattern.find_first_of("^$*+?()[]{}|\\") != std::string_view::npos; }

std::regex compile(const std::string& pattern, const char* key) {
  try {
    return std::regex(pattern);
  } catch (const std::regex_error& error) {
    fail(ErrorCode::kInvalidArgument, "lora.{}: '{}' is no regular expression: {}", key, pattern, error.what());
  }
}

/// A pattern of target_modules or modules_to_save.
class ModulePattern {
 public:
  ModulePattern(const std::string& text, const char* key) : text_(text), is_regex_(is_regex(text)) {
    if (is_regex_) regex_ = compile(text, key);
  }
  bool matches(const std::string& name) const {
    if (is_regex_) return std::regex_search(name, regex_);
    // A component, or several with the dots between them.
    return fmt::format(".{}.", name).find(fmt::format(".{}.", text_)) != std::string::npos;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  bool is_regex_;
  std::regex regex_;
};

std::vector<ModulePattern> patterns_of(const std::vector<std::string>& texts, const char* key) {
  std::vector<ModulePattern> patterns;
  for (const std::string& text : texts) patterns.emplace_back(text, key);
  return patterns;
}

/// The last components of modules, once each, in the order of the model.
std::string kinds_of_modules(const TensorTable& model, bool adaptable_only) {
  std::vector<std::string> kinds;
  for (const TensorSpec& spec : model.tensors()) {
    if (adaptable_only && !(spec.is_matrix() && lora_b_of(spec.slot))) continue;
    const std::string module = module_of(spec.name);
    const std::string kind = module.substr(module.rfind('.') + 1);
    if (std::ranges::find(kinds, kind) == kinds.end()) kinds.push_back(kind);
  }
  return fmt::format("{}", fmt::join(kinds, ", "));
}

[[noreturn]] void fail_no_match(const char* key, const std::string& pattern, const TensorTable& model, bool adaptable_only) {
  const auto example =
      std::ranges::find_if(model.tensors(), [](const TensorSpec& spec) { return spec.is_matrix() && lora_b_of(spec.slot).has_value(); });
  fail(ErrorCode::kInvalidArgument, "lora.{}: '{}' matches no module of this model{}; there are: {} (in layers named \"{}\")", key, pattern,
       adaptable_only ? " that takes an adapter" : "", kinds_of_modules(model, adaptable_only),
       example == model.tensors().end() ? std::string() : module_of(example->name));
}

/// Every pattern matches something, but for those of experts in models without any, and `passed_over`.
void check_all_match(const std::vector<ModulePattern>& patterns, const std::vector<std::string>& names, const char* key,
                     const TensorTable& model, bool adaptable_only, std::span<const std::string_view> passed_over = {}) {
  for (const ModulePattern& pattern : patterns) {
    if (std::ranges::find(kExpertModules, pattern.text()) != kExpertModules.end()) continue;
    if (std::ranges::find(passed_over, pattern.text()) != passed_over.end()) continue;
    if (std::ranges::none_of(names, [&](const std::string& name) { return pattern.matches(name); }))
      fail_no_match(key, pattern.text(), model, adaptable_only);
  }
}

bool matches_any(const std::vector<ModulePattern>& patterns, const std::string& name) {
  return std::ranges::any_of(patterns, [&](const ModulePattern& pattern) { return pattern.matches(name); });
}

/// Of the usual lists what a model has none of, or has under other names.
std::span<const std::string_view> passed_over(const ModelConfig& model, const std::vector<std::string>& targets) {
  if (model.has_squared_relu_mlps) return std::span(kMlpModules).first(1);  // MLPs without gates
  const bool names_all_experts = model.expert_names == ExpertNames::kNumbered && std::ranges::find(targets, "experts") != targets.end();
  return names_all_experts ? std::span<const std::string_view>(kMlpModules) : std::span<const std::string_view>();
}

/// Where experts are one tensor in files, adapters of theirs would have no names of PEFT's.
void refuse_stacked_experts(const ModelConfig& model, const AdapterConfig& config) {
  if (model.expert_names != ExpertNames::kStacked) return;
  for (const auto& [key, names] :
       {std::pair("target_modules", &config.target_modules), std::pair("modules_to_save", &config.modules_to_save)})
    for (const std::string& name : *names)
      if (name.find("experts") != std::string::npos || std::ranges::find(kMlpModules, name) != kMlpModules.end() ||
          name.find("gate_up_proj") != std::string::npos)
        fail(ErrorCode::kNotImplemented,
             "lora.{}: '{}' names experts, which in a {} model take no adapters and are not trained beside one; name modules of attention: "
             "q_proj, k_proj, v_proj, o_proj",
             key, name, model.model_type);
}

/// The target modules of a model. Of latent attention what the usual lists call q_proj, k_proj and v_proj stands for the modules in their
/// place that take adapters, unless the model has such a one.
std::vector<std::string> targets_of(const ModelConfig& model, const std::vector<std::string>& targets) {
  if (!model.latent) return targets;
  std::vector<std::string> out;
  const auto add = [&](std::initializer_list<const char*> names) {
    for (const char* name : names)
      if (std::ranges::find(out, name) == out.end()) out.emplace_back(name);
  };
  for (const std::string& target : targets) {
    if (target == "q_proj" && model.latent->query_rank > 0)
      add({"q_a_proj", "q_b_proj"});
    else if ((target == "k_proj" || target == "v_proj") && model.attends_to_latents)
      add({"kv_a_proj_with_mqa"});
    else if (target == "k_proj" || target == "v_proj")
      add({"kv_a_proj_with_mqa", "kv_b_proj"});
    else
      add({target.c_str()});
  }
  return out;
}

/// PEFT's rule for rank_pattern and alpha_pattern.
template <typename T>
std::optional<T> find_pattern(const std::vector<std::pair<std::string, T>>& patterns, std::string_view module, const char* key) {
  for (const auto& [pattern, value] : patterns)
    if (std::regex_match(std::string(module), compile(fmt::format("(.*\\.)?({})", pattern), key))) return value;
  return std::nullopt;
}

void add_adapter(std::vector<TensorSpec>& specs, const TensorTable& model, bool attends_to_latents, std::int64_t layer,
                 const std::function<std::optional<AdapterScale>(const std::string&)>& find) {
  std::vector<TensorSpec> bs;
  for (const TensorSpec& of : model.tensors()) {
    if (of.layer != layer || !of.is_matrix() || !lora_b_of(of.slot)) continue;
    const std::string module = module_of(of.name);
    const std::optional<AdapterScale> scale = find(module);
    if (!scale) continue;
    if (attends_to_latents && of.block == Block::kKvUp)
      fail(ErrorCode::kInvalidArgument,
           "lora: an adapter of '{}', whose matrix attention to latents applies to queries: wanted none of it, or latent_attention = "
           "\"heads\" in [trainer.model] and [inference.model]",
           module);
    TensorSpec a = of;
    a.name = module + ".lora_A.weight";
    a.shape = {scale->rank, of.shape[1]};
    a.block = *lora_a_of(of.block);
    a.is_shared = false;
    a.trainable = true;
    a.is_eight_bit = a.rounds_inputs = false;
    a.lora_scale = scale->scale;
    TensorSpec b = a;
    b.name = module + ".lora_B.weight";
    b.shape = {of.shape[0], scale->rank};
    b.block = *lora_b_of(of.slot);
    specs.push_back(std::move(a));
    bs.push_back(std::move(b));
  }
  specs.insert(specs.end(), bs.begin(), bs.end());
}

/// The modules that are trained whole. Those of one block stay together: q, k and v are one matrix when the model computes.
void add_saved(std::vector<TensorSpec>& specs, const TensorTable& model, const std::vector<ModulePattern>& saved) {
  for (const BlockSpec& block : model.blocks()) {
    const auto tensors = model.tensors_of(block);
    if (tensors.front().is_exact()) continue;  // nothing trains it
    const auto is_saved = [&](const TensorSpec& spec) { return matches_any(saved, spec.name) || matches_any(saved, module_of(spec.name)); };
    const auto count = std::ranges::count_if(tensors, is_saved);
    if (count == 0) continue;
    if (block.kind == Block::kSinks &&
        std::ranges::none_of(tensors, [&](const TensorSpec& spec) { return matches_any(saved, module_of(spec.name)); }))
      fail(ErrorCode::kNotImplemented, "lora.modules_to_save names '{}', which is no module of its own in PEFT's files",
           tensors.front().name);
    if (count != static_cast<std::ptrdiff_t>(tensors.size())) {
      std::vector<std::string> names;
      for (const TensorSpec& spec : tensors) names.push_back(module_of(spec.name));
      fail(ErrorCode::kInvalidArgument, "lora.modules_to_save names some of {}, which are one matrix here: name all of them, or none",
           fmt::join(names, ", "));
    }
    for (const TensorSpec& spec : tensors) specs.push_back(spec);
  }
}

}  // namespace

std::string module_of(std::string_view tensor_name) { return std::string(tensor_name.substr(0, tensor_name.rfind('.'))); }

AdapterScale scale_of(const AdapterConfig& config, std::string_view module) {
  const std::int64_t rank = find_pattern(config.rank_pattern, module, "rank_pattern").value_or(config.rank);
  const double alpha = find_pattern(config.alpha_pattern, module, "alpha_pattern").value_or(config.alpha);
  const double divisor = config.rank_stabilized ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank);
  return {rank, static_cast<float>(alpha / divisor)};
}

TensorTablePtr make_adapter_table(const ModelConfig& model, const std::function<std::optional<AdapterScale>(const std::string&)>& find) {
  const TensorTablePtr of_model = make_tensor_table(model);
  std::vector<TensorSpec> specs;
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer) add_adapter(specs, *of_model, model.attends_to_latents, layer, find);
  return std::make_shared<const TensorTable>(std::move(specs), false);
}

TensorTablePtr make_adapter_table(const ModelConfig& model, const AdapterConfig& config) {
  const TensorTablePtr of_model = make_tensor_table(model);
  const std::vector<ModulePattern> targets = patterns_of(targets_of(model, config.target_modules), "target_modules"),
                                   saved = patterns_of(config.modules_to_save, "modules_to_save");
  std::vector<std::string> adaptable, all;
  for (const TensorSpec& spec : of_model->tensors()) {
    all.push_back(spec.name);
    all.push_back(module_of(spec.name));
    if (spec.is_matrix() && lora_b_of(spec.slot)) adaptable.push_back(module_of(spec.name));
  }
  refuse_stacked_experts(model, config);
  check_all_match(targets, adaptable, "target_modules", *of_model, true, passed_over(model, config.target_modules));
  check_all_match(saved, all, "modules_to_save", *of_model, false);
  for (const auto& [key, pattern] : config.rank_pattern)
    if (pattern < 1 || pattern > ops::kMaxLoraRank)
      fail(ErrorCode::kInvalidArgument, "lora.rank_pattern: '{}' is {}, wanted 1 to {}", key, pattern, ops::kMaxLoraRank);

  std::vector<TensorSpec> specs;
  add_saved(specs, *of_model, saved);
  const auto find = [&](const std::string& module) -> std::optional<AdapterScale> {
    if (!matches_any(targets, module) || matches_any(saved, module)) return std::nullopt;
    return scale_of(config, module);
  };
  bool adapts = false;
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer) {
    const std::size_t before = specs.size();
    add_adapter(specs, *of_model, model.attends_to_latents, layer, find);
    adapts = adapts || specs.size() > before;
  }
  if (config.dropout > 0 && std::ranges::any_of(specs, [](const TensorSpec& spec) { return spec.expert >= 0 && is_lora(spec.block); }))
    fail(ErrorCode::kNotImplemented,
         "lora.dropout is {}, and lora.target_modules names experts, whose adapters have no dropout; set it to 0, or name the modules of "
         "attention alone",
         config.dropout);
  if (!adapts)
    fail(ErrorCode::kInvalidArgument, "lora.target_modules adapts no module of this model; there are: {}",
         kinds_of_modules(*of_model, true));
  return std::make_shared<const TensorTable>(std::move(specs), of_model->has_tied_head());
}

}  // namespace prl::nn
