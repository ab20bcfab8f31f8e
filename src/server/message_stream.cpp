#include "server/message_stream.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "text/json_python.hpp"

namespace prl::server {
namespace {

StreamSplitter::Options splitter_options(const ServerContext& context, const PreparedRequest& request) {
  return {request.parse_reasoning, request.starts_in_reasoning, request.parse_tools ? context.renderer->tool_call_mark() : ""};
}

boost::json::array parse_calls(const Generation& generation, const Choice& choice) {
  const PreparedRequest& request = generation.request();
  const boost::json::array none;
  return generation.context()
      .renderer->parse_response(choice.token_ids, request.parse_tools ? request.tools : none, request.prompts[choice.prompt_idx])
      .openai_tool_calls();
}

/// Where the tokenizer has a token for the tag, only that token opens a call; see text::renderers::parse_tagged.
bool may_hold_call(const Generation& generation, const Choice& choice) {
  if (generation.context().call_form != CallForm::kTagged) return false;
  const auto tag = generation.context().tokenizer->id_of("<tool_call>");
  return !tag || std::find(choice.token_ids.begin(), choice.token_ids.end(), *tag) != choice.token_ids.end();
}

bool is_json(std::string_view text) {
  try {
    text::parse_json(text);
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::optional<ChannelStream> channels_of(const ServerContext& context, const PreparedRequest& request) {
  if (!request.reads_channels) return std::nullopt;
  return ChannelStream(open_channel(*context.tokenizer, request.prompts.front()), request.parse_tools);
}

/// A call whose arguments are no JSON, cut short for example, is content.
Message read_channels(const Generation& generation, const Choice& choice) {
  const PreparedRequest& request = generation.request();
  ChannelStream channels = *channels_of(generation.context(), request);
  ChannelStream::Piece piece = channels.push(choice.text);
  ChannelStream::Piece rest = channels.finish();
  piece.calls.insert(piece.calls.end(), rest.calls.begin(), rest.calls.end());
  Message out;
  if (request.include_reasoning) out.reasoning = piece.reasoning + rest.reasoning;
  out.content = request.echoed_text + piece.content + rest.content;
  std::vector<CallDelta> calls;
  for (const CallDelta& delta : piece.calls) {
    if (delta.index == calls.size()) calls.push_back({delta.index, delta.id, delta.name, ""});
    calls.back().arguments += delta.arguments;
  }
  for (const CallDelta& call : calls) {
    if (!is_json(call.arguments)) {
      out.content += call.arguments;
      continue;
    }
    out.calls.push_back(boost::json::object{
        {"id", call.id}, {"type", "function"}, {"function", boost::json::object{{"name", call.name}, {"arguments", call.arguments}}}});
  }
  return out;
}

}  // namespace

Message read_message(const Generation& generation, const Choice& choice) {
  const PreparedRequest& request = generation.request();
  if (request.reads_channels) return read_channels(generation, choice);
  Message out;
  if (!request.parse_tools && !request.parse_reasoning) {
    out.content = request.echoed_text + choice.text;
    return out;
  }
  // The same splitter as in streams, so that both forms of a reply agree; only the calls come from the parser.
  StreamSplitter splitter(splitter_options(generation.context(), request));
  StreamSplitter::Piece piece = splitter.push(choice.text);
  const StreamSplitter::Piece rest = splitter.finish();
  if (request.include_reasoning) out.reasoning = piece.reasoning + rest.reasoning;
  out.content = request.echoed_text + piece.content + rest.content;
  if (!splitter.withheld().empty()) out.calls = parse_calls(generation, choice);
  if (out.calls.empty()) out.content += splitter.withheld();
  return out;
}

MessageStream::MessageStream(const ServerContext& context, const PreparedRequest& request)
    : channels_(channels_of(context, request)), splitter_(splitter_options(context, request)) {}

MessageStream::Piece MessageStream::push_channels(const Generation& generation, const ChoiceNews& news) {
  ChannelStream::Piece piece = channels_->push(news.text);
  if (news.is_finished) {
    ChannelStream::Piece rest = channels_->finish();
    piece.reasoning += rest.reasoning;
    piece.content += rest.content;
    piece.calls.insert(piece.calls.end(), rest.calls.begin(), rest.calls.end());
  }
  if (!generation.request().include_reasoning) piece.reasoning.clear();
  num_calls_ = channels_->num_calls();
  return {std::move(piece.reasoning), std::move(piece.content), std::move(piece.calls)};
}

MessageStream::Piece MessageStream::push(const Generation& generation, const ChoiceNews& news) {
  if (channels_) return push_channels(generation, news);
  const Choice& choice = generation.choices()[news.choice_idx];
  StreamSplitter::Piece text = splitter_.push(news.text);
  if (news.is_finished) {
    const StreamSplitter::Piece rest = splitter_.finish();
    text.reasoning += rest.reasoning;
    text.content += rest.content;
  }
  if (!generation.request().include_reasoning) text.reasoning.clear();
  Piece out{std::move(text.reasoning), std::move(text.content), {}};
  const std::string& withheld = splitter_.withheld();
  if (withheld.empty()) return out;
  if (may_hold_call(generation, choice)) {
    out.calls = call_stream_.push(std::string_view(withheld).substr(num_read_));
    num_read_ = withheld.size();
    num_calls_ = call_stream_.num_calls();
  }
  if (!news.is_finished || num_calls_ > 0) return out;
  for (const auto& value : parse_calls(generation, choice)) {
    const boost::json::object& function = value.at("function").as_object();
    const auto string_of = [](const boost::json::value& text_value) {
      return std::string(text_value.get_string().data(), text_value.get_string().size());
    };
    out.calls.push_back({num_calls_++, string_of(value.at("id")), string_of(function.at("name")), string_of(function.at("arguments"))});
  }
  if (num_calls_ == 0) out.content += withheld;  // markup that is no usable call is content
  return out;
}

}  // namespace prl::server
