#include "env/chat_pool.hpp"

#include <fmt/core.h>

#include <atomic>
#include <utility>

#include "base/error.hpp"

namespace prl::env {
namespace {

class ChatPool final : public ChatClientFactory {
 public:
  explicit ChatPool(std::vector<std::shared_ptr<ChatClientFactory>> services) : services_(std::move(services)) {}

  std::unique_ptr<ChatClient> open(ConversationOptions options) override {
    return services_[next_.fetch_add(1, std::memory_order_relaxed) % services_.size()]->open(std::move(options));
  }

  asio::awaitable<void> check_health(net::TimePoint deadline) override {
    for (const auto& service : services_) {
      auto checking = service->check_health(deadline);
      co_await std::move(checking);
    }
  }

  std::string describe() const override {
    std::string names;
    for (const auto& service : services_) names += (names.empty() ? "" : ", ") + service->describe();
    return names;
  }

 private:
  std::vector<std::shared_ptr<ChatClientFactory>> services_;
  std::atomic<std::size_t> next_{0};
};

}  // namespace

std::shared_ptr<ChatClientFactory> make_chat_pool(std::vector<std::shared_ptr<ChatClientFactory>> services) {
  if (services.empty()) fail(ErrorCode::kInvalidArgument, "a chat pool needs at least one service");
  if (services.size() == 1) return services.front();
  return std::make_shared<ChatPool>(std::move(services));
}

}  // namespace prl::env
