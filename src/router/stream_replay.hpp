#pragma once

#include <boost/json/value.hpp>

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace prl::router {

/// What a client has been given of a streamed reply, so that another engine's repetition of the reply goes on where the first one broke
/// off.
///
/// Chunks of a stream add up: of each choice the texts and the lists (token ids, log-probabilities, arguments of tool calls) of one place
/// are joined. A repetition cuts its chunks elsewhere, so each place is followed by itself: what was delivered of it is left out of the
/// repetition, and must be equal. No clock, no socket.
class StreamReplay {
 public:
  /// The stream begins anew, on another engine.
  void restart();
  /// The data of an event as it is to be sent; nullopt when all of it was delivered already. What is not JSON ("[DONE]"), or has no
  /// choices, is sent as it is. Error{kOutOfSync} when the repetition differs from what was delivered: other weights.
  std::optional<std::string> take(std::string_view data);
  bool has_delivered() const noexcept { return num_delivered_ > 0; }
  /// Tokens or, where a stream has no ids, chunks that were delivered: for the accounts.
  std::int64_t num_delivered() const noexcept { return num_delivered_; }

 private:
  struct Place {
    std::string text;                ///< delivered
    std::vector<std::string> items;  ///< delivered, each as JSON
    std::size_t num_seen = 0;        ///< bytes or items of the present attempt
  };
  /// Cuts off `value` what was delivered; true if something is left that is new.
  bool trim(boost::json::value& value, const std::string& place);
  bool trim_text(boost::json::string& text, const std::string& place);
  bool trim_list(boost::json::array& list, const std::string& place);
  bool trim_choice(boost::json::object& choice);

  std::map<std::string, Place> places_;
  std::map<std::string, bool> is_finished_;  ///< choices whose end was delivered
  bool is_replay_ = false;
  std::int64_t num_delivered_ = 0;
};

}  // namespace prl::router
