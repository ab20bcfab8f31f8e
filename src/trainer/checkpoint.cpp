#include "trainer/checkpoint.hpp"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json.hpp>
#include <string_view>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "io/checkpoint_dir.hpp"
#include "io/tensor_file.hpp"
#include "nn/peft.hpp"
#include "trainer/agreement.hpp"
#include "trainer/shared_save.hpp"
#include "trainer/state_files.hpp"

namespace prl::trainer {

namespace fs = std::filesystem;
namespace json = boost::json;

namespace {

constexpr std::uint64_t kMaxProgressBytes = 1 << 20;

std::vector<io::NamedTensor> masters_of(const nn::Parameters& parameters) {
  std::vector<io::NamedTensor> tensors;
  for (const nn::NamedParameter& p : parameters.named()) tensors.push_back({p.name, p.value});
  return tensors;
}

/// Everything that a save of one rank needs, owned, so that it may run on another thread.
struct SaveJob {
  CheckpointOptions options;
  std::int64_t step = 0;
  TrainProgress progress;
  DType weights_dtype = DType::kF32;
  std::shared_ptr<const nn::Parameters> owned;  ///< a copy, when training goes on meanwhile
  const nn::Parameters* parameters = nullptr;
  nn::WeightsPtr adapted;                ///< of a run that trains an adapter: what is saved merged
  std::vector<nn::WeightSource> merged;  ///< of one whose base is brought layer by layer, in host memory
  std::vector<io::NamedTensor> optimizer_state;
  std::optional<MtpTraining::State> head;
  const nn::Parameters* head_parameters = nullptr;  ///< that its masters lie in

  void run(const std::function<void()>& before_commit) const {
    // Everything is written under temporary names first. What is older goes last: a kill at any moment leaves a step that is whole.
    const bool has_weights = options.save_weights || options.weights_only;
    const fs::path weights = io::checkpoint_folder(options.weights, step);
    const fs::path fresh = weights.string() + fmt::format(".tmp-{}-0", ::getpid());  // a name that those know who remove what is half
    const Leftover none_left{fresh};
    if (has_weights) {
      fs::remove_all(fresh);
      save_weights_into(fresh);
    }
    if (options.weights_only) {
      if (before_commit) before_commit();
      publish_weights(fresh, weights);
    } else {
      io::remove_published_folder(io::checkpoint_folder(options.checkpoints, step, kTrainerUnit));
      io::CheckpointWriter writer(options.checkpoints, step, kTrainerUnit);
      io::save_tensors(writer.folder() / "model.safetensors", masters_of(*parameters), {{"format", "pt"}});
      io::save_tensors(writer.folder() / "optimizer.safetensors", optimizer_state, {{"type", progress.optimizer_type}});
      if (head) {
        io::save_tensors(writer.folder() / kMtpMastersFile, head->masters, {{"format", "pt"}});
        io::save_tensors(writer.folder() / kMtpOptimizerFile, head->optimizer, {{"type", "adamw"}});
      }
      write_file_atomic(writer.folder() / kProgressFile, to_json(progress));
      if (before_commit) before_commit();
      if (has_weights) publish_weights(fresh, weights);
      writer.commit();
    }
    const io::CheckpointRetention retention{options.keep_last, options.keep_interval};
    if (has_weights) clean_weights(options.weights, retention);
    if (!options.weights_only) io::clean_checkpoints(options.checkpoints, options.units, retention);
  }

 private:
  /// Removes the folder at the end, if it is still there.
  struct Leftover {
    fs::path folder;
    ~Leftover() {
      std::error_code ignored;
      fs::remove_all(folder, ignored);
    }
  };
  void save_weights_into(const fs::path& folder) const {
    if (adapted == nullptr)
      return nn::save_pretrained(*parameters, folder, weights_dtype, options.companions, options.max_shard_bytes, head_parameters);
    if (merged.empty())
      nn::save_merged(adapted, folder, weights_dtype, options.companions, options.max_shard_bytes);
    else
      nn::save_model_folder(adapted->config, merged, folder, weights_dtype, options.companions, options.max_shard_bytes);
    if (!options.save_adapter) return;
    nn::make_model_folder(folder / kAdapterFolder,
                          [&](const fs::path& temporary) { nn::save_peft_adapter(*adapted, *parameters->table(), temporary); });
  }
};

/// In the memory that they are in.
std::shared_ptr<const nn::Parameters> copy_of(nn::Parameters& parameters) {
  const Tensor& from = parameters.all_values();
  auto copy = std::make_shared<nn::Parameters>(from.runtime(), parameters.config(), parameters.table());
  from.runtime()->copy_within(copy->all_values().data(), from.data(), from.num_bytes());
  return copy;
}

}  // namespace

void publish_weights(const fs::path& fresh, const fs::path& weights) {
  io::remove_published_folder(weights);
  publish_directory(fresh, weights);
}

void clean_weights(const fs::path& root, const io::CheckpointRetention& retention) {
  std::vector<std::int64_t> steps;
  std::error_code ec;
  for (fs::directory_iterator it(root, ec), end; !ec && it != end; it.increment(ec))
    if (const std::int64_t step = parse_step_dir(it->path().filename().string()); step >= 0) steps.push_back(step);
  std::ranges::sort(steps);
  for (const std::int64_t step : io::expired_steps(steps, retention)) io::remove_published_folder(io::checkpoint_folder(root, step));
}

std::string to_json(const TrainProgress& p) {
  json::object object{{"step", p.step},
                      {"total_tokens", p.total_tokens},
                      {"total_samples", p.total_samples},
                      {"num_optimizer_steps", p.num_optimizer_steps},
                      {"num_scheduled", p.num_scheduled},
                      {"data_position", p.data_position},
                      {"optimizer_type", p.optimizer_type}};
  if (!p.data_pending.empty()) object["data_pending"] = json::value_from(p.data_pending);
  return json::serialize(object) + "\n";
}

TrainProgress parse_progress(std::string_view text, std::string_view source) {
  boost::system::error_code ec;
  const json::value root = json::parse(json::string_view(text.data(), text.size()), ec);
  if (ec || !root.is_object()) fail(ErrorCode::kCorrupt, "[ckpt] {} is no JSON object", source);
  const auto number = [&](const char* key) {
    const json::value* value = root.get_object().if_contains(key);
    if (value == nullptr || !value->is_int64() || value->get_int64() < 0)
      fail(ErrorCode::kCorrupt, "[ckpt] {}: key '{}' must be a whole number of at least 0", source, key);
    return value->get_int64();
  };
  TrainProgress p;
  p.step = number("step");
  p.total_tokens = number("total_tokens");
  p.total_samples = number("total_samples");
  p.num_optimizer_steps = number("num_optimizer_steps");
  p.num_scheduled = number("num_scheduled");
  p.data_position = number("data_position");
  if (const json::value* pending = root.get_object().if_contains("data_pending")) {
    const auto is_earlier = [&](const json::value& v) { return v.is_int64() && v.get_int64() >= 0 && v.get_int64() < p.data_position; };
    if (!pending->is_array() || !std::ranges::all_of(pending->get_array(), is_earlier))
      fail(ErrorCode::kCorrupt, "[ckpt] {}: key 'data_pending' must be a list of positions before data_position", source);
    p.data_pending = json::value_to<std::vector<std::int64_t>>(*pending);
  }
  const json::value* type = root.get_object().if_contains("optimizer_type");
  if (type == nullptr || !type->is_string()) fail(ErrorCode::kCorrupt, "[ckpt] {}: key 'optimizer_type' must be text", source);
  p.optimizer_type = std::string(type->get_string());
  return p;
}

TrainerCheckpoints::~TrainerCheckpoints() = default;

TrainerCheckpoints::TrainerCheckpoints(CheckpointOptions options) : options_(std::move(options)) {
  if (!options_.may_write) return;
  io::remove_stale_checkpoints(options_.checkpoints);
  io::remove_stale_checkpoints(options_.weights);
}

bool TrainerCheckpoints::is_due(std::int64_t step, std::optional<std::int64_t> max_steps) const noexcept {
  return options_.interval && step % *options_.interval == 0 && !(max_steps && step >= *max_steps);
}

void TrainerCheckpoints::save(std::int64_t step, TrainProgress progress, Policy& policy, const GradientStep& gradient_step,
                              const std::function<void()>& before_commit) {
  const Optimizer& optimizer = gradient_step.optimizer();
  progress.step = step;
  progress.num_optimizer_steps = optimizer.num_steps();
  progress.num_scheduled = gradient_step.num_scheduled();
  progress.optimizer_type = std::string(optimizer.type_name());
  if (gradient_step.ranks().size() > 1) return save_shared(progress, policy, gradient_step, before_commit);
  auto job = std::make_shared<SaveJob>();
  job->options = options_;
  job->step = step;
  job->progress = progress;
  // The snapshot has the precision the policy computes with, so that serving it gives exactly the trained policy.
  job->weights_dtype = policy.options().compute;
  if (policy.options().lora) job->adapted = policy.weights();
  if (job->adapted != nullptr && policy.layered() != nullptr && (options_.save_weights || options_.weights_only))
    job->merged = nn::merged_sources(job->adapted, nn::copied_sources(*policy.layered()));  // of ranks of which one is left
  saver_.wait();
  last_saved_ = step;
  if (MtpTraining* const head = policy.head(); head != nullptr) {
    job->head = head->state(/*copies=*/options_.save_async);
    job->head_parameters = options_.save_async ? job->head->owned.get() : &head->parameters();
  }
  if (options_.save_async) {
    job->owned = copy_of(policy.parameters());
    job->parameters = job->owned.get();
    if (!options_.weights_only) job->optimizer_state = optimizer.copy_state();
    if (before_commit) before_commit();
    saver_.submit(fmt::format("checkpoint of step {}", step), [job] { job->run({}); });
  } else {
    job->parameters = &policy.parameters();
    job->optimizer_state = optimizer.state();
    job->run(before_commit);
  }
}

void TrainerCheckpoints::save_shared(const TrainProgress& progress, Policy& policy, const GradientStep& gradient_step,
                                     const std::function<void()>& before_commit) {
  comm::Communicator& ranks = gradient_step.ranks();
  finish(ranks);
  shared_ = std::make_shared<SharedSave>(options_, progress, policy, gradient_step, options_.save_async);
  if (options_.save_async) {
    agree(ranks, [&] {
      if (before_commit) before_commit();
    });
    saver_.submit(fmt::format("checkpoint of step {}", progress.step), [save = shared_] { save->write_and_commit(); });
  } else {
    const std::vector<std::string> notes = ranks.gather_bytes(shared_->write(), {.what = "parts of the checkpoint"});
    agree(ranks, [&] {
      if (ranks.rank() == 0)
        shared_->commit(notes, before_commit);
      else if (before_commit)
        before_commit();
      shared_.reset();
    });
  }
  last_saved_ = progress.step;
}

void TrainerCheckpoints::finish() {
  saver_.wait();
  shared_.reset();
}

void TrainerCheckpoints::finish(comm::Communicator& ranks) {
  if (shared_ != nullptr) {
    // Rank 0 alone waits for parts of the others: it does so where it would learn that one does not come.
    agree(ranks, [&] {
      if (ranks.rank() != 0) finish();
    });
    agree(ranks, [&] { finish(); });
    return;
  }
  finish();
}

void TrainerCheckpoints::give_up_on(const comm::PeerLost& lost) {
  // Who gave up is alive, and its part still comes. Where nothing is known of who is lost, nothing more is waited for.
  if (shared_ == nullptr || lost.gave_up()) return;
  if (lost.ranks().empty()) return shared_->cancel();
  shared_->give_up_on(lost.ranks());
}

void TrainerCheckpoints::regroup(comm::Communicator& ranks, bool has_lost) {
  if (shared_ != nullptr && has_lost) shared_->cancel();
  try {
    finish();
  } catch (const Error& error) {
    log::warning("{}", error.what());
    shared_.reset();
  }
  double saved = -1;  // rank 0 looks for all
  if (ranks.rank() == 0 && last_saved_) {
    const std::string units[]{kTrainerUnit};
    const bool is_there = options_.weights_only ? fs::exists(io::checkpoint_folder(options_.weights, *last_saved_))
                                                : std::ranges::count(io::list_checkpoints(options_.checkpoints, units), *last_saved_) > 0;
    if (is_there) saved = static_cast<double>(*last_saved_);
  }
  saved = ranks.gather_number(saved, {.what = "the last checkpoint"}).front();
  last_saved_.reset();
  if (saved >= 0) last_saved_ = static_cast<std::int64_t>(saved);
}

namespace {

/// Error{kNotFound} for a step that lacks a part, with the steps there are.
void check_is_there(const fs::path& checkpoints, const ResumeOptions& resume) {
  const std::vector<std::int64_t> steps = io::list_checkpoints(checkpoints, resume.units);
  if (std::ranges::binary_search(steps, resume.step)) return;
  std::string lacking;
  const fs::path folder = io::checkpoint_folder(checkpoints, resume.step);
  if (fs::exists(folder))
    for (const std::string& unit : resume.units)
      if (!fs::exists(folder / unit / io::kManifestName)) lacking += fmt::format("{}{}", lacking.empty() ? "" : ", ", unit);
  fail(ErrorCode::kNotFound, "ckpt.resume_step: there is no complete checkpoint of step {} under {}{}; {}", resume.step,
       checkpoints.string(), lacking.empty() ? "" : fmt::format(" (step_{} lacks the part of: {})", resume.step, lacking),
       steps.empty() ? std::string("there is none at all") : fmt::format("there are those of steps {}", fmt::join(steps, ", ")));
}

}  // namespace

std::optional<std::int64_t> find_resume_step(const fs::path& checkpoints, const ResumeOptions& resume) {
  if (resume.step >= 0) {
    check_is_there(checkpoints, resume);
    for (const std::string& unit : resume.units) io::verify_checkpoint(checkpoints, resume.step, unit);
    return resume.step;
  }
  const auto latest = io::latest_checkpoint(checkpoints, resume.units);
  if (!latest && !io::list_checkpoints(checkpoints, resume.units).empty())
    fail(ErrorCode::kCorrupt, "every checkpoint under {} is damaged, as the warnings above say; move them away to start from scratch",
         checkpoints.string());
  if (!latest) log::warning("no complete checkpoint under {} to resume from: starting from scratch", checkpoints.string());
  return latest;
}

namespace {

/// Those that this rank holds.
void load_masters(StateFiles& files, nn::Parameters& parameters) {
  if (files.is_whole() && parameters.holds_all()) return io::load_tensors(files.folder() / "model.safetensors", masters_of(parameters));
  files.check_known(*parameters.table());
  for (const nn::NamedParameter& p : parameters.named())
    if (const ElementRange part = parameters.held().part_of(p.range()); part.count() > 0)
      files.read(p, {}, part.begin - p.offset, parameters.values_in(part));
}

/// Of a folder whose checksums are right: what does not fit in it is of other keys, which `advice` names.
template <class Load>
void load_whole(Load&& load, std::string_view advice) {
  try {
    load();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kIo) throw;
    fail(ErrorCode::kInvalidArgument, "[ckpt] {}. The checkpoint is whole, so it is {}", error.what(), advice);
  }
}

/// All but the packed weights.
TrainProgress load_state(const fs::path& checkpoints, std::int64_t step, const ResumeOptions& resume, Policy& policy,
                         GradientStep& gradient_step) {
  const comm::Communicator& ranks = gradient_step.ranks();
  io::verify_checkpoint(checkpoints, step, kTrainerUnit, ranks.rank(), ranks.size());
  const fs::path folder = io::checkpoint_folder(checkpoints, step, kTrainerUnit);
  const fs::path progress_file = folder / kProgressFile;
  TrainProgress progress = parse_progress(read_file(progress_file, kMaxProgressBytes), progress_file.string());
  StateFiles files(folder);
  load_whole([&] { load_masters(files, policy.parameters()); },
             "of another model than model.name, or of a run with another model.lora: resume it with what it was made with, or choose "
             "another --output-dir");
  Optimizer& optimizer = gradient_step.optimizer();
  if (!resume.skip_optimizer) {
    if (progress.optimizer_type != optimizer.type_name())
      fail(ErrorCode::kInvalidArgument,
           "[ckpt] {} holds the state of optimizer '{}', but optim.type is '{}': resume with the same one or set ckpt.skip_optimizer",
           folder.string(), progress.optimizer_type, optimizer.type_name());
    load_whole(
        [&] { optimizer.load_state(files); },
        "of a run with another model.optimization_dtype or [optim]: resume it with what it was made with, or set ckpt.skip_optimizer");
    optimizer.restore_num_steps(progress.num_optimizer_steps);
  }
  if (MtpTraining* head = policy.head(); head != nullptr && !head->load(folder, progress.num_optimizer_steps, !resume.skip_optimizer))
    log::warning("[ckpt] {} has no head for multi-token prediction: its training begins anew", folder.string());
  if (resume.skip_scheduler)
    gradient_step.restart_schedule(progress.step);
  else
    gradient_step.restore_num_scheduled(progress.num_scheduled);
  if (resume.skip_progress) progress.step = progress.total_tokens = progress.total_samples = 0;
  if (resume.skip_data) {
    progress.data_position = 0;
    progress.data_pending.clear();
  }
  return progress;
}

}  // namespace

TrainProgress restore(const fs::path& checkpoints, std::int64_t step, const ResumeOptions& resume, Policy& policy,
                      GradientStep& gradient_step) {
  TrainProgress progress;
  const auto load = [&] { progress = load_state(checkpoints, step, resume, policy, gradient_step); };
  if (gradient_step.ranks().size() > 1)
    agree(gradient_step.ranks(), load);
  else
    load();
  gradient_step.refresh_weights(PolicyVersion{progress.step});
  return progress;
}

}  // namespace prl::trainer
