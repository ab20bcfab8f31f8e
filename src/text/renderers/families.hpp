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
/// Any model, by its own chat template.
std::unique_ptr<Renderer> make_default(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer,
                                       std::shared_ptr<const ChatTemplate> chat_template);

}  // namespace prl::text::renderers
