#include "tools/chat.hpp"

#include <utility>

#include "base/base64.hpp"
#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::tools {
namespace json = boost::json;
namespace {

constexpr std::string_view kHelp =
    "/reset         forget the conversation\n"
    "/system TEXT   forget it and begin with this system message; without TEXT, with none\n"
    "/image PATH    show this PNG or JPEG file with the next message\n"
    "/undo          take back the last message and its reply\n"
    "/exit          leave (also Ctrl-D)\n"
    "A line that ends in \\ continues in the next one. Ctrl-C ends a reply.\n";
constexpr std::size_t kMaxImageBytes = std::size_t{20} << 20;
constexpr std::string_view kDim = "\x1b[2m", kPlain = "\x1b[0m";

class Conversation {
 public:
  Conversation(ChatBackend& backend, const ChatOptions& options, const ChatTerminal& terminal)
      : backend_(backend), terminal_(terminal), system_(options.system_prompt) {
    reset();
  }

  void reset() {
    messages_.clear();
    images_.clear();
    if (system_ && !system_->empty()) messages_.push_back(json::object{{"role", "system"}, {"content", *system_}});
    num_fixed_ = messages_.size();
  }
  void set_system(std::string text) {
    system_ = std::move(text);
    reset();
  }
  /// False if there is nothing to take back.
  bool undo() {
    if (messages_.size() < num_fixed_ + 2) return false;
    messages_.pop_back();
    messages_.pop_back();
    return true;
  }

  /// Keeps a picture for the next message; what is wrong with the file.
  std::optional<std::string> add_image(const std::string& path) {
    try {
      const std::string bytes = read_file(path, kMaxImageBytes);
      const char* const type = bytes.starts_with("\x89PNG") ? "png" : "jpeg";
      const std::string uri = fmt::format("data:image/{};base64,{}", type, to_base64(bytes));
      images_.push_back(json::object{{"type", "image_url"}, {"image_url", json::object{{"url", uri}}}});
      return std::nullopt;
    } catch (const Error& error) {
      return error.what();
    }
  }

  /// Says a message and shows the reply; false if it failed.
  bool say(std::string text) {
    json::value content(text);
    if (!images_.empty()) {
      images_.push_back(json::object{{"type", "text"}, {"text", std::move(text)}});
      content = std::exchange(images_, {});
    }
    messages_.push_back(json::object{{"role", "user"}, {"content", std::move(content)}});
    try {
      const ChatReply reply = backend_.reply(
          messages_, [this](std::string_view piece, bool is_reasoning) { show(piece, is_reasoning); }, terminal_.is_interrupted);
      end_style();
      terminal_.write("\n");
      if (terminal_.shows_hints) {
        const double speed = reply.seconds > 0 ? static_cast<double>(reply.num_completion_tokens) / reply.seconds : 0;
        dim(fmt::format("[{} tokens, {:.1f} per second{}]\n", reply.num_completion_tokens, speed,
                        reply.finish_reason == "stop"     ? ""
                        : reply.finish_reason == "length" ? ", cut off by the length limit"
                                                          : ", " + reply.finish_reason));
      }
      messages_.push_back(reply.message);
      return true;
    } catch (const Error& error) {
      end_style();
      terminal_.write(fmt::format("\nno reply: {}\n", error.what()));
      messages_.pop_back();
      return false;
    }
  }

  void dim(const std::string& text) { terminal_.write(terminal_.has_color ? fmt::format("{}{}{}", kDim, text, kPlain) : text); }

 private:
  void show(std::string_view piece, bool is_reasoning) {
    if (terminal_.has_color && is_reasoning != is_dim_) {
      terminal_.write(is_reasoning ? kDim : kPlain);
      if (!is_reasoning) terminal_.write("\n");
      is_dim_ = is_reasoning;
    }
    terminal_.write(piece);
  }
  void end_style() {
    if (is_dim_) terminal_.write(kPlain);
    is_dim_ = false;
  }

  ChatBackend& backend_;
  const ChatTerminal& terminal_;
  std::optional<std::string> system_;
  json::array messages_;
  json::array images_;  ///< of the next message
  std::size_t num_fixed_ = 0;
  bool is_dim_ = false;
};

/// One message, possibly over several lines.
std::optional<std::string> read_message(const ChatTerminal& terminal) {
  std::optional<std::string> line = terminal.read_line("> ");
  if (!line) return std::nullopt;
  std::string message;
  while (line && line->ends_with('\\')) {
    message += line->substr(0, line->size() - 1) + "\n";
    line = terminal.read_line(". ");
  }
  return message + line.value_or("");
}

}  // namespace

int run_chat_loop(ChatBackend& backend, const ChatOptions& options, const ChatTerminal& terminal) {
  Conversation conversation(backend, options, terminal);
  if (options.prompt) return conversation.say(*options.prompt) ? 0 : 1;
  if (terminal.shows_hints) conversation.dim(fmt::format("{}. /help shows the commands.\n", backend.describe()));
  while (const std::optional<std::string> message = read_message(terminal)) {
    if (message->find_first_not_of(" \t\r\n") == std::string::npos) continue;
    if (!message->starts_with('/')) {
      conversation.say(*message);
      continue;
    }
    const std::size_t space = message->find(' ');
    const std::string command = message->substr(0, space);
    const std::string rest = space == std::string::npos ? "" : message->substr(space + 1);
    if (command == "/exit" || command == "/quit") {
      return 0;
    } else if (command == "/reset" || command == "/clear") {
      conversation.reset();
      conversation.dim("[forgotten]\n");
    } else if (command == "/system") {
      conversation.set_system(rest);
      conversation.dim(rest.empty() ? "[no system message]\n" : "[a new conversation with this system message]\n");
    } else if (command == "/image") {
      const std::optional<std::string> problem = conversation.add_image(rest);
      conversation.dim(problem ? fmt::format("[no image: {}]\n", *problem) : "[shown with the next message]\n");
    } else if (command == "/undo") {
      conversation.dim(conversation.undo() ? "[taken back]\n" : "[there is nothing to take back]\n");
    } else if (command == "/help") {
      terminal.write(kHelp);
    } else {
      terminal.write(
          fmt::format("{} is no command; /help lists them. To say something that begins with a slash, put a space before it.\n", command));
    }
  }
  return 0;
}

}  // namespace prl::tools
