#pragma once

#include <boost/json/array.hpp>

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "env/chat_client.hpp"

namespace prl::env::python {

/// The conversations of one rollout: one per session and line of its history, so that each keeps its own ledger of token ids. One thread.
///
/// A call goes to the idle conversation of its session whose messages it continues, by meaning; the longest one if there are several. The
/// messages it repeats are replaced by those that the conversation saw, so that libraries' nulls and extra members change no token.
class Conversations {
 public:
  struct Conversation {
    std::string session;
    const boost::json::array* prompt = nullptr;  ///< of its last turn, lent by who keeps the turns; null: not used yet
    const boost::json::object* reply = nullptr;  ///< to that
    std::shared_ptr<ChatClient> client;
    bool is_busy = false;
  };
  using Open = std::function<std::unique_ptr<ChatClient>(const std::string& suffix)>;

  /// `first`, borrowed, is the conversation of the first session; `open` makes more, and may be empty: then `first` is all there is, and
  /// calls at the same time are refused.
  Conversations(ChatClient* first, Open open) : first_(first), open_(std::move(open)) {}

  /// The conversation for a call, busy until release() is called; `messages` become those of the call made plain. Valid until reset().
  /// Error{kOverloaded} when kMaxConversations are busy; {kInvalidArgument} for messages that are none.
  Conversation& acquire(const std::string& session, const boost::json::array& called, boost::json::array& messages);
  /// The call has ended: with `reply` after `prompt`, both borrowed until reset(), or, if they are null, in an error.
  void release(Conversation& conversation, const boost::json::array* prompt, const boost::json::object* reply);
  /// The rollout begins anew, under session ids of its own. Nothing may be busy that is still used.
  void reset();

  static constexpr std::size_t kMaxConversations = 64;

 private:
  ChatClient* first_;
  Open open_;
  std::list<Conversation> conversations_;  ///< used last at the end
  bool is_first_taken_ = false;
  std::int64_t num_opened_ = 0;
};

}  // namespace prl::env::python
