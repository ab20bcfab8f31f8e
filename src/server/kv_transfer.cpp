#include "server/kv_transfer.hpp"

#include <chrono>
#include <exception>
#include <utility>

#include "base/log.hpp"
#include "net/async_result.hpp"
#include "net/errors.hpp"
#include "net/worker_pool.hpp"
#include "server/json_writer.hpp"

namespace prl::server {
namespace {

using namespace std::chrono_literals;

/// How long the engine's thread may take to look a prompt up: a step, and what waits beside it.
constexpr auto kLookUpTime = 30s;
/// Of a transfer with its turn on a thread; KvGateOptions::timeout bounds the transfer itself.
constexpr auto kBringTime = 5min;

engine::PromptPtr prompt_of(const PreparedRequest& request) {
  auto prompt = std::make_shared<engine::PromptKey>();
  prompt->tokens = request.prompts.front();
  prompt->images = engine::marks_of(request.images);
  prompt->cache_salt = request.cache_salt;
  return prompt;
}

/// Whether a prefix that is there is used at all: the log-probabilities of a prompt come from computing all of it.
bool may_use_prefix(const PreparedRequest& request) { return request.prompts.size() == 1 && !request.sampling.prompt_logprobs; }

}  // namespace

KvTransferOrder read_kv_order(const JsonFields& fields, const ServerContext& context) {
  KvTransferOrder order;
  const boost::json::object* params = fields.object("kv_transfer_params");
  if (params == nullptr || params->empty()) return order;
  if (context.backend->kv() == nullptr)
    net::fail_param("kv_transfer_params",
                    "kv_transfer_params: this server exchanges no key-value blocks; start it with use_pd_kv_transfer");
  const JsonFields wanted(*params, "kv_transfer_params.");
  order.is_prefill_only = wanted.boolean("do_remote_decode").value_or(false);
  order.max_uncached_tokens = wanted.integer("max_uncached_tokens", 0, kAnyInt);
  if (!wanted.boolean("do_remote_prefill").value_or(false)) return order;
  const auto host = wanted.string("remote_host"), signature = wanted.string("remote_key");
  const auto port = wanted.integer("remote_port", 1, 65535);
  if (!host || !signature || !port)
    net::fail_param(
        "kv_transfer_params",
        "kv_transfer_params: do_remote_prefill needs remote_host, remote_port and remote_key, as a prefill engine's reply has them");
  if (order.is_prefill_only)
    net::fail_param("kv_transfer_params", "kv_transfer_params: do_remote_prefill and do_remote_decode exclude each other");
  order.place = transfer::KvPlace{.host = *host, .port = static_cast<int>(*port), .signature = *signature};
  return order;
}

void shorten_to_prefill(PreparedRequest& request) {
  if (request.prompts.size() != 1)
    net::fail_param("kv_transfer_params",
                    fmt::format("kv_transfer_params: do_remote_decode is for one prompt, found {}", request.prompts.size()));
  wire::SamplingParams shortest;
  shortest.max_tokens = 1;
  shortest.ignore_eos = true;
  shortest.temperature = 0.0f;
  shortest.seed = 0;
  request.sampling = std::move(shortest);
  request.make_rule = nullptr;
  request.is_stream = false;
  request.echo = request.is_prompt_only = request.want_logprobs = false;
}

net::asio::awaitable<void> check_uncached(std::shared_ptr<ServerContext> context, std::shared_ptr<const PreparedRequest> request) {
  const std::int64_t most = request->kv.max_uncached_tokens.value_or(0);
  if (!may_use_prefix(*request) || request->num_prompt_tokens() <= most) co_return;
  net::AsyncResult<std::int64_t> result;
  context->backend->kv()->find_uncached(prompt_of(*request), request->adapter,
                                        [result](std::int64_t num) mutable { result.set_value(num); });
  std::int64_t num_uncached = -1;
  try {
    std::string what = "the engine to look a prompt up";
    auto waiting = result.wait(net::Clock::now() + kLookUpTime, std::move(what));
    num_uncached = co_await std::move(waiting);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDeadline) throw;
  }
  if (num_uncached <= most) co_return;
  throw net::HttpError(412, ErrorCode::kUnavailable,
                       fmt::format("{} of the prompt's {} tokens are not in the prefix cache, at most {} are wanted", num_uncached,
                                   request->num_prompt_tokens(), most),
                       "kv_transfer_params.max_uncached_tokens");
}

net::asio::awaitable<BroughtBlocks> bring_blocks(std::shared_ptr<ServerContext> context, std::shared_ptr<const PreparedRequest> request) {
  transfer::KvGate* const gate = context->backend->kv();
  if (gate == nullptr || !request->kv.place || !may_use_prefix(*request)) co_return BroughtBlocks();
  auto work = [gate, request] {
    return std::make_shared<BroughtBlocks>(gate, gate->bring(prompt_of(*request), request->adapter, *request->kv.place));
  };
  std::exception_ptr failure;
  try {
    std::string what = "blocks of the prompt from the engine that computed it";
    auto bringing = context->kv_workers->run(std::move(work), kBringTime, std::move(what));
    const std::shared_ptr<BroughtBlocks> brought = co_await std::move(bringing);
    co_return std::move(*brought);
  } catch (const Error&) {
    failure = std::current_exception();
  }
  const Error error = net::to_error(failure);
  if (error.code() == ErrorCode::kCancelled || error.code() == ErrorCode::kUnauthorized) throw error;
  log::warning("blocks of a prompt are not brought, it is computed here: {}", error.what());
  co_return BroughtBlocks();
}

std::string prefill_reply(const ServerContext& context, const PreparedRequest& request, std::int64_t num_cached_tokens) {
  const transfer::KvPlace place = context.backend->kv()->own_place();
  JsonWriter out;
  out.begin_object();
  out.key("id").string(request.id);
  out.key("object").string("prefill");
  out.key("model").string(request.model);
  out.key("usage").begin_object();
  out.key("prompt_tokens").integer(request.num_prompt_tokens());
  out.key("cached_tokens").integer(num_cached_tokens);
  out.end_object();
  out.key("kv_transfer_params").begin_object();
  out.key("do_remote_prefill").boolean(true);
  out.key("remote_host").string(place.host);
  out.key("remote_port").integer(place.port);
  out.key("remote_key").string(place.signature);
  out.end_object();
  return out.end_object().take();
}

}  // namespace prl::server
