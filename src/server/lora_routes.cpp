#include <limits>
#include <optional>
#include <utility>

#include "base/log.hpp"
#include "server/json_fields.hpp"
#include "server/routes.hpp"

namespace prl::server {
namespace {

AdapterBook& book_of(const ServerContext& context) {
  AdapterBook* book = context.backend->adapters();
  if (book == nullptr)
    throw net::HttpError(400, ErrorCode::kInvalidArgument, "this server serves no LoRA adapters; start it with enable_lora", "enable_lora");
  return *book;
}

std::string required_text(const JsonFields& fields, const char* key, const char* what) {
  const auto value = fields.string(key);
  if (!value || value->empty()) net::fail_param(key, fmt::format("{}: wanted {}", key, what));
  if (value->find('\0') != std::string::npos) net::fail_param(key, fmt::format("{}: there is a zero byte in it", key));
  return *value;
}

/// A name of the model itself would hide the adapter.
std::string adapter_name(const ServerContext& context, const JsonFields& fields) {
  std::string name = required_text(fields, "lora_name", "the name that requests give as model");
  if (name.size() > kMaxAdapterNameBytes)
    net::fail_param("lora_name", fmt::format("lora_name: wanted at most {} bytes", kMaxAdapterNameBytes));
  for (const std::string& served : context.options.served_names)
    if (name == served) net::fail_param("lora_name", fmt::format("lora_name: '{}' is the name of the model itself", name));
  return name;
}

/// Of a folder or a trainer's store, and the version, which only a store needs.
struct AdapterOrder {
  WeightSource source;
  std::optional<PolicyVersion> version;
};

AdapterOrder order_in(const JsonFields& fields) {
  AdapterOrder order;
  order.source.store = fields.string("store").value_or("");
  if (const auto number = fields.integer("version", 0, std::numeric_limits<std::int64_t>::max())) order.version = PolicyVersion{*number};
  if (order.source.store.empty()) {
    order.source.folder = required_text(fields, "lora_path", "the path of a folder with adapter_config.json and adapter_model.safetensors");
    return order;
  }
  if (fields.string("lora_path")) net::fail_param("store", "store: wanted a lora_path or a store, found both");
  require_store("store", order.source.store);
  if (!order.version) net::fail_param("version", "version: is needed for an adapter from a trainer");
  return order;
}

/// Loads the adapter on the admin thread, then answers `reply`, in which {} is the name.
Reply load_adapter(Context context, HttpRequest request, bool may_replace, bool is_json) {
  book_of(*context);
  const boost::json::object body = parse_body(request.body);
  const JsonFields fields(body);
  const std::string name = adapter_name(*context, fields);
  const AdapterOrder order = order_in(fields);
  const bool replaces = may_replace || fields.boolean("load_inplace").value_or(false);
  auto work = [context, name, order, replaces] {
    const auto began = net::Clock::now();
    try {
      book_of(*context).load(name, order.source, replaces, order.version);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kAlreadyExists) throw;
      throw net::HttpError(400, error.code(), error.what(), "lora_name");  // vLLM's status
    }
    log::info("LoRA adapter '{}'{} from {} in {:.3f} s", name, order.version ? fmt::format(" v{}", order.version->value) : "",
              order.source.describe(), std::chrono::duration<double>(net::Clock::now() - began).count());
  };
  std::string what = "the adapter to be loaded";
  auto running = context->admin_worker->run(std::move(work), context->options.admin_timeout, std::move(what));
  co_await std::move(running);
  if (is_json) co_return HttpResponse::json(R"({"status":"ok"})");
  co_return HttpResponse::text(fmt::format("Success: LoRA adapter '{}' added successfully.", name));
}

}  // namespace

Reply load_lora_adapter(Context context, HttpRequest request) { return load_adapter(std::move(context), std::move(request), false, false); }
Reply put_lora_adapter(Context context, HttpRequest request) { return load_adapter(std::move(context), std::move(request), true, true); }

Reply unload_lora_adapter(Context context, HttpRequest request) {
  AdapterBook& book = book_of(*context);
  const boost::json::object body = parse_body(request.body);
  const std::string name = required_text(JsonFields(body), "lora_name", "the name of an adapter");
  book.unload(name);
  log::info("LoRA adapter '{}' is gone", name);
  co_return HttpResponse::text(fmt::format("Success: LoRA adapter '{}' removed successfully.", name));
}

}  // namespace prl::server
