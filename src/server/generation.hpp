#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/async_result.hpp"
#include "server/prepared_request.hpp"
#include "server/server_context.hpp"
#include "text/stop_tracker.hpp"

namespace prl::server {

/// One choice of a reply, growing. The vectors have one entry per token, the stop token included.
struct Choice {
  std::size_t prompt_idx = 0;
  std::vector<std::int32_t> token_ids;
  std::vector<float> logprobs;  ///< finite, above -9999, which clients take for "none"
  std::vector<std::vector<wire::TopLogprob>> top_logprobs;
  std::vector<std::int64_t> versions;
  std::string text;  ///< without the stop token and, unless asked for, the stop string
  bool is_finished = false;
  wire::FinishReason finish_reason = wire::FinishReason::kNone;
  std::optional<std::int32_t> stop_token_id;
  std::string stop_string;
  std::vector<float> prompt_logprobs;  ///< clean as logprobs are
  std::vector<std::vector<wire::TopLogprob>> prompt_top_logprobs;
  std::vector<std::int32_t> prompt_ranks;
  wire::RoutedExperts routed_experts;
  std::int64_t num_cached_tokens = 0;
  PolicyVersion version_start;
  PolicyVersion version_end;
};

/// What one engine event added to a choice.
struct ChoiceNews {
  std::size_t choice_idx = 0;
  std::size_t token_begin = 0;  ///< new tokens: [token_begin, choice.token_ids.size())
  std::string text;             ///< new text that is safe to show
  bool is_finished = false;
};

/// The engine requests behind one HTTP request: one per prompt and choice. Turns their events into text, matches stop
/// strings, and cancels what still runs when it is destroyed. Used on one strand.
class Generation {
 public:
  Generation(std::shared_ptr<ServerContext> context, std::shared_ptr<const PreparedRequest> request);
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  /// Hands all requests to the engine. Throws what Backend::submit throws; those already queued are cancelled by the destructor.
  /// `kv_key`: of blocks that were brought for the first one.
  void submit(std::uint64_t kv_key = 0);
  /// The next event that changed something; nullopt when `deadline` passed, also if events wait. Error{kInternal} if the engine
  /// failed on a request, {kUnavailable} if it shuts down.
  net::asio::awaitable<std::optional<ChoiceNews>> next(net::TimePoint deadline);
  /// The next call of next() is Error{kUnavailable}, once the events that are there have been handed out. Any thread.
  void end_early() const { events_.close(); }
  bool is_done() const noexcept { return num_finished_ == choices_.size(); }

  const std::vector<Choice>& choices() const noexcept { return choices_; }
  const PreparedRequest& request() const noexcept { return *request_; }
  const ServerContext& context() const noexcept { return *context_; }
  std::int64_t num_output_tokens() const;
  std::int64_t num_cached_tokens() const;
  std::int64_t created() const noexcept { return created_; }

 private:
  /// What the engine reported on one choice: of one step, or of all steps when nobody looks at single tokens.
  struct Event {
    std::size_t choice_idx = 0;
    wire::GenerateOutput delta;
    net::TimePoint first_token;  ///< of this event
    net::TimePoint last_token;
  };
  /// Decoding state of one choice.
  struct Track {
    RequestId id;
    text::StopTracker stops;  ///< tokens that come after a stop string are dropped
    bool is_submitted = false;
    net::TimePoint first_token;
    net::TimePoint last_token;
  };
  engine::EventSink make_sink(std::size_t choice_idx) const;
  ChoiceNews apply(Event event);
  void measure(const Choice& choice, Track& track, const Event& event);
  void measure_end(const Choice& choice, const Track& track, const wire::GenerateOutput& delta);
  void add_token(Choice& choice, Track& track, const wire::GenerateOutput& delta, std::size_t i, std::string& text);
  void finish(Choice& choice, Track& track, const wire::GenerateOutput& delta, std::string& text);

  std::shared_ptr<ServerContext> context_;
  std::shared_ptr<const PreparedRequest> request_;
  net::AsyncQueue<Event> events_;
  std::vector<Choice> choices_;
  std::vector<Track> tracks_;
  std::size_t num_finished_ = 0;
  net::TimePoint arrival_;
  std::int64_t created_;
};

}  // namespace prl::server
