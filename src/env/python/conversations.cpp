#include "env/python/conversations.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "env/message_match.hpp"

namespace prl::env::python {

namespace json = boost::json;

namespace {

std::size_t num_seen(const Conversations::Conversation& conversation) {
  return conversation.prompt != nullptr ? conversation.prompt->size() + 1 : 0;
}

bool continues(const json::array& messages, const Conversations::Conversation& conversation) {
  const std::size_t size = num_seen(conversation);
  return size == 0 || (messages.size() >= size && begins_with(messages, *conversation.prompt) &&
                       is_same_message(messages[size - 1], *conversation.reply));
}

}  // namespace

Conversations::Conversation& Conversations::acquire(const std::string& session, const json::array& called, json::array& messages) {
  messages.clear();
  messages.reserve(called.size());
  for (const json::value& message : called) {
    if (!message.is_object()) fail(ErrorCode::kInvalidArgument, "a message of a model call is no object");
    messages.emplace_back(plain_message(message.get_object()));
  }
  auto best = conversations_.end();
  for (auto it = conversations_.begin(); it != conversations_.end(); ++it) {
    if (it->is_busy || it->session != session || (best != conversations_.end() && num_seen(*it) <= num_seen(*best))) continue;
    // One that this call continues, or an idle one whose history it rewrote: its client renders anew then.
    if (continues(messages, *it)) best = it;
  }
  if (best == conversations_.end()) {
    if (!open_ && is_first_taken_) {
      // One ledger for all calls: it is right for each, as it renders anew what does not continue its last turn.
      best = conversations_.begin();
      if (best->is_busy) fail(ErrorCode::kOverloaded, "calls at the same time need a factory of conversations");
      best->session = session;
      best->prompt = nullptr;
      best->reply = nullptr;
    } else {
      const auto idle = std::find_if(conversations_.begin(), conversations_.end(), [](const Conversation& c) { return !c.is_busy; });
      if (conversations_.size() >= kMaxConversations) {
        if (idle == conversations_.end()) fail(ErrorCode::kOverloaded, "a rollout has {} model calls at the same time", kMaxConversations);
        conversations_.erase(idle);
      }
      Conversation fresh;
      fresh.session = session;
      if (!std::exchange(is_first_taken_, true))
        fresh.client = std::shared_ptr<ChatClient>(std::shared_ptr<ChatClient>(), first_);
      else
        fresh.client = open_("/" + std::to_string(++num_opened_));
      best = conversations_.insert(conversations_.end(), std::move(fresh));
    }
  }
  conversations_.splice(conversations_.end(), conversations_, best);
  if (best->prompt != nullptr) {
    std::copy(best->prompt->begin(), best->prompt->end(), messages.begin());
    messages[best->prompt->size()] = *best->reply;
  }
  best->is_busy = true;
  return *best;
}

void Conversations::release(Conversation& conversation, const json::array* prompt, const json::object* reply) {
  conversation.is_busy = false;
  if (prompt == nullptr || reply == nullptr) return;
  conversation.prompt = prompt;
  conversation.reply = reply;
}

void Conversations::reset() {
  conversations_.clear();
  // The first one's ledger belongs to the attempt that ended.
  if (!open_) is_first_taken_ = false;
}

}  // namespace prl::env::python
