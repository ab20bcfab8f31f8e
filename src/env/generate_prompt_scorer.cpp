#include <utility>

#include "base/error.hpp"
#include "env/prompt_scorer.hpp"

namespace prl::env {
namespace {

class GeneratePromptScorer final : public PromptScorer {
 public:
  explicit GeneratePromptScorer(std::shared_ptr<GenerateClient> generate) : generate_(std::move(generate)) {}

  asio::awaitable<std::vector<float>> score(std::vector<std::int32_t> ids, net::TimePoint deadline, net::Fields headers) override {
    const std::size_t wanted = ids.size();
    wire::GenerateRequest request;
    request.prompt_ids = std::move(ids);
    request.sampling.max_tokens = 1;
    request.sampling.logprobs = 1;
    request.sampling.prompt_logprobs = 1;
    request.sampling.skip_special_tokens = false;
    for (const auto& [name, value] : headers) request.headers[name] = value;
    auto asking = generate_->generate(std::move(request), deadline);
    wire::GenerateOutput output = co_await std::move(asking);
    if (output.prompt_logprobs.size() != wanted)
      fail(ErrorCode::kCorrupt, "{} answered {} log-probabilities for {} tokens of a prompt", generate_->describe(),
           output.prompt_logprobs.size(), wanted);
    co_return std::move(output.prompt_logprobs);
  }

  asio::awaitable<void> check_ready(net::TimePoint deadline) override {
    auto checking = generate_->check_health(deadline);
    co_await std::move(checking);
  }

  std::string describe() const override { return generate_->describe(); }

 private:
  std::shared_ptr<GenerateClient> generate_;
};

}  // namespace

std::shared_ptr<PromptScorer> make_generate_prompt_scorer(std::shared_ptr<GenerateClient> generate) {
  return std::make_shared<GeneratePromptScorer>(std::move(generate));
}

}  // namespace prl::env
