#include <utility>

#include "base/log.hpp"
#include "server/json_fields.hpp"
#include "server/json_writer.hpp"
#include "server/routes.hpp"

namespace prl::server {
namespace {

std::string proof_body(const engine::WeightProof& proof) {
  JsonWriter out;
  out.begin_object().key("status").string("ok");
  out.key("policy_version").integer(proof.version.value);
  out.key("checksum").string(fmt::format("{:016x}", proof.checksum));
  out.key("probe_logprobs").begin_array();
  for (const float value : proof.probe_logprobs) out.number(value);
  return out.end_array().end_object().take();
}

boost::json::object optional_body(const HttpRequest& request) {
  return request.body.empty() ? boost::json::object() : parse_body(request.body);
}

/// A server that a run has started knows it already; the guard has checked the request.
void check_claim(const Context& context, const HttpRequest& request) {
  if (context->options.run_id.empty()) context->claim.take(request);
}

}  // namespace

Reply on_admin(Context context, std::function<std::string()> work, std::string what) {
  auto running = context->admin_worker->run(std::move(work), context->options.admin_timeout, std::move(what));
  std::string body = co_await std::move(running);
  co_return HttpResponse::json(std::move(body));
}

void require_store(const char* key, const std::string& store) {
  if (!store.starts_with("tcp://")) net::fail_param(key, fmt::format("{}: wanted tcp://host:port of a trainer, found {}", key, store));
}

Reply update_weights(Context context, HttpRequest request) {
  const boost::json::object body = optional_body(request);
  const JsonFields fields(body);
  const std::string folder = fields.string("weight_dir").value_or("");
  const std::string store = fields.string("store").value_or("");
  if (folder.find('\0') != std::string::npos) net::fail_param("weight_dir", "weight_dir: a path holds no zero byte");
  if (!store.empty()) require_store("store", store);
  const bool may_go_back = fields.boolean("force").value_or(false);
  std::optional<PolicyVersion> version;
  if (const auto number = fields.integer("version", 0, std::numeric_limits<std::int64_t>::max())) version = PolicyVersion{*number};
  check_claim(context, request);
  auto work = [context, folder, store, version, may_go_back] {
    // Without a folder weights are those of the trainer that this request or POST /init_broadcaster named.
    WeightSource source{.folder = folder, .store = {}};
    if (folder.empty()) source.store = store.empty() ? context->broadcaster : store;
    if (folder.empty() && source.store.empty())
      net::fail_param("weight_dir",
                      "weight_dir: wanted the path of a Hugging Face folder, or the trainer's `store`, or POST /init_broadcaster before");
    if (folder.empty() && !version) net::fail_param("version", "version: is needed for weights from a trainer");
    const auto began = net::Clock::now();
    const engine::WeightProof proof = context->backend->update_weights(source, version, may_go_back);
    const double seconds = std::chrono::duration<double>(net::Clock::now() - began).count();
    log::success("weights of policy version {} are in use, from {} in {:.2f} s", proof.version.value, source.describe(), seconds);
    return proof_body(proof);
  };
  return on_admin(context, std::move(work), "the update of the weights");
}

Reply init_broadcaster(Context context, HttpRequest request) {
  const boost::json::object body = optional_body(request);
  const JsonFields fields(body);
  const std::string host = fields.string("host").value_or("");
  if (host.empty() || host.find_first_of(" /@") != std::string::npos)
    net::fail_param("host", "host: wanted the name or address of the trainer");
  const auto port = fields.integer("port", 1, 65535);
  if (!port) net::fail_param("port", "port: wanted the port of the trainer's store");
  check_claim(context, request);
  auto work = [context, store = fmt::format("tcp://{}:{}", host == "localhost" ? "127.0.0.1" : host, *port)] {
    context->broadcaster = store;
    log::info("weights come from the trainer at {}", store);
    return std::string(R"({"status":"initialized"})");
  };
  return on_admin(context, std::move(work), "the trainer's address to be noted");
}

Reply reload_weights(Context context, HttpRequest request) {
  check_claim(context, request);
  auto work = [context] { return proof_body(context->backend->reload_weights()); };
  return on_admin(context, std::move(work), "the return to the first weights");
}

Reply release(Context context, HttpRequest request) {
  co_return HttpResponse::json(context->claim.release(request) ? R"({"status":"released"})" : R"({"status":"not_held"})");
}

Reply weight_proof(Context context, HttpRequest request) {
  const std::string adapter(request.query.get("adapter"));
  auto work = [context, adapter] { return proof_body(adapter.empty() ? context->backend->proof() : context->backend->proof_of(adapter)); };
  return on_admin(context, std::move(work), "the engine to prove its weights");
}

Reply pause(Context context, HttpRequest request) {
  // Requests in flight are always kept, and held until /resume; other modes of vLLM are accepted and mean the same.
  const bool clears = request.query.get("clear_cache") == "true";
  auto work = [context, clears] {
    context->backend->pause();
    if (clears) context->backend->reset_prefix_cache();
    return std::string(R"({"status":"paused"})");
  };
  return on_admin(context, std::move(work), "the engine to pause");
}

Reply resume(Context context, HttpRequest) {
  auto work = [context] {
    context->backend->resume();
    return std::string(R"({"status":"resumed"})");
  };
  return on_admin(context, std::move(work), "the engine to resume");
}

Reply reset_prefix_cache(Context context, HttpRequest) {
  auto work = [context] {
    context->backend->reset_prefix_cache();
    return std::string(R"({"status":"ok"})");
  };
  return on_admin(context, std::move(work), "the prefix cache to be cleared");
}

}  // namespace prl::server
