#pragma once

#include <memory>

#include "text/renderer.hpp"

/// One maker per family; make_renderer picks by name.
namespace prl::text::renderers {

/// chatml, qwen2.5, qwen3 and smollm2: turns between <|im_start|> and <|im_end|>.
std::unique_ptr<Renderer> make_chatml_family(std::string_view name, const RendererOptions& options,
                                             std::shared_ptr<const Tokenizer> tokenizer);
std::unique_ptr<Renderer> make_prime_qwen3(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer);
std::unique_ptr<Renderer> make_llama3(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer);
std::unique_ptr<Renderer> make_glm45(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer);
std::unique_ptr<Renderer> make_minimax_m2(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer);
/// deepseek-v3 and deepseek-r1.
std::unique_ptr<Renderer> make_deepseek(std::string_view name, const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer);
/// qwen3.5, qwen3.6 and qwen3.8. `chat_template`, if there is one, says whether the model thinks by default.
std::unique_ptr<Renderer> make_qwen35(std::string_view name, const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer,
                                      const ChatTemplate* chat_template);
std::unique_ptr<Renderer> make_kimi_k2(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer);
std::unique_ptr<Renderer> make_gpt_oss(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer);
/// Any model, by its own chat template.
std::unique_ptr<Renderer> make_default(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer,
                                       std::shared_ptr<const ChatTemplate> chat_template);

}  // namespace prl::text::renderers
