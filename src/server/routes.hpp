#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "net/http_message.hpp"
#include "server/server_context.hpp"

/// The handlers of ApiServer, one coroutine per route; private to the module.
namespace prl::server {

/// Of an adapter, and so of a run.
inline constexpr std::size_t kMaxAdapterNameBytes = 256;

using net::HttpRequest;
using net::HttpResponse;
using Context = std::shared_ptr<ServerContext>;
using Reply = net::asio::awaitable<HttpResponse>;

Reply chat_completions(Context context, HttpRequest request);
Reply chat_completions_tokens(Context context, HttpRequest request);
Reply completions(Context context, HttpRequest request);
Reply generate(Context context, HttpRequest request);
Reply responses(Context context, HttpRequest request);
/// Routes of other servers that clients may try: a 404 that says what this one has instead.
Reply not_offered(Context context, HttpRequest request);

Reply list_models(Context context, HttpRequest request);
Reply tokenize(Context context, HttpRequest request);
Reply detokenize(Context context, HttpRequest request);

Reply health(Context context, HttpRequest request);
Reply liveness(Context context, HttpRequest request);
Reply ping(Context context, HttpRequest request);
Reply version(Context context, HttpRequest request);

/// Runs `work` on the admin thread, one change at a time in order of arrival, and replies with the JSON that it returns. `what` says in an
/// error what was waited for.
Reply on_admin(Context context, std::function<std::string()> work, std::string what);
/// Fails for what is no "tcp://host:port" of a trainer, naming the field.
void require_store(const char* key, const std::string& store);
Reply update_weights(Context context, HttpRequest request);
Reply init_broadcaster(Context context, HttpRequest request);
Reply reload_weights(Context context, HttpRequest request);
Reply release(Context context, HttpRequest request);
Reply weight_proof(Context context, HttpRequest request);
Reply pause(Context context, HttpRequest request);
Reply resume(Context context, HttpRequest request);
Reply reset_prefix_cache(Context context, HttpRequest request);

/// Runs that share the engine (TenantBook). put_run makes one or changes it.
Reply list_runs(Context context, HttpRequest request);
Reply put_run(Context context, HttpRequest request);
Reply pause_run(Context context, HttpRequest request);
Reply resume_run(Context context, HttpRequest request);
Reply drain_run(Context context, HttpRequest request);
Reply cancel_run(Context context, HttpRequest request);
Reply remove_run(Context context, HttpRequest request);

/// As vLLM has them, answering in plain text.
Reply load_lora_adapter(Context context, HttpRequest request);
Reply unload_lora_adapter(Context context, HttpRequest request);
/// Loads an adapter or gives one of that name other weights, and answers in JSON.
Reply put_lora_adapter(Context context, HttpRequest request);

}  // namespace prl::server
