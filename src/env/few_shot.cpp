#include "env/few_shot.hpp"

#include <utility>

#include "base/error.hpp"

namespace prl::env {
namespace {

namespace json = boost::json;

bool is_system(const json::value& message) { return message.at("role") == "system"; }

class FewShot final : public Environment {
 public:
  FewShot(EnvironmentPtr inner, std::int64_t num_shots, json::array examples)
      : inner_(std::move(inner)), num_shots_(num_shots), examples_(std::move(examples)) {}

  const std::string& name() const noexcept override { return inner_->name(); }
  std::int64_t num_tasks(Split split) const override {
    return split == Split::kTrain ? inner_->num_tasks(split) - num_shots_ : inner_->num_tasks(split);
  }

  Task task(Split split, std::int64_t index) const override {
    Task task = inner_->task(split, index);
    const json::array question = std::exchange(task.prompt, json::array());
    auto at = question.begin();
    while (at != question.end() && is_system(*at)) task.prompt.push_back(*at++);
    task.prompt.insert(task.prompt.end(), examples_.begin(), examples_.end());
    task.prompt.insert(task.prompt.end(), at, question.end());
    return task;
  }

  asio::awaitable<Episode> run(Task task, RolloutContext context) const override {
    return inner_->run(std::move(task), std::move(context));
  }
  bool scores_groups() const noexcept override { return inner_->scores_groups(); }
  asio::awaitable<void> score_group(std::span<Episode> group) const override { return inner_->score_group(group); }
  void prepare() const override { inner_->prepare(); }
  json::array tools(const Task& task) const override { return inner_->tools(task); }
  std::optional<json::array> demonstration(const Task& task) const override { return inner_->demonstration(task); }

 private:
  EnvironmentPtr inner_;
  std::int64_t num_shots_;
  json::array examples_;
};

}  // namespace

EnvironmentPtr with_examples(EnvironmentPtr inner, std::int64_t num_shots) {
  const std::int64_t num_tasks = inner->num_tasks(Split::kTrain);
  if (num_tasks <= num_shots)
    fail(ErrorCode::kInvalidArgument, "environment {}: args.num_shots {} leaves no task of the {} in the train split", inner->name(),
         num_shots, num_tasks);
  json::array examples;
  for (std::int64_t i = num_tasks - num_shots; i < num_tasks; ++i) {
    const Task task = inner->task(Split::kTrain, i);
    const std::optional<json::array> answer = inner->demonstration(task);
    if (!answer)
      fail(ErrorCode::kInvalidArgument, "environment {}: args.num_shots needs worked examples, and task {} of the train split has none",
           inner->name(), i);
    for (const json::value& message : task.prompt)
      if (!is_system(message)) examples.push_back(message);
    examples.insert(examples.end(), answer->begin(), answer->end());
  }
  return std::make_shared<FewShot>(std::move(inner), num_shots, std::move(examples));
}

}  // namespace prl::env
