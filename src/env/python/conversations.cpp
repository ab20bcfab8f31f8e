#include "env/python/conversations.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "env/message_match.hpp"

namespace prl::env::python {

namespace json = boost::json;

Conversations::Conversation& Conversations::acquire(const std::string& session, json::array& messages) {
  for (json::value& message : messages) {
    if (!message.is_object()) fail(ErrorCode::kInvalidArgument, "a message of a model call is no object");
    message = plain_message(message.get_object());
  }
  auto best = conversations_.end();
  for (auto it = conversations_.begin(); it != conversations_.end(); ++it) {
    if (it->is_busy || it->session != session || (best != conversations_.end() && it->history.size() <= best->history.size())) continue;
    // One that this call continues, or an idle one whose history it rewrote: its client renders anew then.
    if (begins_with(messages, it->history)) best = it;
  }
  if (best == conversations_.end()) {
    if (!open_ && is_first_taken_) {
      // One ledger for all calls: it is right for each, as it renders anew what does not continue its last turn.
      best = conversations_.begin();
      if (best->is_busy) fail(ErrorCode::kOverloaded, "calls at the same time need a factory of conversations");
      best->session = session;
      best->history.clear();
    } else {
      const auto idle = std::find_if(conversations_.begin(), conversations_.end(), [](const Conversation& c) { return !c.is_busy; });
      if (conversations_.size() >= kMaxConversations) {
        if (idle == conversations_.end()) fail(ErrorCode::kOverloaded, "a rollout has {} model calls at the same time", kMaxConversations);
        conversations_.erase(idle);
      }
      Conversation fresh;
      fresh.session = session;
      if (!std::exchange(is_first_taken_, true))
        fresh.client = std::shared_ptr<ChatClient>(first_, [](ChatClient*) {});
      else
        fresh.client = open_("/" + std::to_string(++num_opened_));
      best = conversations_.insert(conversations_.end(), std::move(fresh));
    }
  }
  conversations_.splice(conversations_.end(), conversations_, best);
  std::copy(best->history.begin(), best->history.end(), messages.begin());
  best->is_busy = true;
  return *best;
}

void Conversations::release(Conversation& conversation, const json::array& messages, const json::object* reply) {
  conversation.is_busy = false;
  if (reply == nullptr) return;
  conversation.history = messages;
  conversation.history.push_back(*reply);
}

void Conversations::reset() {
  conversations_.clear();
  // The first one's ledger belongs to the attempt that ended.
  if (!open_) is_first_taken_ = false;
}

}  // namespace prl::env::python
