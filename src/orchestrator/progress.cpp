#include "orchestrator/progress.hpp"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include <string>

#include "base/base64.hpp"
#include "base/error.hpp"
#include "base/files.hpp"
#include "io/checkpoint_dir.hpp"
#include "text/json_python.hpp"
#include "wire/image_codec.hpp"

namespace prl::orchestrator {

namespace json = boost::json;

namespace {

constexpr std::int64_t kFormatVersion = 1;
constexpr const char* kStateFile = "state.json";
constexpr std::uint64_t kMaxStateBytes = std::uint64_t{8} << 30;
template <typename T>
json::array to_array(const std::vector<T>& values) {
  json::array array;
  array.reserve(values.size());
  for (const T value : values) {
    if constexpr (std::is_floating_point_v<T>)
      array.emplace_back(static_cast<double>(value));
    else
      array.emplace_back(static_cast<std::int64_t>(value));
  }
  return array;
}

const json::value& saved_member(const json::object& object, const char* key) {
  const json::value* value = object.if_contains(key);
  if (value == nullptr) fail(ErrorCode::kCorrupt, "no member '{}'", key);
  return *value;
}

template <typename T>
std::vector<T> to_vector(const json::value& value) {
  std::vector<T> out;
  for (const json::value& item : value.as_array()) {
    if constexpr (std::is_floating_point_v<T>)
      out.push_back(static_cast<T>(item.to_number<double>()));
    else
      out.push_back(static_cast<T>(item.to_number<std::int64_t>()));
  }
  return out;
}

using Pictures = std::vector<std::shared_ptr<const wire::ImagePixels>>;

/// Where images stand, with the number of each one's picture: a state has every picture once, whatever number of rollouts show it.
json::array places_to_json(const std::vector<wire::PromptImage>& images, wire::PictureTable& pictures) {
  json::array places;
  for (const wire::PromptImage& image : images)
    places.push_back(json::array{pictures.number_of(image.pixels), image.first, image.rows, image.cols});
  return places;
}

std::vector<wire::PromptImage> places_from_json(const json::value& value, const Pictures& pictures) {
  std::vector<wire::PromptImage> images;
  for (const json::value& item : value.as_array()) {
    const json::array& place = item.as_array();
    const auto number = [&](std::size_t i) { return place.at(i).to_number<std::int64_t>(); };
    images.push_back(
        {.pixels = pictures.at(static_cast<std::size_t>(number(0))), .first = number(1), .rows = number(2), .cols = number(3)});
  }
  return images;
}

json::object sample_to_json(const wire::TrainingSample& sample, wire::PictureTable& pictures) {
  json::object object;
  object["token_ids"] = to_array(sample.token_ids);
  object["mask"] = to_array(sample.mask);
  object["logprobs"] = to_array(sample.logprobs);
  object["temperatures"] = to_array(sample.temperatures);
  object["env_name"] = sample.env_name;
  object["advantages"] = to_array(sample.advantages);
  object["ref_logprobs"] = to_array(sample.ref_logprobs);
  object["rl_weights"] = to_array(sample.rl_weights);
  object["ce_weights"] = to_array(sample.ce_weights);
  object["ref_kl_weights"] = to_array(sample.ref_kl_weights);
  if (const wire::RoutedExperts& experts = sample.routed_experts; !experts.empty()) {
    const wire::ExpertBytes bytes = wire::encode(experts);
    object["routed_experts"] = json::object{{"data", to_base64(bytes.data)},
                                            {"dtype", bytes.dtype},
                                            {"shape", json::array{experts.num_tokens(), experts.num_layers, experts.top_k}}};
  }
  if (!sample.images.empty()) object["images"] = places_to_json(sample.images, pictures);
  if (!sample.versions.empty()) object["versions"] = to_array(sample.versions);
  return object;
}

wire::TrainingSample sample_from_json(const json::object& object, const Pictures& pictures) {
  wire::TrainingSample sample;
  sample.token_ids = to_vector<std::int32_t>(saved_member(object, "token_ids"));
  sample.mask = to_vector<std::uint8_t>(saved_member(object, "mask"));
  sample.logprobs = to_vector<float>(saved_member(object, "logprobs"));
  sample.temperatures = to_vector<float>(saved_member(object, "temperatures"));
  sample.env_name = std::string(saved_member(object, "env_name").as_string());
  sample.advantages = to_vector<float>(saved_member(object, "advantages"));
  sample.ref_logprobs = to_vector<float>(saved_member(object, "ref_logprobs"));
  sample.rl_weights = to_vector<float>(saved_member(object, "rl_weights"));
  sample.ce_weights = to_vector<float>(saved_member(object, "ce_weights"));
  sample.ref_kl_weights = to_vector<float>(saved_member(object, "ref_kl_weights"));
  if (const json::value* found = object.if_contains("routed_experts")) {
    const json::object& experts = found->as_object();
    const auto shape = to_vector<std::int64_t>(saved_member(experts, "shape"));
    sample.routed_experts = wire::decode_experts("routed_experts", from_base64(saved_member(experts, "data").as_string()),
                                                 saved_member(experts, "dtype").as_string(), shape.at(0), shape.at(1), shape.at(2));
  }
  if (const json::value* found = object.if_contains("images")) sample.images = places_from_json(*found, pictures);
  if (const json::value* found = object.if_contains("versions")) sample.versions = to_vector<std::int64_t>(*found);  // not in older ones
  return sample;
}

// Only what metrics and the rollout log need; token ids are in the samples.
json::object episode_to_json(const env::Episode& episode) {
  json::object object = env::to_json(episode);
  json::array turns;
  for (const env::TrajectoryStep& step : episode.trajectory) {
    json::object turn;
    turn["num_prompt_tokens"] = step.num_prompt_tokens;
    turn["num_completion_tokens"] = step.num_completion_tokens;
    turn["finish_reason"] = step.finish_reason;
    turn["has_versions"] = step.has_versions;
    turn["version_start"] = step.version_start.value;
    turn["version_end"] = step.version_end.value;
    turns.push_back(std::move(turn));
  }
  object["turns"] = std::move(turns);
  object["temperature"] = static_cast<double>(episode.temperature);
  return object;
}

env::Episode episode_from_json(const json::object& object) {
  env::Episode episode;
  episode.trajectory_id = std::string(saved_member(object, "trajectory_id").as_string());
  episode.example_id = saved_member(object, "example_id").to_number<std::int64_t>();
  episode.env_name = std::string(saved_member(object, "task").as_string());
  episode.prompt = saved_member(object, "prompt").as_array();
  episode.completion = saved_member(object, "completion").as_array();
  episode.answer = std::string(saved_member(object, "answer").as_string());
  episode.info = saved_member(object, "info").as_object();
  episode.reward = saved_member(object, "reward").to_number<double>();
  for (const auto& metric : saved_member(object, "metrics").as_object())
    if (const auto number = text::as_double(metric.value())) episode.metrics[std::string(metric.key())] = *number;
  if (saved_member(object, "stop_condition").is_string())
    episode.stop_condition = std::string(saved_member(object, "stop_condition").as_string());
  episode.is_completed = saved_member(object, "is_completed").as_bool();
  episode.is_truncated = saved_member(object, "is_truncated").as_bool();
  episode.tool_defs = saved_member(object, "tool_defs").as_array();
  const json::object& timing = saved_member(object, "timing").as_object();
  episode.timing.start_time = saved_member(timing, "start_time").to_number<double>();
  episode.timing.generation = saved_member(timing, "generation").to_number<double>();
  episode.timing.model = saved_member(timing, "model").to_number<double>();
  episode.timing.env = saved_member(timing, "env").to_number<double>();
  episode.timing.scoring = saved_member(timing, "scoring").to_number<double>();
  episode.timing.total = saved_member(timing, "total").to_number<double>();
  if (const json::value* seat = object.if_contains("seat")) episode.seat = std::string(seat->as_string());
  episode.temperature = static_cast<float>(saved_member(object, "temperature").to_number<double>());
  for (const json::value& value : saved_member(object, "turns").as_array()) {
    const json::object& turn = value.as_object();
    env::TrajectoryStep step;
    step.num_prompt_tokens = saved_member(turn, "num_prompt_tokens").to_number<std::int64_t>();
    step.num_completion_tokens = saved_member(turn, "num_completion_tokens").to_number<std::int64_t>();
    step.finish_reason = std::string(saved_member(turn, "finish_reason").as_string());
    step.has_versions = saved_member(turn, "has_versions").as_bool();
    step.version_start = PolicyVersion{saved_member(turn, "version_start").to_number<std::int64_t>()};
    step.version_end = PolicyVersion{saved_member(turn, "version_end").to_number<std::int64_t>()};
    episode.trajectory.push_back(std::move(step));
  }
  return episode;
}

json::array task_to_json(const TaskRef& task, const std::vector<env::EnvironmentPtr>& environments) {
  return json::array{environments.at(static_cast<std::size_t>(task.env_idx))->name(), task.task_idx};
}

TaskRef task_from_json(const json::value& value, const std::vector<env::EnvironmentPtr>& environments) {
  const json::array& pair = value.as_array();
  const std::string name(pair.at(0).as_string());
  for (std::size_t i = 0; i < environments.size(); ++i)
    if (environments[i]->name() == name) {
      const std::int64_t task_idx = pair.at(1).to_number<std::int64_t>();
      if (task_idx < 0 || task_idx >= environments[i]->num_tasks(env::Split::kTrain))
        fail(ErrorCode::kInvalidArgument, "task {} of environment {} is not in its data set", task_idx, name);
      return {static_cast<std::int64_t>(i), task_idx};
    }
  fail(ErrorCode::kInvalidArgument, "environment {} of the checkpoint is not in this run", name);
}

json::object rollout_to_json(const ReadyRollout& rollout, const std::vector<env::EnvironmentPtr>& environments,
                             wire::PictureTable& pictures) {
  json::object object;
  object["group"] = rollout.group.value;
  object["task"] = task_to_json(rollout.task, environments);
  object["version_start"] = rollout.version_start.value;
  object["version_end"] = rollout.version_end.value;
  object["advantage"] = static_cast<double>(rollout.advantage);
  object["episode"] = episode_to_json(rollout.episode);
  json::array filters;
  for (const std::string& name : rollout.filters_matched) filters.emplace_back(name);
  object["filters"] = std::move(filters);
  json::array samples;
  for (const wire::TrainingSample& sample : rollout.samples) samples.push_back(sample_to_json(sample, pictures));
  object["samples"] = std::move(samples);
  return object;
}

ReadyRollout rollout_from_json(const json::object& object, const std::vector<env::EnvironmentPtr>& environments, const Pictures& pictures) {
  ReadyRollout rollout;
  rollout.group = GroupId{saved_member(object, "group").to_number<std::int64_t>()};
  rollout.task = task_from_json(saved_member(object, "task"), environments);
  rollout.version_start = PolicyVersion{saved_member(object, "version_start").to_number<std::int64_t>()};
  rollout.version_end = PolicyVersion{saved_member(object, "version_end").to_number<std::int64_t>()};
  rollout.advantage = static_cast<float>(saved_member(object, "advantage").to_number<double>());
  rollout.episode = episode_from_json(saved_member(object, "episode").as_object());
  if (const json::value* filters = object.if_contains("filters"))  // absent in older checkpoints
    for (const json::value& name : filters->as_array()) rollout.filters_matched.emplace_back(name.as_string());
  for (const json::value& sample : saved_member(object, "samples").as_array())
    rollout.samples.push_back(sample_from_json(sample.as_object(), pictures));
  return rollout;
}

}  // namespace

void save_state(const std::filesystem::path& checkpoints, const OrchestratorState& state,
                const std::vector<env::EnvironmentPtr>& environments, const std::function<void()>& before_commit) {
  json::object object;
  object["format"] = kFormatVersion;
  json::object progress;
  progress["step"] = state.progress.step;
  progress["total_tokens"] = state.progress.total_tokens;
  progress["total_samples"] = state.progress.total_samples;
  progress["total_problems"] = state.progress.total_problems;
  object["progress"] = std::move(progress);
  object["sampler"] = state.sampler;
  json::array tasks;
  for (const TaskRef& task : state.unfinished_tasks) tasks.push_back(task_to_json(task, environments));
  object["unfinished_tasks"] = std::move(tasks);
  json::array queue;
  wire::PictureTable pictures;
  for (const ReadyRollout& rollout : state.queue) queue.push_back(rollout_to_json(rollout, environments, pictures));
  object["queue"] = std::move(queue);
  if (!pictures.pictures().empty()) object["pictures"] = to_base64(wire::encode_pictures(pictures));
  if (!state.env_states.empty()) object["env_states"] = state.env_states;
  std::error_code ignored;
  std::filesystem::remove_all(io::checkpoint_folder(checkpoints, state.progress.step, kCheckpointUnit), ignored);
  io::CheckpointWriter writer(checkpoints, state.progress.step, kCheckpointUnit);
  write_file_atomic(writer.folder() / kStateFile, text::to_json_text(object));
  if (before_commit) before_commit();
  writer.commit();
}

std::optional<std::int64_t> newest_recovery(const std::filesystem::path& folder) {
  const std::string units[] = {kCheckpointUnit};
  return io::latest_checkpoint(folder, units);
}

void keep_recovery(const std::filesystem::path& folder, const OrchestratorState& state,
                   const std::vector<env::EnvironmentPtr>& environments) {
  save_state(folder, state, environments);
  const std::string units[] = {kCheckpointUnit};
  io::clean_checkpoints(folder, units, {.keep_last = 1, .keep_interval = {}});
}

void drop_recovery(const std::filesystem::path& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(fs::symlink_status(folder, error))) return;
  io::remove_stale_checkpoints(folder);
  std::vector<fs::path> states;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const bool is_step = parse_step_dir(it->path().filename().string()) >= 0;
    if (is_step && fs::is_directory(it->path() / kCheckpointUnit, error)) states.push_back(it->path());
  }
  for (const fs::path& state : states) {
    io::remove_published_folder(state / kCheckpointUnit);
    fs::remove(state, error);  // if nothing else is in it
  }
  fs::remove(folder, error);
}

OrchestratorState load_state(const std::filesystem::path& checkpoints, std::int64_t step,
                             const std::vector<env::EnvironmentPtr>& environments) {
  io::verify_checkpoint(checkpoints, step, kCheckpointUnit);
  const std::filesystem::path file = io::checkpoint_folder(checkpoints, step, kCheckpointUnit) / kStateFile;
  const std::string bytes = read_file(file, kMaxStateBytes);
  try {
    const json::value value = text::parse_json(bytes, text::kJsonDepth, text::LargeNumbers::kKeepText);
    const json::object& object = value.as_object();
    if (saved_member(object, "format").to_number<std::int64_t>() != kFormatVersion)
      fail(ErrorCode::kCorrupt, "format {} is not {}", json::serialize(saved_member(object, "format")), kFormatVersion);
    OrchestratorState state;
    const json::object& progress = saved_member(object, "progress").as_object();
    state.progress.step = saved_member(progress, "step").to_number<std::int64_t>();
    state.progress.total_tokens = saved_member(progress, "total_tokens").to_number<std::int64_t>();
    state.progress.total_samples = saved_member(progress, "total_samples").to_number<std::int64_t>();
    state.progress.total_problems = saved_member(progress, "total_problems").to_number<std::int64_t>();
    state.sampler = saved_member(object, "sampler").as_object();
    for (const json::value& task : saved_member(object, "unfinished_tasks").as_array())
      state.unfinished_tasks.push_back(task_from_json(task, environments));
    Pictures pictures;
    if (const json::value* found = object.if_contains("pictures")) pictures = wire::decode_pictures(from_base64(found->as_string()));
    for (const json::value& rollout : saved_member(object, "queue").as_array())
      state.queue.push_back(rollout_from_json(rollout.as_object(), environments, pictures));
    if (const json::value* states = object.if_contains("env_states")) state.env_states = states->as_object();
    return state;
  } catch (const Error& error) {
    throw error.with_context(file.string());
  } catch (const std::exception& error) {
    fail(ErrorCode::kCorrupt, "{}: {}", file.string(), error.what());
  }
}

}  // namespace prl::orchestrator
