#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "trainer/rl_trainer.hpp"

namespace prl::trainer {

/// What a run of a set is made of.
struct SharedRun {
  std::string name;
  double weight = 1;  ///< share of the device among the runs that have samples
  std::unique_ptr<Policy> policy;
  std::unique_ptr<monitor::Monitor> monitor;
  std::shared_ptr<weights::WeightChannel> channel;
  RlRunOptions options;
  ReceiverFactory make_receiver;
  std::function<bool()> is_there;  ///< false once its folder was taken away: it ends, and nothing is written any more; may be empty
};

/// A run as it is now.
struct RunView {
  std::string name;
  std::int64_t slot = 0;
  std::int64_t step = 0;
  std::int64_t total_tokens = 0;  ///< of the whole run
  double weight = 1;
  bool is_paused = false;
};

/// How a run of a set ended.
struct RunEnd {
  TrainRunResult result;
  std::optional<Error> error;  ///< of this run alone
  bool is_gone = false;        ///< its folder was taken away
};

/// Runs that train adapters of one base model, a step of one of them at a time. Each takes its own steps over its own batches: its weights
/// are the bits that it would have alone on one rank, whoever comes, goes or fails beside it. One thread.
///
/// Ranks    every rank has a set. That of rank 0 decides and tells the others, which follow(). An error of a run at any rank ends the run
///          at all of them; one that only some ranks can have met ends the group.
class RunSet {
 public:
  /// `ranks` is borrowed, the world of the runs' meshes; nullptr: this one alone.
  explicit RunSet(std::int64_t num_slots, comm::Communicator* ranks = nullptr);
  ~RunSet();

  bool has_room() const noexcept { return num_runs() < num_slots_; }
  std::int64_t num_runs() const noexcept;
  bool has(const std::string& name) const noexcept;
  /// Takes the smallest free slot, resumes the run and publishes the version it starts with. Returns the slot. What RlRun::begin throws;
  /// the slot is free then. The other ranks make theirs from `description`.
  std::int64_t add(SharedRun run, std::string_view description = {});

  struct Stepped {
    std::string name;
    std::optional<RunEnd> end;  ///< its last step is done and saved, its samples have ended, or it failed: it has left its slot
  };
  /// Steps the run with samples that has had the least of its share so far, counted in trained tokens over weight; one that had no samples
  /// begins where the others are. nullopt: none has samples. An error of a run or of its files is its end alone; others are thrown.
  std::optional<Stepped> step();

  using MakeRun = std::function<SharedRun(std::string_view description)>;
  /// At a rank other than 0: does the next thing that rank 0 tells, which is this rank's part of a run. Rank 0 learns of `wants_stop`.
  /// False after dismiss(). PeerLost.
  bool follow(const MakeRun& make, bool wants_stop);
  /// At rank 0: whether a rank wanted to stop when it was last spoken to.
  bool is_stop_wanted() const noexcept { return is_stop_wanted_; }
  /// At rank 0, last: the others need not follow any more.
  void dismiss();

  /// Error{kNotFound}.
  void set_weight(const std::string& name, double weight);
  /// A paused run keeps its slot and is not stepped.
  void set_paused(const std::string& name, bool is_paused);
  /// Ends a run between two steps. With `saves`, what is not saved yet is saved if its folder is there.
  RunEnd end(const std::string& name, bool saves = true);
  /// In the order of slots.
  std::vector<RunView> views() const;
  RunView view_of(const std::string& name) const;

 private:
  struct Member;
  enum class Order : char { kWait, kAdd, kStep, kLeave, kDismiss };
  void tell(Order order, std::int64_t slot = 0, bool saves = false, std::string_view text = {});
  /// Waits, or works, among ranks: what is lost there ends the saves of all runs that wait for it.
  template <typename Work>
  auto among_ranks(const Work& work);
  /// Of work on a run that all ranks do: its error. Throws what ends them all.
  std::optional<Error> error_of_all(const std::function<void()>& work);
  /// All ranks call it, each with its run or with what makes it.
  std::int64_t admit(const std::function<SharedRun()>& make);
  std::optional<Error> finish(Member& member, bool saves, TrainRunResult& result);
  Member& find(const std::string& name) const;
  /// The member to step next; nullptr if there is none, or if one has `left` meanwhile.
  Member* next_ready(std::optional<Stepped>& left);
  Stepped leave(Member& member, std::optional<Error> error, bool saves = true);

  const std::int64_t num_slots_;
  std::vector<std::unique_ptr<Member>> slots_;  ///< empty ones are nullptr
  double virtual_time_ = 0;                     ///< the share of the run that was stepped last, at its start
  comm::Communicator* const ranks_;             ///< nullptr: one
  std::chrono::steady_clock::time_point told_{};
  bool is_stop_wanted_ = false;
};

}  // namespace prl::trainer
