#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.hpp"
#include "text/renderers/families.hpp"
#include "text/renderers/harmony_parser.hpp"
#include "text/renderers/response_parser.hpp"

// Any model by its own template: exact ids, but no knowledge of what in them is body, and no bridge.
namespace prl::text::renderers {
namespace {

namespace json = boost::json;

class DefaultRenderer : public Renderer {
 public:
  DefaultRenderer(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer,
                  std::shared_ptr<const ChatTemplate> chat_template)
      : tokenizer_(std::move(tokenizer)), template_(std::move(chat_template)), kwargs_(options.template_kwargs) {
    if (template_ == nullptr)
      fail(ErrorCode::kInvalidArgument,
           "[renderer] 'default' needs a chat template; the model folder has none, set tokenizer.chat_template");
    if (options.thinking_retention != ThinkingRetention::kAuto && options.thinking_retention != ThinkingRetention::kTemplate)
      fail(ErrorCode::kInvalidArgument,
           "[renderer] 'default' cannot keep reasoning that its template drops; name the model's own renderer");
    const auto syntax = options.tool_parser.empty() ? ToolSyntax::kNone : tool_syntax_of(options.tool_parser);
    if (!syntax)
      fail(ErrorCode::kInvalidArgument, "[renderer] tool_parser '{}' is not known; known: {}", options.tool_parser,
           fmt::join(tool_parser_names(), ", "));
    if (!options.reasoning_parser.empty() && options.reasoning_parser != "think")
      fail(ErrorCode::kInvalidArgument, "[renderer] reasoning_parser '{}' is not known; known: think", options.reasoning_parser);
    parse_.stop_ids = tokenizer_->stop_ids();
    parse_.tools = *syntax;
    parse_.reads_thinking = !options.reasoning_parser.empty();
    if (*syntax != ToolSyntax::kHarmony) return;
    harmony_ = HarmonyTokens::find(*tokenizer_);
    if (!harmony_)
      fail(ErrorCode::kInvalidArgument,
           "[renderer] tool_parser '{}' needs <|start|>, <|channel|>, <|message|>, <|end|>, <|return|> and "
           "<|call|>, which the tokenizer lacks",
           options.tool_parser);
    for (const std::int32_t id : {harmony_->stop, harmony_->call})
      if (std::find(parse_.stop_ids.begin(), parse_.stop_ids.end(), id) == parse_.stop_ids.end()) parse_.stop_ids.push_back(id);
    std::sort(parse_.stop_ids.begin(), parse_.stop_ids.end());
  }

  std::string_view name() const noexcept override { return "default"; }
  std::vector<std::int32_t> stop_token_ids() const override { return parse_.stop_ids; }
  std::string_view tool_call_mark() const noexcept override { return tool_open_mark(parse_.tools); }

  RenderedConversation render(const json::array& messages, const json::array& tools, bool add_generation_prompt) const override {
    RenderedConversation out;
    out.ids = encode(messages, tools, add_generation_prompt);
    out.message_indices.assign(out.ids.size(), -1);
    out.sampled_mask.assign(out.ids.size(), 0);
    out.is_content.assign(out.ids.size(), 0);
    // Tokens that message after message adds, for as long as the shorter renders are prefixes.
    std::size_t done = 0;
    json::array head;
    for (std::size_t i = 0; i < messages.size(); ++i) {
      head.push_back(messages[i]);
      const std::vector<std::int32_t> ids = i + 1 == messages.size() && !add_generation_prompt ? out.ids : encode(head, tools, false);
      if (ids.size() > out.ids.size() || !std::equal(ids.begin(), ids.end(), out.ids.begin())) break;
      for (; done < ids.size(); ++done) out.message_indices[done] = static_cast<std::int32_t>(i);
    }
    return out;
  }

  std::optional<RenderedConversation> bridge_to_next_turn(std::span<const std::int32_t>, std::span<const std::int32_t>, const json::array&,
                                                          const json::array&) const override {
    return std::nullopt;
  }

  ParsedResponse parse_response(std::span<const std::int32_t> completion_ids, const json::array& tools,
                                std::span<const std::int32_t> prompt_ids) const override {
    if (harmony_) return parse_harmony(*tokenizer_, *harmony_, completion_ids, prompt_ids);
    if (parse_.tools != ToolSyntax::kNone || parse_.reads_thinking)
      return parse_tagged(*tokenizer_, completion_ids, prompt_ids, tools, parse_);
    ParsedResponse out;
    const auto is_stop = [&](std::int32_t id) {
      return std::find(parse_.stop_ids.begin(), parse_.stop_ids.end(), id) != parse_.stop_ids.end();
    };
    const auto end = std::find_if(completion_ids.begin(), completion_ids.end(), is_stop);
    out.content = tokenizer_->decode(completion_ids.first(static_cast<std::size_t>(end - completion_ids.begin())), true);
    return out;
  }

 private:
  std::vector<std::int32_t> encode(const json::array& messages, const json::array& tools, bool add_generation_prompt) const {
    // Who has images in messages knows that the template writes them.
    const RenderOptions options{.add_generation_prompt = add_generation_prompt, .tools = tools, .kwargs = kwargs_, .keeps_images = true};
    return tokenizer_->encode(template_->render(messages, options));
  }

  std::shared_ptr<const Tokenizer> tokenizer_;
  std::shared_ptr<const ChatTemplate> template_;
  json::object kwargs_;
  ParseOptions parse_;
  std::optional<HarmonyTokens> harmony_;
};

}  // namespace

std::unique_ptr<Renderer> make_default(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer,
                                       std::shared_ptr<const ChatTemplate> chat_template) {
  return std::make_unique<DefaultRenderer>(options, std::move(tokenizer), std::move(chat_template));
}

}  // namespace prl::text::renderers
