#include "env/generate_pool.hpp"

#include <atomic>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::env {
namespace {

class GeneratePool final : public GenerateClient {
 public:
  explicit GeneratePool(std::vector<std::shared_ptr<GenerateClient>> clients) : clients_(std::move(clients)) {}

  asio::awaitable<wire::GenerateOutput> generate(wire::GenerateRequest request, net::TimePoint deadline) override {
    const std::uint64_t place = request.session_id.empty() ? next_++ : hash_bytes(request.session_id);
    return clients_[place % clients_.size()]->generate(std::move(request), deadline);
  }
  asio::awaitable<void> check_health(net::TimePoint deadline) override {
    for (const auto& client : clients_) {
      auto checking = client->check_health(deadline);
      co_await std::move(checking);
    }
  }
  std::string describe() const override {
    std::string text;
    for (const auto& client : clients_) text += (text.empty() ? "" : ", ") + client->describe();
    return text;
  }

 private:
  std::vector<std::shared_ptr<GenerateClient>> clients_;
  std::atomic<std::uint64_t> next_{0};
};

}  // namespace

std::shared_ptr<GenerateClient> make_generate_pool(std::vector<std::shared_ptr<GenerateClient>> clients) {
  if (clients.empty()) fail(ErrorCode::kInvalidArgument, "client.base_url lists no inference server");
  if (clients.size() == 1) return std::move(clients.front());
  return std::make_shared<GeneratePool>(std::move(clients));
}

}  // namespace prl::env
