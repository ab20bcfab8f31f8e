#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/ids.hpp"
#include "engine/draft_source.hpp"
#include "engine/kv/disk_blocks.hpp"
#include "engine/step_times.hpp"
#include "engine/tenant.hpp"
#include "nn/weights.hpp"
#include "wire/generate.hpp"
#include "wire/weight_proof.hpp"

namespace prl::engine {

class AdapterSet;

struct EngineOptions {
  std::int64_t max_model_len = 2048;
  std::int64_t block_size = 16;                     ///< tokens per KV block
  std::int64_t num_blocks = 0;                      ///< of the KV cache; at least those of one sequence of max_model_len
  std::int64_t num_host_blocks = 0;                 ///< in host memory, for cached blocks that others have taken the place of; 0: none
  std::int64_t num_disk_blocks = 0;                 ///< in files, for blocks that others have taken the place of in host memory; 0: none
  std::filesystem::path disk_folder = {};           ///< of these files (DiskStore)
  std::chrono::milliseconds disk_read_timeout{50};  ///< so long a step may wait for blocks from files
  std::int64_t max_num_seqs = 64;                   ///< requests that run at once
  std::int64_t num_state_snapshots = 0;             ///< states of prefixes that are kept, of models with linear attention (SequenceStates)
  std::int64_t max_num_batched_tokens = 2048;       ///< token budget of one step
  std::int64_t max_queued_requests = 4096;          ///< beyond it submit() answers kOverloaded
  bool enable_prefix_caching = true;
  bool enable_chunked_prefill = true;
  bool record_steps = true;                   ///< steps of one token per sequence as CUDA graphs
  std::shared_ptr<AdapterSet> adapters = {};  ///< that requests may name; nullptr: none
  bool logs_routes = false;                   ///< requests may ask which experts their tokens had; no effect on dense models
  DraftOptions drafts = {};                   ///< speculative decoding
  nn::WeightsPtr draft_model = {};            ///< draws the drafts, with the same vocabulary; nullptr: they are looked up
  std::uint64_t seed = 0;                     ///< for requests without one
  int num_threads = 0;
  std::shared_ptr<StepTimes> times = {};  ///< if there, steps are timed while it is on
};

/// New tokens of one request. `delta` holds only what is new since the last event except at the end, where finish_reason,
/// usage counts and prompt log-probabilities are set. Exactly one event with finish_reason != kNone ends each request.
struct StepEvent {
  RequestId id;
  wire::GenerateOutput delta;
};
/// Called on the engine's thread; must not block (post to an executor or push to a queue). The event is reused: copy what
/// is to be kept. It may call submit, cancel and stop, which take effect before the next step, or, on a GPU and without stop strings,
/// after the two steps that are enqueued already. An exception drops the request.
using EventSink = std::function<void(const StepEvent&)>;

/// What the engine proves after a weight update: nn::checksum(...).combined of the weights now in use, and nn::probe_logprobs on
/// nn::probe_prompt.
using wire::WeightProof;

struct EngineStats {
  std::int64_t num_running = 0, num_waiting = 0, num_preemptions = 0;
  std::int64_t num_prompt_tokens = 0, num_generation_tokens = 0;
  std::int64_t num_prefix_queries_tokens = 0, num_prefix_hit_tokens = 0;
  std::int64_t num_blocks_total = 0, num_blocks_used = 0;
  std::int64_t num_host_hit_tokens = 0;                              ///< of num_prefix_hit_tokens those that were not on the device
  std::int64_t num_disk_hit_tokens = 0;                              ///< of num_host_hit_tokens those that were in files alone
  std::int64_t num_host_blocks_total = 0, num_host_blocks_used = 0;  ///< in host memory; used: those that can be found
  std::int64_t num_blocks_saved = 0, num_blocks_restored = 0;        ///< copied to host memory and back
  std::int64_t num_disk_blocks_total = 0, num_disk_blocks_used = 0;  ///< in files; used: those that can be found
  DiskStats disk;                                                    ///< of these files
  std::int64_t num_finished_stop = 0, num_finished_length = 0, num_finished_abort = 0;
  /// Steps by their tokens, of prompts and output together: entry i counts those with at most kStepTokenBounds[i] and more than the
  /// bound before, the last entry the rest.
  static constexpr std::array<std::int64_t, 13> kStepTokenBounds{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
  std::array<std::int64_t, kStepTokenBounds.size() + 1> num_steps_by_tokens{};
  std::int64_t num_step_tokens = 0;
  std::int64_t max_draft_tokens = 0;                           ///< of a sequence in a step (DraftOptions::num_tokens)
  std::int64_t num_drafts = 0;                                 ///< rows of steps that had draft tokens
  std::int64_t num_draft_tokens = 0, num_accepted_tokens = 0;  ///< of these rows; accepted: those that were drawn
  std::int64_t block_size = 0;
  std::int64_t max_num_seqs = 0, max_model_len = 0;
  bool is_paused = false;
  int num_failures_in_a_row = 0;  ///< steps that failed since the last one that did not
  PolicyVersion version;
};

class EngineCore;

/// Continuous batching over one model on one device, or on those that share its layers (Weights::others): a thread that plans a step, runs
/// it, and reports tokens. Calls of other threads are queued and carried out between steps. All public methods may be called from any
/// thread.
class Engine {
 public:
  Engine(std::shared_ptr<DeviceRuntime> runtime, EngineOptions options, nn::WeightsPtr weights);
  /// Over a core that was made already, for other runners. `options` have the limits of requests.
  Engine(EngineOptions options, nn::ModelConfig config, std::unique_ptr<EngineCore> core);
  ~Engine();
  const EngineOptions& options() const noexcept { return options_; }
  const nn::ModelConfig& model_config() const noexcept { return config_; }

  /// Queues a request. Throws Error{kOverlong} with the canonical text if the prompt alone does not fit,
  /// {kInvalidArgument} naming a bad field, {kNotFound} naming an unknown adapter, {kOverloaded} if the queue is full, {kUnavailable}
  /// after shutdown.
  /// `adapter`: name of the one that computes it; empty: the model as it is.
  RequestId submit(wire::GenerateRequest request, EventSink sink, const std::string& adapter = {});
  /// Ends a request early with kAbort (no error if it has ended already).
  void cancel(RequestId id);
  /// Ends a running request as "stop" because its text has reached a stop string; the caller cuts off tokens that come after it. Its last
  /// event carries `stop_string` and no tokens. No error if it has ended already.
  void stop(RequestId id, std::string stop_string);

  /// Swaps the weights between two steps; requests in flight go on and later tokens carry the new version. New requests
  /// never hit prefix blocks of another version. Returns the proof computed with the weights the engine now holds.
  /// Error{kDeadline} if the engine thread did not answer in time.
  WeightProof update_weights(nn::WeightsPtr weights, std::chrono::milliseconds timeout);
  WeightProof proof(std::chrono::milliseconds timeout);
  nn::WeightsPtr weights() const;
  /// The adapters that requests may name.
  AdapterSet& adapters() noexcept { return *adapters_; }
  /// As proof(), of the model with that adapter. Error{kNotFound}.
  WeightProof proof_of(const std::string& adapter, std::chrono::milliseconds timeout);

  /// Makes a tenant of the requests that name the adapter `name` from now on, or changes one. Error{kInvalidArgument} for options out of
  /// range, {kOverloaded} if there are kMaxTenants.
  void set_tenant(const std::string& name, TenantOptions options);
  /// Later requests belong to nobody in particular; those there go on. Error{kNotFound}.
  void remove_tenant(const std::string& name);
  /// Cancels all requests of the tenant; how many there are. Error{kNotFound}.
  std::int64_t cancel_tenant(const std::string& name);
  /// Error{kDeadline}.
  std::vector<TenantStats> tenants(std::chrono::milliseconds timeout);
  static constexpr std::size_t kMaxTenants = 1024;

  /// Runs `work` on the engine's thread between two steps and waits for it, or with a `timeout` of 0 does not wait. What it refers to must
  /// live as long as it may run, which may be after Error{kDeadline}. Error{kUnavailable} after shutdown.
  void visit(const char* what, std::chrono::milliseconds timeout, std::function<void(EngineCore&)> work);

  /// Stops stepping; running requests are kept, new ones queue. Idempotent. Error{kDeadline} if the step in progress did
  /// not end in time; no other step follows it all the same.
  void pause(std::chrono::milliseconds timeout);
  void resume();
  void reset_prefix_cache();
  EngineStats stats() const;
  /// True while the engine thread lives and answered within `max_age`.
  bool is_alive(std::chrono::milliseconds max_age) const;
  /// Ends all requests with kAbort and joins the thread. Idempotent.
  void shutdown();

 private:
  using Command = std::function<void()>;
  /// One cancel and one stop per request are queued at most: the queue stays bounded.
  struct OpenRequest {
    std::string adapter = {};
    bool has_cancel = false, has_stop = false;
  };

  /// Has the engine's thread run `work` between two steps. Error{kDeadline} says what was waited for.
  template <typename T>
  T call(const char* what, std::chrono::milliseconds timeout, std::function<T()> work);
  void run();
  /// False when it is time to end.
  bool wait_for_work();
  /// Steps that failed in a row.
  int publish();
  void fail_engine(const std::string& reason);

  const EngineOptions options_;
  const nn::ModelConfig config_;
  const std::unique_ptr<EngineCore> core_;  ///< engine thread only
  const std::shared_ptr<AdapterSet> adapters_;
  std::deque<Command> batch_;  ///< engine thread only: commands taken from commands_

  mutable std::mutex mutex_;  ///< guards the fields marked so; never held during a step
  std::condition_variable wake_;
  std::deque<Command> commands_;                                              ///< guarded
  std::map<std::string, TenantOptions, std::less<>> tenants_;                 ///< guarded; as the commands asked for them
  std::unordered_map<RequestId, OpenRequest> open_;                           ///< guarded
  std::int64_t num_unseen_ = 0;                                               ///< guarded; submitted, and their command has not run
  std::uint64_t num_requests_ = 0;                                            ///< guarded
  bool is_stopping_ = false, is_paused_ = false, wants_cache_reset_ = false;  ///< guarded
  bool has_rule_news_ = false;                                                ///< guarded; a token rule knows more than at the last step
  std::string failure_;                                                       ///< guarded; why the engine gave up
  EngineStats stats_;                                                         ///< guarded
  nn::WeightsPtr weights_;                                                    ///< guarded

  std::atomic<std::int64_t> busy_since_ns_{0};  ///< steady clock; 0 while the thread waits for work
  std::atomic<bool> is_running_{true};
  /// How token rules, which may outlive the engine, reach it.
  struct RuleBell;
  std::shared_ptr<RuleBell> rule_bell_;
  std::mutex join_mutex_;
  std::thread thread_;
};

}  // namespace prl::engine
