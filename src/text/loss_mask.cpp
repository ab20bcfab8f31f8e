#include <algorithm>

#include "base/error.hpp"
#include "text/renderer.hpp"
#include "text/renderers/message_view.hpp"

namespace prl::text {

namespace json = boost::json;

MaskedSample incremental_loss_mask(const Tokenizer& tokenizer, const ChatTemplate& chat_template, const json::array& messages,
                                   const json::array& tools, const LossMaskRoles& roles, const json::object& template_kwargs,
                                   std::size_t num_prompt_messages) {
  if (messages.empty()) fail(ErrorCode::kInvalidArgument, "messages: at least one is needed");
  const json::array normal = normalize_messages(messages, /*keeps_images=*/true);
  const auto role_of = [&](std::size_t i) { return renderers::MessageView(normal, i).role(); };
  const auto is_trained = [&](std::string_view role) {
    if (role == "system" || role == "developer") return roles.system;
    if (role == "user") return roles.user;
    if (role == "assistant") return roles.assistant;
    if (role == "tool" || role == "ipython") return roles.tool;
    fail(ErrorCode::kInvalidArgument, "messages: role '{}' has no loss mask; known are system, user, assistant, tool", role);
  };
  MaskedSample out;
  json::array head;
  RenderOptions options{.add_generation_prompt = false, .tools = tools, .kwargs = template_kwargs};
  for (std::size_t i = 0; i < normal.size(); ++i) {
    head.push_back(normal[i]);
    const std::string_view role = role_of(i);
    const bool has_next = i + 1 < normal.size();
    if (i + 1 < num_prompt_messages) continue;  // masked all alike, so nothing need be known of its parts
    if (role == "tool" && has_next && role_of(i + 1) == "tool" && i + 1 != num_prompt_messages) continue;
    options.add_generation_prompt = (role == "user" || role == "tool") && has_next && role_of(i + 1) == "assistant";
    std::vector<std::int32_t> ids = tokenizer.encode(chat_template.render_raw(head, options));
    const auto mismatch = std::mismatch(out.ids.begin(), out.ids.end(), ids.begin(), ids.end());
    if (mismatch.first != out.ids.end())
      fail(ErrorCode::kInvalidArgument,
           "messages[{}]: with this {} message the chat template renders the earlier ones differently (first at token {} of {}), so the "
           "loss "
           "mask cannot be told; templates that drop earlier reasoning do this: use one that keeps it, or split the conversation",
           i, role, mismatch.first - out.ids.begin(), out.ids.size());
    out.mask.resize(ids.size(), is_trained(role) && i >= num_prompt_messages ? 1 : 0);
    out.ids = std::move(ids);
  }
  if (const auto eos = tokenizer.eos_id(); eos && std::find(out.ids.begin(), out.ids.end(), *eos) == out.ids.end()) {
    out.ids.push_back(*eos);
    out.mask.push_back(1);
    out.eos_appended = true;
  }
  return out;
}

}  // namespace prl::text
