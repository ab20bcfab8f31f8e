#include <utility>

#include "base/log.hpp"
#include "net/errors.hpp"
#include "server/generation.hpp"
#include "server/kv_transfer.hpp"
#include "server/reply_format.hpp"
#include "server/request_fields.hpp"
#include "server/routes.hpp"

namespace prl::server {
namespace {

using Prepare = PreparedRequest (*)(const ServerContext&, const HttpRequest&);
using MakeFormat = std::unique_ptr<ReplyFormat> (*)(const Generation&);

/// Templates and tokenization of one request, its time in the queue included.
constexpr auto kPrepareTime = std::chrono::minutes(5);

PreparedRequest prepare_plain_chat(const ServerContext& context, const HttpRequest& request) {
  return prepare_chat(context, request, false);
}
PreparedRequest prepare_token_chat(const ServerContext& context, const HttpRequest& request) {
  return prepare_chat(context, request, true);
}

/// A request of more choices than the engine can ever hold will not do better later, so it is 400 and not 429.
void check_count(const ServerContext& context, const PreparedRequest& request) {
  const auto num_choices = static_cast<std::int64_t>(request.prompts.size()) * request.sampling.n;
  if (num_choices <= context.backend->max_open_requests()) return;
  net::fail_param("n", fmt::format("n: {} prompts with n = {} are {} requests at once, this server holds {} at most",
                                   request.prompts.size(), request.sampling.n, num_choices, context.backend->max_open_requests()));
}

/// Checks and tokenizes the body on a worker thread. What may take long has threads of its own, so that other requests do not wait for
/// it: large bodies, and the making of a rule for structured output.
net::asio::awaitable<std::shared_ptr<const PreparedRequest>> prepare(Context context, std::shared_ptr<const HttpRequest> request,
                                                                     Prepare function) {
  net::WorkerPool& workers = context->workers_for(request->body.size());
  const net::CancelToken cancelled = request->cancelled;
  auto work = [context, cancelled, request = std::move(request), function]() mutable {
    // Released here and not where the result goes, so that a large body's memory is free when the thread gives memory back.
    const std::shared_ptr<const HttpRequest> http = std::move(request);
    if (cancelled.is_cancelled()) fail(ErrorCode::kCancelled, "the client closed its connection");
    return std::make_shared<PreparedRequest>(function(*context, *http));
  };
  std::string what = "a free thread to tokenize the request";
  auto running = workers.run(std::move(work), kPrepareTime, std::move(what));
  const std::shared_ptr<PreparedRequest> prepared = co_await std::move(running);
  if (prepared->kv.is_prefill_only) shorten_to_prefill(*prepared);
  check_count(*context, *prepared);
  if (prepared->kv.max_uncached_tokens) {
    auto checking = check_uncached(context, prepared);
    co_await std::move(checking);
  }
  if (prepared->make_rule) {
    auto make = [context, cancelled, prepared] {
      if (cancelled.is_cancelled()) fail(ErrorCode::kCancelled, "the client closed its connection");
      return prepared->make_rule();
    };
    std::string what_rule = "a free thread to make the rule for structured output";
    auto making = context->rule_workers->run(std::move(make), kPrepareTime, std::move(what_rule));
    prepared->sampling.token_rule = co_await std::move(making);
    prepared->make_rule = nullptr;
  }
  co_return prepared;
}

net::asio::awaitable<void> write_events(net::ResponseStream* stream, std::shared_ptr<ReplyFormat> format, std::vector<std::string> events) {
  std::string bytes;
  for (const std::string& event : events) bytes += format->frame(event);
  auto writing = stream->write(std::move(bytes));
  co_await std::move(writing);
}

net::asio::awaitable<void> write_stream(std::shared_ptr<Generation> generation, std::shared_ptr<ReplyFormat> format,
                                        net::ResponseStream* stream, net::TimePoint deadline) {
  auto first = write_events(stream, format, format->begin(*generation));
  co_await std::move(first);
  const auto keep_alive = generation->context().options.keep_alive_interval;
  while (!generation->is_done()) {
    auto next = generation->next(std::min(deadline, net::Clock::now() + keep_alive));
    const std::optional<ChoiceNews> news = co_await std::move(next);
    std::vector<std::string> events;
    std::string comment;
    if (news)
      events = format->news(*generation, *news);
    else if (net::Clock::now() >= deadline)
      fail(ErrorCode::kDeadline, "the request took longer than its limit");
    else
      comment = ": keep-alive\n\n";
    if (!comment.empty()) {
      auto writing = stream->write(std::move(comment));
      co_await std::move(writing);
    }
    if (!events.empty()) {
      auto writing = write_events(stream, format, std::move(events));
      co_await std::move(writing);
    }
  }
  std::vector<std::string> last;
  if (generation->request().include_usage) last.push_back(format->usage(*generation));
  if (format->ends_with_done()) last.push_back("[DONE]");
  if (last.empty()) co_return;
  auto writing = write_events(stream, format, std::move(last));
  co_await std::move(writing);
}

Reply answer_stream(std::shared_ptr<Generation> generation, std::shared_ptr<ReplyFormat> format, net::ResponseStream* stream,
                    net::TimePoint deadline) {
  net::Fields headers;
  headers.add("Cache-Control", "no-cache");
  headers.add("X-Request-Id", generation->request().id);
  if (!generation->request().ignored.empty()) headers.add("X-Prl-Ignored", ignored_header(generation->request().ignored));
  auto starting = stream->start(200, "text/event-stream; charset=utf-8", std::move(headers));
  co_await std::move(starting);
  std::exception_ptr failure;
  try {
    auto writing = write_stream(generation, format, stream, deadline);
    co_await std::move(writing);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kCancelled) throw;
    failure = std::current_exception();
  }
  if (failure) {
    // The status line is out; the error travels as an event, as vLLM's does.
    std::vector<std::string> events{format->error(net::error_response(failure))};
    if (format->ends_with_done()) events.push_back("[DONE]");
    auto writing = write_events(stream, format, std::move(events));
    co_await std::move(writing);
  }
  co_return HttpResponse::streamed();
}

Reply answer(Context context, HttpRequest http_request, Prepare prepare_function, MakeFormat make_format) {
  const net::TimePoint deadline = net::Clock::now() + context->options.request_timeout;
  net::ResponseStream* const stream = http_request.stream;
  auto http = std::make_shared<const HttpRequest>(std::move(http_request));  // its body is dropped once it is tokenized
  auto preparing = prepare(context, std::move(http), prepare_function);
  const std::shared_ptr<const PreparedRequest> request = co_await std::move(preparing);
  auto generation = std::make_shared<Generation>(context, request);
  {
    auto bringing = bring_blocks(context, request);
    const BroughtBlocks brought = co_await std::move(bringing);
    generation->submit(brought.key());
  }
  std::shared_ptr<ReplyFormat> format = make_format(*generation);
  if (request->is_stream) {
    auto streaming = answer_stream(generation, format, stream, deadline);
    co_return co_await std::move(streaming);
  }
  while (!generation->is_done()) {
    auto next = generation->next(deadline);
    const std::optional<ChoiceNews> news = co_await std::move(next);
    if (!news) fail(ErrorCode::kDeadline, "the request took longer than its limit");
  }
  HttpResponse response = HttpResponse::json(
      request->kv.is_prefill_only ? prefill_reply(*context, *request, generation->num_cached_tokens()) : format->whole(*generation));
  response.headers.add("X-Request-Id", request->id);
  if (!request->ignored.empty()) response.headers.add("X-Prl-Ignored", ignored_header(request->ignored));
  co_return response;
}

}  // namespace

Reply chat_completions(Context context, HttpRequest request) {
  return answer(std::move(context), std::move(request), prepare_plain_chat, make_chat_format);
}

Reply chat_completions_tokens(Context context, HttpRequest request) {
  return answer(std::move(context), std::move(request), prepare_token_chat, make_chat_format);
}

Reply completions(Context context, HttpRequest request) {
  return answer(std::move(context), std::move(request), prepare_completion, make_completion_format);
}

Reply responses(Context context, HttpRequest request) {
  return answer(std::move(context), std::move(request), prepare_responses, make_responses_format);
}

Reply generate(Context context, HttpRequest request) {
  return answer(std::move(context), std::move(request), prepare_generate, make_generate_format);
}

}  // namespace prl::server
