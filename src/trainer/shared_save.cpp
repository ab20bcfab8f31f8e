#include "trainer/shared_save.hpp"

#include <boost/json.hpp>
#include <thread>

#include <fmt/core.h>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/waiting.hpp"
#include "nn/exact_parts.hpp"
#include "nn/peft.hpp"
#include "nn/stored_layout.hpp"
#include "nn/vision_tower.hpp"
#include "nn/weight_files.hpp"
#include "trainer/agreement.hpp"

namespace prl::trainer {

namespace fs = std::filesystem;
namespace json = boost::json;

namespace {

constexpr std::uint64_t kMaxNoteBytes = 1 << 20;
constexpr std::chrono::milliseconds kNotePoll{20};

/// Contiguous, so that a range of it is a vector.
Tensor host_copy(const Tensor& tensor) {
  const Tensor copy = Tensor::empty(make_cpu_runtime(), tensor.shape(), tensor.dtype());
  tensor.runtime()->copy_to_host(copy.data(), tensor.data(), tensor.num_bytes());
  return copy;
}

}  // namespace

SharedSave::SharedSave(const CheckpointOptions& options, const TrainProgress& progress, Policy& policy, const GradientStep& gradient_step,
                       bool copies)
    : options_(options),
      progress_(progress),
      rank_(gradient_step.ranks().rank()),
      size_(gradient_step.ranks().size()),
      writes_state_(rank_ < gradient_step.shards().size()),
      timeout_(gradient_step.ranks().options().timeout),
      layout_(state_layout(*policy.parameters().table(), gradient_step.shard_plan())),
      weights_(policy.weights()),
      table_(policy.parameters().table()),
      is_lost_(std::make_unique<std::atomic<bool>[]>(static_cast<std::size_t>(size_))) {
  std::string folders;
  agree(gradient_step.ranks(), [&] {
    if (rank_ != 0) return;
    make_folders();
    folders = unit_folder_.string() + '\n' + weights_folder_.string();
  });
  const std::string told = gradient_step.ranks().gather_bytes(folders, {.what = "where to save"}).front();
  const std::size_t end = told.find('\n');
  PRL_CHECK(end != std::string::npos, "rank 0 names no folder");
  unit_folder_ = told.substr(0, end);
  weights_folder_ = told.substr(end + 1);
  if (!unit_folder_.empty() && writes_state_) copy_parts(policy, gradient_step.optimizer(), copies);
  if (!weights_folder_.empty())
    sources_ =
        nn::stored_sources(weights_->config, policy.layered() != nullptr ? copy_layers(*policy.layered()) : nn::merged_sources(weights_));
}

nn::WeightFileOptions SharedSave::file_options() const {
  return {.dtype = weights_->compute,
          .max_shard_bytes = options_.max_shard_bytes,
          .stem = "model",
          .progress = {},
          .writer = rank_,
          .num_writers = size_};
}

std::vector<nn::WeightSource> SharedSave::copy_layers(nn::LayeredWeights& layered) const {
  std::vector<nn::WeightSource> all = nn::flat_sources(*weights_->table, {});  // who writes what follows from their shapes
  for (nn::WeightSource& other : nn::other_sources(weights_->config)) all.push_back(std::move(other));
  std::vector<nn::WeightSource> sources = nn::copied_sources(layered, nn::sources_of_writer(all, file_options()));
  return weights_->adapter != nullptr ? nn::merged_sources(weights_, std::move(sources)) : sources;
}

SharedSave::~SharedSave() {
  std::error_code ignored;
  if (rank_ == 0 && !has_weights_ && !weights_folder_.empty()) fs::remove_all(weights_folder_, ignored);
}

void SharedSave::make_folders() {
  if (options_.save_weights || options_.weights_only) {
    const fs::path folder = io::checkpoint_folder(options_.weights, progress_.step);
    weights_folder_ = nn::start_model_folder(folder, /*replace=*/true);
  }
  if (options_.weights_only) return;
  fs::remove_all(io::checkpoint_folder(options_.checkpoints, progress_.step, kTrainerUnit));
  writer_ = std::make_unique<io::CheckpointWriter>(options_.checkpoints, progress_.step, kTrainerUnit);
  unit_folder_ = writer_->folder();
}

void SharedSave::copy_parts(Policy& policy, const Optimizer& optimizer, bool copies) {
  const nn::Parameters& parameters = policy.parameters();
  const auto add = [&](std::string name, const Tensor& part) {
    const Tensor vector = part.reshaped({part.num_elements()});
    parts_.push_back({std::move(name), copies ? host_copy(vector) : vector});
  };
  for (const nn::NamedParameter& p : parameters.named())
    if (const ElementRange part = parameters.held().part_of(p.range()); part.count() > 0) add(p.name, parameters.values_in(part));
  for (const Optimizer::StatePart& state : optimizer.state_parts()) add(state.name, state.tensor);
}

std::string SharedSave::write() noexcept {
  json::object note{{"file", ""}, {"bytes", 0}, {"xxh3", ""}, {"error", ""}};
  try {
    if (!weights_folder_.empty()) nn::write_weight_files(weights_folder_, sources_, file_options());
    if (!unit_folder_.empty() && writes_state_) {
      io::save_tensors(unit_folder_ / rank_file(rank_), parts_, {{"type", progress_.optimizer_type}});
      const io::HashedFile written = io::hash_file(unit_folder_, rank_file(rank_));
      note["file"] = written.path;
      note["bytes"] = written.num_bytes;
      note["xxh3"] = written.xxh3;
    }
  } catch (const std::exception& error) {  // told to rank 0, which ends the run with it
    note["error"] = error.what();
  }
  return json::serialize(note);
}

void SharedSave::commit(std::span<const std::string> notes, const std::function<void()>& before_commit) {
  PRL_CHECK(rank_ == 0 && notes.size() == static_cast<std::size_t>(size_), "{} notes of {} ranks at rank {}", notes.size(), size_, rank_);
  std::vector<io::HashedFile> files;
  for (std::size_t rank = 0; rank < notes.size(); ++rank) {
    boost::system::error_code ec;
    const json::value value = json::parse(notes[rank], ec);
    const json::object* note = ec ? nullptr : value.if_object();
    if (note == nullptr || !note->contains("error") || !note->contains("bytes"))
      fail(ErrorCode::kCorrupt, "[ckpt] rank {} does not say what it wrote", rank);
    if (const std::string error = json::value_to<std::string>(note->at("error")); !error.empty())
      fail(ErrorCode::kIo, "[ckpt] rank {} could not write its part of step {}: {}", rank, progress_.step, error);
    const std::string file = json::value_to<std::string>(note->at("file"));
    if (file.empty()) continue;
    files.push_back({file, note->at("bytes").to_number<std::uint64_t>(), json::value_to<std::string>(note->at("xxh3"))});
  }
  const io::CheckpointRetention retention{options_.keep_last, options_.keep_interval};
  if (!weights_folder_.empty()) {
    nn::write_model_extras(weights_->config, weights_folder_, weights_->compute, options_.companions);
    if (options_.save_adapter && weights_->adapter != nullptr)
      nn::make_model_folder(weights_folder_ / kAdapterFolder,
                            [&](const fs::path& temporary) { nn::save_peft_adapter(*weights_, *table_, temporary); });
  }
  if (writer_ != nullptr) {
    write_file_atomic(unit_folder_ / kLayoutFile, to_json(layout_));
    write_file_atomic(unit_folder_ / kProgressFile, to_json(progress_));
  }
  if (before_commit) before_commit();
  if (!weights_folder_.empty()) {
    publish_weights(weights_folder_, io::checkpoint_folder(options_.weights, progress_.step));
    has_weights_ = true;
  }
  if (writer_ != nullptr) writer_->commit(files);
  // What is older goes last: a kill at any moment leaves a step that is whole.
  if (has_weights_) clean_weights(options_.weights, retention);
  if (writer_ != nullptr) io::clean_checkpoints(options_.checkpoints, options_.units, retention);
}

fs::path SharedSave::note_file(int rank) const { return meeting_folder() / fmt::format("rank_{}.json", rank); }

void SharedSave::give_up_on(std::span<const int> ranks) {
  for (const int rank : ranks)
    if (rank >= 0 && rank < size_) is_lost_[static_cast<std::size_t>(rank)] = true;
}

std::optional<int> SharedSave::lost_without_a_part() const {
  for (int rank = 1; rank < size_; ++rank) {
    // Before it is looked for: what a rank wrote before it died is there.
    const bool is_lost = is_lost_[static_cast<std::size_t>(rank)];
    if (is_lost && !fs::exists(note_file(rank))) return rank;
  }
  return std::nullopt;
}

std::string SharedSave::wait_for_note(int rank, std::chrono::steady_clock::time_point end) const {
  Waiting waiting({.who = "rank 0",
                   .what = fmt::format("rank {} to write its part of step {}", rank, progress_.step),
                   .limit = end - std::chrono::steady_clock::now()});
  for (;;) {
    const std::optional<int> lost = lost_without_a_part();
    if (fs::exists(note_file(rank))) return read_file(note_file(rank), kMaxNoteBytes);
    if (!fs::exists(meeting_folder())) fail(ErrorCode::kNotFound, "[ckpt] {} was taken away", meeting_folder().string());
    if (is_cancelled_) fail(ErrorCode::kCancelled, "[ckpt] the checkpoint of step {} is given up: a rank was lost", progress_.step);
    if (lost)
      fail(ErrorCode::kCancelled, "[ckpt] the checkpoint of step {} is given up: rank {} was lost before it had written its part",
           progress_.step, *lost);
    if (std::chrono::steady_clock::now() > end)
      fail(ErrorCode::kDeadline, "[ckpt] rank {} has not written its part of step {} after {} s", rank, progress_.step,
           std::chrono::duration_cast<std::chrono::seconds>(timeout_).count());
    waiting.check();
    std::this_thread::sleep_for(kNotePoll);
  }
}

std::vector<std::string> SharedSave::wait_for_notes(std::string mine) const {
  const auto end = std::chrono::steady_clock::now() + timeout_;
  std::vector<std::string> notes{std::move(mine)};
  for (int rank = 1; rank < size_; ++rank) notes.push_back(wait_for_note(rank, end));
  for (int rank = 1; rank < size_; ++rank) fs::remove(note_file(rank));
  return notes;
}

void SharedSave::write_and_commit() {
  std::string note = write();
  if (rank_ != 0) {
    // Rank 0 may have given up, and the folder be gone with it.
    if (!is_cancelled_ && fs::exists(meeting_folder())) write_file_atomic(note_file(rank_), note);
    return;
  }
  commit(wait_for_notes(std::move(note)), {});
}

}  // namespace prl::trainer
