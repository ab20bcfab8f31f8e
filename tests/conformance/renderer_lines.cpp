// Lets a script drive a renderer: reads one JSON request per line and writes one JSON answer per line.
//
//   renderer_lines RENDERER TOKENIZER.json [TEMPLATE_KWARGS]
//
//   {"op": "render", "messages", "tools", "add_generation_prompt"}           {"ids", "message_indices", "sampled_mask", "is_content"}
//   {"op": "bridge", "prompt", "completion", "messages", "tools"}            {"ids"}, null for a refusal
//   {"op": "parse", "ids", "prompt", "tools"}                                {"content", "reasoning", "calls": [[name, arguments, status]]}
//   any that fails                                                           {"error"}
#include <boost/json.hpp>

#include <filesystem>
#include <iostream>
#include <memory>
#include <string>

#include "base/files.hpp"
#include "text/json_python.hpp"
#include "text/renderer.hpp"

namespace {

namespace json = boost::json;
using namespace prl;

std::vector<std::int32_t> ids_of(const json::value& list) {
  std::vector<std::int32_t> ids;
  for (const json::value& id : list.as_array()) ids.push_back(id.to_number<std::int32_t>());
  return ids;
}

template <typename T>
json::array to_array(const std::vector<T>& values) {
  json::array out;
  for (const T value : values) out.emplace_back(static_cast<std::int64_t>(value));
  return out;
}

json::value answer(const text::Renderer& renderer, const json::object& request) {
  const std::string_view op = request.at("op").as_string();
  const json::array& tools = request.at("tools").as_array();
  json::object out;
  if (op == "render") {
    const text::RenderedConversation made =
        renderer.render(request.at("messages").as_array(), tools, request.at("add_generation_prompt").as_bool());
    out["ids"] = to_array(made.ids);
    out["message_indices"] = to_array(made.message_indices);
    out["sampled_mask"] = to_array(made.sampled_mask);
    out["is_content"] = to_array(made.is_content);
  } else if (op == "bridge") {
    const auto made = renderer.bridge_to_next_turn(ids_of(request.at("prompt")), ids_of(request.at("completion")),
                                                   request.at("messages").as_array(), tools);
    out["ids"] = made ? json::value(to_array(made->ids)) : json::value(nullptr);
  } else {
    const text::ParsedResponse parsed = renderer.parse_response(ids_of(request.at("ids")), tools, ids_of(request.at("prompt")));
    out["content"] = parsed.content;
    out["reasoning"] = parsed.reasoning_content ? json::value(*parsed.reasoning_content) : json::value(nullptr);
    json::array calls;
    for (const text::ParsedToolCall& call : parsed.tool_calls)
      calls.push_back(json::array{call.name, call.arguments, json::string(text::to_string(call.status))});
    out["calls"] = std::move(calls);
  }
  return out;
}

int run(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: renderer_lines RENDERER TOKENIZER.json [TEMPLATE_KWARGS]\n";
    return 2;
  }
  const std::filesystem::path file = argv[2];
  text::RendererOptions options;
  options.name = argv[1];
  if (argc > 3) options.template_kwargs = text::parse_json(argv[3]).as_object();
  const auto tokenizer = std::make_shared<const text::Tokenizer>(text::Tokenizer::parse(read_file(file)));
  const auto renderer = text::make_renderer(options, tokenizer, nullptr);
  for (std::string line; std::getline(std::cin, line);) {
    json::value reply;
    try {
      reply = answer(*renderer, text::parse_json(line).as_object());
    } catch (const std::exception& error) {
      reply = json::object{{"error", error.what()}};
    }
    std::cout << json::serialize(reply) << std::endl;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "renderer_lines: " << error.what() << "\n";
    return 1;
  }
}
