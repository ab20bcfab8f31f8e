#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <cstdint>
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "text/tokenizer.hpp"

namespace prl::text {

/// Messages as clients send them, in the form templates expect: null members dropped, null content "", a list of text parts
/// joined by newlines, tool-call arguments given as JSON text decoded (text that is no JSON object stays as it is).
/// With `keeps_images` the content of a message with images stays a list, of {"type": "text"} and {"type": "image"}.
/// Error{kInvalidArgument} naming the message index: no object, no role, a part that is not text, nor an image where these are kept.
boost::json::array normalize_messages(const boost::json::array& messages, bool keeps_images = false);

/// What a template sees besides the messages.
struct RenderOptions {
  bool add_generation_prompt = false;
  boost::json::array tools = {};    ///< OpenAI function envelopes; empty renders as if there were none
  boost::json::object kwargs = {};  ///< chat_template_kwargs (enable_thinking, ...); they win over special tokens
  bool keeps_images = false;        ///< of render(): normalize_messages'
};

/// A model's Jinja chat template, rendered as transformers' apply_chat_template does.
///
/// Threads  immutable; render may run on many threads at once.
/// Errors   Error{kInvalidArgument} with the template's line: syntax, raise_exception, an operation Python would refuse, or a
///          limit (steps, depth, output) that a hostile template hit.
class ChatTemplate {
 public:
  /// chat_template.jinja wins over tokenizer_config.json's chat_template (a text, or a list of named ones).
  /// Error{kNotFound} if the folder has none: say which template to use in the config.
  static ChatTemplate load(const std::filesystem::path& folder, const Tokenizer& tokenizer);
  static bool exists(const std::filesystem::path& folder);
  /// The Jinja text itself, or what the file holds that it names. Error{kNotFound, kIo} naming the file.
  static std::string read_text_or_file(std::string_view source);
  /// `source` is the Jinja text, or the path of a file that holds it (the config keys tokenizer.chat_template take both).
  static ChatTemplate from_text_or_file(std::string_view source, const Tokenizer& tokenizer);
  /// `special_tokens` maps bos_token, eos_token, ... to their spelling.
  explicit ChatTemplate(std::string source, boost::json::object special_tokens = {});
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  /// normalize_messages, then render_raw.
  std::string render(const boost::json::array& messages, const RenderOptions& options = {}) const;
  /// Exactly what Jinja gives for these messages.
  std::string render_raw(const boost::json::array& messages, const RenderOptions& options = {}) const;
  /// The default template's text.
  const std::string& source() const;
  /// The clock behind strftime_now; the system's local time unless set. Set it to make dated templates replayable.
  void set_clock(std::function<std::time_t()> now);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The plain ChatML template: every message between <|im_start|>role and <|im_end|>, no default system text, hermes tools.
std::string_view chatml_template() noexcept;

}  // namespace prl::text
