#include "text/renderer.hpp"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/renderers/families.hpp"

namespace prl::text {
namespace {

namespace json = boost::json;

// Models whose renderer is certain. Source: the `renderers` package; fine-tunes are left out on purpose.
constexpr std::pair<std::string_view, std::string_view> kModels[] = {
    {"Qwen/Qwen3-0.6B", "qwen3"},
    {"Qwen/Qwen3-1.7B", "qwen3"},
    {"Qwen/Qwen3-4B", "qwen3"},
    {"Qwen/Qwen3-8B", "qwen3"},
    {"Qwen/Qwen3-14B", "qwen3"},
    {"Qwen/Qwen3-32B", "qwen3"},
    {"Qwen/Qwen3-30B-A3B", "qwen3"},
    {"Qwen/Qwen3-235B-A22B", "qwen3"},
    {"Qwen/Qwen3-4B-Instruct-2507", "qwen3"},
    {"Qwen/Qwen3-4B-Thinking-2507", "qwen3"},
    {"Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3"},
    {"Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3"},
    {"Qwen/Qwen3.5-0.8B", "qwen3.5"},
    {"Qwen/Qwen3.5-2B", "qwen3.5"},
    {"Qwen/Qwen3.5-4B", "qwen3.5"},
    {"Qwen/Qwen3.5-9B", "qwen3.5"},
    {"Qwen/Qwen3.5-35B-A3B", "qwen3.5"},
    {"Qwen/Qwen3.5-122B-A10B", "qwen3.5"},
    {"Qwen/Qwen3.5-397B-A17B", "qwen3.5"},
    {"Qwen/Qwen3.6-35B-A3B", "qwen3.6"},
    {"Qwen/Qwen3.8-27B", "qwen3.8"},
    {"Qwen/Qwen3.8-Flash-Next", "qwen3.8"},
    {"PrimeIntellect/Qwen3-0.6B", "prime-qwen3"},
    {"PrimeIntellect/Qwen3-1.7B", "prime-qwen3"},
    {"meta-llama/Llama-3.2-1B-Instruct", "llama-3"},
    {"meta-llama/Llama-3.2-3B-Instruct", "llama-3"},
    {"Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5"},
    {"Qwen/Qwen2.5-1.5B-Instruct", "qwen2.5"},
    {"Qwen/Qwen2.5-3B-Instruct", "qwen2.5"},
    {"Qwen/Qwen2.5-7B-Instruct", "qwen2.5"},
    {"Qwen/Qwen2.5-14B-Instruct", "qwen2.5"},
    {"Qwen/Qwen2.5-32B-Instruct", "qwen2.5"},
    {"Qwen/Qwen2.5-72B-Instruct", "qwen2.5"},
    {"HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2"},
    {"HuggingFaceTB/SmolLM2-360M-Instruct", "smollm2"},
    {"HuggingFaceTB/SmolLM2-1.7B-Instruct", "smollm2"},
    {"THUDM/GLM-4.5-Air", "glm-4.5"},
    {"zai-org/GLM-4.5-Air", "glm-4.5"},
    {"MiniMaxAI/MiniMax-M2", "minimax-m2"},
    {"MiniMaxAI/MiniMax-M2.5", "minimax-m2"},
    {"deepseek-ai/DeepSeek-V3", "deepseek-v3"},
    {"deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"},
    {"deepseek-ai/DeepSeek-R1", "deepseek-r1"},
    {"deepseek-ai/DeepSeek-R1-0528", "deepseek-r1"},
    {"moonshotai/Kimi-K2-Instruct", "kimi-k2"},
    {"openai/gpt-oss-20b", "gpt-oss"},
    {"openai/gpt-oss-120b", "gpt-oss"},
};

// Names that prime-rl's configs may carry and that have no renderer here yet.
constexpr std::string_view kNotBuilt[] = {"qwen3-vl",    "glm-5",      "glm-5.1",          "deepseek-v4", "hy3",     "kimi-k2.5",
                                          "laguna-xs.2", "nemotron-3", "nemotron-3-ultra", "gemma4",      "inkling", "mistral3"};

}  // namespace

std::string_view to_string(ToolCallStatus status) noexcept {
  switch (status) {
    case ToolCallStatus::kOk: return "ok";
    case ToolCallStatus::kInvalidJson: return "invalid_json";
    case ToolCallStatus::kUnclosedBlock: return "unclosed_block";
    case ToolCallStatus::kMissingName: return "missing_name";
    case ToolCallStatus::kMalformed: return "malformed_structure";
    case ToolCallStatus::kUnknownTool: return "unknown_tool";
  }
  return "unknown";
}

json::array ParsedResponse::openai_tool_calls() const {
  json::array out;
  for (const ParsedToolCall& call : tool_calls) {
    if (call.status != ToolCallStatus::kOk) continue;
    // Arguments given as a JSON string are its text.
    const std::string arguments = call.arguments.is_string()
                                      ? std::string(call.arguments.get_string().data(), call.arguments.get_string().size())
                                      : call.arguments_text;
    out.push_back(json::object{{"id", json::string(call.id)},
                               {"type", "function"},
                               {"function", json::object{{"name", json::string(call.name)}, {"arguments", json::string(arguments)}}}});
  }
  return out;
}

const std::vector<std::string>& renderer_names() {
  static const std::vector<std::string> kNames = {"default", "chatml",  "qwen2.5",    "qwen3",       "prime-qwen3", "smollm2",
                                                  "llama-3", "glm-4.5", "minimax-m2", "deepseek-v3", "deepseek-r1", "qwen3.5",
                                                  "qwen3.6", "qwen3.8", "kimi-k2",    "gpt-oss"};
  return kNames;
}

std::optional<std::span<const std::string_view>> known_template_kwargs(std::string_view renderer) noexcept {
  static constexpr std::string_view kThinking[] = {"enable_thinking"};
  static constexpr std::string_view kQwen36[] = {"enable_thinking", "preserve_thinking"};
  static constexpr std::string_view kQwen38[] = {"enable_thinking", "preserve_thinking", "reasoning_effort"};
  static constexpr std::string_view kMiniMax[] = {"model_identity"};
  static constexpr std::string_view kLlama3[] = {"date_string", "tools_in_user_message"};
  static constexpr std::string_view kGptOss[] = {"reasoning_effort", "conversation_start_date", "knowledge_cutoff",
                                                 "model_identity",   "use_system_prompt",       "auto_drop_analysis"};
  if (renderer == "default") return std::nullopt;
  if (renderer == "qwen3" || renderer == "qwen3.5" || renderer == "glm-4.5") return kThinking;
  if (renderer == "qwen3.6") return kQwen36;
  if (renderer == "qwen3.8") return kQwen38;
  if (renderer == "minimax-m2") return kMiniMax;
  if (renderer == "llama-3") return kLlama3;
  if (renderer == "gpt-oss") return kGptOss;
  return std::span<const std::string_view>{};
}

std::unique_ptr<Renderer> make_renderer(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer,
                                        std::shared_ptr<const ChatTemplate> chat_template) {
  std::string_view name = options.name;
  if (name == "auto") {
    const auto* model = std::find_if(std::begin(kModels), std::end(kModels), [&](const auto& m) { return m.first == options.model_name; });
    if (model == std::end(kModels))
      fail(ErrorCode::kInvalidArgument,
           "renderer.name: 'auto' does not know the model '{}'; fine-tunes and local folders must name one of {}", options.model_name,
           fmt::join(renderer_names(), ", "));
    name = model->second;
  }
  if (name == "default") return renderers::make_default(options, std::move(tokenizer), std::move(chat_template));
  if (name == "prime-qwen3") return renderers::make_prime_qwen3(options, std::move(tokenizer));
  if (name == "llama-3") return renderers::make_llama3(options, std::move(tokenizer));
  if (name == "glm-4.5") return renderers::make_glm45(options, std::move(tokenizer));
  if (name == "minimax-m2") return renderers::make_minimax_m2(options, std::move(tokenizer));
  if (name == "deepseek-v3" || name == "deepseek-r1") return renderers::make_deepseek(name, options, std::move(tokenizer));
  if (name == "qwen3.5" || name == "qwen3.6" || name == "qwen3.8")
    return renderers::make_qwen35(name, options, std::move(tokenizer), chat_template.get());
  if (name == "gpt-oss") return renderers::make_gpt_oss(options, std::move(tokenizer));
  if (name == "kimi-k2") return renderers::make_kimi_k2(options, std::move(tokenizer));
  if (auto renderer = renderers::make_chatml_family(name, options, std::move(tokenizer))) return renderer;
  if (std::find(std::begin(kNotBuilt), std::end(kNotBuilt), name) != std::end(kNotBuilt))
    fail(ErrorCode::kNotImplemented, "renderer.name: '{}' is not built yet; built are {}", name, fmt::join(renderer_names(), ", "));
  fail(ErrorCode::kInvalidArgument, "renderer.name: '{}' is not known; known are {}", name, fmt::join(renderer_names(), ", "));
}

}  // namespace prl::text
