#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/chat_template.hpp"
#include "text/tokenizer.hpp"

namespace prl::text {

/// A conversation as tokens, with where each token came from. All vectors have the length of ids.
struct RenderedConversation {
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> message_indices;  ///< index into the messages; -1 for scaffold (default system text, tools, newlines)
  std::vector<std::uint8_t> sampled_mask;     ///< 1 for tokens the model itself would emit: an assistant body and its end token
  std::vector<std::uint8_t> is_content;       ///< 1 for tokens of a message's own text, 0 for headers and markers
};

enum class ToolCallStatus { kOk, kInvalidJson, kUnclosedBlock, kMissingName, kMalformed, kUnknownTool };
std::string_view to_string(ToolCallStatus status) noexcept;

struct ParsedToolCall {
  std::string id;                ///< "call_" and 24 hex digits, unique per process; of Kimi K2 what the model wrote ("functions.f:0")
  std::string name;              ///< empty unless it could be read
  boost::json::value arguments;  ///< an object when status is kOk; numbers beyond 64 bits lose digits, lone surrogates are U+FFFD
  std::string arguments_text;    ///< the same as the model wrote it: what clients get
  std::string raw;               ///< the markup's inside, as generated
  ToolCallStatus status = ToolCallStatus::kOk;
};

/// A completion taken apart. Markup that is not a usable tool call stays in `content` too.
struct ParsedResponse {
  std::string content;
  std::optional<std::string> reasoning_content;
  std::vector<ParsedToolCall> tool_calls;
  /// The calls with status kOk in OpenAI form ({id, type, function: {name, arguments as JSON text}}).
  boost::json::array openai_tool_calls() const;
};

/// What happens to earlier reasoning when a conversation goes on.
enum class ThinkingRetention {
  kAuto,       ///< the family's default
  kTemplate,   ///< dropped as the template drops it: a bridge that would keep it is refused
  kToolCycle,  ///< kept within an unfinished tool loop, dropped at the next user message
  kAll,        ///< kept always
};

struct RendererOptions {
  std::string name = "auto";          ///< one of renderer_names(), or "auto" with a known model_name
  std::string model_name = {};        ///< only for "auto"
  std::string tool_parser = {};       ///< for "default": "" or one of tool_parser_names()
  std::string reasoning_parser = {};  ///< for "default": "" or "think"
  ThinkingRetention thinking_retention = ThinkingRetention::kAuto;
  boost::json::object template_kwargs = {};  ///< enable_thinking and whatever the template takes
};

/// Turns conversations into token ids and completions back into messages, for one model family.
///
/// Threads  immutable; const methods may run on many threads at once.
/// Errors   Error{kInvalidArgument} naming the message index for messages the family cannot express.
class Renderer {
 public:
  virtual ~Renderer() = default;
  virtual std::string_view name() const noexcept = 0;

  /// Equal to the model's own chat template for the inputs both cover. `tools` empty: none.
  virtual RenderedConversation render(const boost::json::array& messages, const boost::json::array& tools,
                                      bool add_generation_prompt) const = 0;
  std::vector<std::int32_t> render_ids(const boost::json::array& messages, const boost::json::array& tools,
                                       bool add_generation_prompt) const {
    return render(messages, tools, add_generation_prompt).ids;
  }
  /// The prompt of the next turn, beginning with exactly prev_prompt_ids + prev_completion_ids, with the turn closed (a
  /// completion cut by a length limit gets its end token), the new messages and the generation prompt after it.
  /// nullopt when that cannot be promised: assistant messages among the new ones, reasoning that must be dropped, an
  /// unknown family. The caller then renders anew and starts a new training sample. message_indices count the new messages; they are -1
  /// for all ids before them.
  virtual std::optional<RenderedConversation> bridge_to_next_turn(std::span<const std::int32_t> prev_prompt_ids,
                                                                  std::span<const std::int32_t> prev_completion_ids,
                                                                  const boost::json::array& new_messages,
                                                                  const boost::json::array& tools) const = 0;
  /// Ids that end a turn, ascending.
  virtual std::vector<std::int32_t> stop_token_ids() const = 0;
  /// What opens the first tool call in the text of a reply, for readers of streams; empty if calls have no marker or are not read.
  virtual std::string_view tool_call_mark() const noexcept { return {}; }
  /// Whether results of tools are written with the name of their tool: callers who know it put it into `name` of those messages.
  virtual bool wants_tool_names() const noexcept { return false; }
  /// Never throws on model output. `prompt_ids`, when given, tells whether the prompt already opened a think block.
  virtual ParsedResponse parse_response(std::span<const std::int32_t> completion_ids, const boost::json::array& tools = {},
                                        std::span<const std::int32_t> prompt_ids = {}) const = 0;
};

/// Names make_renderer knows: default, chatml, qwen2.5, qwen3, ...
const std::vector<std::string>& renderer_names();
/// Names of tool parsers that "default" knows: hermes, qwen3_coder, glm45, ...; several may mean the same form.
std::vector<std::string_view> tool_parser_names();
/// The tool parser for models with this chat template, by the markers that it writes; "" if it has no calls that are known here.
std::string_view tool_parser_of_template(std::string_view chat_template) noexcept;
/// `chat_template` is used by "default" and may be null for the others; "qwen3.5" and its like ask it whether the model thinks by default.
/// Error{kInvalidArgument} for an unknown name, or for "auto" with a model that is not in the table (fine-tunes and local folders must name
/// their renderer); Error{kNotImplemented} for a family of prime-rl that is not built yet.
std::unique_ptr<Renderer> make_renderer(const RendererOptions& options, std::shared_ptr<const Tokenizer> tokenizer,
                                        std::shared_ptr<const ChatTemplate> chat_template);

/// Which roles are trained on.
struct LossMaskRoles {
  bool system = false;
  bool user = false;
  bool assistant = true;
  bool tool = false;
};

struct MaskedSample {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> mask;  ///< 1: the token is a training target
  bool eos_appended = false;       ///< the template never wrote EOS, so one was added and is trained
};

/// Tokens and loss mask of one conversation by rendering message after message: each longer render must begin with the ids
/// of the one before. The new tokens take the role's flag; the assistant header goes to the message before it (a render that
/// ends before an assistant message includes the generation prompt); consecutive tool messages count as one.
/// The first `num_prompt_messages` are never trained, whatever their role, and are rendered as one.
/// Error{kInvalidArgument} naming the message index whose render broke the prefix (templates that drop earlier reasoning do).
MaskedSample incremental_loss_mask(const Tokenizer& tokenizer, const ChatTemplate& chat_template, const boost::json::array& messages,
                                   const boost::json::array& tools, const LossMaskRoles& roles = {},
                                   const boost::json::object& template_kwargs = {}, std::size_t num_prompt_messages = 0);

/// Template kwargs that the renderer of this name reads; nullopt for "default", whose template may read any.
std::optional<std::span<const std::string_view>> known_template_kwargs(std::string_view renderer) noexcept;

/// Puts today's date where the renderer of this name takes one from the clock and `kwargs` have none ("gpt-oss", unless it writes no system
/// message), with a warning: what is rendered on another day is different. Who makes several renderers that must agree calls it first.
void pin_template_kwargs(std::string_view renderer, boost::json::object& kwargs);

}  // namespace prl::text
