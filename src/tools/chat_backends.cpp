#include "tools/chat_backends.hpp"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <boost/json.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "base/interrupts.hpp"
#include "base/queue.hpp"
#include "base/units.hpp"
#include "config/text_format.hpp"
#include "launch/engine_host.hpp"
#include "launch/prompt_images.hpp"
#include "net/http_client.hpp"
#include "net/io_runtime.hpp"
#include "text/detokenizer.hpp"
#include "vision/prompt.hpp"

namespace prl::tools {
namespace json = boost::json;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
namespace {

/// How long a reply may show no sign of life.
constexpr milliseconds kStall = std::chrono::minutes(5);
/// How often a waiting loop looks whether the user wants to stop.
constexpr milliseconds kLook{100};

json::object assistant(std::string content) { return json::object{{"role", "assistant"}, {"content", std::move(content)}}; }

class LocalChat final : public ChatBackend {
 public:
  explicit LocalChat(const config::ChatConfig& config) : sampling_(launch::sampling_params(config.sampling)), name_(config.model.name) {
    config::InferenceConfig inference;
    inference.model.name = config.model.name;
    inference.model.dtype = config.compute.dtype;
    inference.compute = config.compute;
    inference.max_num_seqs = 1;
    host_ = std::make_unique<launch::EngineHost>(inference, launch::make_runtime(config.compute), 1);
    images_ = launch::image_processor_of(*host_);
    if (!host_->text().renderer) fail(ErrorCode::kInvalidArgument, "{} has no chat template: it cannot be talked to", config.model.name);
  }
  ~LocalChat() override { host_->engine().shutdown(); }

  std::string describe() const override { return fmt::format("{}, {} parameters", name_, host_->engine().model_config().num_parameters()); }

  ChatReply reply(const json::array& messages, const ChatTextSink& sink, const std::function<bool()>& is_interrupted) override {
    const auto start = Clock::now();
    wire::GenerateRequest request;
    fill_prompt(request, messages);
    request.sampling = sampling_;
    const std::vector<std::int32_t> stops = host_->text().renderer->stop_token_ids();
    request.sampling.stop_token_ids.insert(request.sampling.stop_token_ids.end(), stops.begin(), stops.end());
    // The engine must not wait for the terminal: room for every token of a reply.
    auto events =
        std::make_shared<BoundedQueue<wire::GenerateOutput>>(static_cast<std::size_t>(host_->engine().options().max_model_len) + 2);
    const RequestId id = host_->engine().submit(std::move(request), [events](const engine::StepEvent& event) {
      wire::GenerateOutput copy = event.delta;
      static_cast<void>(events->try_push(copy));
    });
    text::IncrementalDetokenizer detokenizer(*host_->text().tokenizer);
    ChatReply result;
    std::string content;
    const auto show = [&](const std::string& text) {
      content += text;
      if (!text.empty()) sink(text, false);
    };
    auto last_event = Clock::now();
    bool was_interrupted = false;
    for (;;) {
      if (!was_interrupted && is_interrupted()) {
        was_interrupted = true;
        host_->engine().cancel(id);
      }
      const auto event = events->pop(kLook);
      if (!event) {
        if (Clock::now() - last_event < kStall) continue;
        host_->engine().cancel(id);
        fail(ErrorCode::kDeadline, "the engine has given no token for {} s",
             std::chrono::duration_cast<std::chrono::seconds>(kStall).count());
      }
      last_event = Clock::now();
      for (const std::int32_t token : event->token_ids) {
        ++result.num_completion_tokens;
        if (!was_interrupted) show(detokenizer.push(token));
      }
      if (event->finish_reason == wire::FinishReason::kNone) continue;
      if (event->finish_reason == wire::FinishReason::kError) fail(ErrorCode::kInternal, "{}", event->error);
      if (!was_interrupted) show(detokenizer.finish());
      result.finish_reason = was_interrupted ? "interrupted" : wire::to_string(event->finish_reason);
      break;
    }
    result.message = assistant(std::move(content));
    result.seconds = seconds_since(start);
    return result;
  }

 private:
  /// Images go by the chat template, as renderers write text alone.
  void fill_prompt(wire::GenerateRequest& request, const json::array& messages) {
    std::vector<std::shared_ptr<const wire::ImagePixels>> images;
    for (const json::value& message : messages) {
      const json::array* parts = message.at("content").if_array();
      for (std::size_t i = 0; parts != nullptr && i < parts->size(); ++i) {
        if ((*parts)[i].at("type") != "image_url") continue;
        if (images_ == nullptr) fail(ErrorCode::kInvalidArgument, "{} takes no images: it has no vision tower", name_);
        const std::string bytes = vision::bytes_of_data_uri(std::string_view((*parts)[i].at("image_url").at("url").as_string()), {});
        images.push_back(images_->process(vision::decode_image(bytes, {})));
      }
    }
    if (images.empty()) {
      request.prompt_ids = host_->text().renderer->render_ids(messages, {}, true);
      return;
    }
    if (!host_->text().chat_template) fail(ErrorCode::kInvalidArgument, "{} has no chat template, which images need", name_);
    text::RenderOptions options{.add_generation_prompt = true};
    options.keeps_images = true;
    request.prompt_ids = host_->text().tokenizer->encode(host_->text().chat_template->render(messages, options));
    const std::int32_t placeholder = host_->engine().model_config().vision->image_token_id;
    request.images = vision::place_images(*images_, placeholder, images, request.prompt_ids);
  }

  std::shared_ptr<const vision::ImageProcessor> images_;
  wire::SamplingParams sampling_;
  std::string name_;
  std::unique_ptr<launch::EngineHost> host_;
};

/// What a streamed reply has brought so far; pieces go from the I/O thread to the terminal's thread.
struct Stream {
  struct Piece {
    std::string text;
    bool is_reasoning = false;
  };
  BoundedQueue<Piece> pieces{65536};
  std::atomic<bool> is_cancelled{false};
  std::string finish_reason;  // these two: I/O thread until the queue is closed
  std::int64_t num_completion_tokens = 0;
  std::optional<Error> error;
};

/// Reads one chunk of /chat/completions; false at the end.
bool take_chunk(Stream& stream, const std::string& data) {
  if (data == "[DONE]") return false;
  boost::system::error_code ec;
  const json::value value = json::parse(data, ec);
  const json::object* chunk = ec ? nullptr : value.if_object();
  if (chunk == nullptr) fail(ErrorCode::kCorrupt, "the server sent a chunk that is no JSON object: {}", data.substr(0, 200));
  if (const json::value* error = chunk->if_contains("error"))
    fail(ErrorCode::kUnavailable, "the server ended the reply: {}", json::serialize(*error).substr(0, 500));
  if (const json::value* usage = chunk->if_contains("usage"); usage != nullptr && usage->is_object())
    if (const json::value* count = usage->get_object().if_contains("completion_tokens"); count != nullptr && count->is_int64())
      stream.num_completion_tokens = count->get_int64();
  const json::value* choices = chunk->if_contains("choices");
  if (choices == nullptr || !choices->is_array() || choices->get_array().empty() || !choices->get_array()[0].is_object()) return true;
  const json::object& choice = choices->get_array()[0].get_object();
  if (const json::value* reason = choice.if_contains("finish_reason"); reason != nullptr && reason->is_string())
    stream.finish_reason = reason->get_string().c_str();
  const json::value* delta = choice.if_contains("delta");
  if (delta == nullptr || !delta->is_object()) return true;
  for (const char* key : {"reasoning_content", "reasoning", "content"}) {
    const json::value* text = delta->get_object().if_contains(key);
    if (text == nullptr || !text->is_string() || text->get_string().empty()) continue;
    Stream::Piece piece{text->get_string().c_str(), std::string_view(key) != "content"};
    if (!stream.pieces.try_push(piece)) fail(ErrorCode::kOverloaded, "the terminal reads the reply too slowly");
  }
  return true;
}

net::asio::awaitable<void> read_stream(std::shared_ptr<net::HttpClient> client, net::HttpCall call, std::shared_ptr<Stream> stream) {
  try {
    auto opening = client->open_sse(std::move(call));
    net::SseStream events = co_await std::move(opening);
    while (!stream->is_cancelled) {
      auto next = events.next(kStall);
      const std::optional<net::SseEvent> event = co_await std::move(next);
      if (!event || !take_chunk(*stream, event->data)) break;
    }
  } catch (const Error& error) {
    stream->error = error;
  }
  stream->pieces.close();
}

class ServerChat final : public ChatBackend {
 public:
  explicit ServerChat(const config::ChatConfig& config) : sampling_(config.sampling), model_(config.model.name), io_(1, "chat") {
    url_ = config.client->base_url.front();
    while (url_.ends_with('/')) url_.pop_back();
    if (!url_.ends_with("/v1")) url_ += "/v1";
    net::HttpClient::Options options;
    options.timeout = milliseconds(static_cast<std::int64_t>(config.client->timeout * 1000));
    if (const char* key = std::getenv(config.client->api_key_var.c_str())) options.bearer = key;
    for (const auto& [name, value] : config.client->headers) options.headers.add(name, value);
    client_ = std::make_shared<net::HttpClient>(io_.executor(), options);
  }

  std::string describe() const override { return fmt::format("{} at {}", model_, url_); }

  ChatReply reply(const json::array& messages, const ChatTextSink& sink, const std::function<bool()>& is_interrupted) override {
    const auto start = Clock::now();
    net::HttpCall call;
    call.method = "POST";
    call.url = url_ + "/chat/completions";
    call.body = json::serialize(body(messages));
    auto stream = std::make_shared<Stream>();
    io_.spawn("the chat reply", read_stream(client_, std::move(call), stream));
    ChatReply result;
    std::string content, reasoning;
    for (;;) {
      if (is_interrupted()) {
        stream->is_cancelled = true;  // its connection closes with the next chunk, which cancels the generation
        result.finish_reason = "interrupted";
        break;
      }
      const auto piece = stream->pieces.pop(kLook);
      if (piece) {
        (piece->is_reasoning ? reasoning : content) += piece->text;
        ++result.num_completion_tokens;
        sink(piece->text, piece->is_reasoning);
      } else if (stream->pieces.is_closed()) {
        if (stream->error) throw *stream->error;
        result.finish_reason = stream->finish_reason;
        if (stream->num_completion_tokens > 0) result.num_completion_tokens = stream->num_completion_tokens;
        break;
      }
    }
    result.message = assistant(std::move(content));
    if (!reasoning.empty()) result.message["reasoning_content"] = reasoning;
    result.seconds = seconds_since(start);
    return result;
  }

 private:
  json::object body(const json::array& messages) const {
    json::object object{
        {"model", model_}, {"messages", messages}, {"stream", true}, {"stream_options", json::object{{"include_usage", true}}}};
    if (sampling_.temperature) object["temperature"] = *sampling_.temperature;
    if (sampling_.top_p) object["top_p"] = *sampling_.top_p;
    if (sampling_.top_k) object["top_k"] = *sampling_.top_k;
    if (sampling_.min_p) object["min_p"] = *sampling_.min_p;
    if (sampling_.repetition_penalty) object["repetition_penalty"] = *sampling_.repetition_penalty;
    if (sampling_.max_completion_tokens) object["max_tokens"] = *sampling_.max_completion_tokens;
    if (sampling_.min_tokens) object["min_tokens"] = *sampling_.min_tokens;
    if (sampling_.seed) object["seed"] = *sampling_.seed;
    const json::value extra = json::parse(config::to_compact_json(sampling_.extra_body));
    for (const auto& member : extra.as_object()) object[member.key()] = member.value();
    return object;
  }

  config::EvalSamplingConfig sampling_;
  std::string model_, url_;
  net::IoRuntime io_;
  std::shared_ptr<net::HttpClient> client_;
};

/// Lines of standard input, with an eye on interruptions while waiting.
class StdinLines {
 public:
  explicit StdinLines(Interrupts& interrupts) : interrupts_(interrupts) {}
  std::optional<std::string> next() {
    for (;;) {
      if (const std::size_t end = buffer_.find('\n'); end != std::string::npos) {
        std::string line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        if (line.ends_with('\r')) line.pop_back();
        return line;
      }
      if (is_ended_) return buffer_.empty() ? std::nullopt : std::optional(std::exchange(buffer_, std::string()));
      if (buffer_.size() > kMaxLineBytes) fail(ErrorCode::kInvalidArgument, "a line of more than {} bytes", kMaxLineBytes);
      pollfd ready{STDIN_FILENO, POLLIN, 0};
      const int count = ::poll(&ready, 1, static_cast<int>(kLook.count()));
      if (interrupts_.take()) return std::nullopt;
      if (count <= 0) continue;
      char bytes[4096];
      const ssize_t size = ::read(STDIN_FILENO, bytes, sizeof bytes);
      if (size > 0) buffer_.append(bytes, static_cast<std::size_t>(size));
      if (size == 0) is_ended_ = true;
    }
  }

 private:
  static constexpr std::size_t kMaxLineBytes = 16 << 20;
  Interrupts& interrupts_;
  std::string buffer_;
  bool is_ended_ = false;
};

}  // namespace

std::unique_ptr<ChatBackend> make_local_chat(const config::ChatConfig& config) { return std::make_unique<LocalChat>(config); }
std::unique_ptr<ChatBackend> make_server_chat(const config::ChatConfig& config) { return std::make_unique<ServerChat>(config); }

int run_chat(const config::ChatConfig& config) {
  Interrupts interrupts;  // before the threads of the backend
  const auto backend = config.client ? make_server_chat(config) : make_local_chat(config);
  StdinLines lines(interrupts);
  ChatTerminal terminal;
  terminal.has_color = ::isatty(STDOUT_FILENO) == 1;
  terminal.shows_hints = ::isatty(STDIN_FILENO) == 1 && terminal.has_color;
  terminal.write = [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };
  terminal.read_line = [&](std::string_view prompt) {
    if (terminal.shows_hints) terminal.write(prompt);
    std::optional<std::string> line = lines.next();
    if (!line && terminal.shows_hints) terminal.write("\n");
    return line;
  };
  terminal.is_interrupted = [&] { return interrupts.take(); };
  return run_chat_loop(*backend, {.system_prompt = config.system_prompt, .prompt = config.prompt}, terminal);
}

}  // namespace prl::tools
