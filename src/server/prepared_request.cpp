#include "server/prepared_request.hpp"

#include <algorithm>
#include <charconv>
#include <limits>

#include "server/channel_stream.hpp"
#include "server/json_fields.hpp"
#include "server/kv_transfer.hpp"
#include "server/prompt_images.hpp"
#include "server/request_fields.hpp"
#include "server/responses_request.hpp"
#include "server/sampling_fields.hpp"
#include "server/server_context.hpp"
#include "server/structured_output.hpp"
#include "server/thinking_budget.hpp"
#include "text/json_python.hpp"

namespace prl::server {
namespace {

constexpr std::int32_t kCompletionsDefaultMaxTokens = 16;  // OpenAI's default of the legacy route

template <typename T, typename U>
void assign(T& target, const std::optional<U>& value) {
  if (value) target = static_cast<T>(*value);
}

/// max_tokens is clamped to the room the longest prompt leaves; a prompt without room is refused before.
void fit_max_tokens(PreparedRequest& out, const ServerContext& context, std::optional<std::int64_t> wanted) {
  std::int64_t longest = 0;
  for (const auto& prompt : out.prompts) {
    if (prompt.empty()) net::fail_param("prompt", "the prompt has no tokens; at least one is needed");
    check_prompt_fits(context, static_cast<std::int64_t>(prompt.size()));
    longest = std::max(longest, static_cast<std::int64_t>(prompt.size()));
  }
  if (wanted && out.sampling.min_tokens > *wanted)
    net::fail_param("min_tokens", fmt::format("min_tokens is {}, which is more than max_tokens, {}", out.sampling.min_tokens, *wanted));
  const std::int64_t room = context.backend->max_model_len() - longest;
  const std::int64_t limit = std::min(room, out.max_tokens_limit.value_or(room));
  const std::int64_t max_tokens = std::min(wanted.value_or(limit), limit);
  out.sampling.max_tokens = static_cast<std::int32_t>(max_tokens);
  out.sampling.min_tokens = std::min(out.sampling.min_tokens, *out.sampling.max_tokens);
}

/// The id the client gives the request, in the body or a header.
std::string own_id(const JsonFields& fields, const net::HttpRequest& request) {
  return fields.string("request_id").value_or(std::string(request.headers.get("X-Request-Id")));
}

void check_modalities(const JsonFields& fields) {
  const auto wanted = fields.strings("modalities", 8);
  if (!wanted) return;
  for (const std::string& modality : *wanted)
    if (modality != "text") net::fail_param("modalities", fmt::format("modalities: only text is built, found '{}'", modality));
}

void truncate_prompts(const JsonFields& fields, std::vector<std::vector<std::int32_t>>& prompts) {
  const auto keep = fields.integer("truncate_prompt_tokens", 1, kAnyInt);
  if (!keep) return;
  for (auto& prompt : prompts)
    if (static_cast<std::int64_t>(prompt.size()) > *keep) prompt.erase(prompt.begin(), prompt.end() - *keep);
}

/// Stop tokens of the model, unless the request wants to run past them.
void add_model_stops(PreparedRequest& out, const ServerContext& context) {
  out.own_stop_ids = out.sampling.stop_token_ids;
  if (out.sampling.ignore_eos) return;
  auto& ids = out.sampling.stop_token_ids;
  ids.insert(ids.end(), context.tokenizer->stop_ids().begin(), context.tokenizer->stop_ids().end());
  // <|call|> ends a turn too, whatever the model's configuration says.
  if (out.reads_channels)
    for (const std::int32_t id : context.renderer->stop_token_ids()) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

/// detokenize and what else says how text is shown.
void read_text_options(PreparedRequest& out, const JsonFields& fields) {
  assign(out.detokenize, fields.boolean("detokenize"));
  if (!out.detokenize && !out.sampling.stop.empty())
    net::fail_param(fields.full_name("stop"), fields.full_name("stop") + ": stop strings are found in text, and detokenize is false");
}

void read_envelope(PreparedRequest& out, const JsonFields& fields, const ServerContext& context, const net::HttpRequest& request) {
  out.session_id = std::string(request.headers.get("X-Session-ID"));
  if (auto salt = fields.string("cache_salt")) out.cache_salt = std::move(*salt);
  assign(out.priority, fields.integer("priority", std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()));
  assign(out.is_stream, fields.boolean("stream"));
  if (const boost::json::object* options = fields.object("stream_options")) {
    const JsonFields stream_fields(*options, "stream_options.");
    assign(out.include_usage, stream_fields.boolean("include_usage"));
    assign(out.continuous_usage, stream_fields.boolean("continuous_usage_stats"));
    if (!out.is_stream) net::fail_param("stream_options", "stream_options are only allowed when stream is true");
  }
  assign(out.return_token_ids, fields.boolean("return_token_ids"));
  assign(out.tokens_as_ids, fields.boolean("return_tokens_as_token_ids"));
  out.kv = read_kv_order(fields, context);
  out.return_prompt_logprobs = out.sampling.prompt_logprobs.has_value();
  if (out.is_stream && out.return_prompt_logprobs)
    net::fail_param("prompt_logprobs", "prompt_logprobs are not available when stream is true");
}

void check_named_logprobs(const PreparedRequest& request) {
  if (!request.sampling.logprob_token_ids.empty() && !request.want_logprobs)
    net::fail_param("logprob_token_ids", "logprob_token_ids: logprobs must be asked for when logprob_token_ids is set");
}

void read_completion_prompt(PreparedRequest& out, const JsonFields& fields, const ServerContext& context) {
  const boost::json::value* prompt = fields.find("prompt");
  if (!prompt) net::fail_param("prompt", "prompt: wanted a string, a list of strings, or token ids; found nothing");
  const std::int64_t vocab_size = context.backend->vocab_size();
  text::EncodeOptions encode;
  encode.add_special_tokens = fields.boolean("add_special_tokens").value_or(true);
  const bool is_cut = fields.has("truncate_prompt_tokens");
  const auto add_text = [&](const boost::json::string& text) { out.prompts.push_back(encode_prompt(context, text, encode, is_cut)); };
  const auto add_ids = [&](const boost::json::array& ids) {
    if (!is_cut) check_prompt_fits(context, static_cast<std::int64_t>(ids.size()));
    out.prompts.push_back(read_token_ids(ids, "prompt", vocab_size));
  };
  if (prompt->is_string()) {
    add_text(prompt->get_string());
  } else if (prompt->is_array() && !prompt->get_array().empty()) {
    const boost::json::array& list = prompt->get_array();
    if (list.front().is_number()) {
      add_ids(list);
    } else {
      if (list.size() > context.options.max_prompts)
        net::fail_param("prompt",
                        fmt::format("prompt: at most {} prompts per request, found {}", context.options.max_prompts, list.size()));
      for (const auto& item : list) {
        if (item.is_string())
          add_text(item.get_string());
        else if (item.is_array())
          add_ids(item.get_array());
        else
          fields.fail_type("prompt", "a string, a list of strings, or token ids", *prompt);
      }
    }
  } else {
    fields.fail_type("prompt", "a string, a list of strings, or token ids", *prompt);
  }
}

/// Whether the tail of a rendered prompt opened a think block that the completion continues.
bool ends_in_think(std::string_view prompt) {
  while (!prompt.empty() && (prompt.back() == '\n' || prompt.back() == ' ')) prompt.remove_suffix(1);
  return prompt.ends_with("<think>");
}

/// Structured output and tool_choice, which both rule what the text may be. For chat, after `out.tools` and the flags of the
/// parsers are set.
void read_token_rule(PreparedRequest& out, const JsonFields& fields, const ServerContext& context) {
  const auto budget = fields.integer("thinking_token_budget", -1, kAnyInt);
  const bool has_budget = budget && *budget >= 0;
  std::optional<StructuredOutput> wanted = read_structured_output(fields);
  if (std::optional<StructuredOutput> call = read_tool_choice(fields, context, out)) {
    if (wanted) net::fail_param("tool_choice", "tool_choice: a call is asked for, and " + wanted->param + " asks for another form of text");
    wanted = std::move(call);
  }
  const auto refuse_allowed = [&](const std::string& other) {
    if (!out.sampling.allowed_token_ids.empty())
      net::fail_param("allowed_token_ids", "allowed_token_ids: " + other + " decides which tokens may come");
  };
  if (has_budget) refuse_allowed("thinking_token_budget");
  using RulePtr = std::shared_ptr<const wire::TokenRule>;
  const auto with_budget = [&context, budget, has_budget, is_open = out.starts_in_reasoning](RulePtr form) -> RulePtr {
    if (!has_budget) return form;
    const ThinkingMarks marks = context.call_form == CallForm::kHarmony ? kAnalysisMarks : kThinkMarks;
    return std::make_shared<const ThinkingBudget>(*context.tokenizer, marks, static_cast<std::size_t>(*budget), is_open, std::move(form));
  };
  if (!wanted) {
    if (has_budget) out.sampling.token_rule = with_budget(nullptr);
    return;
  }
  refuse_allowed(wanted->param);
  if (out.sampling.ignore_eos) net::fail_param("ignore_eos", "ignore_eos: " + wanted->param + " needs the stop tokens to end the text");
  if (out.sampling.min_tokens > 0) net::fail_param("min_tokens", "min_tokens: " + wanted->param + " decides when the text may end");
  const Thinking thinking = out.starts_in_reasoning ? Thinking::kOpen : out.parse_reasoning ? Thinking::kMaybe : Thinking::kNone;
  out.rule_param = wanted->param;
  if (RulePtr known = find_token_rule(context, *wanted, thinking)) {
    out.sampling.token_rule = thinking == Thinking::kNone ? std::move(known) : with_budget(std::move(known));
    return;
  }
  out.make_rule = [&context, wanted = std::move(*wanted), thinking, with_budget] {
    RulePtr made = make_token_rule(context, wanted, thinking);
    return thinking == Thinking::kNone ? made : with_budget(std::move(made));
  };
}

}  // namespace

std::int64_t PreparedRequest::num_prompt_tokens() const {
  std::int64_t count = 0;
  for (const auto& prompt : prompts) count += static_cast<std::int64_t>(prompt.size());
  return count;
}

void check_prompt_fits(const ServerContext& context, std::int64_t num_tokens, bool is_lower_bound) {
  const std::int64_t max_len = context.backend->max_model_len();
  if (num_tokens < max_len) return;
  fail(ErrorCode::kOverlong,
       "This model's maximum context length is {} tokens. However, your request has {}{} input tokens, which leaves no room for "
       "output. Please reduce the length of the input.",
       max_len, is_lower_bound ? "at least " : "", num_tokens);
}

std::vector<std::int32_t> encode_prompt(const ServerContext& context, std::string_view text, text::EncodeOptions options, bool is_cut) {
  const auto limit = static_cast<std::size_t>(context.backend->max_model_len());
  if (!is_cut && is_beyond(*context.tokenizer, text, limit)) check_prompt_fits(context, static_cast<std::int64_t>(limit), true);
  return context.tokenizer->encode(text, options);
}

bool is_beyond(const text::Tokenizer& tokenizer, std::string_view text, std::size_t max_tokens) {
  // Text has some 4 bytes a token. What is not far longer than that is as quickly tokenized as looked at.
  constexpr std::size_t kManyBytesPerToken = 16;
  constexpr std::size_t kSliceBytes = std::size_t{64} << 10;
  if (text.size() / kManyBytesPerToken <= max_tokens) return false;
  // A cut changes the tokens around it only, so with a margin of a factor of 2 the slices tell.
  std::size_t num_tokens = 0;
  while (!text.empty()) {
    std::size_t size = std::min(kSliceBytes, text.size());
    while (size < text.size() && size > 1 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;  // not inside a character
    num_tokens += tokenizer.encode(text.substr(0, size)).size();
    if (num_tokens > 2 * max_tokens + kManyBytesPerToken) return true;
    text.remove_prefix(size);
  }
  return false;
}

bool is_served_name(const ServerContext& context, const std::string& name) {
  const auto& names = context.options.served_names;
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::string check_model(const ServerContext& context, const net::HttpRequest& request, const boost::json::object& body) {
  auto model = JsonFields(body).string("model");
  if (const std::optional<std::string> run = context.tenants.run_of(request)) {
    if (!model) model = *run;
    if (*model != *run)
      throw net::HttpError(403, ErrorCode::kUnauthorized, fmt::format("the key is that of run '{}', and it may not use '{}'", *run, *model),
                           "model");
  }
  if (!model) return context.options.served_names.front();
  if (is_served_name(context, *model)) return *model;
  AdapterBook* const book = context.backend->adapters();
  if (book == nullptr || !book->knows(*model))
    throw net::HttpError(404, ErrorCode::kNotFound, fmt::format("The model `{}` does not exist.", *model), "model");
  book->require(*model);
  return *model;
}

namespace {

void read_model(PreparedRequest& out, const ServerContext& context, const net::HttpRequest& request, const boost::json::object& body) {
  out.model = check_model(context, request, body);
  if (!is_served_name(context, out.model)) out.adapter = out.model;
}

/// What the template gets besides messages and tools, as vLLM hands it on.
boost::json::object read_template_kwargs(const JsonFields& fields) {
  boost::json::object out;
  if (const boost::json::array* documents = fields.array("documents")) out["documents"] = *documents;
  if (const auto effort = fields.string("reasoning_effort")) {
    out["reasoning_effort"] = *effort;
    if (*effort == "none") out["enable_thinking"] = false;
  }
  if (const boost::json::object* kwargs = fields.object("chat_template_kwargs"))
    for (const auto& [key, value] : *kwargs) out[key] = value;
  return out;
}

std::string assistant_text(const boost::json::value& message) {
  const boost::json::object* object = message.if_object();
  if (!object) return {};
  const auto is_text = [&](const char* name) { return object->if_contains(name) && text::is_text(object->at(name)); };
  if (!is_text("role") || object->at("role") != "assistant" || !is_text("content")) return {};
  return std::string(object->at("content").get_string().data(), object->at("content").get_string().size());
}

}  // namespace

ChatPrompt render_chat(const ServerContext& context, const boost::json::object& body, bool add_special_tokens) {
  if (!context.chat_template)
    net::fail_param("messages", "this model has no chat template; start the server with one, or use /v1/completions");
  const JsonFields fields(body);
  const boost::json::array* messages = fields.array("messages");
  if (!messages || messages->empty()) net::fail_param("messages", "messages: wanted a list with at least one message");
  ChatPrompt out;
  if (const boost::json::array* tools = fields.array("tools")) out.tools = *tools;
  const bool continues = fields.boolean("continue_final_message").value_or(false);
  text::RenderOptions options;
  options.add_generation_prompt = fields.boolean("add_generation_prompt").value_or(!continues);
  if (continues && options.add_generation_prompt)
    net::fail_param("continue_final_message", "continue_final_message and add_generation_prompt exclude each other");
  options.tools = out.tools;
  const PixelsList images = read_images(context, *messages);
  options.keeps_images = !images.empty();
  options.kwargs = read_template_kwargs(fields);
  std::string prompt;
  try {
    prompt = context.chat_template->render(*messages, options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    net::fail_param("messages", error.what());
  }
  out.last_assistant_text = assistant_text(messages->back());
  if (continues) {
    // The text after the last message's content (its end marker) is what the model must not see yet.
    const boost::json::object& last = messages->back().as_object();
    const auto content = JsonFields(last, "messages[-1].").string("content");
    if (!content) net::fail_param("messages", "continue_final_message: the last message has no text to continue");
    std::string_view text = *content;
    while (!text.empty() && (text.back() == ' ' || text.back() == '\n' || text.back() == '\t' || text.back() == '\r'))
      text.remove_suffix(1);
    const std::size_t place = prompt.rfind(text);
    if (place == std::string::npos)
      net::fail_param("messages", "continue_final_message: the template does not show the last message as it is");
    prompt.resize(place + text.size());
  }
  out.ends_in_think = ends_in_think(prompt);
  text::EncodeOptions encode;
  encode.add_special_tokens = add_special_tokens;
  if (!images.empty() && fields.has("truncate_prompt_tokens"))
    net::fail_param("truncate_prompt_tokens", "truncate_prompt_tokens: a prompt with images is not cut");
  out.ids = encode_prompt(context, prompt, encode, fields.has("truncate_prompt_tokens"));
  if (!images.empty()) out.images = place_images(context, images, out.ids);
  return out;
}

namespace {

/// Replies are taken apart by their text, so the text must have the marker of calls also where the tokenizer calls it special.
void show_tool_marks(PreparedRequest& out, const ServerContext& context) {
  const auto mark = context.tokenizer->id_of(context.renderer->tool_call_mark());
  if (mark && context.tokenizer->is_special(*mark)) out.sampling.skip_special_tokens = false;
}

/// Messages in channels are always taken apart: their markers are no text for people.
void read_channels(PreparedRequest& out, const ServerContext& context) {
  out.reads_channels = context.call_form == CallForm::kHarmony;
  if (!out.reads_channels) return;
  const OpenChannel open = open_channel(*context.tokenizer, out.prompts.front());
  out.starts_in_reasoning = open.is_thought();
  // In the body of another channel, that of a message to be continued, no reasoning follows.
  out.parse_reasoning = out.starts_in_reasoning || !open.is_body_begun;
  out.sampling.skip_special_tokens = false;
}

/// A body of the chat route, or one made from another route's, whose members are checked already.
PreparedRequest prepare_chat_body(const ServerContext& context, const net::HttpRequest& request, const boost::json::object& body,
                                  std::string_view id_prefix, bool with_tokens) {
  const JsonFields fields(body);
  PreparedRequest out;
  out.id = context.make_id(id_prefix, own_id(fields, request));
  read_model(out, context, request, body);
  out.sampling = read_sampling(fields, context, context.options.sampling_defaults);
  out.max_tokens_limit = context.options.sampling_defaults.max_tokens;
  read_envelope(out, fields, context, request);
  read_text_options(out, fields);
  check_modalities(fields);
  out.want_logprobs = fields.boolean("logprobs").value_or(false);
  if (const auto k = fields.integer("top_logprobs", 0, context.options.max_logprobs)) {
    if (*k > 0 && !out.want_logprobs) net::fail_param("top_logprobs", "top_logprobs: logprobs must be true when top_logprobs is set");
    out.num_top_logprobs = static_cast<std::int32_t>(*k);
  }
  if (out.want_logprobs) out.sampling.logprobs = out.num_top_logprobs;
  check_named_logprobs(out);

  ChatPrompt prompt = render_chat(context, body, fields.boolean("add_special_tokens").value_or(false));
  out.tools = std::move(prompt.tools);
  out.images = std::move(prompt.images);
  if (with_tokens) {
    auto tokens = fields.token_ids("tokens", context.backend->vocab_size());
    if (!tokens) net::fail_param("tokens", "tokens: wanted the token ids of the prompt, found nothing");
    PixelsList pictures;
    for (const wire::PromptImage& image : out.images) pictures.push_back(image.pixels);
    if (!pictures.empty()) out.images = locate_images(context, pictures, *tokens);
    out.prompts.push_back(std::move(*tokens));
  } else {
    out.prompts.push_back(std::move(prompt.ids));
  }
  if (fields.boolean("echo").value_or(false)) out.echoed_text = std::move(prompt.last_assistant_text);
  out.include_reasoning = fields.boolean("include_reasoning").value_or(true);
  out.starts_in_reasoning = prompt.ends_in_think;
  out.parse_reasoning = context.renderer && context.options.enable_reasoning;
  out.parse_tools = context.renderer && context.options.enable_tools && !out.tools.empty();
  read_channels(out, context);
  read_token_rule(out, fields, context);
  if (out.parse_tools) show_tool_marks(out, context);
  truncate_prompts(fields, out.prompts);
  auto max_tokens = fields.integer("max_tokens", 1, kAnyInt);
  const auto max_completion_tokens = fields.integer("max_completion_tokens", 1, kAnyInt);
  if (!max_tokens) max_tokens = max_completion_tokens;
  fit_max_tokens(out, context, max_tokens);
  add_model_stops(out, context);
  return out;
}

}  // namespace

PreparedRequest prepare_chat(const ServerContext& context, const net::HttpRequest& request, bool with_tokens) {
  const boost::json::object body = parse_body(request.body);
  std::vector<std::string> ignored = check_members(body, BodyKind::kChat, context.options.is_strict);
  PreparedRequest out = prepare_chat_body(context, request, body, "chatcmpl-", with_tokens);
  out.ignored = std::move(ignored);
  return out;
}

PreparedRequest prepare_responses(const ServerContext& context, const net::HttpRequest& request) {
  const boost::json::object body = parse_body(request.body);
  std::vector<std::string> ignored = check_members(body, BodyKind::kResponses, context.options.is_strict);
  auto responses = std::make_shared<ResponsesRequest>();
  const boost::json::object chat = chat_body_of(context, body, *responses);
  PreparedRequest out = prepare_chat_body(context, request, chat, "resp_", false);
  out.responses = std::move(responses);
  out.ignored = std::move(ignored);
  return out;
}

PreparedRequest prepare_completion(const ServerContext& context, const net::HttpRequest& request) {
  const boost::json::object body = parse_body(request.body);
  const JsonFields fields(body);
  PreparedRequest out;
  out.ignored = check_members(body, BodyKind::kCompletion, context.options.is_strict);
  out.id = context.make_id("cmpl-", own_id(fields, request));
  read_model(out, context, request, body);
  out.sampling = read_sampling(fields, context, context.options.sampling_defaults);
  out.max_tokens_limit = context.options.sampling_defaults.max_tokens;
  read_envelope(out, fields, context, request);
  read_text_options(out, fields);
  if (const auto k = fields.integer("logprobs", 0, context.options.max_logprobs)) {
    out.want_logprobs = true;
    out.num_top_logprobs = static_cast<std::int32_t>(*k);
    out.sampling.logprobs = out.num_top_logprobs;
  }
  out.echo = fields.boolean("echo").value_or(false);
  if (out.echo && out.want_logprobs) {
    if (out.is_stream) net::fail_param("echo", "echo together with logprobs is not available when stream is true");
    out.sampling.prompt_logprobs = std::max(out.sampling.prompt_logprobs.value_or(0), out.num_top_logprobs);
  }
  check_named_logprobs(out);
  if (const auto suffix = fields.string("suffix"); suffix && !suffix->empty()) net::fail_param("suffix", "suffix is not supported");
  if (const auto best_of = fields.integer("best_of", 1, kAnyInt); best_of && *best_of != out.sampling.n)
    net::fail_param("best_of", "best_of is not supported unless it equals n");
  read_token_rule(out, fields, context);
  read_completion_prompt(out, fields, context);
  truncate_prompts(fields, out.prompts);
  const std::int64_t least = out.echo ? 0 : 1;
  auto max_tokens = fields.integer("max_tokens", least, kAnyInt);
  if (!max_tokens) max_tokens = fields.integer("max_completion_tokens", least, kAnyInt);
  if (max_tokens == 0) {
    out.is_prompt_only = true;
    if (!out.sampling.logprob_token_ids.empty())
      net::fail_param("logprob_token_ids", "logprob_token_ids: they are told of drawn tokens, and max_tokens is 0");
    max_tokens = 1;
  }
  fit_max_tokens(out, context, max_tokens.value_or(std::max(kCompletionsDefaultMaxTokens, out.sampling.min_tokens)));
  add_model_stops(out, context);
  return out;
}

PreparedRequest prepare_generate(const ServerContext& context, const net::HttpRequest& request) {
  const boost::json::object body = parse_body(request.body);
  const JsonFields fields(body);
  PreparedRequest out;
  read_model(out, context, request, body);
  out.ignored = check_members(body, BodyKind::kGenerate, context.options.is_strict);
  out.id = context.make_id("generate-tokens-", own_id(fields, request));
  if (fields.has("content_parts"))
    throw net::HttpError(501, ErrorCode::kNotImplemented, "content_parts: messages with images go to /v1/chat/completions",
                         "content_parts");
  static const boost::json::object kEmpty;
  const boost::json::object* sampling = fields.object("sampling_params");
  const JsonFields sampling_fields(sampling ? *sampling : kEmpty, "sampling_params.");
  const std::vector<std::string> ignored =
      check_members(sampling ? *sampling : kEmpty, BodyKind::kSamplingParams, context.options.is_strict, "sampling_params.");
  out.ignored.insert(out.ignored.end(), ignored.begin(), ignored.end());
  out.sampling = read_sampling(sampling_fields, context);
  read_text_options(out, sampling_fields);
  read_token_rule(out, sampling_fields, context);
  read_envelope(out, fields, context, request);
  if (out.cache_salt.empty()) out.cache_salt = sampling_fields.string("cache_salt").value_or("");
  if (sampling_fields.boolean("flat_logprobs").value_or(false))
    net::fail_param("sampling_params.flat_logprobs", "flat_logprobs is not supported; ask for plain logprobs");
  const boost::json::value* logprobs = sampling_fields.find("logprobs");
  out.want_logprobs = true;  // they are always computed, and this route is for training
  if (logprobs && !logprobs->is_bool()) {
    out.num_top_logprobs = static_cast<std::int32_t>(*sampling_fields.integer("logprobs", 0, context.options.max_logprobs));
    out.sampling.logprobs = out.num_top_logprobs;
  }
  out.tokens_as_ids = true;
  auto ids = fields.token_ids("token_ids", context.backend->vocab_size());
  if (!ids) net::fail_param("token_ids", "token_ids: wanted the token ids of the prompt, found nothing");
  out.prompts.push_back(std::move(*ids));
  if (const boost::json::object* features = fields.object("features")) out.images = read_features(context, *features, out.prompts[0]);
  const auto start = sampling_fields.integer("routed_experts_prompt_start", 0, static_cast<std::int64_t>(out.prompts[0].size()));
  if (context.options.returns_routed_experts && !out.is_stream) out.sampling.routed_experts_start = start.value_or(0);
  fit_max_tokens(out, context, sampling_fields.integer("max_tokens", 1, kAnyInt));
  add_model_stops(out, context);
  return out;
}

}  // namespace prl::server
