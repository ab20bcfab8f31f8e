#include "env/http_generate_client.hpp"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <algorithm>
#include <utility>

#include "base/base64.hpp"
#include "base/error.hpp"
#include "env/detail/service_health.hpp"
#include "net/service.hpp"
#include "text/json_python.hpp"
#include "vision/prompt.hpp"

namespace prl::env {
namespace {

namespace json = boost::json;

/// How a server answers that leaves a prompt to another engine.
constexpr int kNeedsPrefill = 412;

json::object sampling_json(const wire::SamplingParams& sampling) {
  json::object object;
  object["temperature"] = sampling.temperature;
  object["top_p"] = sampling.top_p;
  object["top_k"] = sampling.top_k;
  object["min_p"] = sampling.min_p;
  object["repetition_penalty"] = sampling.repetition_penalty;
  object["presence_penalty"] = sampling.presence_penalty;
  object["frequency_penalty"] = sampling.frequency_penalty;
  // JSON integers end at 2^63 - 1 for many parsers; the engine sees the same number whichever way the seed came.
  if (sampling.seed) object["seed"] = static_cast<std::int64_t>(*sampling.seed & 0x7fff'ffff'ffff'ffffull);
  if (sampling.max_tokens) object["max_tokens"] = *sampling.max_tokens;
  object["min_tokens"] = sampling.min_tokens;
  if (!sampling.stop.empty()) {
    json::array stop;
    for (const std::string& text : sampling.stop) stop.emplace_back(text);
    object["stop"] = std::move(stop);
    object["include_stop_str_in_output"] = sampling.include_stop_str_in_output;
  }
  json::array ids;
  for (const std::int32_t id : sampling.stop_token_ids) ids.emplace_back(id);
  object["stop_token_ids"] = std::move(ids);
  object["ignore_eos"] = sampling.ignore_eos;
  object["skip_special_tokens"] = sampling.skip_special_tokens;
  object["logprobs"] = sampling.logprobs.value_or(1);
  if (sampling.prompt_logprobs) object["prompt_logprobs"] = *sampling.prompt_logprobs;
  if (sampling.routed_experts_start) object["routed_experts_prompt_start"] = *sampling.routed_experts_start;
  if (!sampling.logit_bias.empty()) {
    json::object bias;
    for (const auto& [id, value] : sampling.logit_bias) bias[std::to_string(id)] = value;
    object["logit_bias"] = std::move(bias);
  }
  if (!sampling.allowed_token_ids.empty()) {
    json::array allowed;
    for (const std::int32_t id : sampling.allowed_token_ids) allowed.emplace_back(id);
    object["allowed_token_ids"] = std::move(allowed);
  }
  if (!sampling.extra_json.empty()) {
    const json::object extra = text::parse_json(sampling.extra_json, text::kJsonDepth, text::LargeNumbers::kKeepText).as_object();
    for (const auto& member : extra)
      if (!object.contains(member.key())) object[member.key()] = member.value();
  }
  return object;
}

/// Images of a prompt as our server reads them: pictures at the tower's size as PNG files, which lose nothing, where vLLM has tensors.
json::object features_json(const std::vector<wire::PromptImage>& images) {
  json::array hashes, places, data;
  for (const wire::PromptImage& image : images) {
    const wire::ImagePixels& p = *image.pixels;
    hashes.emplace_back(vision::hash_text(p));
    places.push_back(json::object{{"offset", image.first}, {"length", image.num_tokens()}});
    data.emplace_back(vision::png_data_uri(vision::encode_png({.width = p.width, .height = p.height, .rgb = p.rgb})));
  }
  return {{"mm_hashes", json::object{{"image", std::move(hashes)}}},
          {"mm_placeholders", json::object{{"image", std::move(places)}}},
          {"kwargs_data", json::object{{"image", std::move(data)}}}};
}

wire::FinishReason finish_reason_of(const std::string& text) {
  if (text == "stop" || text == "tool_calls") return wire::FinishReason::kStop;
  if (text == "length") return wire::FinishReason::kLength;
  if (text == "abort") return wire::FinishReason::kAbort;
  return wire::FinishReason::kError;
}

void read_prompt_logprobs(const json::value& list, wire::GenerateOutput& output) {
  for (const json::value& position : list.as_array()) {
    float logprob = 0.0f;
    if (position.is_object() && !position.get_object().empty()) {
      const json::value& first = position.get_object().begin()->value();
      logprob = static_cast<float>(first.is_object() ? first.at("logprob").to_number<double>() : first.to_number<double>());
    }
    output.prompt_logprobs.push_back(logprob);
  }
}

wire::RoutedExperts read_experts(const json::object& object) {
  const json::array& shape = object.at("shape").as_array();
  const auto size = [&](std::size_t i) { return shape.at(i).to_number<std::int64_t>(); };
  wire::RoutedExperts experts = wire::decode_experts("routed_experts", from_base64(object.at("data").as_string()),
                                                     object.at("dtype").as_string(), size(0), size(1), size(2));
  if (const json::value* start = object.if_contains("start")) experts.start = start->to_number<std::int64_t>();
  return experts;
}

wire::GenerateOutput parse_output(const json::object& body) {
  wire::GenerateOutput output;
  if (const json::value* id = body.if_contains("request_id"); id != nullptr && id->is_string())
    output.request_id = std::string(id->get_string());
  if (const json::value* params = body.if_contains("kv_transfer_params"); params != nullptr && params->is_object()) {
    output.kv_transfer_params = text::to_json_text(*params);
    return output;
  }
  const json::object& choice = body.at("choices").as_array().at(0).as_object();
  for (const json::value& id : choice.at("token_ids").as_array())
    output.token_ids.push_back(static_cast<std::int32_t>(id.to_number<std::int64_t>()));
  for (const json::value& entry : choice.at("logprobs").at("content").as_array())
    output.logprobs.push_back(static_cast<float>(entry.at("logprob").to_number<double>()));
  if (const json::value* versions = choice.if_contains("policy_versions"); versions != nullptr && versions->is_array())
    for (const json::value& version : versions->get_array()) output.versions.push_back(version.to_number<std::int64_t>());
  if (!output.versions.empty()) {
    output.version_start = PolicyVersion{output.versions.front()};
    output.version_end = PolicyVersion{output.versions.back()};
  }
  if (const json::value* experts = choice.if_contains("routed_experts"); experts != nullptr && experts->is_object())
    output.routed_experts = read_experts(experts->get_object());
  const json::value& reason = choice.at("finish_reason");
  output.finish_reason = reason.is_string() ? finish_reason_of(std::string(reason.get_string())) : wire::FinishReason::kStop;
  if (const json::value* list = body.if_contains("prompt_logprobs"); list != nullptr && list->is_array())
    read_prompt_logprobs(*list, output);
  if (const json::value* usage = body.if_contains("usage"); usage != nullptr && usage->is_object()) {
    if (const json::value* count = usage->get_object().if_contains("prompt_tokens"); count != nullptr && count->is_number())
      output.num_prompt_tokens = count->to_number<std::int64_t>();
  }
  return output;
}

class HttpGenerateClient final : public GenerateClient {
 public:
  HttpGenerateClient(std::shared_ptr<net::HttpClient> client, HttpGenerateOptions options)
      : client_(std::move(client)),
        model_(std::move(options.model)),
        asked_(options.adapter.empty() ? model_ : std::move(options.adapter)),
        root_(net::server_root(options.base_url)),
        max_retries_(options.max_retries) {}

  asio::awaitable<wire::GenerateOutput> generate(wire::GenerateRequest request, net::TimePoint deadline) override {
    net::HttpCall call;
    call.method = "POST";
    call.url = root_ + "/inference/v1/generate";
    call.deadline = deadline;
    call.max_retries = max_retries_;
    for (const auto& [name, value] : request.headers) call.headers.add(name, value);
    if (!request.session_id.empty() && call.headers.find("X-Session-ID") == nullptr) call.headers.add("X-Session-ID", request.session_id);
    call.body = body_of(request);
    auto calling = client_->call(std::move(call));
    const net::HttpReply reply = co_await std::move(calling);
    if (reply.status == kNeedsPrefill && !request.kv_transfer_params.empty()) {
      wire::GenerateOutput output;
      output.needs_prefill = true;
      co_return output;
    }
    reply.raise_for_status(root_ + "/inference/v1/generate");
    co_return parse(reply);
  }

  asio::awaitable<void> check_health(net::TimePoint deadline) override {
    auto checking = detail::wait_for_service(client_, root_, model_, deadline);
    co_await std::move(checking);
  }

  std::string describe() const override { return root_; }

 private:
  std::string body_of(const wire::GenerateRequest& request) const {
    json::object body;
    body["model"] = asked_;
    json::array ids;
    ids.reserve(request.prompt_ids.size());
    for (const std::int32_t id : request.prompt_ids) ids.emplace_back(id);
    body["token_ids"] = std::move(ids);
    body["sampling_params"] = sampling_json(request.sampling);
    if (!request.images.empty()) body["features"] = features_json(request.images);
    if (!request.cache_salt.empty()) body["cache_salt"] = request.cache_salt;
    if (request.priority != 0) body["priority"] = request.priority;
    if (!request.kv_transfer_params.empty()) body["kv_transfer_params"] = text::parse_json(request.kv_transfer_params, text::kJsonDepth);
    return text::to_json_text(body);
  }

  wire::GenerateOutput parse(const net::HttpReply& reply) const {
    const json::value body = reply.json();
    try {
      return parse_output(body.as_object());
    } catch (const std::exception& error) {
      fail(ErrorCode::kCorrupt, "{}/inference/v1/generate answered something else than tokens ({}): {}", root_, error.what(),
           reply.body.substr(0, 200));
    }
  }

  std::shared_ptr<net::HttpClient> client_;
  std::string model_, asked_;
  std::string root_;
  int max_retries_;
};

}  // namespace

std::shared_ptr<GenerateClient> make_http_generate_client(std::shared_ptr<net::HttpClient> client, HttpGenerateOptions options) {
  return std::make_shared<HttpGenerateClient>(std::move(client), std::move(options));
}

}  // namespace prl::env
