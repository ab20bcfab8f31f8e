#include "text/chat_template.hpp"

#include <algorithm>
#include <boost/json/value.hpp>

#include <optional>

#include "base/error.hpp"
#include "base/files.hpp"
#include "text/detail/json_access.hpp"
#include "text/jinja.hpp"
#include "text/json_python.hpp"
#include "text/json_scan.hpp"

namespace prl::text {
namespace {

namespace json = boost::json;

constexpr std::string_view kChatMl =
    R"({%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content is string %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}
                {%- set call = call.function %}
            {%- endif %}
            {%- if message.content or not loop.first %}
                {{- '\n' }}
            {%- endif %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
)";

std::string_view view(const json::string& text) { return {text.data(), text.size()}; }

// Content as one string. Parts of another kind than text are refused: no family here renders them.
json::string flatten_content(const json::value& content, std::size_t index) {
  if (content.is_null()) return {};
  if (is_text(content)) return content.get_string();
  if (!content.is_array()) fail(ErrorCode::kInvalidArgument, "messages[{}].content: expected a string, null or a list of parts", index);
  json::string out;
  bool is_first = true;
  for (const json::value& part : content.get_array()) {
    const json::object* object = part.if_object();
    const json::value* type = object != nullptr ? object->if_contains("type") : nullptr;
    const json::value* text = object != nullptr ? object->if_contains("text") : nullptr;
    std::string_view kind = type != nullptr && is_text(*type) ? view(type->get_string()) : "text";
    if (is_text(part)) {
      text = &part;
      kind = "text";
    }
    if ((kind != "text" && kind != "input_text" && kind != "output_text" && kind != "refusal") || text == nullptr || !is_text(*text))
      fail(ErrorCode::kInvalidArgument, "messages[{}].content: parts of type '{}' are not supported, only text is", index, kind);
    if (!is_first) out += '\n';
    is_first = false;
    out += text->get_string();
  }
  return out;
}

bool is_image(const json::value& part) {
  const json::object* object = part.if_object();
  const json::value* type = object != nullptr ? object->if_contains("type") : nullptr;
  return type != nullptr && is_text(*type) && (type->get_string() == "image_url" || type->get_string() == "image");
}

/// Content with images as templates of models for images take it; any other as one string.
json::value list_content(const json::value& content, std::size_t index) {
  if (!content.is_array() || std::ranges::none_of(content.get_array(), is_image)) return flatten_content(content, index);
  json::array out;
  for (const json::value& part : content.get_array()) {
    if (is_image(part))
      out.push_back(json::object{{"type", "image"}});
    else
      out.push_back(json::object{{"type", "text"}, {"text", flatten_content(json::array{part}, index)}});
  }
  return out;
}

constexpr std::size_t kMaxArgumentDepth = 200;

void decode_arguments(json::value& call) {
  json::object* object = call.if_object();
  if (object == nullptr) return;
  if (json::value* inner = object->if_contains("function"); inner != nullptr && inner->is_object()) object = &inner->get_object();
  json::value* arguments = object->if_contains("arguments");
  if (arguments == nullptr || !is_text(*arguments)) return;
  if (view(arguments->get_string()).find_first_not_of(" \t\r\n") == std::string_view::npos) {
    *arguments = json::object();
    return;
  }
  try {
    json::value decoded = parse_json(replace_lone_surrogates(view(arguments->get_string())), kMaxArgumentDepth, LargeNumbers::kKeepText);
    if (decoded.is_object()) *arguments = std::move(decoded);
  } catch (const Error&) {  // what a model wrote may be no JSON; it is shown to it again as it was
  }
}

json::value normalize_message(const json::value& message, std::size_t index, bool keeps_images) {
  if (!message.is_object()) fail(ErrorCode::kInvalidArgument, "messages[{}]: expected an object", index);
  json::object out;
  for (const auto& member : message.get_object())
    if (!member.value().is_null() || member.key() == "content") out[member.key()] = member.value();
  const json::value* role = out.if_contains("role");
  if (role == nullptr || !is_text(*role)) fail(ErrorCode::kInvalidArgument, "messages[{}].role: expected a string", index);
  if (keeps_images)
    out["content"] = list_content(out["content"], index);
  else
    out["content"] = flatten_content(out["content"], index);
  // Clients name the same thing differently; templates read reasoning_content.
  if (!out.contains("reasoning_content"))
    for (const char* name : {"reasoning", "thinking"})
      if (const json::value* reasoning = out.if_contains(name); reasoning != nullptr && is_text(*reasoning)) {
        out["reasoning_content"] = reasoning->get_string();
        break;
      }
  if (json::value* calls = out.if_contains("tool_calls")) {
    if (!calls->is_array()) fail(ErrorCode::kInvalidArgument, "messages[{}].tool_calls: expected a list", index);
    for (json::value& call : calls->get_array()) decode_arguments(call);
    if (calls->get_array().empty()) out.erase("tool_calls");
  }
  return out;
}

}  // namespace

std::string_view chatml_template() noexcept { return kChatMl; }

json::array normalize_messages(const json::array& messages, bool keeps_images) {
  json::array out;
  out.reserve(messages.size());
  for (std::size_t i = 0; i < messages.size(); ++i) out.push_back(normalize_message(messages[i], i, keeps_images));
  return out;
}

struct ChatTemplate::Impl {
  Impl(std::string text, json::object tokens) : source(std::move(text)), main(source), special_tokens(std::move(tokens)) {}

  std::string source;
  JinjaTemplate main;
  std::optional<JinjaTemplate> tool_use;  // a second template that is used when there are tools
  json::object special_tokens;
  std::function<std::time_t()> clock;
};

ChatTemplate::ChatTemplate(std::string source, json::object special_tokens)
    : impl_(std::make_unique<Impl>(std::move(source), std::move(special_tokens))) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

bool ChatTemplate::exists(const std::filesystem::path& folder) {
  if (std::filesystem::exists(folder / "chat_template.jinja")) return true;
  const std::filesystem::path config = folder / "tokenizer_config.json";
  if (!std::filesystem::exists(config)) return false;
  const json::value document = detail::parse_document(read_file(config), config.string());
  return detail::find(detail::as_object(document, config.string()), "chat_template") != nullptr;
}

ChatTemplate ChatTemplate::load(const std::filesystem::path& folder, const Tokenizer& tokenizer) {
  // A mistake in a template is told with the file that it stands in.
  const auto in_file = [](const std::string& where, auto make) {
    try {
      return make();
    } catch (const Error& error) {
      throw error.with_context(where);
    }
  };
  const auto template_of = [&](std::string text, const std::string& where) {
    return in_file(where, [&] { return ChatTemplate(std::move(text), tokenizer.special_tokens()); });
  };
  if (const auto file = folder / "chat_template.jinja"; std::filesystem::exists(file)) {
    ChatTemplate out = template_of(read_file(file, JinjaTemplate::kMaxSourceBytes), file.string());
    if (const auto tools = folder / "additional_chat_templates" / "tool_use.jinja"; std::filesystem::exists(tools))
      out.impl_->tool_use.emplace(in_file(tools.string(), [&] { return JinjaTemplate(read_file(tools, JinjaTemplate::kMaxSourceBytes)); }));
    return out;
  }
  const std::string where = (folder / "tokenizer_config.json").string() + ".chat_template";
  const json::value* entry = detail::find(tokenizer.config(), "chat_template");
  if (entry == nullptr)
    fail(ErrorCode::kNotFound, "{}: missing, and there is no chat_template.jinja; set tokenizer.chat_template to a template text or file",
         where);
  if (entry->is_string()) return template_of(std::string(view(entry->get_string())), where);
  std::optional<std::string> main, tool_use;
  for (const json::value& item : detail::as_array(*entry, where)) {
    const json::object& named = detail::as_object(item, where);
    const std::string_view name = detail::as_string(detail::require(named, "name", where), where + ".name");
    const std::string text(detail::as_string(detail::require(named, "template", where), where + ".template"));
    if (name == "default") main = text;
    if (name == "tool_use") tool_use = text;
  }
  if (!main) fail(ErrorCode::kCorrupt, "{}: a list of named templates without one named 'default'", where);
  ChatTemplate out = template_of(std::move(*main), where);
  if (tool_use) out.impl_->tool_use.emplace(in_file(where, [&] { return JinjaTemplate(*tool_use); }));
  return out;
}

std::string ChatTemplate::read_text_or_file(std::string_view source) {
  // A path has no template syntax in it, and a template none of these would render anything.
  const bool looks_like_text = source.find("{%") != std::string_view::npos || source.find("{{") != std::string_view::npos ||
                               source.find('\n') != std::string_view::npos || source.size() > 4096;
  return looks_like_text ? std::string(source) : read_file(std::filesystem::path(source), JinjaTemplate::kMaxSourceBytes);
}

ChatTemplate ChatTemplate::from_text_or_file(std::string_view source, const Tokenizer& tokenizer) {
  return ChatTemplate(read_text_or_file(source), tokenizer.special_tokens());
}

std::string ChatTemplate::render(const json::array& messages, const RenderOptions& options) const {
  return render_raw(normalize_messages(messages, options.keeps_images), options);
}

std::string ChatTemplate::render_raw(const json::array& messages, const RenderOptions& options) const {
  json::object variables = impl_->special_tokens;
  for (const auto& member : options.kwargs) variables[member.key()] = member.value();
  variables["messages"] = messages;
  variables["add_generation_prompt"] = options.add_generation_prompt;
  variables["documents"] = variables.contains("documents") ? variables["documents"] : json::value(nullptr);
  if (options.tools.empty())
    variables["tools"] = nullptr;
  else
    variables["tools"] = options.tools;
  const bool use_tools = !options.tools.empty() && impl_->tool_use.has_value();
  return (use_tools ? *impl_->tool_use : impl_->main).render(variables, impl_->clock);
}

const std::string& ChatTemplate::source() const { return impl_->source; }

void ChatTemplate::set_clock(std::function<std::time_t()> now) { impl_->clock = std::move(now); }

}  // namespace prl::text
